"""Targets with quantised weights: those that are loaded are what the files say, worked out element by element."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stages import prepare_target
from stages.target import loading, manifest
from tests.conftest import ROOT, edit_params
from tests.target.pinned_targets import start_project

SHIPPED = ROOT / "data/targets/weather-tiny"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}
COMPRESSED = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"], "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "weights": {**NUMBERS, "strategy": "channel", "dynamic": False},
            "input_activations": {**NUMBERS, "strategy": "token", "dynamic": True},
        }
    },
}  # fmt: skip


def quantise_fp8(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """In blocks of 128 x 128, each with a scale that it is multiplied by."""
    out, scales = (
        torch.empty_like(weight, dtype=torch.float8_e4m3fn),
        torch.empty(-(-len(weight) // 128), weight.shape[1] // 128),
    )
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            block = slice(128 * r, 128 * r + 128), slice(128 * c, 128 * c + 128)
            scales[r, c] = weight[block].abs().max() / 448
            out[block] = (weight[block] / scales[r, c]).to(torch.float8_e4m3fn)
    exact = out.float() * scales.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)
    return {name: out, f"{name}_scale_inv": scales}, exact


def quantise_awq(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """As AutoAWQ packs them: eight columns of the transposed weight in an int32, in its order; zeros likewise."""
    columns, group = weight.T, AWQ["group_size"]
    low, high = (x for x in columns.unflatten(0, (-1, group)).aminmax(dim=1))  # [I/g, O]
    scales = ((high - low) / 15).half()
    zeros = (-low / scales).round().clamp(0, 15).int()
    whole_scales, whole_zeros = scales.repeat_interleave(group, 0), zeros.repeat_interleave(group, 0)
    levels = (columns / whole_scales + whole_zeros).round().clamp(0, 15).int()

    def pack(numbers: Tensor) -> Tensor:
        packed = torch.zeros(len(numbers), numbers.shape[1] // 8, dtype=torch.int32)
        for column in range(packed.shape[1]):
            for i, place in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):  # awq/modules/linear/gemm.py
                packed[:, column] |= numbers[:, 8 * column + place] << (4 * i)
        return packed

    module = name.removesuffix(".weight")
    files = {f"{module}.qweight": pack(levels), f"{module}.qzeros": pack(zeros), f"{module}.scales": scales}
    return files, ((levels - whole_zeros) * whole_scales).T.float()


def quantise_compressed(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """fp8 with a scale a channel."""
    scales = weight.abs().amax(1, keepdim=True) / 448
    levels = (weight / scales).to(torch.float8_e4m3fn)
    return {name: levels, f"{name}_scale": scales}, levels.float() * scales


KINDS: dict[str, Any] = {
    "fp8": (FP8, quantise_fp8),
    "awq": (AWQ, quantise_awq),
    "compressed-tensors": (COMPRESSED, quantise_compressed),
}


def write_target(folder: Path, kind: str) -> dict[str, Tensor]:
    """Write the embedded target with quantised projections; return the weights that its files mean."""
    settings, quantise = KINDS[kind]
    shutil.copytree(SHIPPED, folder)
    files: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for name, weight in load_file(SHIPPED / "model.safetensors").items():
        stored, exact[name] = quantise(name, weight) if name.endswith("_proj.weight") else ({name: weight}, weight)
        files |= stored
    save_file(files, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    return exact


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_that_the_files_mean(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "compressed-tensors":
        pytest.importorskip("compressed_tensors", reason="pip install -e '.[quantised]' to test such targets")
    exact = write_target(tmp_path / "mine", kind)
    start_project(tmp_path, monkeypatch)
    edit_params(tmp_path, {"target": {"model": "mine"}})
    prepare_target.main()
    made = manifest.read_manifest()
    assert made.describe_model() == f"mine, dequantised from {kind}"
    found = loading.load_target("mine", "float32", "cpu").state_dict()
    for name, weight in exact.items():
        assert found[name].dtype == torch.float32 and torch.allclose(found[name], weight, rtol=4e-3, atol=1e-6), name
    assert set(exact) == set(found) - {"lm_head.weight"}
    halved = loading.load_target("mine", "bfloat16", "cpu")
    assert {weight.dtype for weight in halved.parameters()} == {torch.bfloat16}
    assert halved(torch.tensor([[1, 2, 3]])).logits.isfinite().all()  # bug: scales of fp8 made its products float32


def test_an_awq_of_another_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_target(tmp_path / "mine", "awq")
    config = json.loads((tmp_path / "mine/config.json").read_text())
    config["quantization_config"]["version"] = "gemv"
    (tmp_path / "mine/config.json").write_text(json.dumps(config))
    start_project(tmp_path, monkeypatch)
    edit_params(tmp_path, {"target": {"model": "mine"}})
    with pytest.raises(ValueError, match=r"AWQ has \{'version': 'gemv'\}, expected .* take the checkpoint in bfloat16"):
        prepare_target.main()
