"""Several prompts at once in the torch engine, on one GPU or more.   python -m benchmarks.batches [--parts right loads cards]

    right   a small target in float32: prompts of many lengths together give the tokens of each alone, greedy and sampled
    loads   Qwen3-8B's shape, random weights, bfloat16: tokens/s and time per pass of 1 to --most prompts of 512 tokens at
            once, plain and with a tree; the memory estimate and the measured peak
    cards   the small target, and a larger one, on two GPUs: the same tokens as on one; needs two

A random draft is never accepted, which does not change the time of a pass.
"""

import argparse
import time
from typing import Any

import torch

from benchmarks.engine import SMALL_TREES, TREES, draft_for, prompts, say, target
from stages.engine import device_placement
from stages.engine.decode import Engine
from stages.engine.memory_estimate import estimate_memory
from stages.engine.requests import DecodeRequest
from stages.engine.sampling import SamplingParams
from stages.params.tree_shape import TreeShape

END, ROOM, PROMPT, ANSWER = 7, 48, 512, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", default=["right", "loads"], choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--most", type=int, default=64)
    args = parser.parse_args()
    for name in args.parts:
        say(f"== {name}")
        PARTS[name](args)


def small(device: str) -> Engine:
    """The same weights on every device."""
    torch.manual_seed(3)
    model = target(6, 256, 8, 16, torch.float32, "cpu")
    draft = draft_for(model, 16)
    return Engine(model.to(device), [END], [2, 3, 4], draft.to(device))


def answers(updates: Any, count: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(count)]
    for group in updates:
        for number, step in group:
            found[number] += step.tokens if step else []
    return found


def right(args: argparse.Namespace) -> None:
    engine = small(args.device)
    for how in (None, (0.7, 0.9, 5)):
        asks = [
            DecodeRequest(p, ROOM, None, how and SamplingParams(*how, n))
            for n, p in enumerate([*prompts(), *prompts()])
        ]
        for tree in [None, *(TreeShape(*shape) for shape in SMALL_TREES)]:
            alone = answers(engine.decode_batch(asks, 1, tree), len(asks))
            for slots in (2, 5, 32):
                same = sum(
                    a == b
                    for a, b in zip(answers(engine.decode_batch(asks, slots, tree), len(asks)), alone, strict=True)
                )
                verdict = "ok   " if same == len(asks) else "OTHER"
                say(f"  {verdict} {how} {tree and tree.name}, {slots} at once: {same} of {len(asks)}")


def loads(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = target(args.layers, args.hidden, args.hidden // 128, 151936, torch.bfloat16, args.device)
    engine = Engine(model, [-1], [2, args.layers // 2, args.layers - 3], draft_for(model, 32000))
    draws = torch.Generator().manual_seed(1)
    slots = 1
    while slots <= args.most:
        asks = [
            DecodeRequest(torch.randint(0, 151936, (PROMPT - 3 * n,), generator=draws).tolist(), ANSWER)
            for n in range(slots)
        ]
        for tree in (None, TreeShape(*TREES[0])):
            say(timed(engine, asks, slots, tree, args.device == "cuda"))
        slots *= 4


def timed(engine: Engine, asks: list[DecodeRequest], slots: int, tree: TreeShape | None, cuda: bool) -> str:
    stated = estimate_memory(engine, PROMPT + ANSWER, slots, tree)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    engine.warm_up(asks, slots, tree)
    list(engine.decode_batch([ask._replace(max_new_tokens=3) for ask in asks], slots, tree))
    passes, begun, tokens, seen = 0, 0.0, 0, set[int]()
    for updates in engine.decode_batch(asks, slots, tree):
        steps = [(number, step) for number, step in updates if step]
        if any(number not in seen for number, _ in steps):  # a prefill: counted from the last one on
            seen.update(number for number, _ in steps)
            passes, begun, tokens = 0, time.perf_counter(), 0
        elif steps:
            passes, tokens = passes + 1, tokens + sum(len(step.tokens) for _, step in steps)
    seconds = time.perf_counter() - begun
    peak = f", memory: estimated {stated}, peak {torch.cuda.max_memory_allocated() / 2**30:.2f}" if cuda else ""
    each, rate = 1e3 * seconds / max(1, passes), tokens / seconds
    return f"{tree.name if tree else 'plain'}, {slots} at once: {each:.2f} ms a pass, {rate:.0f} tokens/s{peak}"


def on_cards(args: argparse.Namespace) -> None:
    one, two = small("cuda:0"), small("cpu")
    device_placement.place_model(two.model, ["cuda:0", "cuda:1"])
    assert two.draft is not None
    two = Engine(two.model, [END], [2, 3, 4], two.draft.to("cuda:0"))
    asks = [DecodeRequest(p, ROOM) for p in prompts()]
    for tree in [None, *(TreeShape(*shape) for shape in SMALL_TREES)]:
        for slots in (1, 3):
            both = [answers(engine.decode_batch(asks, slots, tree), len(asks)) for engine in (one, two)]
            say(f"  {'ok   ' if both[0] == both[1] else 'OTHER'} {tree and tree.name}, {slots} at once, on two cards")


PARTS = {"right": right, "loads": loads, "cards": on_cards}

if __name__ == "__main__":
    main()
