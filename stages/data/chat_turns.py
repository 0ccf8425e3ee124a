"""Parse a turn of a chat export: its role, text, tool calls, reasoning, images, and whether it is to be learned."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from stages.data import json_lines, row_images, tool_calls
from stages.data.conversations import IMAGE_PLACEHOLDER
from stages.data.json_lines import describe_value, is_text
from stages.data.row_images import DroppedRowError

# Of an answer, whether it is to be learned: OpenAI's, axolotl's, ms-swift's, and others'.
TRAIN_KEYS = ("weight", "train", "loss", "loss_weight", "loss_mask", "trainable")
# Keys that are read in every turn.
TURN_KEYS = {
    "role", "from", "content", "value", "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", *TRAIN_KEYS,
}  # fmt: skip
TOOL_KEYS = {"tool_call_id", "name"}  # of a tool's turn
ROLE_NAMES = {
    "system": "system", "developer": "system", "human": "user", "user": "user", "gpt": "assistant",
    "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool",
}  # fmt: skip
# What turns must be, for messages. A column map names the keys of rows, and none of their turns.
NO_TURN_MAP = 'no key of params.yaml maps keys or roles of turns: write them again (docs/data.md, "Columns of a table")'
TEXT_OF_TURN = f"text under the key content (or value); {NO_TURN_MAP}"
NO_TEXT_OF_TURN = "a text (null is for an assistant's tool_calls alone); write what the turn says"
TRAIN_FLAG = "true or false, 1 or 0: whether the answer is learned; a draft's loss has no other weights"
TOOL_FORM = "calls and tools with a name, and arguments by name, as OpenAI's; correct them, or leave them out"
ROLE_OF_TURN = f"under the key role (or from) one of {', '.join(ROLE_NAMES)}; {NO_TURN_MAP}"
# Types of content parts: OpenAI's of chat completions, and of responses.
TEXT_PARTS, IMAGE_PARTS = ("text", "input_text", "output_text"), ("image_url", "image", "input_image")
ROLE_LETTERS = {"system": "s", "user": "u", "assistant": "a", "tool": "t"}

Message = dict[str, str]


class ParsedTurn(NamedTuple):
    """A turn of a row."""

    message: Message
    calls: str | None = None  # JSON: an assistant's tool calls; of a tool's message which of them it answers
    reasoning: str | None = None
    is_trained: bool = True  # False: an answer that the data marks as not to be learned

    @property
    def letter(self) -> str:
        """Return the turn's letter in TURN_ORDER."""
        is_call = self.calls is not None and self.message["role"] == "assistant"
        return "c" if is_call else ROLE_LETTERS[self.message["role"]]

    @property
    def is_blank(self) -> bool:
        return self.letter != "c" and not self.message["content"].strip()


def parse_turn(turn: Any, name: str, turn_images: list[Any]) -> ParsedTurn:
    """Return the message with its calls and reasoning; append its images to `turn_images` (`order_images`)."""
    if not isinstance(turn, dict):
        raise DroppedRowError(
            "not_text", f"{name} is {describe_value(turn)}", f"an object with role and content; {NO_TURN_MAP}"
        )
    role = turn.get("from") if turn.get("from") is not None else turn.get("role")
    text = turn.get("value") if turn.get("value") is not None else turn.get("content")
    calls = turn.get("tool_calls") or None
    if calls is None and (call := turn.get("function_call")):  # OpenAI's before tool_calls
        calls = [{"type": "function", "function": call}]
    known = ROLE_NAMES.get(role) if isinstance(role, str) else None
    is_given = "content" in turn or "value" in turn
    if text is None and (calls is not None or (is_given and known in ("assistant", "tool"))):
        text = ""  # an answer that is to be written, or a tool without anything to say
    if isinstance(text, list) and text and all(isinstance(part, dict) for part in text):
        text = "".join(_parse_content_part(part, turn_images, name) for part in text)
    elif isinstance(text, str):
        turn_images += [row_images.MARKED_IN_TEXT] * text.count(IMAGE_PLACEHOLDER)
    if text is None:
        elsewhere = any(isinstance(value, str) for key, value in turn.items() if key not in ("role", "from"))
        expected = NO_TEXT_OF_TURN if is_given and not elsewhere else TEXT_OF_TURN
        raise DroppedRowError("not_text", _describe_lack(name, turn, ("content", "value")), expected)
    if not isinstance(text, str) or not is_text(text):
        raise DroppedRowError("not_text", *describe_text(f"the content of {name}", text))
    if known is None:
        lack = _describe_lack(name, turn, ("role", "from"))
        found = lack if role is None else f"the role of {name} is {describe_value(role)}"
        raise DroppedRowError("unknown_role", found, ROLE_OF_TURN)
    if calls is not None and known != "assistant":
        raise DroppedRowError(
            "unknown_role", f"{name} has tool_calls and the role {role!r}", "tool_calls of an assistant only"
        )
    reasoning = turn.get("reasoning_content") or turn.get("reasoning") or turn.get("thinking") or None
    if reasoning is not None and known != "assistant":
        raise DroppedRowError(
            "not_text", f"{name} has reasoning and the role {role!r}", "reasoning of an assistant only"
        )
    if reasoning is not None and not is_text(reasoning):
        raise DroppedRowError("not_text", *describe_text(f"the reasoning of {name}", reasoning))
    calls_json = dump_json(calls, f"the tool_calls of {name}") if calls is not None else None
    if calls_json is not None:
        check_tools(calls_json, tool_calls.parse_calls, name)
    if known == "tool" and (named := {key: turn[key] for key in sorted(TOOL_KEYS) if isinstance(turn.get(key), str)}):
        calls_json = dump_json(named, f"the call of {name}")
    is_trained = _read_train_flag(turn, name) if known == "assistant" else True
    return ParsedTurn({"role": known, "content": text}, calls_json, reasoning, is_trained)


def _read_train_flag(turn: dict[str, Any], name: str) -> bool:
    """Return whether an answer is to be learned. Raise DroppedRowError for a weight between."""
    for key in TRAIN_KEYS:
        if (flag := turn.get(key)) is not None:
            if flag not in (0, 1):  # as False and True
                raise DroppedRowError("unknown_weight", f"{key} of {name} is {describe_value(flag)}", TRAIN_FLAG)
            return bool(flag)
    return True


def describe_text(name: str, found: Any) -> tuple[str, str]:
    """Return what was found instead of a text that UTF-8 can encode, and what was expected."""
    if isinstance(found, str):
        return (
            f"{name} has half of a character of two surrogates, as of an emoji cut in two",
            "whole characters; export it again",
        )
    return f"{name} is {describe_value(found)}", "a text"


def _describe_lack(name: str, turn: dict[str, Any], wanted: tuple[str, ...]) -> str:
    """Return which keys a turn has that lacks all of `wanted`, or has null there, as Parquet has for keys of other rows."""
    nulls = [f"null under {key}" for key in wanted if key in turn]
    given = ", ".join(str(key) for key, value in turn.items() if value is not None)
    return (
        f"{name} has {' and '.join([*nulls, f'the keys {json_lines.abbreviate_row(given)}' if given else 'no keys'])}"
    )


def _parse_content_part(part: dict[str, Any], turn_images: list[Any], name: str) -> str:
    """Return the text of one of OpenAI's content parts: of an image, the placeholder. `name` is the turn's, for messages."""
    if part.get("type") in TEXT_PARTS and isinstance(text := part.get("text"), str):
        turn_images += [row_images.MARKED_IN_TEXT] * text.count(IMAGE_PLACEHOLDER)
        return text
    if part.get("type") in IMAGE_PARTS:
        link = part.get("image_url") or part.get("image") or part.get("path")
        turn_images.append(link.get("url") or link if isinstance(link, dict) else link)
        return IMAGE_PLACEHOLDER
    kind = json_lines.abbreviate_row(part.get("type"))
    raise DroppedRowError(
        "unknown_part",
        f"{name} has a part of the type {kind}",
        f"parts of the types {', '.join((*TEXT_PARTS, *IMAGE_PARTS))}",
    )


def check_tools(text: str, parse: Callable[[str], object], name: str) -> None:
    try:
        parse(text)
    except tool_calls.MalformedToolsError as error:
        raise DroppedRowError("malformed_tools", f"in {name} {error}", TOOL_FORM) from None


def dump_json(value: Any, name: str) -> str:
    """Return `value` as JSON without null keys; a text as it is. `name` is for messages.

    Raises:
        DroppedRowError: for values that JSON lacks, and for nesting that templates and encoders could not recurse into.
    """
    if json_lines.is_text_too_deep(value) if isinstance(value, str) else json_lines.is_too_deep(value):
        raise DroppedRowError("nested_too_deep")
    text = value
    if not isinstance(value, str):
        try:
            text = json.dumps(_remove_empty_keys(value), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError):  # bytes or dates, from Parquet; NaN
            text = None
    if not is_text(text):
        raise DroppedRowError(
            "not_text", f"{name} is {describe_value(value)}", "values of JSON, without NaN, bytes and dates"
        )
    return str(text)


def _remove_empty_keys(value: Any) -> Any:
    """Return `value` without null keys: Parquet gives every row the keys of all rows."""
    if isinstance(value, dict):
        return {key: _remove_empty_keys(inner) for key, inner in value.items() if inner is not None}
    return [_remove_empty_keys(inner) for inner in value] if isinstance(value, list) else value
