"""Classes of tokens by their text: digits, structure or letters. A draft's accept rate differs between them.

In a TOON table digits are most of the values, structure is line breaks, commas and brackets, and letters are the keys and the
words among the values. A token of several classes counts as the first of digits, letters, structure.
"""

import unicodedata
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

TOKEN_CLASSES = ("structure", "digits", "letters")
STRUCTURE_CATEGORIES = ("P", "S", "Z", "C")  # Unicode's categories: punctuation, symbols, separators, controls
INCOMPLETE_CHARACTER = "\ufffd"  # some bytes of a letter, completed by other tokens


def classify_text(text: str) -> str:
    """Return the class of a token's text; an empty text is structure."""
    if any(c.isdigit() for c in text):
        return "digits"
    has_letters = any(
        c == INCOMPLETE_CHARACTER or not unicodedata.category(c).startswith(STRUCTURE_CATEGORIES) for c in text
    )
    return "letters" if has_letters else "structure"


def classify_tokens(tokenizer: Any, ids: Iterable[int]) -> Tensor:
    """Return the index into TOKEN_CLASSES of each token up to the largest of `ids`; 0 for those not in `ids`.

    Special tokens are structure.
    """
    distinct_ids = sorted(set(ids))
    special = set(tokenizer.all_special_ids)
    found = torch.zeros(distinct_ids[-1] + 1, dtype=torch.int64)
    for token in distinct_ids:
        found[token] = TOKEN_CLASSES.index(
            "structure" if token in special else classify_text(tokenizer.decode([token]))
        )
    return found
