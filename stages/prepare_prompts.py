"""prepare_prompts: a workload -> its prompts as the target reads them.   python -m stages.prepare_prompts WORKLOAD

Both engines read the file written here, so both get the same prompts in the same order. Prompts are those of the eval split,
the problems of a published set through the target's chat template (docs/workloads.md has their instructions), `written`:
questions that the target writes itself, or `random`: the prompts of SGLang's `bench_serving --dataset-name random`, on the eval
split's tokens.

A workload takes the first prompts. A published set keeps its authors' order, since papers take its first 80; the eval split
is sorted by a hash, since in its own order the first prompts would all be of its first file.
"""

import itertools
from pathlib import Path
from typing import TypeVar

import numpy as np
import polars as pl

from stages.data import conversations
from stages.params import schema, stage_inputs
from stages.params.benchmark_sections import Workload
from stages.params.section import PARAMS_FILE, get_named
from stages.prompts import prompt_sets, workload_prompts
from stages.prompts.prompt_sets import PromptProblem
from stages.prompts.workload_prompts import WorkloadPrompt
from stages.target import manifest
from stages.telemetry.run_stage import run_stage

EVAL_FOLDER = Path("data/sampled/eval")
# Each quantity of `random` prompts has its own random stream, so that changing one changes no other.
LENGTHS_STREAM, SHARES_STREAM, STARTS_STREAM = range(3)

WRITTEN_AT_ONCE = 16  # a constant: batches of other sizes round otherwise, and write other questions
MOST_WRITTEN = 20  # questions for one that is needed, before the target is said to end too few

T = TypeVar("T")


def main(workload: str) -> None:
    params = stage_inputs.read_params("prepare_prompts", workload)
    settings = get_named(params.benchmark.workloads, workload, "benchmark.workloads")
    target = manifest.read_manifest()
    if settings.prompts == "eval":
        measured, warmup = _select_prompts(workload, settings, _read_eval_split())
    elif settings.prompts == "random":
        rows = _make_random_prompts(settings, _read_eval_split())
        measured, warmup = rows[: settings.most_prompts], rows[settings.most_prompts :]
    else:
        if settings.prompts == "written":
            problems = _write_problems(params, workload, settings)
        else:
            problems = prompt_sets.read_prompt_set(params.prepare_prompts.sets[settings.prompts])
        measured, warmup = _encode_problems(params, workload, settings, target, problems)
    _check_prompts_fit(workload, [*measured, *warmup], target.max_position_embeddings)
    workload_prompts.write_prompts(workload, measured, warmup)
    _print_summary(workload, settings, measured, warmup)


def _read_eval_split() -> list[WorkloadPrompt]:
    """Return the prompts of the eval split, sorted by their hash: independent of file and row order."""
    split = conversations.read_table(EVAL_FOLDER, conversations.SAMPLED_SCHEMA, "sample_target")
    columns = split.select("id", "prompt_ids", "images", pl.col("answer_ids").list.len()).iter_rows()
    rows = (WorkloadPrompt(id, ids, images=images, answer_tokens=count) for id, ids, images, count in columns)
    return sorted(rows, key=lambda row: workload_prompts.hash_prompt(row.prompt_ids, row.images))


def _write_problems(params: schema.Params, workload: str, settings: Workload) -> list[PromptProblem]:
    """Let the target write as many questions as the workload takes, the same for the same seed.

    Raises:
        ValueError: where it ends too few of them.
    """
    from stages.sampling.write_questions import write_batches

    assert settings.most_prompts is not None
    needed = settings.start + settings.most_prompts + settings.warmup
    questions: list[str] = []
    for batch in write_batches(params, MOST_WRITTEN * needed, WRITTEN_AT_ONCE, seed=settings.seed):
        questions += [text for text, outcome in batch if outcome == "kept"]
        if len(questions) >= needed:
            return [PromptProblem(f"written.{number}", [text], None) for number, text in enumerate(questions[:needed])]
    raise ValueError(
        f"prepare_prompts: workload {workload} needs {needed} questions, the target ended {len(questions)} of "
        f"{MOST_WRITTEN * needed} that it wrote; a base model writes none. Take another set"
    )


def _encode_problems(
    params: schema.Params,
    workload: str,
    settings: Workload,
    target: manifest.TargetManifest,
    problems: list[PromptProblem],
) -> tuple[list[WorkloadPrompt], list[WorkloadPrompt]]:
    """Return (prompts to measure, prompts of the warm-up) of a set: each first turn is one user message."""
    from stages.target import chat_template  # transformers takes seconds, and the eval split does not need it

    tokenizer = chat_template.load_tokenizer(
        manifest.resolve_weights_folder(target), params.target.trust_remote_code, target.chat_template
    )

    def build_row(problem: PromptProblem) -> WorkloadPrompt:
        first, *rest = problem.turns
        messages = [{"role": "system", "content": problem.system}] if problem.system else []
        messages.append({"role": "user", "content": first})
        ids = chat_template.encode_prompt(tokenizer, messages, params.sample_target.thinking)
        later = rest if rest and settings.turns == "all" else None
        return WorkloadPrompt(problem.id, ids, messages=messages, later=later, reference=problem.reference)

    measured, warmup = _select_prompts(workload, settings, problems)
    return [build_row(problem) for problem in measured], [build_row(problem) for problem in warmup]


def _make_random_prompts(settings: Workload, split: list[WorkloadPrompt]) -> list[WorkloadPrompt]:
    """Return `most_prompts` prompts to measure and `warmup` more, made of the eval rows from `start` to `stop`.

    As in SGLang's bench_serving, lengths are uniform from length_range of input_tokens to input_tokens, and a prompt is a
    row's tokens cut or repeated. There a prompt starts with the row's first token, here at any token, a different one each
    time until all are used: a few rows thus make many prompts, and a prefix cache finds little.
    """
    assert settings.input_tokens is not None and settings.most_prompts is not None
    texts = [row.prompt_ids for row in split if not row.images][settings.start : settings.stop]
    if not texts:
        raise ValueError(
            f"{EVAL_FOLDER} has no prompt without images from {settings.start} on, expected some to make random prompts of: an "
            "image can't be cut. Lower the workload's start, or set its prompts to eval"
        )
    count = settings.most_prompts + settings.warmup
    rngs = [np.random.default_rng([settings.seed, stream]) for stream in (LENGTHS_STREAM, SHARES_STREAM, STARTS_STREAM)]
    shortest = max(int(settings.input_tokens * settings.length_range), 1)
    lengths = rngs[LENGTHS_STREAM].integers(shortest, settings.input_tokens + 1, count)  # [N]
    shares = rngs[SHARES_STREAM].uniform(settings.length_range, 1, count)  # [N]
    stops = np.cumsum([len(ids) for ids in texts])  # [R] where each row stops in the concatenation of all
    starts = itertools.cycle(rngs[STARTS_STREAM].permutation(stops[-1]).tolist())
    rows = []
    for number, length, share, start in zip(range(count), lengths.tolist(), shares.tolist(), starts, strict=False):
        row = int(np.searchsorted(stops, start, side="right"))
        first = start - int(stops[row] - len(texts[row]))
        ids = itertools.islice(itertools.cycle(texts[row]), first, first + length)
        rows.append(WorkloadPrompt(f"random.{number}", list(ids), length_share=share))
    return rows


def _select_prompts(workload: str, settings: Workload, available: list[T]) -> tuple[list[T], list[T]]:
    """Return (prompts to measure, prompts of the warm-up).

    Warm-up prompts come from after the measured ones, then from before them, and repeat measured ones only where these do
    not suffice: a server's prefix cache would otherwise hold measured prompts.

    Raises:
        ValueError: where no prompt is left from `start` on.
    """
    window = available[settings.start : settings.stop]
    if not window:
        raise ValueError(
            f"{PARAMS_FILE}: benchmark.workloads.{workload}.start is {settings.start}, expected at most {len(available) - 1}: "
            f"{settings.prompts} has {len(available)} prompts, counted from 0"
        )
    measured = window[: settings.most_prompts]
    if settings.most_prompts is not None and len(measured) < settings.most_prompts:
        print(
            f"note: workload {workload} asks for {settings.most_prompts} prompts, {settings.prompts} has {len(measured)} "
            f"from {settings.start} to {'its end' if settings.stop is None else settings.stop}"
        )
    others = [*available[settings.start + len(measured) :], *available[: settings.start]]
    return measured, list(itertools.islice(itertools.chain(others, itertools.cycle(measured)), settings.warmup))


def _check_prompts_fit(workload: str, rows: list[WorkloadPrompt], max_positions: int) -> None:
    """Raise ValueError for a prompt that leaves no room for an answer, before a server is started for it."""
    for row in rows:
        if (count := len(row.prompt_ids)) >= max_positions:
            raise ValueError(
                f"prepare_prompts: workload {workload}, prompt {row.id} has {count} tokens, expected fewer than the "
                f"{max_positions} of the target's max_position_embeddings; set start and stop around it, lower input_tokens, "
                "or take another set"
            )


def _print_summary(
    workload: str, settings: Workload, measured: list[WorkloadPrompt], warmup: list[WorkloadPrompt]
) -> None:
    counts = [len(row.prompt_ids) for row in measured]
    later = sum(len(row.later or []) for row in measured)
    turns = f", {later} later turns" if later else ""
    print(
        f"{workload}: {len(measured)} prompts of {settings.prompts}, {min(counts)} to {max(counts)} tokens, "
        f"{np.mean(counts):.1f} on average{turns}; {len(warmup)} to warm up with -> {workload_prompts.locate_prompts(workload)}"
    )


if __name__ == "__main__":
    run_stage(main)
