"""Check that a target's files are whole: each weight there, of the class's shape, finite; ids of its config in its vocabulary.

transformers draws a weight at random that a checkpoint lacks, in each process another, and says so in a log: two runs at
temperature 0 then differ, and hidden states are of a third model. The class is built on the meta device, so names and shapes
are compared without its memory; the values are read once from the files, a tensor at a time.
"""

from pathlib import Path
from typing import Any

import torch

from stages.params.units import list_first
from stages.target import foreign_files, quantisation
from stages.target.loading import read_model

MAX_NAMES = 4  # of tensors in a message; further ones are counted


def check_checkpoint(model: str, folder: Path, trust_remote_code: bool) -> None:
    """Raise ValueError naming the tensors that the target's files lack, that its class does not know, that have another shape,
    or that are not finite; and where its class can't be built at all, as without the library of its quantisation.
    """
    for _ in foreign_files.iterate_tensors(folder):
        pass
    key, config = f"params.yaml: target.model {model}", foreign_files.read_config(folder, trust_remote_code)
    found: dict[str, Any] = {}  # transformers' report of loading: missing, unexpected and mismatched names
    options = {"device_map": {"": "meta"}, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        _, found = read_model(str(folder), config, trust_remote_code, **options)
    except Exception as error:  # a class may raise anything
        words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        is_quantised = quantisation.read_method(config) is not None
        # Remote code may need memory for its weights to be built, and a quantisation its own device.
        if not trust_remote_code and (isinstance(error, ImportError) or not is_quantised):
            found_as = "load it (its weights are quantised)" if is_quantised else "load it"
            advice = "install what it names, or take the checkpoint in bfloat16"
            raise ValueError(f"{key}: transformers can't {found_as}: {words}; {advice}") from None
        print(f"names of weights were not compared: the class of {model} can't be built so: {words}")
    problems = []
    if missing := sorted(found.get("missing_keys", ())):
        problems.append(f"lack {list_first(missing, MAX_NAMES)}, which transformers would draw anew in each process")
    if mismatched := sorted(found.get("mismatched_keys", ())):
        shapes = [f"{name} {tuple(given)} where its config says {tuple(wanted)}" for name, given, wanted in mismatched]
        problems.append(f"have {list_first(shapes, MAX_NAMES)}")
    # Names of the files may hold newlines.
    if unexpected := sorted(" ".join(n.split()) for n in found.get("unexpected_keys", ())):
        problems.append(f"have {list_first(unexpected, MAX_NAMES)}, which its class does not know")
    if errors := found.get("error_msgs"):
        problems.append(f"can't be converted: {errors[0]}")
    if problems:
        raise ValueError(
            f"{key}: its files of weights {'; '.join(problems)}. Expected exactly the tensors of its config.json: save it again "
            "by save_pretrained (with a prefix _orig_mod. the module inside), or correct the config"
        )
    if broken := _find_broken(folder):
        raise ValueError(
            f"{key}: {list_first(broken, MAX_NAMES)} hold NaN or infinity, expected finite weights: every answer would be "
            "noise; get them again, or train again from the last checkpoint without them"
        )


def _find_broken(folder: Path) -> list[str]:
    """Return the names of the tensors that hold NaN or infinity."""
    broken = []
    for name, file in foreign_files.iterate_tensors(folder):
        tensor = file.get_tensor(name)
        # 8-bit floats have no comparisons. A sum in float32 is as telling as every element, and quicker.
        wide = tensor if tensor.element_size() > 1 else tensor.to(torch.float32)
        if tensor.is_floating_point() and not wide.sum(dtype=torch.float32).isfinite() and not wide.isfinite().all():
            broken.append(name)
    return broken


def check_end_tokens(model: str, vocab_size: int, eos_token_ids: list[int]) -> None:
    """Raise ValueError for an end token that the target's vocabulary does not have: no answer would end."""
    if wrong := [token for token in eos_token_ids if not 0 <= token < vocab_size]:
        raise ValueError(
            f"params.yaml: target.model {model}: eos_token_id is {', '.join(map(str, wrong))}, expected ids below "
            f"{vocab_size}, the size of its vocabulary; correct its generation_config.json, config.json, tokenizer or template"
        )
