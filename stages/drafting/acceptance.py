"""Accept length, defined once: docs/metrics.md, version 1.

tau = (accepted drafts + verify cycles) / verify cycles, pooled over all cycles of all prompts. The bonus token counts,
the token from prefill does not; a last cycle cut by the end of sequence or the length limit still counts one.
"""

import numpy as np


def tau(accepted: np.ndarray, cycles: np.ndarray) -> float:
    """Pooled over prompts: accepted [P] drafts and cycles [P] of each. Without any cycle there is nothing to pool: 1.0."""
    return float((accepted.sum() + cycles.sum()) / cycles.sum()) if cycles.sum() else 1.0


def interval(
    accepted: np.ndarray, cycles: np.ndarray, samples: int = 2000, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """95% bootstrap interval of tau over prompts: accepted and cycles [P, ...] -> low and high [...].

    Every column is resampled with the same prompts (common random numbers), so trees compare more tightly than alone.
    """
    prompts = len(cycles)
    counts = np.random.default_rng(seed).multinomial(
        prompts, np.full(prompts, 1 / prompts), size=samples
    )  # [samples, P]
    # As float64, in which such sums are exact: of integers, products are many times slower.
    counts, flat_accepted, flat_cycles = (x.astype(float).reshape(len(x), -1) for x in (counts, accepted, cycles))
    drawn_cycles = np.maximum(counts @ flat_cycles, 1)
    low, high = np.quantile((counts @ flat_accepted + drawn_cycles) / drawn_cycles, [0.025, 0.975], axis=0)
    return low.reshape(cycles.shape[1:]), high.reshape(cycles.shape[1:])
