"""Sets of questions that others publish: their rows -> what is asked, in turns, and what answers are graded by.

Each format's rows are as their authors publish them, or in MT-bench's shape (question_id, turns, reference), in which
EAGLE and AngelSlim carry copies of most. What is asked of a set is docs/workloads.md's to say: the sets hold
problems, and whoever asks puts words around them.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.data import final_answer, readers

COMPLETE_INSTRUCTION = "Complete the code I provided.\n"  # EAGLE's words before a prompt of HumanEval
BOXED_INSTRUCTION = (
    "\nPlease reason step by step, and put your final answer within \\boxed{}."  # Qwen's words after a problem
)
GSM8K_ANSWER_MARK = "####"  # before the number that a solution of GSM8K comes to


@dataclass(frozen=True)
class PromptProblem:
    id: str
    turns: list[str]  # what the user says, one or more
    reference: str | None  # JSON, as stages/grading/grade.py takes it; None where the set doesn't say what is right


class MalformedRowError(Exception):
    """What is wrong with a row: what was expected and what was found."""


def read_prompt_set(
    source: str, name: str | None, split: str | None, revision: str | None, kind: str
) -> list[PromptProblem]:
    """All problems of a file, or of a dataset of the Hub or in a folder. `kind` is mt_bench or one of OWN_SHAPES.

    Raises:
        ValueError: naming the file and the line of the first row that isn't as `kind` has them, or whose id was there.
    """
    found: list[PromptProblem] = []
    first_of: dict[str, int] = {}
    for number, row in _read_numbered_rows(source, name, split, revision):
        where = f"{source}, {'line' if source.endswith('.jsonl') else 'row'} {number + 1}"
        try:
            if row is None:
                raise MalformedRowError("expected a row of a set, found one that is nested too deep to read")
            problem = _parse_problem(row, number, kind)
        except MalformedRowError as error:
            raise ValueError(f"{where}: {error}; mend it, or correct the set's format ({kind})") from None
        if (first := first_of.setdefault(problem.id, number)) != number:
            raise ValueError(f"{where}: id {problem.id} is that of row {first + 1} too; give each its own")
        found.append(problem)
    if not found:
        raise ValueError(f"{source}: expected rows of format {kind}, found none; give another file or dataset")
    return found


def _read_numbered_rows(
    source: str, name: str | None, split: str | None, revision: str | None
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The number, from 0, and the object of each row, as raw.parsed."""
    path, pinned = Path(source), dict[str, Any]()
    if readers.detect_file_kind(path) is not None:
        if not path.is_file():
            raise ValueError(f"{source} not found; put the set's file there, or name another in prepare_prompts.sets")
        chunks = readers.read_chunks(path, source, pinned)
    else:
        chunks = _read_dataset_chunks({"dataset": source, "name": name, "split": split, "revision": revision}, pinned)
    for chunk in chunks:
        yield from readers.parse_chunk(chunk)


def _read_dataset_chunks(pin: dict[str, Any], pinned: dict[str, Any]) -> Iterator[readers.RawChunk]:
    source, first = str(pin["dataset"]), 0
    for table in readers.read_hub_dataset(pin, "prepare_prompts.sets", source, pinned):
        yield readers.RawChunk(source, None, first, table, source)
        first += len(table)
    commit = pinned[source]["commit"]
    if commit != pin["revision"]:
        print(
            f"note: {source} is at commit {commit} today; write it as the set's revision, or tomorrow's may be another"
        )


def _parse_problem(row: dict[str, Any], number: int, kind: str) -> PromptProblem:
    if kind == "mt_bench" and isinstance(row.get("prompt"), list):  # HuggingFaceH4/mt_bench_prompts
        row = {**row, "turns": row["prompt"], "question_id": row.get("prompt_id")}
    if row.get("turns") is not None:
        asked, reference, name = _read_turns(row), _read_first_reference(row, kind), row.get("question_id")
    elif kind in ROW_PARSERS:
        (asked, reference), name = ROW_PARSERS[kind](row), row.get("task_id", row.get("unique_id"))
    else:
        raise MalformedRowError(f"expected turns, a list of what the user says, found {_describe_keys(row)}")
    return PromptProblem(str(number if name is None else name), asked, reference)


def _read_turns(row: dict[str, Any]) -> list[str]:
    turns = row["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise MalformedRowError(f"expected turns to be a list of texts, found {readers.abbreviate_row(turns)}")
    return turns


def _read_first_reference(row: dict[str, Any], kind: str) -> str | None:
    """What the first turn's answer is graded by, of a row in MT-bench's shape. Its HumanEval has no tests to run."""
    given = row.get("reference")
    text = given[0] if isinstance(given, list) and given else given
    if not isinstance(text, str):
        return None
    if kind == "gsm8k":
        return _make_number_reference(text)
    if kind == "math500":
        return _make_boxed_reference(text)
    return None


def _parse_gsm8k(row: dict[str, Any]) -> tuple[list[str], str | None]:
    return [_read_text(row, "question")], _make_number_reference(_read_text(row, "answer"))


def _parse_humaneval(row: dict[str, Any]) -> tuple[list[str], str | None]:
    prompt, test, entry = (_read_text(row, key) for key in ("prompt", "test", "entry_point"))
    if not entry.isidentifier():
        raise MalformedRowError(f"expected entry_point to be a function's name, found {entry!r}")
    reference = {"kind": "humaneval", "prompt": prompt, "test": test, "entry_point": entry}
    return [COMPLETE_INSTRUCTION + prompt.lstrip("\n")], json.dumps(reference, ensure_ascii=False)


def _parse_alpaca(row: dict[str, Any]) -> tuple[list[str], str | None]:
    instruction, more = _read_text(row, "instruction"), row.get("input") or ""
    if not isinstance(more, str):
        raise MalformedRowError(f"expected input to be a text, found {readers.abbreviate_row(more)}")
    return [f"{instruction}\n\n{more}" if more.strip() else instruction], None


def _parse_math500(row: dict[str, Any]) -> tuple[list[str], str | None]:
    return [_read_text(row, "problem") + BOXED_INSTRUCTION], _make_boxed_reference(_read_text(row, "answer"))


ROW_PARSERS: dict[str, Callable[[dict[str, Any]], tuple[list[str], str | None]]] = {
    "gsm8k": _parse_gsm8k, "humaneval": _parse_humaneval, "alpaca": _parse_alpaca, "math500": _parse_math500,
}  # fmt: skip


def _make_number_reference(solution: str) -> str:
    """The reference of a solution that ends in `#### 42`."""
    _, mark, final = solution.rpartition(GSM8K_ANSWER_MARK)
    if not mark or final_answer.find_last_number(final) is None:
        raise MalformedRowError(
            f"expected an answer that ends in {GSM8K_ANSWER_MARK} and a number, found ...{readers.abbreviate_row(solution[-60:])}"
        )
    return json.dumps({"kind": "gsm8k", "answer": final.strip()}, ensure_ascii=False)


def _make_boxed_reference(answer: str) -> str:
    """The reference of an answer, or of a whole solution with its answer in a box."""
    return json.dumps(
        {"kind": "math500", "answer": final_answer.find_boxed_answer(answer) or answer.strip()}, ensure_ascii=False
    )


def _read_text(row: dict[str, Any], key: str) -> str:
    found = row.get(key)
    if not isinstance(found, str) or not found.strip():
        raise MalformedRowError(
            f"expected {key}, a text, found {_describe_keys(row) if found is None else readers.abbreviate_row(found)}"
        )
    return found


def _describe_keys(row: dict[str, Any]) -> str:
    return f"the keys {', '.join(row)}" if row else "no keys"
