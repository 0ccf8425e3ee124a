"""Estimated similarity compared with the Jaccard similarity of sets, and groups with a graph search."""

import random

import numpy as np
import pytest

from stages.data import near_duplicates


def jaccard(left: str, right: str) -> float:
    """Return the exact Jaccard similarity of the sets of five characters."""
    pad = "\0" * 4
    a, b = ({(pad + t)[i : i + 5] for i in range(len(t))} for t in (left, right))
    return len(a & b) / len(a | b)


def text(rng: random.Random, alphabet: str, length: int = 600) -> str:
    return "".join(rng.choices(alphabet, k=length))


ALPHABETS = {
    "latin": "abcdefghij klmnop",
    "chinese": "天氣預報明天有雨氣溫五度",
    "table": "0123456789,-\n",
    "emoji": "🌧☀️⛅❄",
}


@pytest.mark.parametrize("name", ALPHABETS)
def test_the_estimate_is_jaccard_in_any_script(name: str) -> None:
    rng = random.Random(3)
    errors = []
    for changes in (0, 2, 5, 10, 20, 40, 80) * 6:
        left = text(rng, ALPHABETS[name])
        right = list(left)
        for index in rng.sample(range(len(right)), changes):
            right[index] = rng.choice("XYZ")
        both = near_duplicates.compute_signatures([left, "".join(right)])
        errors.append(float((both[0] == both[1]).mean()) - jaccard(left, "".join(right)))
    assert abs(np.mean(errors)) < 0.02 and np.std(errors) < 0.06


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9, 1.0])
def test_bands_find_pairs_above_the_threshold_and_none_below(threshold: float) -> None:
    number, width = near_duplicates.choose_bands(threshold)
    assert number * width <= near_duplicates.MINHASH_SLOTS and 1 - (1 - threshold**width) ** number >= 0.99
    rng = random.Random(5)
    texts = []
    for changes in range(0, 120, 3):
        left = text(rng, ALPHABETS["latin"])
        right = list(left)
        for index in rng.sample(range(len(right)), changes):
            right[index] = "X"
        texts += [left, "".join(right)]
    signatures = near_duplicates.compute_signatures(texts)
    found, likeness = near_duplicates.find_similar_pairs(signatures, threshold)
    assert (likeness >= threshold).all() and (found[:, 0] < found[:, 1]).all()
    truth = {(i, i + 1) for i in range(0, len(texts), 2) if (signatures[i] == signatures[i + 1]).mean() >= threshold}
    assert len(truth) >= 1 and {tuple(pair) for pair in found.tolist()} <= truth
    assert len(truth - {tuple(pair) for pair in found.tolist()}) <= 1
