"""Audits of tables of block drafts: which method accepts more within a table, and what may be compared between tables."""

from collections.abc import Iterator
from itertools import pairwise

from stages.literature.audit_findings import AGREES, DEPENDS, Finding, PublishedCell, select_cells
from stages.literature.published import Publication

SAME_DATASET = {"MATH": "MATH-500"}  # DeepSpec's evaluation reads math500, which its paper calls MATH
COMPARED = ("DFlash", "DSpark")  # labels that both tables have


def list_block_findings(publications: dict[str, Publication]) -> Iterator[tuple[Publication, Finding]]:
    paper, modelopt = publications["dspark-paper"], publications["modelopt-2342"]
    yield paper, _audit_order(paper, ("DSpark", "DFlash", "EAGLE-3"))
    yield paper, _audit_labels(paper, modelopt)
    yield modelopt, _audit_order(modelopt, ("DSpark", "DFlash"))
    yield modelopt, _audit_cycles(modelopt)


def _index_taus(publication: Publication) -> dict[tuple[str | None, str | None, str | None], PublishedCell]:
    """Return the cells that print tau by target, method and data set."""
    return {
        (cell.setting.target, cell.setting.method, cell.setting.dataset): cell
        for cell in select_cells(publication, "tau")
    }


def _audit_order(publication: Publication, methods: tuple[str, ...]) -> Finding:
    """Count the targets and data sets on which each method accepts more than the next of `methods`."""
    cells, sentences, is_ordered = _index_taus(publication), [], True
    for better, worse in pairwise(methods):
        ratios = [
            cell.numbers["tau"] / cells[target, worse, dataset].numbers["tau"]
            for (target, method, dataset), cell in cells.items()
            if method == better and (target, worse, dataset) in cells
        ]
        wins = sum(ratio > 1 for ratio in ratios)
        is_ordered &= wins == len(ratios)
        sentences.append(
            f"{better} accepts more than {worse} in {wins} of {len(ratios)} pairs of a target and a data set, by a factor of "
            f"{min(ratios):.2f} to {max(ratios):.2f}"
        )
    return Finding(
        "The order of the methods",
        AGREES if is_ordered else DEPENDS,
        "; ".join(sentences) + ".",
        "" if is_ordered else "The order depends on the target and the data set: take that of the nearest to yours.",
    )


def _audit_labels(paper: Publication, other: Publication) -> Finding:
    """Set the numbers of both tables that bear the same labels beside each other, with their bounds."""
    other_cells, lines = _index_taus(other), []
    for (target, method, dataset), cell in _index_taus(paper).items():
        other_cell = other_cells.get((target, method, SAME_DATASET.get(str(dataset), dataset)))
        if method in COMPARED and other_cell:
            pair = [f"{c.numbers['tau']:g} of at most {c.shape.num_steps + 1}" for c in (cell, other_cell)]
            lines.append((f"{target}, {method}", str(other_cell.setting.dataset), *pair))
    return Finding(
        "The same labels in two tables",
        DEPENDS,
        "Both tables have drafts of these names for this target:",
        "Layout of DFlash, width, temperature, drafting, data, epochs and whether the bonus token is counted differ or aren't "
        "stated, so neither number says what the other should be. What can be compared: rows of one table; and, of each, the "
        "factor between methods.",
        (("draft", "data set", "DSpark's paper", "ModelOpt"), *lines),
    )


def _audit_cycles(publication: Publication) -> Finding:
    """Compute what a cycle of each method costs in plain steps, and whether the order by tau is that by speedup."""
    cells = select_cells(publication, "tau", "speedup")
    costs: dict[str, list[float]] = {}
    for cell in cells:
        costs.setdefault(str(cell.setting.method), []).append(cell.numbers["tau"] / cell.numbers["speedup"])
    turned = [
        f"{a.setting.method} and {b.setting.method} on {a.setting.dataset}"
        for a in cells
        for b in cells
        if a.setting.dataset == b.setting.dataset
        and a.numbers["tau"] > b.numbers["tau"]
        and a.numbers["speedup"] < b.numbers["speedup"]
    ]
    return Finding(
        "What a cycle costs",
        DEPENDS if turned else AGREES,
        "tau / speedup is a cycle's cost in plain steps, of one engine, width and GPU:",
        f"{'; '.join(turned)}: the first accepts more and is slower. A head that runs slot by slot costs time that tau doesn't "
        "show; rank these methods by speedup on the engine that will serve them."
        if turned
        else "",
        (
            ("method", "a cycle, in plain steps"),
            *((method, f"{min(found):.2f} to {max(found):.2f}") for method, found in costs.items()),
        ),
    )
