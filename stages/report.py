"""report: cells, replays and every stage's own report -> the table, the plots, one page.   python -m stages.report

    python -m stages.report --table    # the table once more, from what lies in results/, without redoing anything
    python -m stages.report --launch   # when to speculate, with what tree and which flags, likewise

Cells and replays are the lists in params.yaml, never a glob: removed ones stay on disk. The columns of the first table
are the seed's (EAGLE3 + Qwen3VL); docs/metrics.md defines each. Served cells are joined in results/served_table.py and shown
by reporting/served.py, costs and predictions (docs/cost.md) by reporting/costs.py, other methods (docs/methods.md) by
reporting/methods.py. `--table` must answer at once, so
matplotlib and Jinja2 are imported where they are used.
"""

import csv
import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from stages.literature import audit, own_beside_published, published
from stages.params import schema
from stages.reporting import costs, latencies, methods, plots, provenance, served
from stages.reporting import trees as of_trees
from stages.reporting.text import ONE_PROMPT, align_columns, format_interval, format_number, format_tree
from stages.results import method_records, prediction, replay_records, served_table, timing_grid, torch_records
from stages.results.served_records import TORCH_ENGINE
from stages.runtime import atomic
from stages.telemetry import stage_record

BENCHMARK_TABLE = Path("results/benchmark.csv")
REPLAY_TABLE = Path("results/replay.csv")
METRICS_FILE = Path("results/metrics.json")
PAGE_FILE = Path("results/report/index.html")
PAGE_TEMPLATE = Path(__file__).with_suffix(".html.j2")

NAME_COLUMNS = ("workload", "checkpoint", "tree", "num_steps", "topk", "num_draft_tokens")
METRIC_COLUMNS = (
    "tau", "tau_low", "tau_high", "accept_rate", "prefill_latency_s", "e2e_latency_s", "output_tok_s", "speedup",
    "speedup_low", "speedup_high", "identical_share",
)  # fmt: skip
BENCHMARK_COLUMNS = (*NAME_COLUMNS, *METRIC_COLUMNS, "replay_tau", "engine")

# What each stage's own report must hold; whatever else it holds is shown too.
STAGE_REPORTS = {
    "fix_data": (
        "fix_report",
        (
            "rows_in",
            "rows_out",
            "rules",
            "dropped_reasons",
            "examples",
            "seconds",
            "formats",
            "near_duplicates",
            "overlap",
            "hub",
        ),
    ),
    "sample_target": ("sample_report", ("rows_in", "rows_out", "dropped", "seconds", "sources", "preview")),
    "extract_hiddens": ("hiddens_report", ("rows_in", "rows_out", "dropped", "seconds")),
    "init_draft": ("vocab_report", ("draft_vocab_size", "target_vocab_size", "coverage_train", "coverage_eval")),
    "check_overfit": ("overfit_report", ("tau", "min_tau", "steps", "losses")),
}

Row = dict[str, Any]


@dataclass(frozen=True)
class ReportInputs:
    """Everything that was read, by what it is about."""

    cells: list[Row]  # as in stages/results/torch_records.py, in the order of params.yaml
    rows: list[Row]  # the same, as lines of benchmark.csv
    replays: dict[str, list[Row]]  # checkpoint -> its trees, replayed at temperature 0
    inside: dict[str, list[Row]]  # checkpoint -> what happens in the cycles of some trees, bucket by bucket
    reports: dict[str, Row]  # stage -> its own report
    trained: dict[str, Row]  # checkpoint -> its epochs
    served: list[Row]  # as in stages/results/served_records.py, each workload's baseline first
    lines: list[served_table.ServedTableLine]  # the same, point by point, beside their baselines
    predicted: costs.CostPrediction
    methods: list[Row]  # as reporting/methods.COLUMNS
    engines: list[Row]  # as methods.by_engine
    spent: dict[str, Row]  # stage -> what it took
    weights: dict[str, str]  # checkpoint -> digest of the draft's weights

    def flow(self) -> list[Row]:
        return [
            _count_stage_rows(stage, self.reports[stage]) for stage in ("fix_data", "sample_target", "extract_hiddens")
        ]


def main(*arguments: str) -> None:
    if arguments == ("--table",):
        print(_read_terminal_table())
        return
    if arguments == ("--launch",):
        print(
            "\n".join(costs.format_launch_table(prediction.read_launch()))
            or f"nothing is predicted; {PAGE_FILE} says why"
        )
        return
    if arguments:
        raise ValueError(f"report takes --table, --launch or nothing; found {' '.join(arguments)}")
    p = schema.load_params()
    cells = read_cells(p)
    served_cells = served_table.read_served_cells(*_get_served_axes(p))
    served_cells += served_table.read_torch_loads(
        _list_torch_workloads(p, alone=False), p.benchmark.checkpoints, p.benchmark.trees
    )
    replayed = {name: replay_records.read_replay(name) for name in p.replay_trees.checkpoints}
    rows = [_build_benchmark_row(c, replayed.get(c["checkpoint"], [])) for c in cells]
    inside = {name: replay_records.read_tree_statistics(name) for name in p.replay_trees.checkpoints}
    reports = {stage: _read_report(stage) for stage in STAGE_REPORTS}
    trained = {name: _read_training(name, segment.from_) for name, segment in p.train_draft.checkpoints.items()}
    lines = served_table.join_lines(served_cells, replayed, _list_replayable_workloads(p))
    greedy = {name: replay_records.select_greedy(trees) for name, trees in replayed.items()}
    guessed = _predict_speedups(p, cells, lines, replayed)
    of_methods = read_methods(p)
    compared = methods.build_method_rows(of_methods, trained)
    engines = methods.compare_engines(compared, cells, lines)
    took = _read_stage_records(p) | {f"benchmark_methods@{row['row']}": row for row in of_methods}
    found = ReportInputs(
        cells,
        rows,
        greedy,
        inside,
        reports,
        trained,
        served_cells,
        lines,
        guessed,
        compared,
        engines,
        took,
        _read_weight_digests(p),
    )
    metrics = summarise_results(found)

    atomic.write_csv(BENCHMARK_TABLE, BENCHMARK_COLUMNS, rows)
    served_table.write_served_table(lines)
    methods.write_method_table(compared)
    prediction.write_predictions(guessed.rows, guessed.launch, guessed.costs)
    replay_records.write_replay(REPLAY_TABLE, [tree for trees in replayed.values() for tree in trees])
    atomic.write_json(METRICS_FILE, metrics)
    atomic.write_text(PAGE_FILE, render_page(p, found, metrics))
    print(format_terminal_table(rows, [line.row for line in lines], metrics, guessed.launch, compared))


# What is read


def read_cells(p: schema.Params) -> list[Row]:
    """The cells params.yaml lists. Raises ValueError naming the file and what to run, where one is missing or foreign."""
    cells = []
    for workload in _list_torch_workloads(p, alone=True):
        for checkpoint in p.benchmark.checkpoints:
            for tree in p.benchmark.trees:
                found = torch_records.read_torch_cell(workload, checkpoint, tree)
                again = f"run: dvc repro -f -s benchmark@{workload}-{checkpoint}-{tree}"
                place = torch_records.locate_torch_cell(workload, checkpoint, tree)
                if missing := set(torch_records.METRICS) - set(found["metrics"]):
                    raise ValueError(f"{place} lacks the metrics {sorted(missing)}; {again}")
                if (inside := [found[k] for k in NAME_COLUMNS[:3]]) != [workload, checkpoint, tree]:
                    raise ValueError(f"{place} holds the cell {'-'.join(inside)}; {again}")
                cells.append(found)
    return cells


def read_methods(p: schema.Params) -> list[Row]:
    """The rows of the table of methods that params.yaml lists."""
    listed = p.benchmark_methods
    trained = [method_records.read_method_cell(row, f"benchmark_methods@{row}") for row in listed.with_draft]
    return [
        *trained,
        *(method_records.read_method_cell(row, f"benchmark_methods_baseline@{row}") for row in listed.without_draft),
    ]


def _list_torch_workloads(p: schema.Params, alone: bool) -> list[str]:
    """The torch engine's workloads that are answered prompt by prompt, or those that are measured in loads."""
    every = p.benchmark.workloads
    return [name for name in p.benchmark.torch_workloads if every[name].is_sequential == alone]


def _get_served_axes(p: schema.Params) -> tuple[list[str], list[str], list[str]]:
    return p.benchmark_served.workloads, p.benchmark_served.checkpoints, p.benchmark_served.trees


def _list_replayable_workloads(p: schema.Params) -> set[str]:
    """Workloads of the eval split whose answers end where they end: beyond the end is text that no replay has."""
    every, loaded = p.benchmark.workloads, [*p.benchmark_served.workloads, *_list_torch_workloads(p, alone=False)]
    return {name for name in loaded if every[name].prompts == "eval" and not every[name].ignore_eos}


def _predict_speedups(
    p: schema.Params, cells: list[Row], lines: list[served_table.ServedTableLine], replayed: dict[str, list[Row]]
) -> costs.CostPrediction:
    """Every replayed tree's speedup by what cycles cost; flags are those benchmark_served would start a server with."""
    from stages.serving import engine_flags  # with a client of HTTP, which the terminal's table can do without

    timed = [timing_grid.read_timing_grid(name, p.target.model) for name in p.time_trees.checkpoints]

    def flags(engine: str, row: Row) -> list[str] | None:
        config = next((one["draft"] for one in timed if p.have_same_shapes(one["checkpoint"], row["checkpoint"])), None)
        shape = row["steps"], row["topk"], row["tokens"]
        if config is None or engine_flags.explain_unsupported(engine, *shape, config):
            return None
        folder = f"drafts/{row['checkpoint']}/draft"
        return engine_flags.build_speculation_flags(
            engine, engine_flags.ServedDraft(folder, p.benchmark_served.server.algorithm, *shape), config
        )

    every = p.benchmark.workloads
    temperatures = dict.fromkeys(float(every[name].temperature) for name in p.benchmark.torch_workloads) or {0.0: None}
    of_servers = [
        line for line in lines if line.cell["engine"] != TORCH_ENGINE
    ]  # the torch engine's cost is its timing grid
    return costs.predict_and_compare(timed, of_servers, cells, replayed, p.have_same_shapes, list(temperatures), flags)


def _read_report(stage: str) -> Row:
    name, keys = STAGE_REPORTS[stage]
    return _read_whole_report(Path(f"results/{name}.json"), keys, stage)


def _read_stage_records(p: schema.Params) -> dict[str, Row]:
    """Of every stage but the cells, which hold their own, and this one, in the order of the graph."""
    alone = ("fix_data", "prepare_target", "sample_target", "extract_hiddens", "init_draft", "check_overfit")
    of_keys: dict[str, Iterable[str]] = {
        "train_draft": p.train_draft.checkpoints,
        "import_draft": p.import_draft.checkpoints,
        "replay_trees": p.replay_trees.checkpoints,
        "time_trees": p.time_trees.checkpoints,
        "prepare_prompts": p.benchmark.workloads,
    }
    found = {stage: stage_record.read_record(stage) for stage in alone}
    return found | {
        f"{stage}@{key}": stage_record.read_record(stage, key) for stage, keys in of_keys.items() for key in keys
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


# What is made of it


def _build_benchmark_row(c: Row, trees: list[Row]) -> Row:
    """One line of benchmark.csv. Floats keep every bit, so that tau can be compared between machines."""
    replayed = replay_records.find_replayed_tau(trees, c)
    measured = {k: "" if (value := c["metrics"][k]) is None else float(value) for k in METRIC_COLUMNS}
    rest = {"replay_tau": "" if replayed is None else replayed, "engine": c["engine"]}
    return {k: c[k] for k in NAME_COLUMNS} | measured | rest


def _count_stage_rows(stage: str, report: Row) -> Row:
    """Rows in, out and dropped by reason. What doesn't add up is shown, not hidden and not fatal: the work is done."""
    reasons: dict[str, int] = report["dropped_reasons"] if stage == "fix_data" else report["dropped"]
    lost = report["rows_in"] - report["rows_out"] - sum(reasons.values())
    return {"stage": stage, "in": report["rows_in"], "out": report["rows_out"], "reasons": reasons, "unaccounted": lost}


def summarise_results(found: ReportInputs) -> Row:
    """results/metrics.json. The best checkpoint has the highest replayed tau, averaged over all trees of the grid."""
    means = {name: fmean(tree["tau"] for tree in trees) for name, trees in found.replays.items()}
    checkpoints: dict[str, Row] = {}
    for name, trees in found.replays.items():
        top = max(trees, key=lambda tree: tree["tau"])
        best = {"tree": f"t{top['steps']}_{top['topk']}_{top['tokens']}", "tau": top["tau"]}
        checkpoints[name] = {"mean_replay_tau": means[name], "best_replayed": best}
        if cells := [row for row in found.rows if row["checkpoint"] == name]:
            for metric in ("tau", "speedup"):
                first = max(cells, key=lambda row: row[metric])
                checkpoints[name][f"best_by_{metric}"] = {k: first[k] for k in ("workload", "tree", "tau", "speedup")}
    return {
        "best_checkpoint": max(means, key=lambda name: means[name]),
        "checkpoints": checkpoints,
        "identical_share_min": min((s for row in found.rows if (s := row["identical_share"]) != ""), default=None),
        "definitions": torch_records.DEFINITIONS,
        "cells": len(found.rows),
        "replayed_trees": sum(map(len, found.replays.values())),
        "rows_unaccounted": sum(abs(line["unaccounted"]) for line in found.flow()),
    } | ({"served": served.summarise_served([line.row for line in found.lines])} if found.lines else {})


# The terminal's table

BENCHMARK_HEADINGS = (
    ("Tree_structure", ""), ("prefill_latency", "(s)"), ("spec_accept_rate", "(%)"), ("e2e_latency", "(s)"),
    ("compress ratio", "(tau)"), ("95%", "interval"), ("speedup", ""), ("95%", "interval"), ("identical", "(%)"),
)  # fmt: skip


def format_terminal_table(
    rows: list[Row], served_rows: list[Row], metrics: Row, launch: list[Row], compared: list[Row]
) -> str:
    """Plain aligned text, the seed's columns first; `rows` as in benchmark.csv, as numbers or as text, then served.csv's, then
    methods.csv's, then what to launch.
    """
    lines = []
    for workload, checkpoint in dict.fromkeys((row["workload"], row["checkpoint"]) for row in rows):
        mine = [row for row in rows if (row["workload"], row["checkpoint"]) == (workload, checkpoint)]
        mark = ", the best checkpoint by tau" if checkpoint == metrics["best_checkpoint"] else ""
        lines += [
            f"{workload}, checkpoint {checkpoint}{mark}",
            *align_columns([*zip(*BENCHMARK_HEADINGS, strict=True), *map(_format_benchmark_row, mine)]),
        ]
        plain = max(float(row["output_tok_s"]) / float(row["speedup"]) for row in mine)
        lines += [f"plain decoding, at its best: {plain:.1f} tokens/s", ""]
    lines += served.format_served_table(served_rows)
    lines += methods.format_method_table(compared)
    lines += [*costs.format_launch_table(launch), ""] if launch else []
    if lost := metrics["rows_unaccounted"]:
        lines += [
            f"warning: {lost} rows are neither out nor dropped; see 'What happened to the rows' in {PAGE_FILE}",
            "",
        ]
    return "\n".join([*lines, f"tau by {metrics['definitions']}; plots and provenance: {PAGE_FILE}"])


def _format_benchmark_row(row: Row) -> tuple[str, ...]:
    n = {k: float(row[k]) for k in METRIC_COLUMNS if row[k] != ""}
    interval, speedups = (
        format_interval(n.get(f"{k}_low"), n.get(f"{k}_high"), ONE_PROMPT) for k in ("tau", "speedup")
    )
    return (
        format_tree(row["tree"]), f"{n['prefill_latency_s']:.3f}", f"{100 * n['accept_rate']:.1f}",
        f"{n['e2e_latency_s']:.3f}", f"{n['tau']:.2f}", interval, f"{n['speedup']:.2f}x", speedups,
        format_number(n.get("identical_share"), 0, 100),
    )  # fmt: skip


def _read_terminal_table() -> str:
    if not BENCHMARK_TABLE.exists():
        raise ValueError(f"{BENCHMARK_TABLE} not found; run: dvc repro report")
    with BENCHMARK_TABLE.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    metrics = atomic.read_json(METRICS_FILE, made_by="report")
    return format_terminal_table(
        rows, served_table.read_served_table(), metrics, prediction.read_launch(), methods.read_method_table()
    )


# The page


def render_page(p: schema.Params, found: ReportInputs, metrics: Row) -> str:
    """The page as one text: no script, no font, no picture from elsewhere."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    best, replays = metrics["best_checkpoint"], found.replays
    fixed = found.reports["fix_data"]
    others = [name for name in replays if name != best]
    rest = sorted(others, key=lambda name: -metrics["checkpoints"][name]["mean_replay_tau"])
    environment = Environment(
        loader=FileSystemLoader(PAGE_TEMPLATE.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "tree": format_tree,
        "scalars": _select_scalars,
        "figure": format_number,
        "span": format_interval,
        "load": served.format_load,
        "at": served.describe_load,
        "duration": provenance.format_duration,
        "energy": provenance.format_energy,
    }
    return environment.get_template(PAGE_TEMPLATE.name).render(
        title=p.report.title,
        model=p.target.model,
        metrics=metrics,
        groups=[
            _build_result_group(found, *names)
            for names in dict.fromkeys((r["workload"], r["checkpoint"]) for r in found.rows)
        ],
        trees=len(replays[best]),
        heats=[_build_heatmap(replays[best], budget) for budget in _choose_budgets(replays[best])],
        duel=_compare_checkpoints(replays[best], replays[rest[0]]) | {"best": best, "other": rest[0]} if rest else None,
        plots=_draw_plots(p, found, best, rest),
        inside=_build_trees_part(p, found, best),
        histograms=_select_histograms(_select_checkpoint_cells(found, best)),
        served=_build_served_part(found) if found.lines else None,
        costs=costs.build_costs_page(found.predicted, best),
        methods=methods.build_methods_page(found.methods, found.engines),
        latencies=[
            *latencies.summarise_torch_cells(_select_checkpoint_cells(found, best)),
            *latencies.summarise_served_lines(found.lines),
        ],
        took=provenance.summarise_stage_records(
            found.spent, [*found.cells, *(c for c in found.served if c["status"] == "ran")]
        ),
        trained=found.trained,
        imported={name: item.model_dump() for name, item in p.import_draft.checkpoints.items()},
        flow=found.flow(),
        reports=found.reports,
        diffs={rule: _diff_lines(e["before"], e["after"]) for rule, e in fixed["examples"].items()},
        near=[_diff_lines(e["first"], e["second"]) for e in (fixed["near_duplicates"] or {}).get("examples", [])],
        provenance=_build_provenance(p, found),
        published=_pair_with_published(p.target.model, _select_best_cells(found, best)),
        audited=_audit_other_publications(p.target.model),
    )


def _select_checkpoint_cells(found: ReportInputs, best: str) -> list[Row]:
    return [c for c in found.cells if c["checkpoint"] == best] or found.cells


def _select_best_cells(found: ReportInputs, best: str) -> list[Row]:
    """The best checkpoint's cells, or all where it has none; then likewise what was served, in the same shape."""
    drafted = {line.cell["checkpoint"] for line in found.lines}
    shown = {best, None} if best in drafted else drafted
    return [
        *_select_checkpoint_cells(found, best),
        *own_beside_published.convert_served_points(line for line in found.lines if line.cell["checkpoint"] in shown),
    ]


def _build_trees_part(p: schema.Params, found: ReportInputs, best: str) -> Row:
    """The page's part on trees: reporting/trees.py says what each is."""
    replayed, inside = found.replays[best], found.inside[best]
    steps = of_trees.choose_steps(replayed, p.benchmark.trees)
    drawn = {
        "front": partial(of_trees.draw_front, trees=replayed),
        "at_steps": partial(plots.draw_tau_by_tokens, trees=replayed, steps=steps),
    }
    table = of_trees.build_statistics_table(inside)
    if table:
        lengths = partial(of_trees.draw_tau_by_length, inside=inside)
        drawn |= {
            "context": partial(lengths, what="context", label="tokens before the drafts, from"),
            "answer": partial(lengths, what="answer", label="place in the answer, from"),
            "kinds": partial(of_trees.draw_token_classes, inside=inside),
            "chances": partial(of_trees.draw_calibration, inside=inside),
        }
    return {
        "steps": steps,
        "plots": {name: plots.render_svg(draw) for name, draw in drawn.items()},
        "table": table,
        "fewest": of_trees.MIN_BUCKET_COUNT,
    }


def _build_served_part(found: ReportInputs) -> Row:
    """The page's parts on served cells: reporting/served.py says what each is."""
    rows = [line.row for line in found.lines]
    sweeps = served.build_sweeps(rows)
    return {
        "groups": served.group_tables(rows),
        "sweeps": [
            s | {"svg": plots.render_svg(partial(plots.draw_speedups, **s["plot"])) if s["plot"] else None}
            for s in sweeps
        ],
        "memory": served.tabulate_memory(found.served),
        "quality": served.list_graded_points(found.lines),
        "engines": served.list_engine_figures(found.lines),
        "warnings": served.list_warnings(found.lines),
        "servers": served.list_server_commands(found.served),
        "surroundings": _group_machines(found.served),
        "seconds": sum(c["seconds"] for c in found.served),
        "off": served.explain_tau_gap,
        "server": served.describe_decoding,
        "tau_span": served.tau_span,
        "speedup_span": served.speedup_span,
        "title": served.format_group_title,
        "many": served.MAX_TABLE_LINES,
    }


def _pair_with_published(model: str, cells: list[Row]) -> list[Row]:
    """What others printed of this target: each publication with our numbers beside, and what its own say of each other."""
    publications = published.read_publications()
    mine = own_beside_published.select_target_rows(publications, model)
    findings = audit.audit_publications(publications) if mine else []
    return [
        {
            "publication": publications[name],
            "numbers": len(rows),
            "lines": list(own_beside_published.pair_rows(rows, cells)),
            "findings": [finding for finding in findings if finding.what == name],
        }
        for name, rows in mine.items()
    ]


def _audit_other_publications(model: str) -> list[Row]:
    """What the publications of other targets say of themselves: in the order of published/, with what the audit finds."""
    publications = published.read_publications()
    mine, findings = (
        own_beside_published.select_target_rows(publications, model),
        audit.audit_publications(publications),
    )
    return [
        {"publication": publication, "findings": of}
        for name, publication in publications.items()
        if name not in mine and (of := [finding for finding in findings if finding.what == name])
    ]


def _build_result_group(found: ReportInputs, workload: str, checkpoint: str) -> Row:
    """One table of results, with the fastest plain decoding seen beside its trees."""
    cells, lines = (
        [x for x in some if (x["workload"], x["checkpoint"]) == (workload, checkpoint)]
        for some in (found.cells, found.rows)
    )
    fastest = max(cells, key=lambda c: c["metrics"]["baseline_output_tok_s"])
    plain = {
        "prefill": fmean(prompt["baseline_prefill_latency_s"] for prompt in fastest["prompts"]),
        "e2e": fmean(prompt["baseline_e2e_latency_s"] for prompt in fastest["prompts"]),
        "tok_s": fastest["metrics"]["baseline_output_tok_s"],
    }
    top = {k: max(line[k] for line in lines) for k in ("tau", "speedup")}
    shared = {k: fastest[k] for k in ("workload", "checkpoint", "temperature", "engine")}
    return shared | {"prompts": len(fastest["prompts"]), "rows": lines, "plain": plain, "top": top}


def _choose_budgets(trees: list[Row]) -> list[int]:
    """The seed's two budgets where the grid has them, else its largest."""
    grid = {tree["tokens"] for tree in trees if tree["topk"] > 1} or {tree["tokens"] for tree in trees}
    return sorted(grid & {16, 32}) or [max(grid)]


def _build_heatmap(trees: list[Row], budget: int) -> Row:
    """tau by steps and topk, each with as many draft tokens as it can use of `budget`; `weight` in 0..1 is its colour."""
    best: dict[tuple[int, int], Row] = {}
    for tree in sorted((t for t in trees if t["tokens"] <= budget), key=lambda t: t["tokens"]):
        best[tree["steps"], tree["topk"]] = dict(tree)
    low, high = min(t["tau"] for t in best.values()), max(t["tau"] for t in best.values())
    for tree in best.values():
        tree["weight"] = (tree["tau"] - low) / ((high - low) or 1)
    steps, topks = sorted({s for s, _ in best}), sorted({k for _, k in best})
    lines = [{"topk": k, "cells": [best.get((s, k)) for s in steps]} for k in topks]
    return {"budget": budget, "steps": steps, "lines": lines, "high": high}


def _compare_checkpoints(best: list[Row], other: list[Row]) -> Row:
    """On how many trees the best checkpoint is really ahead of the next one."""
    pairs = _pair_trees(best, other)
    return {"of": len(pairs), "won": sum(x > y for x, y, _ in pairs), "lost": sum(x < y for x, y, _ in pairs)}


def _pair_trees(best: list[Row], other: list[Row]) -> list[tuple[float, float, int]]:
    """(tau of best, tau of other, topk) for each tree that both have."""
    theirs = {(t["steps"], t["topk"], t["tokens"]): t["tau"] for t in other}
    keyed = [((t["steps"], t["topk"], t["tokens"]), t) for t in best]
    return [(t["tau"], theirs[key], t["topk"]) for key, t in keyed if key in theirs]


def _select_histograms(cells: list[Row]) -> list[Row]:
    """How many drafts a verify cycle accepted, for at most four telling trees."""
    chains = [c for c in cells if c["topk"] == 1]
    picks = [
        ("highest tau", max(cells, key=lambda c: c["metrics"]["tau"], default=None)),
        ("fastest", max(cells, key=lambda c: c["metrics"]["speedup"], default=None)),
        ("longest chain", max(chains, key=lambda c: c["num_steps"], default=None)),
        ("lowest tau", min(cells, key=lambda c: c["metrics"]["tau"], default=None)),
    ]
    shown: dict[tuple[str, str], Row] = {}
    for why, c in picks:
        if not c or not (cycles := sum(c["histogram"])):
            continue
        if old := shown.get(key := (c["workload"], c["tree"])):
            old["why"] += f", {why}"
            continue
        bars = [count / cycles for count in c["histogram"]]
        shown[key] = {"why": why, "cycles": cycles, "bars": bars, "most": max(bars), "tau": c["metrics"]["tau"]}
        shown[key] |= {k: c[k] for k in ("workload", "checkpoint", "tree")}
    return list(shown.values())


def _diff_lines(before: str, after: str) -> list[tuple[str, str]]:
    """(" ", "-" or "+", line) with two lines around each change, and "@" where lines are left out between changes."""
    lines = difflib.unified_diff(before.split("\n"), after.split("\n"), lineterm="", n=2)
    return [(line[0], line[1:]) for line in lines][3:]  # less its heading: two names and the first place


def _select_scalars(report: Row) -> Row:
    return {k: v for k, v in report.items() if isinstance(v, int | float | str) and k not in ("rows_in", "rows_out")}


def _build_provenance(p: schema.Params, found: ReportInputs) -> Row:
    values = json.dumps(p.model_dump(mode="json", by_alias=True), sort_keys=True)
    return {
        "machines": _group_machines(found.cells),
        "seeds": sorted({c["seed"] for c in [*found.cells, *found.served]}),
        "seconds": sum(c["seconds"] for c in found.cells),
        "digest": hashlib.sha256(values.encode()).hexdigest(),
        "commit": provenance.read_commit(),
        "versions": provenance.list_installed_versions("aerie", "matplotlib", "jinja2"),
        "target": next((one["target"] for one in found.predicted.costs if one["target"]), None),
        "weights": found.weights,
        "tables": provenance.digest_each_file(
            [BENCHMARK_TABLE, REPLAY_TABLE, METRICS_FILE, *filter(Path.exists, [served_table.SERVED_TABLE])]
        ),
    }


def _group_machines(cells: list[Row]) -> list[Row]:
    """What the cells were measured on; more than one line means that their latencies don't compare."""
    words = Counter(json.dumps([c["hardware"], c["versions"], c["engine"]], sort_keys=True) for c in cells)
    return [
        {"cells": count, "hardware": hardware, "versions": versions, "engine": engine}
        for text, count in words.most_common()
        for hardware, versions, engine in [json.loads(text)]
    ]


def _draw_plots(p: schema.Params, found: ReportInputs, best: str, rest: list[str]) -> dict[str, str]:
    rivals = {name for name, segment in p.train_draft.checkpoints.items() if segment.other_method}
    replays, trained = found.replays, {name: t for name, t in found.trained.items() if name not in rivals}
    drawn = {
        "tokens": partial(plots.draw_tau_by_tokens, trees=replays[best]),
        "loss": partial(plots.draw_loss, trained=trained),
        "accuracy": partial(plots.draw_accuracy, trained=trained),
    }
    if rest:
        pairs = _pair_trees(replays[best], replays[rest[0]])
        drawn["duel"] = partial(plots.draw_checkpoint_duel, best=best, other=rest[0], pairs=pairs)
    return {name: plots.render_svg(draw) for name, draw in drawn.items()}


if __name__ == "__main__":
    schema.run_stage(main)
