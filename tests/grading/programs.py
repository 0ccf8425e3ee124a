"""Problems of the committed sample and references to grade by, for tests of grading."""

import json
from typing import Any

from tests.conftest import ROOT

PROBLEMS = [json.loads(line) for line in (ROOT / "data/prompt_sets/humaneval.jsonl").read_text().splitlines()]


def make_reference(kind: str, answer: str) -> str:
    return json.dumps({"kind": kind, "answer": answer})


def make_humaneval_reference(problem: dict[str, Any]) -> str:
    return json.dumps({"kind": "humaneval", **{k: problem[k] for k in ("prompt", "test", "entry_point")}})
