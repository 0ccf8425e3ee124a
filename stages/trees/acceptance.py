"""Accept length, defined once: docs/metrics.md; its interval is in results/interval.py.

tau = (accepted drafts + verify cycles) / verify cycles, pooled over all cycles of all prompts. The bonus token counts,
the token from prefill does not; a last cycle cut by the end of sequence or the length limit still counts one.
"""

import numpy as np


def compute_tau(accepted: np.ndarray, cycles: np.ndarray) -> float:
    """Pooled over prompts: accepted [P] drafts and cycles [P] of each. Without any cycle there is nothing to pool: 1.0."""
    return float((accepted.sum() + cycles.sum()) / cycles.sum()) if cycles.sum() else 1.0
