"""What of a published table of block drafts can be compared with a cell of ours."""

import pytest

from stages.published import comparison
from stages.published import tables as published
from tests.conftest import ROOT
from tests.torch_cells import timed_cell

PUBLISHED = published.read_publications(ROOT / "published")


def find_row(name: str, metric: str = "tau") -> published.PublishedRow:
    """The number of DSpark for Qwen3-8B on GSM8K."""
    (row,) = (
        row
        for row in PUBLISHED[name]
        if (row.metric, row.setting.target, row.setting.method, row.setting.dataset)
        == (metric, "Qwen3-8B", "DSpark", "GSM8K")
    )
    return row


@pytest.mark.parametrize(
    ("temperature", "obstacles"), [(1.0, ["drafts sampled there"]), (0.0, ["temperature 1.0 against 0.0"])]
)
def test_sampled_drafts_are_not_compared_with_greedy_ones(temperature: float, obstacles: list[str]) -> None:
    """At temperature 0 both draft alike; that the temperature differs is an obstacle of its own."""
    cell = timed_cell("t7_1_8").model_copy(update={"temperature": temperature})
    found = list(comparison.list_obstacles(find_row("dspark-paper"), cell, same_definition=True))
    assert [one.split(",")[0].split(";")[0] for one in found] == obstacles
