"""Problems of the committed sample and references to grade by, for tests of grading."""

import json
from typing import Any

import pytest

from stages.grading import sandbox
from tests.conftest import ROOT

PROBLEMS = [json.loads(line) for line in (ROOT / "data/prompt_sets/humaneval.jsonl").read_text().splitlines()]
needs_sandbox = pytest.mark.skipif(
    bool(sandbox.list_missing_protections(sandbox.read_landlock_abi(), sandbox.has_seccomp())),
    reason=f"programs are sandboxed by Landlock ABI 3 and seccomp; here is Landlock ABI {sandbox.read_landlock_abi()}, "
    f"seccomp {sandbox.has_seccomp()}",
)


def make_reference(kind: str, answer: str) -> str:
    return json.dumps({"kind": kind, "answer": answer})


def make_humaneval_reference(problem: dict[str, Any]) -> str:
    return json.dumps({"kind": "humaneval", **{k: problem[k] for k in ("prompt", "test", "entry_point")}})
