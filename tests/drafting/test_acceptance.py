"""tau and its interval, by docs/metrics.md, against sums done by hand."""

import numpy as np

from stages.drafting import acceptance


def test_tau_pools_cycles_not_prompts() -> None:
    """Two prompts: 9 drafts in 3 cycles, 0 in 9. Pooled (9 + 12) / 12, not the mean of 4 and 1."""
    assert acceptance.tau(np.array([9, 0]), np.array([3, 9])) == 21 / 12


def test_without_any_cycle_tau_is_one() -> None:
    assert acceptance.tau(np.array([0]), np.array([0])) == 1.0


def test_the_interval_holds_the_true_tau_about_as_often_as_it_says() -> None:
    """300 made-up experiments of 40 prompts; 95% should cover. False alarm below 1e-6 for a bound of 86%."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(300):
        cycles = rng.integers(5, 20, size=40)
        accepted = rng.binomial(8 * cycles, 0.3)  # true tau: 1 + 8 * 0.3
        low, high = acceptance.interval(accepted[:, None], cycles[:, None], samples=400, seed=1)
        covered += bool(low[0] <= 3.4 <= high[0])
    assert covered >= 0.86 * 300


def test_columns_are_resampled_together_and_alike() -> None:
    accepted, cycles = np.array([[4, 4], [1, 1], [9, 9]]), np.array([[2, 2], [3, 3], [4, 4]])
    low, high = acceptance.interval(accepted, cycles)
    assert low[0] == low[1]
    assert high[0] == high[1]
    assert low[0] < acceptance.tau(accepted[:, 0], cycles[:, 0]) < high[0]
    scalar_low, _ = acceptance.interval(accepted[:, 0], cycles[:, 0])
    assert scalar_low == low[0]
