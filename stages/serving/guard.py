"""Runs one program in a child that is fenced in, and kills it and all it started.   python -I guard.py, the job on stdin

The job is JSON: program, secret, timeout_s, memory, processes, fenced (stages/serving/grades.py). One line of JSON
comes back: passed, how, fences. It runs apart from the project, so it imports nothing of it.

The child sends the secret once the program has come to its end: one that leaves before its tests, by whatever status, has
not passed.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
import time
from typing import Any

SUBREAPER, DEATHSIG, NO_NEW_PRIVILEGES, SECCOMP = 36, 1, 38, 22  # of prctl(2)
EXECUTE, WRITE, READ_FILE, READ_FOLDER = 1, 1 << 1, 1 << 2, 1 << 3  # of Landlock's rights to files
ROUNDS_S = 5.0  # of killing what forks faster than it is killed
NEVER = 0x00050001  # seccomp: the call fails with EPERM
FINE = 0x7FFF0000
# By machine: seccomp's number of it, and the calls by which a program would make processes (clone, fork, vfork, clone3,
# execve, execveat), signal or look into others (kill, tkill, tgkill, the two sigqueueinfo, pidfd_open,
# pidfd_send_signal, ptrace, process_vm_writev), connect (socket, io_uring_setup), raise its limits (setrlimit,
# prlimit64), or change what Landlock doesn't watch: modes and owners, attributes, mounts, namespaces.
CALLS = {
    "x86_64": (
        0xC000003E,
        (56, 57, 58, 435, 59, 322, 62, 200, 234, 129, 297, 434, 424, 101, 311, 41, 425, 160, 302, 90, 268, 452, 92, 94, 260,
         188, 189, 165, 155, 161, 272, 308),
    ),
    "aarch64": (
        0xC00000B7,
        (220, 435, 221, 281, 129, 130, 131, 138, 240, 434, 424, 117, 271, 198, 425, 164, 261, 53, 452, 54, 5, 6, 40, 41, 51,
         97, 268),
    ),
}  # fmt: skip


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    if sys.platform == "linux":
        _prctl(SUBREAPER, 1)  # what the program leaves behind becomes a child of ours
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        _run(job, writes)
    os.close(writes)
    ended = _wait(child, job["timeout_s"])
    if ended is None:
        os.kill(child, signal.SIGKILL)
    _kill_the_rest(child)
    fences, _, secret = _said(reads).partition(b"\n")
    passed = ended is not None and secret.decode("latin-1") == job["secret"]
    how = "passed" if passed else "no time left" if ended is None else f"status {os.waitstatus_to_exitcode(ended)}"
    print(json.dumps({"passed": passed, "how": how, "fences": json.loads(fences or b"[]")}))


def _wait(child: int, timeout_s: float) -> int | None:
    """Its status; None where it hasn't ended in time."""
    ends = time.monotonic() + timeout_s
    while time.monotonic() < ends:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.002)
    return None


def _kill_the_rest(child: int) -> None:
    """Its group, and round by round whatever has become ours, until nothing is left or no round helps any more."""
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    ends = time.monotonic() + ROUNDS_S
    while time.monotonic() < ends:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)  # ours until we wait for it
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123 - no pathlib: nothing is imported that isn't needed
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def _said(reads: int) -> bytes:
    """What the child sent; nothing is waited for, since a process of its own may hold the other end."""
    os.set_blocking(reads, False)
    try:
        return os.read(reads, 4096)
    except BlockingIOError:
        return b""


def _run(job: dict[str, Any], writes: int) -> None:
    """The child's whole life."""
    status = 1
    try:
        if sys.platform == "linux":
            _prctl(DEATHSIG, signal.SIGKILL)  # the guard's end is its end
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        _limit(job)  # before the fences, behind which no limit is set any more
        os.write(writes, json.dumps(_fences() if job["fenced"] else []).encode() + b"\n")
        sys.argv[:] = ["program"]
        exec(compile(job["program"], "program", "exec"), {"__name__": "__main__"})
        os.write(writes, job["secret"].encode())
        status = 0
    finally:
        os._exit(status)


def _limit(job: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_CPU: int(job["timeout_s"]) + 1, resource.RLIMIT_AS: job["memory"], resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 64,
    }  # fmt: skip
    if not (job["fenced"] and _has_seccomp()):
        limits[resource.RLIMIT_NPROC] = _tasks() + job["processes"]
    for kind, most in limits.items():
        try:
            resource.setrlimit(kind, (most, most))
        except (ValueError, OSError):  # lower already; or a system that knows no such limit
            pass


def _tasks() -> int:
    """How many threads this user has: the limit is on all of them. 0 where there is no /proc."""
    found = 0
    for process in os.listdir("/proc") if sys.platform == "linux" else []:  # noqa: PTH208
        try:
            with open(f"/proc/{process}/status") as file:  # noqa: PTH123
                said = dict(line.split(":", 1) for line in file)
            found += int(said["Threads"]) if int(said["Uid"].split()[0]) == os.getuid() else 0
        except (OSError, ValueError, KeyError):  # no process, or none any more
            pass
    return found


def _fences() -> list[str]:
    """Landlock and seccomp, as far as the system has them; says in words what they keep out. Both need no rights."""
    if sys.platform != "linux" or not _prctl(NO_NEW_PRIVILEGES, 1):
        return []
    found = ["no files written"] if _landlock() else []
    return [*found, "no processes", "no network"] if _seccomp() else found


def _landlock() -> bool:
    """Files are read, and none written but /dev/null."""
    libc = ctypes.CDLL(None)
    create, add, restrict = 444, 445, 446
    version = libc.syscall(create, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    rights = (1 << {1: 13, 2: 14}.get(version, 15)) - 1
    handled = rights & ~(EXECUTE | READ_FILE | READ_FOLDER)
    ruleset = struct.pack("=Q", handled)
    fd = libc.syscall(create, ruleset, ctypes.c_size_t(len(ruleset)), 0)
    if fd < 0:
        return False
    null = struct.pack("=Qi", WRITE, os.open(os.devnull, os.O_PATH))
    return not libc.syscall(add, fd, 1, null, 0) and not libc.syscall(restrict, fd, 0)


def _has_seccomp() -> bool:
    return os.uname().machine in CALLS and os.path.exists("/proc/sys/kernel/seccomp/actions_avail")  # noqa: PTH110


def _seccomp() -> bool:
    """CALLS fail."""
    if not _has_seccomp():
        return False
    architecture, calls = CALLS[os.uname().machine]
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, NEVER), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, 0x40000000), (give, 0, 0, NEVER)]  # the numbers of x32
    for call in calls:
        code += [(equal, 0, 1, call), (give, 0, 0, NEVER)]
    code += [(give, 0, 0, FINE)]
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(instructions)))
    return _prctl(SECCOMP, 2, ctypes.addressof(program))


def _prctl(option: int, *arguments: int) -> bool:
    given = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0)[:4]]
    return ctypes.CDLL(None).prctl(ctypes.c_int(option), *given) == 0


if __name__ == "__main__":
    main()
