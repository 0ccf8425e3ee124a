"""Grades of answers: gsm8k by the number, math500 by the boxed value, humaneval by running the program.

A reference is JSON, written by stages/prompts/prompt_sets.py; its `kind` selects the grader. docs/workloads.md describes how each
grades. Programs written by a target run in a sandbox (`run_program`), and only for workloads with `grade: true`.
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
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from stages.data import final_answer
from stages.grading import sandbox
from stages.grading.grade_summary import GradeSummary

TIMEOUT_S = 10.0  # of one program, by the clock and of processor time
SLACK_S = 20.0  # for the sandbox to start, and to kill what is left
MEMORY_BYTES = 1 << 30  # bytes of address space of each process
MAX_PROCESSES = 64  # beyond the user's own, without seccomp, which forbids all; root has no such limit
GRADING_METHODS = {
    "gsm8k": "exact match of the last number",
    "math500": "exact match of the last box, normalised",
    "humaneval": "pass@1",
}
# The end of a completion that is a function's body alone.
BODY_END_PATTERN = re.compile(r"\n(?:class |def |#|if |print\(|@|```)")
CODE_BLOCK_PATTERN = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


def grade_answer(reference: str, answer: str, allow_unsandboxed_code: bool = False) -> bool:
    """Return whether a text answer is right. Reasoning before the answer, or cut in the middle, is ignored.

    Raises:
        ValueError: if the answer is a program that this machine can't sandbox, without `allow_unsandboxed_code`.
    """
    expected = json.loads(reference)
    final = answer.rpartition("</think>")[2].partition("<think>")[0]
    if expected["kind"] == "humaneval":
        program = build_program(expected["prompt"], expected["entry_point"], expected["test"], final)
        return run_program(program, allow_unsandboxed_code).passed
    grade_text = {"gsm8k": _grade_number, "math500": _grade_mathematics}[expected["kind"]]
    return grade_text(expected["answer"], final)


def summarise_grades(references: list[str], marks: list[bool]) -> GradeSummary:
    """Return the grades of one or more answers."""
    kind = json.loads(references[0])["kind"]
    how = f"{kind}: {GRADING_METHODS[kind]}"
    if kind == "humaneval":
        protections = _probe_protections()
        how += f"; run with {', '.join(protections)}" if protections else "; run with no sandbox but limits"
    return GradeSummary(len(marks), sum(marks), sum(marks) / len(marks), how)


# Numbers


def _grade_number(expected: str, answer: str) -> bool:
    """Compare the number in the box, after `####`, or the last one of the answer."""
    box = final_answer.find_boxed_answer(answer)
    found = final_answer.find_last_number(answer.rpartition("####")[2] if box is None else box)
    if found is None:
        found = final_answer.find_last_number(answer)
    return found is not None and found == final_answer.find_last_number(expected)


# Mathematics

# Notation without meaning, removed in this order.
IGNORED_LATEX_PATTERN = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|(?<!\\)\\[,!;:> ]|\\(?:quad|qquad|displaystyle)(?![a-z])|\^\{?\\(?:circ|degree)\}?"
    r"|\\degree|°|\\?\$|\\?%|~"
)
TEXT_COMMAND_PATTERN = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|operatorname)\s*\{([^{}]*)\}")
# 12\text{ cm}^2
UNIT_PATTERN = re.compile(r"(?<=[\d})])\s*(?:\\(?:text|mbox)\s*\{|\\mathrm\s*\{[~ ])[^{}]*\}(?:\^\{?\d\}?)?$")
FRACTION_PATTERN = re.compile(r"(-?)\\frac\{(-?[\d.]+)\}\{(-?[\d.]+)\}|(-?[\d.]+)/([\d.]+)")
PLAIN_NUMBER_PATTERN = re.compile(r"-?[\d.]+")


def _grade_mathematics(expected: str, answer: str) -> bool:
    """Compare the boxed value; an answer without a box is wrong, since the prompt asks for one."""
    box = final_answer.find_boxed_answer(answer)
    if box is None:
        return False
    one, other = normalise_latex(box), normalise_latex(expected)
    return one == other or (_parse_value(one) is not None and _parse_value(one) == _parse_value(other))


def normalise_latex(text: str) -> str:
    """Return one notation for LaTeX of one value: \\dfrac12 and \\frac{1}{2}, 1,000 and 1000, x=5 and 5, (A) and A."""
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
    """Return a number, or a fraction of two; None for anything else, or more digits than Python reads."""
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
    """How a program ended."""

    passed: bool  # it ran to its end
    how: str  # "passed", "no time left", or its status
    protections: tuple[str, ...] = ()  # what the sandbox prevented, in words


def check_sandbox(references: Iterable[str], workload: str, allow_unsandboxed_code: bool) -> None:
    """Check, before anything is decoded, that this machine can sandbox programs to be graded.

    Raises:
        ValueError: if one of `references` is graded by running the answer, Landlock or seccomp is missing, and
            `allow_unsandboxed_code` is false.
    """
    if allow_unsandboxed_code or all(json.loads(words)["kind"] != "humaneval" for words in references):
        return
    if missing := sandbox.list_missing_protections(sandbox.read_landlock_abi(), sandbox.has_seccomp()):
        raise ValueError(_describe_refusal(missing, f"benchmark.workloads.{workload}.grade is true, which runs"))


def _describe_refusal(missing: list[str], what: str) -> str:
    return (
        f"{what} programs that the target wrote; expected Landlock ABI {sandbox.LANDLOCK_ABI_NEEDED} (Linux 6.2) and seccomp "
        f"filters to keep them from your files, found {' and '.join(missing)} on {platform.system()} {platform.release()}, "
        f"{platform.machine()}; run the stage on a machine that has both, set the workload's grade to false, or, where "
        "nothing on this machine can be lost, set benchmark.allow_unsandboxed_code to true"
    )


def build_program(prompt: str, entry_point: str, test: str, answer: str) -> str:
    """Return the program to run: the prompt's text before the function, the function, and HumanEval's tests of it.

    The function is taken from the answer's last code block that defines it, or from the whole answer. An answer without it
    continues the prompt, up to the end of the function's body.
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
    """Run a program in a process of its own, and return whether it ran to its end.

    It has an empty folder, no environment, limits and a timeout. Landlock and seccomp keep it from writing files, changing
    their mode, owner, attributes or times, starting processes, sending signals and opening connections
    (stages/grading/sandbox.py, which also kills what is left). It may read what its user may read; docs/workloads.md has
    the threat model.

    Raises:
        ValueError: if the kernel lacks Landlock or seccomp; the program was then not run. With `allow_unsandboxed_code` it
            runs with limits and what protection the kernel has.
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
            start_new_session=True,  # Ctrl-C reaches only the stage
        )
        try:
            out, err = run.communicate(json.dumps(job).encode(), timeout=TIMEOUT_S + SLACK_S)
        except subprocess.TimeoutExpired:  # the sandbox itself got no time, or could not kill the processes
            return ProgramResult(False, "no time left")
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)  # its child dies with it
                run.wait()
    assert run.returncode == 0, f"the sandbox failed: {err.decode(errors='replace')[-2000:]}"
    found: dict[str, Any] = json.loads(out)
    if found["how"] == "not run":
        raise ValueError(_describe_refusal(found["missing"], "grading runs"))
    return ProgramResult(found["passed"], found["how"], tuple(found["protections"]))


@cache
def _probe_protections() -> tuple[str, ...]:
    """Return what this machine's sandbox prevents, in words."""
    return run_program("", allow_unsandboxed_code=True).protections
