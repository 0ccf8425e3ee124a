"""`aerie estimate` of block drafts at Qwen3-8B's shape, against a count by hand of the published sizes."""

from typing import Any

import pytest

from pipeline import recipes
from stages.params import schema
from stages.params.draft_sections import TrainDraft
from stages.params.units import format_bytes
from stages.reproduce import block_estimate, estimate, measured_rates, target_size
from stages.reproduce.block_estimate import BlockSize

pytestmark = pytest.mark.usefixtures("home")
H, MLP, V, LAYERS = 4096, 12288, 151936, 5
LAYER = 2 * H * 4096 + 2 * H * 1024 + 3 * H * MLP + 2 * H + 2 * 128  # q and o, k and v, MLP, norms
SEGMENTS: dict[str, Any] = {
    "dflash6": {"from": "e000", "epochs": 6, "method": "dflash", "layers": 5, "block_size": 16, "anchors": 512},
    "dflash9": {"from": "dflash6", "epochs": 3, "method": "dflash", "layers": 5, "block_size": 16, "anchors": 512},
    "dspark10": {
        "from": "e000", "epochs": 10, "method": "dspark", "layers": 5, "block_size": 7, "anchors": 512, "markov_rank": 256,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def with_blocks() -> schema.Params:
    """The recipe of Qwen3-8B on one GPU with five feature layers, stored, and block drafts alone."""
    with recipes.merge_recipe("train-qwen3-8b-1gpu") as (file, _):
        p = schema.load_params(file)
    training = p.train_draft.model_dump(by_alias=True) | {"checkpoints": SEGMENTS, "batch_tokens": 4096}
    target = p.target.model_copy(update={"feature_layers": [2, 10, 18, 26, 34]})
    updates = {
        "train_draft": TrainDraft.model_validate(training), "target": target,
        "init_draft": p.init_draft.model_copy(update={"feature_layers": [2, 18, 34]}),
        "extract_hiddens": p.extract_hiddens.model_copy(update={"online": False}),
    }  # fmt: skip
    return p.model_copy(update=updates)


def config_of(p: schema.Params, name: str) -> Any:
    manifest = target_size.read_target_size(p).manifest
    root = estimate.init_draft.infer_config(p, manifest)
    return block_estimate.build_segment_config(name, p, root, manifest)


def test_parameters_are_the_published_ones(with_blocks: schema.Params) -> None:
    dflash, dspark = (BlockSize.of_config(config_of(with_blocks, name)) for name in ("dflash6", "dspark10"))
    assert dflash.layers == dspark.layers == LAYERS * LAYER + 2 * H  # and the final norm, and that of the context
    assert dflash.layers == pytest.approx(964.7e6, rel=1e-4)
    assert dflash.fc == dspark.fc == 5 * H * H == pytest.approx(83.9e6, rel=1e-3)
    assert dflash.total == dflash.layers + dflash.fc == pytest.approx(1.049e9, rel=1e-3)
    assert (dflash.markov, dflash.confidence) == (0, 0)
    assert dspark.markov == 2 * V * 256 == pytest.approx(77.8e6, rel=1e-3)
    assert dspark.confidence == 4353


def test_the_estimate_has_sizes_disk_memory_and_hours_with_their_origin(with_blocks: schema.Params) -> None:
    about = estimate._describe_params(with_blocks).model_copy(update={"row_tokens": 1024})
    found = estimate.estimate_recipe(with_blocks, about)
    lines = dict(line.split(": ", 1) for line in found.lines)
    assert lines["block draft of dflash6"].startswith(
        "1.05e9 parameters (5 layers 965e6, fc 83.9e6; a layer has the sizes of"
    )
    assert lines["block draft of dspark10"].startswith(
        "1.13e9 parameters (5 layers 965e6, fc 83.9e6, Markov head of rank 256 77.8e6, confidence head 4,353;"
    )
    assert "block draft of dflash9" not in lines  # the same draft as dflash6

    dflash, dspark = LAYERS * LAYER + 2 * H + 5 * H * H, LAYERS * LAYER + 2 * H + 5 * H * H + 2 * V * 256 + 4353
    kept = (2 * dflash + dspark + dspark) * 14  # while dspark10 runs, its last epoch besides
    assert lines["checkpoints"].startswith(f"{format_bytes(kept)} ((1.05e9 * 2 + 1.13e9 * 2) * (2 + 12) bytes)")
    tables = 2 * V * H * 2
    assert lines["GPU memory, training dflash6"].startswith(f"{format_bytes(20 * dflash + tables)} and more")

    packs = 20_000 * 1024 / 4096
    row, pair = 6 * (LAYERS * (LAYER - 2 * H - 256)), 12 * LAYERS * 4096
    block = 16 * row + 15 * 4 * V * H + 16 * (512 + 16) * pair
    context = 20_000 * 1024 * (4 * 5 * H * H + 6 * LAYERS * 2 * H * 1024)
    shares = measured_rates.BLOCK_TRAINING_SHARES
    seconds = 6 * (packs * 512 * block + context) / (shares["dflash"] * 989e12)
    training_line = lines["train_draft, dflash6"]
    assert training_line.startswith(
        f"{seconds / 3600:.2g} GPU-hours (6 epochs * (2,560,000 blocks * {block / 1e9:.1f} GFLOP + "
    )
    assert "at 54.0%; the disk must give" in training_line
    block = 7 * row + 7 * (6 * V * H + 6 * V * 256 + 6 * (H + 256)) + 7 * (512 + 7) * pair
    more = 10 * (packs * 512 * block + context) / (shares["dspark"] * 989e12)
    hours = (1.5 * seconds + more) / 3600  # dflash9 is half as long as dflash6
    assert found.stages["train_draft"].gpu_hours == pytest.approx(hours, rel=1e-6)
    assert "train_draft" not in lines  # no epoch of EAGLE-3


def test_online_adds_the_targets_forward(with_blocks: schema.Params) -> None:
    about = estimate._describe_params(with_blocks)
    online = with_blocks.extract_hiddens.model_copy(update={"online": True})
    stored, made = (
        estimate.estimate_recipe(p, about)
        for p in (with_blocks, with_blocks.model_copy(update={"extract_hiddens": online}))
    )
    shape = target_size.read_target_size(with_blocks)
    tokens, length = 19 * 20_000 * about.row_tokens, about.row_tokens
    flop = tokens * estimate.compute_target_flop(shape, length)
    more = flop / (measured_rates.EXTRACTING_COMPILED_SHARE * 989e12) / 3600
    difference = made.stages["train_draft"].gpu_hours - stored.stages["train_draft"].gpu_hours
    assert difference == pytest.approx(more, rel=1e-6)
    assert any("and the target's" in line for line in made.lines if line.startswith("train_draft, dspark10"))


def test_an_estimate_of_eagle3_alone_has_no_block_lines() -> None:
    with recipes.merge_recipe("train-qwen3-8b-1gpu") as (file, _):
        p = schema.load_params(file)
    found = estimate.estimate_recipe(p, estimate._describe_params(p))
    assert not [line for line in found.lines if "block" in line]
    assert any(line.startswith("checkpoints: ") and line.endswith(" * 4 * (2 + 12) bytes)") for line in found.lines)
