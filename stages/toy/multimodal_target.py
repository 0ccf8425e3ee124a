"""Build a multimodal target small enough to train on a laptop: transformers' Qwen3-VL class, trained to read drawn maps.

The decoder is weather-tiny's with the three-dimensional RoPE positions of Qwen3-VL. The vision tower has two blocks, the
first of which also feeds the decoder by deepstack. One image embedding is one tile of a map (weather_maps.py).

Shapes: B rows, T tokens, P patches of all images together, D values of a patch, I images.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from stages.toy import text_targets, weather_maps

TARGET_NAME = "weather-tiny-vl"
CORPUS_SIZE = 6_000
VISION_START, IMAGE_PAD, VISION_END, VIDEO_PAD = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"
# As weather-tiny's, but a content may be a list of parts; as in Qwen3-VL, an image is one token between two marks.
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type in ('image', 'image_url') %}"
    + VISION_START
    + IMAGE_PAD
    + VISION_END
    + "{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

MapConversation = tuple[list[dict[str, str]], list[weather_maps.MapImage]]


@dataclass(frozen=True)
class MultimodalTrainingRow:
    """One conversation as tensors."""

    ids: Tensor  # [T], one token per image embedding
    labels: Tensor  # [T], -100 outside the assistant's turns
    pixel_values: Tensor  # [P, D]
    image_grid_thw: Tensor  # [I, 3]


def make_corpus(seed: int) -> list[MapConversation]:
    return list(itertools.islice(weather_maps.generate_conversations(seed), CORPUS_SIZE))


def build_tokenizer(conversations: list[MapConversation]) -> PreTrainedTokenizerFast:
    """Return weather-tiny's tokenizer trained on these texts, with Qwen-VL's four tokens appended to its vocabulary."""
    texts = text_targets.render_conversations([messages for messages, _ in conversations])
    tokenizer = text_targets.build_tokenizer(texts)
    tokenizer.add_special_tokens({"additional_special_tokens": [VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_processor() -> Any:
    """Return an image processor that cuts a map into its tiles; its size limits are such that no map is resized."""
    return Qwen2VLImageProcessorPil(
        patch_size=weather_maps.TILE_PIXELS // 2,
        merge_size=2,
        size={"shortest_edge": weather_maps.TILE_PIXELS**2, "longest_edge": (8 * weather_maps.TILE_PIXELS) ** 2},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """Return a randomly initialised Qwen3-VL whose decoder has weather-tiny's shape."""
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    vision = {
        "depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "spatial_merge_size": 2,
        "patch_size": weather_maps.TILE_PIXELS // 2, "out_hidden_size": 128, "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }  # fmt: skip
    special_tokens = {"image": IMAGE_PAD, "video": VIDEO_PAD, "vision_start": VISION_START, "vision_end": VISION_END}
    config = Qwen3VLConfig(
        text_config=text_targets.build_decoder_config(tokenizer) | {"rope_parameters": rope},
        vision_config=vision,
        tie_word_embeddings=True,
        **{f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in special_tokens.items()},
    )
    return Qwen3VLForConditionalGeneration(config)


def encode_conversations(
    tokenizer: PreTrainedTokenizerFast, processor: Any, conversations: list[MapConversation]
) -> list[MultimodalTrainingRow]:
    """Return the conversations as tensors, each image as one token per image embedding."""
    rows = []
    for messages, maps in conversations:
        inputs = processor(images=maps, return_tensors="pt")
        sizes = iter((inputs["image_grid_thw"].prod(-1) // processor.merge_size**2).tolist())
        expanded = [dict(message) for message in messages]
        for message in expanded:
            before, image, after = message["content"].partition(weather_maps.IMAGE_PLACEHOLDER)
            if image:
                message["content"] = before + VISION_START + IMAGE_PAD * next(sizes) + VISION_END + after
        ids = tokenizer(tokenizer.apply_chat_template(expanded, tokenize=False))["input_ids"]
        labels = text_targets.label_assistant_tokens(tokenizer, ids)
        rows.append(MultimodalTrainingRow(torch.tensor(ids), labels, inputs["pixel_values"], inputs["image_grid_thw"]))
    return rows


def make_image_inputs(
    rows: list[MultimodalTrainingRow], image_token_id: int
) -> Callable[[list[int]], dict[str, Tensor]]:
    """Return the function that gives `text_targets.train_target` a batch's model inputs besides ids."""

    def build_inputs(batch: list[int]) -> dict[str, Tensor]:
        chosen = [rows[i] for i in batch]
        image_mask = [(row.ids == image_token_id).int() for row in chosen]
        return {
            "pixel_values": torch.cat([row.pixel_values for row in chosen]),
            "image_grid_thw": torch.cat([row.image_grid_thw for row in chosen]),
            "mm_token_type_ids": torch.nn.utils.rnn.pad_sequence(image_mask, batch_first=True),  # [B, T]
        }

    return build_inputs
