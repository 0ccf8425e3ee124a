"""Estimates against what models really have, what was measured, and a slow count."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks import recipes_page
from pipeline import recipes
from stages.draft import eagle3_checkpoint
from stages.hidden_states import format
from stages.params import schema
from stages.reproduce import estimate, measured_rates, target_size
from tests.conftest import ROOT

PRINTED = {  # model cards; Qwen3-VL's counts its vision tower
    "angelslim-qwen3-1.7b": 1.7, "angelslim-qwen3-4b": 4.0, "angelslim-qwen3-8b": 8.2, "angelslim-qwen3-14b": 14.8,
    "angelslim-qwen3-32b": 32.8, "angelslim-qwen3-30b-a3b": 30.5, "angelslim-hunyuan-1.8b": 1.8, "qwen3-vl-2b-weather": 2.1,
}  # fmt: skip


PEAK_FLOPS = measured_rates.MEASURED_GPU.peak_flops
H200, H100 = measured_rates.GPUS["h200"], measured_rates.GPUS["h100"]

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


def test_a_tied_target_has_one_table() -> None:
    _, shape = shape_of("angelslim-qwen3-4b")
    layer = 2560 * (4096 + 2 * 1024) + 4096 * 2560 + 3 * 2560 * 9728 + 2 * 2560 + 2 * 128
    assert shape.parameters == 151936 * 2560 + 36 * layer + 2560
    assert shape.blocks == 36 * layer


def test_training_and_extraction_take_the_hours_that_were_measured() -> None:
    """docs/results/2026-11-21-h200-training.md, Qwen3-8B's shape: 34,250 and 29,595 tokens/s, rows of 2,048."""
    p, shape = shape_of("angelslim-qwen3-8b")
    draft = estimate.init_draft.infer_config(p, shape.manifest)
    flop = estimate.compute_train_flop(shape.manifest, draft, 7)
    assert flop == pytest.approx(16.46e9, rel=0.03)
    assert measured_rates.TRAINING_SHARE * PEAK_FLOPS / flop == pytest.approx(34_250, rel=0.03)
    flop = estimate.compute_target_flop(shape, 2048)
    assert flop == pytest.approx(14.5e9, rel=0.01)
    assert measured_rates.EXTRACTING_SHARE * PEAK_FLOPS / flop == pytest.approx(29_595, rel=0.01)


def test_draft_parameters_are_those_of_its_tensors() -> None:
    p, shape = shape_of("angelslim-qwen3-8b")
    draft = estimate.init_draft.infer_config(p, shape.manifest)
    parts = estimate.count_draft_parameters(draft)
    assert (parts["fc"], parts["head"]) == (3 * 4096 * 4096, 32000 * 4096)
    slowly = sum(
        torch.Size(s).numel() for n, s in eagle3_checkpoint.list_tensor_shapes(draft).items() if n not in ("d2t", "t2d")
    )
    assert sum(parts.values()) == slowly


def test_hidden_states_are_counted_by_row_and_online_ones_are_not() -> None:
    about, _ = schema.read_recipe(Path("recipes/qwen3-vl-2b-weather.yaml"))
    assert about is not None
    p, _ = shape_of("qwen3-vl-2b-weather")
    kept = estimate.estimate_recipe(p, about)
    size = format.count_token_bytes(3, 2048, torch.bfloat16, True) + format.count_visual_bytes(2048, torch.bfloat16)
    online = p.model_copy(update={"extract_hiddens": p.extract_hiddens.model_copy(update={"online": True})})
    assert kept.disk_bytes - estimate.estimate_recipe(online, about).disk_bytes == pytest.approx(220 * 512 * size)


def test_a_union_of_feature_layers_takes_its_own_bytes() -> None:
    """Qwen3-8B's six layers of EAGLE-3 and a block draft, in bfloat16: seven streams of 4,096, a token's id and its bit."""
    p, _ = shape_of("train-qwen3-8b-1gpu")
    union = [2, 10, 18, 26, 33, 34]
    about = estimate._describe_params(p)
    lines = []
    for layers, dtype in ((None, "bfloat16"), (union, "bfloat16"), (union, "fp8")):
        stored = p.extract_hiddens.model_copy(update={"dtype": dtype})
        target = p.target.model_copy(update={"feature_layers": layers})
        found = estimate.estimate_recipe(p.model_copy(update={"target": target, "extract_hiddens": stored}), about)
        lines.append(next(line for line in found.lines if line.startswith("hidden states: ")))
    assert "* 32,772.1 bytes: 3 feature layers and the last in bfloat16" in lines[0]
    assert "* 57,348.1 bytes: 6 feature layers and the last in bfloat16" in lines[1]
    assert "* 28,704.1 bytes: 6 feature layers and the last in fp8" in lines[2]
    short = p.model_copy(update={"target": p.target.model_copy(update={"feature_layers": union[:4]})})
    with pytest.raises(ValueError, match=r"init_draft\.feature_layers is null, which means EAGLE-3's \[2, 18, 33\]"):
        estimate.estimate_recipe(short, about)


def test_a_target_that_is_not_recorded_is_named() -> None:
    p, _ = shape_of("weather-tiny")
    other = p.model_copy(update={"target": p.target.model_copy(update={"model": "someone/Other-9B"})})
    with pytest.raises(
        ValueError, match=r"recipes/targets/Other-9B.json not found, expected a recorded config.json of"
    ):
        target_size.read_target_size(other)


def test_the_page_of_recipes_is_what_its_command_writes() -> None:
    committed = (ROOT / recipes_page.PAGE).read_text(encoding="utf-8")
    assert committed == recipes_page.render_page(), "run: python -m benchmarks.recipes_page"


def test_loads_of_the_torch_engine_take_turns_at_once() -> None:
    """A sweep has as many passes as its rounds have tokens, of each concurrency."""
    p, shape = shape_of("angelslim-qwen3-8b")
    name = p.benchmark.torch_workloads[0]
    w = p.benchmark.workloads[name].model_copy(
        update={"num_prompts": 30, "warmup": 2, "turns": "first", "max_new_tokens": [10, 50], "concurrency": [1, 8, 64]}
    )
    b = p.benchmark.model_copy(update={"torch_workloads": [name], "workloads": {name: w}})
    found = estimate.RecipeEstimate()
    estimate._add_torch_cells(found, p.model_copy(update={"benchmark": b}), shape)
    cells, hours = len(b.checkpoints) * len(b.trees), 0.0
    for tokens in (10, 50):
        for at_once in (1, 8, 32):  # 64 at once are never more than there are prompts
            step = measured_rates.estimate_torch_step(p, shape, H200, at_once, tokens)
            hours += cells * 32 / at_once * tokens * 2 * step / 3600
    assert found.gpu_hours == pytest.approx(hours)
    assert "32 prompts * 50 tokens / 8 at once" in found.lines[0]
    assert found.stages["benchmark"].seconds == pytest.approx(found.gpu_hours * 3600)


def test_a_served_load_has_the_prompts_of_its_concurrency() -> None:
    p, shape = shape_of("angelslim-qwen3-8b")
    name = p.benchmark.torch_workloads[0]
    update = {"turns": "first", "max_new_tokens": 10, "concurrency": [1, 8], "warmup": 4}
    w = p.benchmark.workloads[name].model_copy(update=update)
    few, many = (
        estimate._list_load_seconds(p, shape, H200, w.model_copy(update={"num_prompts": each})) for each in (2, 64)
    )
    found = estimate._list_load_seconds(p, shape, H200, w.model_copy(update={"num_prompts": [2, 64]}))
    assert found == [few[0], many[1]] and few[0] < many[0]


@pytest.mark.parametrize(("at_once", "measured"), [(1, 4.574), (4, 4.71), (16, 5.18), (64, 6.84)])
def test_steps_of_the_torch_engine_are_those_measured(at_once: int, measured: float) -> None:
    """docs/results/2026-11-22-h200-one-engine.md and -engine.md: Qwen3-8B's shape, prompts of 512 tokens, answers of 64."""
    p, shape = shape_of("angelslim-qwen3-8b")
    assert measured_rates.estimate_torch_step(p, shape, H200, at_once, 576) * 1e3 == pytest.approx(measured, rel=0.1)


def test_a_step_of_sglang_is_that_measured() -> None:
    """docs/results/2026-11-20-h200-decoding.md: 5.22 ms; a tiny target's takes the engine's own 1.19 ms."""
    p, shape = shape_of("angelslim-qwen3-8b")
    assert measured_rates.estimate_served_step(p, shape, H200, 1, 512) * 1e3 == pytest.approx(5.22, rel=0.02)
    tiny = shape_of("weather-tiny")
    assert measured_rates.estimate_served_step(*tiny, H200, 1, 512) == measured_rates.SERVED_STEP_S


def test_an_h100_decodes_slower_and_computes_as_fast() -> None:
    p, shape = shape_of("angelslim-qwen3-8b")
    steps = [measured_rates.estimate_torch_step(p, shape, gpu, 1, 512) for gpu in (H200, H100)]
    assert steps[1] / steps[0] == pytest.approx(4.8 / 3.35)
    about, _ = schema.read_recipe(Path("recipes/train-qwen3-8b-8gpu.yaml"))
    p, _ = shape_of("train-qwen3-8b-8gpu")
    assert about is not None
    found = [estimate.estimate_recipe(p, about, gpu) for gpu in (H200, H100)]
    assert found[0].stages["train_draft"] == found[1].stages["train_draft"]
    assert "scaled to an H100" in found[1].lines[-2] and "scaled" not in found[0].lines[-2]


def test_eight_gpus_share_the_work_and_one_disk() -> None:
    """60,000 rows in fp8 are 1,014 GB: at 1.95 GB/s the disk needs longer than eight GPUs."""
    about, _ = schema.read_recipe(Path("recipes/train-qwen3-8b-8gpu.yaml"))
    p, _ = shape_of("train-qwen3-8b-8gpu")
    assert about is not None
    found = estimate.estimate_recipe(p, about).stages
    for stage in ("sample_target", "extract_hiddens", "train_draft"):
        seconds, hours = found[stage].seconds, found[stage].gpu_hours
        assert seconds is not None and hours is not None and seconds * 8 == pytest.approx(hours * 3600)
    assert found["extract_hiddens"].seconds == pytest.approx(found["extract_hiddens"].disk_bytes / 1.95e9)
    assert estimate._count_sampling_gpus(p) == 8


def test_a_target_of_a_local_folder_is_read_from_its_own_config(tmp_path: Path) -> None:
    p, known = shape_of("angelslim-qwen3-1.7b")
    recorded = json.loads(Path("recipes/targets/Qwen3-1.7B.json").read_text())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text(json.dumps(recorded["config"]))
    own = p.model_copy(update={"target": p.target.model_copy(update={"model": str(tmp_path / "mine")})})
    found = target_size.read_target_size(own)
    assert found.parameters == known.parameters and found.recorded_from == "its own config.json"


def test_without_a_recipe_rows_are_as_long_as_those_extracted_here() -> None:
    """Bug: after `aerie use` rows counted as max_length, four times the recipe's. Rows of another target do not count."""
    p, _ = shape_of("weather-tiny")
    assert estimate._describe_params(p).row_tokens == p.extract_hiddens.max_length
    Path("artifacts/target").mkdir(parents=True)
    Path("results").mkdir(exist_ok=True)
    Path("artifacts/target/target.json").write_text(json.dumps({"model": p.target.model}))
    Path("results/hiddens_report.json").write_text(json.dumps({"rows_out": 300, "tokens": 49255}))
    assert estimate._describe_params(p).row_tokens == 165
    other, _ = shape_of("angelslim-qwen3-8b")
    assert estimate._describe_params(other).row_tokens == other.extract_hiddens.max_length


def test_a_number_of_training_rows_that_is_not_known_is_told() -> None:
    p, _ = shape_of("weather-tiny")
    p = p.model_copy(update={"sample_target": p.sample_target.model_copy(update={"train_rows": None})})
    lines = estimate.estimate_recipe(p, estimate._describe_params(p)).lines
    assert any(line.startswith("training rows: not counted (sample_target.train_rows is null") for line in lines)
