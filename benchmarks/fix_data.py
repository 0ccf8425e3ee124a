"""fix_data on a million rows: rows per second and peak memory, against the plain Python loop one would write first.

    python benchmarks/fix_data.py [--rows 1000000] [--toon-rows 100000] > table.md

The stage runs as `dvc repro` runs it, `python -m stages.fix_data` in a project of its own. Memory is the sum of the
resident sets of the process and all it started, looked at ten times a second; pages they share are counted in each.
The loop reads the same file with `json`, calls the same rules row by row, keeps a set of hashes and writes JSONL; it
looks for no near duplicates, and writes no Parquet.
"""

import argparse
import datetime as dt
import hashlib
import itertools
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from stages.data import toon  # noqa: E402
from stages.data.table_schema import load_table_file  # noqa: E402
from stages.results import torch_records  # noqa: E402
from stages.toy import damaged_exports  # noqa: E402

MIB = 1 << 20


def chat(rows: int) -> Iterator[str]:
    """Two turns of some 150 words; a twentieth of the rows is an earlier one with a word or two changed."""
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 10))) for _ in range(20_000)]
    recent: list[list[str]] = []
    for n in range(rows):
        if recent and rng.random() < 0.05:
            said = list(rng.choice(recent))
            said[rng.randrange(len(said))] = "changed"
        else:
            said = rng.choices(words, k=rng.randint(60, 240))
            recent = [*recent[-99:], said]
        turns = [{"from": "human", "value": " ".join(said[:30])}, {"from": "gpt", "value": " ".join(said[30:])}]
        yield json.dumps({"id": f"chat-{n}", "conversations": turns}) + "\n"


def weather(rows: int):
    return (json.dumps(row, ensure_ascii=False) + "\n" for row in damaged_exports.export_weather(5, rows))


def project(home: Path, lines, **changes) -> Path:
    """A folder with params.yaml and the raw file."""
    home.mkdir(exist_ok=True)
    shutil.copytree(ROOT / "data/tables", home / "data/tables", dirs_exist_ok=True)
    raw = home / "raw.jsonl"
    if not raw.exists():
        with raw.open("w") as file:
            file.writelines(lines)
    yaml = YAML()
    params = yaml.load((ROOT / "params.yaml").read_text())
    params["fix_data"].update(raw="raw.jsonl", **changes)
    with (home / "params.yaml").open("w") as file:
        yaml.dump(params, file)
    return raw


def stage(home: Path) -> tuple[float, float, float, dict]:
    """(seconds, seconds of processors, peak MiB, its report)"""
    started, peak, before = time.perf_counter(), 0, processors(resource.RUSAGE_CHILDREN)
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    running = psutil.Popen([sys.executable, "-m", "stages.fix_data"], cwd=home, env=env, stdout=subprocess.DEVNULL)
    while running.poll() is None:
        total = 0
        for process in [running, *running.children(recursive=True)]:
            try:
                total += process.memory_info().rss
            except psutil.Error:
                continue
        peak = max(peak, total)
        time.sleep(0.1)
    assert running.returncode == 0
    seconds, busy = time.perf_counter() - started, processors(resource.RUSAGE_CHILDREN) - before
    return seconds, busy, peak / MIB, json.loads((home / "results/fix_report.json").read_text())


def processors(of: int) -> float:
    used = resource.getrusage(of)
    return used.ru_utime + used.ru_stime


def loop(raw: Path, answers: str, limit: int) -> tuple[float, float]:
    """Seconds per row of the plain loop, by the clock and of the processor."""
    busy, schema = processors(resource.RUSAGE_SELF), load_table_file(ROOT / "data/tables/weather.yaml")
    started, seen, count = time.perf_counter(), set(), 0
    with raw.open() as file, (raw.parent / "loop.jsonl").open("w") as out:
        for line in itertools.islice(file, limit):
            count += 1
            turns = json.loads(line)["conversations"]
            kept, question = [], ""
            for turn in turns:
                role = {"human": "user", "gpt": "assistant"}.get(turn["from"], turn["from"])
                text = turn["value"]
                if role == "user":
                    question = text
                if role == "assistant" and answers == "toon":
                    text = toon.repair_toon(text, "strip", schema, question).text
                kept.append({"role": role, "content": text})
            digest = hashlib.sha256(json.dumps(kept).encode()).digest()
            if digest not in seen:
                seen.add(digest)
                out.write(json.dumps({"messages": kept}) + "\n")
    return (time.perf_counter() - started) / count, (processors(resource.RUSAGE_SELF) - busy) / count


def main() -> None:
    asked = argparse.ArgumentParser()
    asked.add_argument("--rows", type=int, default=1_000_000)
    asked.add_argument("--toon-rows", type=int, default=100_000)
    args = asked.parse_args()
    hardware = torch_records.describe_hardware("cpu", 2)
    print(f"{dt.date.today()}, {hardware['cpu']}, Python {hardware['python']}; `{' '.join(sys.argv)}`\n")
    head = ["rows", "file, MiB", "answers", "near_duplicate", "seconds", "rows/s", "CPU µs/row", "plain loop: rows/s"]
    head += ["its CPU µs/row", "peak MiB", "out", "near"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as folder:
        cases: list[tuple[str, int, Callable[[int], Iterator[str]], dict[str, Any]]] = [
            ("chat", args.rows, chat, {"answers": "text", "near_duplicate_threshold": None}),
            ("chat", args.rows, chat, {"answers": "text", "near_duplicate_threshold": 0.8}),
            ("weather", args.toon_rows, weather, {"answers": "toon", "near_duplicate_threshold": None}),
        ]
        loops: dict[str, tuple[float, float]] = {}
        for name, rows, make, changes in cases:
            raw = project(Path(folder) / name, make(rows), **changes)
            if name not in loops:
                loops[name] = loop(
                    raw, changes["answers"], min(rows, 200_000 if changes["answers"] == "text" else 20_000)
                )
            seconds, busy, peak, report = stage(raw.parent)
            speed = rows / seconds
            print(
                f"| {rows:,} | {raw.stat().st_size / MIB:,.0f} | {changes['answers']} | {changes['near_duplicate_threshold']} | "
                f"{seconds:.1f} | {speed:,.0f} | {1e6 * busy / rows:.0f} | {1 / loops[name][0]:,.0f} | "
                f"{1e6 * loops[name][1]:.0f} | {peak:,.0f} | "
                f"{report['rows_out']:,} | {(report['near_duplicates'] or {}).get('dropped', '')} |",
                flush=True,
            )
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
