"""What a text says its answer is: the last number in it, or what stands in its last box."""

import re
from fractions import Fraction

# A minus is a sign unless something stands before it that it could be taken from: 12-5, x-5, (3)-5.
NUMBER_PATTERN = re.compile(r"(?:(?<![\w)\]}])([-−])\s?)?(\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(\.\d+)?")
BOXED_PATTERN = re.compile(r"\\(?:boxed|fbox)\s*(\{|\\?[^\s\\{}$.,]+)")


def find_last_number(text: str) -> Fraction | None:
    """The last number, whatever currency, commas and zeros it is written with: -$1,234.50, 18.00, 7 %, \\$1{,}234.

    None where there is none, or one of thousands of digits, as a target in a loop writes them.
    """
    plain = re.sub(r"\\?\$|\\[,!]", "", text.replace("{,}", ","))
    found = [match for match in NUMBER_PATTERN.finditer(plain) if match[2] or match[3]]
    if not found:
        return None
    sign, whole, part = found[-1].groups()
    try:
        value = Fraction((whole or "0").replace(",", "") + (part or ""))
    except ValueError:  # more digits than Python reads
        return None
    return -value if sign else value


def find_boxed_answer(text: str) -> str | None:
    """What the last \\boxed{...} holds, braces balanced; also \\boxed 5. None where there is none, or it isn't closed."""
    found = list(BOXED_PATTERN.finditer(text))
    if not found:
        return None
    if found[-1][1] != "{":
        return found[-1][1]
    depth, start = 0, found[-1].end()
    for place in range(start - 1, len(text)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
            if depth == 0:
                return text[start:place].strip()
    return None
