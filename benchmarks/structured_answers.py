"""Repair damaged TOON of 20 schemas without a schema file, and compare every accepted answer with the undamaged document.

    python benchmarks/structured_answers.py [--count 10000] [--seed 1] [--show 3] > table.md

Exits with 1 if a value is wrong, a valid answer is not kept, or less than nine tenths of what is repairable is repaired. Cases
are made by tests/data/damaged_tables.py.
"""

import argparse
import sys
from collections import Counter, defaultdict
from pathlib import Path

import toon_format
import toons

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stages.data import toon
from tests.data import damaged_tables


def judge_case(truth: object, damaged: damaged_tables.DamagedText) -> tuple[str, str]:
    """Return (right, shorter, unseen, dropped or WRONG; the verdict)."""
    result = toon.repair_toon(damaged.text, "strip")
    if result.verdict.startswith("dropped"):
        return "dropped", result.verdict
    made = toon_format.loads(result.text)
    try:
        is_agreed = damaged_tables.equals(made, toons.loads(result.text))
    except toons.ToonDecodeError:
        is_agreed = False
    if not is_agreed:
        return "WRONG", f"{result.verdict}, and the decoders read {result.text!r} differently"
    if damaged_tables.equals(made, truth):
        return "right", result.verdict
    if damaged.outcome == "shorter" and damaged_tables.is_part(made, truth):
        return "shorter", result.verdict
    if damaged.outcome != "same" and result.verdict == "clean" and damaged_tables.is_still_valid(damaged.text):
        return "unseen", result.verdict  # a valid document with other content
    return "WRONG", result.verdict


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", type=int, default=0, help="examples of each kind that were dropped though repairable")
    options = parser.parse_args()
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for schema, kind, truth, damaged in damaged_tables.iterate_cases(options.seed, options.count):
        outcome, verdict = judge_case(truth, damaged)
        row = found[kind]
        row["cases"] += 1
        row[outcome] += 1
        if damaged.is_repairable:
            row["repairable"] += 1
            row["repaired"] += outcome in ("right", "shorter")
        if outcome == "WRONG" or (damaged.is_repairable and outcome == "dropped" and row["shown"] < options.show):
            row["shown"] += 1
            print(f"{outcome} {schema}, {kind}, {verdict}\n  {truth}\n{damaged.text!r}\n", file=sys.stderr)
    print(
        "| damage | cases | with one reading | of these repaired | right | right, fewer rows | unseen | dropped | wrong |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    total: Counter[str] = Counter()
    for kind in damaged_tables.DAMAGES:
        row = found[kind]
        total.update(row)
        print(format_row(kind, row))
    print(format_row("all", total))
    valid = found["none"]
    share = (total["repaired"] - valid["repaired"]) / max(1, total["repairable"] - valid["repairable"])
    print(
        f"\nrepaired of the repairable: {share:.1%}; valid ones kept: {valid['repaired']} of {valid['cases']}",
        file=sys.stderr,
    )
    sys.exit(bool(total["WRONG"]) or valid["repaired"] != valid["cases"] or share < 0.9)


def format_row(kind: str, row: Counter[str]) -> str:
    share = f"{row['repaired'] / row['repairable']:.1%}" if row["repairable"] else ""
    counts = [row[name] for name in ("right", "shorter", "unseen", "dropped", "WRONG")]
    return f"| {kind} | {row['cases']} | {row['repairable']} | {share} | {' | '.join(map(str, counts))} |"


if __name__ == "__main__":
    main()
