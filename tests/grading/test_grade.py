"""Right and wrong answers: numbers, mathematics, and programs."""

from typing import Any

import psutil
import pytest

from stages.cells.cell import GradeSummary
from stages.grading import grade
from tests.grading.programs import PROBLEMS, make_humaneval_reference, make_reference


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
    assert grade.grade_answer(make_reference("gsm8k", "1,200"), answer) == is_right


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
        assert grade.grade_answer(make_reference("math500", other), rf"So it is $\boxed{{{one}}}$.")


@pytest.mark.parametrize(("written", "meant"), OTHERS)
def test_two_values(written: str, meant: str) -> None:
    assert not grade.grade_answer(make_reference("math500", meant), rf"\boxed{{{written}}}")


def test_what_is_not_in_a_box_is_not_an_answer() -> None:
    assert not grade.grade_answer(make_reference("math500", "5"), "It is 5.")
    assert not grade.grade_answer(make_reference("math500", "5"), r"\boxed{5} at first, but then \boxed{6}")


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem["entry_point"])
def test_the_samples_own_solutions_pass_and_no_others(problem: dict[str, Any]) -> None:
    whole = problem["prompt"] + problem["canonical_solution"]
    task = make_humaneval_reference(problem)
    assert grade.grade_answer(task, problem["canonical_solution"])  # a bare completion
    assert grade.grade_answer(task, f"Here it is:\n```python\n{whole}```\nIt runs in linear time.")
    assert grade.grade_answer(task, f"Use it so:\n```python\n{whole}\nprint(1)\n```\nand then\n```bash\nls\n```")
    assert not grade.grade_answer(task, "```python\n" + problem["prompt"] + "    return None\n```")
    assert not grade.grade_answer(task, "I can't do that.")


def test_of_several_blocks_the_last_that_defines_it_counts() -> None:
    task = make_humaneval_reference(PROBLEMS[0])
    bad, good = (
        f"```\ndef double_all(numbers):\n    return {body}\n```\n" for body in ("[]", "[2 * n for n in numbers]")
    )
    assert grade.grade_answer(task, f"First try:\n{bad}That is wrong. Better:\n{good}")
    assert not grade.grade_answer(task, f"{good}No:\n{bad}")


def test_a_bare_completion_ends_where_its_body_does() -> None:
    program = "    return [2 * n for n in numbers]\n\nprint(double_all([1]))\nI hope this helps!"
    assert grade.grade_answer(make_humaneval_reference(PROBLEMS[0]), program)


def test_quality_is_counted_and_says_how() -> None:
    found = GradeSummary.of_marks([True, False, True, True], grade.describe_grading(make_reference("gsm8k", "1")))
    how = "gsm8k: exact match of the last number"
    assert found == GradeSummary(graded=4, correct=3, accuracy=0.75, how=how)


WAYS_OUT = {
    "leaves before its tests": "import sys\nsys.exit(0)", "leaves for good": "import os\nos._exit(0)",
    "fails": "assert False", "is no Python": "def f(:", "crashes": "import ctypes\nctypes.string_at(0)",
    "eats memory": "x = []\nwhile True:\n    x.append(bytes(1 << 22))",
    "writes a file": "open('a', 'w').write('x' * 9999)", "sleeps": "import time\ntime.sleep(999)",
}  # fmt: skip


@pytest.mark.parametrize("text", WAYS_OUT.values(), ids=WAYS_OUT)
def test_a_program_that_does_not_come_to_its_end_has_not_passed(text: str) -> None:
    assert not grade.run_program(text)


def test_a_child_that_a_program_leaves_is_ended() -> None:
    child = "os.execv(sys.executable, ['python', '-c', 'import time; time.sleep(98725)'])"
    leaves = f"import os, sys\nif os.fork() == 0:\n    {child}"
    assert not grade.run_program(f"{leaves}\nwhile True:\n    pass")
    left = [process for process in psutil.process_iter(["cmdline"]) if "98725" in str(process.info["cmdline"])]
    _, alive = psutil.wait_procs(left, 10)  # a killed process of another parent ends in its own time
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_it_sees_no_environment_and_an_empty_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert grade.run_program("import os\nassert 'HF_TOKEN' not in os.environ and not os.listdir()")


def test_grading_programs_is_refused_before_anything_is_decoded_unless_it_is_allowed() -> None:
    tasks = [make_humaneval_reference(PROBLEMS[0])]
    with pytest.raises(
        ValueError, match=r"benchmark\.workloads\.he\.grade is true, expected benchmark\.run_generated_code"
    ):
        grade.check_programs(tasks, "he", False)
    grade.check_programs(tasks, "he", True)
    grade.check_programs([make_reference("gsm8k", "1")], "he", False)  # runs nothing
