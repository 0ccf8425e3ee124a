"""Bars that stages draw in a terminal become bars in the pages."""

import io
from typing import Any

import pytest
from tqdm import tqdm

from pipeline import progress


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return the recorded calls of Prefect's functions."""
    calls: list[tuple[Any, ...]] = []

    def create(percent: float, key: str, description: str) -> str:
        calls.append(("create", percent, key, description))
        return "id"

    monkeypatch.setattr(progress, "create_progress_artifact", create)
    monkeypatch.setattr(
        progress, "update_progress_artifact", lambda id, percent, description: calls.append((id, percent))
    )
    return calls


def bar() -> list[str]:
    """Return tqdm's own output, split into lines as the reader of a pipe gets them."""
    drawn = io.StringIO()
    for _ in tqdm(range(4), file=drawn, desc="replay", unit="row", mininterval=0):
        pass
    return [line for line in drawn.getvalue().replace("\r", "\n").splitlines() if line]


def test_a_bar_is_one_artifact_and_no_line_of_the_log(calls, monkeypatch) -> None:
    monkeypatch.setattr(progress, "PROGRESS_INTERVAL_S", 0)
    log: list[str] = []
    lines = bar()
    show = progress.ProgressLog("replay_trees@e003", log.append)
    for line in ["reading 3/4 of it", *lines, "done"]:
        show(line)
    assert sorted({call[1] for call in calls}) == [0, 25, 50, 75, 100]
    assert calls[0][:3] == ("create", 0, "progress-replay-trees-e003") and "0/4 [00:00<?, ?row/s]" in calls[0][3]
    assert log == ["reading 3/4 of it", "done"]
