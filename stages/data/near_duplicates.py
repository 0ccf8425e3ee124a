"""Find near duplicates in any language: MinHash over shingles of five characters, LSH bands, connected components.

Shingles are characters, not words or tokens, so Chinese, code and tables are treated alike. Rows that share a band are
candidates; a pair counts where the share of equal slots, an estimate of the Jaccard similarity |A and B| / |A or B| with a
standard error of about 0.035, reaches the threshold.

MinHash is rensa's. Its RMinHashLSH (0.5) is not used: queries take an RMinHash object per row, which holds 512 bytes of slots,
and return whole buckets, n² candidates for n copies. Here a row takes 256 bytes, and n copies are some 2n pairs at most.
"""

import numpy as np
from rensa import RMinHash

SHINGLE_CHARACTERS = 5
MINHASH_SLOTS = 128
CHARACTERS_PER_BATCH = 1 << 16  # their hashes fit the CPU cache
HASH_SEED = 1  # of the hash functions; not a parameter, since another seed finds other borderline pairs
# Legend: R rows, S = MINHASH_SLOTS, P pairs.


def compute_signatures(texts: list[str]) -> np.ndarray:
    """Return [R, S] uint16: the low half of each MinHash slot; unequal slots agree by chance once in 65,536."""
    signatures = np.zeros((len(texts), MINHASH_SLOTS), np.uint16)
    first = size = 0
    for row, text in enumerate(texts):
        size += len(text)
        if size >= CHARACTERS_PER_BATCH or row == len(texts) - 1:
            signatures[first : row + 1] = _compute_batch_signatures(texts[first : row + 1])
            first, size = row + 1, 0
    return signatures


def _compute_batch_signatures(texts: list[str]) -> np.ndarray:
    padding = "\0" * (SHINGLE_CHARACTERS - 1)  # before each text, so that a text of one character has a shingle too
    points = np.frombuffer((padding + padding.join(texts)).encode("utf-32-le"), np.uint32).astype(np.uint64)
    count = len(points) - SHINGLE_CHARACTERS + 1
    hashed = points[:count].copy()
    for offset in range(1, SHINGLE_CHARACTERS):
        hashed *= np.uint64(0x100000001B3)
        hashed += points[offset : offset + count]
    hashed ^= hashed >> np.uint64(31)  # finaliser of splitmix64: spreads the values of a polynomial hash
    hashed *= np.uint64(0xBF58476D1CE4E5B9)
    hashed ^= hashed >> np.uint64(29)
    lengths = np.array([len(text) for text in texts], np.int64)
    within_text = np.ones(count, bool)  # False for windows that reach from one text into the next
    ends = np.cumsum(lengths + SHINGLE_CHARACTERS - 1)[:-1] - (SHINGLE_CHARACTERS - 1)
    for step in range(SHINGLE_CHARACTERS - 1):
        within_text[ends + step] = False
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(hashed[within_text], offsets, MINHASH_SLOTS, HASH_SEED)
    return np.array(matrix.to_rows(), np.uint32).astype(np.uint16)


def choose_bands(threshold: float) -> tuple[int, int]:
    """Return (number of bands, slots per band): the widest that find 99% of the pairs at the threshold."""
    for width in range(16, 1, -1):
        if 1 - (1 - threshold**width) ** (MINHASH_SLOTS // width) >= 0.99:
            return MINHASH_SLOTS // width, width
    return MINHASH_SLOTS, 1


def find_similar_pairs(signatures: np.ndarray, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Return (pairs [P, 2], similarity [P]) of row numbers, the earlier first, with similarity >= `threshold`.

    `signatures` is [R, S]. In a bucket of a band each row is compared with the bucket's first row and with the previous one,
    not with all: a thousand copies are a thousand pairs, and `group_duplicates` connects them.
    """
    found: list[np.ndarray] = []
    num_bands, width = choose_bands(threshold)
    rng = np.random.default_rng(HASH_SEED)
    for band in range(num_bands):
        multipliers = rng.integers(0, 2**63, width, dtype=np.uint64) * np.uint64(2) + np.uint64(1)  # odd
        slots = signatures[:, band * width : (band + 1) * width]
        keys = np.einsum("rs,s->r", slots, multipliers, dtype=np.uint64, casting="unsafe")  # [R]
        order = np.argsort(keys, kind="stable")
        starts_bucket = np.r_[True, np.diff(keys[order]) != 0]
        bucket_heads = order[np.maximum.accumulate(np.where(starts_bucket, np.arange(len(order)), 0))]
        previous = np.r_[order[:1], order[:-1]]
        for partners in (bucket_heads, previous):
            candidates = np.stack([partners[~starts_bucket], order[~starts_bucket]], 1)
            found.append(candidates[_estimate_similarity(signatures, candidates) >= threshold])
    pairs = np.unique(np.concatenate(found), axis=0)
    return pairs, _estimate_similarity(signatures, pairs)


def _estimate_similarity(signatures: np.ndarray, pairs: np.ndarray, pairs_per_batch: int = 1 << 16) -> np.ndarray:
    """Return [P] float32: the share of equal slots of each pair in `pairs` [P, 2]."""
    similarity = np.zeros(len(pairs), np.float32)
    for first in range(0, len(pairs), pairs_per_batch):
        left, right = pairs[first : first + pairs_per_batch].T
        similarity[first : first + pairs_per_batch] = (signatures[left] == signatures[right]).mean(1)
    return similarity


def group_duplicates(num_rows: int, pairs: np.ndarray) -> np.ndarray:
    """Return [R]: the lowest row number of each row's connected component in the graph of `pairs` [P, 2]."""
    from scipy import sparse  # takes 0.2 s, and the processes that only compute signatures do without

    edges = sparse.coo_array((np.ones(len(pairs), bool), (pairs[:, 0], pairs[:, 1])), shape=(num_rows, num_rows))
    _, component = sparse.csgraph.connected_components(edges, directed=False)
    _, lowest_row = np.unique(component, return_index=True)
    return lowest_row[component]
