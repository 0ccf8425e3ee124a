"""Raw files that stop fix_data: every error says where, what was expected and what to do."""

import os
from pathlib import Path
from typing import Any

import pytest

from stages import fix_data
from stages.data import readers
from tests.fix_data.raw_rows import RAW, questions, set_params, write_raw


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"id": "a", "conversations": [', '\'{"id": "a", "conversations": [\''),
        ('{"conversations": "hello"}', '\'{"conversations": "hello"}\''),
    ],
)
def test_a_line_that_is_no_conversation_stops_the_stage(home: Path, line: str, found: str) -> None:
    set_params(format="sharegpt")
    write_raw([*questions(4), line, *questions(2)])
    with pytest.raises(ValueError, match="line 5: expected") as error:
        fix_data.main()
    assert str(RAW) in str(error.value) and f"found {found}" in str(error.value) and "fix" in str(error.value)
    assert not fix_data.TRAIN_FILE.exists() and not fix_data.REPORT.exists()


def test_a_process_that_is_killed_is_one_message(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a process killed by the kernel for memory ended in a traceback."""

    class Pool(fix_data.ProcessPoolExecutor):
        def submit(self, *arguments: Any, **more: Any) -> Any:
            return super().submit(os._exit, 9)

    monkeypatch.setattr(fix_data, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(fix_data.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(readers, "CHUNK_BYTES", 2_000)
    write_raw(questions(40))
    with pytest.raises(ValueError, match=r"one of 2 processes was killed, expected .* fewer cores"):
        fix_data.main()
    assert not fix_data.WAITING_FOLDER.exists()
