"""Grades of the answers of a torch cell."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stages.grading import grade


def grade_rows(
    rows: Sequence[dict[str, Any]],
    outputs: Sequence[Mapping[str, list[int]]],
    references: Mapping[str, str],
    decode_text: Callable[[list[int]], str],
    allow_unsandboxed_code: bool,
) -> dict[str, Any]:
    """Fill in `correct` and `baseline_correct` of first turns, and return the cell's `quality`.

    Args:
        rows: the cell's rows, at least one of a first turn.
        outputs: token ids of each row's answers, by kind of decoding.
        references: by prompt id.
    """
    first = [(row, output) for row, output in zip(rows, outputs, strict=True) if row["turn"] == 0]
    for row, output in first:
        for kind, column in (("plain", "baseline_correct"), ("speculative", "correct")):
            text = decode_text(output[kind])
            row[column] = grade.grade_answer(references[row["id"]], text, allow_unsandboxed_code)
    graded = [references[row["id"]] for row, _ in first]
    return {
        "plain": grade.summarise_grades(graded, [row["baseline_correct"] for row, _ in first]),
        "speculative": grade.summarise_grades(graded, [row["correct"] for row, _ in first]),
    }
