"""prepare_prompts: a workload -> its prompts as the target reads them.   python -m stages.prepare_prompts WORKLOAD

Both engines read what is written here, so both are asked the same, in the same order. Prompts are the eval split's, a
published set's problems through the target's chat template, or `random`: SGLang's bench_serving under that name, on the
eval split's tokens. What each set's problems are asked with is docs/workloads.md's to say.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from stages import params
from stages.formats import asked, conversations, manifest, prompt_sets
from stages.params import Workload

EVAL = Path("data/sampled/eval")
LENGTHS, SHARES, PLACES = range(3)  # each draw of `random` has numbers of its own, so that none moves with another

Row = dict[str, Any]


def main(workload: str) -> None:
    p = params.load()
    w = params.named(p.benchmark.workloads, workload, "benchmark.workloads")
    made = manifest.read()
    if w.prompts == "eval":
        rows = [_row(r["id"], r["prompt_ids"], images=r["images"]) for r in _eval().to_dicts()]
    elif w.prompts == "random":
        rows = _random(w, _eval())
    else:
        rows = _of_set(p, w, made)
    measured, warm = _chosen(workload, w, rows)
    _check_they_fit(workload, [*measured, *warm], made.max_position_embeddings)
    whole = [{**row, "warmup": again} for some, again in ((measured, False), (warm, True)) for row in some]
    asked.write(workload, pl.DataFrame(whole, schema=asked.ASKED))
    _tell(workload, w, measured, warm)


def _row(name: str, ids: list[int], **more: Any) -> Row:
    """One of asked.ASKED; what isn't given is null."""
    return {"id": name, "prompt_ids": ids, "messages": None, "later": None, "images": None, "length_share": 1.0,
            "reference": None} | more  # fmt: skip


def _eval() -> pl.DataFrame:
    return conversations.read(EVAL, conversations.SAMPLED, "sample_target")


# A published set


def _of_set(p: params.Params, w: Workload, made: manifest.Manifest) -> list[Row]:
    """Its problems, in its order, each as the one message of a user."""
    from stages.drafting import prompt  # transformers takes seconds, which the eval split has no use for

    chosen = p.prepare_prompts.sets[w.prompts]
    problems = prompt_sets.read(chosen.from_, chosen.name, chosen.split, chosen.revision, chosen.format)
    tokenizer = prompt.load_tokenizer(manifest.weights(made), p.target.trust_remote_code, made.chat_template)
    rows = []
    for problem in problems:
        first, *later = problem.turns
        messages = [{"role": "user", "content": first}]
        ids = prompt.prompt_ids(tokenizer, messages, p.sample_target.thinking)
        more = {"later": later if later and w.turns == "all" else None, "reference": problem.reference}
        rows.append(_row(problem.id, ids, messages=messages, **more))
    return rows


# Random lengths


def _random(w: Workload, split: pl.DataFrame) -> list[Row]:
    """As many prompts as are asked for, and as many to warm up with, of the rows from `begin` to `end`.

    Lengths are uniform from length_range of the whole to the whole, as in SGLang's bench_serving, and a prompt is a row's
    tokens cut or repeated, as there. Theirs begin where the row does, and ours anywhere in it: few rows then make many
    prompts, of which no two begin alike as long as there are tokens to begin with.
    """
    assert w.input_tokens is not None and w.num_prompts is not None
    texts = [ids for ids, images in split.select("prompt_ids", "images").iter_rows() if not images][w.begin : w.end]
    if not texts:
        raise ValueError(
            f"{EVAL} has no prompt without pictures from {w.begin} on, expected some whose tokens random prompts can be made "
            "of: a picture can't be cut. Lower the workload's begin, or serve prompts: eval"
        )
    count = w.num_prompts + w.warmup
    draws = [np.random.default_rng([w.seed, draw]) for draw in (LENGTHS, SHARES, PLACES)]
    least = max(int(w.input_tokens * w.length_range), 1)
    lengths = draws[LENGTHS].integers(least, w.input_tokens + 1, count)  # [N]
    shares = draws[SHARES].uniform(w.length_range, 1, count)  # [N]
    upto = np.cumsum([len(ids) for ids in texts])  # [R] tokens of the rows up to and with each
    begins = itertools.cycle(draws[PLACES].permutation(upto[-1]).tolist())
    rows = []
    for number, length, share, begin in zip(range(count), lengths.tolist(), shares.tolist(), begins, strict=False):
        row = int(np.searchsorted(upto, begin, side="right"))
        first = begin - int(upto[row] - len(texts[row]))
        turning = itertools.islice(itertools.cycle(texts[row]), first, first + length)
        rows.append(_row(f"random.{number}", list(turning), length_share=share))
    return rows


# What is asked of them


def _chosen(workload: str, w: Workload, rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """(those to measure, those to warm up with).

    The latter are others where there are others: a server that keeps prefixes would else know what is measured. They come
    from behind the measured ones, then from before them, and from among them only where that isn't enough.
    """
    begin, end = (w.begin, w.end) if w.prompts != "random" else (0, None)  # these are of the rows they are made of
    there = rows[begin:end]
    if not there:
        raise ValueError(
            f"{params.PARAMS}: benchmark.workloads.{workload}.begin is {begin}, expected at most {len(rows) - 1}: "
            f"{w.prompts} has {len(rows)} prompts, counted from 0"
        )
    measured = there[: w.num_prompts]
    if w.num_prompts is not None and len(measured) < w.num_prompts:
        print(
            f"note: workload {workload} asks for {w.num_prompts} prompts, {w.prompts} has {len(measured)} from {begin} to "
            f"{'its end' if end is None else end}"
        )
    others = [*rows[begin + len(measured) :], *rows[:begin]]
    return measured, list(itertools.islice(itertools.chain(others, itertools.cycle(measured)), w.warmup))


def _check_they_fit(workload: str, rows: list[Row], most: int) -> None:
    """Raises ValueError for a prompt that leaves no room for an answer, before a server is started for it."""
    for row in rows:
        if (count := len(row["prompt_ids"])) >= most:
            raise ValueError(
                f"prepare_prompts: workload {workload}, prompt {row['id']} has {count} tokens, expected fewer than the "
                f"{most} that the target holds (max_position_embeddings); set begin and end around it, lower input_tokens, "
                "or take another set"
            )


def _tell(workload: str, w: Workload, measured: list[Row], warm: list[Row]) -> None:
    counts = [len(row["prompt_ids"]) for row in measured]
    later = sum(len(row["later"] or []) for row in measured)
    turns = f", {later} later turns" if later else ""
    print(
        f"{workload}: {len(measured)} prompts of {w.prompts}, {min(counts)} to {max(counts)} tokens, {np.mean(counts):.1f} on "
        f"average{turns}; {len(warm)} to warm up with -> {asked.path(workload)}"
    )


if __name__ == "__main__":
    params.run_stage(main)
