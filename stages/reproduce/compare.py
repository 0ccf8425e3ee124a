"""A recipe's results compared with what was published.   python -m stages.reproduce.compare RECIPE PARAMS

Every number of the recipe's target in the publications it names is compared with the cell that the recipe names for it,
or counted among those left out, by reason. Writes results/reproduce/NAME.md and .csv, and prints the former.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from stages.cells.cell import RAN, Cell, locate_cell
from stages.params import schema
from stages.params.engines import is_in_process
from stages.params.recipe import PublishedMatch, Recipe, RecipeCells
from stages.published import comparison
from stages.published import tables as published
from stages.published.tables import MEAN_DATASET, UNKNOWN, PublishedRow
from stages.runtime import atomic
from stages.telemetry.run_stage import run_stage

REPRODUCE_FOLDER = Path("results/reproduce")
PLAIN_METHOD = "plain"  # the method of published baselines


def main(recipe_file: str, params_file: str) -> None:
    name, p = Path(recipe_file).stem, schema.load_params(Path(params_file))
    recipe, _ = schema.read_recipe(Path(recipe_file))
    if recipe is None:
        raise ValueError(f"{recipe_file} has no block `recipe`, expected one; see recipes/")
    comparisons, left_out = match_published_numbers(recipe, p.target.model, published.read_publications())
    groups = itertools.groupby(comparisons, lambda compared: compared.published.publication)
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    page = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True).get_template("comparison.md.j2")
    text = page.render(
        name=name,
        recipe=recipe,
        comparisons=comparisons,
        groups=[(publication, list(group)) for publication, group in groups],
        left_out=left_out,
    )
    rows = list(map(_build_csv_row, comparisons))
    atomic.write_csv(REPRODUCE_FOLDER / f"{name}.csv", tuple(rows[0]) if rows else (), rows)
    atomic.write_text(REPRODUCE_FOLDER / f"{name}.md", text)
    print(*text.split("\n"), sep="\n")


# Matching


def match_published_numbers(
    recipe: Recipe, model: str, publications: dict[str, list[PublishedRow]]
) -> tuple[list[comparison.PublishedComparison], Counter[str]]:
    """Return every comparison, and how many numbers have no cell, by reason. Raises ValueError for an unknown publication."""
    comparisons: list[comparison.PublishedComparison] = []
    left_out: Counter[str] = Counter()
    for name, group in itertools.groupby(recipe.beside, lambda match: match.publication):
        if name not in publications:
            raise ValueError(f"recipe.beside: {name} is no publication, expected one of {', '.join(publications)}")
        matches = list(group)
        targets = {match.rows["target"] for match in matches}
        for row in publications[name]:
            if row.setting.target not in targets:
                continue
            setting = row.setting.model_dump().items()
            match = next((match for match in matches if match.rows.items() <= setting), None)
            if match is None:
                method = row.setting.method or "no method"
                reason = f"{row.metric} ({method}, {row.where}): the recipe has no cell for it"
                is_mean = row.setting.dataset == MEAN_DATASET
                left_out[f"{row.metric}: a mean over data sets, whose parts are compared" if is_mean else reason] += 1
            elif (measure := _choose_measure(match, row)) not in comparison.MEASURES:
                left_out[f"{row.metric}: no cell of ours measures it"] += 1
            elif match.cells.checkpoint and row.setting.tree == UNKNOWN and "tree" not in match.assumed:
                left_out[f"{row.metric} ({row.where}): its tree isn't stated"] += 1
            else:
                comparisons.append(_build_comparison(row, match, measure, recipe, model))
    return comparison.add_agreement(comparisons), left_out


def _choose_measure(match: PublishedMatch, row: PublishedRow) -> str:
    """Return the name of our measure. Raises ValueError for an assumed definition that is not needed or not ours."""
    if row.metric not in match.assumed_definitions:
        return match.measures.get(row.metric, row.metric)
    measure = match.assumed_definitions[row.metric]
    known = [name for name, one in comparison.MEASURES.items() if one.meaning]
    if row.definition != UNKNOWN or measure not in known:
        found = f"defined there as {row.definition}" if row.definition != UNKNOWN else f"assumed to be {measure}"
        raise ValueError(
            f"recipe.beside: assumed_definitions.{row.metric} of {match.publication} is {found}, expected a metric without a "
            f"definition, and one of {', '.join(known)}; correct it, or name its measure in measures"
        )
    return measure


def _build_comparison(
    row: PublishedRow, match: PublishedMatch, measure: str, recipe: Recipe, model: str
) -> comparison.PublishedComparison:
    """Return the comparison, with the recipe's assumptions for settings that the source does not state."""
    assumed = {key: value for key, value in match.assumed.items() if getattr(row.setting, key) == UNKNOWN}
    row = replace(row, setting=row.setting.model_copy(update=assumed))
    name, cell, baseline = _find_cells(match.cells, row.setting.tree)
    obstacles = list(_list_substitutes(row, recipe, model))
    own = comparison.MEASURES[measure].find(cell, baseline) if cell else None
    if cell:
        obstacles += comparison.list_obstacles(row, cell, row.metric in {*match.measures, *match.assumed_definitions})
        if cell.status != RAN:
            obstacles.append(f"{cell.status}: {cell.reason}")
        elif own is None:
            obstacles.append("this cell doesn't hold it, or has no baseline with its fingerprint")
    return comparison.PublishedComparison(
        published=row,
        own=own,
        cell=name,
        cell_exists=cell is not None,
        relative_tolerance=recipe.tolerance.get(row.metric, 0.0),
        assumptions=tuple(f"{key} {value}, which isn't stated" for key, value in assumed.items()),
        obstacles=tuple(obstacles),
        assumed_meaning=comparison.MEASURES[measure].meaning if row.metric in match.assumed_definitions else "",
    )


def _list_substitutes(row: PublishedRow, recipe: Recipe, model: str) -> Iterator[str]:
    """Yield what the recipe substitutes for the publication's own. Another draft does not concern plain decoding."""
    substitutes: dict[str, str] = {str(what): text for what, text in recipe.substitutes.items()}
    normalise = published.normalise_model_name
    if normalise(model) != normalise(row.setting.target):
        substitutes.setdefault("target", f"{model} against {row.setting.target}")
    for what, text in substitutes.items():
        if not (what == "draft" and row.setting.method == PLAIN_METHOD):
            yield f"another {what}: {text}" + ("; name that target in target.model" if what == "target" else "")


def _find_cells(cells: RecipeCells, tree: str | None) -> tuple[str, Cell | None, Cell | None]:
    """Return (the cell's name, the cell, its baseline), None for those that do not exist."""
    names = cells.workload, cells.checkpoint, tree if cells.checkpoint else None
    file = locate_cell(cells.engine, *names)
    cell = Cell.read(cells.engine, *names) if file.exists() else None
    if is_in_process(cells.engine) or cell is None:
        return file.stem, cell, None
    if cell.baseline_points:  # plain decoding was measured in turns with it
        return file.stem, cell, cell.model_copy(update={"points": cell.baseline_points})
    has_baseline = cells.checkpoint and locate_cell(cells.engine, cells.workload, None, None).exists()
    baseline = Cell.read(cells.engine, cells.workload) if has_baseline else None
    return file.stem, cell, baseline if baseline and cell.fingerprint == baseline.fingerprint else None


# Output


def _build_csv_row(compared: comparison.PublishedComparison) -> dict[str, Any]:
    """Return a line of the CSV; our number is in the published unit."""
    row, setting, own = compared.published, compared.published.setting, compared.own
    return {
        "publication": row.publication, "table": row.where, "label": setting.label, "draft": setting.draft,
        "dataset": setting.dataset, "temperature": setting.temperature, "tree": setting.tree, "metric": row.metric,
        "unit": row.unit, "published": row.value, "ours": own.value * compared.unit if own else None,
        "spread": None if own is None or own.spread is None else own.spread * compared.unit,
        "no_interval": own.no_interval if own else "", "ratio": compared.ratio, "tolerance": compared.tolerance,
        "verdict": compared.conditional_verdict,
        "why": "; ".join(compared.obstacles), "taken": "; ".join(compared.assumptions), "cell": compared.cell,
    }  # fmt: skip


if __name__ == "__main__":
    run_stage(main)
