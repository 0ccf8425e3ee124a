"""Torch cells that could be true, for tests of what the report says of speeds."""

from stages.cells import torch_records
from stages.cells.torch_records import TorchCell
from stages.params.tree_shape import TreeShape
from tests import costs

TOKENS = 101
ENDED = {  # keys of a cell that say nothing of speeds
    "stopping": {"repeats": 1, "rule": "repeats", "half_width": None},
    "draft": {"weights_bytes": 4096, "state_bytes": 512, "draft_parameters": 1024},
}


def timed_cell(
    tree: str,
    speedup: float = 1.5,
    low: float | None = 1.3,
    high: float | None = 1.7,
    *,
    workload: str = "eval",
    checkpoint: str = "e009",
    step_s: float = costs.PLAIN_S,
    prefill_s: float = 0.01,
    process_share: float | None = 1.0,
    tau: float = 3.0,
) -> TorchCell:
    """A cell of two prompts: plain decoding takes `step_s` a token after a prefill, and the tree is `speedup` times as fast."""
    shape = TreeShape.parse(tree)
    plain_s = prefill_s + step_s * (TOKENS - 1)
    row = dict.fromkeys(torch_records.PROMPT_COLUMNS, 0) | {
        "output_tokens": TOKENS, "baseline_output_tokens": TOKENS, "cycles": 40, "accepted": round(40 * (tau - 1)),
        "finish_reason": "length", "prefill_latency_s": prefill_s, "e2e_latency_s": plain_s / speedup,
        "baseline_prefill_latency_s": prefill_s, "baseline_e2e_latency_s": plain_s,
        "process_s": process_share and process_share * plain_s / speedup,
        "baseline_process_s": process_share and process_share * plain_s,
    }  # fmt: skip
    return TorchCell.model_validate(
        {
            "workload": workload, "checkpoint": checkpoint, "tree": tree, "num_steps": shape.num_steps, "topk": shape.topk,
            "num_draft_tokens": shape.num_draft_tokens, "engine": "torch", "definitions": torch_records.DEFINITIONS,
            "temperature": 0.0, "top_p": 1.0, "top_k": None, "histogram": [10, 30], "repeats": [], "quality": None,
            "metrics": {
                "tau": tau, "tau_low": tau - 0.1, "tau_high": tau + 0.1, "accept_rate": 0.5, "node_accept_rate": 0.2,
                "prefill_latency_s": prefill_s, "e2e_latency_s": plain_s / speedup, "output_tok_s": TOKENS * speedup / plain_s,
                "baseline_output_tok_s": TOKENS / plain_s, "speedup": speedup, "speedup_low": low, "speedup_high": high,
                "identical_share": 1.0,
            },
            "prompts": [row | {"id": f"row{n}.0"} for n in range(2)], "hardware": costs.HARDWARE, "versions": {},
            "seconds": 3.0, "seed": 0, "gpus": [], "joules": None, **ENDED,
        }
    )  # fmt: skip
