"""tau, by docs/metrics.md, against sums done by hand."""

import numpy as np

from stages.trees import accept_length


def test_tau_pools_cycles_not_prompts() -> None:
    """Two prompts: 9 drafts in 3 cycles, 0 in 9. Pooled (9 + 12) / 12, not the mean of 4 and 1."""
    assert accept_length.compute_tau(np.array([9, 0]), np.array([3, 9])) == 21 / 12


def test_without_any_cycle_tau_is_one() -> None:
    assert accept_length.compute_tau(np.array([0]), np.array([0])) == 1.0
