"""report: cells, replays and every stage's own report -> the table, the plots, one page.   python -m stages.report

    python -m stages.report --launch   # print when to speculate, with which tree and which flags, without writing anything

Cells and replays are those that params.yaml lists, never a glob: files of removed ones stay on disk. docs/metrics.md
defines the columns. This file reads and writes; stages/reporting makes the page of what was read. matplotlib and Jinja2
are imported where they are used, since `--launch` must answer at once.
"""

import hashlib
import json
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

from stages.cells import prediction, replay_records, table, timing_grid, training_records
from stages.cells.cell import UNSUPPORTED, Cell
from stages.cells.prediction import EngineLaunch, PredictedSpeedup
from stages.cells.replay_records import GroupTau, ReplayedTree, TreeBucket
from stages.cells.table import ResultRow, TableLine
from stages.params import schema, stage_inputs
from stages.params.engines import TORCH
from stages.params.families import FAMILIES, DraftKind
from stages.params.section import ROOT_CHECKPOINT
from stages.params.target_files import GGUF_TYPES
from stages.params.tree_shape import parse_shape
from stages.reporting import angelslim_export, costs, inputs, page, timing_noise, verdict
from stages.reporting.families import Families
from stages.reporting.inputs import ReportInputs, ReportSettings
from stages.reporting.summary import METRICS_FILE, PAGE_FILE, TABLE_FILE, format_terminal_table, summarise_results
from stages.runtime import atomic
from stages.telemetry.run_stage import run_stage
from stages.telemetry.stage_log import StageRun, read_log

REPLAY_TABLE, ANSWERS_FOLDER = Path("results/replay.csv"), Path("results/answers")

# Stage -> the path of its own report in results/, and what it holds.
STAGE_REPORTS: dict[str, tuple[str, type[inputs.StageReport]]] = {
    "fix_data": ("fix_report", inputs.FixReport),
    "sample_target": ("sample_report", inputs.SampleReport),
    "extract_hiddens": ("hiddens_report", inputs.ExtractionReport),
    f"init_draft@{ROOT_CHECKPOINT}": (f"train/{ROOT_CHECKPOINT}", inputs.VocabularyReport),
    f"check_overfit@{ROOT_CHECKPOINT}": (f"train/{ROOT_CHECKPOINT}.overfit", inputs.OverfitReport),
}


def main(*arguments: str) -> None:
    if arguments == ("--launch",):
        launch = prediction.read_launch()
        lines = costs.format_launch_table(launch)
        if lines:
            text = atomic.read_json(METRICS_FILE, "report")["verdict"]["text"]
            lines.append(f"verdict, by what was measured first: {text}")
        unknown = (
            f"no serving engine was timed (time_cycles.engines: docs/cost.md), so nothing is advised for one; {PAGE_FILE} "
            "has what the torch engine's costs predict"
        )
        print(*lines or [unknown], sep="\n")
    elif arguments:
        raise ValueError(f"report takes --launch or nothing; found {' '.join(arguments)}")
    else:
        write_report(stage_inputs.read_params("report"))


def write_report(p: schema.Params) -> None:
    replayed = {name: ReplayedTree.read(name) for name in p.replay_trees.checkpoints}
    found = read_inputs(p, replayed)
    metrics = summarise_results(found)
    ResultRow.write_table([*found.rows, *found.replayed_rows])
    PredictedSpeedup.write_table(found.predicted.rows)
    prediction.write_launch(found.predicted.launch, found.predicted.costs)
    ReplayedTree.write_csv(REPLAY_TABLE, (tree for trees in replayed.values() for tree in trees))
    atomic.write_json(METRICS_FILE, metrics)
    angelslim_export.write_answer_files(
        ANSWERS_FOLDER,
        p.report.model_id or angelslim_export.make_model_id(p.target.model),
        angelslim_export.list_answer_sets(found.cells),
        p.report.analysis,
    )
    files = [ResultRow.TABLE, REPLAY_TABLE, METRICS_FILE]
    target = found.reports["sample_target"].get("target", p.target.model)
    atomic.write_text(PAGE_FILE, page.render_page(_get_settings(p, target), found, metrics, files))
    text = format_terminal_table(found, metrics)
    atomic.write_text(TABLE_FILE, f"{text}\n")
    print(*text.split("\n"), sep="\n")


def read_inputs(p: schema.Params, replayed: dict[str, list[ReplayedTree]]) -> ReportInputs:
    """Return everything that the report shows; `replayed` has each checkpoint's trees at every temperature."""
    trained = {
        name: training_records.read_training(name, segment.from_) for name, segment in p.train_draft.checkpoints.items()
    }
    imported = {name: training_records.read_import(name) for name in p.import_draft.checkpoints}
    families = _list_families(p, imported)
    cells = read_cells(p, families)
    replayable = _select_replayable(p, p.benchmark.workloads)
    lines = table.join_lines(cells, replayed, replayable)
    grids = _read_timing_grids(p)
    grid_remarks = timing_noise.find_grid_remarks(grids)
    timed = {name: trees for name, trees in replayed.items() if families[name].family.is_timed}
    predicted = _predict_speedups(p, lines, timed, replayable, grids, {remark.stage for remark in grid_remarks})
    reports = _read_stage_reports(p)
    return ReportInputs(
        cells=cells,
        lines=lines,
        replayed_rows=_build_replayed_rows(p, replayed, predicted.rows),
        replays={name: replay_records.select_temperature(trees, 0) for name, trees in replayed.items()},
        families=families,
        tree_statistics={name: TreeBucket.read(name) for name in p.replay_trees.checkpoints},
        reports=reports,
        trained=trained,
        predicted=predicted,
        stage_runs=_read_stage_runs(p),
        checkpoints={**trained, **imported},
        verdict=verdict.build_verdict(
            predicted.launch,
            predicted.rows,
            [line.row for line in lines],
            [*timing_noise.find_timing_remarks(lines), *grid_remarks],
            replayable,
            replayed,
            families,
            reports["sample_target"].get("warnings", ()),
            {name: GroupTau.read(name) for name in replayed},
            trained,
        ),
    )


def _get_settings(p: schema.Params, target: str) -> ReportSettings:
    values = json.dumps(p.model_dump(mode="json", by_alias=True), sort_keys=True)
    return ReportSettings(
        title=p.report.title,
        model=target,
        benchmark_trees=p.benchmark.trees,
        other_methods={name for name, segment in p.train_draft.checkpoints.items() if not segment.family.has_root},
        imported={name: source.model_dump() for name, source in p.import_draft.checkpoints.items()},
        params_digest=hashlib.sha256(values.encode()).hexdigest(),
    )


def _list_families(p: schema.Params, imported: dict[str, training_records.ImportReport]) -> dict[str, DraftKind]:
    """Return what is known of each checkpoint's draft; of imported ones by their reports."""
    trained = {name: segment.draft for name, segment in p.train_draft.checkpoints.items()}
    return trained | {name: DraftKind(FAMILIES[found.method], found.num_drafts) for name, found in imported.items()}


# Cells


def read_cells(p: schema.Params, families: Families) -> list[Cell]:
    """Return the cells that params.yaml lists: the torch engine's, and of each engine and workload the baseline before others.

    That a shape is of another family's kind is no news: `trees` is one list for all checkpoints. Raises ValueError naming a
    broken cell and the stage to run.
    """
    torch, served = p.benchmark, p.benchmark_served
    found = [Cell.read(TORCH.name, *names) for names in product(torch.torch_workloads, torch.checkpoints, torch.trees)]
    found = [cell for cell in found if cell.status != UNSUPPORTED or _is_of_family(cell, families)]
    for engine, workload in product(served.engines, served.workloads):
        for names in [(None, None), *product(served.checkpoints, served.trees)]:
            found.append(Cell.read(engine, workload, *names))
    return found


def _is_of_family(cell: Cell, families: Families) -> bool:
    return cell.shape.letter in families[str(cell.checkpoint)].family.shapes


def _select_replayable(p: schema.Params, names: Iterable[str]) -> list[str]:
    """Return the workloads of the eval split that stop at the end token: no replay has text beyond it."""
    workloads = p.benchmark.workloads
    return [name for name in names if workloads[name].prompts == "eval" and not workloads[name].ignore_eos]


def _build_replayed_rows(
    p: schema.Params, replayed: dict[str, list[ReplayedTree]], predicted: list[PredictedSpeedup]
) -> list[ResultRow]:
    """Return a row for each tree of benchmark.trees with each replayed checkpoint that has no cells."""
    guesses, rows = prediction.index_torch_predictions(predicted), []
    one_by_one = [name for name in p.benchmark.torch_workloads if p.benchmark.is_decoded_one_by_one(name)]
    for name in _select_replayable(p, one_by_one):
        for checkpoint in (key for key in replayed if key not in p.benchmark.checkpoints):
            sampling = p.benchmark.workloads[name]
            sampled_trees = replay_records.select_sampled_alike(
                replayed[checkpoint], sampling.temperature, sampling.top_p, sampling.top_k, p.benchmark.draft_sampling
            )
            by_shape = {tree.shape: tree for tree in sampled_trees}
            for tree in (by_shape.get(parse_shape(text)) for text in p.benchmark.trees):
                if tree:
                    guess = guesses.get((tree.temperature, checkpoint, tree.shape))
                    rows.append(table.build_replayed_row(name, tree, guess))
    return rows


def _read_timing_grids(p: schema.Params) -> list[timing_grid.TimingGrid]:
    """Return the grids of all timed engines and drafts."""
    timed = product(p.time_cycles.engines, p.time_cycles.checkpoints)
    return [grid for names in timed for grid in timing_grid.read_grids(*names, p.target.model)]


def _predict_speedups(
    p: schema.Params,
    lines: list[TableLine],
    replayed: dict[str, list[ReplayedTree]],
    replayable: list[str],
    grids: list[timing_grid.TimingGrid],
    doubted: set[str],
) -> costs.CostPrediction:
    """Return predicted speedups of every replayed tree, and how benchmark_served would start a server with the best."""
    from stages.engines import registry
    from stages.engines.protocol import describe_draft

    def describe_launch(name: str, row: PredictedSpeedup) -> EngineLaunch | None:
        shapes = p.find_first_of_shapes(row.checkpoint)
        config = next((cost.draft for cost in grids if p.find_first_of_shapes(cost.checkpoint) == shapes), None)
        engine, settings = registry.get(name), p.benchmark_served.get_server(name)
        if config is None or engine.explain_unsupported(row.shape, config):
            return None
        file = engine.name_draft_file(row.checkpoint, settings.quantised or GGUF_TYPES[p.target.dtype])
        draft, change = describe_draft(file, config, row.shape, settings.algorithm), engine.find_change(config)
        return EngineLaunch(engine.build_speculation_flags(draft, config), change.first_version if change else None)

    workloads, drafts = (
        [p.benchmark.workloads[name] for name in p.benchmark.torch_workloads],
        p.benchmark.draft_sampling,
    )
    temperatures = list(dict.fromkeys(float(workload.temperature) for workload in workloads)) or [0.0]
    return costs.predict_and_compare(
        grids, lines, replayed, replayable, p.find_first_of_shapes, temperatures, drafts, describe_launch, doubted
    )


# Reports and runs of other stages


def _read_stage_reports(p: schema.Params) -> dict[str, dict[str, Any]]:
    """Return the reports of the stages in the graph, by the stage's name without its key."""
    stages = [name for name in STAGE_REPORTS if "@" not in name or name.partition("@")[2] in p.init_draft.checkpoints]
    return {stage.partition("@")[0]: _read_stage_report(stage) for stage in stages}


def _read_stage_report(stage: str) -> dict[str, Any]:
    name, kind = STAGE_REPORTS[stage]
    return kind.read_json(Path(f"results/{name}.json"), stage).model_dump(exclude_unset=True)


def _read_stage_runs(p: schema.Params) -> dict[str, StageRun]:
    """Return what the log holds of each stage's last run, in the order of the graph.

    A stage whose outputs came from the cache of another machine has no run in this log, and no line in the table.
    """
    stages_without_key = ("fix_data", "prepare_target", "sample_target", "extract_hiddens")
    keys_by_stage: dict[str, Iterable[str]] = {
        "init_draft": p.init_draft.checkpoints,
        "check_overfit": p.init_draft.checkpoints,
        "train_draft": p.train_draft.checkpoints,
        "import_draft": p.import_draft.checkpoints,
        "replay_trees": p.replay_trees.checkpoints,
        "time_cycles": ["-".join(names) for names in product(p.time_cycles.engines, p.time_cycles.checkpoints)],
        "prepare_prompts": p.benchmark.workloads,
    }
    names = [*stages_without_key, *(f"{stage}@{key}" for stage, keys in keys_by_stage.items() for key in keys)]
    runs = {run.stage: run for run in read_log()}
    return {name: runs[name] for name in names if name in runs}


if __name__ == "__main__":
    run_stage(main)
