"""Raw conversations -> clean, repaired or dropped, split into train and eval.

    python -m stages.fix_data

Reads what `fix_data.raw` is (stages/data/readers.py), writes data/fixed/{train,eval}.parquet in source order, the
pictures, named by their content, to data/fixed/images/, and results/fix_report.json. A line that is no conversation stops the
stage, since the file is then not what its name says (with format: auto, only one that is no JSON object does); a
conversation that is broken inside is dropped with a reason and counted, and too many of them stop the stage. Rows in =
clean + repaired + dropped, asserted.

A million rows fit in memory: rows are judged in chunks, each alone and so in several processes, and wait on disk as
Arrow files. What is kept of each row is its digests, its name and its signature; from these alone is decided, over all rows,
who goes where. Then the waiting files are filtered and streamed into the two tables. The number of processes changes no byte.
"""

import hashlib
import json
import multiprocessing
import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson
import polars as pl

from stages.data import chat_formats, conversations, images, near_duplicates, readers, toon
from stages.data.chat_formats import DroppedRowError, Message
from stages.params.data_sections import FixData
from stages.params.schema import Params, check_raw_exists, load_params
from stages.runtime import atomic, scratch
from stages.telemetry.run_stage import run_stage

TRAIN_FILE, EVAL_FILE = Path("data/fixed/train.parquet"), Path("data/fixed/eval.parquet")
IMAGES_FOLDER = Path("data/fixed/images")  # of all pictures, so that no later stage reads the user's own files
REPORT = Path("results/fix_report.json")
WAITING_FOLDER = Path(".scratch/fix_data")
WAITING_IMAGES_FOLDER = WAITING_FOLDER / "images"
MAX_PROCESSES = 8  # each holds a Python and some chunks, about 200 MiB
MAX_PAIR_EXAMPLES = 5  # of pairs of near duplicates
DIGEST_BYTES = 16  # bytes of a row's digest that are kept: no two rows of a billion meet by chance

# Where a row goes.
FATE_TRAIN, FATE_EVAL, FATE_DUPLICATE, FATE_IN_EVAL, FATE_NEAR_DUPLICATE, FATE_NEAR_EVAL = range(6)
DROP_REASONS = {
    FATE_DUPLICATE: "duplicate", FATE_IN_EVAL: "in_eval", FATE_NEAR_DUPLICATE: "near_duplicate", FATE_NEAR_EVAL: "near_eval",
}  # fmt: skip


@dataclass(frozen=True)
class RepairedAnswer:
    """One repaired answer, for the report's examples."""

    before: str
    after: str
    rules: list[str]


@dataclass(frozen=True)
class DroppedExample:
    """One dropped row, for messages."""

    where: str
    found: str = ""  # the beginning of what is wrong with it, or of the row


@dataclass
class JudgedChunk:
    """What one chunk became: its rows wait in `file`, and here is what the decisions need of them."""

    file: Path
    rows_in: int = 0
    source: str = ""
    names: list[str] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of the whole conversation
    openings: list[bytes] = field(default_factory=list)  # of its system message and first question
    evaluation: list[bool] = field(default_factory=list)
    signatures: np.ndarray | None = None
    formats: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    lost: dict[str, DroppedExample] = field(default_factory=dict)  # reason -> the first row it met
    examples: dict[str, RepairedAnswer] = field(default_factory=dict)  # rule -> where it acts with the fewest others


def main() -> None:
    params = load_params()
    check_raw_exists(params)
    with scratch.held(WAITING_FOLDER):
        _fix(params)


def _fix(params: Params) -> None:
    """Judge every row, decide which stay, and write the two splits and the report."""
    started = time.perf_counter()
    shutil.rmtree(WAITING_FOLDER, ignore_errors=True)  # what a killed run left
    WAITING_IMAGES_FOLDER.mkdir(parents=True)
    try:
        pinned: dict[str, Any] = {}
        parts = list(judge_chunks(params.fix_data, pinned))
        fates, likeness = assign_splits(parts, params.fix_data)
        report = write_splits(parts, fates, params.fix_data) | likeness
        if likeness["near_duplicates"] is not None:
            report["near_duplicates"]["examples"] = read_pair_texts(parts, report["near_duplicates"].pop("pairs"))
    finally:
        shutil.rmtree(WAITING_FOLDER, ignore_errors=True)
    seconds = time.perf_counter() - started
    report |= {"hub": pinned, "rows_per_second": round(report["rows_in"] / seconds), "seconds": round(seconds, 3)}
    atomic.write_json(REPORT, report)
    print(
        f"fix_data: {report['rows_in']} rows = {report['clean']} clean + {report['repaired']} repaired + "
        f"{report['dropped']} dropped; {report['train']} to train, {report['eval']} to eval"
    )


# --- each row alone -------------------------------------------------------------------------------------------------


def judge_chunks(params: FixData, pinned: dict[str, Any]) -> Iterator[JudgedChunk]:
    """A part for each chunk, in order. One chunk is judged here; more go to other processes, a few at a time."""
    evaluation = params.eval_path()
    given = Path(params.raw)
    first = evaluation.relative_to(given if given.is_dir() else given.parent).as_posix() if evaluation else None
    chunks = readers.read_all_chunks(given, first, pinned)
    start = list(islice(chunks, 2))
    jobs = ((c, params, WAITING_FOLDER / f"{n:06}.arrow", first) for n, c in enumerate(chain(start, chunks)))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(MAX_PROCESSES, cores)
    if len(start) < 2 or workers < 2:
        yield from (judge_chunk(*job) for job in jobs)
        return
    # spawn: a fork of a process in which polars has threads may hang.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        waiting: deque[Future[JudgedChunk]] = deque()
        try:
            for job in jobs:
                waiting.append(pool.submit(judge_chunk, *job))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise ValueError(
                f"fix_data: one of {workers} processes was killed, expected each to have some 200 MiB of memory; free "
                "some, or give the stage fewer cores: taskset -c 0 python -m stages.fix_data"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def judge_chunk(chunk: readers.RawChunk, params: FixData, file: Path, eval_source: str | None) -> JudgedChunk:
    """Judge each row of a chunk by itself; what may be kept is written to `file`."""
    part = JudgedChunk(file, source=chunk.source)
    kept: list[chat_formats.Conversation] = []
    for place, row in readers.parse_chunk(chunk):
        part.rows_in += 1
        try:
            if row is None:
                raise DroppedRowError("nested_too_deep")
            conversation, answers = judge_row(row, params, chunk, place, part.formats)
        except DroppedRowError as reason:
            part.dropped[str(reason)] += 1
            if str(reason) not in part.lost:
                found = "" if row is None else readers.abbreviate_row(row if reason.text is None else reason.text)
                part.lost[str(reason)] = DroppedExample(f"{chunk.source}, row {place}", found)
            continue
        rules = list(dict.fromkeys(rule for answer in answers for rule in answer.rules))
        for answer in answers:
            keep_plainest_examples(part.examples, answer)
        kept.append(conversation)
        part.verdicts.append(f"repaired:{','.join(rules)}" if rules else "clean")
        given = "" if row.get("id") is None else str(row["id"])
        given = given or str(row.get("prompt_id") or "")
        part.names.append(given if given and chat_formats.is_text(given) else f"line-{place}")
        part.places.append(place)
        opening = hash_conversation(get_opening(conversation.messages), conversation.images)
        whole = orjson.dumps([conversation.messages, conversation.extras()])
        part.digests.append(hashlib.sha256(whole).digest()[:DIGEST_BYTES])
        part.openings.append(opening[:DIGEST_BYTES])
        if eval_source is None:
            part.evaluation.append(int.from_bytes(opening[:8]) < params.eval_share * 2**64)
        else:
            first = params.eval_rows is None or place < params.eval_rows
            part.evaluation.append(chunk.source == eval_source and first)
    if params.near_duplicate_threshold is not None:
        part.signatures = near_duplicates.compute_signatures(
            ["\n".join(m["content"] for m in c.messages) for c in kept]
        )
    build_table(kept, part).write_ipc(file, compression="lz4")
    return part


def judge_row(
    row: dict[str, Any], params: FixData, chunk: readers.RawChunk, place: int, formats: Counter[str]
) -> tuple[chat_formats.Conversation, list[RepairedAnswer]]:
    """A row as it travels on, and what was repaired in it. Length is of this: prose that was stripped doesn't count.

    Raises:
        Dropped: with the reason.
        ValueError: where the row is not of the format that params.yaml insists on.
    """
    kind = chat_formats.detect_format(row) if params.format == "auto" else params.format
    formats[kind or "unknown"] += 1
    if kind is None:
        raise DroppedRowError("unknown_format")
    if not chat_formats.has_format(row, kind):
        raise ValueError(
            f"{chunk.shown}, line {place + 1}: expected an object with {chat_formats.describe_format(kind)}, as fix_data.format: "
            f"{kind} says, found {readers.abbreviate_row(row)}; choose another format (auto, {', '.join(chat_formats.CHAT_FORMATS)}) or mend the file"
        )
    conversation = chat_formats.parse_conversation(row, kind, chunk.folder, save_waiting_image)
    if any(images.is_too_large(waiting_place(path)) for path in conversation.images or []):
        raise DroppedRowError("image_too_large")
    answers = repair_answers(conversation.messages, params.surrounding_text) if params.answers == "toon" else []
    length = sum(len(message["content"]) for message in conversation.messages)
    if conversation.reasoning:
        length += sum(len(thought) for thought in conversation.reasoning if thought)
    if length > params.max_chars:
        raise DroppedRowError("too_long")
    if length < params.min_chars:
        raise DroppedRowError("too_short")
    return conversation, answers


def save_waiting_image(data: bytes, extension: str | None) -> str | None:
    """Where a picture's bytes will lie, once its row is known to stay; until then it waits as the rows do."""
    name = images.save_image(data, WAITING_IMAGES_FOLDER, extension)
    return None if name is None else (IMAGES_FOLDER / name).as_posix()


def waiting_place(path: str) -> Path:
    """Return where a conversation's picture lies now: one that came as bytes is not yet in IMAGES."""
    place = Path(path)
    return WAITING_IMAGES_FOLDER / place.name if place.parent == IMAGES_FOLDER else place


def repair_answers(messages: list[Message], surrounding: Literal["strip", "keep"]) -> list[RepairedAnswer]:
    """Mend every answer in `messages`, in place; the horizon is what the question before it asked for.

    Raises:
        Dropped: for the first answer that can't be mended; the others of its row go with it.
    """
    mended = []
    question = messages[0]
    for before, answer in pairwise(messages):
        question = before if before["role"] == "user" else question
        if answer["role"] != "assistant" or not answer["content"]:  # a call for a tool has nothing to mend
            continue
        result = toon.repair_toon(answer["content"], toon.parse_horizon(question["content"]), surrounding)
        verdict, _, detail = result.verdict.partition(":")
        if verdict == "dropped":
            raise DroppedRowError(detail, answer["content"])
        if verdict == "repaired":
            mended.append(RepairedAnswer(answer["content"], result.text, detail.split(",")))
        answer["content"] = result.text
    return mended


def keep_plainest_examples(examples: dict[str, RepairedAnswer], answer: RepairedAnswer) -> None:
    """For each rule, the answer in which it acts alone, if anywhere; of like ones the first."""
    for rule in answer.rules:
        if rule not in examples or len(answer.rules) < len(examples[rule].rules):
            examples[rule] = answer


def build_table(kept: list[chat_formats.Conversation], part: JudgedChunk) -> pl.DataFrame:
    """The rows in the schema that travels on. Messages are laid flat first: ten times as quick as row by row."""
    flat = pl.DataFrame(
        {
            "row": [row for row, c in enumerate(kept) for _ in c.messages],
            "role": [m["role"] for c in kept for m in c.messages],
            "content": [m["content"] for c in kept for m in c.messages],
        },
        schema={"row": pl.Int32, "role": pl.String, "content": pl.String},
    )
    messages = flat.group_by("row", maintain_order=True).agg(pl.struct("role", "content").alias("messages"))
    columns = {
        "id": part.names,
        "messages": messages["messages"],
        "tools": [c.tools for c in kept],
        "tool_calls": [c.tool_calls for c in kept],
        "reasoning": [c.reasoning for c in kept],
        "images": [c.images for c in kept],
        "source": [part.source] * len(kept),
        "source_row": part.places,
        "verdict": part.verdicts,
    }
    return pl.DataFrame(columns, schema=conversations.FIXED_SCHEMA)


def hash_conversation(messages: list[Message], images: list[str] | None) -> bytes:
    """Of roles, contents and pictures; JSON keeps the border between two messages apart from their text.

    The text is json.dumps's, written out by its own encoder of strings: this is the one line that every row's time
    goes through.
    """
    said = [f'["{m["role"]}", {encode_basestring_ascii(m["content"])}]' for m in messages]
    if images:
        said.append(json.dumps(images))
    return hashlib.sha256(f"[{', '.join(said)}]".encode()).digest()


def get_opening(messages: list[Message]) -> list[Message]:
    """What decides between train and eval: system message and first question.

    Only that: every later prompt of a conversation begins with it, so no prompt, of any turn, is in both splits,
    though its answer or the turns after it differ. It depends on no other row, so adding rows moves none across.
    """
    return messages[:2] if messages[0]["role"] == "system" else messages[:1]


# --- all rows together ----------------------------------------------------------------------------------------------


def assign_splits(parts: list[JudgedChunk], params: FixData) -> tuple[np.ndarray, dict[str, Any]]:
    """(where each row goes, in order; the report of duplicates and of overlap between the splits).

    Of likes the first stays, and a training row gives way to an eval row.
    """
    evaluation = np.array([flag for part in parts for flag in part.evaluation], bool)
    fates = np.where(evaluation, FATE_EVAL, FATE_TRAIN).astype(np.int8)

    held_out = {o for part in parts for o, flag in zip(part.openings, part.evaluation, strict=True) if flag}
    known = {d for part in parts for d, flag in zip(part.digests, part.evaluation, strict=True) if flag}
    seen: set[bytes] = set()
    overlap = np.zeros(len(fates), bool)
    row = 0
    for part in parts:
        for digest, opening, flag in zip(part.digests, part.openings, part.evaluation, strict=True):
            if digest in seen and (flag or digest not in known):
                fates[row] = FATE_DUPLICATE
            elif not flag and opening in held_out:  # never by hash; with eval_file, what DVC can't know
                overlap[row] = True
            seen.add(digest)
            row += 1
    if params.eval_overlap == "remove":
        fates[overlap] = FATE_IN_EVAL
    report: dict[str, Any] = {
        "overlap": {"policy": params.eval_overlap, "exact": int(overlap.sum()), "near": None},
        "near_duplicates": None,
    }
    if params.near_duplicate_threshold is None or not len(fates):
        return fates, report

    kept = np.flatnonzero(fates <= FATE_EVAL)
    ranks = np.full(len(fates), -1)
    ranks[np.r_[kept[evaluation[kept]], kept[~evaluation[kept]]]] = np.arange(len(kept))  # eval rows come first
    signatures = [part.signatures for part in parts if part.signatures is not None]
    linked, alike = near_duplicates.find_similar_pairs(signatures, params.near_duplicate_threshold)
    both = (ranks[linked] >= 0).all(1)
    linked, alike = linked[both], alike[both]
    by_rank = np.argsort(np.where(ranks < 0, len(fates), ranks), kind="stable")[: len(kept)]
    first = by_rank[
        near_duplicates.group_duplicates(len(kept), ranks[linked])
    ]  # by rank: the row it hangs together with
    near = np.zeros(len(fates), bool)
    taken: set[int] = set()  # eval rows that a training row like them is kept beside
    for head, row in zip(first.tolist(), by_rank.tolist(), strict=True):
        if head == row:
            continue
        near[row] = beside = bool(evaluation[head] and not evaluation[row])
        if beside and params.eval_overlap == "remove":
            fates[row] = FATE_NEAR_EVAL
        elif not beside or head in taken:
            fates[row] = FATE_NEAR_DUPLICATE
        else:
            taken.add(head)
    report["overlap"]["near"] = int(near.sum())
    report["near_duplicates"] = {
        "threshold": params.near_duplicate_threshold,
        "measure": f"MinHash of {near_duplicates.MINHASH_SLOTS} slots over runs of {near_duplicates.SHINGLE_CHARACTERS} characters",
        "pairs_found": len(linked),
        "dropped": int((fates == FATE_NEAR_DUPLICATE).sum()),
        "pairs": [
            (int(a), int(b), round(float(x), 3))
            for (a, b), x in zip(linked[:MAX_PAIR_EXAMPLES], alike[:MAX_PAIR_EXAMPLES], strict=True)
        ],
    }
    return fates, report


def write_splits(parts: list[JudgedChunk], fates: np.ndarray, params: FixData) -> dict[str, Any]:
    """Stream the rows to their tables, and count them."""
    dropped, lost = count_dropped(parts, fates)
    rows_in, split = sum(part.rows_in for part in parts), Counter(fates[fates <= FATE_EVAL].tolist())
    check_split(split, dropped, params)
    check_dropped(rows_in, dropped, lost, params)
    examples: dict[str, RepairedAnswer] = {}
    verdicts: Counter[str] = Counter()
    names: set[str] = set()
    ids: list[str | None] = []
    start = 0
    for part in parts:
        mine = fates[start : start + len(part.names)]
        start += len(mine)
        for answer in part.examples.values():
            keep_plainest_examples(examples, answer)
        stays = (mine <= FATE_EVAL).tolist()
        verdicts.update(verdict for verdict, stay in zip(part.verdicts, stays, strict=True) if stay)
        ids += [
            make_unique_name(name, place, names) if stay else None
            for name, place, stay in zip(part.names, part.places, stays, strict=True)
        ]
    chosen = WAITING_FOLDER / "chosen.arrow"
    pl.DataFrame({"id": ids, "fate": fates}, schema={"id": pl.String, "fate": pl.Int8}).write_ipc(chosen)
    rows = pl.scan_ipc([part.file for part in parts]).drop("id")
    together = pl.concat([pl.scan_ipc(chosen), rows], how="horizontal")
    for path, fate in ((TRAIN_FILE, FATE_TRAIN), (EVAL_FILE, FATE_EVAL)):
        mine_only = together.filter(pl.col("fate") == fate).select(conversations.FIXED_SCHEMA.names())
        conversations.stream_table(path, mine_only, conversations.FIXED_SCHEMA)
    kept_pictures = publish_images()

    rows_out = sum(split.values())
    clean = verdicts["clean"]
    assert rows_in == rows_out + dropped.total() and rows_out == verdicts.total(), (rows_in, rows_out, dropped)
    rules: Counter[str] = Counter()
    for verdict, count in verdicts.items():
        if verdict != "clean":
            rules.update(dict.fromkeys(verdict.removeprefix("repaired:").split(","), count))
    return {
        "rows_in": rows_in,
        "clean": clean,
        "repaired": rows_out - clean,
        "dropped": dropped.total(),
        "rows_out": rows_out,
        "train": split[FATE_TRAIN],
        "eval": split[FATE_EVAL],
        "formats": dict(sorted(sum((part.formats for part in parts), Counter[str]()).items())),
        "rules": dict(sorted(rules.items())),
        "dropped_reasons": dict(sorted(dropped.items())),
        "dropped_first": {reason: lost[reason].where for reason in sorted(lost)},
        "pictures_written": kept_pictures,
        "examples": {rule: {"before": examples[rule].before, "after": examples[rule].after} for rule in sorted(rules)},
    }


def count_dropped(parts: list[JudgedChunk], fates: np.ndarray) -> tuple[Counter[str], dict[str, DroppedExample]]:
    """(how many rows each reason dropped, the first of each)."""
    dropped = sum((part.dropped for part in parts), Counter[str]())
    lost: dict[str, DroppedExample] = {}
    start = 0
    for part in parts:
        mine = fates[start : start + len(part.names)]
        start += len(mine)
        for fate in np.unique(mine[mine > FATE_EVAL]).tolist():
            dropped[DROP_REASONS[fate]] += int((mine == fate).sum())
            lost.setdefault(
                DROP_REASONS[fate], DroppedExample(f"{part.source}, row {part.places[int(np.argmax(mine == fate))]}")
            )
        lost = part.lost | lost
    return dropped, lost


def publish_images() -> int:
    """Move the pictures that the two tables name to their place; those of dropped rows are forgotten. How many stay."""
    column = pl.concat([pl.scan_parquet(path).select(pl.col("images").explode()) for path in (TRAIN_FILE, EVAL_FILE)])
    here = column.filter(pl.col("images").str.starts_with(f"{IMAGES_FOLDER.as_posix()}/")).unique()
    names = [Path(path).name for path in here.collect(engine="streaming")["images"]]
    with atomic.write_folder(IMAGES_FOLDER) as folder:  # also where there is none: DVC expects what it was told of
        for name in names:
            shutil.move(WAITING_IMAGES_FOLDER / name, folder / name)
    return len(names)


def make_unique_name(given: str, place: int, taken: set[str]) -> str:
    """The row's own id, or its line; made unique by the line, since later stages name answers by it."""
    name = given
    while name in taken:
        name += f"@{place}"
    taken.add(name)
    return name


def check_split(split: Counter[int], dropped: Counter[str], params: FixData) -> None:
    """Raises ValueError where a split has no rows: the stages after this one could only fail on it."""
    rows = split.total()
    reasons = ", ".join(f"{reason} {n}" for reason, n in dropped.most_common()) or "it has no lines"
    if rows == 0:
        raise ValueError(
            f"{params.raw}: expected conversations to keep, found none ({reasons}); "
            f"if its answers are no TOON tables, set fix_data.answers: text"
        )
    if split[FATE_EVAL] and split[FATE_TRAIN]:
        return
    name = "train" if split[FATE_EVAL] else "eval"
    if params.eval_file is not None:
        raise ValueError(
            f"fix_data.eval_file {params.eval_file} (eval_rows {params.eval_rows}) leaves the {name} split of {rows} rows "
            f"empty ({reasons}); change eval_rows, or give more rows"
        )
    change = "lower" if name == "train" else "raise"
    raise ValueError(
        f"fix_data.eval_share is {params.eval_share}, which leaves the {name} split of {rows} rows empty; "
        f"{change} it or give more rows"
    )


def check_dropped(rows: int, dropped: Counter[str], lost: dict[str, DroppedExample], params: FixData) -> None:
    """Raises ValueError where a larger share of the rows is lost than fix_data.max_dropped_share allows.

    The message holds what the report would: the report itself tells of tables, and then there are none.
    """
    most = params.max_dropped_share
    if most is None or dropped.total() <= most * rows:
        return
    reasons = "".join(
        f"\n  {reason} {count}, first {lost[reason].where}{': ' if lost[reason].found else ''}{lost[reason].found}"
        for reason, count in dropped.most_common()
    )
    raise ValueError(
        f"{params.raw}: {dropped.total()} of {rows} rows ({dropped.total() / rows:.0%}) are dropped, expected at most "
        f"{most:.0%} (fix_data.max_dropped_share):{reasons}\nMend the data or the parameters these reasons belong to "
        "(docs/data.md), or raise max_dropped_share"
    )


def read_pair_texts(parts: list[JudgedChunk], pairs: list[tuple[int, int, float]]) -> list[dict[str, Any]]:
    """The texts of some pairs that were taken for the same, so that a human can judge the threshold."""
    starts = np.cumsum([0] + [len(part.names) for part in parts])

    def text(row: int) -> str:
        home = int(np.searchsorted(starts, row, side="right")) - 1
        messages = pl.read_ipc(parts[home].file)["messages"][row - int(starts[home])]
        return "\n".join(message["content"] for message in messages)[:1000]

    return [{"first": text(a), "second": text(b), "likeness": likeness} for a, b, likeness in pairs]


if __name__ == "__main__":
    run_stage(main)
