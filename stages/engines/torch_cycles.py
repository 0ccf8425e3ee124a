"""The timing grid of the torch engine: whole cycles, as decoding runs them, of one sequence or of several at once (`batches`).

A tree's time is the median over its cycles. Rounds over all trees end once the times are so precise that more would not change
the error of the fit. A block draft is timed on the trees of the grid that are no deeper than its block.
"""

import itertools
import time
from functools import partial
from statistics import fmean, median

import torch

from stages.cells import cell, cost_fit
from stages.cells.interval import estimate_median
from stages.cells.timing_grid import CycleTime, MeasuredGrid, PlainStepTime
from stages.engine import step_times
from stages.families.draft_decoding import build_engine
from stages.families.family import get_files
from stages.params import schema
from stages.params.tree_sections import TimeCycles
from stages.params.tree_shape import TreeShape
from stages.prompts import workload_prompts
from stages.target import loading, manifest

# Of the fit's error, that of the times, at which no further rounds are timed: without it the fit's would be a twentieth smaller.
NOISE_SHARE = 0.3


def time_cycles(params: schema.Params, checkpoint: str) -> list[MeasuredGrid]:
    """Return the grid of a checkpoint's draft. Raises ValueError if the target has too few positions."""
    target, s, device = manifest.read_manifest(), params.time_cycles, params.target.device
    torch.set_num_threads(params.benchmark.num_threads)
    folder = str(manifest.resolve_weights_folder(target))
    model = loading.load_target(folder, params.target.dtype, device, params.target.trust_remote_code)
    engine, draft = build_engine(params, checkpoint, model, target, device, end_tokens=[])
    trees = s.list_timed_trees(get_files(draft.family).describe(draft.config).depth)
    _check_positions(s, trees, target.max_position_embeddings)
    prompts = build_prompts(s, target.image_token_id)
    plain, grid, spreads = [], [], []
    timed_from, process_from = time.perf_counter(), time.process_time()
    for batch in s.batches:  # one after the other: caches and CUDA graphs are of one batch
        steps, *cycles = step_times.time_rounds(
            engine, prompts[:batch], trees, s.warmup, s.cycles, s.repeats, partial(_is_precise, trees, batch)
        )
        count = len(steps) * s.cycles // len(cycles[0])  # of a round
        medians = [median(steps[start : start + count]) for start in range(0, len(steps), count)]
        spreads.append(max(medians) / min(medians) - 1)  # of the slowest round's median step above the fastest's
        plain.append(PlainStepTime.build(batch, estimate_median(steps), len(steps)))
        grid += _summarise_cycles(trees, batch, cycles)
    share = (time.process_time() - process_from) / (time.perf_counter() - timed_from)
    return [
        MeasuredGrid(
            workload=None,
            max_new_tokens=None,
            draft=draft.config,
            settings={
                **s.model_dump(exclude={"engines", "checkpoints", "workload", "trees", "accept_length"}),
                "dtype": params.target.dtype,
                "tree_scoring": params.benchmark.tree_scoring,
            },
            plain=plain,
            grid=grid,
            hardware=cell.describe_hardware(device, params.benchmark.num_threads),
            versions=cell.list_versions("torch", "transformers"),
            process_share=None if device.startswith("cuda") else share,
            spread=max(spreads) if s.repeats > 1 else None,
        )
    ]


def build_prompts(s: TimeCycles, image_token: int | None) -> list[list[int]]:
    """Return a context for each sequence of the largest batch, of the workload's prompts: a text decides which experts are used.

    The first begins with the first prompt, each other one where that before it has ended; after the last prompt comes the first.
    Image tokens are left out.
    """
    prompts, _ = workload_prompts.read_prompts(s.workload)
    ids = [token for tokens in prompts["prompt_ids"].to_list() for token in tokens if token != image_token]
    rounds = itertools.cycle(ids)
    return [list(itertools.islice(rounds, s.context)) for _ in range(max(s.batches))]


def _check_positions(s: TimeCycles, trees: list[TreeShape], positions: int) -> None:
    """Raises ValueError if the target has too few positions for the context and the timed cycles."""
    steps = s.warmup + s.cycles
    most, deepest = max((step_times.count_asked_tokens(t, steps) + t.num_draft_tokens, t.name) for t in trees)
    if s.context + most > positions:
        raise ValueError(
            f"time_cycles needs {s.context + most} positions (context, warmup and cycles of {deepest}), the target holds "
            f"{positions}; lower time_cycles.context or cycles, or time trees that are less deep (time_cycles.num_steps)"
        )


def _summarise_cycles(trees: list[TreeShape], batch: int, seconds: list[list[float]]) -> list[CycleTime]:
    """Return the time of each tree's cycle from the seconds of its cycles."""
    return [
        CycleTime.build(tree, batch, estimate_median(of_tree), len(of_tree))
        for tree, of_tree in zip(trees, seconds, strict=True)
    ]


def _is_precise(trees: list[TreeShape], batch: int, seconds: list[list[float]]) -> bool:
    """Return whether the errors of the times, root mean square, are at most NOISE_SHARE of the error of their fit."""
    grid = _summarise_cycles(trees, batch, seconds)
    noise = fmean((point.error or 0.0) ** 2 for point in grid) ** 0.5
    return noise <= NOISE_SHARE * cost_fit.fit_cost_model(grid).error
