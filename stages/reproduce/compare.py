"""A recipe's results beside what was published.   python -m stages.reproduce.compare RECIPE PARAMS

Of each publication that the recipe names, every number of its target: beside a cell of ours where the recipe says which,
else counted among those left out, by reason. Writes results/reproduce/NAME.md and .csv, and prints the former.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.literature import comparison, own_beside_published, published
from stages.literature.published import MEAN_DATASET, UNKNOWN, PublishedRow
from stages.params import schema
from stages.params.recipe import PublishedMatch, Recipe, RecipeCells
from stages.reproduce import estimate
from stages.results import served_records, torch_records
from stages.runtime import atomic
from stages.telemetry.run_stage import run_stage

REPRODUCE_FOLDER = Path("results/reproduce")
COMPARISON_COLUMNS = (
    "publication", "table", "label", "draft", "dataset", "temperature", "tree", "metric", "unit", "published", "ours", "spread",
    "no_interval", "ratio", "tolerance", "verdict", "why", "taken", "cell",
)  # fmt: skip
Cell = dict[str, Any]
PLAIN_METHOD = "plain"  # the method of published baselines
SHOWN_COLUMNS = ("draft", "dataset", "T", "tree", "metric", "published", "ours", "ratio", "tolerance", "verdict")


def main(recipe: str, file: str) -> None:
    name, p = Path(recipe).stem, schema.load_params(Path(file))
    about, _ = schema.read_recipe(Path(recipe))
    assert about, recipe
    sides, left_out = match_published_numbers(about, p.target.model, published.read_publications())
    text = build_page(name, about, sides, left_out, estimate.estimate_recipe(p, about))
    atomic.write_csv(REPRODUCE_FOLDER / f"{name}.csv", COMPARISON_COLUMNS, [_build_csv_row(side) for side in sides])
    atomic.write_text(REPRODUCE_FOLDER / f"{name}.md", text)
    print(text)


# What is laid beside what


def match_published_numbers(
    recipe: Recipe, model: str, publications: dict[str, published.Publication]
) -> tuple[list[comparison.PublishedComparison], Counter[str]]:
    """Every number with its counterpart, and how many have none, by reason. Raises ValueError for what isn't published."""
    sides: list[comparison.PublishedComparison] = []
    left_out: Counter[str] = Counter()
    for name, matches in itertools.groupby(recipe.beside, lambda match: match.publication):
        if name not in publications:
            raise ValueError(f"recipe.beside: {name} is no publication, expected one of {', '.join(publications)}")
        of_it = list(matches)
        targets = {match.rows["target"] for match in of_it}
        for row in publications[name].rows:
            if row.setting.target not in targets:
                continue
            match = next((match for match in of_it if _has_settings(row, match.rows)), None)
            if match is None:
                left_out[_explain_unmatched(row)] += 1
            elif (measure := match.measures.get(row.metric, row.metric)) not in comparison.MEASURES:
                left_out[f"{row.metric}: no cell of ours measures it"] += 1
            elif match.cells.checkpoint and row.setting.tree == UNKNOWN and "tree" not in match.assumed:
                left_out[f"{row.metric} ({row.where}): its tree isn't stated"] += 1
            else:
                sides.append(_build_comparison(row, match, measure, recipe, model))
    return sides, left_out


def _has_settings(row: PublishedRow, wanted: dict[str, str | float | None]) -> bool:
    return all(getattr(row.setting, key) == value for key, value in wanted.items())


def _explain_unmatched(row: PublishedRow) -> str:
    if row.setting.dataset == MEAN_DATASET:
        return f"{row.metric}: a mean over data sets, whose parts are compared"
    method = row.setting.method or "no method"
    return f"{row.metric} ({method}, {row.where}): the recipe has no cell for it"


def _build_comparison(
    row: PublishedRow, match: PublishedMatch, measure: str, recipe: Recipe, model: str
) -> comparison.PublishedComparison:
    """The number, with what the recipe takes for what nobody stated, beside the cell's."""
    taken = {key: value for key, value in match.assumed.items() if getattr(row.setting, key) == UNKNOWN}
    setting: Any = replace(row.setting, **taken)  # type: ignore[arg-type]
    row = replace(row, setting=setting)
    name, found, baseline = _find_cells(match.cells, row.setting.tree)
    others: dict[str, str] = {str(what): said for what, said in recipe.substitutes.items()}
    if own_beside_published.normalise_model_name(model) != own_beside_published.normalise_model_name(
        row.setting.target
    ):
        others.setdefault("target", f"{model} against {row.setting.target}")
    plain = row.setting.method == PLAIN_METHOD
    bars = [f"another {what}: {said}" for what, said in others.items() if not (plain and what == "draft")]
    ours = comparison.measure_cell(measure, found, baseline) if found else None
    if found:
        bars += comparison.list_obstacles(row, found, row.metric in match.measures)
        if found.get("status") == served_records.UNSUPPORTED:
            bars.append(f"unsupported: {found['reason']}")
        elif ours is None:
            bars.append("this cell doesn't hold it, or has no baseline with its fingerprint")
    said = tuple(f"{key} {value}, which isn't stated" for key, value in taken.items())
    return comparison.PublishedComparison(
        row, ours, name, found is not None, recipe.tolerance.get(row.metric, 0.0), said, tuple(bars)
    )


def _find_cells(wanted: RecipeCells, tree: str | None) -> tuple[str, Cell | None, Cell | None]:
    """(the cell's name, the cell, its baseline), None for those that aren't there."""
    workload, checkpoint = wanted.workload, wanted.checkpoint
    tree = tree if checkpoint else None
    if wanted.engine == "torch":
        place = torch_records.locate_torch_cell(workload, str(checkpoint), str(tree))
        return (
            place.stem,
            torch_records.read_torch_cell(workload, str(checkpoint), str(tree)) if place.exists() else None,
            None,
        )
    place, plain = (
        served_records.locate_served_cell(workload, checkpoint, tree),
        served_records.locate_served_cell(workload, None, None),
    )
    found = served_records.read_served_cell(workload, checkpoint, tree) if place.exists() else None
    baseline = served_records.read_served_cell(workload, None, None) if checkpoint and plain.exists() else None
    if found and baseline and found["fingerprint"] != baseline["fingerprint"]:
        baseline = None
    if found and found["baseline_points"]:  # measured in turns with it
        baseline = found | {"points": found["baseline_points"]}
    return place.stem, found, baseline


# What is shown


def build_page(
    name: str,
    recipe: Recipe,
    sides: list[comparison.PublishedComparison],
    left_out: Counter[str],
    sizes: estimate.RecipeEstimate,
) -> str:
    verdicts = Counter(side.verdict for side in sides)
    counts = ", ".join(f"{verdicts[word]} {word}" for word in ("within", "outside", "not comparable", "not run"))
    pins = ", ".join(f"{package} {version}" for package, version in recipe.pins.items()) or "none"
    here, there = (size / 2**30 for size in (sizes.disk_bytes, sizes.download_bytes))
    shares = [f"{share:.0%} of {metric}" for metric, share in recipe.tolerance.items()]
    margin = ["half of the last decimal printed", "half of our 95% interval where there is one", *shares]
    said = [
        f"Status of the recipe: {recipe.status}. Pins: {pins}.",
        f"Expected: {sizes.gpu_hours:.2g} GPU-hours of an H200, {here:.1f} GiB here, {there:.1f} GiB to download.",
        *(f"Another {what}: {said}." for what, said in recipe.substitutes.items()),
        *recipe.notes,
        f"{len(sides)} published numbers: {counts}. {left_out.total()} more of this target are left out, see below.",
        f"Tolerance: the sum of {', '.join(margin)}.",
    ]
    lines = [f"# {name}", "", *(f"- {line}" for line in said), ""]
    for publication, of_it in itertools.groupby(sides, lambda side: side.published.what):
        lines += [f"## {publication}", "", *_format_table(list(of_it)), ""]
    if left_out:
        lines += ["## Left out", "", *(f"- {count}: {why}" for why, count in left_out.items()), ""]
    return "\n".join(lines)


def _format_table(sides: list[comparison.PublishedComparison]) -> Iterator[str]:
    """Reasons are numbered, since most rows share them."""
    reasons = {why: n for n, why in enumerate(dict.fromkeys(w for s in sides for w in s.notes), 1)}
    yield f"| {' | '.join(SHOWN_COLUMNS)} |"
    yield "|" + "---|" * len(SHOWN_COLUMNS)
    for side in sides:
        line = _build_csv_row(side)
        marks = ", ".join(str(reasons[why]) for why in side.notes)
        cells = [
            line["draft"] or "none", ", ".join(filter(None, (line["dataset"], line["label"]))),
            line["temperature"], line["tree"] or "none",
            f"{line['metric']} ({line['unit']})", f"{side.published.value:.{side.published.decimals}f}",
            *(_format_brief(line[key]) for key in ("ours", "ratio")), f"{side.tolerance:.1%}",
            side.verdict + (f" ({marks})" if marks else ""),
        ]  # fmt: skip
        yield f"| {' | '.join(map(str, cells))} |"
    yield ""
    yield from (f"{n}. {why}" for why, n in reasons.items())


def _build_csv_row(side: comparison.PublishedComparison) -> dict[str, Any]:
    """Of the CSV; ours in the published unit."""
    row, setting = side.published, side.published.setting
    scale = row.value / side.theirs if side.theirs else 1.0
    spread = side.ours.spread if side.ours else None
    return {
        "publication": row.what, "table": row.where, "label": setting.label,
        "draft": setting.draft, "dataset": setting.dataset,
        "temperature": setting.temperature, "tree": setting.tree, "metric": row.metric, "unit": row.unit, "published": row.value,
        "ours": side.ours.value * scale if side.ours else None, "spread": None if spread is None else spread * scale,
        "no_interval": side.ours.why if side.ours else "",
        "ratio": side.ratio, "tolerance": side.tolerance, "verdict": side.verdict, "why": "; ".join(side.bars),
        "taken": "; ".join(side.taken), "cell": side.cell,
    }  # fmt: skip


def _format_brief(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    run_stage(main)
