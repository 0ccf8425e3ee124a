"""The verdict on one structured answer, and what the repairs of TOON and of JSON share."""

from dataclasses import dataclass

from stages.data.toon_lines import FENCE


@dataclass(frozen=True)
class JudgedAnswer:
    """A judged answer."""

    text: str  # the answer to train on; the original where it is dropped
    verdict: str  # "clean", "repaired:rule,rule" or "dropped:reason"


def judge(original: str, text: str, rules: list[str]) -> JudgedAnswer:
    """Return the verdict on an answer that became `text` by `rules`; without a rule it is clean, its text unchanged."""
    return JudgedAnswer(text, f"repaired:{','.join(rules)}") if rules else JudgedAnswer(original, "clean")


def drop(text: str, reason: str) -> JudgedAnswer:
    return JudgedAnswer(text, f"dropped:{reason}")


def name_surroundings(surroundings: list[str]) -> list[str]:
    """Return the names of the rules that removing these lines applies."""
    fence = any(is_fence(line) for line in surroundings)
    prose = any(line.strip() and not is_fence(line) for line in surroundings)
    blank = bool(surroundings) and not fence and not prose
    return ["fence"] * fence + ["prose"] * prose + ["blank_line"] * blank


def is_fence(line: str) -> bool:
    return FENCE.match(line) is not None


def find_fenced_blocks(lines: list[str]) -> list[tuple[int, int]]:
    """Return (first index, index after the last) of the lines inside each pair of fences; the last may be open."""
    fences = [index for index, line in enumerate(lines) if is_fence(line)]
    ends = [*fences[1:], len(lines)]
    return [(fence + 1, end) for fence, end in list(zip(fences, ends, strict=False))[::2]]
