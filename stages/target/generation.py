"""Batched plain decoding by transformers, for targets that the torch engine does not run in a pool."""

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from stages.target.multimodal import ImagePatches


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
    patches: ImagePatches | None = None,
) -> list[tuple[list[int], str]]:
    """Return (answer ids with their end token, "stop" or "length") for each prompt of one batch.

    Temperature 0 takes the argmax; above 0 samples are drawn from `seed`. Only temperature and top_p shape the distribution:
    no key of the target's generation_config.json acts (penalties, suppressed tokens, beams), since no later stage knows them.
    `patches` are those of the prompts' images, in the order of the prompts.
    """
    length = max(map(len, prompts))
    ids = torch.tensor([[pad] * (length - len(p)) + p for p in prompts], device=model.device)  # [B, T], left-padded
    mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    images = {}
    if patches is not None:
        images = {
            "pixel_values": patches.pixel_values.to(model.device),
            "image_grid_thw": patches.image_grid_thw.to(model.device),
            "mm_token_type_ids": (ids == model.config.image_token_id).int(),  # [B, T], 1 for image tokens
        }
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature > 0 else {}
    # `generate` fills what a config leaves open from the model's own, which is the target's generation_config.json.
    model.generation_config = GenerationConfig()
    out: Tensor = model.generate(
        input_ids=ids,
        attention_mask=mask,
        **images,
        generation_config=GenerationConfig(
            max_new_tokens=max_new_tokens, eos_token_id=eos, pad_token_id=pad, **sampling
        ),
    )
    return [_cut_at_end_token(row, eos) for row in out[:, length:].tolist()]


def link_target(source: Path, folder: Path, eos: list[int], chat_template: str | None = None) -> Path:
    """Return `folder` with links to the target's files, a generation_config.json that has its end tokens alone, and a
    `chat_template` in place of its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        link = folder / file.name
        link.unlink(missing_ok=True)
        is_template = file.name in ("chat_template.jinja", "additional_chat_templates")
        if file.name != "generation_config.json" and not (chat_template and is_template):
            link.symlink_to(file.resolve())
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")
    return folder.resolve()


def _cut_at_end_token(ids: list[int], eos: list[int]) -> tuple[list[int], str]:
    end = next((position for position, token in enumerate(ids) if token in eos), None)
    return (ids, "length") if end is None else (ids[: end + 1], "stop")
