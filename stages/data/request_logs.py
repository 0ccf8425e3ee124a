"""Read rows of logs as servers and gateways write them, as rows of messages.

Known are pairs of OpenAI's request and response (`request` and `response`, `input` and `output` as Langfuse names them,
`messages` and `response` as LiteLLM does), and the input of OpenAI's batches (`body`). A response without an answer (null, an
error, the chunks of a stream) leaves a question, which the target answers.
"""

import json
import re
from typing import Any

REQUEST_KEYS = ("request", "body", "input", "inputs", "prompt", "kwargs", "request_body")
RESPONSE_KEYS = ("response", "output")
OTHER_RESPONSES = ("outputs", "response_body")  # LangSmith's, and what proxies write
TURN_LISTS = ("messages", "conversations", "conversation")


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
    """Return a log's row as a row with `messages`; any other row as it is."""
    if any(isinstance(row.get(key), list) for key in TURN_LISTS):
        return row
    if texts := {key: turns for key in TURN_LISTS if is_turn_list(turns := parse_json(row.get(key)))}:
        return row | texts
    key, turns, request = _find_request(row)
    if key is None:
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


# A page that a proxy sent in place of the server's answer, as nginx's "502 Bad Gateway"; or server-sent events, not joined.
NO_ANSWER = re.compile(
    r"\s*(?:<(?:!doctype|html).{0,400}?<title>\s*[45]\d\d\b|(?:(?:event|id)?:[^\n]*\n\s*)*data:\s*\{\")",
    re.IGNORECASE | re.DOTALL,
)


def read_response(value: Any) -> list[Any] | None:
    """Return the turns that a response holds, one or none; None for a value that is no response."""
    value = parse_json(value)
    if isinstance(value, str):
        has_answer = value.strip() and not NO_ANSWER.match(value)
        return [{"role": "assistant", "content": value}] if has_answer else []
    if value is None or value == []:
        return []
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
