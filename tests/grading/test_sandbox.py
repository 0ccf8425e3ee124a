"""Programs that hang, fork, eat memory, and reach for what is not theirs; kernels that lack what keeps them from it."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from stages.grading import grade, sandbox
from tests.conftest import ROOT
from tests.grading.programs import PROBLEMS, make_humaneval_reference, make_reference, needs_sandbox

WAYS_OUT = {
    "leaves before its tests": "import sys\nsys.exit(0)",
    "leaves for good": "import os\nos._exit(0)",
    "fails": "assert False",
    "is no Python": "def f(:",
    "recurses without end": "def f():\n    f()\nf()",
    "crashes": "import ctypes\nctypes.string_at(0)",
    "eats memory at once": "x = bytearray(3 << 30)",
    "eats memory bit by bit": "x = []\nwhile True:\n    x.append(bytes(1 << 22))",
}


@needs_sandbox
@pytest.mark.parametrize("text", WAYS_OUT.values(), ids=WAYS_OUT)
def test_a_program_that_does_not_come_to_its_end_has_not_passed(text: str) -> None:
    found = grade.run_program(text)
    assert not found.passed and found.how.startswith("status ")


def test_by_limits_alone_a_program_that_does_not_come_to_its_end_has_not_passed() -> None:
    for found in run_on_kernel_without("landlock", "seccomp", programs=list(WAYS_OUT.values())):
        assert not found["passed"] and found["how"].startswith("status ")


@needs_sandbox
@pytest.mark.parametrize(
    "text", ["while True:\n    pass", "import time\ntime.sleep(999)", "while True:\n    print('x' * 999)"]
)
def test_one_that_hangs_is_ended(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grade, "TIMEOUT_S", 1.0)  # two of them work all that time
    assert grade.run_program(text).how == "no time left"


# What a program must not do: the name of the fault -> statements that do it by a real system call, of `mine`, a file
# outside the program's folder; `call` is syscall(2), which raises OSError as os.* does. Where nothing refuses them, they
# must do no harm to the machine that runs the tests.
CALLING = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
mine = {mine!r}
path = mine.encode()
def call(number, *arguments):
    if libc.syscall(number, *arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def opened():
    return os.open(mine, os.O_RDONLY)
"""
NEW_TIMES = "(ctypes.c_long * 4)(1, 0, 1, 0)"  # 1970
REACHES = {
    "writes a file": "open('a', 'w')",
    "writes over a file": "open(mine, 'w')",
    "removes a file": "os.unlink(mine)",
    "renames a file": "os.rename(mine, mine + '2')",
    "links a file": "os.link(mine, mine + '2')",
    "links to a file": "os.symlink(mine, mine + '2')",
    "makes a folder": "os.mkdir(mine + '2')",
    "empties a file (truncate)": "os.truncate(mine, 0)",
    "empties a file (ftruncate)": "os.ftruncate(opened(), 0)",
    "empties a file (O_RDONLY | O_TRUNC)": "os.open(mine, os.O_RDONLY | os.O_TRUNC)",
    "empties a file (no access mode | O_TRUNC)": "os.open(mine, 3 | os.O_TRUNC)",
    "empties a file (openat2)": "call(437, -100, path, (ctypes.c_uint64 * 3)(os.O_TRUNC, 0, 0), ctypes.c_size_t(24))",
    "changes a mode (chmod)": "os.chmod(mine, 0o777)",
    "changes a mode (fchmod)": "os.fchmod(opened(), 0o777)",
    "changes a mode (fchmodat2)": "call(452, -100, path, 0o777, 0)",
    "changes an owner (chown)": "os.chown(mine, os.getuid(), os.getgid())",
    "changes an owner (fchown)": "os.fchown(opened(), os.getuid(), os.getgid())",
    "changes an owner (lchown)": "os.lchown(mine, os.getuid(), os.getgid())",
    "sets an attribute (setxattr)": "os.setxattr(mine, 'user.a', b'1')",
    "sets an attribute (fsetxattr)": "os.setxattr(opened(), 'user.a', b'1')",
    "sets an attribute (lsetxattr)": "os.setxattr(mine, 'user.a', b'1', follow_symlinks=False)",
    "sets an attribute (setxattrat)": "call(463, -100, path, 0, b'user.a', (ctypes.c_uint64 * 2)(), ctypes.c_size_t(16))",
    "removes an attribute (removexattr)": "os.removexattr(mine, 'user.kept')",
    "removes an attribute (fremovexattr)": "os.removexattr(opened(), 'user.kept')",
    "removes an attribute (removexattrat)": "call(466, -100, path, 0, b'user.kept')",
    "sets a file's flags (file_setattr)": "call(469, -100, path, (ctypes.c_uint64 * 3)(0x80), ctypes.c_size_t(24), 0)",
    "sets a file's flags (ioctl)": "import fcntl\nfcntl.ioctl(opened(), 0x40086602, (ctypes.c_int * 1)(0x80))",
    "changes times (utimensat)": "os.utime(mine, (1, 1))",
    "changes times (of a descriptor)": "os.utime(opened(), (1, 1))",
    "changes times (utimensat itself)": f"call({{utimensat}}, -100, path, {NEW_TIMES}, 0)",
    "locks a file (flock)": "import fcntl\nfcntl.flock(opened(), fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "locks a file (fcntl)": "import fcntl\nfcntl.lockf(opened(), fcntl.LOCK_SH | fcntl.LOCK_NB)",
    "takes a lease of a file": "import fcntl\nfcntl.fcntl(opened(), fcntl.F_SETLEASE, fcntl.F_RDLCK)",
    "has signals sent": "import fcntl\nfcntl.fcntl(opened(), fcntl.F_SETOWN, {pid})",
    "opens by handle": "call({handle}, -100, path, (ctypes.c_uint32 * 64)(128), ctypes.byref(ctypes.c_int()), 0)",
    "mounts": "call({mount}, b'none', b'/no such folder', b'tmpfs', 0, None)",
    "forks": "os.fork()",
    "runs a command": "import subprocess\nsubprocess.run(['true'])",
    "starts a thread": "import threading\nthreading.Thread(target=print).start()",
    "kills": "os.kill({pid}, 0)",
    "kills by a descriptor": "os.pidfd_open({pid})",
    "looks into a process": "call({ptrace}, 16, 0, None, None)",
    "writes into a process": "call({vm_writev}, {pid}, None, 0, None, 0, 0)",
    "connects": "import socket\nsocket.create_connection(('127.0.0.1', 9))",
    "connects past seccomp": "call(425, 1, (ctypes.c_uint8 * 120)())",
    "loads a BPF program": "call({bpf}, 0, None, 0)",
    "shares memory": "call({shmget}, 0, 4096, 0o1600)",
}
NUMBERS = {
    "x86_64": {
        "utimensat": 280,
        "handle": 303,
        "mount": 165,
        "ptrace": 101,
        "vm_writev": 311,
        "bpf": 321,
        "shmget": 29,
    },
    "aarch64": {
        "utimensat": 88,
        "handle": 264,
        "mount": 40,
        "ptrace": 117,
        "vm_writev": 271,
        "bpf": 280,
        "shmget": 194,
    },
}
LEGACY = {  # calls that only x86_64 has, by number: libc's functions of these names make newer ones
    "empties a file (creat)": "call(85, path, 0o600)",
    "empties a file (open)": "call(2, path, os.O_TRUNC)",
    "changes a mode (chmod itself)": "call(90, path, 0o777)",
    "changes times (utime)": "call(132, path, (ctypes.c_long * 2)(1, 1))",
    "changes times (utimes)": f"call(235, path, {NEW_TIMES})",
    "changes times (futimesat)": f"call(261, -100, path, {NEW_TIMES})",
    "calls by the numbers of x32": "call(0x40000000 + 90, path, 0o777)",
}


@pytest.fixture
def outside_file(tmp_path: Path) -> Iterator[Path]:
    """A file outside the program's folder, of which nothing must change: contents, names, mode, owner, times, attributes."""
    path = tmp_path / "mine"
    path.write_text("untouched")
    try:
        os.setxattr(path, "user.kept", b"1")
    except OSError:  # a file system without attributes
        pass

    def seen() -> tuple[Any, ...]:
        found = path.stat()
        attributes = sorted(os.listxattr(path))
        return (
            found.st_mode,
            found.st_uid,
            found.st_gid,
            found.st_mtime_ns,
            found.st_ctime_ns,
            found.st_nlink,
            attributes,
        )

    before = seen()
    yield path
    assert path.read_text() == "untouched" and seen() == before
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


def build_attack(statements: str, mine: Path) -> str:
    """A program that passes where `statements` are refused, and fails where they are carried out."""
    whole = statements.format(pid=os.getpid(), **NUMBERS.get(platform.machine(), {})).replace("\n", "\n    ")
    caught = "except (PermissionError, RuntimeError):\n    pass\nexcept OSError as error:\n    assert error.errno == 38"
    return f"{CALLING.format(mine=str(mine))}\ntry:\n    {whole}\n{caught}\nelse:\n    1 / 0"


@needs_sandbox
@pytest.mark.parametrize("text", REACHES.values(), ids=REACHES)
def test_what_a_program_must_not_do_fails(text: str, outside_file: Path) -> None:
    """fchmod, fchown, fsetxattr and utimensat of others' files passed, and what openat2, ioctl and fcntl do to them."""
    found = grade.run_program(build_attack(text, outside_file))
    assert found.passed, f"it was not refused, {found.how}"


@needs_sandbox
@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86_64 has these system calls")
@pytest.mark.parametrize("text", LEGACY.values(), ids=LEGACY)
def test_what_a_program_must_not_do_fails_by_old_calls_too(text: str, outside_file: Path) -> None:
    found = grade.run_program(build_attack(text, outside_file))
    assert found.passed, f"it was not refused, {found.how}"


@pytest.mark.parametrize("name", ["changes a mode (fchmod)", "changes times (utimensat)", "forks", "kills"])
def test_it_is_the_sandbox_that_keeps_it_from_that(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    [found] = run_on_kernel_without("landlock", "seccomp", programs=[build_attack(REACHES[name], tmp_path / "mine")])
    assert found["how"] == "status 1", "a test of the sandbox that passes without one tests nothing"


# A kernel without a protection, simulated by one that answers its system call with ENOSYS.
BLOCKED = {
    "landlock": (sandbox.LANDLOCK_CREATE, sandbox.LANDLOCK_CREATE),
    "seccomp": sandbox.SECCOMP_CALL,
}
ON_SUCH_A_KERNEL = """
import dataclasses, json, sys
from stages.grading import grade, sandbox
blocked, programs, allow = json.loads(sys.argv[1])
code = [(sandbox.LOAD, 0, 0, 0)]
for numbers in blocked:
    code += sandbox._match_call(numbers, [(sandbox.RETURN, 0, 0, sandbox.NO_SUCH_CALL)])
assert sandbox._call_prctl(sandbox.NO_NEW_PRIVILEGES, 1) and sandbox.load_filter([*code, (sandbox.RETURN, 0, 0, sandbox.ALLOW)])
grade.TIMEOUT_S = 3.0
for program in programs:
    try:
        print(json.dumps(dataclasses.asdict(grade.run_program(program, allow))))
    except ValueError as error:
        print(json.dumps({"refused": str(error)}))
"""


def run_on_kernel_without(*protections: str, programs: list[str], allow: bool = True) -> list[dict[str, Any]]:
    """What `run_program` says of each of `programs` on a kernel without `protections`."""
    if not sandbox.has_seccomp():
        pytest.skip("this kernel takes no seccomp filters, by which one without a protection is simulated")
    arguments = json.dumps([[BLOCKED[name] for name in protections], programs, allow])
    done = subprocess.run([sys.executable, "-c", ON_SUCH_A_KERNEL, arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("protections", "found"),
    [
        (("landlock",), "found no Landlock on"),
        (("seccomp",), "found no seccomp filters on"),
        (("landlock", "seccomp"), "found no Landlock and no seccomp filters on"),
    ],
    ids=["Landlock", "seccomp", "both"],
)
def test_no_program_runs_on_a_kernel_that_lacks_a_protection(
    protections: tuple[str, ...], found: str, tmp_path: Path
) -> None:
    """Programs ran by limits alone, removed what they liked, and `quality.how` told of it afterwards."""
    mine = tmp_path / "mine"
    mine.touch()
    removes = f"import os\nos.unlink({str(mine)!r})"
    [line] = run_on_kernel_without(*protections, programs=[removes], allow=False)
    assert found in line["refused"] and "expected Landlock ABI 3" in line["refused"]
    assert "set benchmark.allow_unsandboxed_code to true" in line["refused"]
    assert mine.exists()


def test_what_is_not_kept_out_is_not_said_to_be(tmp_path: Path) -> None:
    every = {("landlock",): ["no processes", "no network"], ("seccomp",): [], ("landlock", "seccomp"): []}
    for protections, kept_out in every.items():
        [found] = run_on_kernel_without(*protections, programs=["pass"])
        assert found["passed"] and found["protections"] == kept_out


@needs_sandbox
def test_a_whole_sandbox_says_what_it_keeps_out() -> None:
    assert grade.run_program("pass").protections == ("no files written", "no processes", "no network")


@pytest.mark.parametrize(
    ("abi", "seccomp", "missing"),
    [
        (0, True, "no Landlock"),
        (2, True, "Landlock ABI 2"),
        (3, False, "no seccomp filters"),
        (2, False, "Landlock ABI 2 and no seccomp filters"),
    ],
)
def test_grading_programs_is_refused_before_anything_is_decoded(
    monkeypatch: pytest.MonkeyPatch, abi: int, seccomp: bool, missing: str
) -> None:
    monkeypatch.setattr(sandbox, "read_landlock_abi", lambda: abi)
    monkeypatch.setattr(sandbox, "has_seccomp", lambda: seccomp)
    tasks = [make_humaneval_reference(PROBLEMS[0])]
    with pytest.raises(ValueError, match=rf"benchmark.workloads.he.grade is true, .* found {missing} on "):
        grade.check_sandbox(tasks, "he", False)
    grade.check_sandbox(tasks, "he", True)
    grade.check_sandbox([make_reference("gsm8k", "1")], "he", False)  # runs nothing


@pytest.mark.parametrize("abi", [3, 4, 5, 7, 99])
def test_a_kernel_with_both_is_not_refused(monkeypatch: pytest.MonkeyPatch, abi: int) -> None:
    monkeypatch.setattr(sandbox, "read_landlock_abi", lambda: abi)
    monkeypatch.setattr(sandbox, "has_seccomp", lambda: True)
    grade.check_sandbox([make_humaneval_reference(PROBLEMS[0])], "he", False)


@needs_sandbox
def test_it_sees_no_environment_and_an_empty_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert grade.run_program("import os\nassert 'HF_TOKEN' not in os.environ and not os.listdir()").passed


def test_children_that_left_its_group_are_killed_with_it() -> None:
    """Where nothing forbids them: each forks twice and has a session of its own, so no signal to a group finds it."""
    text = (
        "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        "            time.sleep(987.25)\n        os._exit(0)\nwhile True:\n    pass"
    )
    before = find_sandbox_processes()
    [found] = run_on_kernel_without("seccomp", programs=[text])
    assert found["how"] == "no time left"
    assert find_sandbox_processes() <= before


def find_sandbox_processes() -> set[int]:
    """Processes of the sandbox: what a program forks has its command line."""
    found = set()
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and grade.sandbox.__file__ in (process.info["cmdline"] or []):
            found.add(process.pid)
    return found
