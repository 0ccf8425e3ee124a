"""Parse rows of chat exports into messages: sharegpt, ultrachat, messages, prompt_answer.

docs/data.md describes each format and every reason to drop a row. Nothing is guessed: turns out of order, an unknown role
or a missing image drop the row with a one-word reason. A question without an answer is kept: the target answers it. Keys that
are not read are counted by name (`list_unread_keys`).
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.data import chat_turns, request_logs, row_images, tool_calls
from stages.data.chat_turns import ROLE_NAMES, Message, ParsedTurn
from stages.data.conversations import IMAGE_PLACEHOLDER
from stages.data.json_lines import describe_value, is_text
from stages.data.row_images import DroppedRowError, GivenImage, SaveImage

TURN_LIST_KEYS = {  # the first of them that a row has
    "sharegpt": ("conversations", "conversation"),
    "messages": ("messages",),
    "ultrachat": ("messages",),
}
PROMPT_KEYS = ("prompt", "question", "instruction", "query", "input", "turns")
ANSWER_KEYS = ("answer", "response", "completion", "output")
PASSAGE_KEYS = ("input", "context", "passage", "document")  # the rest of a question: Alpaca's, Dolly's
# Keys that are read in every row.
COMMON_KEYS = {"id", "prompt_id", "custom_id", "system", "system_prompt", "tools", "images", "image", "status", "error"}
CHAT_FORMATS = (*TURN_LIST_KEYS, "prompt_answer")
TEXT_OF_ROW = {
    "question": "a text: the question; write it there, or name its key in fix_data.columns",
    "answer": "a text, or null for a question that the target is to answer; write it so, or name its key in fix_data.columns",
}
ORDER_OF_TURNS = (
    "an optional system message, then questions and answers in turn, tool results after calls; put them in that order"
)
ID_OF_CALL = (
    "the id of one of the calls before it; correct it, or leave out all ids where results are in the calls' order"
)
# An optional system message, then turns: a question, tool calls (c) each with their results, and an answer, which the last
# may lack: the target writes it.
TURN_ORDER = re.compile(r"s?(?=u)(u(c+t+)*[ac])*(u(c+t+)*)?")
# Turns that are in order so far are a whole conversation with one of these behind them.
COMPLETIONS = ("", "u", "t")
# What is cut off: answers before the first question.
OPENING_ANSWER = re.compile(r"s?(?P<opening_answer>a+)u.*")


@dataclass
class Conversation:
    """The messages of one row and everything that belongs to them."""

    messages: list[Message]  # role: system, user, assistant or tool; content
    tools: str | None = None  # JSON, as given
    tool_calls: list[str | None] | None = None  # per message, JSON; None where no message has any
    reasoning: list[str | None] | None = None  # per message
    trained: list[bool] | None = None  # per message; None where every answer is to be learned
    images: list[str] | None = None  # paths, in the order of their placeholders in the text
    # opening_answer, blank_question -> the text that was cut off
    trimmed: dict[str, str] = field(default_factory=dict)

    def list_extras(self) -> list[Any]:
        """Return tools, tool calls, reasoning, images and what is trained; an empty list where a row has none of them."""
        extras = [self.tools, self.tool_calls, self.reasoning, self.images]
        return [*(extras if any(extras) or self.trained else []), *([self.trained] if self.trained else [])]


def detect_format(row: dict[str, Any]) -> str | None:
    """Return which of CHAT_FORMATS a row is, by its keys; None for an unknown format."""
    if _find_turns(row, "sharegpt") is not None:
        return "sharegpt"
    if _find_turns(row, "messages") is not None:
        return "ultrachat" if row.get("prompt_id") is not None else "messages"
    if _name_first_key(row, PROMPT_KEYS) is not None and _find_answer(row)[1] is not None:
        return "prompt_answer"
    return None


def list_unread_keys(row: dict[str, Any], chat_format: str) -> set[str]:
    """Return the keys of a row, and of its turns, that hold something and are not read."""
    turns = _find_turns(row, chat_format) if chat_format in TURN_LIST_KEYS else row.get("history")
    key, answer = None, None
    if chat_format in TURN_LIST_KEYS:
        read = {next(key for key in TURN_LIST_KEYS[chat_format] if isinstance(row.get(key), list))}
        if turns and isinstance(turns[-1], dict) and not _is_answer(turns[-1]):
            key, answer = _find_answer(row)
            read |= {key or ""}
    else:
        read = {_name_first_key(row, PROMPT_KEYS) or "", _find_answer(row)[0] or "", "history", *PASSAGE_KEYS}
    unread = {str(key) for key, value in row.items() if key not in read | COMMON_KEYS and _holds_something(value)}
    if "turns" in read and len(row["turns"]) > 1:
        unread.add("turns after the first")
    if key is not None and not answer:  # an error, or null: a question that the target answers
        unread.add(f"{key} without an answer")
    for turn in turns if isinstance(turns, list) else ():
        if isinstance(turn, dict) and len(turn) > 2:
            known = chat_turns.TURN_KEYS | (
                chat_turns.TOOL_KEYS if ROLE_NAMES.get(str(turn.get("from") or turn.get("role"))) == "tool" else set()
            )
            unread |= {
                f"{key} of a turn" for key, value in turn.items() if key not in known and _holds_something(value)
            }
    return unread


def _holds_something(value: Any) -> bool:
    return value is not None and value != "" and value != [] and value != {}


def explain_unknown_format(row: dict[str, Any]) -> tuple[str | None, str]:
    """Return what was found and expected under a known key of a question or an answer that holds no text; else (None, "")."""
    has_prompt, has_answer = _name_first_key(row, PROMPT_KEYS) is not None, _find_answer(row)[1] is not None
    if has_prompt != has_answer:
        side, keys = ("answer", ANSWER_KEYS) if has_prompt else ("question", PROMPT_KEYS)
        if given := next((key for key in keys if key in row), None):
            return f"{describe_value(row[given])} under {given}", TEXT_OF_ROW[side]
    return None, ""


def has_format(row: dict[str, Any], chat_format: str) -> bool:
    """Return whether a row has the keys of `chat_format`."""
    if chat_format in TURN_LIST_KEYS:
        return _find_turns(row, chat_format) is not None
    return detect_format(row) == chat_format


def describe_format(chat_format: str) -> str:
    """Return the keys that `chat_format` requires, for messages."""
    if chat_format in TURN_LIST_KEYS:
        return f"a list {TURN_LIST_KEYS[chat_format][0]!r}"
    return f"one of {', '.join(PROMPT_KEYS)} and, where there is an answer, one of {', '.join(ANSWER_KEYS)}"


def describe_formats() -> str:
    """Return all formats with the keys that they require, for messages."""
    return "; ".join(f"{name}: {describe_format(name)}" for name in CHAT_FORMATS)


def _find_turns(row: dict[str, Any], chat_format: str) -> list[Any] | None:
    return next((row[key] for key in TURN_LIST_KEYS[chat_format] if isinstance(row.get(key), list)), None)


def parse_conversation(
    row: dict[str, Any],
    chat_format: str,
    folder: str | None,
    save_image: SaveImage = lambda data, extension: None,
    image_roots: Sequence[Path] = (),
) -> Conversation:
    """Return a row's turns as messages, with its tools, calls, reasoning and images.

    Answers before the first question are cut off, with their images, and blank turns at the end.
    `folder` is where relative image paths start; None: there are no files. Images come from it and from `image_roots` alone.
    `save_image` stores an image's bytes.

    Raises:
        DroppedRowError: for a turn that is no text, is empty or has an unknown role, for turns out of order, and for
            images that are neither existing files nor bytes that `save_image` accepts, or have too many pixels.
    """
    if row.get("status") == "error" and row.get("error"):  # SpecForge's rows whose answers could not be made
        raise DroppedRowError("marked_error", str(row["error"]))
    is_list = chat_format in TURN_LIST_KEYS
    turns = _add_response(row, _find_turns(row, chat_format)) if is_list else _build_prompt_answer_turns(row)
    turn_images: list[Any] = []
    of = " of prompt and answer (fix_data.columns names their keys)" if chat_format == "prompt_answer" else ""
    parsed: list[ParsedTurn] = [
        chat_turns.parse_turn(turn, f"turn {number}{of}", turn_images) for number, turn in enumerate(turns, 1)
    ]
    own_turns = [*parsed]  # numbered in messages as in the row
    if len(parsed) > 1 and parsed[-1].letter == "a" and parsed[-1].is_blank and not parsed[-1].reasoning:
        del parsed[-1]  # an answer that is to be written
    _insert_system_message(row, parsed)
    given_images = [*enumerate(row_images.order_images(row, turn_images), 1)]  # numbered in messages as in the row
    num_images = len(given_images)
    trimmed, given_images = _trim_dangling_turns(parsed, given_images)
    _check_turn_order(parsed, own_turns)
    _check_tool_results(parsed, own_turns)
    messages = [turn.message for turn in parsed]
    conversation = Conversation(messages, trimmed=trimmed)
    if tools := row.get("tools"):
        conversation.tools = chat_turns.dump_json(tools, "the key tools")
        chat_turns.check_tools(conversation.tools, tool_calls.parse_tools, "the key tools")
    if any(turn.calls for turn in parsed):
        conversation.tool_calls = [turn.calls for turn in parsed]
    if any(turn.reasoning for turn in parsed):
        conversation.reasoning = [turn.reasoning for turn in parsed]
    if not all(turn.is_trained for turn in parsed):
        conversation.trained = [turn.is_trained for turn in parsed]
        if parsed[-1].letter in "ac" and not any(turn.is_trained for turn in parsed if turn.letter in "ac"):
            found = f"all answers are marked as not to be learned ({', '.join(chat_turns.TRAIN_KEYS)})"
            raise DroppedRowError("nothing_to_learn", found, "one answer at least to learn; leave such rows out")
    if given_images:
        conversation.images = [
            row_images.store_image(image, f"image {number} of {num_images}", folder, image_roots, save_image)
            for number, image in given_images
        ]
        row_images.check_image_count(given_images, (message["content"] for message in messages))
    else:
        row_images.check_lost_images(row, (message["content"] for message in messages))
    return conversation


def _insert_system_message(row: dict[str, Any], parsed: list[ParsedTurn]) -> None:
    """Insert the message of the row's own key `system` or `system_prompt`, unless the turns start with one."""
    system = row.get("system", row.get("system_prompt"))
    if isinstance(system, str) and system.strip() and not (parsed and parsed[0].letter == "s"):
        if not is_text(system):
            raise DroppedRowError("not_text", *chat_turns.describe_text("the system message", system))
        parsed.insert(0, ParsedTurn({"role": "system", "content": system}))


def _trim_dangling_turns(parsed: list[ParsedTurn], images: list[GivenImage]) -> tuple[dict[str, str], list[GivenImage]]:
    """Cut dangling turns off `parsed` -> the text of each kind that was cut, and the images of the turns that are left."""
    trimmed: dict[str, str] = {}
    if len(parsed) > 1 and parsed[-1].letter == "u" and parsed[-1].is_blank and parsed[-2].letter in "ac":
        trimmed["blank_question"] = parsed.pop().message["content"]
    if found := OPENING_ANSWER.fullmatch("".join(turn.letter for turn in parsed)):
        dangling = slice(*found.span("opening_answer"))
        text = "\n".join(turn.message["content"] for turn in parsed[dangling])
        trimmed["opening_answer"], images = text, images[text.count(IMAGE_PLACEHOLDER) :]
        del parsed[dangling]
    return trimmed, images


def _check_turn_order(parsed: list[ParsedTurn], own_turns: list[ParsedTurn]) -> None:
    """Raise DroppedRowError for an empty question or answer, and for turns out of order; `own_turns` are the row's."""
    for turn in parsed:
        if turn.is_blank and turn.letter in "ua":  # an empty system message is one, and a tool may have nothing to say
            found = f"{_name_turn(turn, own_turns)}, of the role {turn.message['role']}, is empty"
            raise DroppedRowError("empty_turn", found, "a text; write what the turn says")
    letters = "".join(turn.letter for turn in parsed)
    if not TURN_ORDER.fullmatch(letters):
        raise DroppedRowError("wrong_turns", *_describe_wrong_order(parsed, own_turns, letters))


def _describe_wrong_order(parsed: list[ParsedTurn], own_turns: list[ParsedTurn], letters: str) -> tuple[str, str]:
    """Return the first turn that can't follow those before it, or the last one where an answer is missing; and the order."""
    if not own_turns:
        return "no turn", ORDER_OF_TURNS
    for index, turn in enumerate(parsed):
        if not any(TURN_ORDER.fullmatch(letters[: index + 1] + rest) for rest in COMPLETIONS):
            before = f", after one of {_name_role(parsed[index - 1])}" if index else ""
            return f"{_name_turn(turn, own_turns)} is of {_name_role(turn)}{before}", ORDER_OF_TURNS
    return f"{_name_turn(parsed[-1], own_turns)}, the last, is of {_name_role(parsed[-1])}", "a question behind it"


def _name_turn(turn: ParsedTurn, own_turns: list[ParsedTurn]) -> str:
    """Return a turn's number in the row: of a long conversation only its beginning can be shown."""
    number = next((number for number, one in enumerate(own_turns, 1) if one is turn), None)
    return "the system message" if number is None else f"turn {number} of {len(own_turns)}"


def _name_role(turn: ParsedTurn) -> str:
    return f"the role {turn.message['role']}{' with tool_calls' if turn.letter == 'c' else ''}"


def _check_tool_results(parsed: list[ParsedTurn], own_turns: list[ParsedTurn]) -> None:
    """Raise DroppedRowError for a tool's result that names no call before it."""
    ids: list[Any] = []
    for turn in parsed:
        if turn.letter == "c":
            calls = request_logs.parse_json(turn.calls)
            calls = calls if isinstance(calls, list) else [calls]
            ids += [call.get("id") for call in calls if isinstance(call, dict)]
        elif turn.letter == "t" and turn.calls is not None and any(ids):
            wanted = json.loads(turn.calls).get("tool_call_id")
            if wanted is not None and wanted not in ids:
                found = f"{_name_turn(turn, own_turns)} answers the call {wanted!r}, of {', '.join(map(repr, ids))}"
                raise DroppedRowError("unknown_tool_call", found, ID_OF_CALL)


def _build_prompt_answer_turns(row: dict[str, Any]) -> list[Any]:
    """Return the turns of a prompt_answer row; where both are lists of turns, their concatenation.

    PASSAGE_KEYS are the rest of the question, Alpaca's `history` the earlier [question, answer] pairs. Of MT-Bench's `turns`, a
    user's questions without the answers between, the first is the question.
    """
    key, answer = _name_first_key(row, PROMPT_KEYS), _find_answer(row)[1] or []
    prompt = row[key or ""]
    if key == "turns" and prompt and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, list) and all(isinstance(turn, dict) and {"role", "from"} & set(turn) for turn in prompt):
        return [*prompt, *answer]
    for passage in PASSAGE_KEYS:
        more = row.get(passage) if passage != key else None
        if not _holds_something(more):
            continue
        if not isinstance(more, str) or not isinstance(prompt, str):
            found = f"{passage}, beside {key}, is {describe_value(more)}"
            raise DroppedRowError("not_text", found, "a text, the rest of the question; write it as it is to be asked")
        if more.strip():
            prompt = f"{prompt}\n\n{more}" if prompt.strip() else more
    turns: list[Any] = []
    history = row.get("history") or []
    if isinstance(history, str):
        raise DroppedRowError(
            "not_text", f"history is {describe_value(history)}", "a list of pairs, [question, answer], or JSON of one"
        )
    for pair in history:
        if isinstance(pair, dict):  # already a turn
            turns.append(pair)
            continue
        if not isinstance(pair, list) or len(pair) != 2:
            raise DroppedRowError(
                "not_text", f"an entry of history is {describe_value(pair)}", "pairs, [question, answer]"
            )
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return [*turns, {"role": "user", "content": prompt}, *answer]


def _add_response(row: dict[str, Any], turns: list[Any] | None) -> list[Any]:
    """Return turns with the row's own response behind them, where they end without an answer, as in LiteLLM's logs."""
    assert turns is not None, row
    is_answered = not turns or not isinstance(turns[-1], dict) or _is_answer(turns[-1])
    return turns if is_answered else [*turns, *(_find_answer(row)[1] or [])]


def _is_answer(turn: dict[str, Any]) -> bool:
    return ROLE_NAMES.get(str(turn.get("from") or turn.get("role"))) == "assistant"


def _find_answer(row: dict[str, Any]) -> tuple[str | None, list[Any] | None]:
    """Return (its key, the turns of a row's own answer): no turn where it has none, None for a value that is no answer."""
    given = next((key for key in ANSWER_KEYS if row.get(key) is not None), None)
    if given is None:
        return next((key for key in ANSWER_KEYS if key in row), None), []
    value = row[given]
    if isinstance(value, str):  # also one that is JSON, as tables have it
        is_log = any(isinstance(row.get(key), list) for key in request_logs.TURN_LISTS) or '"choices"' in value
        is_log &= given in request_logs.RESPONSE_KEYS
        return given, request_logs.read_response(value) if is_log else [{"role": "assistant", "content": value}]
    return given, request_logs.read_response(value)


def _name_first_key(row: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    return next((key for key in keys if isinstance(row.get(key), str | list)), None)
