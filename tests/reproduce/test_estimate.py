"""Estimates against what models really have, what was measured, and a slow count."""

import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import recipes_page
from pipeline import recipes
from stages.hidden_states import format
from stages.params import schema
from stages.params.draft_sections import TrainDraft
from stages.params.units import format_bytes
from stages.reproduce import data_size, estimate, target_size
from stages.telemetry.stage_log import StageRun
from tests.conftest import ROOT

PRINTED = {  # model cards; Qwen3-VL's counts its vision tower
    "angelslim-qwen3-1.7b": 1.7, "angelslim-qwen3-4b": 4.0, "angelslim-qwen3-8b": 8.2, "angelslim-qwen3-14b": 14.8,
    "angelslim-qwen3-32b": 32.8, "angelslim-qwen3-30b-a3b": 30.5, "angelslim-hunyuan-1.8b": 1.8, "qwen3-vl-2b-weather": 2.1,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("home")


@cache
def shape_of(name: str) -> tuple[schema.Params, target_size.TargetSize]:
    """Return what is the same in every `home`, and frozen."""
    with recipes.merge_recipe(name) as (file, _):
        p = schema.load_params(file)
    return p, target_size.read_target_size(p)


@pytest.mark.parametrize("name", PRINTED)
def test_parameters_are_those_of_the_model_card(name: str) -> None:
    _, shape = shape_of(name)
    assert round(shape.parameters / 1e9, 1) == PRINTED[name]
    assert (shape.active < shape.parameters) == shape.mixture == ("a3b" in name)


def test_a_mixture_is_active_where_a_token_is_sent() -> None:
    """Its card says 3.3e9 of 30.5e9; experts are counted by hand: 48 layers, 128 of 3 * 2048 * 768, 8 of them met."""
    _, shape = shape_of("qwen3-coder-30b-a3b")
    experts = 48 * 128 * 3 * 2048 * 768
    assert shape.active == shape.parameters - experts + experts * 8 // 128
    assert shape.active == pytest.approx(3.3e9, rel=0.02)
    assert shape.kv_bytes("float16") == 96 * 1024, "the 96 KiB that docs/published.md reckons with"


def test_training_and_extraction_take_the_hours_that_were_measured() -> None:
    """docs/results/2026-11-21-h200-training.md, Qwen3-8B's shape: 34,250 and 29,595 tokens/s, rows of 2,048."""
    p, shape = shape_of("angelslim-qwen3-8b")
    draft = estimate.init_draft.infer_config(p, shape.manifest)
    # That draft's head was trained too, which takes two more FLOP of each of its weights in each step.
    flop = estimate.compute_train_flop(shape.manifest, draft, 7) + 2 * 7 * 32_000 * 4096
    assert flop == pytest.approx(16.46e9, rel=0.03)
    assert estimate.TRAINING_SHARES["eagle3"] * estimate.PEAK_FLOPS / flop == pytest.approx(34_250, rel=0.03)
    flop = estimate.compute_target_flop(shape, 2048)
    assert flop == pytest.approx(14.5e9, rel=0.01)
    assert estimate.EXTRACTING_SHARES[False] * estimate.PEAK_FLOPS / flop == pytest.approx(29_595, rel=0.01)


def test_hidden_states_are_counted_by_row_and_online_ones_are_not() -> None:
    about, _ = schema.read_recipe(Path("recipes/qwen3-vl-2b-weather.yaml"))
    assert about is not None
    p, _ = shape_of("qwen3-vl-2b-weather")
    kept = estimate.estimate_run(p, about.train_rows, about.row_tokens)
    size = format.count_token_bytes(3, 2048, torch.bfloat16, True) + format.count_visual_bytes(2048, torch.bfloat16)
    online = p.model_copy(update={"extract_hiddens": p.extract_hiddens.model_copy(update={"online": True})})
    assert kept.disk_bytes - estimate.estimate_run(
        online, about.train_rows, about.row_tokens
    ).disk_bytes == pytest.approx(220 * 512 * size)


def test_the_page_of_recipes_is_what_its_command_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # where shipped drafts are
    committed = (ROOT / recipes_page.PAGE).read_text(encoding="utf-8")
    assert committed == recipes_page.render_page(), "run: python -m benchmarks.recipes_page"


@pytest.mark.parametrize(
    ("in_process", "at_once", "measured"), [(True, 1, 4.574), (True, 16, 5.18), (True, 64, 6.84), (False, 1, 5.22)]
)
def test_steps_are_those_measured(in_process: bool, at_once: int, measured: float) -> None:
    """docs/results/2026-11-22-h200-one-engine.md and -engine.md: Qwen3-8B's shape, prompts of 512 tokens, answers of 64."""
    p, shape = shape_of("angelslim-qwen3-8b")
    found, slower = (
        estimate.estimate_step(in_process, p, shape, estimate.GPUS[gpu], at_once, 576) for gpu in ("h200", "h100")
    )
    assert found * 1e3 == pytest.approx(measured, rel=0.1)
    assert slower / found == pytest.approx(4.8 / 3.35)


def test_block_drafts_have_the_published_sizes_and_the_hours_of_a_count_by_hand() -> None:
    """DFlash and DSpark at Qwen3-8B's shape: 1.049e9 and 1.13e9 weights; blocks of 512 anchors in packs of 4,096 tokens."""
    h, mlp, v, layers = 4096, 12288, 151936, 5
    layer = 2 * h * 4096 + 2 * h * 1024 + 3 * h * mlp + 2 * h + 2 * 128  # q and o, k and v, MLP, norms
    dflash = layers * layer + 2 * h + 5 * h * h
    segments: dict[str, Any] = {
        "dflash6": {"from": "e000", "epochs": 6, "method": "dflash", "layers": 5, "block_size": 16, "anchors": 512},
        "dspark10": {
            "from": "e000", "epochs": 10, "method": "dspark", "layers": 5, "block_size": 7, "anchors": 512, "markov_rank": 256,
        },
    }  # fmt: skip
    p, _ = shape_of("train-qwen3-8b-1gpu")
    training = p.train_draft.model_dump(by_alias=True) | {"checkpoints": segments, "batch_tokens": 4096}
    updates = {
        "train_draft": TrainDraft.model_validate(training),
        "target": p.target.model_copy(update={"feature_layers": [2, 10, 18, 26, 34]}),
        "init_draft": p.init_draft.model_copy(update={"feature_layers": [2, 18, 34]}),
        "extract_hiddens": p.extract_hiddens.model_copy(update={"online": False}),
    }
    found = estimate.estimate_run(p.model_copy(update=updates), None, 1024)
    lines = dict(line.split(": ", 1) for line in found.lines)
    assert lines["draft of dflash6"].startswith("1.05e9 parameters (training holds ")
    dspark = dflash + 2 * v * 256 + 4353
    assert lines["checkpoints"].startswith(format_bytes((dflash + 2 * dspark) * 14))
    row, pair = 6 * (layers * (layer - 2 * h - 256)), 12 * layers * 4096
    block = 16 * row + 15 * 4 * v * h + 16 * (512 + 16) * pair
    context = 4 * 5 * h * h + 6 * layers * 2 * h * 1024
    tokens = 20_000 * 1024
    seconds = 6 * tokens * (512 / 4096 * block + context) / (0.540 * 989e12)
    assert lines["train_draft, dflash6"].startswith(f"{seconds / 3600:.2g} GPU-hours (6 epochs * ")


def test_every_layer_of_p_eagle_counts() -> None:
    """Bug: it counted as EAGLE-3's one, and drafts without weights as downloads."""
    p, shape = shape_of("angelslim-qwen3-8b")
    draft = estimate.init_draft.infer_config(p, shape.manifest)
    segment = {"from": "e000", "epochs": 1, "method": "peagle", "layers": 4}
    train = TrainDraft.model_validate({"checkpoints": {"p": segment}, "dtype": "bfloat16"})
    imported = type(p.import_draft).model_validate({"checkpoints": {"suffix": {"model": "builtin/suffix"}}})
    run = estimate._Run(
        p.model_copy(update={"train_draft": train, "import_draft": imported}), shape, draft, 1.0, 10, 1, 100
    )
    h, one = 4096, sum(estimate.count_draft_parameters(draft).values())
    layer = 2 * h * (32 + 8) * 128 + 3 * h * draft.intermediate_size + 2 * h  # q, o, k, v; MLP; norms
    assert run.count_parameters("p") == one + 3 * layer + 3 * h  # and mask_hidden
    run.add_disk()
    assert "import_draft" not in run.result.stages


def test_a_target_of_a_local_folder_is_read_from_its_own_config(tmp_path: Path) -> None:
    p, known = shape_of("angelslim-qwen3-1.7b")
    recorded = json.loads(Path("recipes/targets/Qwen3-1.7B.json").read_text())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text(json.dumps(recorded["config"]))
    own = p.model_copy(update={"target": p.target.model_copy(update={"model": str(tmp_path / "mine")})})
    found = target_size.read_target_size(own)
    assert found.parameters == known.parameters and found.recorded_from == "its own config.json"


def test_without_a_recipe_rows_are_those_of_the_data_here(tmp_path: Path) -> None:
    """Bug: rows counted at max_length and as many as asked for: 167 GiB where 15 were written, and none of 20,000 questions."""
    p, _ = shape_of("weather-tiny")
    raw = tmp_path / "questions.txt"
    raw.write_text("".join(f"What is the weather in town {n}?\n" for n in range(20_000)))
    sampling = p.sample_target.model_copy(update={"train_rows": None, "eval_rows": 200, "max_new_tokens": 90})
    fix = p.fix_data.model_copy(update={"raw": str(raw), "answers": "text", "tables": None, "eval_share": 0.1})
    hiddens = p.extract_hiddens.model_copy(update={"max_length": 4096})
    p = p.model_copy(update={"sample_target": sampling, "fix_data": fix, "extract_hiddens": hiddens})
    found, length = data_size.apply_data(p)
    assert (found.sample_target.train_rows, found.sample_target.eval_rows) == (18_000, 200)
    assert 90 + 6 <= length <= 90 + 30
    lines = estimate.estimate_run(found, None, length).lines
    assert any(line.startswith("hidden states: ") and f"{(18_000 + 400) * length:,} tokens" in line for line in lines)
    more = found.model_copy(update={"sample_target": sampling.model_copy(update={"train_rows": 50_000})})
    assert data_size.apply_data(more)[0].sample_target.train_rows == 18_000
    # Then what the stages have written counts: of this target, and of these files.
    Path("artifacts/target").mkdir(parents=True)
    Path("results").mkdir(exist_ok=True)
    Path("artifacts/target/target.json").write_text(json.dumps({"model": p.target.model}))
    for report, content in {
        "fix": {"rows_out": 1000, "files": {"questions.txt": {}}}, "sample": {"rows_out": 10, "tokens": {"train": 200}},
    }.items():  # fmt: skip
        Path(f"results/{report}_report.json").write_text(json.dumps(content))
    found, shorter = data_size.apply_data(p)
    assert found.sample_target.train_rows == 900 and shorter == length - 90 + 20
    Path("results/hiddens_report.json").write_text(json.dumps({"rows_out": 300, "tokens": 49255}))
    assert data_size.apply_data(p)[1] == 165
    other = p.model_copy(update={"target": p.target.model_copy(update={"model": "our/other"})})
    assert data_size.apply_data(other)[1] > 90


def test_times_on_a_cpu_are_those_of_this_machines_log() -> None:
    """Bug: on a CPU every time was a dash, though the log here had the rate of each stage."""
    p, _ = shape_of("weather-tiny")
    assert estimate.estimate_run(p, 100, 165).stages.get("sample_target") is None
    for path, content in {
        "artifacts/target/target.json": {"model": p.target.model},
        "results/sample_report.json": {"tokens": {"train": 800, "eval": 200}},
        "results/train/e003.json": {"epochs": [{"tokens": 500}] * 3},
    }.items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(content))
    Path("logs").mkdir()
    runs = [asdict(StageRun(stage, 0, 1, {}, seconds, [], None)) for stage, seconds in
            (("sample_target", 7.0), ("sample_target", 10.0), ("train_draft@e003", 30.0))]  # fmt: skip
    Path("logs/stages.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    found = estimate.estimate_run(p, 100, 165).stages
    assert found["sample_target"].seconds == (p.sample_target.train_rows + 2 * 40) * 165 / 100
    assert found["train_draft"].seconds == 3 * p.sample_target.train_rows * 165 / 50
    assert found["extract_hiddens"].seconds is None
