"""A published draft: imported and measured without training, or trained on from; end to end on the embedded target."""

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from stages import init_draft
from stages.draft.eagle3 import DraftConfig, Eagle3Draft
from stages.families.eagle3 import checkpoint as eagle3_checkpoint
from stages.hidden_states import reader
from stages.params.tree_shape import TreeShape
from stages.replay.replay import ReplayBatch, replay_answers
from stages.target import loading, manifest
from tests.built_engines import build_engine
from tests.conftest import edit_params, run_graph
from tests.draft.slow_draft import OPTIONS

pytestmark = pytest.mark.usefixtures("forked_stages")
IMPORTED = {"theirs": {"model": "from_others", "revision": None, "rope_theta": None}}


def run(project: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", *words], cwd=project, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def project(small_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small run, and e003 as another trainer would have published it: vLLM's names, in two shards."""
    root = tmp_path_factory.mktemp("import") / "project"
    shutil.copytree(small_run, root, symlinks=True)
    draft, published = root / "drafts/e003/draft", root / "from_others"
    published.mkdir()
    config = json.loads((draft / "config.json").read_text())
    del config["rope_parameters"]
    (published / "config.json").write_text(json.dumps(config))
    tensors = {n.replace("midlayer.", "layers.0."): t for n, t in load_file(draft / "model.safetensors").items()}
    for i, half in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        save_file({n: tensors[n] for n in half}, published / f"model-{i}.safetensors")
    return root


def test_a_graph_that_trains_nothing_has_no_initial_draft(project: Path, tmp_path: Path) -> None:
    """And the imported draft is replayed and decoded like the checkpoint it was.

    Bug: recipes of published drafts sampled one training row, made e000 and passed a gate of min_tau 1.0 for nothing.
    """
    root = tmp_path / "project"
    shutil.copytree(project, root, symlinks=True)
    shutil.rmtree(root / "drafts")
    for name in ("e000", "e000.overfit", "e001", "e003", "straight"):
        (root / f"results/train/{name}.json").unlink()
    edit_params(root, {"sample_target": {"train_rows": 0}, "init_draft": {"checkpoints": []}})
    edit_params(root, {"train_draft": {"checkpoints": {}}})
    edit_params(root, {"import_draft": {"checkpoints": IMPORTED}})
    mine = {"checkpoints": ["theirs"]}
    edit_params(root, {"replay_trees": mine, "benchmark": {**mine, "trees": ["t8_2_16"]}, "benchmark_served": mine})
    edit_params(root, {"time_cycles": mine})
    expected = (root / "results/replay/e003.csv").read_text()
    done = run_graph(root, "report")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "init_draft" not in done.stdout and "check_overfit" not in done.stdout
    assert "checkpoint theirs" in done.stdout and not (root / "drafts/e000").exists()
    rows = [list(csv.reader(text.split())) for text in ((root / "results/replay/theirs.csv").read_text(), expected)]
    assert [row[1:] for row in rows[0]] == [row[1:] for row in rows[1]]
    cells = [
        json.loads((folder / f"results/cells/torch/eval-{name}-t8_2_16.json").read_text())
        for folder, name in ((root, "theirs"), (project, "e003"))
    ]
    theirs, ours = (cell["points"][0]["acceptance"]["histogram"] for cell in cells)
    assert theirs == ours
    page = (root / "results/report/index.html").read_text()
    assert re.search("<th[^>]*>theirs", page) and "from_others, imported" in page and "Trained on one row" not in page
    assert json.loads((root / "results/sample_report.json").read_text())["rows_out"] == 12  # eval and eval_t


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fc_norm": True}, "init_draft: fc_norm is True while from"),
        ({"from": "drafts/e003"}, "drafts/e003/config.json not found; expected a draft's folder"),
    ],
)
def test_a_warm_start_that_can_not_be(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict, message: str
) -> None:
    root = tmp_path / "project"
    shutil.copytree(project, root, symlinks=True, ignore=shutil.ignore_patterns(".dvc", ".git"))
    monkeypatch.chdir(root)
    edit_params(root, {"init_draft": {"from": "from_others", **changes}})
    with pytest.raises(ValueError, match=re.escape(message)):
        init_draft.main()


def test_a_config_of_ones_own_and_the_options(project: Path, tmp_path: Path) -> None:
    """Requested options are in config.json, and the draft has their weights."""
    root = tmp_path / "project"
    shutil.copytree(project, root, symlinks=True)
    (root / "draft_configs").mkdir(exist_ok=True)
    mine = {
        "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
        "rope_theta": 20000,
    }  # fmt: skip
    (root / "draft_configs/mine.json").write_text(json.dumps(mine | {"model_type": "llama", "use_cache": True}))
    options = {
        "draft_config_path": "draft_configs/mine.json",
        "fc_norm": True,
        "norm_output": True,
        "sliding_window": 16,
    }
    edit_params(root, {"init_draft": options})
    done = run(root, "stages.init_draft")
    assert done.returncode == 0, done.stderr
    config, tensors = eagle3_checkpoint.ROOT_FILES.read_checked(root / "drafts/e000", "init_draft")
    assert {key: config[key] for key in mine} == mine
    assert config["rope_parameters"]["rope_theta"] == 20000 and config["rope_scaling"] is None
    assert config["fc_norm"] and config["norm_output"] and config["sliding_window"] == 16
    assert tensors["midlayer.self_attn.k_proj.weight"].shape[0] == 16 and "fc_norm.2.weight" in tensors
    assert run(root, "stages.train_draft", "e001").returncode == 0
    assert eagle3_checkpoint.ROOT_FILES.read_checked(root / "drafts/e001", "train_draft@e001")[0] == config
    done = run(root, "stages.replay_trees", "e001")
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def model(small_run: Path) -> PreTrainedModel:
    return loading.load_target(str(small_run / "artifacts/target"), "float32", "cpu")


@pytest.mark.parametrize("options", [o for o in OPTIONS if o != "none"])
def test_decoding_with_any_option_is_lossless_and_is_what_replay_counts(
    small_run: Path, model: PreTrainedModel, one_thread: None, options: str
) -> None:
    """A random draft over the target's whole vocabulary, its state near the trained one's, so that some is accepted."""
    chosen = OPTIONS[options] | ({"sliding_window": 8} if "sliding_window" in OPTIONS[options] else {})
    made = manifest.read_manifest(small_run / "artifacts/target")
    config, tensors = eagle3_checkpoint.ROOT_FILES.read_checked(small_run / "drafts/e003", "train_draft@e003")
    draft = Eagle3Draft(DraftConfig(**{**vars(DraftConfig.from_json(config)), **chosen})).requires_grad_(False)
    missing = draft.load_state_dict(tensors, strict=False)
    assert not missing.unexpected_keys and all("norm" in name for name in missing.missing_keys)
    engine = build_engine(model, made.eos_token_ids, made.feature_layers, draft)
    for row in list(reader.read_rows(small_run / "data/hiddens/eval"))[:2]:
        prompt, answer = row.ids[: row.prompt_length].tolist(), row.ids[row.prompt_length :].tolist()
        steps = list(engine.decode_speculative(prompt, len(answer), TreeShape(6, 2, 12)))
        assert [t for step in steps for t in step.tokens] == answer  # plain decoding's
        answers = ReplayBatch.collate([row], torch.device("cpu"))
        accepted, cycles, *_ = replay_answers(draft, engine.embedding, answers, [TreeShape(6, 2, 12)])
        assert (accepted.item(), cycles.item()) == (sum(s.num_accepted for s in steps[1:]), len(steps) - 1)
