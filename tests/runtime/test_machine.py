"""The folder of locks: nobody else's, whatever stands in a shared temporary folder."""

import os
from pathlib import Path

import pytest

from stages.runtime import machine


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    return tmp_path / "home"


def test_a_folder_that_another_user_made_is_not_used(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: /tmp/aerie-UID was taken as it stood: its owner could hold every lock, or link them to files of the user's."""
    shared = tmp_path / "shared"
    shared.mkdir()
    own = machine.open_user_folder(shared)
    assert own == shared / f"aerie-{os.getuid()}" and own.stat().st_mode & 0o777 == 0o700
    own.chmod(0o777)  # as an older version or another umask made it
    assert machine.open_user_folder(shared).stat().st_mode & 0o777 == 0o700
    own.rename(shared / "aside")
    own.symlink_to(shared / "aside")
    in_home = machine.open_user_folder(shared)
    assert in_home.is_relative_to(home) and in_home == machine.open_user_folder(shared)
    own.unlink()
    (shared / "aside").rename(own)
    uid = os.getuid()
    monkeypatch.setattr(machine.os, "getuid", lambda: uid if not own.exists() else uid + 1)
    with pytest.raises(ValueError, match="belongs to another user or is no folder"):
        machine.open_user_folder(shared)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_that_is_no_plain_file_is_refused(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "precious"
    target.write_text("mine")
    if kind == "link":
        (tmp_path / "gate.lock").symlink_to(target)
    else:
        os.mkfifo(tmp_path / "gate.lock")
    with pytest.raises(ValueError, match=r"gate\.lock"):
        machine.open_lock_file(tmp_path, "gate.lock")
    assert target.read_text() == "mine"


@pytest.mark.parametrize(
    ("named", "gpus"), [(None, None), ("", []), ("1, 0", ["1", "0"]), ("GPU-8851a533,", ["GPU-8851a533"])]
)
def test_gpus_are_named_by_index_or_uuid(
    named: str | None, gpus: list[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert machine.list_named_gpus() == gpus
