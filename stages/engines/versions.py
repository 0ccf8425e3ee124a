"""Versions of engines and what they support, read from the engines' wheels; serving-env/README.md has the versions that ran.

A version that can't be told (an engine on the PATH, in a container) counts as the newest.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from stages.params.engines import ENGINES

VERSION_TIMEOUT_S = 120.0  # vLLM imports torch to say its version


@dataclass(frozen=True)
class Change:
    """A feature that an engine has from a version on."""

    first_version: str
    feature: str

    def is_in(self, version: str | None) -> bool:
        """Return whether this version of the engine has the feature; None is the newest version."""
        return version is None or parse_release(version) >= parse_release(self.first_version)


def parse_release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (0, 5, 17) of 0.5.17.post1+cu130; () without any, which is older than all others."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, found[1].split("."))) if found else ()


def find_version(engine: str, program: str) -> str | None:
    """Return the version of the engine that a program starts; None where it can't be told.

    An environment says it in its package's folder, which takes no start of the engine; some programs elsewhere are asked.
    """
    path = shutil.which(program)
    if path is None:
        return None
    folders = Path(path).absolute().parent.parent.glob(f"lib/python3*/site-packages/{engine}-*.dist-info")
    if found := next(folders, None):
        return found.name.removesuffix(".dist-info").partition("-")[2]
    if not ENGINES[engine].tells_version or Path(path).name != ENGINES[engine].program:
        return None
    try:
        completed = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found_versions = re.findall(r"^v?(\d+\.\d[\w.+]*)$", completed.stdout, re.MULTILINE)
    return found_versions[-1] if found_versions and completed.returncode == 0 else None
