"""Resources of this machine that stages lease: slots, GPUs, or the whole machine; shared by all runs of a user on it.

Each is a file locked by the kernel (flock), so it is free when its holder ends, killed or not. DVC inherits the open files
of its stage: a stage that a killed flow leaves behind keeps its GPU until it has ended too.
"""

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from stages.params.schedule import StageResources
from stages.runtime.machine import list_named_gpus, open_lock_file, open_user_folder
from stages.telemetry import gpu_energy


@dataclass
class ResourceLease:
    """Locks held until `release`. `gpus` are the ids a stage may use, None on a machine without GPUs."""

    files: list[TextIO] = field(default_factory=list)
    gpus: list[str] | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}

    def release(self) -> None:
        for file in self.files:
            file.close()


class ResourcePool:
    """The slots and GPUs of this machine. A run that waits for all of it holds the gate, so that no other run starves it."""

    def __init__(self, slots: int, gpus: list[str], folder: Path | None = None) -> None:
        self.slots, self.gpus = slots, gpus
        self._folder = folder or open_user_folder()
        self._gate: TextIO | None = None

    def check_request(self, stage: str, needs: StageResources) -> None:
        """Check a request. Raises ValueError if the stage would wait for ever."""
        if self.gpus and needs.gpus != "all" and needs.gpus > len(self.gpus):
            raise ValueError(
                f"params.yaml: schedule.stages.{stage.partition('@')[0]}.gpus is {needs.gpus}, expected at most the "
                f"{len(self.gpus)} of this machine ({', '.join(self.gpus)}); lower it, or write all"
            )

    def try_lease(self, needs: StageResources) -> ResourceLease | None:
        """Return a lease of everything needed, or None at once if it is not free."""
        self._gate = self._gate or self._try_lock("gate")
        if self._gate is None:
            return None  # another run waits for the whole machine
        lease = self._lock_all(needs)
        if lease or not needs.exclusive:
            self.release_gate()
        return lease

    def release_gate(self) -> None:
        """Release the gate."""
        if self._gate:
            self._gate.close()
            self._gate = None

    def _lock_all(self, needs: StageResources) -> ResourceLease | None:
        lease = ResourceLease(gpus=[] if self.gpus else None)
        kind = fcntl.LOCK_EX if needs.exclusive else fcntl.LOCK_SH
        slots = (f"slot-{number}" for number in range(self.slots))
        locks = [lambda: self._try_lock("machine", kind), lambda: next(filter(None, map(self._try_lock, slots)), None)]
        if needs.gpus and not self.gpus:  # such a stage uses all cores; two at once would slow each other down
            locks.append(lambda: self._try_lock("cores"))
        for lock in locks:
            if (file := lock()) is None:
                lease.release()
                return None
            lease.files.append(file)
        wanted = len(self.gpus) if needs.gpus == "all" else min(needs.gpus, len(self.gpus))
        for gpu in self.gpus:
            if len(lease.gpus or []) < wanted and (file := self._try_lock(f"gpu-{gpu.replace('/', '_')}")):
                lease.files.append(file)
                assert lease.gpus is not None
                lease.gpus.append(gpu)
        if len(lease.gpus or []) == wanted:
            return lease
        lease.release()
        return None

    def _try_lock(self, name: str, kind: int = fcntl.LOCK_EX) -> TextIO | None:
        self._folder.mkdir(parents=True, exist_ok=True)
        return _lock_at_once(open_lock_file(self._folder, f"{name}.lock"), kind)


def try_lock(path: Path, kind: int = fcntl.LOCK_EX) -> TextIO | None:
    """Return the file open and locked, or None if another process holds it. Closing it frees it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return _lock_at_once(path.open("a"), kind)


def _lock_at_once(file: TextIO, kind: int) -> TextIO | None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def find_lock_holder(path: Path) -> str | None:
    """Return who holds the lock of `path`, as words; None where it is free. Creates no file."""
    try:
        file = path.open()
    except OSError:  # the file is missing, or this user may not read it
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _name_lock_holder(os.fstat(file.fileno()).st_ino)
    return None


def _name_lock_holder(inode: int) -> str:
    """Return the process that has locked the file of an inode, by Linux's list; without its id where that is not known."""
    with suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            words = line.split()  # 1: FLOCK ADVISORY WRITE 4711 08:01:131 0 EOF; of a waiting process with ->
            if words[1:2] == ["FLOCK"] and words[5].rpartition(":")[2] == str(inode) and int(words[4]) > 0:
                return f"process {words[4]}"
    return "another process"


@dataclass(frozen=True)
class Gpu:
    name: str
    total_bytes: int


def list_gpu_memory() -> list[Gpu]:
    """Return the visible GPUs with their memory; [] without NVIDIA's driver."""
    nvml = gpu_energy.pynvml
    cards = gpu_energy.list_visible_cards()
    return [Gpu(nvml.nvmlDeviceGetName(card), nvml.nvmlDeviceGetMemoryInfo(card).total) for card in cards]


def list_gpus() -> list[str]:
    """Return the GPU ids of CUDA_VISIBLE_DEVICES, or all that there are; [] without NVIDIA's driver."""
    named = list_named_gpus()
    return [str(index) for index in range(len(gpu_energy.list_visible_cards()))] if named is None else named
