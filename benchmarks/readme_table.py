"""Write the README's table from a run of the embedded default.   python -m benchmarks.readme_table 2026-11-21 "4 min 15 s"

Copies results/benchmark.csv to docs/results/DATE-weather-tiny.csv and writes the table, with date, hardware and the time
`make run` took, between the README's markers. tests/test_house.py compares the two.
"""

import csv
import json
import re
import shutil
import sys
from pathlib import Path

README, RECORDS = Path("README.md"), Path("docs/results")
HEAD = (
    "| Tree_structure | prefill_latency (s) | spec_accept_rate (%) | e2e_latency (s) | compress ratio (↑) | speedup |"
)
BLOCK = re.compile(r"<!-- table (\S+) -->\n(.*?)<!-- /table -->", re.DOTALL)


def table(record: Path) -> str:
    """Return the table of a copied benchmark.csv: the last checkpoint first, trees without their letter."""
    with record.open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [HEAD, "|---|---|---|---|---|---|"]
    for checkpoint in sorted({r["checkpoint"] for r in rows}, reverse=True):
        lines.append(f"| **{checkpoint}** | | | | | |")
        for r in (r for r in rows if r["checkpoint"] == checkpoint):
            seconds = [f"{float(r[k]):.3f}" for k in ("prefill_latency_s", "e2e_latency_s")]
            rate, tau, speedup = 100 * float(r["accept_rate"]), float(r["tau"]), float(r["speedup"])
            cells = [r["tree"][1:], seconds[0], f"{rate:.1f}", seconds[1], f"{tau:.2f}", f"{speedup:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(date: str, duration: str) -> None:
    record = RECORDS / f"{date}-weather-tiny.csv"
    shutil.copyfile("results/benchmark.csv", record)
    with record.open(newline="") as file:
        first = next(csv.DictReader(file))
    cell = json.loads(Path(f"results/cells/{first['workload']}-{first['checkpoint']}-{first['tree']}.json").read_text())
    hardware = cell["hardware"]
    text = README.read_text()
    caption = f"{date}, {hardware['cpu']}, {hardware['threads']} threads, float32; `make run` took {duration} after installing."
    block = f"<!-- table {record} -->\n{table(record)}\n{caption}\n<!-- /table -->"
    README.write_text(re.sub(r"<!-- table.*?<!-- /table -->", lambda _: block, text, flags=re.DOTALL))


if __name__ == "__main__":
    main(*sys.argv[1:])
