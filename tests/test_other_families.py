"""Other families as stages: they learn what their losses say, resume and chain as EAGLE-3 does; a cell says what was decoded."""

import json
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from stages import benchmark, extract_hiddens, import_draft, init_draft, prepare_prompts, train_draft
from stages.cells.table import TableLine
from stages.draft import checkpoint
from stages.families import eagle, medusa
from stages.families.eagle3 import checkpoint as eagle3_checkpoint
from stages.families.family import get_files
from stages.hidden_states import format, reader
from stages.params.families import FAMILIES
from stages.target import manifest
from stages.training import ttt
from tests.conftest import edit_params
from tests.sampled_rows import sampled_row, write_sampled
from tests.talking import WORKLOADS
from tests.torch_cells import read_line

ROWS = {"train": 10, "eval": 3, "eval_t": 0}
CHECKPOINTS = {
    "eagle1": {"from": "e000", "epochs": 1, "method": "eagle"},
    "eagle3ep": {"from": "eagle1", "epochs": 2, "method": "eagle"},
    "heads1": {"from": "e000", "epochs": 1, "method": "medusa", "heads": 3},
    "heads3": {"from": "heads1", "epochs": 2, "method": "medusa", "heads": 3},
    "peagle1": {"from": "e000", "epochs": 1, "method": "peagle", "layers": 2},
    "peagle3": {"from": "peagle1", "epochs": 2, "method": "peagle", "layers": 2},
    "e003": {"from": "e000", "epochs": 1},
}
ROOM = 12
CELLS = {  # checkpoint and shape
    "eagle3": ("e003", "t3_2_6"), "eagle2": ("eagle3ep", "t3_2_6"), "eagle": ("eagle3ep", "s3_8"),
    "medusa": ("heads3", "s3_8"), "lookahead": ("ahead", "l3_3_3"), "ngram": ("lookup", "n2_1_4"),
    "suffix": ("suffixes", "x8_4"), "peagle": ("peagle3", "t3_1_4"),
}  # fmt: skip
BUILTIN = {
    "ahead": {"model": "builtin/lookahead"},
    "lookup": {"model": "builtin/ngram"},
    "suffixes": {"model": "builtin/suffix"},
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def trained_project(shared_talking_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with every checkpoint of CHECKPOINTS, on a tiny random target; we stand in it."""
    project = tmp_path_factory.mktemp("trained")
    for name in ("artifacts", "tiny"):
        (project / name).symlink_to(shared_talking_project / name)
    (project / "params.yaml").write_text((shared_talking_project / "params.yaml").read_text())
    (project / "data/prompt_sets").mkdir(parents=True)
    edit_params(project, {
        "extract_hiddens": {"max_length": 60},
        "init_draft": {"draft_vocab_size": 90},
        "train_draft": {"checkpoints": CHECKPOINTS, "ttt_steps": 4, "batch_tokens": 200, "warmup_steps": 0},
        "check_overfit": {"min_tau": 1.0},
        "replay_trees": {"checkpoints": ["e003"]},
        "benchmark_served": {"checkpoints": ["e003"]},
        "benchmark": {
            "workloads": {"eval": {**WORKLOADS["eval"], "num_prompts": 3, "max_new_tokens": ROOM}},
            "torch_workloads": ["eval"], "checkpoints": list(dict.fromkeys(name for name, _ in CELLS.values())),
            "trees": list(dict.fromkeys(shape for _, shape in CELLS.values())),
        },
        "import_draft": {"checkpoints": BUILTIN},
    })  # fmt: skip
    with chdir(project):
        vocabulary = manifest.read_manifest().vocab_size
        draw = torch.Generator().manual_seed(0)
        for split, count in ROWS.items():
            rows = []
            for n in range(count):
                prompt, answer = (
                    torch.randint(3, most, (length,), generator=draw).tolist()
                    for most, length in ((vocabulary, 9), (40, 20 + n))
                )
                rows.append(sampled_row(f"{split}{n}.0", n, prompt, answer))
            write_sampled(split, rows)
        Path("results").mkdir()
        extract_hiddens.main()
        init_draft.main()
        for name in CHECKPOINTS:
            train_draft.main(name)
        for name in BUILTIN:
            import_draft.main(name)
        prepare_prompts.main("eval")
        yield project


@pytest.fixture
def tables(trained_project: Path) -> tuple[torch.Tensor, torch.Tensor]:
    return manifest.read_embedding_and_head(manifest.read_manifest())


def loaded(name: str, method: str, head: torch.Tensor) -> Any:
    files, target = get_files(FAMILIES[method]), manifest.read_manifest()
    return files.read(checkpoint.locate_checkpoint(name), "a test", target, head).module


def rows() -> list[format.HiddenStatesRow]:
    return list(reader.read_rows(Path("data/hiddens/train")))


def layer(eagle: Any, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """EAGLE's layer over a row [T, H], as its authors' LlamaDecoderLayer without its first norm."""
    c, attention = eagle.config, eagle.midlayer.self_attn
    x = eagle.fc(torch.cat([embeds, hidden], dim=-1))
    cos, sin = eagle.compute_rope(torch.arange(len(x)))  # [T, 1, E/2]
    q, k, v = (getattr(attention, f"{n}_proj")(x).unflatten(-1, (-1, c.head_dim)) for n in "qkv")

    def turned(y: torch.Tensor) -> torch.Tensor:
        low, high = y.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).transpose(0, 1)

    out = F.scaled_dot_product_attention(
        turned(q), turned(k), v.transpose(0, 1), is_causal=True, enable_gqa=True
    )  # fmt: skip
    x = x + attention.o_proj(out.transpose(0, 1).flatten(1))
    return x + eagle.midlayer.mlp(eagle.midlayer.post_attention_layernorm(x))


def cross_entropy(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    return -(teacher.softmax(-1) * logits.log_softmax(-1)).sum(-1)


def test_eagles_loss_is_smooth_l1_and_a_tenth_of_the_soft_cross_entropy(tables: Any) -> None:
    embedding, head = tables
    drafted = loaded("eagle1", "eagle", head)
    pack = ttt.TrainingPack.from_rows(rows(), 1, "aligned")
    found = eagle.compute_loss(drafted, pack, embedding, head, ttt.TrainingObjective(1), None)
    near, soft, hits, supervised = 0.0, 0.0, 0, 0
    for row in rows():
        ids = row.ids.long()
        guessed = layer(drafted, embedding[ids[1:]], row.last[:-1])  # of position p, for p + 1
        for p in range(len(ids) - 2):
            if row.mask[p + 2] and row.mask[p + 1]:
                near += F.smooth_l1_loss(guessed[p], row.last[p + 1]).item()
                logits, teacher = guessed[p] @ head.T, row.last[p + 1] @ head.T
                soft += cross_entropy(logits, teacher).item()
                hits += int(logits.argmax() == teacher.argmax())
                supervised += 1
    assert supervised == pack.supervised_per_step[0] > 100
    assert found.total_loss.item() == pytest.approx((near + 0.1 * soft) / supervised, rel=1e-4)
    assert float(found.loss_per_step[0]) == pytest.approx(near + 0.1 * soft, rel=1e-4)
    assert int(found.argmax_matches.sum()) == hits
    found.total_loss.backward()
    assert all(w.grad is not None and w.grad.abs().sum() > 0 for w in drafted.parameters())


def test_medusas_loss_is_each_heads_cross_entropy_weighed_by_decay(tables: Any) -> None:
    """Over the draft's vocabulary, where the target's likeliest token is in it, as EAGLE-3 learns it."""
    embedding, head = tables
    heads = loaded("heads1", "medusa", head)
    draft_vocab = heads.t2d.nonzero()[:, 0]
    pack = ttt.TrainingPack.from_rows(rows(), 3, "aligned")
    found = medusa.compute_loss(heads, pack, embedding, head, ttt.TrainingObjective(3, 0.8), None)
    losses, counts = torch.zeros(3), torch.zeros(3)
    for row in rows():
        for p in range(len(row.ids)):
            for k in range(3):
                span = row.mask[p + 1 : p + 3 + k]
                if p + 2 + k < len(row.ids) and bool(span.all()):
                    counts[k] += 1
                    teacher = row.last[p + 1 + k] @ head.T
                    h = row.last[p]
                    logits = heads.outs[k](h + F.silu(heads.blocks[k](h)))
                    if heads.t2d[teacher.argmax()]:
                        losses[k] += cross_entropy(logits, teacher[draft_vocab]).item()
    assert counts.tolist() == pack.supervised_per_step and counts.min() > 100
    assert found.loss_per_step.tolist() == pytest.approx(losses.tolist(), rel=1e-4)
    means = losses / counts
    assert found.total_loss.item() == pytest.approx(sum(0.8**k * float(x) for k, x in enumerate(means)), rel=1e-4)
    found.total_loss.backward()
    assert all(w.grad is not None and w.grad.abs().sum() > 0 for w in heads.parameters())


def test_rank_accuracies_are_shares_of_the_rows_own_tokens(tables: Any) -> None:
    embedding, head = tables
    for name, method in (("eagle1", "eagle"), ("heads1", "medusa")):
        config = json.loads(Path(f"drafts/{name}/draft/config.json").read_text())
        module, accuracy = loaded(name, method, head), config["rank_accuracy"]
        assert len(accuracy) == (4 if method == "eagle" else 3) and {len(ranks) for ranks in accuracy} == {10}
        for k, ranks in enumerate(accuracy):
            hits, num_tokens = torch.zeros(10), 0
            for row in rows():
                ids = row.ids.long()
                for p in range(len(ids) - 2 - k):
                    if not bool(row.mask[p + 1 : p + 3 + k].all()):
                        continue
                    if method == "medusa":
                        state = row.last[p] + F.silu(module.blocks[k](row.last[p]))
                        best = module.t2d.nonzero()[:, 0][(module.outs[k](state)).topk(10).indices]
                    else:  # its own guesses of the hidden states after p, one after the other
                        hidden = row.last[: p + 1]
                        for n in range(k + 1):
                            state = layer(module, embedding[ids[1 : p + 2 + n]], hidden)[-1]
                            hidden = torch.cat([hidden, state[None]])
                        best = (state @ head.T).topk(10).indices
                    hits += (best == ids[p + 2 + k]).float()
                    num_tokens += 1
            assert num_tokens > 50
            assert ranks == pytest.approx((hits / num_tokens).tolist(), abs=1.5 / num_tokens), (name, k)


def measure(name: str) -> TableLine:
    benchmark.main("eval", *CELLS[name])
    return read_line("eval", *CELLS[name])


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_says_what_was_decoded(trained_project: Path, name: str) -> None:
    line = measure(name)
    row, requests, found = line.row, line.point.requests, line.cell
    assert row.identical_share == 1.0 and len(requests) == 3
    cycles, accepted = (sum(request[k] for request in requests) for k in ("cycles", "accepted"))
    assert row.tau == (cycles + accepted) / cycles
    histogram = line.point.acceptance.histogram
    assert sum(n * count for n, count in enumerate(histogram)) == accepted and sum(histogram) == cycles
    assert row.accept_rate == pytest.approx((row.tau - 1) / row.num_steps)
    for request, plain in zip(requests, line.baseline_point.requests, strict=True):
        assert request.output_tokens == plain.output_tokens <= ROOM
        assert request.cycles + request.accepted in (request.output_tokens - 1, request.output_tokens)  # no bonus
    weights = _tensors(CELLS[name][0])
    sizes = [t.numel() for t in weights.values() if t.is_floating_point()]
    assert found.draft.draft_parameters == sum(sizes)
    assert found.draft.weights_bytes == sum(t.nbytes for t in weights.values())
    assert found.draft.state_bytes > 0


def _tensors(name: str) -> dict[str, torch.Tensor]:
    path = checkpoint.locate_checkpoint(name) / "draft/model.safetensors"
    return checkpoint.read_tensors(path, "a test") if path.exists() else {}


# --- bad input ------------------------------------------------------------------------------------------------------


def test_a_misshapen_checkpoint_is_named_tensor_by_tensor(trained_project: Path, tables: Any) -> None:
    files = get_files(FAMILIES["medusa"])
    config, tensors = json.loads(Path("drafts/heads1/draft/config.json").read_text()), _tensors("heads1")
    cut = {**tensors, "outs.1.weight": tensors["outs.1.weight"][:-1]}
    assert "outs.1.weight is (89, 128), expected (90, 128)" in files.find_problem(config, cut)
    lacking = {k: t for k, t in tensors.items() if k != "blocks.0.bias"}
    assert "missing tensors ['blocks.0.bias']" in files.find_problem(config, lacking)
    assert "lacks 'heads'" in files.find_problem({k: v for k, v in config.items() if k != "heads"}, tensors)
    with pytest.raises(ValueError, match="is no Medusa draft"):
        files.read(checkpoint.locate_checkpoint("eagle1"), "train_draft@eagle1", manifest.read_manifest(), tables[1])
    with pytest.raises(ValueError, match="is no EAGLE-3 draft"):
        eagle3_checkpoint.ROOT_FILES.read_checked(checkpoint.locate_checkpoint("heads1"), "train_draft@heads1")
