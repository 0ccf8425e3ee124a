"""Accept length (tau), as docs/metrics.md defines it; its confidence interval is in cells/interval.py.

tau = (accepted drafts + verify cycles) / verify cycles, pooled over all cycles of all prompts. The bonus token counts, the
token from prefill does not; a last cycle cut by the end of sequence or the length limit counts as one.
"""

from collections.abc import Sequence

import numpy as np


def compute_tau(accepted: np.ndarray, cycles: np.ndarray) -> float:
    """Return tau pooled over prompts, from accepted drafts [P] and verify cycles [P] of each; 1.0 without any cycle."""
    return float((accepted.sum() + cycles.sum()) / cycles.sum()) if cycles.sum() else 1.0


def compute_chain_tau(accepted: Sequence[int]) -> float:
    """Return tau of chains along an answer: `accepted` drafts of one from each of its positions but the last, in order."""
    position, total, cycles = 0, 0, 0
    while position < len(accepted):
        total, cycles, position = total + accepted[position], cycles + 1, position + accepted[position] + 1
    return compute_tau(np.array(total), np.array(cycles))
