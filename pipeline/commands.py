"""Bring the whole graph up to date, or list what is stale, each as lines to print.

With nothing to do the answer takes no DVC: everything but pipeline/freshness.py is imported where there is something.
"""

import contextlib
import itertools
import os
import re
import shlex
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline import freshness

if TYPE_CHECKING:
    from pipeline.dvc_graph import GraphState
    from stages.params.schema import Params

TABLE_FILE = Path("results/report/table.txt")  # by the report stage
VALID_PARAMS_FILE = Path(".scratch/valid_params.json")
# What the check of params.yaml depends on, besides data; stages.params has the first as PARAMS_FILE, and pydantic, 0.2 s.
CHECKED_PATHS = ("params.yaml", "stages/params")
MAX_SHOWN_CHANGES = 3  # of one line; Prefect's pages have all of them
PROCESS_ID = re.compile(r"\(PID (\d+)\)")  # in DVC's message on a locked file
LARGEST = "extract_hiddens"  # the stage that fills a disk
NOTHING_STALE = "nothing is stale"

WHAT_NEXT = (
    "What next (`. .venv/bin/activate` puts aerie on the PATH)",
    "  your own       aerie use own, then target.model and fix_data.raw in params.yaml: docs/guide.md, docs/data.md",
    "  a recipe       aerie use weather-tiny-vl, or another of recipes/: docs/recipes.md",
    "  a longer run   sample_target.train_rows, epochs of train_draft.checkpoints: docs/training.md",
    "  other trees    benchmark.trees: those that the page predicts to be faster: docs/trees.md",
    "  a server       benchmark_served.workloads: the same cells on SGLang or vLLM: docs/serving.md",
    "  the pages      make ui: every stage with its log, forms for sweeps: docs/scheduling.md",
    "  the advice     aerie launch: which draft and tree to serve, or none: docs/cost.md",
)


def run_graph(verbose: bool = False) -> Iterator[str]:
    """Check params.yaml, bring every stage up to date, and yield the table.

    With `verbose` all that the stages print is shown instead of a line for each stage.

    Raises:
        ValueError: params.yaml is not valid, or dvc.yaml or dvc.lock cannot be read.
        StageError: a stage failed.
    """
    if _is_known_fresh():
        yield NOTHING_STALE
        yield from _read_results()
        return
    from pipeline import dvc_graph, processes, workspaces  # 0.2 s
    from stages.params import checks, schema

    params = schema.load_params()
    checks.check_params(params)
    with (
        workspaces.hold_workspace(partial(print, flush=True)) as held_files,
        processes.guard_run(held_files),
        processes.preload_stages(),  # beside the check of the target's config, which takes as long: 10 s
    ):
        check_run_params(params)
        reasons, stages = dvc_graph.explain_graph()
        if reasons:
            yield from params.describe_left_out_trees()
            may_run = [name for name in stages if name in {*reasons, *dvc_graph.list_below(reasons, stages)}]
            remarks = [*checks.list_remarks(params), *(_warn_of_disk(params) if LARGEST in may_run else ())]
            yield from (f"note: {line}" for line in remarks)
        yield from _describe_stale(reasons, stages)
        if reasons:
            dvc_graph.run_all_stages(stages, verbose, params.group_served_cells(may_run))
        if not (verbose and reasons):  # the report stage has printed it
            yield from _read_results()
        if reasons:
            yield from ["", *WHAT_NEXT]
            dvc_graph.explain_stale()  # seconds, here instead of in the next run, which then takes none


def _is_known_fresh() -> bool:
    """Return whether nothing has changed since params.yaml was found valid and every stage up to date."""
    known = freshness.read_known(VALID_PARAMS_FILE)
    is_valid = known is not None and known["look"] == freshness.digest_paths(CHECKED_PATHS)
    return is_valid and freshness.read_fresh_stages() is not None


def check_run_params(params: "Params | None" = None) -> "Params":
    """Check and return the whole params.yaml, before any stage of a run here or by Prefect starts.

    Raises ValueError naming every wrong key, or the file, folder, GPU or token that it names and that is not as expected.
    """
    from pipeline import preflight
    from stages.params import checks, schema  # 0.2 s

    digest = freshness.digest_paths(CHECKED_PATHS)
    params = params or schema.load_params()
    checks.check_params(params)
    preflight.check_target_config(params)
    freshness.write_known(VALID_PARAMS_FILE, {"look": digest})
    return params


def _warn_of_disk(params: "Params") -> Iterator[str]:
    """Yield that a run of one's own target does not fit on the disk, where its size is known."""
    if params.target.is_embedded:
        return
    from pipeline import preflight, reproduce

    with contextlib.suppress(ValueError):  # nothing is recorded of the target's shape
        finding = preflight.check_disk(reproduce.estimate_params(None, Path(CHECKED_PATHS[0])).disk_bytes)
        if finding.ok is False:
            yield f"{finding.subject}: {finding.found}; {finding.advice}"


def _read_results() -> Iterator[str]:
    """Yield the table of the results; nothing where a graph has none."""
    if TABLE_FILE.exists():
        yield ""
        yield from read_table()


def read_table() -> Iterator[str]:
    """Yield the table of the last report. Raises ValueError if there is none."""
    if not TABLE_FILE.exists():
        raise ValueError(f"{TABLE_FILE} not found; run: aerie run")
    yield from TABLE_FILE.read_text(encoding="utf-8").rstrip("\n").split("\n")


def describe_outdated() -> Iterator[str]:
    """Yield a line where the results here are not those of params.yaml, data and code as they are now."""
    try:
        _check_no_run()
        stale = _ask_stale().reasons
    except (ValueError, OSError) as error:  # OSError: DVC needs a lock, on a disk that is read-only
        yield f"note: it is not known whether this is of params.yaml as it is now: {error}"
        return
    if stale:
        names = ", ".join(_shorten_names([*stale]))
        yield f"note: of an earlier state, for these stages are stale: {names}; see aerie stale, and run: aerie run"


def list_stale() -> Iterator[str]:
    """Check params.yaml, and yield a line for each group of stale stages.

    Raises:
        ValueError: params.yaml is not valid, dvc.yaml cannot be read, or a run is at work here.
        SystemExit: with 1, after the last line, if any stage is stale.
    """
    if _is_known_fresh():  # what a run at work has changed would show
        yield NOTHING_STALE
        return
    _check_no_run()
    yield from check_run_params().describe_left_out_trees()
    found = _ask_stale()
    yield from _describe_stale(found.reasons, found.stages)
    if found.reasons:
        sys.exit(1)


def describe_stop(words: list[str], since: float) -> str:
    """Return a line on what the command `aerie WORDS`, which began at `since`, has left after Ctrl-C, and how to go on."""
    again = "make run" if words == ["run"] and "MAKELEVEL" in os.environ else shlex.join(["aerie", *words])
    if words[:1] not in (["run"], ["reproduce"]):
        return f"stopped; what was complete is kept, `{again}` goes on or begins again"
    from stages.runtime import scratch

    notes = scratch.list_notes(since).items()
    points = [f"{where} of {stage}" if where else f"with {stage} from its beginning" for stage, where in notes]
    return f"stopped; what has finished is kept, `{again}` goes on {' and '.join(points) or 'with the rest'}"


def _check_no_run() -> None:
    """Raise ValueError while a run is at work here: what is stale is not known then."""
    from pipeline import resources, workspaces

    if holder := resources.find_lock_holder(workspaces.LOCK_PATH):
        raise ValueError(f"a run is at work here ({holder}); ask again when it has ended")


def _ask_stale() -> "GraphState":
    """Return the graph and what of it is stale. Raises ValueError while another command of DVC is at work here."""
    from pipeline import dvc_graph

    try:
        return dvc_graph.ask_stale()
    except dvc_graph.BusyError as error:
        blocker = PROCESS_ID.search(str(error))
        by = f"process {blocker[1]}" if blocker else "another process"
        raise ValueError(f"a command of DVC is at work here ({by}); ask again when it has ended") from None


def _describe_stale(reasons: dict[str, list[str]], stages: dict[str, list[str]]) -> Iterator[str]:
    """Yield a line for each group of stages with the same changes, and one for those that may run after them.

    `stages` are all of the graph, each with those it depends on, in its order.
    """
    if not reasons:
        yield NOTHING_STALE
        return
    grouped: dict[str, list[str]] = {}
    for name in filter(reasons.get, stages):
        grouped.setdefault(_summarise_changes(reasons[name]), []).append(name)
    for summary, names in grouped.items():
        yield f"stale: {', '.join(names)} ({summary})"
    from pipeline.dvc_graph import list_below

    if below := list_below(reasons, stages):
        yield f"and up to {len(below)} below, if what they read changes: {', '.join(_shorten_names(below))}"


def _shorten_names(names: list[str]) -> Iterator[str]:
    """Yield the names; for more than MAX_SHOWN_CHANGES in turn of one name before the @, that and their number."""
    for stage, group in itertools.groupby(names, key=lambda name: name.partition("@")[0]):
        members = list(group)
        yield from [f"{stage} ({len(members)})"] if len(members) > MAX_SHOWN_CHANGES else members


def _summarise_changes(changes: list[str]) -> str:
    if any(change.endswith("not in cache") for change in changes):  # a new clone, where nothing else is worth a word
        return "its results are not here"
    more = [f"{len(changes) - MAX_SHOWN_CHANGES} more"] if len(changes) > MAX_SHOWN_CHANGES else []
    return "; ".join([*changes[:MAX_SHOWN_CHANGES], *more])
