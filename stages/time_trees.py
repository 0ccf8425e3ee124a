"""time_trees: time a grid of trees on the torch engine.   python -m stages.time_trees CHECKPOINT

Times whole cycles, as decoding runs them, over a grid of num_steps, topk and num_draft_tokens, and steps of plain decoding.
Every round times each tree once, forwards and backwards in alternation, so that a drifting machine affects all alike; a tree's
time is the median over its cycles. results/cost_fit.py fits the cost model; with replay's tau the report predicts speedups.
Times depend on a draft's shapes, not on its weights: e000 stands for every checkpoint that train_draft makes from it.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from stages.data import conversations
from stages.draft.loading import load_draft
from stages.engine.decode import Engine
from stages.engine.decode_state import DecodeStep
from stages.params import schema
from stages.params.tree_sections import TimeTrees
from stages.params.tree_shape import TreeShape
from stages.results import cost_fit, interval, timing_grid, torch_records
from stages.target import loading, manifest
from stages.telemetry.run_stage import run_stage

ANSWERS_FOLDER = Path("data/sampled/eval")
BATCH_SIZE = 1

StartDecoding = Callable[[], Iterator[DecodeStep]]


def main(name: str) -> None:
    p = schema.load_params()
    torch.set_num_threads(p.benchmark.num_threads)
    started = time.perf_counter()
    target, s = manifest.read_manifest(), p.time_trees
    prompt, trees = _build_prompt(s.context, target.image_token_id), s.list_trees()
    _check_positions(s, target.max_position_embeddings)
    engine, config = _build_engine(p, target, name)

    steps = s.warmup + s.cycles
    plain = partial(engine.decode_plain, prompt, steps + 1)
    seconds = _time_decodings([plain, *(_make_speculative_decoding(engine, prompt, tree, steps) for tree in trees)], s)
    grid = [
        timing_grid.CycleTime(
            steps=tree.num_steps,
            topk=tree.topk,
            tokens=tree.num_draft_tokens,
            batch=BATCH_SIZE,
            **_summarise_median("cycle_s", of_tree),
        )
        for tree, of_tree in zip(trees, seconds[1:], strict=True)
    ]
    fit = cost_fit.fit_cost_model(grid)
    step = _summarise_median("step_s", seconds[0])
    also = {"dtype": p.target.dtype, "semantics": p.benchmark.tree_scoring}
    record = timing_grid.TimingGrid(
        definitions=timing_grid.COST_DEFINITIONS,
        engine="torch",
        workload=None,
        max_new_tokens=None,
        checkpoint=name,
        draft=config,
        target=[target.model, target.revision, target.config_digest],
        settings=s.list_settings() | also,
        plain=[timing_grid.PlainStepTime(batch=BATCH_SIZE, **step)],
        grid=grid,
        fit=fit,
        hardware=torch_records.describe_hardware(p.target.device, p.benchmark.num_threads),
        versions=torch_records.list_versions("torch", "transformers"),
        seconds=round(time.perf_counter() - started, 2),
    )
    place = timing_grid.write_timing_grid(record)
    print(
        f"{len(grid)} trees in {record.seconds:.1f} s: a plain step takes {1000 * step['step_s']:.2f} ms; trees "
        f"left out of the fit are predicted within {fit.error:.1%} (root mean square; at worst {fit.error_max:.1%}) -> {place}"
    )


def _build_prompt(tokens: int, image_token: int | None) -> list[int]:
    """Return the first ids of the eval answers: the target's own text, since it decides which experts are used.

    Image tokens are left out. Raises ValueError if the answers have fewer tokens.
    """
    ids: list[int] = []
    for row in conversations.read_table(ANSWERS_FOLDER, conversations.SAMPLED_SCHEMA, "sample_target").iter_rows(
        named=True
    ):
        ids += [token for token in row["answer_ids"] if token != image_token]
        if len(ids) >= tokens:
            return ids[:tokens]
    raise ValueError(
        f"{ANSWERS_FOLDER} holds answers of {len(ids)} tokens in all, expected {tokens} (time_trees.context); lower it, or raise "
        "sample_target.eval_rows"
    )


def _check_positions(s: TimeTrees, positions: int) -> None:
    """Raises ValueError if the target has too few positions for the context and the timed cycles."""
    needed = s.context + max(
        _count_committed_tokens(tree, s.warmup + s.cycles) + tree.num_draft_tokens for tree in s.list_trees()
    )
    if needed > positions:
        raise ValueError(
            f"time_trees needs {needed} positions (context, warmup and cycles of the deepest tree), the target holds "
            f"{positions}; lower time_trees.context, or its cycles"
        )


def _count_committed_tokens(tree: TreeShape, cycles: int) -> int:
    """Return the most tokens that prefill and so many cycles commit."""
    return 1 + cycles * (tree.num_steps + 1)


def _build_engine(p: schema.Params, target: manifest.TargetManifest, name: str) -> tuple[Engine, dict[str, Any]]:
    """Return an engine that no end token stops, and its draft's config.json."""
    model = loading.load_target(
        str(manifest.resolve_weights_folder(target)), p.target.dtype, p.target.device, p.target.trust_remote_code
    )
    draft, config = load_draft(p, name, p.target.device, model.dtype)
    return Engine(model, [], target.feature_layers, draft, p.benchmark.tree_scoring), config


def _make_speculative_decoding(engine: Engine, prompt: list[int], tree: TreeShape, cycles: int) -> StartDecoding:
    return partial(engine.decode_speculative, prompt, _count_committed_tokens(tree, cycles), tree)


def _time_decodings(decodings: list[StartDecoding], s: TimeTrees) -> list[list[float]]:
    """Return the seconds of each decoding's steps after prefill and warm-up, over all rounds."""
    seconds: list[list[float]] = [[] for _ in decodings]
    for number in range(s.repeats):
        order = range(len(decodings))
        for at in order if number % 2 == 0 else reversed(order):
            # Closed at once, so that the next decoding reuses its caches.
            with closing(cast(Generator[DecodeStep, None, None], decodings[at]())) as decoding:
                seconds[at] += list(_time_steps(decoding, s.cycles, s.warmup))
    return seconds


def _time_steps(decoding: Iterator[DecodeStep], count: int, warmup: int) -> Iterator[float]:
    """Yield the seconds from step to step; a step ends when its tokens are read, while the next may already run."""
    for _ in range(1 + warmup):  # prefill, then first steps, which may allocate and pick kernels
        next(decoding)
    last = time.perf_counter()
    for _ in range(count):
        next(decoding)
        previous, last = last, time.perf_counter()
        yield last - previous


def _summarise_median(name: str, seconds: list[float]) -> dict[str, Any]:
    """Return the columns `name`, error and samples of a CycleTime or PlainStepTime."""
    found = interval.estimate_median(seconds)
    return {name: found.value, "error": found.error, "samples": len(seconds)}


if __name__ == "__main__":
    run_stage(main, lambda: schema.load_params().target.gpus())
