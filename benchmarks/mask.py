# ruff: noqa: B023 - each is called before the loop goes on
"""Rows of long conversations for backend `keep`: prompts that reuse earlier ids, against each tokenised from its start.

python -m benchmarks.mask [CONVERSATIONS]     # writes docs/results/mask.json
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stages.target import chat_template
from stages.toy import text_targets, weather

TURNS, TOKENS = 20, 4096


def conversation(tokenizer: Any, rng: random.Random, talks: list[list[dict[str, str]]]) -> list[dict[str, str]]:
    """20 messages, asked and answered in turn, of about 4,096 tokens together."""
    messages: list[dict[str, str]] = []
    for turn in range(TURNS):
        text, want = "", TOKENS // TURNS - 5
        while len(ids := tokenizer.encode(text, add_special_tokens=False)) < want:
            text += rng.choice(rng.choice(talks))["content"] + "\n"
        messages.append({"role": "assistant" if turn % 2 else "user", "content": tokenizer.decode(ids[:want])})
    return messages


def milliseconds(work: Callable[[], Any], repeat: int) -> float:
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
    rows: dict[str, list[float]] = {"render_tokenise": [], "exploded": [], "naive": []}
    lengths = []
    for _ in range(count):
        talk = conversation(tokenizer, rng, talks)

        def tokenise_each() -> list[list[int]]:
            return [chat_template.encode_prompt(tokenizer, talk[:i]) for i in range(1, TURNS, 2)]

        assert [prompt for prompt, _ in chat_template.encode_turns(tokenizer, talk, eos)] == tokenise_each()
        render = lambda: tokenizer(tokenizer.apply_chat_template(talk, tokenize=False))["input_ids"]  # noqa: E731
        lengths.append(len(render()))
        rows["render_tokenise"].append(milliseconds(render, 3))
        rows["exploded"].append(milliseconds(lambda: chat_template.encode_turns(tokenizer, talk, eos), 3))
        rows["naive"].append(milliseconds(tokenise_each, 1))
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "conversations": count,
        "turns": TURNS,
        "tokens": round(statistics.mean(lengths)),
        "milliseconds": {name: round(statistics.median(values), 3) for name, values in rows.items()},
        "of_one_conversation": {
            "render_tokenise": "the tokenizer's part, once",
            "exploded": "a row per answer, ids of prompt and answer, as backend keep makes them",
            "naive": "only the prompts of those rows, each tokenised from its first character",
        },
    }
    Path("docs/results").mkdir(parents=True, exist_ok=True)
    Path("docs/results/mask.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
