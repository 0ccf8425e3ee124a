"""Find the final answer in a text: its last number, or the content of its last \\boxed{}."""

import re
from fractions import Fraction

# A minus is a sign unless it follows something it could be subtracted from: 12-5, x-5, (3)-5.
NUMBER_PATTERN = re.compile(r"(?:(?<![\w)\]}])([-−])\s?)?(\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(\.\d+)?")
BOXED_PATTERN = re.compile(r"\\(?:boxed|fbox)\s*(\{|\\?[^\s\\{}$.,]+)")


def find_last_number(text: str) -> Fraction | None:
    """Return the last number, in any of the spellings -$1,234.50, 18.00, 7 %, \\$1{,}234.

    None where there is no number, or where it has more digits than Python reads: a target in a loop writes thousands.
    """
    plain = re.sub(r"\\?\$|\\[,!]", "", text.replace("{,}", ","))
    matches = [match for match in NUMBER_PATTERN.finditer(plain) if match[2] or match[3]]
    if not matches:
        return None
    sign, whole, decimals = matches[-1].groups()
    try:
        value = Fraction((whole or "0").replace(",", "") + (decimals or ""))
    except ValueError:  # more digits than Python reads
        return None
    return -value if sign else value


def find_boxed_answer(text: str) -> str | None:
    """Return the content of the last \\boxed{...}, braces balanced, or of \\boxed 5; None without a closed box."""
    boxes = list(BOXED_PATTERN.finditer(text))
    if not boxes:
        return None
    if boxes[-1][1] != "{":
        return boxes[-1][1]
    depth, start = 0, boxes[-1].end()
    for position in range(start - 1, len(text)):
        if text[position] in "{}" and text[position - 1] != "\\":
            depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return text[start:position].strip()
    return None
