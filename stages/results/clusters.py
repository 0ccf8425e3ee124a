"""Clusters of answers that count as one in an interval: all turns and repeats of a conversation (docs/metrics.md)."""

from collections.abc import Sequence

import numpy as np


def get_cluster(prompts: str, row_id: str) -> str:
    """Return the cluster of a workload's row; `prompts` is eval, random or a prompt set's name.

    In the eval split each answer of a conversation is a row. In a set a row is a question with its later turns.
    """
    return get_conversation(row_id) if prompts == "eval" else row_id


def get_conversation(row_id: str) -> str:
    """Return the conversation of a sampled row, whose id is "<conversation id>.<number of the answer>" (data/requests.py)."""
    conversation, _, number = row_id.rpartition(".")
    return conversation if conversation and number.isdecimal() else row_id


def sum_by_cluster(names: Sequence[str], values: np.ndarray) -> np.ndarray:
    """Return the values [N, ...] added up by their clusters' names [N]: [C, ...], in the order of first appearance."""
    row_of = {name: number for number, name in enumerate(dict.fromkeys(names))}
    found = np.zeros((len(row_of), *values.shape[1:]), dtype=values.dtype)
    np.add.at(found, [row_of[name] for name in names], values)
    return found
