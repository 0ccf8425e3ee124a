"""Grades of the answers of a torch cell."""

from collections.abc import Callable, Mapping, Sequence

from stages.grading import grade
from stages.results.torch_records import PromptRow, TorchQuality


def grade_rows(
    rows: Sequence[PromptRow],
    outputs: Sequence[Mapping[str, list[int]]],
    references: Mapping[str, str],
    decode_text: Callable[[list[int]], str],
    allow_unsandboxed_code: bool,
) -> TorchQuality:
    """Fill in `correct` and `baseline_correct` of first turns, and return the cell's `quality`.

    Args:
        rows: the cell's rows, at least one of a first turn.
        outputs: token ids of each row's answers, by kind of decoding.
        references: by prompt id.
    """

    def grade_output(row: PromptRow, ids: list[int]) -> bool:
        return grade.grade_answer(references[row.id], decode_text(ids), allow_unsandboxed_code)

    graded, plain, speculative = [], [], []
    for row, output in zip(rows, outputs, strict=True):
        if row.turn == 0:
            row.baseline_correct = grade_output(row, output["plain"])
            row.correct = grade_output(row, output["speculative"])
            graded.append(references[row.id])
            plain.append(row.baseline_correct)
            speculative.append(row.correct)
    return TorchQuality(
        plain=grade.summarise_grades(graded, plain), speculative=grade.summarise_grades(graded, speculative)
    )
