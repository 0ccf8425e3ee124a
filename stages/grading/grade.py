"""Whether an answer is right: gsm8k by its number, math500 by what is in its box, humaneval by running what it wrote.

A reference is JSON, as stages/data/prompt_sets.py writes it; its `kind` says which of the three. docs/workloads.md
tells how each is graded. What a target wrote runs in a sandbox (`run_program`), and only where a workload's `grade_answer` is
true.
"""

import json
import os
import platform
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from stages.data import final_answer
from stages.grading import sandbox

TIMEOUT_S = 10.0  # of one program, by the clock and of processor time
SLACK_S = 20.0  # for the guard to start, and to kill what is left
MEMORY_BYTES = 1 << 30  # bytes of address space of each process
MAX_PROCESSES = 64  # beyond those its user has, where seccomp doesn't forbid them altogether; root has no such limit
GRADING_METHODS = {
    "gsm8k": "exact match of the last number",
    "math500": "exact match of the last box, normalised",
    "humaneval": "pass@1",
}
BODY_END_PATTERN = re.compile(
    r"\n(?:class |def |#|if |print\(|@|```)"
)  # where a bare completion of a function's body has ended
CODE_BLOCK_PATTERN = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


def grade_answer(reference: str, answer: str, allow_unsandboxed_code: bool = False) -> bool:
    """Whether `answer`, a text, is right; what a target thought before it, or was thinking when it was cut, doesn't count.

    Raises:
        ValueError: where the answer is a program that this machine can't sandbox, without `allow_unsandboxed_code`.
    """
    right = json.loads(reference)
    graders: dict[str, Callable[[dict[str, Any], str], bool]] = {
        "gsm8k": _grade_number, "math500": _grade_mathematics,
        "humaneval": lambda right, answer: _grade_program(right, answer, allow_unsandboxed_code),
    }  # fmt: skip
    return graders[right["kind"]](right, answer.rpartition("</think>")[2].partition("<think>")[0])


def summarise_grades(references: list[str], marks: list[bool]) -> dict[str, Any]:
    """Of all graded answers, one or more: how many, how many are right, their share, and how they were graded."""
    kind = json.loads(references[0])["kind"]
    how = f"{kind}: {GRADING_METHODS[kind]}"
    if kind == "humaneval":
        kept_out = _protections()
        how += f"; run with {', '.join(kept_out)}" if kept_out else "; run with no sandbox but limits"
    return {"graded": len(marks), "correct": sum(marks), "accuracy": sum(marks) / len(marks), "how": how}


# Numbers


def _grade_number(right: dict[str, Any], answer: str) -> bool:
    """In a box, after `####`, or wherever the last one stands."""
    box = final_answer.find_boxed_answer(answer)
    final = answer.rpartition("####")[2] if box is None else box
    found = final_answer.find_last_number(final)
    if found is None:
        found = final_answer.find_last_number(answer)
    return found is not None and found == final_answer.find_last_number(right["answer"])


# Mathematics

# What is written, not what is meant: each is taken out, in this order.
IGNORED_LATEX_PATTERN = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|(?<!\\)\\[,!;:> ]|\\(?:quad|qquad|displaystyle)(?![a-z])|\^\{?\\(?:circ|degree)\}?"
    r"|\\degree|°|\\?\$|\\?%|~"
)
TEXT_COMMAND_PATTERN = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|operatorname)\s*\{([^{}]*)\}")
UNIT_PATTERN = re.compile(
    r"(?<=[\d})])\s*(?:\\(?:text|mbox)\s*\{|\\mathrm\s*\{[~ ])[^{}]*\}(?:\^\{?\d\}?)?$"
)  # 12\text{ cm}^2
FRACTION_PATTERN = re.compile(r"(-?)\\frac\{(-?[\d.]+)\}\{(-?[\d.]+)\}|(-?[\d.]+)/([\d.]+)")
PLAIN_NUMBER_PATTERN = re.compile(r"-?[\d.]+")


def _grade_mathematics(right: dict[str, Any], answer: str) -> bool:
    """Without a box it is wrong: the box is what was asked for."""
    box = final_answer.find_boxed_answer(answer)
    if box is None:
        return False
    one, other = normalise_latex(box), normalise_latex(right["answer"])
    return one == other or (_parse_value(one) is not None and _parse_value(one) == _parse_value(other))


def normalise_latex(text: str) -> str:
    """LaTeX of one value in one way of writing: \\dfrac12 and \\frac{1}{2}, 1,000 and 1000, x=5 and 5, (A) and A."""
    plain = re.sub(r"\\[dtc]frac", r"\\frac", text.strip().rstrip("."))
    plain = re.sub(r"\{,\}|,\\!\s*", ",", plain)  # of thousands
    plain = UNIT_PATTERN.sub("", plain)
    plain = TEXT_COMMAND_PATTERN.sub(r"\1", IGNORED_LATEX_PATTERN.sub("", plain))
    plain = re.sub(r"\\frac\s*([\da-z])\s*([\da-z])", r"\\frac{\1}{\2}", plain)
    plain = re.sub(r"\\frac\s*([\da-z])\s*\{", r"\\frac{\1}{", plain)
    plain = re.sub(r"(\\frac\{[^{}]*\})\s*([\da-z])", r"\1{\2}", plain)
    plain = re.sub(r"\\sqrt\s*([\da-z])", r"\\sqrt{\1}", plain)
    if not re.search(r"[(\[{]", plain):  # where a comma may separate two
        plain = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", plain)
    plain = re.sub(r"^[a-zA-Z](?:\([a-z]\))?\s*=\s*", "", re.sub(r"\s+", " ", plain).strip())
    plain = re.sub(r"^\(([A-Za-z])\)$", r"\1", plain)
    return plain.replace(" ", "").replace("\\ne", "\\neq").replace("\\neqq", "\\neq")


def _parse_value(text: str) -> Fraction | None:
    """Of what is a number or a fraction of two, of no more digits than Python reads."""
    try:
        if match := FRACTION_PATTERN.fullmatch(text):
            sign, over, under, above, below = match.groups()
            return (-1 if sign else 1) * Fraction(over or above) / Fraction(under or below)
        return Fraction(text) if PLAIN_NUMBER_PATTERN.fullmatch(text) else None
    except (ValueError, ZeroDivisionError):
        return None


# Programs


@dataclass(frozen=True)
class ProgramResult:
    """How a program ended that was run."""

    passed: bool  # it came to its end
    how: str  # "passed", "no time left", or its status
    protections: tuple[str, ...] = ()  # what the sandbox kept it from, in words


def check_sandbox(references: Iterable[str], workload: str, allow_unsandboxed_code: bool) -> None:
    """Refuse, before anything is decoded, to grade programs that this machine can't sandbox.

    Raises:
        ValueError: where one of `references` is graded by running the answer, Landlock or seccomp is missing, and
            `allow_unsandboxed_code` is false.
    """
    if allow_unsandboxed_code or all(json.loads(words)["kind"] != "humaneval" for words in references):
        return
    if missing := sandbox.missing_protections(sandbox.landlock_abi(), sandbox.has_seccomp()):
        raise ValueError(_refusal(missing, f"benchmark.workloads.{workload}.grade is true, which runs"))


def _refusal(missing: list[str], what: str) -> str:
    return (
        f"{what} programs that the target wrote; expected Landlock ABI {sandbox.LANDLOCK_ABI_NEEDED} (Linux 6.2) and seccomp "
        f"filters to keep them from your files, found {' and '.join(missing)} on {platform.system()} {platform.release()}, "
        f"{platform.machine()}; run the stage on a machine that has both, set the workload's grade to false, or, where "
        "nothing on this machine can be lost, set benchmark.allow_unsandboxed_code to true"
    )


def _grade_program(right: dict[str, Any], answer: str, allow_unsandboxed_code: bool) -> bool:
    text = build_program(right["prompt"], right["entry_point"], right["test"], answer)
    return run_program(text, allow_unsandboxed_code).passed


def build_program(prompt: str, entry_point: str, test: str, answer: str) -> str:
    """What is run: the function with what the prompt has before it, and HumanEval's tests of it.

    The function is in the answer's last block of code that defines it, or in the whole answer; an answer without it goes
    on where the prompt ended, up to where its body ends.
    """
    defines = re.compile(rf"^[ \t]*(?:async +)?def +{re.escape(entry_point)}\b", re.MULTILINE)
    blocks = CODE_BLOCK_PATTERN.findall(answer)
    whole = [code for code in [answer, *blocks] if defines.search(code)] if blocks else [answer]
    if defines.search(whole[-1] if whole else ""):
        begins = defines.search(prompt)
        written = (prompt[: begins.start()] if begins else "") + "\n" + whole[-1]
    else:
        body = blocks[-1] if blocks else answer
        written = prompt + BODY_END_PATTERN.split(body, maxsplit=1)[0]
    return f"{written}\n\n{test}\n\ncheck({entry_point})\n"


@cache
def run_program(text: str, allow_unsandboxed_code: bool = False) -> ProgramResult:
    """Run a program in a process of its own, and tell whether it came to its end.

    It has an empty folder, no environment, limits and a clock. Landlock and seccomp let it write no file, nor change
    one's mode, owner, attributes or times, and start no process, send no signal and open no connection.
    stages/grading/sandbox.py sees to all that, and kills whatever is left. The program may read what its user may read:
    docs/workloads.md says against whom this protects.

    Raises:
        ValueError: where the kernel lacks Landlock or seccomp; the program was then not run. With
            `allow_unsandboxed_code` it runs by limits and whatever the kernel has.
    """
    secret = secrets.token_hex(16)
    job = {
        "program": text, "secret": secret, "timeout_s": TIMEOUT_S, "memory": MEMORY_BYTES, "processes": MAX_PROCESSES,
        "allow_unsandboxed": allow_unsandboxed_code,
    }  # fmt: skip
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="aerie-grade-") as folder:
        run = subprocess.Popen(
            [sys.executable, "-I", sandbox.__file__],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the stage's alone
        )
        try:
            out, err = run.communicate(json.dumps(job).encode(), timeout=TIMEOUT_S + SLACK_S)
        except subprocess.TimeoutExpired:  # the guard itself got no time, or could not kill what was there
            return ProgramResult(False, "no time left")
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)  # and with it goes its child
                run.wait()
    assert run.returncode == 0, f"the sandbox failed: {err.decode(errors='replace')[-2000:]}"
    found: dict[str, Any] = json.loads(out)
    if found["how"] == "not run":
        raise ValueError(_refusal(found["missing"], "grading runs"))
    return ProgramResult(found["passed"], found["how"], tuple(found["protections"]))


@cache
def _protections() -> tuple[str, ...]:
    """Return what this machine's sandbox keeps programs from, in words."""
    return run_program("", allow_unsandboxed_code=True).protections
