"""Name the best tree for an engine that is older than the advised draft needs, and how to get the newer: `aerie launch`."""

import shlex
from collections.abc import Iterable

from stages.reporting.text import format_interval, format_tree
from stages.results.prediction import LaunchAdvice
from stages.serving import engine_versions, server


def describe_older_engines(launch: Iterable[LaunchAdvice]) -> list[str]:
    """Return lines for each advised draft that needs a version of its engine which is not known to be installed here."""
    lines, newer = [], {}
    for row in launch:
        if row.min_version is None:
            continue
        installed = engine_versions.find_version(row.engine, server.locate_program(row.engine))
        if installed and engine_versions.parse_release(installed) >= engine_versions.parse_release(row.min_version):
            continue
        lines += _describe_runner_up(row, installed)
        newer[row.engine] = row.min_version
    return [*lines, *(_advise_install(engine, version) for engine, version in newer.items())]


def _describe_runner_up(row: LaunchAdvice, installed: str | None) -> list[str]:
    """Return the best tree of the load that older versions run, with its flags."""
    version = f"{row.engine} {installed}, installed here," if installed else f"{row.engine} before {row.min_version}"
    line = f"{version} does not know the draft {row.checkpoint}; the best that it runs at concurrency {row.concurrency:g}: "
    best = row.runner_up
    if best is None:
        return [f"{line}no other draft is predicted"]
    speedup = f"{best.speedup:.2f}x ({format_interval(best.low, best.high, 'no interval')})"
    line += f"{format_tree(best.shape.name)} of {best.checkpoint}, predicted {speedup}"
    if best.enable:
        return [line, f"    {shlex.join(best.flags)}"]
    off = "it can't be told whether to speculate" if best.is_undecided else "leave speculation off"
    return [f"{line}: {off}"]


def _advise_install(engine: str, version: str) -> str:
    """Return how to get the version: by one of the lists in serving-env/, where there is one."""
    name = f"{engine}-{version}"
    if not (server.ENVIRONMENTS_FOLDER / f"{name}.txt").exists():
        return f"to launch the first, get {engine} {version} or later"
    program = server.ENVIRONMENTS_FOLDER / name / "bin" / engine
    how = f"benchmark_served.server.command: [{program}, serve]"
    if program.exists():
        return f"{engine} {version} is in {program.parent.parent}: {how}"
    return f"to get {engine} {version}: make serving-env ENGINE={name}, and {how}"
