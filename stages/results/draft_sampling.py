"""How the drafts of a cell or of a replay were chosen, and so by which rule they were verified (docs/metrics.md).

Greedy drafts are accepted with the target's probability of them, sampled ones by the ratio of both probabilities. Their accept
lengths differ, so records say which they are of, and only records of one kind are compared.
"""

from typing import Literal

DraftSampling = Literal["greedy", "sampled"]
GREEDY: DraftSampling = "greedy"


def name_draft_sampling(samples_drafts: bool) -> DraftSampling:
    return "sampled" if samples_drafts else GREEDY


def limit_draft_sampling(draft_sampling: DraftSampling, temperature: float) -> DraftSampling:
    """Return how drafts are chosen at a temperature: at 0 nothing is sampled."""
    return draft_sampling if temperature else GREEDY
