"""What counts as one in an interval: a conversation of the eval split, a question of a set."""

import numpy as np
import pytest

from stages.cells import interval


@pytest.mark.parametrize(
    ("prompts", "row", "cluster"),
    [
        ("eval", "weather-000017.1", "weather-000017"), ("eval", "a.b.12", "a.b"), ("eval", "line-3", "line-3"),
        ("eval", "mail@home.example", "mail@home.example"), ("random", "random.3", "random.3"),
        ("math500", "test/algebra/2.json", "test/algebra/2.json"), ("mt_bench", "81.1", "81.1"),
    ],
)  # fmt: skip
def test_answers_of_one_conversation_of_the_eval_split_belong_together(prompts: str, row: str, cluster: str) -> None:
    assert interval.get_cluster(prompts, row) == cluster


def test_values_are_added_up_by_cluster_in_the_order_of_first_appearance() -> None:
    found = interval.sum_by_cluster(["b", "a", "b"], np.array([[1, 10], [2, 20], [4, 40]]))
    assert found.tolist() == [[5, 50], [2, 20]]
