"""Assign every kept row to train or eval, or drop it as a duplicate, from digests and MinHash signatures alone."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import polars as pl

from stages.data import near_duplicates
from stages.params.data_sections import FixData

# Legend: R kept rows of all chunks, in source order; P pairs of near duplicates.


class SplitFate(IntEnum):
    """Where a row goes; values above EVAL are drops, whose names are the report's reasons."""

    TRAIN = 0
    EVAL = 1
    DUPLICATE = 2
    IN_EVAL = 3
    NEAR_DUPLICATE = 4
    NEAR_EVAL = 5


@dataclass(frozen=True)
class SplitAssignment:
    """The fate of each row, and what was found in both splits."""

    fates: np.ndarray  # [R] int8, SplitFate
    exact_overlap: int  # training rows that open like an eval row
    # training rows nearly equal to an eval row; None where near duplicates are not looked for
    near_overlap: int | None = None
    pairs: np.ndarray | None = None  # [P, 2] row numbers of near duplicates, the earlier first
    similarity: np.ndarray | None = None  # [P]


def assign_splits(rows: pl.DataFrame, signatures: np.ndarray | None, params: FixData) -> SplitAssignment:
    """Return each row's fate. The first of duplicates is kept; of a training row and an eval row, the eval row.

    Args:
        rows: the columns digest, opening_digest and is_eval of row_cleaning.WAITING_SCHEMA.
        signatures: [R, S]; None where near duplicates are not looked for.
    """
    is_eval = rows["is_eval"].to_numpy()
    fates = np.where(is_eval, SplitFate.EVAL, SplitFate.TRAIN).astype(np.int8)
    in_eval = pl.col("is_eval").any()
    found = rows.select(
        repeats=~pl.col("digest").is_first_distinct() & (pl.col("is_eval") | ~in_eval.over("digest")),
        # Only with eval_file: the hash sends equal openings to one split.
        opens_like_eval=~pl.col("is_eval") & in_eval.over("opening_digest"),
    )
    repeats = found["repeats"].to_numpy()
    overlap = found["opens_like_eval"].to_numpy() & ~repeats
    fates[repeats] = SplitFate.DUPLICATE
    if params.eval_overlap == "remove":
        fates[overlap] = SplitFate.IN_EVAL
    exact_overlap = int(overlap.sum())
    if signatures is None or params.near_duplicate_threshold is None or not len(fates):
        return SplitAssignment(fates, exact_overlap)
    pairs, similarity = near_duplicates.find_similar_pairs(signatures, params.near_duplicate_threshold)
    both_kept = (fates[pairs] <= SplitFate.EVAL).all(1)
    pairs, similarity = pairs[both_kept], similarity[both_kept]
    near_overlap = _drop_near_duplicates(fates, is_eval, pairs, params)
    return SplitAssignment(fates, exact_overlap, near_overlap, pairs, similarity)


def _drop_near_duplicates(fates: np.ndarray, is_eval: np.ndarray, pairs: np.ndarray, params: FixData) -> int:
    """Set the fates of near duplicates; return how many training rows are nearly equal to an eval row."""
    kept = np.flatnonzero(fates <= SplitFate.EVAL)
    by_rank = np.r_[kept[is_eval[kept]], kept[~is_eval[kept]]]  # [K] eval rows first, so that each group's head is one
    ranks = np.zeros(len(fates), int)
    ranks[by_rank] = np.arange(len(kept))
    heads = by_rank[near_duplicates.group_duplicates(len(kept), ranks[pairs])]  # [K] the first row of each row's group
    crosses = is_eval[heads] & ~is_eval[by_rank]
    fates[by_rank[heads != by_rank]] = SplitFate.NEAR_DUPLICATE
    if params.eval_overlap == "remove":
        fates[by_rank[crosses]] = SplitFate.NEAR_EVAL
    else:
        _, first = np.unique(
            heads[crosses], return_index=True
        )  # of each group with an eval row, one training row stays
        fates[by_rank[crosses][first]] = SplitFate.TRAIN
    return int(crosses.sum())
