"""Assign every kept row to train or eval, or drop it as a duplicate, from digests and MinHash signatures alone."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from stages.data import near_duplicates
from stages.data.row_cleaning import JudgedChunk
from stages.params.data_sections import FixData

MAX_PAIR_EXAMPLES = 5
# Legend: R kept rows of all chunks, in source order.


class SplitFate(IntEnum):
    """Where a row goes; values above EVAL are drops."""

    TRAIN = 0
    EVAL = 1
    DUPLICATE = 2
    IN_EVAL = 3
    NEAR_DUPLICATE = 4
    NEAR_EVAL = 5


@dataclass(frozen=True)
class SimilarPair:
    """Two row numbers, the earlier first, and their estimated Jaccard similarity."""

    first: int
    second: int
    similarity: float


@dataclass(frozen=True)
class NearDuplicates:
    """How many pairs of near duplicates were found, with a few examples, and how many rows were dropped for them."""

    threshold: float
    num_pairs: int
    num_dropped: int
    examples: list[SimilarPair]


@dataclass(frozen=True)
class SplitAssignment:
    """The fate of each row, and what was found in both splits."""

    fates: np.ndarray  # [R] int8, SplitFate
    exact_overlap: int  # training rows that open like an eval row
    near_overlap: int | None  # training rows nearly equal to an eval row; None where near duplicates are not looked for
    near_duplicates: NearDuplicates | None


def assign_splits(chunks: list[JudgedChunk], params: FixData) -> SplitAssignment:
    """Return each row's fate. The first of duplicates is kept; of a training row and an eval row, the eval row."""
    is_eval = np.array([flag for chunk in chunks for flag in chunk.is_eval], bool)
    fates = np.where(is_eval, SplitFate.EVAL, SplitFate.TRAIN).astype(np.int8)
    exact_overlap = _drop_exact_duplicates(fates, chunks, params)
    if params.near_duplicate_threshold is None or not len(fates):
        return SplitAssignment(fates, exact_overlap, None, None)
    near_overlap, found = _drop_near_duplicates(fates, is_eval, chunks, params, params.near_duplicate_threshold)
    return SplitAssignment(fates, exact_overlap, near_overlap, found)


def split_by_chunk(values: np.ndarray, chunks: list[JudgedChunk]) -> list[np.ndarray]:
    """Return the part of `values` [R] that belongs to each chunk."""
    stops = np.cumsum([len(chunk.names) for chunk in chunks], dtype=int).tolist()
    return [values[stop - len(chunk.names) : stop] for chunk, stop in zip(chunks, stops, strict=True)]


def _drop_exact_duplicates(fates: np.ndarray, chunks: list[JudgedChunk], params: FixData) -> int:
    """Set the fates of exact duplicates; return how many training rows open like an eval row."""
    eval_openings = {o for c in chunks for o, flag in zip(c.opening_digests, c.is_eval, strict=True) if flag}
    eval_digests = {d for c in chunks for d, flag in zip(c.digests, c.is_eval, strict=True) if flag}
    seen: set[bytes] = set()
    overlap = np.zeros(len(fates), bool)
    row = 0
    for chunk in chunks:
        for digest, opening, flag in zip(chunk.digests, chunk.opening_digests, chunk.is_eval, strict=True):
            if digest in seen and (flag or digest not in eval_digests):
                fates[row] = SplitFate.DUPLICATE
            elif (
                not flag and opening in eval_openings
            ):  # only with eval_file: the hash sends equal openings to one split
                overlap[row] = True
            seen.add(digest)
            row += 1
    if params.eval_overlap == "remove":
        fates[overlap] = SplitFate.IN_EVAL
    return int(overlap.sum())


def _drop_near_duplicates(
    fates: np.ndarray, is_eval: np.ndarray, chunks: list[JudgedChunk], params: FixData, threshold: float
) -> tuple[int, NearDuplicates]:
    """Set the fates of near duplicates; return (training rows nearly equal to an eval row, the pairs found)."""
    kept = np.flatnonzero(fates <= SplitFate.EVAL)
    by_rank = np.r_[kept[is_eval[kept]], kept[~is_eval[kept]]]  # [K] eval rows first, so that each group's head is one
    ranks = np.full(len(fates), -1)
    ranks[by_rank] = np.arange(len(kept))
    signatures = [chunk.signatures for chunk in chunks if chunk.signatures is not None]
    pairs, similarity = near_duplicates.find_similar_pairs(signatures, threshold)
    both_kept = (ranks[pairs] >= 0).all(1)
    pairs, similarity = pairs[both_kept], similarity[both_kept]
    heads = by_rank[near_duplicates.group_duplicates(len(kept), ranks[pairs])]  # [K] the first row of each row's group
    near_overlap = 0
    has_train_row: set[int] = set()  # eval rows whose group has a training row that is kept
    for head, row in zip(heads.tolist(), by_rank.tolist(), strict=True):
        if head == row:
            continue
        crosses = bool(is_eval[head] and not is_eval[row])
        near_overlap += crosses
        if crosses and params.eval_overlap == "remove":
            fates[row] = SplitFate.NEAR_EVAL
        elif not crosses or head in has_train_row:
            fates[row] = SplitFate.NEAR_DUPLICATE
        else:
            has_train_row.add(head)
    examples = [
        SimilarPair(int(first), int(second), round(float(value), 3))
        for (first, second), value in zip(pairs[:MAX_PAIR_EXAMPLES], similarity[:MAX_PAIR_EXAMPLES], strict=True)
    ]
    num_dropped = int((fates == SplitFate.NEAR_DUPLICATE).sum())
    return near_overlap, NearDuplicates(threshold, len(pairs), num_dropped, examples)
