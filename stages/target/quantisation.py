"""Targets whose files hold quantised weights (`quantization_config` in config.json): computed from them at loading.

Hooks, the torch engine's kernels and a draft's tables need weights as they are multiplied. transformers computes those of
fine-grained fp8 and compressed-tensors; those of AWQ are unpacked here, since transformers multiplies packed ones by a
library that keeps them so. Activations are not quantised, as servers quantise those of fp8: their answers may differ.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from stages.target import foreign_files

BY_TRANSFORMERS = ("fp8", "compressed-tensors")
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # number of the four bits, from the lowest, of each of eight columns


def read_method(config: PretrainedConfig) -> str | None:
    """Return the name of the quantisation; None where the weights are stored as they are multiplied."""
    found = getattr(config, "quantization_config", None)
    return None if found is None else str(found.get("quant_method"))


def describe_weights(config: PretrainedConfig) -> str | None:
    """Return what the weights are, as the manifest has it."""
    method = read_method(config)
    return f"dequantised from {method}" if method in (*BY_TRANSFORMERS, "awq") else None


def check_layout(model: str, config: PretrainedConfig) -> None:
    """Raise ValueError for an AWQ that is not unpacked here."""
    if read_method(config) != "awq":
        return
    settings, wanted = config.quantization_config, {"bits": 4, "version": "gemm", "zero_point": True}
    if found := {
        key: settings.get(key) for key in wanted if str(settings.get(key)).lower() != str(wanted[key]).lower()
    }:
        raise ValueError(
            f"params.yaml: target.model {model}: its AWQ has {found}, expected {wanted}; take the checkpoint in bfloat16"
        )


def load_dequantised(auto_class: Any, source: str, config: PretrainedConfig, **options: Any) -> Any:
    """Return what `from_pretrained` of the class does, the weights dequantised."""
    method, config = read_method(config), copy.deepcopy(config)
    if method == "awq":
        del config.quantization_config
        model_class = auto_class._model_mapping[type(config)]  # the Auto classes want files
        return model_class.from_pretrained(None, config=config, state_dict=read_awq(Path(source)), **options)
    if method not in BY_TRANSFORMERS:
        return auto_class.from_pretrained(source, config=config, **options)
    config.quantization_config["dequantize"] = True
    found = auto_class.from_pretrained(source, config=config, **options)
    model = found[0] if isinstance(found, tuple) else found
    kept = tuple(model._keep_in_fp32_modules or ())
    for name, weight in model.named_parameters():
        if not any(part in name for part in kept):  # transformers leaves products with a scale in the scale's type
            weight.data = weight.data.to(options.get("dtype", weight.dtype))
    return found


def read_awq(folder: Path) -> dict[str, Tensor]:
    """Return all weights of an AWQ checkpoint under the names of the model before it, packed ones unpacked."""
    stored: dict[str, Tensor] = {name: file.get_tensor(name) for name, file in foreign_files.iterate_tensors(folder)}
    found: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        module, _, kind = name.rpartition(".")
        if kind == "qweight":
            found[f"{module}.weight"] = unpack_awq(
                tensor, *(stored[f"{module}.{part}"] for part in ("qzeros", "scales"))
            )
        elif f"{module}.qweight" not in stored or kind == "bias":
            found[name] = tensor
    return found


def unpack_awq(packed: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """Return weights [O, I] of AWQ's int32 [I, O/8], with zeros [I/g, O/8] and scales [I/g, O] of groups of g inputs."""

    def unpack(x: Tensor) -> Tensor:
        shifts = 4 * torch.tensor(AWQ_ORDER, dtype=torch.int32)
        return (x[..., None] >> shifts & 15).flatten(1)

    group = len(packed) // len(scales)
    levels = unpack(packed) - unpack(zeros).repeat_interleave(group, 0)
    return (levels * scales.repeat_interleave(group, 0)).T.contiguous()
