"""Served cells that could be true, for tests: loads are latency.summary of made-up records, so their shape is the real one."""

import random
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from stages.cells import cell as records_of_cells
from stages.cells import request_record, table
from stages.cells.cell import Cell
from stages.cells.replay_records import ReplayedTree
from stages.params.tree_shape import TreeShape, parse_shape

Row = dict[str, Any]
FINGERPRINT = {
    "engine": "sglang", "version": "0.5.17", "flags": {"mem_fraction": 0.8, "tp": 1}, "prompts": "3f1c", "gpu": "NVIDIA H200",
}  # fmt: skip


def records(
    rng: random.Random, requests: int, tokens: int, cap: int | None, tpot_s: float, at_once: int
) -> list[request_record.RequestRecord]:
    """A closed loop: `cap` under way, each request a prefill of 20 ms and then events of `at_once` tokens."""
    free = [0.0] * (cap or requests)
    found = []
    for n in range(requests):
        free.sort()
        sent = free[0]
        first = sent + 0.02 * rng.uniform(0.9, 1.2)
        sizes = [1] + [at_once] * ((tokens - 1) // at_once)
        sizes += [tokens - sum(sizes)] if sum(sizes) < tokens else []
        events, now = [(first, 1)], first
        for size in sizes[1:]:
            now += size * tpot_s * rng.uniform(0.95, 1.05)
            events.append((now, size))
        free[0] = now
        found.append(request_record.RequestRecord(f"row{n}.0", 0.0, sent, now, events, 90, tokens, "stop", None))
    return found


def point(
    tokens: int, cap: int | None, tpot_s: float, tau: float | None = None, tree: str | None = None, repeats: int = 1,
    requests: int = 8, accuracy: float | None = None, seed: int = 0, parted: int = 0, warnings: list[str] | None = None,
) -> Row:  # fmt: skip
    """As served.POINT; `parted` answers are others than the rest of the world gives."""
    rng = random.Random(seed)
    taken = [records(rng, requests, tokens, cap, tpot_s, round(tau or 1)) for _ in range(repeats)]
    rows = [
        {
            "repeat": repeat, "id": r.id, "turn": 0, "prompt_tokens": r.input_tokens, "output_tokens": tokens,
            "cycles": round(tokens / (tau or 1)), "accepted": tokens - round(tokens / (tau or 1)), "finish_reason": "stop",
            "failed": None, "ttft_s": r.ttft_s, "tpot_s": r.tpot_s, "e2e_s": r.e2e_s, "wait_s": r.sent - r.due,
            "answer": f"digest of {n}, parted" if n < parted and tau else f"digest of {n}", "correct": None,
        }
        for repeat, load in enumerate(taken) for n, r in enumerate(load)
    ]  # fmt: skip
    right = round((accuracy or 0) * len(rows))
    quality = {"graded": len(rows), "correct": right, "accuracy": right / len(rows), "how": "gsm8k: the last number"}
    return {
        "max_new_tokens": tokens,
        "concurrency": cap,
        "request_rate": "inf",
        "loads": [asdict(request_record.summarise_load(load)) for load in taken],
        "acceptance": None if tau is None else acceptance(tau, tree or "t5_1_6", sum(row["cycles"] for row in rows)),
        "quality": None if accuracy is None else quality,
        "requests": rows,
        "warnings": warnings or [],
    }


def acceptance(tau: float, tree: str, cycles: int) -> Row:
    shape = TreeShape.parse(tree)
    accepted = round((tau - 1) * cycles)
    return {
        "tau": tau, "tau_low": tau - 0.1, "tau_high": tau + 0.1, "accept_rate": (tau - 1) / shape.num_steps,
        "node_accept_rate": (tau - 1) / (shape.num_draft_tokens - 1), "cycles": cycles, "accepted": accepted,
        "histogram": [cycles - min(accepted, cycles), min(accepted, cycles)],
        "engine": {"spec_accept_length": tau + 0.07, "avg_spec_accept_length": tau + 0.01},
    }  # fmt: skip


def made_up(
    workload: str, checkpoint: str | None = None, tree: str | None = None, points: list[Row] | None = None, **keys: Any
) -> Row:
    """As served.KEYS; without points, what the engine can't run."""
    draft = {"weights": 3.2, "draft": 0.3 if tree else None, "kv_cache": 100.1 if tree else 101.9, "kv_tokens": 910000}
    gpu = {"gpu_before": 0.5, "gpu_serving": 118.0, "gpu_after": 0.5, "gpu_total": 139.8}
    flags = ["--speculative-algorithm", "EAGLE3"] if tree else []
    return {
        "workload": workload,
        "checkpoint": checkpoint,
        "tree": tree,
        "engine": "sglang",
        "status": records_of_cells.RAN if points else records_of_cells.UNSUPPORTED,
        "reason": None if points else "topk above 1 isn't built there",
        "definitions": records_of_cells.DEFINITIONS,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": None,
        "fingerprint": FINGERPRINT,
        "server": {"command": ["python3", "-m", "sglang.launch_server", *flags], "info": {"version": "0.5.17"}},
        "memory": draft | gpu if points else {},
        "points": points or [],
        "baseline_points": [],
        "hardware": {"cpu": "Made-up CPU", "gpu": "NVIDIA H200", "threads": 16},
        "versions": {"sglang": "0.5.17"},
        "seconds": 61.0,
        "seed": 42,
        "gpus": ["NVIDIA H200"],
        "joules": 7500.0,
    } | keys


def join(
    cells: Iterable[Row], replayed: dict[str, list[ReplayedTree]] | None = None, of_eval: Iterable[str] = ()
) -> list[table.TableLine]:
    """Lines of cells that were read, each as `made_up` gives it."""
    read = [Cell.model_validate(cell) for cell in cells]
    return table.join_lines(read, replayed or {}, set(of_eval))


def replayed_tree(
    name: str, tau: float, low: float | None = None, high: float | None = None, **keys: Any
) -> ReplayedTree:
    """A row of a replay whose interval is tau itself unless given."""
    shape = parse_shape(name)
    counts = {"accept_rate": 0.5, "cycles": 900, "accepted": 900, "mean_depth": 2.0, "acceptance": "0.5"}
    bounds = {"tau_oracle": None, "tau_adaptive": None, "temperature": 0.0, "top_p": None}
    tree = {
        "checkpoint": "e009", "tree": name, "num_steps": shape.num_steps, "topk": shape.topk,
        "num_draft_tokens": shape.num_draft_tokens, "tau": tau,
    }  # fmt: skip
    return ReplayedTree(**tree | {"tau_low": low or tau, "tau_high": high or tau} | counts | bounds | keys)
