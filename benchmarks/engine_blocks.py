"""Block drafts on the torch engine, on one GPU.   python -m benchmarks.engine_blocks [--parts right speed]

    right    a small target with random drafts of every method: speculative = plain, token for token in float32, greedy and at
             temperature 0.7, and the share of identical answers in bfloat16; drafts that are drawn too, which share only the
             distribution, are counted (tests compare it on a CPU)
    speed    Qwen3-8B's shape (benchmarks/engine.py), random weights, bfloat16: a plain step, and cycles of a DFlash draft of
             blocks of 16 and a DSpark draft of 7, five layers each: the whole block as a chain, and a tree of 32 tokens

The lower bound of a cycle: the 15.63 GB of weights that a plain step reads, and the draft's 2.1 GB and the head's 1.24 GB again,
for its logits: 4.32 ms at the 4.39 TB/s that an H200 reads. A Markov head chooses one draft after the other.
"""

import argparse

import torch

from benchmarks.engine import (
    END,
    HOT,
    ROOM,
    SMALL,
    collect_tokens,
    compare,
    go_on_after_failure,
    prompts,
    run_parts,
    say,
    target,
    time_steps,
)
from benchmarks.training_blocks import BLOCK_SIZES, FEATURE_LAYERS, build_block_draft
from stages.draft.block_draft import BlockDraft
from stages.engine.decode import Engine
from stages.engine.sampling import SamplingParams
from stages.params.tree_shape import TreeShape

SMALL_LAYERS = [2, 3, 4]


def draw_draft(model, method: str, layers: int, feature_layers: list[int], std: float) -> BlockDraft:
    """Return a random draft of the target's shape."""
    sizes = {"hidden": model.config.hidden_size, "vocab": model.config.vocab_size}
    with torch.device(model.device):
        draft = build_block_draft(
            argparse.Namespace(method=method, layers=layers, layer_ids=tuple(feature_layers), **sizes)
        ).to(model.dtype)
        for weight in draft.parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=std)
    return draft.requires_grad_(False)


def list_trees(draft: BlockDraft) -> list[tuple[int, int, int]]:
    """Return the chain of the whole block, and a tree."""
    drafts = draft.config.num_drafts
    return [(drafts, 1, drafts + 1), (drafts, 4, 32)]


def right(args: argparse.Namespace) -> None:
    asked = prompts()
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(3)
        model = target(6, 256, 2, 512, dtype, args.device)
        # One of few tokens is the most probable, so drafts are accepted.
        model.get_output_embeddings().weight[SMALL:] = 0
        for method in BLOCK_SIZES:
            with go_on_after_failure():
                compare_decodings(model, method, asked)


def compare_decodings(model, method: str, asked: list) -> None:
    """Print whether a draft of `method` changes answers, and how many of the drafts that it draws are accepted."""
    draft = draw_draft(model, method, 2, SMALL_LAYERS, 0.2)
    engine = Engine(model, [END], SMALL_LAYERS, draft)
    for how in (None, *HOT) if model.dtype == torch.float32 else (None,):
        drawn = [SamplingParams(*how, seed) if how else None for seed in range(len(asked))]
        plain = [collect_tokens(engine.decode_plain(p, ROOM, sampling=h)) for p, h in zip(asked, drawn, strict=True)]
        for tree in list_trees(draft):
            compare((str(model.dtype)[6:], method, tree, how or "greedy"), decode(engine, asked, drawn, tree), plain)
    drawn = [SamplingParams(*HOT[0], seed, samples_drafts=True) for seed in range(len(asked))]
    runs = decode(engine, asked, drawn, list_trees(draft)[0])
    cycles = [step for steps in runs for step in steps[1:]]
    say(f"  {method}, drafts drawn: {sum(s.num_accepted for s in cycles)} accepted in {len(cycles)} cycles")


def decode(engine: Engine, asked: list, drawn: list, tree: tuple[int, int, int]) -> list:
    shape = TreeShape(*tree)
    return [list(engine.decode_speculative(p, ROOM, shape, sampling=h)) for p, h in zip(asked, drawn, strict=True)]


def speed(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = target(args.layers, args.hidden, args.hidden // 128, 151936, torch.bfloat16, args.device)
    layers = [layer for layer in FEATURE_LAYERS if layer < args.layers]
    for method in BLOCK_SIZES:
        with go_on_after_failure():
            time_method(model, method, layers)


def time_method(model, method: str, layers: list[int]) -> None:
    """Print the times of cycles with a draft of `method`; with DFlash's those of a plain step too."""
    draft = draw_draft(model, method, 5, layers, 0.02)
    weights = sum(parameter.numel() for parameter in draft.parameters()) / 1e9
    say(f"{method}, blocks of {draft.config.block_size}, {weights:.2f}e9 weights")
    chain, tree = list_trees(draft)
    hot = SamplingParams(0.7, 0.95, 50, 1)
    drafts_too = SamplingParams(0.7, 0.95, 50, 1, samples_drafts=True)
    decodings = [(None, None), (chain, None), (tree, None), (chain, hot), (chain, drafts_too)]
    time_steps(Engine(model, [-1], layers, draft), decodings if method == "dflash" else decodings[1:])


PARTS = {"right": right, "speed": speed}

if __name__ == "__main__":
    run_parts(__doc__, PARTS)
