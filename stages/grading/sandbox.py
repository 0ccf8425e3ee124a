"""Run one program in a sandboxed child process, then kill the child and every process it started.

    python -I sandbox.py        # the job on standard input

The job is JSON: program, secret, timeout_s, memory, processes, allow_unsandboxed (stages/grading/grade.py). The output is one
line of JSON: passed, how, protections, missing. This file imports nothing of the project, since it runs alone.

The child sends the secret after the program's last line, so a program that exits before its tests, with whatever status, has
not passed. Without `allow_unsandboxed` the program runs only if Landlock and seccomp both took effect.
"""

import ctypes
import json
import os
import re
import resource
import signal
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any

Numbers = tuple[int | None, int | None]  # of a system call: on x86_64, on aarch64; None where it has no such call
Instruction = tuple[int, int, int, int]  # BPF: code, jump if true, jump if false, operand

SUBREAPER, DEATHSIG, NO_NEW_PRIVILEGES = 36, 1, 38  # of prctl(2)
EXECUTE, WRITE, READ_FILE, READ_FOLDER = 1, 1 << 1, 1 << 2, 1 << 3  # of Landlock's rights to files
# Landlock's ABI -> number of file rights. ABI 2 added moving between folders, 3 truncation, 5 ioctl of devices.
RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
RIGHTS_SINCE_5 = 16
LANDLOCK_ABI_NEEDED = 3  # an older one lets truncate(2) empty files
KILL_ROUNDS_S = 5.0  # limit for killing processes that fork faster than they are killed

# Machine -> (seccomp's number of it, the index of its system call numbers in the tables below).
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
# System calls that fail with EPERM: name -> its numbers.
DENIED: dict[str, Numbers] = {
    # Processes and programs.
    "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "clone3": (435, 435), "execve": (59, 221),
    "execveat": (322, 281), "setns": (308, 268), "unshare": (272, 97),
    # Signals to other processes, their memory, descriptors and scheduling.
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "kcmp": (312, 272), "setpriority": (141, 140),
    "ioprio_set": (251, 30), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "migrate_pages": (256, 238), "move_pages": (279, 239), "setrlimit": (160, 164),
    "prlimit64": (302, 261),
    # Connections. Calls through io_uring bypass seccomp filters.
    "socket": (41, 198), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # Modes, owners, attributes and times of files, which Landlock does not restrict.
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "removexattrat": (466, 466), "file_setattr": (469, 469), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "flock": (73, 32),
    # Contents and names of files, which Landlock restricts too, depending on its ABI.
    "truncate": (76, 45), "ftruncate": (77, 46), "fallocate": (285, 47), "link": (86, None), "linkat": (265, 37),
    "symlink": (88, None), "symlinkat": (266, 36), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "unlink": (87, None), "unlinkat": (263, 35), "rmdir": (84, None), "mkdir": (83, None), "mkdirat": (258, 34),
    "mknod": (133, None), "mknodat": (259, 33), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    # Mounts and quotas.
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "move_mount": (429, 429),
    "open_tree": (428, 428), "open_tree_attr": (467, 467), "mount_setattr": (442, 442), "quotactl": (179, 60),
    "quotactl_fd": (443, 443), "swapon": (167, 224), "swapoff": (168, 225),
    # Memory, queues and keys that processes share.
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186), "msgsnd": (69, 189),
    "msgrcv": (70, 188), "msgctl": (71, 187), "semget": (64, 190), "semop": (65, 193), "semtimedop": (220, 192),
    "semctl": (66, 191), "mq_open": (240, 180), "mq_unlink": (241, 181), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219),
    # The whole machine, if root runs the program.
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "acct": (163, 89), "sethostname": (170, 161), "setdomainname": (171, 162),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "syslog": (103, 116), "vhangup": (153, 58), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
}  # fmt: skip
# System calls that fail by their arguments.
OPEN, OPENAT, OPENAT2, IOCTL, FCNTL = (2, None), (257, 56), (437, 437), (16, 29), (72, 25)
FIRST_UNKNOWN_CALL = 470  # calls newer than the tables fail as on an older kernel
O_TRUNC, ACCESS_MODE, READ_ONLY, NO_ACCESS = 0o1000, 0o3, 0, 3  # a file is truncated by these without a right to write
# Python asks these of files it opens: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TCGETS2. Others set a
# file's flags (FS_IOC_SETFLAGS) or send signals (FIOSETOWN).
ALLOWED_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)
# F_SETLK, F_SETLKW, F_SETOWN, F_SETSIG, F_SETOWN_EX, F_OFD_SETLK, F_OFD_SETLKW, F_SETLEASE: locks on others' files, and
# signals to others.
DENIED_FCNTLS = (6, 7, 8, 10, 15, 37, 38, 1024)
# seccomp's answers: the call is made, fails with EPERM, fails with ENOSYS.
ALLOW, REFUSE, NO_SUCH_CALL = 0x7FFF0000, 0x00050001, 0x00050000 | 38
LOAD, EQUAL, AT_LEAST, AND, RETURN = 0x20, 0x15, 0x35, 0x54, 0x06  # of BPF
SECCOMP_CALL, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = (317, 277), 444, 445, 446
SET_FILTER, IS_ACTION_AVAILABLE = 1, 2  # of seccomp(2)


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    if sys.platform == "linux":
        _call_prctl(SUBREAPER, 1)  # orphans of the program become children of this process
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        _run_child(job, writes)
    os.close(writes)
    ended = _wait_for_child(child, job["timeout_s"])
    if ended is None:
        os.kill(child, signal.SIGKILL)
    _kill_descendants(child)
    head, _, secret = _read_child(reads).partition(b"\n")
    found = json.loads(head or b'{"protections": [], "missing": []}')
    if found["missing"] and not job["allow_unsandboxed"]:
        print(json.dumps({"passed": False, "how": "not run", **found}))
        return
    passed = ended is not None and secret.decode("latin-1") == job["secret"]
    how = "passed" if passed else "no time left" if ended is None else f"status {os.waitstatus_to_exitcode(ended)}"
    print(json.dumps({"passed": passed, "how": how, **found}))


def list_missing_protections(abi: int, seccomp: bool) -> list[str]:
    """Return what a kernel with Landlock's `abi` (0: without it), with or without seccomp, lacks for the sandbox."""
    landlock = [f"Landlock ABI {abi}" if abi else "no Landlock"] if abi < LANDLOCK_ABI_NEEDED else []
    return landlock if seccomp else [*landlock, "no seccomp filters"]


def read_landlock_abi() -> int:
    """Return the kernel's Landlock ABI, 0 without Landlock."""
    if sys.platform != "linux":
        return 0
    return max(0, ctypes.CDLL(None).syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))


def has_seccomp() -> bool:
    """Return whether the kernel supports seccomp filters that refuse with an error, and this machine's calls are known."""
    if sys.platform != "linux" or os.uname().machine not in MACHINES:
        return False
    action = ctypes.c_uint32(REFUSE & 0xFFFF0000)
    call = _get_call_number(SECCOMP_CALL)
    return ctypes.CDLL(None).syscall(call, IS_ACTION_AVAILABLE, 0, ctypes.byref(action)) == 0


def _wait_for_child(child: int, timeout_s: float) -> int | None:
    """Return the child's status; None after the timeout."""
    ends = time.monotonic() + timeout_s
    while time.monotonic() < ends:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.002)
    return None


def _kill_descendants(child: int) -> None:
    """Kill the child's group, and round by round every orphan, until none is left or the time is up."""
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    ends = time.monotonic() + KILL_ROUNDS_S
    while time.monotonic() < ends:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid, stat in _read_processes("stat"):
            if stat.rpartition(")")[2].split()[1:2] == [str(os.getpid())]:  # behind its name: state, parent
                os.kill(pid, signal.SIGKILL)  # a child's pid can't be reused before waitpid


def _read_processes(name: str) -> Iterator[tuple[int, str]]:
    """Yield (process, text of its file `name` in /proc): not every kernel has /proc/self/task/*/children."""
    for process in os.listdir("/proc") if sys.platform == "linux" else []:  # noqa: PTH208 - no pathlib: it takes time
        if process.isdigit():
            try:
                with open(f"/proc/{process}/{name}", errors="replace") as file:  # noqa: PTH123
                    yield int(process), file.read()
            except OSError:  # it has ended
                continue


def _read_child(reads: int) -> bytes:
    """Return what the child sent, without waiting: a process of its own may hold the other end."""
    os.set_blocking(reads, False)
    try:
        return os.read(reads, 4096)
    except BlockingIOError:
        return b""


def _run_child(job: dict[str, Any], writes: int) -> None:
    """Run the program in the child, and exit."""
    status = 1
    try:
        if sys.platform == "linux":
            _call_prctl(DEATHSIG, signal.SIGKILL)  # die with the sandbox process
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        _set_limits(job)  # first, since the sandbox forbids setting limits
        protections, missing = enter_sandbox()
        os.write(writes, json.dumps({"protections": protections, "missing": missing}).encode() + b"\n")
        if not missing or job["allow_unsandboxed"]:
            sys.argv[:] = ["program"]
            exec(compile(job["program"], "program", "exec"), {"__name__": "__main__"})
            os.write(writes, job["secret"].encode())
            status = 0
    finally:
        os._exit(status)


def _set_limits(job: dict[str, Any]) -> None:
    limits = {
        resource.RLIMIT_CPU: int(job["timeout_s"]) + 1, resource.RLIMIT_AS: job["memory"], resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0, resource.RLIMIT_NOFILE: 64,
    }  # fmt: skip
    if not has_seccomp():
        limits[resource.RLIMIT_NPROC] = _count_user_threads() + job["processes"]
    for kind, most in limits.items():
        try:
            resource.setrlimit(kind, (most, most))
        except (ValueError, OSError):  # already lower, or unknown to this system
            pass


def _count_user_threads() -> int:
    """Return the number of this user's threads, to which the limit applies; 0 without /proc."""
    found = 0
    for _, text in _read_processes("status"):
        status = re.search(r"^Uid:\s+(\d+)\b.*^Threads:\s+(\d+)", text, re.DOTALL | re.MULTILINE)
        found += int(status[2]) if status and int(status[1]) == os.getuid() else 0
    return found


def enter_sandbox() -> tuple[list[str], list[str]]:
    """Restrict this process by Landlock and seccomp, as far as the kernel has them; neither needs privileges.

    Return what is prevented, and what is missing, both in words. "no files written" needs both, and a Landlock that knows
    truncation: seccomp protects the modes of files, Landlock their contents.
    """
    if sys.platform != "linux" or not _call_prctl(NO_NEW_PRIVILEGES, 1):
        return [], list_missing_protections(0, False)
    abi = read_landlock_abi()
    abi = abi if _restrict_files(abi) else 0
    seccomp = has_seccomp() and load_filter(build_filter())
    missing = list_missing_protections(abi, seccomp)
    protections = [] if missing else ["no files written"]
    return [*protections, *(["no processes", "no network"] if seccomp else [])], missing


def _restrict_files(abi: int) -> bool:
    """Keep this process from writing any file but /dev/null, by Landlock of `abi`; return whether that took effect."""
    if abi < 1:
        return False
    libc = ctypes.CDLL(None)
    handled = ((1 << RIGHTS.get(abi, RIGHTS_SINCE_5)) - 1) & ~(EXECUTE | READ_FILE | READ_FOLDER)
    ruleset = struct.pack("=Q", handled)
    fd = libc.syscall(LANDLOCK_CREATE, ruleset, ctypes.c_size_t(len(ruleset)), 0)
    if fd < 0:
        return False
    null = struct.pack("=Qi", WRITE, os.open(os.devnull, os.O_PATH))
    return not libc.syscall(LANDLOCK_ADD, fd, 1, null, 0) and not libc.syscall(LANDLOCK_RESTRICT, fd, 0)


def build_filter() -> list[Instruction]:
    """Return the seccomp filter of graded programs, for this machine."""
    architecture, _ = MACHINES[os.uname().machine]
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, REFUSE), (LOAD, 0, 0, 0)]
    code += [(AT_LEAST, 0, 1, FIRST_UNKNOWN_CALL), (RETURN, 0, 0, NO_SUCH_CALL)]  # the numbers of x32, too
    code += _match_call(OPENAT2, [(RETURN, 0, 0, NO_SUCH_CALL)])  # its flags are in memory, which filters can't read
    opens: tuple[tuple[Numbers, int], ...] = ((OPEN, 1), (OPENAT, 2))
    for numbers, argument in opens:
        truncates = [word for mode in (READ_ONLY, NO_ACCESS) for word in _match_value(O_TRUNC | mode, REFUSE)]
        masked = [_load_argument(argument), (AND, 0, 0, O_TRUNC | ACCESS_MODE)]
        code += _match_call(numbers, [*masked, *truncates, (RETURN, 0, 0, ALLOW)])
    allowed = [word for request in ALLOWED_IOCTLS for word in _match_value(request, ALLOW)]
    code += _match_call(IOCTL, [_load_argument(1), *allowed, (RETURN, 0, 0, REFUSE)])
    refused = [word for command in DENIED_FCNTLS for word in _match_value(command, REFUSE)]
    code += _match_call(FCNTL, [_load_argument(1), *refused, (RETURN, 0, 0, ALLOW)])
    for denied in DENIED.values():
        code += _match_call(denied, [(RETURN, 0, 0, REFUSE)])
    return [*code, (RETURN, 0, 0, ALLOW)]


def load_filter(code: list[Instruction]) -> bool:
    """Put this process and its children under a seccomp filter; return whether the kernel accepted it."""
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(instructions)))
    call = _get_call_number(SECCOMP_CALL)
    return ctypes.CDLL(None).syscall(call, SET_FILTER, 0, ctypes.c_void_p(ctypes.addressof(program))) == 0


def _get_call_number(numbers: Numbers) -> int | None:
    """Return a call's number on this machine, which is one of MACHINES."""
    return numbers[MACHINES[os.uname().machine][1]]


def _match_call(numbers: Numbers, code: list[Instruction]) -> list[Instruction]:
    """Return `code`, which ends with an answer, for one call; nothing if this machine has no such call."""
    number = _get_call_number(numbers)
    return [] if number is None else [(EQUAL, 0, len(code), number), *code]


def _match_value(value: int, answer: int) -> list[Instruction]:
    """Return the instructions that answer `answer` if the loaded value is `value`."""
    return [(EQUAL, 0, 1, value), (RETURN, 0, 0, answer)]


def _load_argument(index: int) -> Instruction:
    """Return the instruction that loads the lower half of a call's argument: flags and requests are ints."""
    return (LOAD, 0, 0, 16 + 8 * index)


def _call_prctl(option: int, *arguments: int) -> bool:
    given = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0)[:4]]
    return ctypes.CDLL(None).prctl(ctypes.c_int(option), *given) == 0


if __name__ == "__main__":
    main()
