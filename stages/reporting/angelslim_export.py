"""Write the answers of benchmark cells as AngelSlim's spec_benchmark.py does: a JSONL file for each way of decoding.

One line a question, with the keys of EAGLE's evaluation (question_id, model_id, choices with new_tokens and wall_time of each
turn), whose scripts thus read it. Texts of answers are not in cells. MODEL_ID-CELL-analysis.json has acceptance length and
speedup ratio by AngelSlim's definitions, means over questions: docs/metrics.md, What others call accept length.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from stages.cells.cell import Cell, LoadPoint, RequestRow
from stages.params.tree_shape import Load
from stages.published.comparison import group_by_question, list_question_speeds, list_question_taus
from stages.runtime import atomic


@dataclass(frozen=True)
class AnswerSet:
    """The answers of a cell, or of one load of a sweep; a way of decoding that was not measured has none."""

    name: str
    temperature: float
    eagle: list[RequestRow]
    baseline: list[RequestRow]


def write_answer_files(folder: Path, model_id: str, sets: Iterable[AnswerSet], analysis: bool) -> None:
    """Replace `folder` by the files of all sets; `analysis` writes a summary of each too."""
    with atomic.write_folder(folder) as temporary:
        for answer_set in sets:
            stem = f"{model_id}-{answer_set.name}"
            files: dict[str, str | None] = {}
            for kind, turns in (("eagle", answer_set.eagle), ("baseline", answer_set.baseline)):
                name = f"{stem}-temperature-{answer_set.temperature}-{kind}.jsonl"
                files[f"{kind}_file"] = name if turns else None
                if turns:
                    lines = (json.dumps(line) for line in _build_lines(turns, model_id))
                    (temporary / name).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            if analysis:
                summary = files | _summarise(answer_set)
                (temporary / f"{stem}-analysis.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def make_model_id(model: str) -> str:
    """Return a target's name as part of file names."""
    return re.sub(r"[^\w.-]+", "-", Path(model).name if model.startswith("/") else model)


def list_answer_sets(cells: Iterable[Cell]) -> Iterator[AnswerSet]:
    """Yield the answers of each cell; of a sweep those of each load."""
    for cell in cells:
        is_baseline = cell.checkpoint is None
        points, plain = ([], cell.points) if is_baseline else (cell.points, cell.baseline_points)
        for load in dict.fromkeys(point.load for point in [*points, *plain]):
            is_sweep = max(len(points), len(plain)) > 1
            name = cell.full_name + (f"-{load.max_new_tokens}-at-{load.concurrency or 'all'}" if is_sweep else "")
            eagle, baseline = (_list_answered(decoded, load) for decoded in (points, plain))
            yield AnswerSet(name, cell.temperature, eagle, baseline)


def _list_answered(points: list[LoadPoint], load: Load) -> list[RequestRow]:
    rows = [row for point in points if point.load == load for row in point.requests]
    return [row for row in rows if not row.failed and None not in (row.e2e_s, row.output_tokens)]


def _build_lines(turns: list[RequestRow], model_id: str) -> Iterator[dict[str, Any]]:
    """Yield a line for each question: a choice for each repeat, lists over its turns."""
    for question, answers in group_by_question(turns).items():
        choices = []
        for repeat in dict.fromkeys(answer.repeat for answer in answers):
            turns_of_repeat = sorted((a for a in answers if a.repeat == repeat), key=lambda answer: answer.turn)
            keys = {"new_tokens": "output_tokens", "wall_time": "e2e_s"}
            if all(answer.cycles is not None for answer in turns_of_repeat):
                keys |= {"idxs": "cycles", "accepted": "accepted"}
            choices.append({"index": repeat} | {key: [a[name] for a in turns_of_repeat] for key, name in keys.items()})
        yield {"question_id": question, "model_id": model_id, "choices": choices}


def _summarise(answers: AnswerSet) -> dict[str, float | None]:
    lengths = list_question_taus(answers.eagle)
    speeds, plain = (list_question_speeds(turns) for turns in (answers.eagle, answers.baseline))
    ratio = fmean(speeds) / fmean(plain) if speeds and plain else None
    return {"acceptance_length": fmean(lengths) if lengths else None, "speedup_ratio": ratio}
