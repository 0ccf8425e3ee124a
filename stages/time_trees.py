"""time_trees: a short timing grid of the torch engine -> what a cycle costs.   python -m stages.time_trees CHECKPOINT

Whole cycles are timed, as decoding runs them, over a grid of steps, topk and tokens, and steps of plain decoding beside them.
Every round times every tree once, in turns forth and back, so that a drifting machine touches all alike; a tree's cost is the
median of its cycles. results/cost_fit.py fits the terms; with replay's tau the report predicts every tree's speedup.
A cost is of a draft's shapes, not of its weights: e000 stands for every checkpoint that train_draft makes of it.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from stages.data import conversations
from stages.draft import checkpoint
from stages.draft.eagle3 import Eagle3Draft
from stages.engine.decode import Engine
from stages.engine.decode_state import DecodeStep
from stages.params import schema
from stages.params.tree_sections import TimeTrees, TreeShape
from stages.results import cost_fit, interval, timing_grid, torch_records
from stages.target import loading, manifest
from stages.telemetry import stage_record

ANSWERS_FOLDER = Path("data/sampled/eval")
BATCH_SIZE = 1  # prompts that the torch engine decodes at once

StartDecoding = Callable[[], Iterator[DecodeStep]]


def main(name: str) -> None:
    p = schema.load_params()
    torch.set_num_threads(p.target.num_threads)
    started = time.perf_counter()
    made, s = manifest.read_manifest(), p.time_trees
    prompt, trees = _build_prompt(s.context, made.image_token_id), s.trees()
    _check_fits(s, made.max_position_embeddings)
    engine, config = _build_engine(p, made, name)

    steps = s.warmup + s.cycles
    plain = partial(engine.decode_plain, prompt, steps + 1)
    seconds = _time_decodings([plain, *(_make_speculative_decoding(engine, prompt, tree, steps) for tree in trees)], s)
    grid = [
        {"steps": tree.num_steps, "topk": tree.topk, "tokens": tree.num_draft_tokens, "batch": BATCH_SIZE}
        | _summarise_median("cycle_s", of_tree)
        for tree, of_tree in zip(trees, seconds[1:], strict=True)
    ]
    fit = cost_fit.fit_cost_model(grid)
    step = _summarise_median("step_s", seconds[0])
    also = {"dtype": p.target.dtype, "semantics": p.benchmark.semantics}
    found: dict[str, Any] = {
        "definitions": timing_grid.COST_DEFINITIONS,
        "engine": "torch",
        "workload": None,
        "max_new_tokens": None,
        "checkpoint": name,
        "draft": config,
        "target": [made.model, made.revision, made.config_digest],
        "settings": s.model_dump(exclude={"checkpoints"}) | also,
        "plain": [{"batch": BATCH_SIZE} | step],
        "grid": grid,
        "fit": fit.to_json(),
        "hardware": torch_records.describe_hardware(p.target.device, p.target.num_threads),
        "versions": torch_records.list_versions("torch", "transformers"),
        "seconds": round(time.perf_counter() - started, 2),
    }
    place = timing_grid.write_timing_grid(found)
    print(
        f"{len(grid)} trees in {found['seconds']:.1f} s: a plain step takes {1000 * step['step_s']:.2f} ms; trees "
        f"left out of the fit are predicted within {fit.error:.1%} (root mean square; at worst {fit.error_max:.1%}) -> {place}"
    )


def _build_prompt(tokens: int, picture: int | None) -> list[int]:
    """The first ids of the eval answers, one after another: the target's own text, since experts are chosen by what is said.

    Without `picture`, the token that stands for a piece of one. Raises ValueError where the answers have fewer.
    """
    ids: list[int] = []
    for row in conversations.read_table(ANSWERS_FOLDER, conversations.SAMPLED_SCHEMA, "sample_target").iter_rows(
        named=True
    ):
        ids += [token for token in row["answer_ids"] if token != picture]
        if len(ids) >= tokens:
            return ids[:tokens]
    raise ValueError(
        f"{ANSWERS_FOLDER} holds answers of {len(ids)} tokens in all, expected {tokens} (time_trees.context); lower it, or raise "
        "sample_target.eval_rows"
    )


def _check_fits(s: TimeTrees, holds: int) -> None:
    """Raises ValueError where the target holds too few positions for the context and the cycles that follow it."""
    need = s.context + max(
        _count_committed_tokens(tree, s.warmup + s.cycles) + tree.num_draft_tokens for tree in s.trees()
    )
    if need > holds:
        raise ValueError(
            f"time_trees needs {need} positions (context, warmup and cycles of the deepest tree), the target holds {holds}; "
            "lower time_trees.context, or its cycles"
        )


def _count_committed_tokens(tree: TreeShape, cycles: int) -> int:
    """Tokens that so many cycles may commit, and the one from prefill."""
    return 1 + cycles * (tree.num_steps + 1)


def _build_engine(p: schema.Params, made: manifest.TargetManifest, name: str) -> tuple[Engine, dict[str, Any]]:
    """One that no end token stops, and its draft's config.json."""
    model = loading.load_target(
        str(manifest.resolve_weights_folder(made)), None, p.target.dtype, p.target.device, p.target.trust_remote_code
    )
    config, tensors = checkpoint.read_draft(checkpoint.locate_checkpoint(name), p.made_by(name))
    draft = Eagle3Draft.of(config, tensors).to(p.target.device, model.dtype).requires_grad_(False)
    return Engine(model, [], made.feature_layers, draft, p.benchmark.semantics), config


def _make_speculative_decoding(engine: Engine, prompt: list[int], tree: TreeShape, cycles: int) -> StartDecoding:
    shape = tree.num_steps, tree.topk, tree.num_draft_tokens
    return partial(engine.decode_speculative, prompt, _count_committed_tokens(tree, cycles), *shape)


def _time_decodings(decodings: list[StartDecoding], s: TimeTrees) -> list[list[float]]:
    """Seconds of each decoding's steps after prefill and warm-up, of all rounds."""
    seconds: list[list[float]] = [[] for _ in decodings]
    for number in range(s.repeats):
        order = range(len(decodings))
        for at in order if number % 2 == 0 else reversed(order):
            # Ended at once, or it would keep its caches and the next take others.
            with closing(cast(Generator[DecodeStep, None, None], decodings[at]())) as decoding:
                seconds[at] += list(_time_steps(decoding, s.cycles, s.warmup))
    return seconds


def _time_steps(decoding: Iterator[DecodeStep], count: int, warmup: int) -> Iterator[float]:
    """Seconds from step to step. A step that came was read from the device; what has begun behind it is not waited for."""
    for _ in range(1 + warmup):  # prefill, then first steps, which may allocate and pick kernels
        next(decoding)
    last = time.perf_counter()
    for _ in range(count):
        next(decoding)
        begun, last = last, time.perf_counter()
        yield last - begun


def _summarise_median(name: str, seconds: list[float]) -> dict[str, Any]:
    """Return the columns `name`, error and samples of cost.GRID or cost.PLAIN."""
    found = interval.median_time(seconds)
    return {name: found.value, "error": found.error, "samples": len(seconds)}


if __name__ == "__main__":
    schema.run_stage(stage_record.record_stage(main, "time_trees", lambda: schema.load_params().target.gpus()))
