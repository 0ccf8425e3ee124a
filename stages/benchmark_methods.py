"""benchmark_methods: a row of the table of methods, on the engine's own verifier.   python -m stages.benchmark_methods ROW

EAGLE-3, EAGLE-2, EAGLE, Medusa, lookahead and prompt lookup only differ in who proposes a cycle's tree; the pass that
verifies it, what is accepted and the cache are the torch engine's, and so is the plain decoding beside each. Of a
workload's questions the first turns are asked, once, one at a time; nothing is graded, since every method says what
plain decoding says. docs/methods.md
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import polars as pl
import torch

from stages.data import workload_prompts
from stages.draft import checkpoint
from stages.draft.eagle3 import Draft
from stages.engine import sampling
from stages.engine.decode import Engine, Method, Step
from stages.engine.sampling import Sampling
from stages.engine.timing import timed
from stages.methods import method_checkpoint, registry
from stages.methods.eagle_proposer import Guessing
from stages.methods.lookahead import Lookahead
from stages.methods.medusa_proposer import Heads
from stages.methods.prompt_lookup import Ngram
from stages.methods.static_tree import Static, best_first
from stages.params import schema
from stages.params.benchmark_sections import Workload
from stages.params.methods_section import DynamicRow, LookaheadRow, MethodRow, NgramRow, StaticRow
from stages.params.section import named
from stages.params.tree_sections import Tree
from stages.results import clusters, interval, method_records, torch_records
from stages.target import loading, manifest, vision
from stages.target.vision import Pixels
from stages.telemetry import gpu_energy
from stages.trees import acceptance

KINDS = ("plain", "speculative")

Row = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """A method, ready to decode."""

    engine: Engine
    method: Method | None  # None: the engine's own draft, EAGLE-3, with
    tree: Tree | None
    shown: dict[str, Pixels | None]  # the pictures of each prompt, by its id
    w: Workload

    @property
    def steps(self) -> int:
        found = self.method.steps if self.method else self.tree and self.tree.num_steps
        assert found
        return found

    @property
    def most(self) -> int:
        assert isinstance(self.w.max_new_tokens, int), "params.Params sees to it"
        return self.w.max_new_tokens

    def decoding(self, kind: str, question: Row) -> Iterator[Step]:
        ids, most, pictures = question["prompt_ids"], self.most, self.shown[question["id"]]
        drawn = _sampling(self.w, question["id"])
        if kind == "plain":
            return self.engine.plain(ids, most, pictures, drawn)
        if self.method is not None:
            return self.engine.proposed(ids, most, self.method, pictures, drawn)
        assert self.tree is not None
        shape = self.tree.num_steps, self.tree.topk, self.tree.num_draft_tokens
        return self.engine.speculative(ids, most, *shape, pictures, drawn)


def main(name: str) -> None:
    p = schema.load()
    torch.set_num_threads(p.target.num_threads)
    meter, started = gpu_energy.Meter(p.target.gpus()), time.perf_counter()
    settings, workload = p.method_row(name), p.benchmark_methods.workload
    w = named(p.benchmark.workloads, workload, "benchmark.workloads")
    prompts, warm = workload_prompts.read(workload)
    work = _work(p, settings, w, pl.concat([prompts, warm]))
    every = pl.concat([prompts, warm])["prompt_ids"].list.len()
    work.engine.expect(int(every.max() or 0) + work.most)
    for question in warm.iter_rows(named=True):  # not counted: first calls allocate and pick kernels
        for kind in KINDS:
            list(work.decoding(kind, question))
    rows, histogram = [], np.zeros(work.steps + 1, dtype=np.int64)
    for number, question in enumerate(prompts.iter_rows(named=True)):
        row, cycles = _asked(work, question, KINDS if number % 2 == 0 else KINDS[::-1], p.target.device)
        histogram += np.bincount([s.accepted for s in cycles], minlength=len(histogram))
        rows.append(row)
    metrics = _metrics(rows, work.steps, w.prompts)
    memory, parameters = _taken(work)
    method_records.write(
        {
            "row": name,
            "method": settings.method,
            "checkpoint": getattr(settings, "checkpoint", None),
            "settings": settings.model_dump(exclude={"method", "checkpoint"}) | {"steps": work.steps},
            "workload": workload,
            "engine": "torch",
            "definitions": torch_records.DEFINITIONS,
            "temperature": w.temperature,
            "top_p": w.top_p,
            "top_k": w.top_k,
            "metrics": metrics,
            "histogram": histogram.tolist(),
            "prompts": rows,
            "memory": memory,
            "parameters": parameters,
            "mixture": any(".experts." in key for key, _ in work.engine.model.named_parameters()),
            "model": p.target.model,
            "hardware": torch_records.hardware(p.target.device, p.target.num_threads),
            "versions": torch_records.versions("torch", "transformers"),
            "seconds": round(time.perf_counter() - started, 2),
            "seed": w.seed,
            "gpus": meter.names(),
            "joules": meter.joules(),
        }
    )
    print(f"{name}: tau {metrics['tau']:.3f}, speedup {metrics['speedup']:.2f} -> {method_records.path(name)}")


# Who proposes


def _work(p: schema.Params, settings: MethodRow, w: Workload, prompts: pl.DataFrame) -> Work:
    made = manifest.read()
    model = loading.load(str(manifest.weights(made)), None, p.target.dtype, p.target.device, p.target.trust_remote_code)
    draft = None
    if settings.method == "eagle3":
        assert isinstance(settings, DynamicRow)
        config, tensors = checkpoint.read_draft(checkpoint.folder(settings.checkpoint), p.made_by(settings.checkpoint))
        draft = Draft.of(config, tensors).to(p.target.device, model.dtype).requires_grad_(False)
    engine = Engine(model, made.eos_token_ids, made.feature_layers, draft, p.benchmark.semantics)
    tree = Tree.parse(settings.tree) if isinstance(settings, DynamicRow) else None
    method = None if draft else _method(p, settings, engine)
    images = dict(prompts.select("id", "images").iter_rows())
    return Work(engine, method, tree, vision.shown(manifest.weights(made), p.target.trust_remote_code, images), w)


def _method(p: schema.Params, settings: MethodRow, engine: Engine) -> Method:
    """Raises ValueError where the checkpoint is another method's, or for another target."""
    if isinstance(settings, NgramRow):
        return Ngram(settings.longest, settings.shortest, settings.length, engine.device)
    if isinstance(settings, LookaheadRow):
        return Lookahead(settings.window, settings.level, settings.guesses, engine.device)
    name = settings.checkpoint
    method = "medusa" if settings.method == "medusa" else "eagle"
    config, tensors = method_checkpoint.read(checkpoint.folder(name), method, p.made_by(name))
    module = registry.of(config, tensors, engine.head).to(engine.device, engine.model.dtype).requires_grad_(False)
    if isinstance(settings, DynamicRow):
        tree = Tree.parse(settings.tree)
        shape = tree.num_steps, tree.topk, tree.num_draft_tokens
        return Guessing(module, engine.embedding, shape, p.benchmark.semantics)
    static = _static(settings, config, engine.device)
    if method == "eagle":
        return Guessing(module, engine.embedding, static, p.benchmark.semantics)
    return Heads(module, static, *reversed(engine.embedding.shape))


def _static(settings: StaticRow, config: Row, device: torch.device) -> Static:
    """Chosen by how often the checkpoint's guesses were right. Raises ValueError where that is not known so deep."""
    accuracy = config["rank_accuracy"]
    if settings.depth > len(accuracy):
        raise ValueError(
            f"benchmark_methods: depth is {settings.depth}, but {settings.checkpoint} was measured {len(accuracy)} deep, "
            "expected no more (medusa: its heads; eagle: train_draft.ttt_steps); lower it"
        )
    return Static.of(best_first(accuracy[: settings.depth], settings.nodes - 1), device)


def _taken(work: Work) -> tuple[dict[str, int], int]:
    """Bytes beside the target's own: weights, and what is kept between cycles; and trained parameters."""
    room, draft = work.engine.idle[0], work.engine.draft
    if work.method is not None:
        state = room.proposers[work.method].nbytes
        return {"weights": work.method.weights, "state": state}, work.method.parameters
    assert draft is not None
    state = room.draft_keys.nbytes + room.draft_values.nbytes + room.stands[work.steps + 1].features.nbytes
    weights = sum(x.nbytes for x in draft.state_dict().values())
    return {"weights": weights, "state": state}, sum(x.numel() for x in draft.parameters())


# What is measured


def _sampling(w: Workload, name: str) -> Sampling | None:
    """As `benchmark` draws the first repeat's first turn."""
    return sampling.how(w.temperature, w.top_p, w.top_k, f"{w.seed}:{name}:0:0")


def _asked(work: Work, question: Row, order: tuple[str, ...], device: str) -> tuple[Row, list[Step]]:
    """A prompt's row and its cycles; who goes first changes from prompt to prompt."""
    both = {kind: timed(partial(work.decoding, kind, question), device) for kind in order}
    mine, plain = both["speculative"], both["plain"]
    said, plain_said, cycles = mine.tokens, plain.tokens, mine.cycles
    return {
        "id": question["id"],
        "prompt_tokens": len(question["prompt_ids"]),
        "output_tokens": len(said),
        "cycles": len(cycles),
        "accepted": sum(s.accepted for s in cycles),
        "identical": said == plain_said,
        "finish_reason": "stop" if said[-1] in work.engine.eos else "length",
        "prefill_latency_s": mine.first_s,
        "e2e_latency_s": mine.last_s,
        "baseline_output_tokens": len(plain_said),
        "baseline_prefill_latency_s": plain.first_s,
        "baseline_e2e_latency_s": plain.last_s,
    }, cycles


def _metrics(rows: list[Row], steps: int, prompts: str) -> dict[str, float | None]:
    """Return method_cell.METRICS, as docs/metrics.md defines them; `prompts` is the workload's. Intervals as in a cell."""
    numbers = [key for key in method_records.PROMPT_COLUMNS if key not in ("id", "finish_reason")]
    column = {key: np.array([row[key] for row in rows], dtype=float) for key in numbers}  # [P] each
    names = [clusters.cluster_of(prompts, row["id"]) for row in rows]
    of_cluster = {key: clusters.sums(names, values) for key, values in column.items()}  # [C] each
    tau = acceptance.tau(column["accepted"], column["cycles"])
    low, high = interval.of_tau(of_cluster["accepted"], of_cluster["cycles"], steps) or (None, None)
    speeds = ("output_tokens", "e2e_latency_s", "baseline_output_tokens", "baseline_e2e_latency_s")
    tokens, seconds, plain_tokens, plain_seconds = (of_cluster[name][:, None] for name in speeds)  # one repeat
    ends = interval.of_speedup(tokens, seconds, plain_tokens, plain_seconds) or (None, None)
    sums = [column[name].sum() for name in speeds]
    return {
        "tau": tau,
        "tau_low": low,
        "tau_high": high,
        "accept_rate": (tau - 1) / steps,
        "prefill_latency_s": float(column["prefill_latency_s"].mean()),
        "e2e_latency_s": float(column["e2e_latency_s"].mean()),
        "output_tok_s": float(sums[0] / sums[1]),
        "baseline_output_tok_s": float(sums[2] / sums[3]),
        "speedup": float(_speedup(*sums)),
        "speedup_low": ends[0],
        "speedup_high": ends[1],
        "identical_share": float(column["identical"].mean()),
    }


def _speedup(tokens: Any, seconds: Any, plain_tokens: Any, plain_seconds: Any) -> Any:
    return tokens / seconds / (plain_tokens / plain_seconds)


if __name__ == "__main__":
    schema.run_stage(main)
