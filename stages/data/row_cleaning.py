"""Judge raw rows one at a time: parse, repair, keep or drop.

A verdict depends on no other row, so chunks are judged in parallel processes. The kept rows of a chunk wait in an Arrow file,
with the digests by which `assign_splits` finds duplicates and sends each row to train or eval.
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import pairwise
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import polars as pl

from stages.data import chat_formats, conversations, images, json_lines, readers, request_logs
from stages.data.chat_formats import Conversation
from stages.data.chat_turns import Message
from stages.data.conversations import describe_origin
from stages.data.json_lines import is_text
from stages.data.row_images import DroppedRowError
from stages.data.tables import json_answers, toon
from stages.data.tables.table_schema import load_table_file
from stages.params.data_sections import FixData
from stages.params.units import list_first

IMAGES_FOLDER = Path("data/fixed/images")  # copies of every kept image: later stages never read the user's own files
WAITING_FOLDER = Path(".scratch/fix_data")
WAITING_IMAGES_FOLDER = WAITING_FOLDER / "images"
MAX_UNREAD = 12  # keys in a line; further ones are in the report
DIGEST_BYTES = 16  # at a billion rows, the chance of any collision is below 1e-20
WAITING_SCHEMA = pl.Schema(
    {
        **conversations.FIXED_SCHEMA,  # `id` is not unique yet
        "digest": pl.Binary,  # of the whole conversation
        "opening_digest": pl.Binary,  # of system message and first question
        "is_eval": pl.Boolean,
    }
)


@dataclass(frozen=True)
class RepairedAnswer:
    """One repaired answer, or turns that were cut off (`after` is ""), shown in the report."""

    origin: str  # file and row of the raw data
    before: str
    after: str
    rules: list[str]


class UnusableAnswerError(DroppedRowError):
    """A row with an answer that can't be decoded as `fix_data.answers` says."""


@dataclass(frozen=True)
class DroppedExample:
    """One dropped row, shown in messages."""

    where: str
    found: str = ""  # start of the offending text, or of the row; or a description of it, and then:
    expected: str = ""  # what was expected, and what to do
    is_of_answer: bool = False  # dropped by an answer that can't be decoded as fix_data.answers says

    @property
    def explanation(self) -> str:
        """Return what was found and expected, for a line that begins with the reason."""
        return ", expected ".join(filter(None, [self.found, self.expected]))


@dataclass(frozen=True)
class KeptRow:
    """A kept row on its way to the Arrow file: the conversation, and columns of WAITING_SCHEMA."""

    conversation: Conversation
    id: str
    source_row: int
    verdict: str
    digest: bytes
    opening_digest: bytes
    is_eval: bool


@dataclass
class JudgedChunk:
    """Verdicts on one chunk. The kept rows are in `file`, in source order, as WAITING_SCHEMA."""

    file: Path
    source: str  # of the rows
    rows_in: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    first_dropped: dict[str, DroppedExample] = field(default_factory=dict)  # by reason
    unread: Counter[str] = field(default_factory=Counter)  # rows by a key that they hold and that is not read
    examples: dict[str, RepairedAnswer] = field(default_factory=dict)  # by rule: the answer with the fewest other rules


def judge_chunk(chunk: readers.RawChunk, params: FixData, file: Path) -> JudgedChunk:
    """Judge each row of a chunk and write the kept ones to `file`."""
    judged, images_folder = JudgedChunk(file, chunk.source), file.parent / WAITING_IMAGES_FOLDER.name
    kept: list[KeptRow] = []
    in_eval_file = params.is_eval_source(chunk.source)
    for source_row, row in readers.parse_chunk(chunk):
        judged.rows_in += 1
        try:
            if row is None:
                raise DroppedRowError("nested_too_deep")
            row = request_logs.unwrap_log(row)
            conversation, repaired = judge_row(row, params, chunk, source_row, judged, images_folder)
        except DroppedRowError as error:
            reason = str(error)
            judged.dropped[reason] += 1
            if reason not in judged.first_dropped:
                where = describe_origin(chunk.source, source_row)
                judged.first_dropped[reason] = _describe_dropped(where, row, error)
            continue
        for answer in repaired:
            keep_plainest_examples(judged.examples, answer)
        rules = dict.fromkeys(rule for answer in repaired for rule in answer.rules)
        whole = hashlib.sha256(orjson.dumps([conversation.messages, conversation.list_extras()])).digest()
        opening = hash_opening(conversation)
        if params.eval_file is None:
            is_eval = int.from_bytes(opening[:8]) < params.eval_share * 2**64
        else:
            is_eval = in_eval_file and (params.eval_rows is None or source_row < params.eval_rows)
        verdict = f"repaired:{','.join(rules)}" if rules else "clean"
        digests = whole[:DIGEST_BYTES], opening[:DIGEST_BYTES]
        kept.append(KeptRow(conversation, _name_row(row, source_row), source_row, verdict, *digests, is_eval))
    _build_table(kept, chunk.source).write_ipc(file, compression="lz4")
    return judged


def _describe_dropped(where: str, row: dict[str, Any] | None, error: DroppedRowError) -> DroppedExample:
    if error.found is not None and error.expected:
        return DroppedExample(where, error.found, error.expected)
    found = row if error.found is None else error.found
    shown = "" if row is None else json_lines.abbreviate_row(found)
    return DroppedExample(where, shown, is_of_answer=isinstance(error, UnusableAnswerError))


def describe_unread(unread: Counter[str]) -> str:
    """Return the keys that are not read with the number of rows that hold them, the most frequent first."""
    return list_first((f"{key} (in {count:,} rows)" for key, count in unread.most_common()), MAX_UNREAD)


def advise_on_answers(params: FixData, reason: str) -> str:
    """Return what to do where rows are dropped for this reason, by answers that can't be decoded."""
    is_not = f"no {params.answers.upper()}, set fix_data.answers: text (docs/data.md)"
    if params.tables is None:
        return f"if the answers are {is_not}"
    schema = f"not of the schema {params.tables}, set fix_data.tables to null or to a file of your own"
    first, then = (is_not, schema) if reason == "no_table" else (schema, is_not)  # most likely prose
    return f"if the answers are {first}; if they are {then}"


def judge_row(
    row: dict[str, Any],
    params: FixData,
    chunk: readers.RawChunk,
    source_row: int,
    judged: JudgedChunk,
    images_folder: Path = WAITING_IMAGES_FOLDER,
) -> tuple[Conversation, list[RepairedAnswer]]:
    """Return (the conversation after repair, its repaired answers and cut turns), and count its format and unread keys.

    Length limits apply after repair.

    Raises:
        DroppedRowError: with the reason.
        ValueError: where the row is not of the format that params.yaml insists on.
    """
    chat_format = chat_formats.detect_format(row) if params.format == "auto" else params.format
    judged.formats[chat_format or "unknown"] += 1
    if chat_format is None:
        raise DroppedRowError("unknown_format", *chat_formats.explain_unknown_format(row))
    if not chat_formats.has_format(row, chat_format):
        raise ValueError(
            f"{chunk.display_name}, line {source_row + 1}: expected an object with {chat_formats.describe_format(chat_format)}, "
            f"as fix_data.format: {chat_format} says, found {json_lines.abbreviate_row(row)}; choose another format "
            f"(auto, {', '.join(chat_formats.CHAT_FORMATS)}) or fix the file"
        )
    save_image = partial(save_waiting_image, folder=images_folder)
    judged.unread.update(chat_formats.list_unread_keys(row, chat_format))
    conversation = chat_formats.parse_conversation(row, chat_format, chunk.folder, save_image, params.image_roots())
    origin = describe_origin(chunk.source, source_row)
    repaired = repair_answers(conversation.messages, params, origin) if params.answers != "text" else []
    length = sum(len(message["content"]) for message in conversation.messages)
    if conversation.reasoning:
        length += sum(len(reasoning) for reasoning in conversation.reasoning if reasoning)
    if length > params.max_chars:
        raise DroppedRowError("too_long")
    if length < params.min_chars:
        raise DroppedRowError("too_short")
    trimmed = [RepairedAnswer(origin, text, "", [kind]) for kind, text in sorted(conversation.trimmed.items())]
    return conversation, [*trimmed, *repaired]


def save_waiting_image(data: bytes, extension: str | None, folder: Path = WAITING_IMAGES_FOLDER) -> str | None:
    """Save an image among the waiting rows and return its final path; None for bytes that are no known image."""
    name = images.save_image(data, folder, extension)
    return None if name is None else (IMAGES_FOLDER / name).as_posix()


def repair_answers(messages: list[Message], params: FixData, origin: str) -> list[RepairedAnswer]:
    """Repair every answer of `messages` in place. A schema may find the number of rows in the question before it.

    `origin` is the file and row of the raw data, for the report.

    Raises:
        UnusableAnswerError: for the first answer that can't be repaired; the whole conversation is dropped with it.
    """
    schema = None if params.tables is None else load_table_file(Path(params.tables))
    repair = toon.repair_toon if params.answers == "toon" else json_answers.repair_json
    repaired, question = [], messages[0]
    for before, answer in pairwise(messages):
        question = before if before["role"] == "user" else question
        if answer["role"] != "assistant" or not answer["content"]:  # a tool call has no text
            continue
        result = repair(answer["content"], params.surrounding_text, schema, question["content"])
        verdict, _, detail = result.verdict.partition(":")
        if verdict == "dropped":
            raise UnusableAnswerError(detail, answer["content"])
        if verdict == "repaired":
            repaired.append(RepairedAnswer(origin, answer["content"], result.text, detail.split(",")))
        answer["content"] = result.text
    return repaired


def keep_plainest_examples(examples: dict[str, RepairedAnswer], answer: RepairedAnswer) -> None:
    """Keep for each rule the answer with the fewest rules; the first of equals."""
    for rule in answer.rules:
        if rule not in examples or len(answer.rules) < len(examples[rule].rules):
            examples[rule] = answer


def hash_opening(conversation: Conversation) -> bytes:
    """Return SHA-256 of system message and first question, which assigns the conversation to train or eval.

    Every later prompt of a conversation starts with them, so no prompt of any turn is in both splits, even where answers
    or later turns differ. They depend on no other row, so adding rows moves none to the other split.

    Hashed are roles, contents and image paths as json.dumps writes them, assembled by hand from the encoder of strings: every
    row passes here, and json.dumps takes longer.
    """
    messages = conversation.messages
    opening = messages[:2] if messages[0]["role"] == "system" else messages[:1]
    parts = [f'["{m["role"]}", {encode_basestring_ascii(m["content"])}]' for m in opening]
    if conversation.images:
        parts.append(json.dumps(conversation.images))
    return hashlib.sha256(f"[{', '.join(parts)}]".encode()).digest()


def _name_row(row: dict[str, Any], source_row: int) -> str:
    """Return the row's own id or prompt_id as text, or `line-N`."""
    given = "" if row.get("id") is None else str(row["id"])
    given = given or str(row.get("prompt_id") or "")
    return given if given and is_text(given) else f"line-{source_row}"


def _build_table(kept: list[KeptRow], source: str) -> pl.DataFrame:
    """Return the kept rows as WAITING_SCHEMA. Messages are built from flat columns: ten times as fast as row by row."""
    all_conversations = [kept_row.conversation for kept_row in kept]
    flat = pl.DataFrame(
        {
            "row": [row for row, c in enumerate(all_conversations) for _ in c.messages],
            "role": [m["role"] for c in all_conversations for m in c.messages],
            "content": [m["content"] for c in all_conversations for m in c.messages],
        },
        schema={"row": pl.Int32, "role": pl.String, "content": pl.String},
    )
    messages = flat.group_by("row", maintain_order=True).agg(pl.struct("role", "content").alias("messages"))
    columns: dict[str, Any] = {"messages": messages["messages"], "source": [source] * len(kept)}
    for name in WAITING_SCHEMA.names():
        if name not in columns:
            rows = kept if name in KeptRow.__dataclass_fields__ else all_conversations
            columns[name] = [getattr(row, name) for row in rows]
    return pl.DataFrame(columns, schema=WAITING_SCHEMA)


class SplitFate(IntEnum):
    """Where a kept row goes; values above EVAL are drops, whose names are the report's reasons."""

    TRAIN = 0
    EVAL = 1
    DUPLICATE = 2
    IN_EVAL = 3


def assign_splits(rows: pl.DataFrame) -> np.ndarray:
    """Return each row's SplitFate, [rows] int8. The first of duplicates is kept; of a training row and an eval row, the eval row.

    `rows` has the columns digest, opening_digest and is_eval of WAITING_SCHEMA, of all chunks in source order.
    """
    in_eval = pl.col("is_eval").any()
    repeats = ~pl.col("digest").is_first_distinct() & (pl.col("is_eval") | ~in_eval.over("digest"))
    # Only with eval_file: the hash sends equal openings to one split.
    opens_like_eval = ~pl.col("is_eval") & in_eval.over("opening_digest")
    fate = (
        pl.when(repeats)
        .then(int(SplitFate.DUPLICATE))
        .when(opens_like_eval)
        .then(int(SplitFate.IN_EVAL))
        .otherwise(pl.col("is_eval").cast(pl.Int8))
    )
    return rows.select(fate.cast(pl.Int8)).to_series().to_numpy()
