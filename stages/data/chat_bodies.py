"""Build the JSON bodies of chat completions, for OpenAI-compatible servers of several engines."""

import json
from collections.abc import Callable
from typing import Any

from stages.data import requests
from stages.data.requests import TargetRequest


def build_body(
    request: TargetRequest,
    history: list[dict[str, Any]],
    image_url: Callable[[str], str],
    *,
    temperature: float,
    top_p: float,
    max_tokens: int,
    seed: int,
    template_kwargs: dict[str, bool],
) -> dict[str, Any]:
    """Return the fields sent to every server, without the model; `image_url` turns an image's path into its URL."""
    body: dict[str, Any] = {
        "messages": requests.convert_to_openai(history, image_url),
        "temperature": temperature,
        "top_p": top_p,
        "max_tokens": max_tokens,
        "seed": seed,
    }
    if request.tools:
        body["tools"] = request.tools
    if template_kwargs:
        body["chat_template_kwargs"] = template_kwargs
    return body


def build_engine_options(
    request: TargetRequest, temperature: float, max_new_tokens: int, eos: list[int], pad: int | None
) -> dict[str, dict[str, Any]]:
    """Return the fields added per engine.

    Only temperature and top_p shape the distribution: the model's generation defaults are overridden, as in
    `target.generation`. `transformers serve` stays greedy at any temperature unless do_sample is set.
    """
    config = {
        "do_sample": temperature > 0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "eos_token_id": eos,
        "pad_token_id": eos[0] if pad is None else pad,
        "max_new_tokens": max_new_tokens,
    }
    plain = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    # For vLLM "none" leaves a call as text, as wanted here; for SGLang it removes the tools from the prompt.
    as_text = {"tool_choice": "none"} if request.tools else {}
    return {
        "transformers": {"generation_config": json.dumps(config)},
        "sglang": plain,
        "vllm": {**plain, **as_text, "return_token_ids": True},
    }
