"""Published prompt sets, in their authors' columns and in MT-bench's; a row of neither form is refused by line."""

import json
from pathlib import Path
from typing import Any

import pytest

from stages.params.data_sections import PromptSet
from stages.prompts import prompt_sets
from stages.prompts.prompt_sets import PromptProblem

ROOT = Path(__file__).parents[2]
KINDS = ("mt_bench", "gsm8k", "humaneval", "alpaca", "math500")
# A row of each as its authors publish it (keys are theirs, words ours), and what is made of it: id, turns, reference.
ROWS: dict[str, tuple[dict[str, Any], PromptProblem]] = {
    "mt_bench": (
        {"question_id": 81, "category": "writing", "turns": ["Begin.", "Go on."], "reference": ["Once."]},
        PromptProblem("81", ["Begin.", "Go on."], None),
    ),
    "gsm8k": (
        {"question": "How many?", "answer": "6 * 7 = <<6*7=42>>42\n#### 1,042"},
        PromptProblem("0", ["How many?"], '{"kind": "gsm8k", "answer": "1,042"}'),
    ),
    "humaneval": (
        {"task_id": "HumanEval/7", "prompt": "\n\ndef f():\n", "entry_point": "f", "canonical_solution": "    pass\n",
         "test": "def check(c):\n    pass\n"},
        PromptProblem(
            "HumanEval/7", ["Complete the code I provided.\ndef f():\n"],
            '{"kind": "humaneval", "prompt": "\\n\\ndef f():\\n", "test": "def check(c):\\n    pass\\n", "entry_point": "f"}',
        ),
    ),
    "alpaca": (
        {"instruction": "Sort them.", "input": "b, a", "output": "a, b", "text": "Below is an instruction"},
        PromptProblem("0", ["Sort them.\n\nb, a"], None),
    ),
    "math500": (
        {"problem": "What is $x$?", "solution": "It is $\\boxed{5}$.", "answer": "5", "unique_id": "test/algebra/1.json"},
        PromptProblem(
            "test/algebra/1.json",
            ["What is $x$?\nPlease reason step by step, and put your final answer within \\boxed{}."],
            '{"kind": "math500", "answer": "5"}',
        ),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(*rows: Any, name: str = "set.jsonl") -> str:
    Path(name).write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return name


def read(source: str, kind: str | None = None, **more: Any) -> list[PromptProblem]:
    return prompt_sets.read_prompt_set(PromptSet.model_validate({"from": source, "format": kind, **more}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_as_its_authors_publish_it(kind: str) -> None:
    row, problem = ROWS[kind]
    assert read(write(row), kind) == [problem]


@pytest.mark.parametrize("kind", KINDS)
def test_our_own_samples_are_eight_of_each(kind: str) -> None:
    problems = read(str(ROOT / f"data/prompt_sets/{kind}.jsonl"), kind)
    assert len(problems) == 8 == len({tuple(p.turns) for p in problems})
    assert all((len(p.turns) == 2) == (kind == "mt_bench") for p in problems)
    assert all((p.reference is None) == (kind in ("mt_bench", "alpaca")) for p in problems)


BROKEN = [
    ("gsm8k", {"question": "How many?"}, "expected answer, a text, found the keys question"),
    (
        "gsm8k",
        {"question": "How many?", "answer": "42"},
        "expected an answer that ends in #### and a number, found ...'42'",
    ),
    (
        "humaneval",
        {"prompt": "def f():", "test": "x", "entry_point": "f("},
        "expected entry_point to be a function's name",
    ),
]


@pytest.mark.parametrize(("kind", "row", "says"), BROKEN, ids=[f"{kind} {says[:40]}" for kind, _, says in BROKEN])
def test_a_malformed_row_is_named_with_file_and_line(kind: str, row: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=r"^set\.jsonl, line 2: ") as error:
        read(write(ROWS[kind][0], row), kind)
    assert (
        says in str(error.value)
        and "fix it, or correct the set's format" in str(error.value)
        and "\n" not in str(error.value)
    )


def test_ids_are_each_rows_own() -> None:
    """Images, histories and grades are looked up by id."""
    row = ROWS["math500"][0]
    with pytest.raises(ValueError, match=r"line 3: id test/algebra/1\.json is that of line 1 too"):
        read(write(row, {**row, "unique_id": "b"}, row), "math500")


def test_a_set_without_a_format_is_what_the_data_may_be() -> None:
    """Texts, tables by known names and by a map, conversations, logs, and a folder of these, whose ids name their files."""
    Path("own").mkdir()
    Path("own/a.txt").write_text("Name a river.\n\nName a lake.\r\nAnd a sea?\r")
    asked = [["Name a river."], ["Name a lake."], ["And a sea?"]]
    assert [p.turns for p in read("own/a.txt")] == asked
    Path("own/b.csv").write_text("nr,Frage\n1,Wo?\n2,Wann?\n")
    columns = {"prompt": "Frage", "id": "nr"}
    named = read("own/b.csv", columns=columns)
    assert [(p.id, p.turns) for p in named] == [("1", ["Wo?"]), ("2", ["Wann?"])]
    with pytest.raises(ValueError, match=r"b\.csv: expected columns of a known format .* of the prompt set"):
        read("own/b.csv")
    Path("own/b.csv").write_text("question\nWo?\n")
    talk = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    write(
        {"messages": talk},
        {"turns": ["a", "b"], "question_id": 7},
        {"request": {"messages": talk[1:2]}},
        name="own/c.jsonl",
    )
    found = read("own")  # beside data a text is a note
    assert [(p.id, p.turns, p.system) for p in found] == [
        ("b.csv:0", ["Wo?"], None), ("c.jsonl:0", ["user", "user"], "system"), ("c.jsonl:7", ["a", "b"], None),
        ("c.jsonl:2", ["user"], None),
    ]  # fmt: skip
    with pytest.raises(
        ValueError, match=r"^own/d\.jsonl, line 2: .*empty_turn.*; fix it, or correct .* format \(null\)"
    ):
        read(write({"prompt": "a"}, {"prompt": " "}, name="own/d.jsonl"))


# --- the Hub ---------------------------------------------------------------------------------------------------------
