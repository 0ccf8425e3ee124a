"""Questions to the target: every assistant's message of FIXED conversations, in their order, with what goes before it.

Messages are as a chat template takes them, and `convert_to_openai` makes them what a server takes: the two differ in a call's
arguments, which OpenAI's shape has as text and servers parse before they render, and in pictures, of which a template
takes the place only. What exports leave out and templates ask for is filled in the same for both: `type`, ids of
calls, and whose call a tool's message answers.

Where fewer are asked than there are, conversations are taken by a hash of their content (`choose`), as fix_data splits
train from eval: rows of every file then have the same chance, and rows that are added replace few of those chosen before.
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

from stages.data import conversations, nesting

Messages = list[dict[str, Any]]
SALT = b"sample_target"  # another than fix_data's: the eval split is the rows whose hash there is small
CONTENT = ("messages", "tools", "tool_calls", "reasoning", "images")  # of FIXED: all that doesn't say where a row lay


@dataclass(frozen=True)
class TargetRequest:
    """One answer to be had from the target."""

    position: int  # in the order of all questions of a split
    id: str  # "<conversation id>.<number of the answer>"
    messages: Messages  # the whole conversation, with the data's own answers
    turn: int  # which of them is asked for; those before it are its history
    tools: list[dict[str, Any]] | None
    source_row: int
    verdict: str
    malformed: str | None = None  # why it can't be asked

    @property
    def images(self) -> list[str]:
        """The paths of the pictures before this answer, in the order of their places."""
        return [
            part["image"]
            for message in self.messages[: self.turn]
            for part in _get_content_parts(message)
            if "image" in part
        ]


@dataclass(frozen=True)
class Share:
    """How many questions of one source are asked, and how many are not."""

    asked: int
    not_asked: int


@dataclass(frozen=True)
class Choice:
    """Which questions of a FIXED file are asked."""

    counts: np.ndarray  # [R] of each conversation, in the file's order, how many of its answers, from the first on
    sources: dict[str, Share]  # by the file that fix_data read

    @property
    def asked(self) -> int:
        return int(self.counts.sum())

    @property
    def not_asked(self) -> int:
        return sum(share.not_asked for share in self.sources.values())


def choose(path: Path, most: int | None) -> Choice:
    """Choose at most `most` questions of a FIXED file, by whole conversations; null: all.

    Conversations come in the order of their content's hash, until there are enough; the last is cut after its first
    answers. So the choice depends neither on the files' order nor on where in a file a row lies.
    """
    counts, digests, codes = [np.zeros(0, np.int32)], [np.zeros(0, np.uint64)], [np.zeros(0, np.int32)]
    names: dict[str, int] = {}
    roles = pl.element().struct.field("role") == "assistant"
    for table in conversations.read_batches(path, conversations.FIXED_SCHEMA, "fix_data"):
        counts.append(table["messages"].list.eval(roles).list.sum().fill_null(0).to_numpy().astype(np.int32))
        codes.append(np.array([names.setdefault(name, len(names)) for name in table["source"]], np.int32))
        if most is not None:
            digests.append(np.array([_digest(row) for row in table.select(CONTENT).iter_rows()], np.uint64))
    there, source = np.concatenate(counts), np.concatenate(codes)
    chosen = there
    if most is not None:
        order = np.argsort(np.concatenate(digests), kind="stable")
        before = np.cumsum(there[order]) - there[order]
        chosen = np.zeros_like(there)
        chosen[order] = np.clip(most - before, 0, there[order])
    asked, left = np.bincount(source, chosen, len(names)), np.bincount(source, there - chosen, len(names))
    shares = {name: Share(int(asked[code]), int(left[code])) for name, code in sorted(names.items())}
    return Choice(chosen, shares)


def _digest(content: tuple[Any, ...]) -> int:
    return int.from_bytes(hashlib.sha256(SALT + orjson.dumps(content)).digest()[:8])


def read_requests(path: Path, choice: Choice) -> Iterator[list[TargetRequest]]:
    """Yield the chosen questions of each conversation, in the file's order; conversations without any are left out."""
    position = first = 0
    for table in conversations.read_batches(path, conversations.FIXED_SCHEMA, "fix_data"):
        counts = choice.counts[first : first + len(table)]
        first += len(table)
        rows = table.filter(pl.Series(counts > 0)).iter_rows(named=True)
        for row, count in zip(rows, counts[counts > 0].tolist(), strict=True):
            yield _list_requests(row, position)[:count]
            position += count


def _list_requests(row: dict[str, Any], position: int) -> list[TargetRequest]:
    try:
        messages, tools, malformed = _build_messages(row), _parse_tools(row["tools"]), None
    # fix_data takes what an export calls tools as it is
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        messages, tools, malformed = row["messages"], None, "malformed_tools"
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    found = []
    for n, turn in enumerate(turns):
        wrong = malformed or (
            "image_in_answer" if any("image" in part for part in _get_content_parts(messages[turn])) else None
        )
        name = f"{row['id']}.{n}"
        found.append(TargetRequest(position + n, name, messages, turn, tools, row["source_row"], row["verdict"], wrong))
    return found


def convert_to_openai(messages: Messages, url: Callable[[str], str]) -> Messages:
    """The same as a server takes them: a call's arguments as text, a picture as what `url` gives for its path."""
    found = []
    for message in messages:
        more: dict[str, Any] = {}
        if "tool_calls" in message:
            more["tool_calls"] = [_dump_arguments(call) for call in message["tool_calls"]]
        if parts := _get_content_parts(message):
            more["content"] = [
                {"type": "image_url", "image_url": {"url": url(part["image"])}} if "image" in part else part
                for part in parts
            ]
        found.append({**message, **more} if more else message)
    return found


def _get_content_parts(message: dict[str, Any]) -> list[dict[str, str]]:
    """Of a content in parts; none where it is a text."""
    return message["content"] if isinstance(message["content"], list) else []


def _dump_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def _build_messages(row: dict[str, Any]) -> Messages:
    calls = row["tool_calls"] or [None] * len(row["messages"])
    reasoning = row["reasoning"] or [None] * len(row["messages"])
    found: Messages = []
    waiting: list[str] = []  # ids of calls whose results have not come
    number = 0
    pictures = iter(row["images"] or [])
    for message, called, thought in zip(row["messages"], calls, reasoning, strict=True):
        more: dict[str, Any] = {}
        if row["images"] and conversations.IMAGE_PLACEHOLDER in message["content"]:
            more["content"] = _split_at_images(message["content"], pictures)
        if thought:
            more["reasoning_content"] = thought
        if called:
            given = json.loads(called)
            more["tool_calls"] = [
                _parse_tool_call(c, number + k) for k, c in enumerate([given] if isinstance(given, dict) else given)
            ]
            number += len(more["tool_calls"])
            waiting = [call["id"] for call in more["tool_calls"]]
        if message["role"] == "tool" and waiting:  # the export's rows are in the calls' order
            more["tool_call_id"] = waiting.pop(0)
        found.append({**message, **more} if more else message)
    return found


def _split_at_images(text: str, paths: Iterator[str]) -> list[dict[str, str]]:
    """A text's parts as templates take them; fix_data has counted that there are as many marks as pictures."""
    parts: list[dict[str, str]] = []
    for n, words in enumerate(text.split(conversations.IMAGE_PLACEHOLDER)):
        if n:
            parts.append({"type": "image", "image": next(paths)})
        if words:
            parts.append({"type": "text", "text": words})
    return parts


def _parse_tool_call(given: dict[str, Any], number: int) -> dict[str, Any]:
    function = given.get("function", given)
    arguments = function["arguments"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if nesting.is_too_deep(arguments):
        raise ValueError("a call's arguments are nested too deep for templates")
    if not isinstance(arguments, dict) or not isinstance(function["name"], str):
        raise ValueError("a call needs a name, and arguments by name")
    # Nine letters and digits, since Mistral's template takes no other id.
    return {
        "id": str(given.get("id") or f"call{number:05d}"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _parse_tools(text: str | None) -> list[dict[str, Any]] | None:
    """Tools in OpenAI's shape; keys in the order in which servers write them, since templates render them as JSON."""
    if text is None:
        return None
    found = []
    for given in json.loads(text):
        function = given.get("function", given)
        if not isinstance(function["name"], str):
            raise ValueError("a tool needs a name")
        first = {key: function[key] for key in ("name", "description", "parameters") if key in function}
        found.append({"type": "function", "function": {**first, **function}})
    return found or None
