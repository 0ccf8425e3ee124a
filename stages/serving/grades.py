"""Whether an answer is right: gsm8k by its number, math500 by what is in its box, humaneval by running what it wrote.

A reference is JSON, as stages/formats/prompt_sets.py writes it; its `kind` says which of the three. docs/workloads.md
tells how each is graded. What a target wrote runs in a sandbox (`passes`), and only where a workload's `grade` is true.
"""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

from stages.formats import answers
from stages.serving import guard

TIMEOUT_S = 10.0  # of one program, by the clock and of processor time
SLACK_S = 20.0  # for the guard to start, and to kill what is left
MEMORY = 1 << 30  # bytes of address space of each process
PROCESSES = 64  # beyond those its user has, where seccomp doesn't forbid them altogether; root has no such limit
HOW = {
    "gsm8k": "exact match of the last number",
    "math500": "exact match of the last box, normalised",
    "humaneval": "pass@1",
}
STOPS = re.compile(r"\n(?:class |def |#|if |print\(|@|```)")  # where a bare completion of a function's body has ended
FENCED = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)


def grade(reference: str, answer: str) -> bool:
    """Whether `answer`, a text, is right; what a target thought before it, or was thinking when it was cut, doesn't count."""
    right = json.loads(reference)
    graders: dict[str, Callable[[dict[str, Any], str], bool]] = {
        "gsm8k": _same_number, "math500": _same_mathematics, "humaneval": _passes,
    }  # fmt: skip
    return graders[right["kind"]](right, answer.rpartition("</think>")[2].partition("<think>")[0])


def quality(references: list[str], marks: list[bool]) -> dict[str, Any]:
    """Of all graded answers, one or more: how many, how many are right, their share, and how they were graded."""
    kind = json.loads(references[0])["kind"]
    how = f"{kind}: {HOW[kind]}"
    if kind == "humaneval":
        fences = _fences()
        how += f"; run with {', '.join(fences)}" if fences else "; run with no fence but limits"
    return {"graded": len(marks), "correct": sum(marks), "accuracy": sum(marks) / len(marks), "how": how}


# Numbers


def _same_number(right: dict[str, Any], answer: str) -> bool:
    """In a box, after `####`, or wherever the last one stands."""
    box = answers.boxed(answer)
    final = answer.rpartition("####")[2] if box is None else box
    found = answers.last_number(final)
    if found is None:
        found = answers.last_number(answer)
    return found is not None and found == answers.last_number(right["answer"])


# Mathematics

# What is written, not what is meant: each is taken out, in this order.
UNWRITTEN = re.compile(
    r"\\left(?![a-z])|\\right(?![a-z])|(?<!\\)\\[,!;:> ]|\\(?:quad|qquad|displaystyle)(?![a-z])|\^\{?\\(?:circ|degree)\}?"
    r"|\\degree|°|\\?\$|\\?%|~"
)
WORDS = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|operatorname)\s*\{([^{}]*)\}")
UNIT = re.compile(r"(?<=[\d})])\s*(?:\\(?:text|mbox)\s*\{|\\mathrm\s*\{[~ ])[^{}]*\}(?:\^\{?\d\}?)?$")  # 12\text{ cm}^2
FRACTION = re.compile(r"(-?)\\frac\{(-?[\d.]+)\}\{(-?[\d.]+)\}|(-?[\d.]+)/([\d.]+)")
PLAIN = re.compile(r"-?[\d.]+")


def _same_mathematics(right: dict[str, Any], answer: str) -> bool:
    """Without a box it is wrong: the box is what was asked for."""
    box = answers.boxed(answer)
    if box is None:
        return False
    one, other = normalised(box), normalised(right["answer"])
    return one == other or (_value(one) is not None and _value(one) == _value(other))


def normalised(text: str) -> str:
    """LaTeX of one value in one way of writing: \\dfrac12 and \\frac{1}{2}, 1,000 and 1000, x=5 and 5, (A) and A."""
    plain = re.sub(r"\\[dtc]frac", r"\\frac", text.strip().rstrip("."))
    plain = re.sub(r"\{,\}|,\\!\s*", ",", plain)  # of thousands
    plain = UNIT.sub("", plain)
    plain = WORDS.sub(r"\1", UNWRITTEN.sub("", plain))
    plain = re.sub(r"\\frac\s*([\da-z])\s*([\da-z])", r"\\frac{\1}{\2}", plain)
    plain = re.sub(r"\\frac\s*([\da-z])\s*\{", r"\\frac{\1}{", plain)
    plain = re.sub(r"(\\frac\{[^{}]*\})\s*([\da-z])", r"\1{\2}", plain)
    plain = re.sub(r"\\sqrt\s*([\da-z])", r"\\sqrt{\1}", plain)
    if not re.search(r"[(\[{]", plain):  # where a comma may separate two
        plain = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", plain)
    plain = re.sub(r"^[a-zA-Z](?:\([a-z]\))?\s*=\s*", "", re.sub(r"\s+", " ", plain).strip())
    plain = re.sub(r"^\(([A-Za-z])\)$", r"\1", plain)
    return plain.replace(" ", "").replace("\\ne", "\\neq").replace("\\neqq", "\\neq")


def _value(text: str) -> Fraction | None:
    """Of what is a number or a fraction of two, of no more digits than Python reads."""
    try:
        if match := FRACTION.fullmatch(text):
            sign, over, under, above, below = match.groups()
            return (-1 if sign else 1) * Fraction(over or above) / Fraction(under or below)
        return Fraction(text) if PLAIN.fullmatch(text) else None
    except (ValueError, ZeroDivisionError):
        return None


# Programs


def _passes(right: dict[str, Any], answer: str) -> bool:
    return passes(program(right["prompt"], right["entry_point"], right["test"], answer))["passed"]


def program(prompt: str, entry_point: str, test: str, answer: str) -> str:
    """What is run: the function with what the prompt has before it, and HumanEval's tests of it.

    The function is in the answer's last block of code that defines it, or in the whole answer; an answer without it goes
    on where the prompt ended, up to where its body ends.
    """
    defines = re.compile(rf"^[ \t]*(?:async +)?def +{re.escape(entry_point)}\b", re.MULTILINE)
    blocks = FENCED.findall(answer)
    whole = [code for code in [answer, *blocks] if defines.search(code)] if blocks else [answer]
    if defines.search(whole[-1] if whole else ""):
        begins = defines.search(prompt)
        written = (prompt[: begins.start()] if begins else "") + "\n" + whole[-1]
    else:
        body = blocks[-1] if blocks else answer
        written = prompt + STOPS.split(body, maxsplit=1)[0]
    return f"{written}\n\n{test}\n\ncheck({entry_point})\n"


@cache
def passes(text: str, fenced: bool = True) -> dict[str, Any]:
    """Whether a program comes to its end in a process of its own, and how it ended.

    An empty folder, no environment, limits, and a clock; on Linux no file is written and no process, signal or connection
    made (`fenced`: Landlock, seccomp). stages/serving/guard.py sees to all that, and kills whatever is left. It is a fence
    against accidents: whoever expects an enemy takes a virtual machine.
    """
    secret = secrets.token_hex(16)
    job = {
        "program": text, "secret": secret, "timeout_s": TIMEOUT_S, "memory": MEMORY, "processes": PROCESSES,
        "fenced": fenced,
    }  # fmt: skip
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="aerie-grade-") as folder:
        run = subprocess.Popen(
            [sys.executable, "-I", guard.__file__],
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
            return {"passed": False, "how": "no time left", "fences": []}
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)  # and with it goes its child
                run.wait()
    assert run.returncode == 0, f"the sandbox failed: {err.decode(errors='replace')[-2000:]}"
    found: dict[str, Any] = json.loads(out)
    return found


@cache
def _fences() -> list[str]:
    """What keeps programs in on this machine, in words."""
    found: list[str] = passes("")["fences"]
    return found
