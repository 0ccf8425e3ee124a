"""Show what fix_data makes of the first rows of each raw file.   python -m stages.data.preview ROWS [PATH]

Reads `fix_data` of params.yaml, or PATH instead of its `raw`, judges each row as the stage does, and writes nothing that a
stage reads. Duplicates are found only by the stage, which sees all rows.
"""

import sys
import tempfile
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import polars as pl

from stages.data import column_names, json_lines, readers, row_cleaning
from stages.data.readers import ArrowRows, RawChunk
from stages.data.row_cleaning import WAITING_IMAGES_FOLDER
from stages.params.checks import check_raw
from stages.params.data_sections import FixData
from stages.params.schema import load_params
from stages.telemetry.run_stage import run_stage

SHOWN_CHARACTERS = 160  # of a text
SHOWN_TURNS = 6


@dataclass(frozen=True)
class PreviewedRow:
    """One raw row and what it becomes."""

    source: str
    number: int
    chat_format: str
    verdict: str  # clean, repaired:rule,rule, or dropped:reason
    split: str  # train or eval; "" where the row is dropped
    turns: list[tuple[str, str]]  # (role, text); of a dropped row its keys or the offending text
    extras: tuple[str, ...] = ()  # tools and images of a kept row
    expected: str = ""  # of a dropped row whose reason does not say it
    unread: tuple[str, ...] = ()  # its keys that hold something and are not read
    advice: str = ""  # on the key of params.yaml that a dropped row's reason belongs to


def main(rows: str, path: str = "") -> None:
    params = load_params()
    fix = params.fix_data
    if path:
        if not Path(path).exists():
            raise ValueError(f"{path} does not exist; give a file or a folder of raw data (docs/data.md)")
        fix = fix.model_copy(update={"eval_file": None, "eval_rows": None})
    else:
        check_raw(params)
    kept = print_preview(fix, int(rows), path)
    if not kept:
        sys.exit(1)


def print_preview(params: FixData, rows: int, path: str = "") -> int:
    """Print the first `rows` rows of each file, and a summary; return how many of them are kept. `path` as in preview_rows."""
    verdicts: Counter[str] = Counter()
    splits: Counter[str] = Counter()
    unread: Counter[str] = Counter()
    advice: dict[str, None] = {}  # a set in order
    source = None
    counts: Counter[str] = Counter()
    for row in preview_rows(params, rows, counts, path):
        if row.source != source:
            source = row.source
            print(f"{source}")
        print(*format_row(row), sep="\n", flush=True)
        verdicts[row.verdict] += 1
        splits[row.split] += 1
        unread.update(row.unread)
        advice |= {row.advice: None} if row.advice else {}
    counted = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())) or "no rows"
    of_files = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    print("", f"rows of each file: {of_files}", sep="\n")
    if ignored := readers.describe_ignored_files(Path(path or params.raw)):
        print(ignored)
    print(f"{verdicts.total()} rows read, the first {rows} of each file: {counted}")
    print(f"{splits['train']} to train, {splits['eval']} to eval; nothing was written, duplicates were not looked for")
    if unread:
        print(f"not read: {row_cleaning.describe_unread(unread)}")
    if splits[""]:
        print("; ".join(["docs/data.md says what each reason means", *advice]))
    return splits["train"] + splits["eval"]


def preview_rows(params: FixData, rows: int, counts: Counter[str], path: str = "") -> Iterator[PreviewedRow]:
    """Yield what the first `rows` rows of each file become; images are looked at in a temporary folder.

    `counts` takes the number of all rows of each file, but for the Hub's datasets, of which no more than these are fetched.
    The files are those of `path`, or of `params.raw` where that is "". Column maps are by paths in `params.raw` in both cases.
    """
    raw = Path(path or params.raw)
    with tempfile.TemporaryDirectory(prefix="aerie-preview-") as name:
        (Path(name) / WAITING_IMAGES_FOLDER.name).mkdir()
        files = readers.list_files(raw)
        for file in files:
            source = readers.name_source(file, raw)
            chunks = readers.read_chunks(file, source, {}, params.choose_columns(file))
            counts[source] = 0
            each = _cut_rows(_count_rows(chunks, counts))
            for row_chunk in islice(each, rows):
                yield _preview_row(row_chunk, params, Path(name) / "row.arrow")
            if readers.detect_file_kind(file) != readers.HUB_PIN_SUFFIX:
                deque(_count_rows(chunks, counts), maxlen=0)


def _count_rows(chunks: Iterator[RawChunk], counts: Counter[str]) -> Iterator[RawChunk]:
    for chunk in chunks:
        rows = chunk.rows
        counts[chunk.source] += (
            len(rows) if isinstance(rows, ArrowRows) else sum(not json_lines.is_blank(row) for row in rows)
        )
        yield chunk


def _cut_rows(chunks: Iterator[RawChunk]) -> Iterator[RawChunk]:
    """Yield each row as a chunk of its own, so that each has its own verdict."""
    for chunk in chunks:
        frame = pl.read_ipc(chunk.rows.data, use_pyarrow=False) if isinstance(chunk.rows, ArrowRows) else None
        for offset in range(len(chunk.rows)):
            if frame is not None:
                yield replace(chunk, first_row=chunk.first_row + offset, rows=ArrowRows.from_frame(frame[offset]))
            elif not json_lines.is_blank(chunk.rows[offset]):  # type: ignore[index]
                yield replace(chunk, first_row=chunk.first_row + offset, rows=chunk.rows[offset : offset + 1])  # type: ignore[index]


def _preview_row(chunk: RawChunk, params: FixData, file: Path) -> PreviewedRow:
    judged = row_cleaning.judge_chunk(chunk, params, file)
    source, chat_format, unread = chunk.source, next(iter(judged.formats), "unknown"), tuple(judged.unread)
    if judged.dropped:
        (reason,) = judged.dropped
        first = judged.first_dropped[reason]
        found, advice = first.found, row_cleaning.advise_on_answers(params, reason) if first.is_of_answer else ""
        if reason == "unknown_format" and not first.expected:
            (_, row), *_ = readers.parse_chunk(chunk)
            found = f"{column_names.list_names(row or {})}: {found}"
            advice = "fix_data.columns names the columns of another format"
        return PreviewedRow(
            source,
            chunk.first_row,
            chat_format,
            f"dropped:{reason}",
            "",
            [("found", found)],
            (),
            first.expected,
            unread,
            advice,
        )
    kept = pl.read_ipc(file.read_bytes()).row(0, named=True)
    turns = [(message["role"], message["content"]) for message in kept["messages"]]
    calls = [
        one for (role, _), one in zip(turns, kept["tool_calls"] or [], strict=False) if one and role == "assistant"
    ]
    counted = {
        "tool call(s)": len(calls),
        "image(s)": len(kept["images"] or []),
        "character(s) of tools": len(kept["tools"] or ""),
    }
    extras = tuple(f"{count} {what}" for what, count in counted.items() if count)
    split = "eval" if kept["is_eval"] else "train"
    return PreviewedRow(source, chunk.first_row, chat_format, kept["verdict"], split, turns, extras, unread=unread)


def format_row(row: PreviewedRow) -> Iterator[str]:
    """Yield the lines of one row: its verdict, then its turns, long ones abbreviated."""
    kept = f", to {row.split}" if row.split else ""
    extras = f"; {', '.join(row.extras)}" if row.extras else ""
    yield f"  row {row.number}: {row.chat_format}, {row.verdict}{kept}{extras}"
    for role, text in row.turns[:SHOWN_TURNS]:
        shown = " ⏎ ".join(text.splitlines()) if text else "(no text)"
        more = f"… ({len(text):,} characters)" if len(shown) > SHOWN_CHARACTERS else ""
        yield f"      {role}: {shown[:SHOWN_CHARACTERS]}{more}"
    if row.expected:
        yield f"      expected: {row.expected}"
    if len(row.turns) > SHOWN_TURNS:
        yield f"      ... and {len(row.turns) - SHOWN_TURNS} more turns"


if __name__ == "__main__":
    run_stage(main)
