"""Right and wrong answers; programs that are right, wrong, hang, fork, eat memory, and reach for what is not theirs."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from stages.formats import prompt_sets
from stages.serving import grades

ROOT = Path(__file__).parents[2]
PROBLEMS = [json.loads(line) for line in (ROOT / "data/prompt_sets/humaneval.jsonl").read_text().splitlines()]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grades, "TIMEOUT_S", 3.0)


def right(kind: str, answer: str) -> str:
    return json.dumps({"kind": kind, "answer": answer})


# --- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ("12 * 100 = 1200, so she earns $1,200.00 in all.", True),
        ("1200", True),
        ("#### 1,200", True),
        (r"The answer is \boxed{1200}, in 4 weeks.", True),
        ("#### 1200 (for 4 weeks)", False),  # the last number after the mark
        ("She earns 1200 in 4 weeks.", False),  # exact match asks for the last
        ("<think>1300? no</think>1200", True),
        ("<think>It is 1200</think>I don't know.", False),
        ("<think>It is 1200, but wait", False),  # cut by length
        ("-1200", False),
        ("120", False),
        ("no idea", False),
    ],
)
def test_gsm8k(answer: str, is_right: bool) -> None:
    assert grades.grade(right("gsm8k", "1,200"), answer) == is_right


# --- mathematics ----------------------------------------------------------------------------------------------------

SAME = [
    (r"\dfrac{1}{2}", r"\frac12"), (r"\frac 1 2", r"\tfrac{1}{2}"), ("0.5", r"\frac{1}{2}"), (r"-\frac{1}{2}", "-0.5"),
    (r"\frac{3}{-4}", r"-\frac34"), ("14/3", r"\frac{14}{3}"), ("1,000", "1000"), (r"10{,}000{,}000", "10000000"),
    (r"11,\! 111,\! 111", "11111111"), ("x = 5", "5"), ("f(x) = 2x", "2x"), (r"\text{(A)}", "A"), ("(A)", "A"),
    (r"\$5", "5"), (r"50\%", "50"), (r"90^\circ", "90"), (r"90^{\circ}", "90"), (r"12\text{ cm}^2", "12"),
    (r"12\mathrm{~cm}", "12"), (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"), ("2, 3", "2,3"),
    (r"\sqrt2", r"\sqrt{2}"), (r"\mbox{east}", r"\text{east}"), ("18.90", "18.9"), ("5.", "5"), (r"x \neq 3", r"x\ne3"),
    (r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", r"\begin{pmatrix}1/5\\-18/5\end{pmatrix}"),
]  # fmt: skip
OTHERS = [
    ("1", "2"), (r"\frac{1}{2}", r"\frac{2}{1}"), ("(1,2)", "(2,1)"), ("2,3", "23"), ("[1,2)", "(1,2)"), ("-5", "5"),
    ("1000", "100"), ("(1,000)", "(1000)"), ("a", "A"), ("2,300", "2, 300"), ("1e999999999", "1"), ("1/0", "0"),
]  # fmt: skip


@pytest.mark.parametrize(("written", "meant"), SAME)
def test_one_value_written_in_two_ways(written: str, meant: str) -> None:
    for one, other in ((written, meant), (meant, written)):
        assert grades.grade(right("math500", other), rf"So it is $\boxed{{{one}}}$.")


@pytest.mark.parametrize(("written", "meant"), OTHERS)
def test_two_values(written: str, meant: str) -> None:
    assert not grades.grade(right("math500", meant), rf"\boxed{{{written}}}")


def test_what_is_not_in_a_box_is_not_an_answer() -> None:
    assert not grades.grade(right("math500", "5"), "It is 5.")
    assert not grades.grade(right("math500", "5"), r"\boxed{5} at first, but then \boxed{6}")


# --- programs -------------------------------------------------------------------------------------------------------


def reference(problem: dict[str, Any]) -> str:
    return json.dumps({"kind": "humaneval", **{k: problem[k] for k in ("prompt", "test", "entry_point")}})


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem["entry_point"])
def test_the_samples_own_solutions_pass_and_no_others(problem: dict[str, Any]) -> None:
    whole = problem["prompt"] + problem["canonical_solution"]
    asked = reference(problem)
    assert grades.grade(asked, problem["canonical_solution"])  # a bare completion
    assert grades.grade(asked, f"Here it is:\n```python\n{whole}```\nIt runs in linear time.")
    assert grades.grade(asked, f"Use it so:\n```python\n{whole}\nprint(1)\n```\nand then\n```bash\nls\n```")
    assert not grades.grade(asked, "```python\n" + problem["prompt"] + "    return None\n```")
    assert not grades.grade(asked, "I can't do that.")


def test_of_several_blocks_the_last_that_defines_it_counts() -> None:
    asked = reference(PROBLEMS[0])
    bad, good = (
        f"```\ndef double_all(numbers):\n    return {body}\n```\n" for body in ("[]", "[2 * n for n in numbers]")
    )
    assert grades.grade(asked, f"First try:\n{bad}That is wrong. Better:\n{good}")
    assert not grades.grade(asked, f"{good}No:\n{bad}")


def test_a_bare_completion_ends_where_its_body_does() -> None:
    said = "    return [2 * n for n in numbers]\n\nprint(double_all([1]))\nI hope this helps!"
    assert grades.grade(reference(PROBLEMS[0]), said)


def test_helpers_before_the_function_are_there() -> None:
    problem = next(p for p in PROBLEMS if p["entry_point"] == "decode_pairs")
    assert grades.grade(reference(problem), "```python\ndef decode_pairs(text):\n    return encode_pairs(text)\n```")


WAYS_OUT = {
    "leaves before its tests": "import sys\nsys.exit(0)",
    "leaves for good": "import os\nos._exit(0)",
    "fails": "assert False",
    "is no Python": "def f(:",
    "recurses without end": "def f():\n    f()\nf()",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "eats memory at once": "x = bytearray(3 << 30)",
    "eats memory bit by bit": "x = []\nwhile True:\n    x.append(bytearray(1 << 22))",
}


@pytest.mark.parametrize("fenced", [True, False], ids=["fenced", "by limits alone"])
@pytest.mark.parametrize("text", WAYS_OUT.values(), ids=WAYS_OUT)
def test_a_program_that_does_not_come_to_its_end_has_not_passed(text: str, fenced: bool) -> None:
    begun = time.monotonic()
    found = grades.passes(text, fenced)
    assert not found["passed"] and found["how"].startswith("status ")
    assert time.monotonic() - begun < 15


@pytest.mark.parametrize(
    "text", ["while True:\n    pass", "import time\ntime.sleep(999)", "while True:\n    print('x' * 999)"]
)
def test_one_that_hangs_is_ended(text: str) -> None:
    begun = time.monotonic()
    assert grades.passes(text)["how"] == "no time left"
    assert time.monotonic() - begun < 15


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[Path]:
    """A file that a program must not reach."""
    path = tmp_path / "mine"
    path.write_text("untouched")
    yield path
    assert path.read_text() == "untouched"


REACHES = {
    "writes a file": "open('a', 'w')",
    "writes over a file": "open({mine!r}, 'w')",
    "removes a file": "import os\nos.unlink({mine!r})",
    "changes a mode": "import os\nos.chmod({mine!r}, 0o777)",
    "forks": "import os\nos.fork()",
    "runs a command": "import subprocess\nsubprocess.run(['true'])",
    "starts a thread": "import threading\nthreading.Thread(target=print).start()",
    "kills": "import os\nos.kill({pid}, 0)",
    "connects": "import socket\nsocket.create_connection(('127.0.0.1', 9))",
}


@pytest.mark.skipif(len(grades._fences()) < 3, reason="no Landlock or no seccomp here")
@pytest.mark.parametrize("text", REACHES.values(), ids=REACHES)
def test_what_a_program_must_not_do_fails(text: str, witness: Path) -> None:
    whole = text.format(mine=str(witness), pid=os.getpid()).replace("\n", "\n    ")
    caught = f"try:\n    {whole}\nexcept (PermissionError, RuntimeError):\n    pass\nelse:\n    1 / 0"
    assert grades.passes(caught)["passed"], "it was not refused"


@pytest.mark.parametrize("name", ["writes a file", "runs a command", "starts a thread", "kills"])
def test_it_is_the_fence_that_keeps_it_from_that(name: str) -> None:
    assert grades.passes(REACHES[name].format(pid=os.getpid()), fenced=False)["passed"]


def test_it_sees_no_environment_and_an_empty_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert grades.passes("import os\nassert 'HF_TOKEN' not in os.environ and not os.listdir()")["passed"]


def test_what_it_needs_is_there() -> None:
    assert grades.passes(
        "import math, re, typing, collections, itertools, hashlib, heapq, numpy\nassert numpy.ones(3).sum() == 3"
    )["passed"]


def test_children_that_left_its_group_are_killed_with_it() -> None:
    """Where nothing forbids them: each forks twice and has a session of its own, so no signal to a group finds it."""
    mark = "987.25"
    text = (
        "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        f"            time.sleep({mark})\n        os._exit(0)\nwhile True:\n    pass"
    )
    before = guards()
    assert grades.passes(text, fenced=False)["how"] == "no time left"
    assert guards() <= before


def test_a_guard_that_gets_no_time_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell of an hour's decoding must not be lost with it."""
    monkeypatch.setattr(grades, "SLACK_S", -2.9)
    before = guards()
    assert grades.passes("import time\ntime.sleep(9.5)") == {"passed": False, "how": "no time left", "fences": []}
    ends = time.monotonic() + 5  # its child is killed by its end, and dies when the machine gets round to it
    while not guards() <= before and time.monotonic() < ends:
        time.sleep(0.01)
    assert guards() <= before


def guards() -> set[int]:
    """Processes of the sandbox: what a program forks has its command line."""
    found = set()
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and grades.guard.__file__ in (process.info["cmdline"] or []):
            found.add(process.pid)
    return found


def test_quality_is_counted_and_says_how() -> None:
    assert grades.quality([right("gsm8k", "1")] * 4, [True, False, True, True]) == {
        "graded": 4, "correct": 3, "accuracy": 0.75, "how": "gsm8k: exact match of the last number",
    }  # fmt: skip
    how = grades.quality([reference(PROBLEMS[0])], [False])["how"]
    assert how.startswith("humaneval: pass@1; run with ")


@pytest.mark.parametrize("name", ["gsm8k", "math500", "humaneval"])
def test_the_samples_references_accept_their_own_solutions(name: str) -> None:
    path = ROOT / f"data/prompt_sets/{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    key = {"gsm8k": "answer", "math500": "solution", "humaneval": "canonical_solution"}[name]
    problems = prompt_sets.read(str(path), None, None, None, name)
    assert len(rows) == len(problems) == 8
    for problem, row, other in zip(problems, rows, [*rows[1:], rows[0]], strict=True):
        assert problem.reference and grades.grade(problem.reference, row[key])
        assert not grades.grade(problem.reference, other[key])
