"""Write the README's second table, of served cells on a GPU.

    python -m benchmarks.readme_served docs/results/2026-11-24-h200-vl.csv "2026-11-24, NVIDIA H200, ..."

The record is a results/benchmark.csv that was copied there; the words below the table say date, hardware, engine, target, load
and duration. Of its trees those are shown that the first table (benchmarks/readme_table.py) has measured. tests/test_house.py
compares the table with its record.
"""

import argparse
import re
from pathlib import Path

from benchmarks.readme_table import BLOCK, README, format_speedup, format_tau
from stages.cells.table import ResultRow
from stages.reporting.text import format_number

SERVED_BLOCK = re.compile(r"<!-- served (\S+) -->\n(.*?)<!-- /served -->", re.DOTALL)
HEAD = "| tree | TTFT (s) | accept rate (%) | e2e (s) | tau (↑) | tau, replayed | speedup |"
NO_INTERVAL = "one prompt"


def served_table(record: Path, trees: list[str]) -> str:
    """Return the table of the record's measured trees, in the order of `trees`, without their letter."""
    rows = {row.tree: row for row in ResultRow.read_csv(record, "report") if row.tau and not row.is_plain}
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    lines += [_format_row(rows[tree]) for tree in trees if tree in rows]
    return "\n".join(lines) + "\n"


def _format_row(row: ResultRow) -> str:
    assert row.tree and row.tau is not None and row.accept_rate is not None
    cells = [
        row.tree[1:],
        format_number(row.ttft_mean_s, 3),
        f"{100 * row.accept_rate:.1f}",
        format_number(row.e2e_mean_s, 3),
        format_tau(row.tau, row.tau_low, row.tau_high, NO_INTERVAL),
        format_number(row.replay_tau),
        format_speedup(row.speedup, row.speedup_low, row.speedup_high, NO_INTERVAL),
    ]
    return f"| {' | '.join(cells)} |"


def list_shown_trees(readme: str, root: Path = Path()) -> list[str]:
    """Return the trees that the README's first table has measured."""
    block = BLOCK.search(readme)
    assert block, "README.md has lost its first table; run: python -m benchmarks.readme_table DATE DURATION"
    return [str(row.tree) for row in ResultRow.read_csv(root / block[1], "report") if not row.is_replayed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("caption", help="date, hardware, engine, target, load, duration")
    asked = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    table = served_table(asked.record, list_shown_trees(text))
    block = f"<!-- served {asked.record} -->\n{table}\n{asked.caption}\n<!-- /served -->"
    README.write_text(SERVED_BLOCK.sub(lambda _: block, text), encoding="utf-8")


if __name__ == "__main__":
    main()
