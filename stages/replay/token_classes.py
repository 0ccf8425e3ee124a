"""What kind of text a token is: digits, structure or letters. Drafts guess the three unlike well.

In a TOON table digits are most of the values, structure is line breaks, commas and brackets, and letters are the keys and
words among the values. A token of several kinds counts by the first that it has of digits, letters, structure.
"""

import unicodedata
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

TOKEN_CLASSES = ("structure", "digits", "letters")
STRUCTURE_CATEGORIES = ("P", "S", "Z", "C")  # Unicode's categories: punctuation, symbols, separators, controls
INCOMPLETE_CHARACTER = "\ufffd"  # bytes of a letter that other tokens complete


def classify_text(text: str) -> str:
    """Of a token's text; an empty one, or a token that only the template writes, is structure."""
    if any(c.isdigit() for c in text):
        return "digits"
    spoken = any(
        c == INCOMPLETE_CHARACTER or not unicodedata.category(c).startswith(STRUCTURE_CATEGORIES) for c in text
    )
    return "letters" if spoken else "structure"


def classify_tokens(tokenizer: Any, ids: Iterable[int]) -> Tensor:
    """Index into KINDS of each token up to the largest of `ids`; of those not in `ids`, 0."""
    wanted = sorted(set(ids))
    special = set(tokenizer.all_special_ids)
    found = torch.zeros(wanted[-1] + 1, dtype=torch.int64)
    for token in wanted:
        found[token] = TOKEN_CLASSES.index(
            "structure" if token in special else classify_text(tokenizer.decode([token]))
        )
    return found
