"""benchmark: one cell of the table, by the torch engine.   python -m stages.benchmark WORKLOAD CHECKPOINT TREE

Plain and speculative decoding of the same prompts, in turns, so that a drifting machine touches both alike. At float32
the two must say the same: the share of identical answers is a metric of every greedy cell. Above temperature 0 both are
drawn from the same seed, so that one is not timed on a longer answer than the other (drafting/sampling.py). A later turn
of a question comes after plain decoding's own earlier answers, for both: so both decode the same prompt, even where a
near-tie parted them.
"""

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import torch

from stages import params
from stages.drafting import acceptance, prompt, target
from stages.drafting.decode import Engine, Step
from stages.drafting.draft import Draft
from stages.drafting.pixels import Eyes, Pixels
from stages.drafting.sampling import Sampling
from stages.formats import asked, cell, checkpoint, manifest
from stages.params import Tree, Workload
from stages.serving import energy, grades

KINDS = ("plain", "speculative")
SAMPLES, QUANTILES = 2000, (0.025, 0.975)  # as of tau's interval

Row = dict[str, Any]
Said = dict[str, list[int]]  # by kind of decoding, the ids of an answer


@dataclass(frozen=True)
class Work:
    """What every decoding of a cell needs."""

    p: params.Params
    w: Workload
    tree: Tree
    engine: Engine
    shown: dict[str, Pixels | None]  # the pictures of each prompt, by its id
    tokenizer: Any  # None where no text is needed


def main(workload: str, name: str, tree_name: str) -> None:
    p = params.load()
    torch.set_num_threads(p.target.num_threads)
    meter, started = energy.Meter(p.target.gpus()), time.perf_counter()
    tree, w = Tree.parse(tree_name), params.named(p.benchmark.workloads, workload, "benchmark.workloads")
    prompts, warm = asked.read(workload)
    if w.grade:
        asked.check_graded(workload, prompts)
    engine, shown = _engine(p, name), _shown(p, pl.concat([prompts, warm]))
    work = Work(p, w, tree, engine, shown, _tokenizer(p, w, prompts))

    for question in warm.iter_rows(named=True):  # not counted: first calls allocate and pick kernels
        for kind in KINDS:
            list(_decoding(work, kind, question["prompt_ids"], question["id"], _sampling(work, question["id"], 0, 0)))
    rows, histogram = [], np.zeros(tree.num_steps + 1, dtype=np.int64)
    spoken: list[Said] = []  # of each row, to be graded once no clock runs
    for repeat in range(w.repeats):
        for number, question in enumerate(prompts.iter_rows(named=True)):
            for row, cycles, said in _turns(work, question, repeat, number):
                histogram += np.bincount([s.accepted for s in cycles], minlength=tree.num_steps + 1)
                rows.append(row)
                spoken.append(said)
    metrics = _metrics(rows, tree)
    place = cell.write(
        {
            "workload": workload,
            "checkpoint": name,
            "tree": tree_name,
            **tree.model_dump(),
            "engine": "torch",
            "definitions": cell.DEFINITIONS,
            "temperature": w.temperature,
            "top_p": w.top_p,
            "top_k": w.top_k,
            "metrics": metrics,
            "repeats": _repeats(rows),
            "quality": _grade(work, rows, spoken, dict(prompts.select("id", "reference").iter_rows())),
            "histogram": histogram.tolist(),
            "prompts": rows,
            "hardware": cell.hardware(p.target.device, p.target.num_threads),
            "versions": cell.versions("torch", "transformers"),
            "seconds": round(time.perf_counter() - started, 2),
            "seed": w.seed,
            "gpus": meter.names(),
            "joules": meter.joules(),
        }
    )
    same = metrics["identical_share"]
    alike = "" if same is None else f"identical {same:.0%} of "
    print(
        f"{tree_name} at {name}: tau {metrics['tau']:.3f}, speedup {metrics['speedup']:.2f}, "
        f"{alike}{len(rows)} answers -> {place}"
    )


def _turns(work: Work, question: Row, repeat: int, number: int) -> Iterator[tuple[Row, list[Step], Said]]:
    """Of each turn its row, its cycles, and what both said.

    Who goes first changes from prompt to prompt, from repeat to repeat and from turn to turn.
    """
    messages, ids, answer = question["messages"], question["prompt_ids"], ""
    for turn, says in enumerate([None, *(question["later"] or [])]):
        if says is not None:
            messages = [*messages, {"role": "assistant", "content": answer}, {"role": "user", "content": says}]
            ids = prompt.prompt_ids(work.tokenizer, messages, work.p.sample_target.thinking)
        order = KINDS if (number + repeat + turn) % 2 == 0 else KINDS[::-1]
        drawn = _sampling(work, question["id"], repeat, turn)
        timed = {
            kind: _timed(partial(_decoding, work, kind, ids, question["id"], drawn), work.p.target.device)
            for kind in order
        }
        said, steps, prefill, e2e = timed["speculative"]
        plain_said, _, plain_prefill, plain_e2e = timed["plain"]
        cycles = steps[1:]
        row = {
            "id": question["id"],
            "repeat": repeat,
            "turn": turn,
            "prompt_tokens": len(ids),
            "output_tokens": len(said),
            "cycles": len(cycles),
            "accepted": sum(s.accepted for s in cycles),
            "identical": None if drawn else said == plain_said,
            "divergence_margin": None
            if drawn
            else _margin(work.engine, ids, work.shown[question["id"]], said, plain_said),
            "finish_reason": "stop" if said[-1] in work.engine.eos else "length",
            "prefill_latency_s": prefill,
            "e2e_latency_s": e2e,
            "correct": None,
            "baseline_output_tokens": len(plain_said),
            "baseline_prefill_latency_s": plain_prefill,
            "baseline_e2e_latency_s": plain_e2e,
            "baseline_correct": None,
        }
        yield row, cycles, {"plain": plain_said, "speculative": said}
        if work.tokenizer is not None:
            answer = _text(work, plain_said)


def _sampling(work: Work, name: str, repeat: int, turn: int) -> Sampling | None:
    """How an answer is drawn: by the workload's seed and what it answers, so that order has no part in it; None: greedily."""
    w = work.w
    if w.temperature == 0:
        return None
    drawn = hashlib.sha256(f"{w.seed}:{name}:{repeat}:{turn}".encode()).digest()
    return Sampling(w.temperature, w.top_p, w.top_k, int.from_bytes(drawn[:8], "big") >> 1)


def _decoding(work: Work, kind: str, ids: list[int], name: str, drawn: Sampling | None) -> Iterator[Step]:
    most, pictures, tree = work.w.max_new_tokens, work.shown[name], work.tree
    assert isinstance(most, int), "params.Benchmark sees to it"
    if kind == "plain":
        return work.engine.plain(ids, most, pictures, drawn)
    return work.engine.speculative(ids, most, tree.num_steps, tree.topk, tree.num_draft_tokens, pictures, drawn)


def _tokenizer(p: params.Params, w: Workload, prompts: pl.DataFrame) -> Any:
    """Where answers are graded, or later turns follow them."""
    if not w.grade and not prompts["later"].is_not_null().any():
        return None
    made = manifest.read()
    return prompt.load_tokenizer(manifest.weights(made), p.target.trust_remote_code, made.chat_template)


def _text(work: Work, ids: list[int]) -> str:
    """An answer as a server would send it: without the target's special tokens."""
    return work.tokenizer.decode(ids, skip_special_tokens=True)


def _engine(p: params.Params, name: str) -> Engine:
    made = manifest.read()
    model = target.load(str(manifest.weights(made)), None, p.target.dtype, p.target.device, p.target.trust_remote_code)
    config, tensors = checkpoint.read_draft(checkpoint.folder(name), p.made_by(name))
    draft = Draft.of(config, tensors).to(p.target.device, model.dtype).requires_grad_(False)
    return Engine(model, made.eos_token_ids, made.feature_layers, draft, p.benchmark.semantics)


def _shown(p: params.Params, prompts: pl.DataFrame) -> dict[str, Pixels | None]:
    """The pictures of each prompt, by its id, decoded before any clock runs: a server's client sends them ready, too."""
    images = {row["id"]: row["images"] for row in prompts.iter_rows(named=True)}
    if not any(images.values()):
        return dict.fromkeys(images)
    eyes = Eyes(str(manifest.weights(manifest.read())), p.target.trust_remote_code)
    return {name: eyes.see(paths) if paths else None for name, paths in images.items()}


def _margin(
    engine: Engine, prompt: list[int], pictures: Pixels | None, said: list[int], plain_said: list[int]
) -> float | None:
    """How sure the target was where two answers part: a near-tie is rounding, a wide gap would be a defect."""
    if said == plain_said:
        return None
    shared = next(
        (i for i, (a, b) in enumerate(zip(said, plain_said, strict=False)) if a != b), min(len(said), len(plain_said))
    )
    return engine.margin(prompt, plain_said[:shared], pictures)


def _timed(run, device: str) -> tuple[list[int], list[Step], float, float]:
    """All of a decoding: its tokens, its steps, seconds to the first token and to the last."""
    begin = _now(device)
    decoding = run()
    steps = [next(decoding)]
    first = _now(device)
    steps += decoding
    last = _now(device)
    return [token for s in steps for token in s.tokens], steps, first - begin, last - begin


def _now(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


# Grades


def _grade(work: Work, rows: list[Row], spoken: list[Said], references: dict[str, str]) -> dict[str, Any] | None:
    """Fills in `correct` and `baseline_correct` of first turns, and says how many are; None where nothing is graded."""
    if not work.w.grade:
        return None
    first = [(row, said) for row, said in zip(rows, spoken, strict=True) if row["turn"] == 0]
    for row, said in first:
        for kind, column in (("plain", "baseline_correct"), ("speculative", "correct")):
            row[column] = grades.grade(references[row["id"]], _text(work, said[kind]))
    graded = [references[row["id"]] for row, _ in first]
    return {
        "plain": grades.quality(graded, [row["baseline_correct"] for row, _ in first]),
        "speculative": grades.quality(graded, [row["correct"] for row, _ in first]),
    }


# Metrics


def _metrics(rows: list[Row], tree: Tree) -> dict[str, float | None]:
    """docs/metrics.md, version 2. Intervals are over whole prompts: all turns and repeats of one are drawn together."""
    accepted, cycles = (_by_prompt(rows, k).sum(1) for k in ("accepted", "cycles"))  # [P]
    tau = acceptance.tau(accepted, cycles)
    low, high = acceptance.interval(accepted, cycles)
    seconds, plain_seconds = (sum(r[k] for r in rows) for k in ("e2e_latency_s", "baseline_e2e_latency_s"))
    tokens, plain_tokens = (sum(r[k] for r in rows) for k in ("output_tokens", "baseline_output_tokens"))
    output_tok_s, baseline_tok_s = tokens / seconds, plain_tokens / plain_seconds
    speedup_low, speedup_high = _speedup_interval(rows)
    return {
        "tau": tau,
        "tau_low": float(low),
        "tau_high": float(high),
        "accept_rate": (tau - 1) / tree.num_steps,
        "node_accept_rate": float(accepted.sum() / max(1, cycles.sum() * (tree.num_draft_tokens - 1))),
        "prefill_latency_s": float(np.mean([r["prefill_latency_s"] for r in rows])),
        "e2e_latency_s": seconds / len(rows),
        "output_tok_s": output_tok_s,
        "baseline_output_tok_s": baseline_tok_s,
        "speedup": output_tok_s / baseline_tok_s,
        "speedup_low": speedup_low,
        "speedup_high": speedup_high,
        "identical_share": None if rows[0]["identical"] is None else float(np.mean([r["identical"] for r in rows])),
    }


def _by_prompt(rows: list[Row], column: str) -> np.ndarray:
    """Sums of a column, [P, R]: of each prompt, in each repeat, over its turns."""
    prompts = list(dict.fromkeys(row["id"] for row in rows))
    place = {name: number for number, name in enumerate(prompts)}
    sums = np.zeros((len(prompts), 1 + max(row["repeat"] for row in rows)), dtype=type(rows[0][column]))
    for row in rows:
        sums[place[row["id"]], row["repeat"]] += row[column]
    return sums


def _repeats(rows: list[Row]) -> list[dict[str, float]]:
    """Of each repeat alone, its speed and speedup: how much the machine drifts."""
    tokens, seconds, plain_tokens, plain_seconds = (column.sum(0) for column in _speeds(rows))  # [R]
    speed, plain = tokens / seconds, plain_tokens / plain_seconds
    return [
        {"output_tok_s": float(a), "baseline_output_tok_s": float(b), "speedup": float(a / b)}
        for a, b in zip(speed, plain, strict=True)
    ]


def _speedup_interval(rows: list[Row]) -> tuple[float, float]:
    """95% bootstrap interval of the speedup, over prompts and repeats, each drawn on its own.

    A repeat's weather is that of all its prompts, and a prompt's ease that of all its repeats: so a resample takes whole
    rows and whole columns of the table of the two (Owen's pigeonhole bootstrap, 2007, which errs on the wide side). With
    one repeat it is over prompts alone, and says nothing of how the machine drifts.
    """
    columns = _speeds(rows)  # four of [P, R]
    prompts, repeats = columns[0].shape
    random = np.random.default_rng(0)
    by_prompt = random.multinomial(prompts, np.full(prompts, 1 / prompts), size=SAMPLES)  # [S, P]
    by_repeat = random.multinomial(repeats, np.full(repeats, 1 / repeats), size=SAMPLES)  # [S, R]
    sums = [((by_prompt @ column) * by_repeat).sum(1) for column in columns]  # four of [S]
    tokens, seconds, plain_tokens, plain_seconds = sums
    low, high = np.quantile(tokens / seconds / (plain_tokens / plain_seconds), QUANTILES)
    return float(low), float(high)


def _speeds(rows: list[Row]) -> list[np.ndarray]:
    """[P, R] each: tokens and seconds, speculative and then plain."""
    names = ("output_tokens", "e2e_latency_s", "baseline_output_tokens", "baseline_e2e_latency_s")
    return [_by_prompt(rows, name) for name in names]


if __name__ == "__main__":
    params.run_stage(main)
