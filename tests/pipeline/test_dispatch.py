"""A run waits for a worker whose heartbeat is late, and for no other."""

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import Worker, WorkerStatus

from pipeline.remote import dispatch


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "POLL_RUNS_S", 0.001)
    monkeypatch.setattr(dispatch, "HEARTBEAT_WAIT_S", 0.05)


def make_worker(status: WorkerStatus, silent_s: float | None) -> Worker:
    heard = None if silent_s is None else datetime.now(UTC) - timedelta(seconds=silent_s)
    return Worker(name="one", work_pool_id=uuid4(), last_heartbeat_time=heard, status=status)


def test_a_worker_whose_heartbeat_is_late_is_waited_for() -> None:
    """Bug: on a busy host a heartbeat came late, and the run failed at once for want of a worker."""
    answers = [[make_worker(WorkerStatus.OFFLINE, 100)]] * 3 + [[make_worker(WorkerStatus.ONLINE, 0)]]
    lines: list[str] = []
    assert dispatch.wait_for_worker(lambda: answers.pop(0), lines.append)
    assert len(lines) == 1 and "for a heartbeat of one" in lines[0]


@pytest.mark.parametrize("silent_s", [100, 700, None])
def test_without_a_heartbeat_the_wait_ends(silent_s: float | None) -> None:
    lines: list[str] = []
    assert not dispatch.wait_for_worker(lambda: [make_worker(WorkerStatus.OFFLINE, silent_s)], lines.append)
    assert bool(lines) is (silent_s == 100), "only a worker that was online shortly before is waited for"
