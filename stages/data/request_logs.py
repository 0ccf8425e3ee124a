"""Read rows of logs as servers and gateways write them, as rows of messages.

Known are pairs of OpenAI's request and response (`request` and `response`, `input` and `output` as Langfuse names them,
`messages` and `response` as LiteLLM does), the input of OpenAI's batches (`body`), and their output, once it is joined with its
input by `custom_id` (`join_batch_output`). A response may be the stream that a server sent, as text or as a list of chunks: its
deltas are joined. A response without an answer (null, an error) leaves a question, which the target answers.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from stages.data.row_images import DroppedRowError

REQUEST_KEYS = ("request", "body", "input", "inputs", "prompt", "kwargs", "request_body")
RESPONSE_KEYS = ("response", "output")
OTHER_RESPONSES = ("outputs", "response_body")  # LangSmith's, and what proxies write
TURN_LISTS = ("messages", "conversations", "conversation")
JOINED_KEY = "answered_in"  # of a row of a batch's input: the file that has its answer


def parse_json(value: Any) -> Any:
    """Return the object or list that a text holds as JSON, as gateways store them in tables; else `value` itself."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict | list) else value


def is_turn_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) and "role" in one for one in value)


def unwrap_log(row: dict[str, Any]) -> dict[str, Any]:
    """Return a log's row as a row with `messages`; any other row as it is.

    Raises:
        DroppedRowError: for a batch's output without its input, and an input whose answer is in another row.
    """
    if JOINED_KEY in row:
        raise DroppedRowError(
            "answered_in_batch_output", f"its answer is in {row[JOINED_KEY]}", "one row of each question"
        )
    if any(isinstance(row.get(key), list) for key in TURN_LISTS):
        return row
    if texts := {key: turns for key in TURN_LISTS if is_turn_list(turns := parse_json(row.get(key)))}:
        return row | texts
    key, turns, request = _find_request(row)
    if key is None:
        if row.get("custom_id") is not None and isinstance(row.get("response"), dict):
            found = "a row of the output of an OpenAI batch, which holds no question"
            expected = (
                "the input file of that batch in the same folder, by which its answers are joined with their questions"
            )
            raise DroppedRowError("answer_without_question", found, expected)
        return row
    rest = {name: value for name, value in row.items() if name != key}
    if row.get("id") is None and row.get("custom_id") is not None:
        rest["id"] = row["custom_id"]
    if other := next((name for name in OTHER_RESPONSES if name in rest), None):
        rest["response"] = rest.pop(other)
    if request.get("tools"):
        rest["tools"] = request["tools"]
    if isinstance(request.get("instructions"), str):  # of OpenAI's responses
        rest.setdefault("system", request["instructions"])
    return rest | {"messages": turns}


def _find_request(row: dict[str, Any]) -> tuple[str | None, list[Any], dict[str, Any]]:
    """Return (its key, the turns that it holds, the request); no key where the row holds none."""
    for key in REQUEST_KEYS:
        request = parse_json(row.get(key))
        if is_turn_list(request):
            return key, request, {}
        if isinstance(request, dict):
            turns = parse_json(request.get("messages", request.get("input")))
            if isinstance(turns, str) and "input" in request:  # OpenAI's responses take a text
                turns = [{"role": "user", "content": turns}]
            if is_turn_list(turns):
                return key, turns, request
    return None, [], {}


# A page that a proxy sent in place of the server's answer, as nginx's "502 Bad Gateway".
PROXY_ERROR = re.compile(r"\s*<(?:!doctype|html).{0,400}?<title>\s*[45]\d\d\b", re.IGNORECASE | re.DOTALL)


def read_response(value: Any) -> list[Any] | None:
    """Return the turns that a response holds, one or none; None for a value that is no response."""
    value = parse_json(value)
    if (chunks := _list_chunks(value)) is not None:
        value = _join_chunks(chunks)
    if isinstance(value, str):
        has_answer = value.strip() and not PROXY_ERROR.match(value)
        return [{"role": "assistant", "content": value}] if has_answer else []
    if value is None or value == []:
        return []
    if isinstance(value, dict) and "body" in value and "choices" not in value:  # of a batch
        value = value["body"] or {}
    if isinstance(value, dict) and isinstance(value.get("output"), list):  # of OpenAI's responses
        value = value["output"]
    if isinstance(value, dict) and isinstance(choices := value.get("choices"), list):
        first = choices[0] if choices and isinstance(choices[0], dict) else {}
        message = first.get("message", first.get("text"))
        return read_response(message) if isinstance(message, dict | str) else []
    if isinstance(value, dict) and ("error" in value or value.get("object") == "error" or not value):
        return []
    if isinstance(value, dict) and ("content" in value or value.get("tool_calls")):
        is_blank = value.get("content") in (None, "", []) and not value.get("tool_calls")
        return [] if is_blank else [{"role": "assistant"} | value]
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        said = [one for one in value if one.get("role") == "assistant"]
        return said if said or "role" not in value[0] else None
    return None


# --- streams

OTHER_NAMES = {"reasoning_content": ("reasoning", "thinking")}
STREAM_FIELDS = ("data:", "event:", "id:", "retry:", ":")  # of server-sent events


def is_stream(value: Any) -> bool:
    """Return whether a text is a stream of a server's chunks."""
    return isinstance(value, str) and _list_chunks(value) is not None


def _list_chunks(value: Any) -> list[dict[str, Any]] | None:
    """Return the chunks of a stream, given as server-sent events, as JSON by the line or as a list; None for any other value."""
    if isinstance(value, str):
        lines = [line.strip() for line in value.splitlines() if line.strip()]
        if not lines or not (lines[0].startswith(STREAM_FIELDS) or (len(lines) > 1 and lines[0].startswith("{"))):
            return None
        value = [line for line in lines if not line.startswith(STREAM_FIELDS[1:])]
    elif isinstance(value, dict) and _is_chunk(value):
        value = [value]
    if not isinstance(value, list) or not value:
        return None
    texts = [one.strip().removeprefix("data:").strip() if isinstance(one, str) else one for one in value]
    chunks = [parse_json(text) for text in texts if text not in ("", "[DONE]")]
    others = {
        "error",
        "type",
        "usage",
        "prompt_filter_results",
    }  # of events without a choice: an error, Azure's filters
    are_chunks = all(isinstance(one, dict) and (others & one.keys() or _is_chunk(one)) for one in chunks)
    is_one = any(map(_is_chunk, chunks)) if are_chunks else False
    has_marks = isinstance(value[0], str) and value[0].startswith("data:")
    return chunks if are_chunks and (is_one or has_marks) else None


def _is_chunk(value: dict[str, Any]) -> bool:
    is_delta = any({"delta", "text"} & one.keys() for one in _list_objects(value.get("choices")))
    kind = str(value.get("object", "")).endswith(".chunk") or str(value.get("type", "")).endswith(("_delta", ".delta"))
    return is_delta or kind or ("done" in value and "message" in value)


def _join_chunks(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a stream: OpenAI's chat completions, completions and responses, Anthropic's, Ollama's.

    An error among the chunks is returned in place of a cut answer.
    """
    texts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
    calls: dict[str, dict[str, Any]] = {}
    for chunk in chunks:
        if chunk.get("error"):
            return {"error": chunk["error"]}
        choices = [one for one in _list_objects(chunk.get("choices")) if not one.get("index")]
        deltas = [one.get("delta", one.get("message", {"content": one.get("text")})) for one in choices]
        if isinstance(chunk.get("message"), dict) and "done" in chunk:
            deltas = [chunk["message"]]
        elif str(chunk.get("type")).endswith("output_text.delta"):
            deltas = [{"content": chunk.get("delta")}]
        elif isinstance(block := chunk.get("content_block"), dict) and block.get("type") == "tool_use":
            named = {"index": chunk.get("index"), "id": block.get("id"), "function": {"name": block.get("name")}}
            deltas = [{"tool_calls": [named]}]
        elif isinstance(delta := chunk.get("delta"), dict):
            part = {"index": chunk.get("index"), "function": {"arguments": delta.get("partial_json")}}
            more = {"tool_calls": [part]} if "partial_json" in delta else {}
            deltas = [{"content": delta.get("text"), "reasoning_content": delta.get("thinking"), **more}]
        for delta in _list_objects(deltas):
            for key, parts in texts.items():
                parts += [text for name in (key, *OTHER_NAMES.get(key, ())) if isinstance(text := delta.get(name), str)]
            for call in _list_objects(delta.get("tool_calls")):
                found = calls.setdefault(
                    str(call.get("index", len(calls))), {"name": None, "arguments": "", "id": None}
                )
                function = given if isinstance(given := call.get("function"), dict) else {}
                found["id"], found["name"] = call.get("id") or found["id"], function.get("name") or found["name"]
                if arguments := function.get("arguments"):
                    found["arguments"] += arguments if isinstance(arguments, str) else json.dumps(arguments)
    joined = {key: "".join(parts) for key, parts in texts.items() if parts}
    return {"content": "", **joined, **({"tool_calls": list(calls.values())} if calls else {})}


def _list_objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


# --- OpenAI's batches --------------------------------------------------------------------------------------------------


def read_batch_kind(line: bytes) -> str | None:
    """Return whether a file with this first row is a batch's "input" or "output"; None for any other."""
    row = _load_row(line)
    if row is None or row.get("custom_id") is None:
        return None
    if isinstance(row.get("body"), dict):
        return "input"
    return "output" if "response" in row and "request" not in row else None


def join_batch_output(lines: list[bytes], questions: dict[str, Any]) -> list[bytes]:
    """Return the rows of a batch's output, each with the `request` of its `custom_id`."""
    joined = []
    for line in lines:
        row = _load_row(line)
        request = questions.get(str(row.get("custom_id"))) if row else None
        joined.append(line if row is None or request is None else _extend_row(line, row, {"request": request}))
    return joined


def mark_answered(lines: list[bytes], answered: dict[str, str]) -> list[bytes]:
    """Return the rows of a batch's input, those with an answer marked by the file that has it."""
    marked = []
    for line in lines:
        row = _load_row(line)
        file = answered.get(str(row.get("custom_id"))) if row else None
        marked.append(line if row is None or file is None else _extend_row(line, row, {JOINED_KEY: file}))
    return marked


def index_batches(files: Mapping[str, Iterable[bytes]], kinds: dict[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (the request of each custom_id of the inputs, the file of each custom_id that an output answers)."""
    questions, answered = dict[str, Any](), dict[str, str]()
    for name, lines in files.items():
        for line in lines:
            row = _load_row(line)
            if row is None or row.get("custom_id") is None:
                continue
            if kinds[name] == "input":
                questions[str(row["custom_id"])] = row.get("body")
            else:
                answered[str(row["custom_id"])] = Path(name).name
    return questions, {key: name for key, name in answered.items() if key in questions}


def _extend_row(line: bytes, row: dict[str, Any], more: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(row | more)
    except TypeError:  # it reads deeper nesting than it writes; the reader of the row says what is wrong
        return line


def _load_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = orjson.loads(line)
    except ValueError:  # the reader of the row says what is wrong
        return None
    return row if isinstance(row, dict) else None
