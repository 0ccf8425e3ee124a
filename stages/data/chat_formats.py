"""A row of an export as messages, whatever it is called: sharegpt, ultrachat, messages, prompt_answer.

What each looks like, and every reason to drop a row: docs/data.md. Nothing is guessed: turns out of order, a role
nobody knows, or a picture that can't be found drop the row with a one-word reason.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.data import images, nesting
from stages.data.conversations import IMAGE_PLACEHOLDER

Message = dict[str, str]
Keep = Callable[
    [bytes, str | None], str | None
]  # a picture's bytes, the extension of the file they came as -> its path

TURN_LIST_KEYS = {"sharegpt": "conversations", "messages": "messages", "ultrachat": "messages"}
PROMPT_KEYS = ("prompt", "question", "instruction", "query")
ANSWER_KEYS = ("answer", "response", "completion", "output")
CHAT_FORMATS = (*TURN_LIST_KEYS, "prompt_answer")
ROLE_NAMES = {
    "system": "system", "developer": "system", "human": "user", "user": "user", "gpt": "assistant",
    "assistant": "assistant", "tool": "tool", "observation": "tool",
}  # fmt: skip
ROLE_LETTERS = {"system": "s", "user": "u", "assistant": "a", "call": "c", "tool": "t"}
# An optional system message; then a question, any number of calls with their results, and an answer, in turns.
TURN_ORDER = re.compile(r"s?(u(c+t+)*[ac])*u(c+t+)*[ac]")


class DroppedRowError(Exception):
    """A row that can't be used; its message is the reason, one word that the report counts."""

    def __init__(self, reason: str, text: str | None = None) -> None:
        super().__init__(reason)
        self.text = text  # what was found, where it is one text of the row


@dataclass
class Conversation:
    messages: list[Message]  # role: system, user, assistant or tool; content
    tools: str | None = None  # as given, JSON
    tool_calls: list[str | None] | None = None  # per message, JSON; None where no message has any
    reasoning: list[str | None] | None = None  # per message
    images: list[str] | None = None  # paths, in the order of their places in the text

    def extras(self) -> list[Any]:
        """What there is besides roles and contents; empty for most rows."""
        found = [self.tools, self.tool_calls, self.reasoning, self.images]
        return found if any(found) else []


def detect_format(row: dict[str, Any]) -> str | None:
    """Which of FORMATS a row is, by its keys; None where it is none."""
    if isinstance(row.get("conversations"), list):
        return "sharegpt"
    if isinstance(row.get("messages"), list):
        return "ultrachat" if row.get("prompt_id") is not None else "messages"
    if _find_first_key(row, PROMPT_KEYS) is not None and _find_first_key(row, ANSWER_KEYS) is not None:
        return "prompt_answer"
    return None


def has_format(row: dict[str, Any], kind: str) -> bool:
    """Whether a row can be read as `kind` at all; if not, the file is not what fix_data.format says."""
    return isinstance(row.get(TURN_LIST_KEYS[kind]), list) if kind in TURN_LIST_KEYS else detect_format(row) == kind


def describe_format(kind: str) -> str:
    return (
        f"a list {TURN_LIST_KEYS[kind]!r}"
        if kind in TURN_LIST_KEYS
        else f"one of {', '.join(PROMPT_KEYS)} and one of {', '.join(ANSWER_KEYS)}"
    )


def parse_conversation(
    row: dict[str, Any], kind: str, folder: str | None, keep: Keep = lambda data, extension: None
) -> Conversation:
    """A row's turns as messages, and what comes with them. `keep` writes a picture's bytes and gives their path; it also
    gets the extension of a picture that came as a file.

    Raises:
        Dropped: for a turn that is no text, is empty or has a role we do not know, for turns out of order, and for
            pictures that are neither files here nor bytes that `keep` takes.
    """
    turns = row[TURN_LIST_KEYS[kind]] if kind in TURN_LIST_KEYS else _build_prompt_answer_turns(row)
    given = _list_images(row)
    found: list[Any] = []
    made = [_parse_plain_turn(turn) or _parse_turn(turn, found) for turn in turns]
    messages = [message for message, _, _ in made]
    system = row.get("system", row.get("system_prompt"))
    if isinstance(system, str) and system.strip() and not (messages and messages[0]["role"] == "system"):
        if not is_text(system):
            raise DroppedRowError("not_text")
        made.insert(0, ({"role": "system", "content": system}, None, None))
        messages.insert(0, made[0][0])
    letters = ""
    for message, calls, _ in made:
        if calls is None and (not message["content"] or message["content"].isspace()):
            raise DroppedRowError("empty_turn")
        letters += ROLE_LETTERS["call" if calls else message["role"]]
    if not TURN_ORDER.fullmatch(letters):
        raise DroppedRowError("wrong_turns")
    conversation = Conversation(messages)
    if tools := row.get("tools"):
        conversation.tools = _dump_json(tools)
    if "c" in letters:
        conversation.tool_calls = [calls for _, calls, _ in made]
    if any(thought for _, _, thought in made):
        conversation.reasoning = [thought for _, _, thought in made]
    if given or found:
        conversation.images = _collect_image_paths(given + found, folder, keep)
        if sum(message["content"].count(IMAGE_PLACEHOLDER) for message in messages) != len(conversation.images):
            raise DroppedRowError("image_count")
    return conversation


def _parse_plain_turn(turn: Any) -> tuple[Message, None, None] | None:
    """What `_parse_turn` makes of a turn with two keys, as nearly all have; None where it must look closer."""
    if type(turn) is not dict or len(turn) != 2:
        return None
    role, text = (turn.get("from"), turn.get("value")) if "from" in turn else (turn.get("role"), turn.get("content"))
    if type(role) is not str or role not in ROLE_NAMES or type(text) is not str or not text.isascii():
        return None
    return {"role": ROLE_NAMES[role], "content": text}, None, None


def _parse_turn(turn: Any, found: list[Any]) -> tuple[Message, str | None, str | None]:
    """(message, its tool calls as JSON, its reasoning); pictures between its parts are added to `found`."""
    if not isinstance(turn, dict):
        raise DroppedRowError("not_text")
    role = turn.get("from") if turn.get("from") is not None else turn.get("role")
    text = turn.get("value") if turn.get("value") is not None else turn.get("content")
    calls = turn.get("tool_calls") or None
    if text is None and calls is not None:
        text = ""
    if isinstance(text, list) and text and all(isinstance(part, dict) for part in text):
        text = "".join(_parse_content_part(part, found) for part in text)
    if not isinstance(text, str) or not is_text(text):
        raise DroppedRowError("not_text")
    role = ROLE_NAMES.get(role) if isinstance(role, str) else None
    if role is None or (calls is not None and role != "assistant"):
        raise DroppedRowError("unknown_role")
    thought = turn.get("reasoning_content") or turn.get("reasoning") or None
    if thought is not None and (not is_text(thought) or role != "assistant"):
        raise DroppedRowError("not_text")
    called = _dump_json(calls) if calls is not None else None
    return {"role": role, "content": text}, called, thought


def _parse_content_part(part: dict[str, Any], found: list[Any]) -> str:
    """OpenAI's parts of a content: text, or a picture, for which its place is marked."""
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if part.get("type") in ("image_url", "image", "input_image"):
        link = part.get("image_url") or part.get("image") or part.get("path")
        found.append(link.get("url") or link if isinstance(link, dict) else link)
        return IMAGE_PLACEHOLDER
    raise DroppedRowError("unknown_part")


def _build_prompt_answer_turns(row: dict[str, Any]) -> list[Any]:
    """The two turns of a prompt_answer row. Where both are lists of turns, they follow each other."""
    prompt, answer = _find_first_key(row, PROMPT_KEYS), _find_first_key(row, ANSWER_KEYS)
    if isinstance(prompt, list) and isinstance(answer, list):
        return prompt + answer
    if isinstance(more := row.get("input"), str) and more.strip() and isinstance(prompt, str):
        prompt = f"{prompt}\n\n{more}"  # Alpaca's second half of the question
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _find_first_key(row: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next((row[key] for key in keys if isinstance(row.get(key), str | list)), None)


def _list_images(row: dict[str, Any]) -> list[Any]:
    given = row.get("images") if row.get("images") is not None else row.get("image")
    return [] if given is None else given if isinstance(given, list) else [given]


def _collect_image_paths(given: list[Any], folder: str | None, keep: Keep) -> list[str]:
    """The pictures as paths from the project's root: what is at a URL may change or vanish, and bytes fill a table.

    A file is kept by its content too: under its own name another picture could take its place, and no row would differ.
    """
    paths = []
    for picture in given:
        data, extension = _read_image_bytes(picture), None
        if data is None:
            file = _resolve_image_path(picture, folder)
            data, extension = _read(file), file.suffix.lower()
        path = keep(data, extension)
        if path is None:
            raise DroppedRowError("image_bytes")
        paths.append(path)
    return paths


def _read_image_bytes(picture: Any) -> bytes | None:
    """A picture that comes as bytes: bare, in a struct of the Hub's datasets, or in a `data:` URL; else None."""
    if isinstance(picture, dict):
        picture = picture.get("bytes")
    if isinstance(picture, str) and picture[:5].lower() == "data:":
        return images.decode_data_url(picture) or b""
    return bytes(picture) if isinstance(picture, bytes | bytearray) else None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # another user's, or on a disk that fails
        raise DroppedRowError("image_missing") from None


def _resolve_image_path(picture: Any, folder: str | None) -> Path:
    """A path from the project's root, of a file that is there. Raises Dropped for a URL, and where there is none."""
    if isinstance(picture, dict):
        picture = picture.get("path")
    if not isinstance(picture, str) or not is_text(picture) or "\0" in picture:
        raise DroppedRowError("image_missing")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", picture) and not picture.startswith("file://"):
        raise DroppedRowError("image_url")
    path = Path(picture.removeprefix("file://"))
    if folder is None and not path.is_absolute():
        raise DroppedRowError("image_missing")
    path = Path(folder or "") / path
    try:
        there = path.is_file()
    except OSError:  # a name longer than any file's
        there = False
    if not there:
        raise DroppedRowError("image_missing")
    return path


def is_text(value: Any) -> bool:
    """A string that UTF-8 can hold: exports that cut a string inside an emoji leave half of a surrogate pair."""
    if not isinstance(value, str):
        return False
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _dump_json(value: Any) -> str:
    """As JSON, unless it is a text already; without keys that hold nothing.

    Raises:
        Dropped: for what is no JSON, and for what templates and encoders could not recurse into.
    """
    if nesting.is_text_too_deep(value) if isinstance(value, str) else nesting.is_too_deep(value):
        raise DroppedRowError("nested_too_deep")
    try:
        text = (
            value
            if isinstance(value, str)
            else json.dumps(_remove_empty_keys(value), ensure_ascii=False, allow_nan=False)
        )
    except (TypeError, ValueError):  # bytes or dates, from Parquet; NaN
        text = None
    if not is_text(text):
        raise DroppedRowError("not_text")
    return str(text)


def _remove_empty_keys(value: Any) -> Any:
    """Without keys that hold nothing: Parquet gives every row the keys of all rows."""
    if isinstance(value, dict):
        return {key: _remove_empty_keys(inner) for key, inner in value.items() if inner is not None}
    return [_remove_empty_keys(inner) for inner in value] if isinstance(value, list) else value
