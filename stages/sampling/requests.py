"""Build the requests to the target: one per assistant message of FIXED_SCHEMA conversations, with the messages before it.

Messages have the form that chat templates take; `convert_to_openai` returns that of a server's API. The two differ in tool
call arguments, which OpenAI's form has as text, and in images, of which a template takes the position only. Keys that
templates need and exports omit are filled in for both: `type`, ids of calls, and `tool_call_id` of a tool's message.

With a limit, conversations are selected by a hash of their content (`select_requests`), as fix_data assigns train and eval:
rows of every file have the same chance, and added rows replace few of those selected before.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import polars as pl

from stages.data import conversations, tool_calls
from stages.data.conversations import describe_origin

Messages = list[dict[str, Any]]
SALT = b"sample_target"  # not fix_data's hash: the eval split consists of the rows whose hash there is small
CONTENT = ("messages", "tools", "tool_calls", "reasoning", "images")  # of FIXED_SCHEMA: all but id, source and verdict


class UnusableRequestError(Exception):
    """A request that gives no row: `reason` is the word that the report counts, `details` says more where more is known."""

    def __init__(self, reason: str, details: str | None = None):
        super().__init__(f"{reason}: {details}" if details else reason)
        self.reason, self.details = reason, details


@dataclass(frozen=True)
class TargetRequest:
    """A request for one answer of the target."""

    position: int  # in the order of all requests of a split
    id: str  # "<conversation id>.<number of the answer>"
    messages: Messages  # the whole conversation, with the data's own answers
    answer_index: int  # of the requested answer, behind its prompt; of a question alone one past the end
    tools: list[dict[str, Any]] | None
    source: str  # file of the raw data
    source_row: int
    verdict: str
    unusable_reason: str | None = None  # why it can't be sent

    @property
    def answer(self) -> dict[str, Any] | None:
        """Return the data's own answer; None where the data has a question alone."""
        return self.messages[self.answer_index] if self.answer_index < len(self.messages) else None

    @property
    def num_earlier_answers(self) -> int:
        return sum(message["role"] == "assistant" for message in self.messages[: self.answer_index])

    @property
    def origin(self) -> str:
        """Return where the conversation is in the raw data, for messages."""
        return describe_origin(self.source, self.source_row)

    @property
    def row(self) -> str:
        """Return the request's row and where it is in the raw data, for messages that begin with `row`."""
        return f"{self.id} ({self.origin})"

    @property
    def images(self) -> list[str]:
        """Return the paths of the images in the prompt, in order."""
        parts = (part for message in self.messages[: self.answer_index] for part in _get_content_parts(message))
        return [part["image"] for part in parts if "image" in part]


@dataclass(frozen=True)
class SourceRequests:
    """How many requests of one source file are selected, and how many are not."""

    asked: int
    not_asked: int


@dataclass(frozen=True)
class RequestSelection:
    """The selected requests of a FIXED_SCHEMA file."""

    counts: np.ndarray  # [R] number of requests of each conversation, in the file's order: its first answers
    sources: dict[str, SourceRequests]  # by source file

    @property
    def num_requests(self) -> int:
        return int(self.counts.sum())

    @property
    def num_unrequested(self) -> int:
        return sum(source.not_asked for source in self.sources.values())

    def assign_shards(self, size: int) -> np.ndarray:
        """Return the shard of each request [N] int64: of `size` requests and the rest of the last one's conversation."""
        first = np.cumsum(self.counts) - self.counts  # [R]
        return np.unique(np.repeat(first // size, self.counts), return_inverse=True)[1]


def select_requests(path: Path, max_requests: int | None, is_even: bool = False) -> RequestSelection:
    """Select at most `max_requests` requests of a FIXED_SCHEMA file by whole conversations; None: all.

    Conversations are taken in the order of their content's hash; the last one may be cut after its first answers. So the
    selection depends neither on the order of files nor on a row's position. With `is_even`, every source file gives as many
    requests as any other while it has some, so that none is left out or judged by a few answers.
    """
    is_answer = pl.element().struct.field("role") == "assistant"
    count = pl.col("messages").list.eval(is_answer).list.sum().fill_null(0).cast(pl.Int32)
    count += (pl.col("messages").list.last().struct.field("role") != "assistant").cast(pl.Int32)  # an open question
    count -= pl.col("trained").list.eval(~pl.element()).list.sum().fill_null(0).cast(pl.Int32)
    parts = [pl.DataFrame(schema={"source": pl.String, "available": pl.Int32, "digest": pl.UInt64})]
    for table in conversations.read_batches(path, conversations.FIXED_SCHEMA, "fix_data"):
        is_limited = max_requests is not None
        digests = [_hash_content(row) for row in table.select(CONTENT).iter_rows()] if is_limited else [0] * len(table)
        parts.append(table.select("source", available=count, digest=pl.Series(digests, dtype=pl.UInt64)))
    rows = pl.concat(parts)
    available = selected = rows["available"].to_numpy()
    if max_requests is not None:
        order = np.argsort(rows["digest"].to_numpy(), kind="stable")
        if is_even:
            of_source = rows[order].select(pl.col("available").cum_sum().over("source")).to_series().to_numpy()
            order = order[np.argsort(of_source - available[order], kind="stable")]
        before = np.cumsum(available[order]) - available[order]
        selected = np.zeros_like(available)
        selected[order] = np.clip(max_requests - before, 0, available[order])
    shares = rows.with_columns(asked=selected).group_by("source").agg(pl.sum("asked", "available")).sort("source")
    return RequestSelection(selected, {n: SourceRequests(asked, most - asked) for n, asked, most in shares.iter_rows()})


def _hash_content(content: tuple[Any, ...]) -> int:
    return int.from_bytes(hashlib.sha256(SALT + orjson.dumps(content)).digest()[:8])


def read_requests(path: Path, selection: RequestSelection) -> Iterator[list[TargetRequest]]:
    """Yield the selected requests of each conversation, in the file's order; skip conversations without any."""
    position = first = 0
    for table in conversations.read_batches(path, conversations.FIXED_SCHEMA, "fix_data"):
        counts = selection.counts[first : first + len(table)]
        first += len(table)
        rows = table.filter(pl.Series(counts > 0)).iter_rows(named=True)
        for row, count in zip(rows, counts[counts > 0].tolist(), strict=True):
            yield _list_requests(row, position)[:count]
            position += count


def _list_requests(row: dict[str, Any], position: int) -> list[TargetRequest]:
    try:
        messages, tools, malformed = _build_messages(row), tool_calls.parse_tools(row["tools"]), None
    except tool_calls.MalformedToolsError:  # of tables that fix_data of an older version wrote
        messages, tools, malformed = row["messages"], None, "malformed_tools"
    found: list[TargetRequest] = []
    trained = row["trained"] or [True] * len(messages)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and trained[i]]
    for index in [*answers, *([len(messages)] if messages[-1]["role"] != "assistant" else [])]:
        has_image = any("image" in part for one in messages[index : index + 1] for part in _get_content_parts(one))
        reason, number = malformed or ("image_in_answer" if has_image else None), len(found)
        name, origin = f"{row['id']}.{number}", (row["source"], row["source_row"], row["verdict"])
        found.append(TargetRequest(position + number, name, messages, index, tools, *origin, reason))
    return found


def convert_to_openai(messages: Messages, build_url: Callable[[str], str]) -> Messages:
    """Return the messages in the form of OpenAI's API: call arguments as text, images as `build_url` of their path."""
    found = []
    for message in messages:
        more: dict[str, Any] = {}
        if "tool_calls" in message:
            more["tool_calls"] = [_dump_arguments(call) for call in message["tool_calls"]]
        if parts := _get_content_parts(message):
            more["content"] = [
                {"type": "image_url", "image_url": {"url": build_url(part["image"])}} if "image" in part else part
                for part in parts
            ]
        found.append(message | more if more else message)
    return found


def _get_content_parts(message: dict[str, Any]) -> list[dict[str, str]]:
    """Return the parts of a message's content; an empty list where it is a text."""
    return message["content"] if isinstance(message["content"], list) else []


def _dump_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _build_messages(row: dict[str, Any]) -> Messages:
    calls = row["tool_calls"] or [None] * len(row["messages"])
    reasoning = row["reasoning"] or [None] * len(row["messages"])
    found: Messages = []
    waiting: list[str] = []  # ids of calls without a result yet
    number = 0
    image_paths = iter(row["images"] or [])
    for message, calls_json, thought in zip(row["messages"], calls, reasoning, strict=True):
        more: dict[str, Any] = {}
        if row["images"] and conversations.IMAGE_PLACEHOLDER in message["content"]:
            more["content"] = _split_at_images(message["content"], image_paths)
        if thought:
            more["reasoning_content"] = thought
        if calls_json and message["role"] == "assistant":
            more["tool_calls"] = tool_calls.parse_calls(calls_json, number)
            number += len(more["tool_calls"])
            waiting = [call["id"] for call in more["tool_calls"]]
        if message["role"] == "tool":
            more |= json.loads(calls_json) if calls_json else {}
            if more.get("tool_call_id") in waiting:
                waiting.remove(more["tool_call_id"])
            elif waiting:  # results without an id come in the order of the calls
                more["tool_call_id"] = waiting.pop(0)
        found.append(message | more if more else message)
    return found


def _split_at_images(text: str, paths: Iterator[str]) -> list[dict[str, str]]:
    """Return a text as content parts. fix_data has checked that there are as many placeholders as images."""
    parts: list[dict[str, str]] = []
    for n, words in enumerate(text.split(conversations.IMAGE_PLACEHOLDER)):
        if n:
            parts.append({"type": "image", "image": next(paths)})
        if words:
            parts.append({"type": "text", "text": words})
    return parts
