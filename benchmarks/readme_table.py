"""Write the README's picture and table from a run of the embedded default.

    python -m benchmarks.readme_table 2026-11-21 "4 min 15 s" --seed-spread 0.2

Copies results/benchmark.csv to docs/results/DATE-weather-tiny.csv, draws it (benchmarks/readme_picture.py), and writes the
picture and the table, with date, hardware and the time `make run` took, between the README's markers. tests/test_house.py
compares the table with its record.
"""

import argparse
import json
import re
import shutil
from pathlib import Path

from benchmarks import readme_picture
from stages.cells.table import ResultRow
from stages.reporting.tables import NO_INTERVAL
from stages.reporting.text import ONE_PROMPT, format_interval, format_number, format_spread

README, RECORDS = Path("README.md"), Path("docs/results")
HEAD = "| tree | prefill (s) | accept rate (%) | e2e (s) | tau (↑) | speedup |"
NO_BREAK = str.maketrans({" ": "\N{NO-BREAK SPACE}", "-": "\N{NON-BREAKING HYPHEN}"})  # a figure stays on one line
REPLAYED = (
    "{names}: replayed, not measured. tau is over the whole eval split (a measured tau: over the workload's prompts), the "
    "speedup is [predicted](docs/cost.md)."
)
BLOCK = re.compile(r"<!-- table (\S+) -->\n(.*?)<!-- /table -->", re.DOTALL)


def table(record: Path) -> str:
    """Return the picture and the table of a copied benchmark.csv: the last checkpoint first, trees without their letter."""
    rows = ResultRow.read_csv(record, "report")
    picture = (RECORDS / record.name).with_suffix(".svg").as_posix()
    lines = [f"![tau and speedup by tree, with 95% intervals]({picture})", "", HEAD]
    lines.append("|" + "---|" * (HEAD.count("|") - 1))
    for checkpoint in sorted({str(row.checkpoint) for row in rows}, reverse=True):
        group = [row for row in rows if row.checkpoint == checkpoint]
        mark = ", replayed" if any(row.is_replayed for row in group) else ""
        lines += [f"| **{checkpoint}**{mark} | | | | | |", *map(_format_row, group)]
    return "\n".join(lines) + "\n"


def _format_row(row: ResultRow) -> str:
    assert row.tau is not None and row.accept_rate is not None, "a tree has a tau"
    missing = NO_INTERVAL if row.is_replayed else ONE_PROMPT
    cells = [
        row.shape.name[1:],
        format_number(row.ttft_mean_s, 3),
        f"{100 * row.accept_rate:.1f}",
        format_number(row.e2e_mean_s, 3),
        format_tau(row.tau, row.tau_low, row.tau_high, missing),
        format_speedup(row.speedup, row.speedup_low, row.speedup_high, missing),
    ]
    return f"| {' | '.join(cells)} |"


def format_tau(tau: float, low: float | None, high: float | None, why_no_interval: str) -> str:
    return f"{tau:.2f} {format_spread(tau, low, high, why_no_interval)}".translate(NO_BREAK)


def format_speedup(speedup: float | None, low: float | None, high: float | None, why_no_interval: str) -> str:
    """Return a speedup and its interval."""
    if speedup is None:
        return format_number(None)
    return f"{speedup:.2f} ({format_interval(low, high, why_no_interval)})".translate(NO_BREAK)


def caption(rows: list[ResultRow], date: str, duration: str, seed_spread: str | None) -> str:
    """Return the sentences below the table. Raises ValueError if no row is measured."""
    first = next((row for row in rows if not row.is_replayed), None)
    if first is None:
        raise ValueError(
            "results/benchmark.csv has no measured row, expected at least one; name checkpoints in params.yaml"
        )
    cell = json.loads(
        Path(f"results/cells/{first.engine}/{first.workload}-{first.checkpoint}-{first.tree}.json").read_text()
    )
    hardware, names = cell["hardware"], sorted({str(row.checkpoint) for row in rows if row.is_replayed})
    threads = "1 thread" if hardware["threads"] == 1 else f"{hardware['threads']} threads"
    shares = [row.identical_share for row in rows if row.identical_share is not None]
    sentences = [
        f"{date}, {hardware['cpu']}, decoding on {threads}, float32; `make run` took {duration} after installing.",
        "± and brackets are 95% intervals: one of a speedup that holds 1 says neither faster nor slower.",
        *([_describe_identical(min(shares))] if shares else []),
        *([f"tau moves by about {seed_spread} with the seed of training."] if seed_spread else []),
        *([REPLAYED.format(names=", ".join(names))] if names else []),
    ]
    return "\n".join(sentences)


def _describe_identical(share: float) -> str:
    if share == 1:
        return "Every measured answer is identical to plain decoding's."
    return f"Of each tree's answers at least {100 * share:.0f}% are identical to plain decoding's."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("date", help="of the run, as 2026-11-21")
    parser.add_argument("duration", help="of `make run` after installing, in words")
    parser.add_argument("--seed-spread", metavar="TAU", help="how far tau moves with the seed of training, as 0.2")
    asked = parser.parse_args()
    record = RECORDS / f"{asked.date}-weather-tiny.csv"
    shutil.copyfile(ResultRow.TABLE, record)
    readme_picture.write_picture(record)
    below = caption(ResultRow.read_csv(record, "report"), asked.date, asked.duration, asked.seed_spread)
    block = f"<!-- table {record} -->\n{table(record)}\n{below}\n<!-- /table -->"
    text = README.read_text(encoding="utf-8")
    README.write_text(re.sub(r"<!-- table.*?<!-- /table -->", lambda _: block, text, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
