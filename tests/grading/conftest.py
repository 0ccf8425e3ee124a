"""A short limit for every program that tests run."""

import pytest

from stages.grading import grade


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grade, "TIMEOUT_S", 3.0)
