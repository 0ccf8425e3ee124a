"""Tell what a version of an engine supports: flags, the command that starts a server, and the fields of its answers.

One table, read from the engines' wheels; which versions ran is in serving-env/README.md. A version that can't be told (an engine
on the PATH, in a container) counts as the newest.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

VERSION_TIMEOUT_S = 120.0  # vLLM imports torch to say its version
OLDEST_VLLM = (0, 30)


@dataclass(frozen=True)
class Change:
    """A feature that an engine has from a version on."""

    engine: str
    since: tuple[int, ...]
    feature: str


CHANGES = {
    # Before: --cuda-graph-max-bs, which 0.5.23 refuses as ambiguous.
    "decode graphs": Change("sglang", (0, 5, 14), "--cuda-graph-max-bs-decode"),
    # Before, its tensors are skipped, or the server does not start.
    "DFlash2 in sglang": Change("sglang", (0, 5, 23), "DFlash2DraftModel"),
    "DFlash2 in vllm": Change("vllm", (0, 33), "DFlash2DraftModel"),
    # Before, sliding layers are causal whatever is_causal says.
    "is_causal of windows in sglang": Change("sglang", (0, 5, 23), "is_causal: false of layers with a sliding window"),
}


def check_vllm(engine: str, version: str | None) -> None:
    """Raise ValueError for a vLLM that does not report the accepted drafts of each request."""
    if engine == "vllm" and () < parse_release(version or "") < OLDEST_VLLM:
        raise ValueError(f"vLLM {version} does not count accepted drafts by request, expected 0.30 or later; install that "
                         "(make serving-env), or name another server in benchmark_served.server")  # fmt: skip


def has_change(name: str, engine: str, version: str | None) -> bool:
    """Return whether this version of the engine has the change of that name; None is the newest version."""
    change = CHANGES[name]
    return engine == change.engine and (version is None or parse_release(version) >= change.since)


def parse_release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (0, 5, 17) of 0.5.17.post1+cu130; () without any, which is older than all others."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, found[1].split("."))) if found else ()


def find_version(engine: str, program: str) -> str | None:
    """Return the version of the engine that a program starts; None where it can't be told.

    An environment says it in its package's folder, which takes no start of the engine; another vLLM is asked for it.
    """
    path = shutil.which(program)
    if path is None:
        return None
    folders = Path(path).absolute().parent.parent.glob(f"lib/python3*/site-packages/{engine}-*.dist-info")
    if found := next(folders, None):
        return found.name.removesuffix(".dist-info").partition("-")[2]
    if engine != "vllm" or Path(path).name != "vllm":
        return None
    try:
        completed = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    versions = re.findall(r"^v?(\d+\.\d[\w.+]*)$", completed.stdout, re.MULTILINE)
    return versions[-1] if versions and completed.returncode == 0 else None
