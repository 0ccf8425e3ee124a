"""benchmark: one cell of the table, by the torch engine.   python -m stages.benchmark WORKLOAD CHECKPOINT TREE

Plain and speculative decoding of the same prompts, in turns, so that a drifting machine touches both alike. At float32
the two must say the same: the share of identical answers is a metric of every cell.
"""

import time
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import torch

from stages import params
from stages.drafting import acceptance, target
from stages.drafting.decode import Engine, Step
from stages.drafting.draft import Draft
from stages.drafting.pixels import Eyes, Pixels
from stages.formats import cell, checkpoint, conversations, manifest
from stages.params import Tree

SAMPLED = Path("data/sampled")


def main(workload: str, name: str, tree_name: str) -> None:
    p = params.load()
    torch.set_num_threads(p.target.num_threads)
    started = time.perf_counter()
    tree, w = Tree.parse(tree_name), params.named(p.benchmark.workloads, workload, "benchmark.workloads")
    prompts = conversations.read(SAMPLED / w.split, conversations.SAMPLED, "sample_target", w.prompts)
    if len(prompts) < w.prompts:
        print(f"note: workload {workload} asks for {w.prompts} prompts, the {w.split} split has {len(prompts)}")
    engine, shown = _engine(p, name), _shown(p, prompts)

    rows, histogram = [], np.zeros(tree.num_steps + 1, dtype=np.int64)
    shape = (tree.num_steps, tree.topk, tree.num_draft_tokens)
    for question in prompts.head(w.warmup).iter_rows(named=True):  # not counted: first calls allocate and pick kernels
        prompt, pictures = question["prompt_ids"], shown[question["id"]]
        list(engine.plain(prompt, w.max_new_tokens, pictures))
        list(engine.speculative(prompt, w.max_new_tokens, *shape, pictures))
    for number, question in enumerate(prompts.iter_rows(named=True)):
        prompt, pictures = question["prompt_ids"], shown[question["id"]]
        runs = {
            "plain": partial(engine.plain, prompt, w.max_new_tokens, pictures),
            "speculative": partial(engine.speculative, prompt, w.max_new_tokens, *shape, pictures),
        }
        order = list(runs) if number % 2 == 0 else list(runs)[::-1]
        timed = {kind: _timed(runs[kind], p.target.device) for kind in order}
        said, steps, prefill, e2e = timed["speculative"]
        plain_said, _, plain_prefill, plain_e2e = timed["plain"]
        cycles = steps[1:]
        histogram += np.bincount([s.accepted for s in cycles], minlength=tree.num_steps + 1)
        rows.append(
            {
                "id": question["id"],
                "prompt_tokens": len(prompt),
                "output_tokens": len(said),
                "cycles": len(cycles),
                "accepted": sum(s.accepted for s in cycles),
                "identical": said == plain_said,
                "divergence_margin": _margin(engine, prompt, pictures, said, plain_said),
                "finish_reason": "stop" if said[-1] in engine.eos else "length",
                "prefill_latency_s": prefill,
                "e2e_latency_s": e2e,
                "baseline_output_tokens": len(plain_said),
                "baseline_prefill_latency_s": plain_prefill,
                "baseline_e2e_latency_s": plain_e2e,
            }
        )
    metrics = _metrics(rows, tree)
    place = cell.write(
        {
            "workload": workload,
            "checkpoint": name,
            "tree": tree_name,
            **tree.model_dump(),
            "engine": "torch",
            "definitions": cell.DEFINITIONS,
            "temperature": 0.0,
            "metrics": metrics,
            "histogram": histogram.tolist(),
            "prompts": rows,
            "hardware": cell.hardware(p.target.device, p.target.num_threads),
            "versions": cell.versions("torch", "transformers"),
            "seconds": round(time.perf_counter() - started, 2),
            "seed": 0,
        }
    )
    print(
        f"{tree_name} at {name}: tau {metrics['tau']:.3f}, speedup {metrics['speedup']:.2f}, "
        f"identical {metrics['identical_share']:.0%} of {len(rows)} answers -> {place}"
    )


def _engine(p: params.Params, name: str) -> Engine:
    made = manifest.read()
    model = target.load(str(manifest.weights(made)), None, p.target.dtype, p.target.device, p.target.trust_remote_code)
    config, tensors = checkpoint.read_draft(checkpoint.folder(name), p.made_by(name))
    draft = Draft.of(config, tensors).to(p.target.device, model.dtype).requires_grad_(False)
    return Engine(model, made.eos_token_ids, made.feature_layers, draft)


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


def _metrics(rows: list[dict], tree: Tree) -> dict[str, float]:
    """docs/metrics.md, version 1."""
    accepted, cycles = (np.array([r[k] for r in rows]) for k in ("accepted", "cycles"))
    tau = acceptance.tau(accepted, cycles)
    low, high = acceptance.interval(accepted, cycles)
    seconds, plain_seconds = (sum(r[k] for r in rows) for k in ("e2e_latency_s", "baseline_e2e_latency_s"))
    tokens, plain_tokens = (sum(r[k] for r in rows) for k in ("output_tokens", "baseline_output_tokens"))
    output_tok_s, baseline_tok_s = tokens / seconds, plain_tokens / plain_seconds
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
        "identical_share": float(np.mean([r["identical"] for r in rows])),
    }


if __name__ == "__main__":
    params.run_stage(main)
