"""init_draft: a new draft's head, and hidden states whose token ids are corrupt."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stages import init_draft
from stages.hidden_states import format, writer
from stages.target import manifest

V = 40


@pytest.mark.parametrize("wrong", [-1, V])
def test_token_ids_that_the_target_has_not_are_named_with_their_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    """Bug: they ended init_draft by a RuntimeError of bincount, or of tensors of unequal sizes; in a prompt by nothing."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for number in range(3):
        ids = torch.arange(6, dtype=torch.int32)
        ids[number] = V - 1 if number < 2 else wrong
        states = torch.zeros(6, 4)
        rows.append(
            format.HiddenStatesRow(f"row{number}.0", ids, ids > 2, 3, "stop", features=states.repeat(1, 3), last=states)
        )
    folder = Path("data/hiddens/train")
    folder.mkdir(parents=True)
    writer.write_rows(folder, rows[:2], torch.float32, 1 << 20)
    assert init_draft._count_tokens("train", V).sum() == sum(int(row.mask.sum()) for row in rows[:2])
    writer.write_rows(folder, rows, torch.float32, 1 << 20)
    expected = (
        rf"^data/hiddens/train/\S+\.safetensors: row row2\.0 has 1 token ids that the target has not, the first of them "
        rf"{wrong}; expected 0 to 39; run: dvc repro -f -s extract_hiddens"
    )
    with pytest.raises(ValueError, match=expected):
        init_draft._count_tokens("train", V)


def test_a_new_draft_begins_with_the_targets_head(small_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(small_run)
    made = load_file("drafts/e000/draft/model.safetensors")
    _, head = manifest.read_embedding_and_head(manifest.read_manifest())
    assert torch.equal(made["lm_head.weight"], head[made.get("t2d", torch.ones(len(head)).bool())])
