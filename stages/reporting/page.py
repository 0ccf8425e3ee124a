"""The report's page: one HTML text without scripts, fonts or pictures from elsewhere. Its templates are in templates/."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from stages.literature import own_beside_published, published
from stages.reporting import costs, latencies, methods, plots, provenance, served, trees
from stages.reporting.inputs import ReportInputs, ReportSettings
from stages.reporting.text import format_interval, format_number, format_tree

Row = dict[str, Any]

TEMPLATES = Path(__file__).parent / "templates"


def render_page(settings: ReportSettings, found: ReportInputs, metrics: Row, tables: Iterable[Path]) -> str:
    """Return the page. `metrics` as in results/metrics.json; `tables` are the files whose digests it shows."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # the terminal's table does without

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
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
    best = metrics["best_checkpoint"]
    return environment.get_template("page.html.j2").render(
        title=settings.title,
        model=settings.model,
        metrics=metrics,
        provenance=provenance.build_provenance(settings, found, tables),
        **_build_results(found, best),
        **_build_replays(settings, found, metrics),
        **_build_data(found),
        costs=costs.build_costs_page(found.predicted, best),
        methods=methods.build_methods_page(found.methods, found.engines),
        took=provenance.summarise_stage_runs(
            found.stage_runs, [*found.cells, *(cell for cell in found.served if cell["status"] == "ran")]
        ),
        trained=found.trained,
        imported=settings.imported,
        published=_pair_with_published(settings.model, _select_best_cells(found, best)),
    )


def _build_results(found: ReportInputs, best: str) -> Row:
    """Return what the parts on measured cells show."""
    cells = found.select_checkpoint_cells(best)
    names = dict.fromkeys((row["workload"], row["checkpoint"]) for row in found.rows)
    return {
        "groups": [_build_result_group(found, workload, checkpoint) for workload, checkpoint in names],
        "served": served.build_served_page(found.served, found.lines) if found.lines else None,
        "latencies": [*latencies.summarise_torch_cells(cells), *latencies.summarise_served_lines(found.lines)],
        "histograms": _select_histograms(cells),
    }


def _build_replays(settings: ReportSettings, found: ReportInputs, metrics: Row) -> Row:
    """Return what the parts on replayed trees and on training show; the next best checkpoint is set against the best."""
    best = metrics["best_checkpoint"]
    others = sorted(
        (name for name in found.replays if name != best),
        key=lambda name: -metrics["checkpoints"][name]["mean_replay_tau"],
    )
    best_trees, other = found.replays[best], others[0] if others else None
    drawn = {"tokens": partial(plots.draw_tau_by_tokens, trees=best_trees)}
    trained = {name: run for name, run in found.trained.items() if name not in settings.other_methods}
    drawn |= {
        "loss": partial(plots.draw_loss, trained=trained),
        "accuracy": partial(plots.draw_accuracy, trained=trained),
    }
    if other:
        pairs = trees.pair_trees(best_trees, found.replays[other])
        drawn["duel"] = partial(plots.draw_checkpoint_duel, best=best, other=other, pairs=pairs)
    return {
        "trees": len(best_trees),
        "heats": [trees.build_heatmap(best_trees, budget) for budget in trees.choose_budgets(best_trees)],
        "duel": trees.compare_checkpoints(best, other, found.replays) if other else None,
        "plots": {name: plots.render_svg(draw) for name, draw in drawn.items()},
        "inside": trees.build_trees_page(best_trees, found.tree_statistics[best], settings.benchmark_trees),
    }


def _build_data(found: ReportInputs) -> Row:
    """Return what the part on rows of data shows."""
    fixed = found.reports["fix_data"]
    near_duplicates = (fixed["near_duplicates"] or {}).get("examples", [])
    return {
        "flow": found.count_rows(),
        "reports": found.reports,
        "diffs": {rule: diff_lines(e["before"], e["after"]) for rule, e in fixed["examples"].items()},
        "near": [diff_lines(e["first"], e["second"]) for e in near_duplicates],
    }


# Measured cells


@dataclass(frozen=True)
class PlainDecoding:
    """Means over prompts of the fastest plain decoding of a group."""

    prefill_s: float
    e2e_s: float
    output_tok_s: float


@dataclass(frozen=True)
class ResultGroup:
    """One table of the torch engine's cells: a workload and a checkpoint, a line per tree."""

    workload: str
    checkpoint: str
    temperature: float
    engine: str
    prompts: int
    rows: list[Row]  # lines of benchmark.csv
    plain: PlainDecoding
    top_tau: float
    top_speedup: float


def _build_result_group(found: ReportInputs, workload: str, checkpoint: str) -> ResultGroup:
    cells, rows = (
        [x for x in some if (x["workload"], x["checkpoint"]) == (workload, checkpoint)]
        for some in (found.cells, found.rows)
    )
    fastest = max(cells, key=lambda cell: cell["metrics"]["baseline_output_tok_s"])
    plain = PlainDecoding(
        fmean(prompt["baseline_prefill_latency_s"] for prompt in fastest["prompts"]),
        fmean(prompt["baseline_e2e_latency_s"] for prompt in fastest["prompts"]),
        fastest["metrics"]["baseline_output_tok_s"],
    )
    return ResultGroup(
        workload, checkpoint, fastest["temperature"], fastest["engine"], len(fastest["prompts"]), rows, plain,
        max(row["tau"] for row in rows), max(row["speedup"] for row in rows),
    )  # fmt: skip


@dataclass
class AcceptanceHistogram:
    """How many drafts each verify cycle of one cell accepted."""

    workload: str
    checkpoint: str
    tree: str
    reasons: list[str]  # why this tree is shown
    cycles: int
    tau: float
    bars: list[float]  # share of the cycles that accepted 0, 1, 2, … drafts

    @property
    def why(self) -> str:
        return ", ".join(self.reasons)

    @property
    def most(self) -> float:
        return max(self.bars)


def _select_histograms(cells: list[Row]) -> list[AcceptanceHistogram]:
    """Return the histograms of at most four telling trees; cells without a cycle have none."""
    chains = [cell for cell in cells if cell["topk"] == 1]
    picks = [
        ("highest tau", max(cells, key=lambda cell: cell["metrics"]["tau"], default=None)),
        ("fastest", max(cells, key=lambda cell: cell["metrics"]["speedup"], default=None)),
        ("longest chain", max(chains, key=lambda cell: cell["num_steps"], default=None)),
        ("lowest tau", min(cells, key=lambda cell: cell["metrics"]["tau"], default=None)),
    ]
    shown: dict[tuple[str, str], AcceptanceHistogram] = {}
    for reason, cell in picks:
        if not cell or not (cycles := sum(cell["histogram"])):
            continue
        key = cell["workload"], cell["tree"]
        if key in shown:
            shown[key].reasons.append(reason)
            continue
        bars = [count / cycles for count in cell["histogram"]]
        shown[key] = AcceptanceHistogram(
            cell["workload"], cell["checkpoint"], cell["tree"], [reason], cycles, cell["metrics"]["tau"], bars
        )
    return list(shown.values())


# Published numbers


@dataclass(frozen=True)
class PublicationSection:
    """A publication that has numbers of this target."""

    publication: published.Publication
    numbers: int  # how many of them are of this target
    lines: list[own_beside_published.PublishedPair]


def _pair_with_published(model: str, cells: list[Row]) -> list[PublicationSection]:
    publications = published.read_publications()
    return [
        PublicationSection(publications[name], len(rows), list(own_beside_published.pair_rows(rows, cells)))
        for name, rows in own_beside_published.select_target_rows(publications, model).items()
    ]


def _select_best_cells(found: ReportInputs, best: str) -> list[Row]:
    """Return the best checkpoint's cells, or all where it has none; then its served points, in the same shape."""
    served_checkpoints = {line.cell["checkpoint"] for line in found.lines}
    shown = {best, None} if best in served_checkpoints else served_checkpoints
    lines = (line for line in found.lines if line.cell["checkpoint"] in shown)
    return [*found.select_checkpoint_cells(best), *own_beside_published.convert_served_points(lines)]


# Text


def diff_lines(before: str, after: str) -> list[tuple[str, str]]:
    """Return (" ", "-" or "+", line), two lines around each change, and ("@", …) where lines between changes are left out."""
    lines = difflib.unified_diff(before.split("\n"), after.split("\n"), lineterm="", n=2)
    return [(line[0], line[1:]) for line in lines][3:]  # without the heading: two file names and the first position


def _select_scalars(report: Row) -> Row:
    return {k: v for k, v in report.items() if isinstance(v, int | float | str) and k not in ("rows_in", "rows_out")}
