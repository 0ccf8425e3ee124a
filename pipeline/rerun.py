"""Measure cells with doubtful timings again: `aerie rerun CELL...`."""

import difflib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from pipeline import dvc_graph, processes, workspaces

# Stages that time something: the same inputs give other figures. All others would make the same bytes again.
TIMED_STAGES = (
    "benchmark",
    "benchmark_served",
    "benchmark_served_baseline",
    "serving_costs",
    "time_trees",
)


def rerun_cells(cells: Sequence[str]) -> Iterator[str]:
    """Measure cells again, one after the other, and no other stage; yield what to do next.

    What is there is brought back from the cache if a stage fails or is interrupted. The report is then stale.

    Raises:
        ValueError: params.yaml lists no such cell; none was measured then.
        StageError: a stage failed.
    """
    outputs = dvc_graph.list_outputs(TIMED_STAGES)
    names = list(dict.fromkeys(find_timed_stage(cell, outputs) for cell in cells))
    with workspaces.exclusive_run(partial(print, flush=True)) as held_files, processes.guard_run(held_files):
        dvc_graph.write_inputs()
        for name in names:
            try:
                dvc_graph.reproduce_stage(name, partial(print, flush=True), force=True)
            except BaseException:  # an interruption too
                dvc_graph.restore_outputs(name)
                raise
    were = "were" if len(names) > 1 else "was"
    yield f"{', '.join(names)} {were} measured again; the table follows with: aerie run"


def find_timed_stage(cell: str, outputs: dict[str, list[str]]) -> str:
    """Return the stage that a cell is made by, of stages with their outputs.

    A cell may be named by its stage, its file, or the file's name with or without .json: benchmark@eval-e009-t8_2_16,
    results/cells/eval-e009-t8_2_16.json, eval-e009-t8_2_16. Raises ValueError for any other name.
    """
    names = {stage: stage for stage in outputs}
    for stage, files in outputs.items():
        for file in map(Path, files):
            names |= dict.fromkeys((file.as_posix(), file.name, file.stem), stage)
    if cell not in names:
        near = difflib.get_close_matches(cell, outputs, 3, 0.3)
        known = f"expected a cell that params.yaml lists, as {', '.join(near or list(outputs)[:3])}"
        raise ValueError(f"no cell {cell!r} can be measured again: {known if outputs else 'params.yaml lists none'}")
    return names[cell]
