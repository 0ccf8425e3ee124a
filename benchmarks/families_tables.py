"""Print the tables of docs/families.md from a record of benchmarks/families.py.   python -m benchmarks.families_tables DATE"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from benchmarks.families import FAMILIES, TARGETS, Family
from benchmarks.families_record import ALL, LENGTH_GROUPS, TURN_GROUPS, FamilyFigure, locate_record
from stages.reporting.text import format_interval, format_number

AT_ONCE = (1, 8, 32)
SAMPLED = "temperature 0.7"
TREES = ("t5_4_16", "t8_2_16")


@dataclass(frozen=True)
class Selection:
    """The figures of one target."""

    figures: Sequence[FamilyFigure]

    def find(
        self, family: str, measure: str, group: str = ALL, tree: str | None = None, at_once: int | None = None
    ) -> list[FamilyFigure]:
        """Return the figures of a family, one a seed; with `tree` None of any tree."""
        return [
            figure
            for figure in self.figures
            if (figure.family, figure.measure, figure.group, figure.at_once) == (family, measure, group, at_once)
            and tree in (None, figure.tree)
        ]

    def list_groups(self) -> list[str]:
        """Return the groups of answers whose tau is known: by length, turn and unit."""
        found = {figure.group for figure in self.figures if figure.measure == "tau"}
        units = sorted(group for group in found if "unit " in group)
        return [group for group in (*LENGTH_GROUPS, *TURN_GROUPS, *units) if group in found]


def format_spread_of_seeds(figures: Iterable[FamilyFigure], digits: int = 2) -> str:
    """Return the mean over seeds with the lowest and highest of them."""
    values = [figure.value for figure in figures]
    if len(values) < 2:
        return format_number(values[0] if values else None, digits)
    return f"{fmean(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def format_half_width(figures: Iterable[FamilyFigure]) -> str:
    """Return half of the 95% interval over answers, the mean over seeds."""
    halves = [(f.high - f.low) / 2 for f in figures if f.low is not None and f.high is not None]
    return f"± {fmean(halves):.2f}" if halves else ""


def format_speedups(figures: Sequence[FamilyFigure]) -> str:
    """Return a speedup with its interval, of the first seed."""
    if not figures:
        return format_number(None)
    first = figures[0]
    value = f"**{first.value:.2f}**" if first.low is not None and first.low > 1 else f"{first.value:.2f}"
    return f"{value} ({format_interval(first.low, first.high)})"


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print()


def print_training(found: Selection) -> None:
    rows = []
    for family in FAMILIES:
        rates = {f.rate: f.value for f in found.find(family.name, "tau_by_rate")}
        kept = found.find(family.name, "epochs")[0]
        seconds = found.find(family.name, "training_gpu_s") or found.find(family.name, "training_process_s")
        rows.append([
            family.title,
            f"{found.find(family.name, 'parameters')[0].value:,.0f}",
            f"{kept.value:.0f}",
            format_spread_of_seeds(seconds, 0),
            f"{found.find(family.name, 'training_tokens')[0].value / 1e3:,.0f}",
            ", ".join(f"{rate:g}: {tau:.2f}{' (kept)' * (rate == kept.rate)}" for rate, tau in rates.items()),
        ])  # fmt: skip
    time = "training, GPU s" if found.find("eagle3", "training_gpu_s") else "training, CPU s"
    print_table(["draft", "weights", "epochs", time, "tokens, thousands", "tau of the chain by rate"], rows)


def print_tau(found: Selection) -> None:
    rows = []
    for family in FAMILIES:
        chain = found.find(family.name, "tau", tree=family.chain)
        rows.append([
            family.title,
            f"{family.chain} {format_spread_of_seeds(chain)} {format_half_width(chain)}",
            *(format_spread_of_seeds(found.find(family.name, "tau", tree=tree)) for tree in TREES),
            *(_format_best(found, family, budget) for budget in (16, 32)),
            format_spread_of_seeds(found.find(family.name, "tau", SAMPLED, family.chain)),
        ])  # fmt: skip
    head = ["draft", "chain", *TREES, "best of ≤ 16 tokens", "best of ≤ 32", "chain at temperature 0.7"]
    print_table(head, rows)


def _format_best(found: Selection, family: Family, budget: int) -> str:
    best = found.find(family.name, f"best_tau_{budget}")
    return f"{format_spread_of_seeds(best)} {', '.join(dict.fromkeys(str(f.tree) for f in best))}"


def print_groups(found: Selection) -> None:
    """Print tau of each family's chain by group of answers, then the accepted share of each class of tokens."""
    rows = []
    for group in found.list_groups():
        of_group = [found.find(family.name, "tau", group, family.chain) for family in FAMILIES]
        rows.append([group, *(f"{format_spread_of_seeds(f)} {format_half_width(f)}" for f in of_group)])
    for name in ("structure", "letters", "digits"):
        shares = [found.find(family.name, "accepted_share", name, family.chain) for family in FAMILIES]
        rows.append([f"{name}: share drafted", *(format_spread_of_seeds(f) for f in shares)])
    print_table(["answers", *(f"{family.title}, {family.chain}" for family in FAMILIES)], rows)


def print_speed(found: Selection) -> None:
    rows = []
    for family in FAMILIES:
        for tree in family.cells:
            row = [family.title, tree]
            for at_once in AT_ONCE:
                cycle = found.find(family.name, "cycle_in_plain_steps", tree=tree, at_once=at_once)
                predicted = found.find(family.name, "predicted_speedup", tree=tree, at_once=at_once)
                measured = found.find(family.name, "measured_speedup", tree=tree, at_once=at_once)
                cost = format_number(cycle[0].value if cycle else None)
                row += [cost, format_spread_of_seeds(predicted), format_speedups(measured)]
            process = found.find(family.name, "process_speedup", tree=tree, at_once=1)
            rows.append([*row, format_number(process[0].value if process else None)])
    figures = [f"{name}, {at_once} at once" for at_once in AT_ONCE for name in ("C", "predicted", "measured")]
    print_table(["draft", "tree", *figures, "CPU time, 1 at once"], rows)


def print_best_predicted(found: Selection) -> None:
    rows = []
    for family in FAMILIES:
        row = [family.title]
        for at_once in AT_ONCE:
            best = found.find(family.name, "best_predicted_speedup", at_once=at_once)
            row.append(f"{format_spread_of_seeds(best)} {', '.join(dict.fromkeys(str(f.tree) for f in best))}")
        rows.append(row)
    print_table(["draft", *(f"best tree, {at_once} at once" for at_once in AT_ONCE)], rows)


def main() -> None:
    takes = argparse.ArgumentParser(description="Print the tables of docs/families.md.")
    takes.add_argument("record", help="a date, as 2026-11-24, or a CSV file")
    record = takes.parse_args().record
    path = Path(record) if record.endswith(".csv") else locate_record(Path(), record)
    every = FamilyFigure.read_csv(path, "families")
    for target in [name for name in TARGETS if any(figure.target == name for figure in every)]:
        found = Selection([figure for figure in every if figure.target == target])
        print(f"## {target}\n")
        for show in (print_training, print_tau, print_groups, print_speed, print_best_predicted):
            show(found)


if __name__ == "__main__":
    main()
