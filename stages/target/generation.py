"""Batched plain decoding of the target; apart from `decode`, so that an edit of the engine samples nothing again."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stages.target.vision import ImagePatches


@torch.inference_mode()
def generate_answers(
    model: PreTrainedModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    eos: list[int],
    pad: int,
    seed: int,
    pixels: ImagePatches | None = None,
) -> list[tuple[list[int], str]]:
    """One batch of prompts -> (answer ids with their end token, "stop" or "length") for each.

    At temperature 0 the target's argmax; above, samples drawn from `seed`. Only temperature and top_p shape the
    distribution: the model's own generation defaults (top_k, penalties) are put aside, since no later stage knows them.
    `pixels` are the prompts' pictures, in the order of the prompts; each has its tokens there.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=model.device)  # [B, T], left-padded
    seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    torch.manual_seed(seed)
    how = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature > 0 else {
        "do_sample": False, "temperature": None, "top_p": None, "top_k": None
    }  # fmt: skip
    out: Tensor = model.generate(
        input_ids=ids,
        attention_mask=seen,
        **_build_image_kwargs(model, ids, pixels),
        max_new_tokens=max_new_tokens,
        eos_token_id=eos,
        pad_token_id=pad,
        repetition_penalty=1.0,
        **how,
    )
    return [_cut_at_end_token(row, eos) for row in out[:, width:].tolist()]


def _build_image_kwargs(model: PreTrainedModel, ids: Tensor, pixels: ImagePatches | None) -> dict[str, Tensor]:
    if pixels is None:
        return {}
    return {
        "pixel_values": pixels.pixel_values.to(model.device),
        "image_grid_thw": pixels.image_grid_thw.to(model.device),
        "mm_token_type_ids": (ids == model.config.image_token_id).int(),  # [B, T], 1 where a picture is
    }


def _cut_at_end_token(ids: list[int], eos: list[int]) -> tuple[list[int], str]:
    for place, token in enumerate(ids):
        if token in eos:
            return ids[: place + 1], "stop"
    return ids, "length"
