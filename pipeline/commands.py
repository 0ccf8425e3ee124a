"""Bring the whole graph up to date, or list what is stale, each as lines to print."""

import sys
from collections.abc import Iterator
from functools import partial

from pipeline import dvc_graph, processes, versions, workspaces

MAX_SHOWN_CHANGES = 3  # of one line; a stage's log and Prefect's pages have all of them


def run_graph() -> Iterator[str]:
    """Bring every stage up to date with one DVC process, which prints to this process's output.

    Raises:
        ValueError: dvc.yaml or params.yaml cannot be read, or dvc.lock cannot be repaired.
        StageError: a stage failed.
    """
    with workspaces.exclusive_run(partial(print, flush=True)) as held_files:
        reasons = dvc_graph.explain_stale()
        yield from _describe_stale(reasons)
        if not reasons:
            return
        with processes.guard_run(held_files), processes.preload_stages(len(reasons)):
            dvc_graph.run_all_stages()


def list_stale() -> Iterator[str]:
    """Yield a line for each group of stale stages, and warnings. Raises SystemExit(1) after the last if any is stale."""
    reasons = dvc_graph.explain_stale()
    yield from versions.list_warnings()
    yield from _describe_stale(reasons)
    if reasons:
        sys.exit(1)


def _describe_stale(reasons: dict[str, list[str]]) -> Iterator[str]:
    """Yield a line for each group of stages with the same changes, in the order of the graph."""
    if not reasons:
        yield "nothing is stale"
        return
    grouped: dict[str, list[str]] = {}
    for name in filter(reasons.get, dvc_graph.list_stages()):
        grouped.setdefault(_summarise_changes(reasons[name]), []).append(name)
    for summary, names in grouped.items():
        yield f"stale: {', '.join(names)} ({summary})"


def _summarise_changes(changes: list[str]) -> str:
    if any(change.endswith("not in cache") for change in changes):  # a new clone, where nothing else is worth a word
        return "its results are not here"
    more = [f"{len(changes) - MAX_SHOWN_CHANGES} more"] if len(changes) > MAX_SHOWN_CHANGES else []
    return "; ".join([*changes[:MAX_SHOWN_CHANGES], *more])
