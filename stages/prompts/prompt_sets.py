"""Read published prompt sets: the user's turns of each problem, and the reference that grades its answer.

A set without a format is what fix_data.raw may be: questions, turns or conversations, of which the user's messages and a
system message are taken. A row of a published set has its authors' columns, or MT-bench's (question_id, turns, reference), in
which EAGLE and AngelSlim distribute copies of most sets. docs/workloads.md has the instruction that each set's problems get.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stages.data import chat_formats, final_answer, hub_datasets, json_lines, readers, request_logs
from stages.data.hub_datasets import HubPin, HubRecord
from stages.data.row_images import DroppedRowError
from stages.params.data_sections import PromptSet

COMPLETE_INSTRUCTION = "Complete the code I provided.\n"  # EAGLE's instruction before a HumanEval prompt
# Qwen's instruction after a problem
BOXED_INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
GSM8K_ANSWER_MARK = "####"  # precedes the result in a GSM8K solution


@dataclass(frozen=True)
class PromptProblem:
    """One problem of a set."""

    id: str
    turns: list[str]  # the user's messages, one or more
    reference: str | None  # JSON, read by stages/grading/grade.py; None where the set has no reference answer
    system: str | None = None


class MalformedRowError(Exception):
    """A row that is not of its set's format; the message says what was expected and found."""


def read_prompt_set(given: PromptSet) -> list[PromptProblem]:
    """Return all problems of a file or folder, or of a dataset of the Hub, which has a split.

    Raises ValueError naming rows that are not of the set's format, or whose id is taken.
    """
    problems: list[PromptProblem] = []
    row_of_id: dict[str, str] = {}
    malformed: dict[str, MalformedRowError] = {}
    source, set_format = given.from_, given.format
    unit, total = "line" if source.endswith((".jsonl", ".txt")) else "row", 0
    for prefix, folder, number, row in _read_numbered_rows(given):
        total, where = total + 1, f"{prefix}{number + 1}"
        try:
            if row is None:
                raise MalformedRowError("expected a row of a set, found one that is nested too deep to read")
            if set_format is None and not isinstance(row.get("turns"), list):
                problem = _parse_conversation(row, number, folder)
            else:
                problem = _parse_problem(row, number, set_format or "mt_bench")
        except MalformedRowError as error:
            malformed[where] = error
            continue
        problem = replace(problem, id=f"{prefix}{problem.id}")
        if (first := row_of_id.setdefault(problem.id, where)) != where:
            taken = f"id {problem.id} is that of {unit} {first} too; give each its own"
            raise ValueError(f"{source}, {unit} {where}: {taken}")
        problems.append(problem)
    if malformed:
        first_row, reason = next(iter(malformed.items()))
        others = ""
        if len(malformed) > 1:
            others = f"; {json_lines.describe_numbers([*malformed], total, f'{unit}s are not of the format')}"
        fix = f"fix {'them' if others else 'it'}, or correct the set's format ({set_format or 'null'}) or columns"
        raise ValueError(f"{source}, {unit} {first_row}: {reason}{others}; {fix}")
    if not problems:
        raise ValueError(f"{source}: expected rows of prompts, found none; give another file or dataset")
    return problems


def _read_numbered_rows(given: PromptSet) -> Iterator[tuple[str, str | None, int, dict[str, Any] | None]]:
    """Yield (the file where there are several, its folder, row number from 0, object) as readers.parse_chunk does."""
    source, path, hub_records = given.from_, Path(given.from_), dict[str, HubRecord]()
    if given.split is None:
        if not path.exists():
            raise ValueError(f"{source} not found; put the set's file there, or name another in prepare_prompts.sets")
        for chunk in readers.read_all_chunks(path, hub_records, choose_columns=lambda file: given.columns):
            prefix = f"{chunk.source}:" if path.is_dir() else ""
            yield from ((prefix, chunk.folder, *numbered) for numbered in readers.parse_chunk(chunk))
        return
    pin, first = HubPin(dataset=source, **given.model_dump(include={"name", "split", "revision"})), 0
    for table in hub_datasets.read_hub_dataset(pin, "prepare_prompts.sets", source, hub_records, path):
        chunk = readers.RawChunk(source, None, first, readers.ArrowRows.from_frame(table), source, given.columns)
        yield from (("", None, *numbered) for numbered in readers.parse_chunk(chunk))
        first += table.height
    if (commit := hub_records[source].commit) != pin.revision:
        print(f"note: {source} is at commit {commit} today; pin it as the set's revision, as tomorrow's may be another")


def _parse_conversation(row: dict[str, Any], number: int, folder: str | None) -> PromptProblem:
    """Return the user's messages of any row that fix_data reads; the answers between them are the target's own."""
    try:
        row = request_logs.unwrap_log(row)
        if (chat_format := chat_formats.detect_format(row)) is None:
            raise MalformedRowError(f"expected a question or turns, found {_describe_keys(row)}")
        found = chat_formats.parse_conversation(row, chat_format, folder)
    except DroppedRowError as error:
        raise MalformedRowError(f"{error}: found {error.found}, expected {error.expected or 'texts'}") from None
    if found.images:
        raise MalformedRowError("expected texts, found images: a workload of images is that of the eval split")
    texts = {role: [m["content"] for m in found.messages if m["role"] == role] for role in ("system", "user")}
    name = next((row[key] for key in ("id", "prompt_id", "question_id") if row.get(key) is not None), number)
    return PromptProblem(str(name), texts["user"], None, next(iter(texts["system"]), None))


def _parse_problem(row: dict[str, Any], number: int, set_format: str) -> PromptProblem:
    if set_format == "mt_bench" and isinstance(row.get("prompt"), list):  # HuggingFaceH4/mt_bench_prompts
        row = {**row, "turns": row["prompt"], "question_id": row.get("prompt_id")}
    if row.get("turns") is not None:
        turns, reference, name = row["turns"], _read_first_reference(row, set_format), row.get("question_id")
        if not (isinstance(turns, list) and turns and all(isinstance(turn, str) and turn.strip() for turn in turns)):
            found = json_lines.abbreviate_row(turns)
            raise MalformedRowError(f'expected turns to be a list of texts, as ["first message"], found {found}')
    elif set_format in ROW_PARSERS:
        (turns, reference), name = ROW_PARSERS[set_format](row), row.get("task_id", row.get("unique_id"))
    else:
        raise MalformedRowError(f"expected turns, a list of the user's messages, found {_describe_keys(row)}")
    return PromptProblem(str(number if name is None else name), turns, reference)


def _read_first_reference(row: dict[str, Any], set_format: str) -> str | None:
    """Return the first turn's reference of a row with MT-bench's columns; HumanEval in that form has no tests to run."""
    given = row.get("reference")
    text = given[0] if isinstance(given, list) and given else given
    make_reference = {"gsm8k": _make_number_reference, "math500": _make_boxed_reference}.get(set_format)
    return make_reference(text) if make_reference and isinstance(text, str) else None


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
        raise MalformedRowError(f"expected input to be a text, found {json_lines.abbreviate_row(more)}")
    return [f"{instruction}\n\n{more}" if more.strip() else instruction], None


def _parse_math500(row: dict[str, Any]) -> tuple[list[str], str | None]:
    return [_read_text(row, "problem") + BOXED_INSTRUCTION], _make_boxed_reference(_read_text(row, "answer"))


ROW_PARSERS: dict[str, Callable[[dict[str, Any]], tuple[list[str], str | None]]] = {
    "gsm8k": _parse_gsm8k, "humaneval": _parse_humaneval, "alpaca": _parse_alpaca, "math500": _parse_math500,
}  # fmt: skip


def _make_number_reference(solution: str) -> str:
    """Return the reference of a solution that ends in `#### 42`."""
    _, mark, final = solution.rpartition(GSM8K_ANSWER_MARK)
    if not mark or final_answer.find_last_number(final) is None:
        found = json_lines.abbreviate_row(solution[-60:])
        raise MalformedRowError(f"expected an answer that ends in {GSM8K_ANSWER_MARK} and a number, found ...{found}")
    return json.dumps({"kind": "gsm8k", "answer": final.strip()}, ensure_ascii=False)


def _make_boxed_reference(answer: str) -> str:
    """Return the reference of an answer, or of a whole solution with a boxed answer."""
    final = final_answer.find_boxed_answer(answer) or answer.strip()
    return json.dumps({"kind": "math500", "answer": final}, ensure_ascii=False)


def _read_text(row: dict[str, Any], key: str) -> str:
    found = row.get(key)
    if not isinstance(found, str) or not found.strip():
        shown = _describe_keys(row) if found is None else json_lines.abbreviate_row(found)
        raise MalformedRowError(f"expected {key}, a text, found {shown}")
    return found


def _describe_keys(row: dict[str, Any]) -> str:
    return f"the keys {', '.join(row)}" if row else "no keys"
