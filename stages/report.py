"""report: cells, replays and every stage's own report -> the table, the plots, one page.   python -m stages.report

    python -m stages.report --table    # print the table from the files in results/, without writing anything
    python -m stages.report --launch   # likewise when to speculate, with which tree and which flags

Cells and replays are those that params.yaml lists, never a glob: files of removed ones stay on disk. docs/metrics.md
defines the columns. This file reads and writes; stages/reporting makes the page of what was read. matplotlib and Jinja2
are imported where they are used, since `--table` must answer at once.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stages.params import schema
from stages.reporting import benchmark_table, costs, methods, page
from stages.reporting.inputs import ReportInputs, ReportSettings
from stages.reporting.summary import METRICS_FILE, PAGE_FILE, format_terminal_table, summarise_results
from stages.results import method_records, prediction, replay_records, served_table, timing_grid, torch_records
from stages.results.served_records import TORCH_ENGINE
from stages.runtime import atomic
from stages.telemetry import stage_log
from stages.telemetry.run_stage import run_stage

REPLAY_TABLE = Path("results/replay.csv")

# Stage -> the name of its own report in results/, and the keys it must have; other keys are shown too.
STAGE_REPORTS = {
    "fix_data": (
        "fix_report",
        (
            "rows_in", "rows_out", "rules", "dropped_reasons", "examples", "seconds", "formats", "near_duplicates", "overlap",
            "hub",
        ),
    ),
    "sample_target": ("sample_report", ("rows_in", "rows_out", "dropped", "seconds", "sources", "preview")),
    "extract_hiddens": ("hiddens_report", ("rows_in", "rows_out", "dropped", "seconds")),
    "init_draft": ("vocab_report", ("draft_vocab_size", "target_vocab_size", "coverage_train", "coverage_eval")),
    "check_overfit": ("overfit_report", ("tau", "min_tau", "steps", "losses")),
}  # fmt: skip

Row = dict[str, Any]


def main(*arguments: str) -> None:
    if arguments == ("--table",):
        print(_read_terminal_table())
    elif arguments == ("--launch",):
        lines = costs.format_launch_table(prediction.read_launch())
        print("\n".join(lines) or f"nothing is predicted; {PAGE_FILE} says why")
    elif arguments:
        raise ValueError(f"report takes --table, --launch or nothing; found {' '.join(arguments)}")
    else:
        write_report(schema.load_params())


def write_report(p: schema.Params) -> None:
    replayed = {name: replay_records.read_replay(name) for name in p.replay_trees.checkpoints}
    found = read_inputs(p, replayed)
    metrics = summarise_results(found)
    served_rows = [line.row for line in found.lines]

    atomic.write_csv(benchmark_table.BENCHMARK_TABLE, benchmark_table.BENCHMARK_COLUMNS, found.rows)
    served_table.write_served_table(found.lines)
    methods.write_method_table(found.methods)
    prediction.write_predictions(found.predicted.rows, found.predicted.launch, found.predicted.costs)
    replay_records.write_replay(REPLAY_TABLE, [tree for trees in replayed.values() for tree in trees])
    atomic.write_json(METRICS_FILE, metrics)
    tables = [
        benchmark_table.BENCHMARK_TABLE,
        REPLAY_TABLE,
        METRICS_FILE,
        *filter(Path.exists, [served_table.SERVED_TABLE]),
    ]
    atomic.write_text(PAGE_FILE, page.render_page(_get_settings(p), found, metrics, tables))
    print(format_terminal_table(found.rows, served_rows, metrics, found.predicted.launch, found.methods))


def _read_terminal_table() -> str:
    rows = benchmark_table.read_benchmark_table()
    metrics = atomic.read_json(METRICS_FILE, made_by="report")
    return format_terminal_table(
        rows, served_table.read_served_table(), metrics, prediction.read_launch(), methods.read_method_table()
    )


def read_inputs(p: schema.Params, replayed: dict[str, list[Row]]) -> ReportInputs:
    """Return everything that the report shows; `replayed` has each checkpoint's trees at every temperature."""
    cells = read_cells(p)
    served_cells = served_table.read_served_cells(*_get_served_axes(p))
    served_cells += served_table.read_torch_loads(
        _list_torch_workloads(p, alone=False), p.benchmark.checkpoints, p.benchmark.trees
    )
    statistics = {name: replay_records.read_tree_statistics(name) for name in p.replay_trees.checkpoints}
    reports = {stage: _read_report(stage) for stage in STAGE_REPORTS}
    trained = {name: _read_training(name, segment.from_) for name, segment in p.train_draft.checkpoints.items()}
    lines = served_table.join_lines(served_cells, replayed, _list_replayable_workloads(p))
    predicted = _predict_speedups(p, cells, lines, replayed)
    method_cells = read_methods(p)
    method_rows = methods.build_method_rows(method_cells, trained)
    return ReportInputs(
        cells=cells,
        rows=[benchmark_table.build_benchmark_row(cell, replayed.get(cell["checkpoint"], [])) for cell in cells],
        replays={name: replay_records.select_greedy(trees) for name, trees in replayed.items()},
        tree_statistics=statistics,
        reports=reports,
        trained=trained,
        served=served_cells,
        lines=lines,
        predicted=predicted,
        methods=method_rows,
        engines=methods.compare_engines(method_rows, cells, lines),
        stage_runs=_read_stage_runs(p) | {f"benchmark_methods@{cell['row']}": cell for cell in method_cells},
        weights=_read_weight_digests(p),
    )


def _get_settings(p: schema.Params) -> ReportSettings:
    values = json.dumps(p.model_dump(mode="json", by_alias=True), sort_keys=True)
    return ReportSettings(
        title=p.report.title,
        model=p.target.model,
        benchmark_trees=p.benchmark.trees,
        other_methods={name for name, segment in p.train_draft.checkpoints.items() if segment.other_method},
        imported={name: source.model_dump() for name, source in p.import_draft.checkpoints.items()},
        params_digest=hashlib.sha256(values.encode()).hexdigest(),
    )


# Cells


def read_cells(p: schema.Params) -> list[Row]:
    """Return the torch engine's cells that params.yaml lists.

    Raises:
        ValueError: naming the file and what to run, where a cell is missing or is another than its name says.
    """
    cells = []
    for workload in _list_torch_workloads(p, alone=True):
        for checkpoint in p.benchmark.checkpoints:
            for tree in p.benchmark.trees:
                cell = torch_records.read_torch_cell(workload, checkpoint, tree)
                again = f"run: dvc repro -f -s benchmark@{workload}-{checkpoint}-{tree}"
                place = torch_records.locate_torch_cell(workload, checkpoint, tree)
                if missing := set(torch_records.METRICS) - set(cell["metrics"]):
                    raise ValueError(f"{place} lacks the metrics {sorted(missing)}; {again}")
                if (names := [cell[k] for k in ("workload", "checkpoint", "tree")]) != [workload, checkpoint, tree]:
                    raise ValueError(f"{place} holds the cell {'-'.join(names)}; {again}")
                cells.append(cell)
    return cells


def read_methods(p: schema.Params) -> list[Row]:
    """Return the cells of the table of methods that params.yaml lists."""
    listed = p.benchmark_methods
    stages = dict.fromkeys(listed.with_draft, "benchmark_methods") | dict.fromkeys(
        listed.without_draft, "benchmark_methods_baseline"
    )
    return [method_records.read_method_cell(row, f"{stage}@{row}") for row, stage in stages.items()]


def _list_torch_workloads(p: schema.Params, alone: bool) -> list[str]:
    """Return the torch engine's workloads that are answered prompt by prompt, or those that are measured in loads."""
    workloads = p.benchmark.workloads
    return [name for name in p.benchmark.torch_workloads if workloads[name].is_sequential == alone]


def _get_served_axes(p: schema.Params) -> tuple[list[str], list[str], list[str]]:
    return p.benchmark_served.workloads, p.benchmark_served.checkpoints, p.benchmark_served.trees


def _list_replayable_workloads(p: schema.Params) -> set[str]:
    """Return the workloads of the eval split that stop at the end token: no replay has text beyond it."""
    workloads, loaded = p.benchmark.workloads, [*p.benchmark_served.workloads, *_list_torch_workloads(p, alone=False)]
    return {name for name in loaded if workloads[name].prompts == "eval" and not workloads[name].ignore_eos}


def _predict_speedups(
    p: schema.Params, cells: list[Row], lines: list[served_table.ServedTableLine], replayed: dict[str, list[Row]]
) -> costs.CostPrediction:
    """Return predicted speedups of every replayed tree, and the flags benchmark_served would start a server with."""
    from stages.serving import engine_flags  # imports an HTTP client; the terminal's table does without

    timed = [timing_grid.read_timing_grid(name, p.target.model) for name in p.time_trees.checkpoints]

    def flags(engine: str, row: Row) -> list[str] | None:
        config = next(
            (cost["draft"] for cost in timed if p.have_same_shapes(cost["checkpoint"], row["checkpoint"])), None
        )
        shape = row["steps"], row["topk"], row["tokens"]
        if config is None or engine_flags.explain_unsupported(engine, *shape, config):
            return None
        folder = f"drafts/{row['checkpoint']}/draft"
        return engine_flags.build_speculation_flags(
            engine, engine_flags.ServedDraft(folder, p.benchmark_served.server.algorithm, *shape), config
        )

    workloads = p.benchmark.workloads
    temperatures = dict.fromkeys(float(workloads[name].temperature) for name in p.benchmark.torch_workloads) or {
        0.0: None
    }
    # The torch engine's cost is its timing grid, so its loads derive none.
    server_lines = [line for line in lines if line.cell["engine"] != TORCH_ENGINE]
    return costs.predict_and_compare(
        timed, server_lines, cells, replayed, p.have_same_shapes, list(temperatures), flags
    )


# Reports of other stages


def _read_report(stage: str) -> Row:
    name, keys = STAGE_REPORTS[stage]
    return _read_whole_report(Path(f"results/{name}.json"), keys, stage)


def _read_stage_runs(p: schema.Params) -> dict[str, Row]:
    """Return what the log holds of each stage's last run, in the order of the graph. Cells hold their own figures.

    A stage whose outputs came from the cache of another machine has no run in this log, and no line in the table.
    """
    alone = ("fix_data", "prepare_target", "sample_target", "extract_hiddens", "init_draft", "check_overfit")
    of_keys: dict[str, Iterable[str]] = {
        "train_draft": p.train_draft.checkpoints,
        "import_draft": p.import_draft.checkpoints,
        "replay_trees": p.replay_trees.checkpoints,
        "time_trees": p.time_trees.checkpoints,
        "prepare_prompts": p.benchmark.workloads,
    }
    names = [*alone, *(f"{stage}@{key}" for stage, keys in of_keys.items() for key in keys)]
    runs = {run.stage: run for run in stage_log.read_log()}
    return {
        name: {"seconds": runs[name].seconds, "gpus": runs[name].gpus, "joules": runs[name].joules}
        for name in names
        if name in runs
    }


def _read_weight_digests(p: schema.Params) -> dict[str, str]:
    stages = dict.fromkeys(p.train_draft.checkpoints, "train_draft")
    stages |= dict.fromkeys(p.import_draft.checkpoints, "import_draft")
    return {
        name: _read_whole_report(Path(f"results/train/{name}.json"), ["weights"], f"{stage}@{name}")["weights"]
        for name, stage in stages.items()
    }


def _read_training(checkpoint: str, parent: str) -> Row:
    stage = f"train_draft@{checkpoint}"
    place = Path(f"results/train/{checkpoint}.json")
    found = _read_whole_report(place, ("from", "epochs", "seconds"), stage)
    if found["from"] != parent:
        raise ValueError(f"{place} starts from {found['from']}, expected {parent}; run: dvc repro {stage}")
    for epoch in found["epochs"]:
        if missing := {"loss", "step_accuracy"} - set(epoch):
            raise ValueError(f"{place} has an epoch without {sorted(missing)}; run: dvc repro -f -s {stage}")
    return found


def _read_whole_report(place: Path, keys: Iterable[str], stage: str) -> Row:
    found: Row = atomic.read_json(place, made_by=stage)
    if missing := [k for k in keys if k not in found]:
        raise ValueError(f"{place} lacks {missing}; it is of another version: dvc repro -f -s {stage}")
    return found


if __name__ == "__main__":
    run_stage(main)
