"""Start SGLang with the patch of server_startup/sglang_vision_patch.py, and tell what became of it."""

import os
from pathlib import Path

from stages.serving.server_startup.sglang_vision_patch import PREFIX, TARGETS, VERSION

STARTUP_FOLDER = Path(__file__).parent / "server_startup"
CORRECTED_VERSION = (0, 5, 23)  # read from its source: it needs no patch
SWITCH = "benchmark_served.server.vision_patch"  # of params.yaml, for messages


def build_environment() -> dict[str, str]:
    """Return the variables that load the patch into every Python process of a server."""
    inherited = filter(None, [os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join([str(STARTUP_FOLDER), *inherited]), "AERIE_SGLANG_PATCH": "vision"}


def describe_outcome(log: Path, version: str) -> str | None:
    """Return a sentence for the report on how a server of this version drafts images; None where it needs no patch.

    Raises:
        ValueError: SGLang 0.5.17 runs without the patch.
    """
    if version != VERSION:
        if _parse_version(version) >= CORRECTED_VERSION:
            return None
        return (
            f"SGLang {version} was not patched, and may give the draft of a multimodal target wrong embeddings and positions, as "
            f"{VERSION} does: compare tau with the replayed one (docs/serving.md)"
        )
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    applied = {line.rpartition(" ")[2] for line in lines if line.startswith(f"{PREFIX} applied to ")}
    if missing := sorted(TARGETS.keys() - applied):
        raise ValueError(
            f"SGLang {version} was to run with the vision patch, expected a line of {log} for each of its modules, found none "
            f"for {', '.join(missing)}; its Python must read PYTHONPATH (no -I or -E in benchmark_served.server.command), or set "
            f"{SWITCH}: false and accept a lower tau"
        )
    return f"drafted with the vision patch of SGLang {VERSION} ({SWITCH}; docs/serving.md)"


def _parse_version(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version; () for one that has none, which is then older than any other."""
    numbers = []
    for part in version.split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
