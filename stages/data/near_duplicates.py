"""Texts that are nearly the same, in any language: MinHash over runs of five characters, and what hangs together.

No words, no tokenizer: a shingle is five characters as they stand, so Chinese, code and tables are treated alike.
MinHash is rensa's (Rust, MIT, no dependencies, alive in 2026; datasketch would bring scipy and takes a Python object
per row, text-dedup pulls in Spark's world). Rows that share a band are candidates; a pair counts where the share of
equal slots, an estimate of Jaccard's |A and B| / |A or B| good to about 0.035, is at least the threshold.
"""

import numpy as np
from rensa import RMinHash

SHINGLE_CHARACTERS = 5
MINHASH_SLOTS = 128
CHARACTERS_PER_BATCH = 1 << 16  # characters whose hashes fit the processor's cache
HASH_SEED = 1  # of the hash functions; another one finds other borderline pairs, so it is no parameter
# Legend: R rows, S = SLOTS.


def compute_signatures(texts: list[str]) -> np.ndarray:
    """[R, S] uint16: the low halves of each row's MinHash slots; two unequal slots agree by chance once in 65,536."""
    made = np.zeros((len(texts), MINHASH_SLOTS), np.uint16)
    first = size = 0
    for row, text in enumerate(texts):
        size += len(text)
        if size >= CHARACTERS_PER_BATCH or row == len(texts) - 1:
            made[first : row + 1] = _compute_batch_signatures(texts[first : row + 1])
            first, size = row + 1, 0
    return made


def _compute_batch_signatures(texts: list[str]) -> np.ndarray:
    gap = "\0" * (SHINGLE_CHARACTERS - 1)  # before each text, so that a text of one character has a shingle too
    points = np.frombuffer((gap + gap.join(texts)).encode("utf-32-le"), np.uint32).astype(np.uint64)
    count = len(points) - SHINGLE_CHARACTERS + 1
    hashed = points[:count].copy()
    for place in range(1, SHINGLE_CHARACTERS):
        hashed *= np.uint64(0x100000001B3)
        hashed += points[place : place + count]
    hashed ^= hashed >> np.uint64(31)  # as splitmix64 ends: neighbours in a polynomial must not be neighbours here
    hashed *= np.uint64(0xBF58476D1CE4E5B9)
    hashed ^= hashed >> np.uint64(29)
    lengths = np.array([len(text) for text in texts], np.int64)
    inside = np.ones(count, bool)  # windows that reach from one text into the next are no shingles
    ends = np.cumsum(lengths + SHINGLE_CHARACTERS - 1)[:-1] - (SHINGLE_CHARACTERS - 1)
    for step in range(SHINGLE_CHARACTERS - 1):
        inside[ends + step] = False
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(hashed[inside], offsets, MINHASH_SLOTS, HASH_SEED)
    return np.array(matrix.to_rows(), np.uint32).astype(np.uint16)


def choose_bands(threshold: float) -> tuple[int, int]:
    """(how many, of how many slots): the widest that still make a candidate of 99% of the pairs at the threshold."""
    for width in range(16, 1, -1):
        if 1 - (1 - threshold**width) ** (MINHASH_SLOTS // width) >= 0.99:
            return MINHASH_SLOTS // width, width
    return MINHASH_SLOTS, 1


def find_similar_pairs(chunks: list[np.ndarray], threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """([P, 2] rows, earlier first, each pair once; [P] likeness) of rows at least as alike as `threshold`.

    `chunks` are signatures in order, [R_i, S] each. Within a band's bucket each row is compared with the bucket's first row and
    with the one before it, not with all: a thousand copies are a thousand pairs, and `group_duplicates` joins them.
    """
    starts = np.cumsum([0] + [len(chunk) for chunk in chunks])
    found: list[np.ndarray] = []
    number, width = choose_bands(threshold)
    rng = np.random.default_rng(HASH_SEED)
    for band in range(number):
        odd = rng.integers(0, 2**63, width, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        keys = np.concatenate(
            [(chunk[:, band * width : (band + 1) * width].astype(np.uint64) * odd).sum(1) for chunk in chunks]
        )
        order = np.argsort(keys, kind="stable")
        first = np.r_[True, np.diff(keys[order]) != 0]  # of its bucket
        heads = order[np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))]
        later = ~first
        before = np.r_[order[:1], order[:-1]]
        for partners in (heads, before):
            new = np.stack([partners[later], order[later]], 1)
            found.append(new[_estimate_similarity(chunks, starts, new) >= threshold])
    unique = np.unique(np.concatenate(found), axis=0)
    return unique, _estimate_similarity(chunks, starts, unique)


def _estimate_similarity(
    chunks: list[np.ndarray], starts: np.ndarray, rows: np.ndarray, step: int = 1 << 16
) -> np.ndarray:
    """[P]: the share of equal slots of each pair in `rows` [P, 2]."""
    likeness = np.zeros(len(rows), np.float32)
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        left, right = (_gather_signatures(chunks, starts, part[:, side]) for side in (0, 1))
        likeness[first : first + step] = (left == right).mean(1)
    return likeness


def _gather_signatures(chunks: list[np.ndarray], starts: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[P, S]: signatures by row number, without ever joining the chunks."""
    taken = np.empty((len(rows), MINHASH_SLOTS), np.uint16)
    home = np.searchsorted(starts, rows, side="right") - 1
    for chunk in np.unique(home):
        mine = home == chunk
        taken[mine] = chunks[chunk][rows[mine] - starts[chunk]]
    return taken


def group_duplicates(rows: int, linked: np.ndarray) -> np.ndarray:
    """[R]: for each row the first row that it hangs together with through any chain of pairs; itself if none."""
    label = np.arange(rows)
    while True:
        low = np.minimum(label[linked[:, 0]], label[linked[:, 1]])
        new = label.copy()
        np.minimum.at(new, linked[:, 0], low)
        np.minimum.at(new, linked[:, 1], low)
        new = new[new]
        if np.array_equal(new, label):
            return label
        label = new
