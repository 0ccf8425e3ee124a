# ruff: noqa: B023 - each is called before the loop goes on
"""Loss masks of long conversations: a search for each answer, against a walk over all tokens for each answer.

    python -m benchmarks.mask [CONVERSATIONS]     # writes docs/results/mask.json

`walk` is AngelSlim's way (base_dataset_builder.py:304-326): a pattern over the rendered text finds the answers, and for
each of them a Python loop over the tokens' offsets sets the mask. Both get the same text, ids and offsets: rendering
and tokenising are the tokenizer's, and are timed apart. Masks are compared first.
"""

import json
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stages.target import chat_template
from stages.toy import text_targets, weather

TURNS, TOKENS = 20, 4096


def walk(text: str, offsets: list[tuple[int, int]]) -> torch.Tensor:
    """Their loop: no token is passed over, and the mask is a tensor. Its last token is ours: theirs goes one too far."""
    mask = torch.zeros(len(offsets), dtype=torch.long)
    for match in re.finditer(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", text, re.DOTALL):
        begin, end = match.span(1)
        for place, (head, tail) in enumerate(offsets):
            if tail > begin and head < end:
                mask[place] = 1
    return mask


def search(ids: list[int], offsets: list[tuple[int, int]], begins: list[int], closers: set[int]) -> torch.Tensor:
    mask = torch.zeros(len(ids), dtype=torch.long)
    for begin, end in chat_template.locate_answer_tokens(ids, offsets, begins, closers):
        mask[begin:end] = 1
    return mask


def conversation(tokenizer: Any, rng: random.Random, talks: list[list[dict[str, str]]]) -> list[dict[str, str]]:
    """20 messages, asked and answered in turn, of about 4,096 tokens together."""
    messages: list[dict[str, str]] = []
    for turn in range(TURNS):
        text, want = "", TOKENS // TURNS - 5
        while len(ids := tokenizer.encode(text, add_special_tokens=False)) < want:
            text += rng.choice(rng.choice(talks))["content"] + "\n"
        messages.append({"role": "assistant" if turn % 2 else "user", "content": tokenizer.decode(ids[:want])})
    return messages


def milliseconds(work: Callable[[], Any], repeat: int = 5) -> float:
    took = []
    for _ in range(repeat):
        begun = time.perf_counter()
        work()
        took.append(time.perf_counter() - begun)
    return statistics.median(took) * 1e3


def main() -> None:
    count, rng = int(sys.argv[1]) if len(sys.argv) > 1 else 20, random.Random(1)
    talks = [t for t, _ in zip(weather.generate_conversations(7), range(400), strict=False)]
    tokenizer = text_targets.build_tokenizer(text_targets.render_conversations(talks))
    eos = [tokenizer.eos_token_id]
    rows: dict[str, list[float]] = {
        k: [] for k in ("walk", "search", "starts", "by_prompts", "render_tokenise", "spans", "exploded", "naive")
    }
    lengths = []
    for _ in range(count):
        talk = conversation(tokenizer, rng, talks)
        text = tokenizer.apply_chat_template(talk, tokenize=False)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        begins = chat_template.find_answer_starts(tokenizer, talk, text)
        assert walk(text, offsets).equal(search(ids, offsets, begins, set(eos))), "masks differ"
        lengths.append(len(ids))
        rows["walk"].append(milliseconds(lambda: walk(text, offsets)))
        rows["search"].append(milliseconds(lambda: search(ids, offsets, begins, set(eos))))
        assert chat_template.find_starts_by_rendering(tokenizer, talk, text) == begins
        rows["starts"].append(milliseconds(lambda: chat_template.find_answer_starts(tokenizer, talk, text)))
        rows["by_prompts"].append(milliseconds(lambda: chat_template.find_starts_by_rendering(tokenizer, talk, text)))
        rows["render_tokenise"].append(
            milliseconds(
                lambda: tokenizer(tokenizer.apply_chat_template(talk, tokenize=False), return_offsets_mapping=True), 3
            )
        )
        rows["spans"].append(milliseconds(lambda: chat_template.encode_conversation(tokenizer, talk, eos), 3))
        rows["exploded"].append(milliseconds(lambda: chat_template.encode_turns(tokenizer, talk, eos), 3))
        rows["naive"].append(
            milliseconds(
                lambda: [
                    chat_template.encode_prompt(tokenizer, talk[:i])
                    for i in chat_template.find_assistant_messages(talk)
                ],
                1,
            )
        )
    ms = {name: round(statistics.median(values), 3) for name, values in rows.items()}
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "conversations": count,
        "turns": TURNS,
        "tokens": round(statistics.mean(lengths)),
        "milliseconds": ms,
        "walk_over_search": round(ms["walk"] / ms["search"], 1),
        "walk_over_starts_and_search": round(ms["walk"] / (ms["starts"] + ms["search"]), 1),
        "of_one_conversation": {
            "walk": "AngelSlim's loop, given text, ids and offsets",
            "search": "ours, given ids, offsets and where answers begin",
            "starts": "finding where they begin, in a conversation of a known shape",
            "by_prompts": "the same in the first of its shape, by rendering each prompt",
            "render_tokenise": "the tokenizer's part of either",
            "spans": "all of ours: render, tokenise, starts, search",
            "exploded": "a row per answer, ids of prompt and answer, as backend keep makes them",
            "naive": "only the prompts of those rows, each tokenised from its first character",
        },
    }
    Path("docs/results").mkdir(parents=True, exist_ok=True)
    Path("docs/results/mask.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
