"""Grades of answers: gsm8k by the number, math500 by the boxed value, humaneval by running the program.

A reference is JSON, written by stages/prompts/prompt_sets.py; its `kind` selects the grader. docs/workloads.md describes how each
grades. Programs written by a target run only where `benchmark.run_generated_code` is true (`check_programs`).
"""

import json
import math
import os
import re
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from fractions import Fraction
from functools import cache

from stages.data import final_answer

TIMEOUT_S = 10.0  # of one program, by the clock and of processor time
MEMORY_BYTES = 1 << 30  # bytes of address space of each process
GRADING_METHODS = {
    "gsm8k": "exact match of the last number",
    "math500": "exact match of the last box, normalised",
    "humaneval": "pass@1",
}
# The end of a completion that is a function's body alone.
BODY_END_PATTERN = re.compile(r"\n(?:class |def |#|if |print\(|@|```)")
CODE_BLOCK_PATTERN = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


def grade_answer(reference: str, answer: str) -> bool:
    """Return whether a text answer is right. Reasoning before the answer, or cut in the middle, is ignored."""
    expected = json.loads(reference)
    final = answer.rpartition("</think>")[2].partition("<think>")[0]
    if expected["kind"] == "humaneval":
        return run_program(build_program(expected["prompt"], expected["entry_point"], expected["test"], final))
    grade_text = {"gsm8k": _grade_number, "math500": _grade_mathematics}[expected["kind"]]
    return grade_text(expected["answer"], final)


def describe_grading(reference: str) -> str:
    """Return how answers are graded by references of that kind."""
    kind = json.loads(reference)["kind"]
    return f"{kind}: {GRADING_METHODS[kind]}"


# Numbers


def _grade_number(expected: str, answer: str) -> bool:
    """Compare the number in the box, after `####`, or the last one of the answer."""
    box = final_answer.find_boxed_answer(answer)
    found = final_answer.find_last_number(answer.rpartition("####")[2] if box is None else box)
    found = final_answer.find_last_number(answer) if found is None else found
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


# What the process of a program runs: the program comes with a secret, which is written after its last line, so that one
# that exits before its tests, with whatever status, has not passed.
RUNNER = """
import os, resource, sys
secret, _, program = sys.stdin.read().partition("\\n")
answer, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
for stream in range(3):
    os.dup2(nothing, stream)
for kind, most in {limits}:
    resource.setrlimit(kind, (most, most))
exec(compile(program, "program", "exec"), {{"__name__": "__main__"}})
os.write(answer, secret.encode())
"""


def check_programs(references: Iterable[str], workload: str, run_generated_code: bool) -> None:
    """Raise ValueError, before anything is decoded, if an answer is graded by running it and that is not allowed."""
    if not run_generated_code and any(json.loads(words)["kind"] == "humaneval" for words in references):
        raise ValueError(
            f"benchmark.workloads.{workload}.grade is true, expected benchmark.run_generated_code: true, found false; set it in "
            "a container with nothing to lose, since programs run without a sandbox (docs/workloads.md), or set grade to false"
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
def run_program(text: str) -> bool:
    """Run a program in a process of its own, and return whether it ran to its end.

    It has an empty folder, an environment of its own, limits and a timeout, and writes no byte to a file. What it starts ends
    with its process group. That is no sandbox: it may do what its user may do.
    """
    limits = [
        (resource.RLIMIT_CPU, math.ceil(TIMEOUT_S)), (resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64),
    ]  # fmt: skip
    secret = secrets.token_hex(16)
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="aerie-grade-") as folder:
        run = subprocess.Popen(
            [sys.executable, "-I", "-c", RUNNER.format(limits=limits)],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only the stage
        )
        try:
            out, _ = run.communicate(f"{secret}\n{text}".encode(errors="replace"), timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    return out.decode(errors="replace") == secret
