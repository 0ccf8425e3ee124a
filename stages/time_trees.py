"""time_trees: time a grid of trees on the torch engine.   python -m stages.time_trees CHECKPOINT

Times whole cycles, as decoding runs them, over a grid of num_steps, topk and num_draft_tokens, and steps of plain decoding,
of one sequence or of several at once (`batches`).
Every round times each tree once, forwards and backwards in alternation, so that a drifting machine affects all alike; a tree's
time is the median over its cycles. Rounds end, in pairs, once the times are so precise that more would not change the error of
the fit. Plain decoding takes as many steps as the deepest tree can commit tokens, since the
first few after a prefill are slower. cells/cost_fit.py fits the cost model; with replay's tau the report predicts speedups.
Times depend on a draft's shapes, not on its weights: e000 stands for every EAGLE-3 checkpoint that train_draft makes from it.
A block draft is timed on the trees of the grid that are no deeper than its block.
"""

import itertools
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from statistics import fmean, median
from typing import cast

import torch

from stages.cells import cell, cost_fit, timing_grid
from stages.cells.interval import estimate_median
from stages.data import conversations
from stages.engine.decode import Engine
from stages.engine.decode_state import DecodeRequest, RequestUpdate
from stages.families.draft_decoding import build_engine
from stages.families.draft_files import LoadedDraft
from stages.families.family import get_files
from stages.params import schema, stage_inputs
from stages.params.engines import TORCH
from stages.params.tree_sections import TimeTrees
from stages.params.tree_shape import TreeShape
from stages.target import loading, manifest
from stages.telemetry.run_stage import run_stage

ANSWERS_FOLDER = Path("data/sampled/eval")
# Of the fit's error, that of the times, at which no further rounds are timed: without it the fit's would be a twentieth smaller.
NOISE_SHARE = 0.3


def main(name: str) -> None:
    p = stage_inputs.read_params("time_trees", name)
    torch.set_num_threads(p.benchmark.num_threads)
    started = time.perf_counter()
    target, s = manifest.read_manifest(), p.time_trees
    prompts = _build_prompts(s.context, max(s.batches), target.image_token_id)
    engine, loaded = _build_engine(p, target, name)
    depth = get_files(loaded.family).describe(loaded.config).depth  # of a block
    trees = s.list_block_trees(name, depth) if depth else s.list_trees()
    _check_positions(s, trees, target.max_position_embeddings)

    plain, grid, spreads = [], [], []
    timed_from, process_from = time.perf_counter(), time.process_time()
    for batch in s.batches:  # one after the other: caches and CUDA graphs are of one batch
        steps, *cycles = _time_decodings(engine, prompts[:batch], trees, s)
        count = len(steps) * s.cycles // len(cycles[0])  # of a round
        medians = [median(steps[start : start + count]) for start in range(0, len(steps), count)]
        spreads.append(max(medians) / min(medians) - 1)  # of the slowest round's median step above the fastest's
        plain.append(
            timing_grid.PlainStepTime(batch=batch, **timing_grid.summarise_times("step_s", steps, estimate_median))
        )
        grid += _summarise_cycles(trees, batch, cycles)
    share = (time.process_time() - process_from) / (time.perf_counter() - timed_from)
    fit = cost_fit.fit_cost_model(grid)
    also = {"dtype": p.target.dtype, "tree_scoring": p.benchmark.tree_scoring}
    record = timing_grid.TimingGrid(
        definitions=timing_grid.COST_DEFINITIONS,
        engine=TORCH.name,
        workload=None,
        max_new_tokens=None,
        checkpoint=name,
        draft=loaded.config,
        target=[target.model, target.revision, target.config_digest],
        settings=s.model_dump(exclude={"checkpoints"}) | also,
        plain=plain,
        grid=grid,
        fit=fit,
        hardware=cell.describe_hardware(p.target.device, p.benchmark.num_threads),
        versions=cell.list_versions("torch", "transformers"),
        seconds=round(time.perf_counter() - started, 2),
        process_share=None if p.target.device.startswith("cuda") else share,
        spread=max(spreads) if s.repeats > 1 else None,
    )
    path = timing_grid.write_timing_grid(record)
    together = f", {', '.join(map(str, s.batches))} at once," if s.batches != [1] else ""
    print(
        f"{len(trees)} trees{together} in {record.seconds:.1f} s: a plain step takes {1000 * plain[0].step_s:.2f} ms; trees "
        f"left out of the fit are predicted within {fit.error:.1%} (root mean square; at worst {fit.error_max:.1%}) -> {path}"
    )


def _build_prompts(tokens: int, count: int, image_token: int | None) -> list[list[int]]:
    """Return prompts of the eval answers' ids: the target's own text, since it decides which experts are used.

    The first is the beginning of the first answers, each other one begins where that before it has ended; after the last answer
    comes the first. Image tokens are left out. Raises ValueError if the answers have fewer tokens than one prompt.
    """
    ids: list[int] = []
    for row in conversations.read_table(ANSWERS_FOLDER, conversations.SAMPLED_SCHEMA, "sample_target").iter_rows(
        named=True
    ):
        ids += [token for token in row["answer_ids"] if token != image_token]
        if len(ids) >= tokens * count:
            break
    if len(ids) < tokens:
        raise ValueError(
            f"{ANSWERS_FOLDER} holds answers of {len(ids)} tokens in all, expected {tokens} (time_trees.context); lower it, or "
            "raise sample_target.eval_rows"
        )
    rounds = itertools.cycle(ids)
    return [list(itertools.islice(rounds, tokens)) for _ in range(count)]


def _check_positions(s: TimeTrees, trees: list[TreeShape], positions: int) -> None:
    """Raises ValueError if the target has too few positions for the context and the timed cycles."""
    lengths = {tree: _count_asked_tokens(tree, s.warmup + s.cycles) + tree.num_draft_tokens for tree in trees}
    longest = max(lengths, key=lengths.__getitem__)
    needed = s.context + lengths[longest]
    if needed > positions:
        raise ValueError(
            f"time_trees needs {needed} positions (context, warmup and cycles of the deepest tree, {longest.name}), the target "
            f"holds {positions}; lower time_trees.context or cycles, or time trees that are less deep (time_trees.num_steps)"
        )


def _count_asked_tokens(tree: TreeShape | None, cycles: int) -> int:
    """Return one token more than prefill and so many cycles (without a tree plain steps) commit at most.

    So no answer ends while it is timed: freeing its slot takes a GPU several kernels, for 32 slots longer than a plain step.
    """
    return 1 + cycles * (tree.num_steps + 1 if tree else 1) + 1


def _build_engine(p: schema.Params, target: manifest.TargetManifest, name: str) -> tuple[Engine, LoadedDraft]:
    """Return an engine that no end token stops, and its draft."""
    model = loading.load_target(
        str(manifest.resolve_weights_folder(target)), p.target.dtype, p.target.device, p.target.trust_remote_code
    )
    return build_engine(p, name, model, target, p.target.device, [])


def _time_decodings(
    engine: Engine, prompts: list[list[int]], trees: list[TreeShape], s: TimeTrees
) -> list[list[float]]:
    """Return the seconds of the timed steps over all rounds: of plain decoding, then of each tree.

    Plain decoding has as many steps as the deepest tree commits tokens at most. Rounds are at most `repeats`.
    """
    deepest = 1 + max(tree.num_steps for tree in trees)
    decodings = [(None, s.warmup * deepest, s.cycles * deepest), *((tree, s.warmup, s.cycles) for tree in trees)]
    seconds: list[list[float]] = [[] for _ in decodings]
    for number in range(s.repeats):
        order = range(len(decodings))
        for index in order if number % 2 == 0 else reversed(order):
            seconds[index] += list(_time_steps(engine, prompts, *decodings[index]))
        if number % 2 and _is_precise(_summarise_cycles(trees, len(prompts), seconds[1:])):
            break
    return seconds


def _summarise_cycles(trees: list[TreeShape], batch: int, seconds: list[list[float]]) -> list[timing_grid.CycleTime]:
    """Return the time of each tree's cycle from the seconds of its cycles."""
    return [
        timing_grid.CycleTime(
            num_steps=tree.num_steps,
            topk=tree.topk,
            num_draft_tokens=tree.num_draft_tokens,
            batch=batch,
            **timing_grid.summarise_times("cycle_s", of_tree, estimate_median),
        )
        for tree, of_tree in zip(trees, seconds, strict=True)
    ]


def _is_precise(grid: list[timing_grid.CycleTime]) -> bool:
    """Return whether the errors of the times, root mean square, are at most NOISE_SHARE of the error of their fit."""
    noise = fmean((point.error or 0.0) ** 2 for point in grid) ** 0.5
    return noise <= NOISE_SHARE * cost_fit.fit_cost_model(grid).error


def _time_steps(
    engine: Engine, prompts: list[list[int]], tree: TreeShape | None, warmup: int, count: int
) -> Iterator[float]:
    """Yield the seconds from step to step of all prompts at once; a step is a cycle, or one of plain decoding without a tree.

    A step ends when its tokens are read, while the next may already run.
    """
    requests = [DecodeRequest(prompt, _count_asked_tokens(tree, warmup + count)) for prompt in prompts]
    updates = cast(Generator[list[RequestUpdate], None, None], engine.decode_batch(requests, len(requests), tree))
    with closing(updates):  # at once, so that the next decoding reuses its caches
        # That they begin, their prefills, then first steps, which may allocate and pick kernels.
        for _ in range(1 + len(requests) + warmup):
            next(updates)
        last = time.perf_counter()
        for _ in range(count):
            next(updates)
            previous, last = last, time.perf_counter()
            yield last - previous


if __name__ == "__main__":
    run_stage(main, lambda: schema.load_params().target.gpus())
