"""The report's page: one HTML text without scripts, fonts or pictures from elsewhere. Its templates are in templates/."""

import base64
import difflib
import hashlib
import shlex
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from stages.cells.cell import RAN
from stages.cells.table import ResultRow, TableLine
from stages.cells.training_records import list_held_out
from stages.params.tree_shape import Load
from stages.params.units import format_duration
from stages.reporting import costs, families, latencies, overview, plots, provenance, served, tables, trees
from stages.reporting.inputs import ReportInputs, ReportSettings
from stages.reporting.served import holds_one
from stages.reporting.summary import ResultSummary, choose_shown_checkpoint, get_badge
from stages.reporting.text import format_gib, format_interval, format_number, format_tree, mark_times
from stages.reporting.verdict import MAX_WARNINGS

TEMPLATES = Path(__file__).parent / "templates"
PageContent = dict[str, Any]  # variables of templates/page.html.j2


def render_page(settings: ReportSettings, found: ReportInputs, metrics: ResultSummary, files: Iterable[Path]) -> str:
    """Return the page. `files` are those whose digests it shows."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # the terminal's table does without
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"Load": Load, "row_headings": _list_headings, "holds_one": holds_one}
    environment.filters |= {
        "advice": costs.format_advice,
        "command": shlex.join,
        "cost": costs.describe_cost,
        "needs": costs.describe_needs,
        "decoding": tables.describe_decoding,
        "duration": format_duration,
        "energy": provenance.format_energy,
        "engine_figures": served.format_figures,
        "figure": format_number,
        "gib": format_gib,
        "load": Load.shorten,
        "scalars": _select_scalars,
        "span": format_interval,
        "tau_gap": tables.explain_tau_gap,
        "columns": lambda row: mark_times(tables.format_columns(row, on_page=True)),
        "unsupported": tables.describe_unsupported,
        "title_of": tables.format_title,
        "tree": format_tree,
    }
    best, shown = metrics["best_checkpoint"], choose_shown_checkpoint(found, metrics)
    ran, fixed = [cell for cell in found.cells if cell.status == RAN], found.reports["fix_data"]
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    return environment.get_template("page.html.j2").render(
        **vars(settings),
        **vars(found),
        metrics=metrics,
        max_warnings=MAX_WARNINGS,
        badge=get_badge(metrics),
        best=best,
        shown=shown,
        script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        provenance=provenance.build_provenance(settings, found, files),
        **_build_results(settings, found, shown),
        **_build_replays(settings, found, metrics, shown),
        flow=found.count_rows(),
        diffs={rule: diff_lines(e["before"], e["after"]) for rule, e in fixed["examples"].items()},
        costs=costs.build_costs_page(found.predicted),
        no_interval=costs.NO_INTERVAL,
        took=provenance.summarise_stage_runs(found.stage_runs, ran),
    )


def _build_results(settings: ReportSettings, found: ReportInputs, shown: str | None) -> PageContent:
    """Return what the parts on measured cells show, and on trees that were replayed instead; pictures are of `shown`."""
    lines = found.select_checkpoint_lines(shown)  # of loads alone there are none
    groups = tables.group_in_turns(found.lines, found.replayed_rows)
    # The summary shows one that was measured, if any was, and that of the checkpoint `shown` where it has one.
    main = max(groups, key=lambda group: (bool(group.cells), group.checkpoint == shown), default=None)
    return {
        "main": main,
        "others": [group for group in groups if group is not main],
        "overview": shown in found.replays
        and overview.build_overview(
            found.replays[shown],
            settings.benchmark_trees,
            next((group.rows for group in groups if group.checkpoint == shown), []),
            found.predicted.rows,
        ),
        "served": served.build_served_page(found.lines),
        "latencies": latencies.summarise_latencies([*lines, *(line for line in found.lines if not line.row.in_turns)]),
        "histograms": _select_histograms(lines),
    }


def _build_replays(
    settings: ReportSettings, found: ReportInputs, metrics: ResultSummary, shown: str | None
) -> PageContent:
    """Return what the parts on training and on replayed trees show; the next best checkpoint is set against the best.

    The trees are those of `shown`. Plots that need more than was run are None.
    """
    best, means = metrics["best_checkpoint"], metrics["checkpoints"]
    shared = families.select_shared_trees(found.replays)
    others = sorted(found.replays.keys() - {best}, key=lambda name: -means[name]["mean_replay_tau"])
    shown_trees, duel = found.replays.get(shown or "", []), None
    trained = {name: run for name, run in found.trained.items() if name not in settings.other_methods}
    curves = sorted(list_held_out(found.trained))
    by_family = families.choose_family_lines(found.replays, found.families, found.predicted.known)
    drawn: dict[str, tuple[str, plots.DrawPlot]] = {
        "loss": ("Training loss per epoch", partial(plots.draw_loss, trained=trained)),
        "accuracy": ("Accuracy per training-time-test step", partial(plots.draw_accuracy, trained=trained)),
    }
    if curves:
        drawn["held_out"] = ("Accept length on eval answers by epoch", partial(plots.draw_held_out, curves=curves))
    if shown_trees:
        drawn["tokens"] = ("tau against num_draft_tokens", partial(plots.draw_tau_by_tokens, trees=shown_trees))
    if by_family:
        fronts = partial(families.draw_fronts, replays=found.replays, families=found.families)
        drawn["families"] = ("tau against num_draft_tokens, by family", fronts)
    other = next(iter(others), None)
    theirs = {tree.shape: tree.tau for tree in found.replays[other]} if other else {}
    pairs = [(t.tau, theirs[t.shape]) for t in found.replays.get(best, []) if t.shape in theirs]
    if other and pairs:  # a block draft may share no tree with EAGLE-3
        won, lost = sum(x > y for x, y in pairs), sum(x < y for x, y in pairs)
        duel = {"other": other, "of": len(pairs), "won": won, "lost": lost}
    return {
        "trees": len(shown_trees),
        "compared_trees": len(shared.get(best, ())),
        "by_family": by_family,
        "heats": [trees.build_heatmap(shown_trees, budget) for budget in trees.choose_budgets(shown_trees)],
        "duel": duel,
        "held_out": curves,
        "plots": {name: plots.render_svg(draw, title) for name, (title, draw) in drawn.items()},
        "inside": bool(shown_trees)
        and trees.build_trees_page(shown_trees, found.tree_statistics[shown or ""], settings.benchmark_trees),
    }


# Measured cells


def _list_headings(in_turns: bool) -> list[tuple[str, str]]:
    """Return the heads of a table of cells."""
    return [column.heading for column in ResultRow.list_view(in_turns, on_page=True).values() if column.heading]


def _select_histograms(lines: list[TableLine]) -> list[tuple[TableLine, list[str]]]:
    """Return at most four representative trees of which cycles were counted, and why each is shown."""
    counted = [line for line in lines if line.point and line.point.acceptance and any(line.point.acceptance.histogram)]
    chains = [line for line in counted if line.row.topk == 1]
    faster = [line for line in counted if line.row.is_faster]
    picks = [
        ("highest tau", max(counted, key=lambda line: line.row.tau or 0.0, default=None)),
        ("fastest", max(faster, key=lambda line: line.row.speedup or 0.0, default=None)),
        ("longest chain", max(chains, key=lambda line: line.row.shape.num_steps, default=None)),
        ("lowest tau", min(counted, key=lambda line: line.row.tau or 0.0, default=None)),
    ]
    shown: dict[int, tuple[TableLine, list[str]]] = {}
    for reason, line in picks:
        if line:
            shown.setdefault(id(line), (line, []))[1].append(reason)
    return list(shown.values())


# Text


def diff_lines(before: str, after: str) -> list[tuple[str, str]]:
    """Return (" ", "-" or "+", line), two lines around each change, and ("@", …) where lines between changes are left out."""
    lines = difflib.unified_diff(before.split("\n"), after.split("\n"), lineterm="", n=2)
    return [(line[0], line[1:]) for line in lines][3:]  # without the heading: two file names and the first position


def _select_scalars(report: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in report.items() if isinstance(v, int | float | str) and k not in ("rows_in", "rows_out")}
