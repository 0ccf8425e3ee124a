"""prepare_prompts: a workload -> its prompts as the target reads them.   python -m stages.prepare_prompts WORKLOAD

Both engines read what is written here, so both are asked the same, in the same order. Prompts are the eval split's, a
published set's problems through the target's chat template, or `random`: SGLang's bench_serving under that name, on the
eval split's tokens. What each set's problems are asked with is docs/workloads.md's to say.

A workload takes its first prompts. A published set keeps its authors' order, as papers take its first 80; the eval split
is put in the order of a hash, since in its own order the first prompts would all be of its first file.
"""

import hashlib
import itertools
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl

from stages.data import conversations, prompt_sets, workload_prompts
from stages.params import schema
from stages.params.benchmark_sections import Workload
from stages.params.section import PARAMS_FILE, get_named
from stages.target import manifest
from stages.telemetry import stage_record

EVAL_FOLDER = Path("data/sampled/eval")
SALT = b"prepare_prompts"  # another than those that choose the rows to sample
LENGTHS_STREAM, SHARES_STREAM, PLACES_STREAM = range(
    3
)  # each draw of `random` has numbers of its own, so that none moves with another

Row = dict[str, Any]
T = TypeVar("T")


def main(workload: str) -> None:
    p = schema.load_params()
    w = get_named(p.benchmark.workloads, workload, "benchmark.workloads")
    made = manifest.read_manifest()
    if w.prompts == "eval":
        measured, warm = _select_prompts(
            workload, w, [_make_prompt_row(**row) for row in _read_eval_prompts().to_dicts()]
        )
    elif w.prompts == "random":
        rows = _make_random_prompts(w, _read_eval_prompts())
        measured, warm = rows[: w.num_prompts], rows[w.num_prompts :]
    else:
        measured, warm = _read_set_prompts(p, workload, w, made)
    _check_prompts_fit(workload, [*measured, *warm], made.max_position_embeddings)
    whole = [{**row, "warmup": again} for some, again in ((measured, False), (warm, True)) for row in some]
    workload_prompts.write_prompts(workload, pl.DataFrame(whole, schema=workload_prompts.PROMPTS_SCHEMA))
    _print_summary(workload, w, measured, warm)


def _make_prompt_row(id: str, prompt_ids: list[int], **more: Any) -> Row:
    """One of asked.ASKED; what isn't given is null."""
    return {"id": id, "prompt_ids": prompt_ids, "messages": None, "later": None, "images": None, "length_share": 1.0,
            "reference": None} | more  # fmt: skip


def _read_eval_prompts() -> pl.DataFrame:
    """Return the eval split's rows in the order of their prompts' hash, which no order of files or rows moves."""
    split = conversations.read_table(EVAL_FOLDER, conversations.SAMPLED_SCHEMA, "sample_target").select(
        "id", "prompt_ids", "images"
    )
    hashes = [
        hashlib.sha256(
            b"\0".join([SALT, *(image.encode() for image in images or []), np.array(ids, "<i4").tobytes()])
        ).digest()
        for _, ids, images in split.iter_rows()
    ]
    return split[sorted(range(len(split)), key=hashes.__getitem__)]


# A published set


def _read_set_prompts(
    p: schema.Params, workload: str, w: Workload, made: manifest.TargetManifest
) -> tuple[list[Row], list[Row]]:
    """Its problems, in its order, each as the one message of a user."""
    from stages.target import chat_template  # transformers takes seconds, which the eval split has no use for

    chosen = p.prepare_prompts.sets[w.prompts]
    problems = prompt_sets.read_prompt_set(chosen.from_, chosen.name, chosen.split, chosen.revision, chosen.format)
    tokenizer = chat_template.load_tokenizer(
        manifest.resolve_weights_folder(made), p.target.trust_remote_code, made.chat_template
    )

    def row(problem: prompt_sets.PromptProblem) -> Row:
        first, *later = problem.turns
        messages = [{"role": "user", "content": first}]
        ids = chat_template.encode_prompt(tokenizer, messages, p.sample_target.thinking)
        after = later if later and w.turns == "all" else None
        return _make_prompt_row(problem.id, ids, messages=messages, later=after, reference=problem.reference)

    measured, warm = _select_prompts(workload, w, problems)
    return [row(problem) for problem in measured], [row(problem) for problem in warm]


# Random lengths


def _make_random_prompts(w: Workload, split: pl.DataFrame) -> list[Row]:
    """As many prompts as are asked for, and as many to warm up with, of the rows from `start` to `stop`.

    Lengths are uniform from length_range of the whole to the whole, as in SGLang's bench_serving, and a prompt is a row's
    tokens cut or repeated, as there. Theirs begin where the row does, and ours anywhere in it, each at another place as long
    as there are places: few rows then make many prompts, and a prefix cache finds little.
    """
    assert w.input_tokens is not None and w.num_prompts is not None
    texts = [ids for _, ids, images in split.iter_rows() if not images][w.start : w.stop]
    if not texts:
        raise ValueError(
            f"{EVAL_FOLDER} has no prompt without pictures from {w.start} on, expected some whose tokens random prompts can be "
            "made of: a picture can't be cut. Lower the workload's start, or serve prompts: eval"
        )
    count = w.num_prompts + w.warmup
    draws = [np.random.default_rng([w.seed, draw]) for draw in (LENGTHS_STREAM, SHARES_STREAM, PLACES_STREAM)]
    least = max(int(w.input_tokens * w.length_range), 1)
    lengths = draws[LENGTHS_STREAM].integers(least, w.input_tokens + 1, count)  # [N]
    shares = draws[SHARES_STREAM].uniform(w.length_range, 1, count)  # [N]
    upto = np.cumsum([len(ids) for ids in texts])  # [R] tokens of the rows up to and with each
    begins = itertools.cycle(draws[PLACES_STREAM].permutation(upto[-1]).tolist())
    rows = []
    for number, length, share, begin in zip(range(count), lengths.tolist(), shares.tolist(), begins, strict=False):
        row = int(np.searchsorted(upto, begin, side="right"))
        first = begin - int(upto[row] - len(texts[row]))
        turning = itertools.islice(itertools.cycle(texts[row]), first, first + length)
        rows.append(_make_prompt_row(f"random.{number}", list(turning), length_share=share))
    return rows


# What is asked of them


def _select_prompts(workload: str, w: Workload, there: list[T]) -> tuple[list[T], list[T]]:
    """(those to measure, those to warm up with).

    The latter are others where there are others: a server that keeps prefixes would else know what is measured. They come
    from behind the measured ones, then from before them, and from among them only where that isn't enough.

    Raises:
        ValueError: where none lies from `start` on.
    """
    taken = there[w.start : w.stop]
    if not taken:
        raise ValueError(
            f"{PARAMS_FILE}: benchmark.workloads.{workload}.start is {w.start}, expected at most {len(there) - 1}: "
            f"{w.prompts} has {len(there)} prompts, counted from 0"
        )
    measured = taken[: w.num_prompts]
    if w.num_prompts is not None and len(measured) < w.num_prompts:
        print(
            f"note: workload {workload} asks for {w.num_prompts} prompts, {w.prompts} has {len(measured)} from {w.start} to "
            f"{'its end' if w.stop is None else w.stop}"
        )
    others = [*there[w.start + len(measured) :], *there[: w.start]]
    return measured, list(itertools.islice(itertools.chain(others, itertools.cycle(measured)), w.warmup))


def _check_prompts_fit(workload: str, rows: list[Row], most: int) -> None:
    """Raises ValueError for a prompt that leaves no room for an answer, before a server is started for it."""
    for row in rows:
        if (count := len(row["prompt_ids"])) >= most:
            raise ValueError(
                f"prepare_prompts: workload {workload}, prompt {row['id']} has {count} tokens, expected fewer than the "
                f"{most} that the target holds (max_position_embeddings); set start and stop around it, lower input_tokens, "
                "or take another set"
            )


def _print_summary(workload: str, w: Workload, measured: list[Row], warm: list[Row]) -> None:
    counts = [len(row["prompt_ids"]) for row in measured]
    later = sum(len(row["later"] or []) for row in measured)
    turns = f", {later} later turns" if later else ""
    print(
        f"{workload}: {len(measured)} prompts of {w.prompts}, {min(counts)} to {max(counts)} tokens, {np.mean(counts):.1f} on "
        f"average{turns}; {len(warm)} to warm up with -> {workload_prompts.locate_prompts(workload)}"
    )


if __name__ == "__main__":
    schema.run_stage(stage_record.record_stage(main, "prepare_prompts"))
