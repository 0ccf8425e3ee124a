"""Questions without answers, and logs as servers and gateways write them."""

import json
from pathlib import Path
from typing import Any

import pytest

from stages.data import chat_formats, readers, request_logs, tool_calls
from stages.data.row_images import DroppedRowError

ASK = {"role": "user", "content": "Name a river."}
ANSWER = {"role": "assistant", "content": "Nile."}
CHOICES = {
    "id": "r1",
    "choices": [{"index": 0, "message": ANSWER, "finish_reason": "stop"}],
    "usage": {"total_tokens": 9},
}
BODY = {"model": "m", "messages": [ASK]}


def read(row: dict[str, Any]) -> list[dict[str, str]]:
    row = request_logs.unwrap_log(row)
    return chat_formats.parse_conversation(row, str(chat_formats.detect_format(row)), None).messages


@pytest.mark.parametrize(
    "row",
    [
        {"request": BODY, "response": CHOICES},
        {"request": json.dumps(BODY), "response": json.dumps(CHOICES)},
        {"messages": [ASK], "response": CHOICES, "model": "m"},  # LiteLLM
        {"input": BODY, "output": ANSWER, "type": "GENERATION"},  # Langfuse
        {"input": {"messages": [ASK]}, "output": CHOICES},
        {
            "request": {"input": "Name a river."},
            "response": {"output": [{"type": "reasoning"}, {**ANSWER, "type": "message"}]},
        },
        {"prompt": {"messages": [ASK]}, "completion": "Nile."},
        {"inputs": {"messages": [ASK]}, "outputs": CHOICES},  # LangSmith
        {"request_body": json.dumps(BODY), "response_body": json.dumps(CHOICES)},
        {"prompt": "Name a river.", "response": CHOICES},
    ],
)
def test_a_log_is_a_conversation(row: dict[str, Any]) -> None:
    """Bug: pairs of request and response, and what gateways log of them, were rows of an unknown format."""
    assert read(row) == [ASK, ANSWER]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Name a river."},
        {"question": "Name a river.", "answer": None},
        {"messages": [ASK]},
        {"messages": [ASK, {"role": "assistant", "content": None}]},
        {"conversations": [{"from": "human", "value": "Name a river."}]},
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": BODY},
        {"request": BODY, "response": {"error": {"message": "overloaded"}}},
        {"messages": [ASK], "response": None},
    ],
)
def test_a_question_without_an_answer_is_kept(row: dict[str, Any]) -> None:
    """Bug: such rows were refused ("an answer is what a draft learns"), though the target writes every answer anyway."""
    assert read(row) == [ASK]


@pytest.mark.parametrize(("flag", "trained"), [({"weight": 0}, False), ({"train": False}, False), ({"loss": 1}, True)])
def test_an_answer_that_is_not_to_be_learned_is_marked(flag: dict[str, Any], trained: bool) -> None:
    """Bug: weight, train and loss of a message were ignored, so a draft learned what the data says it must not."""
    row = {"messages": [ASK, ANSWER | flag, ASK, ANSWER]}
    found = chat_formats.parse_conversation(row, "messages", None).trained
    assert found == (None if trained else [True, False, True, True])
    with pytest.raises(DroppedRowError, match="unknown_weight"):
        chat_formats.parse_conversation({"messages": [ASK, ANSWER | {"weight": 0.5}]}, "messages", None)


def test_a_text_file_has_a_question_a_line_and_is_no_data_beside_data(tmp_path: Path) -> None:
    (tmp_path / "questions.txt").write_text("Name a river.\n\nName a lake.\n")
    (chunk,) = readers.read_all_chunks(tmp_path, {})
    assert [(n, row) for n, row in readers.parse_chunk(chunk)] == [
        (0, {"prompt": "Name a river."}),
        (2, {"prompt": "Name a lake."}),
    ]
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n')
    assert [file.name for file in readers.list_files(tmp_path)] == ["data.jsonl"]


def test_the_rest_of_a_question_is_asked_or_refused() -> None:
    """Bug: Dolly's `context` was left out, and Alpaca's `input` where it was no text: the question could not be answered."""
    assert read({"instruction": "Who?", "context": "Ann did.", "response": "Ann."})[0]["content"] == "Who?\n\nAnn did."
    with pytest.raises(DroppedRowError, match="not_text") as dropped:
        read({"instruction": "Add up.", "input": [1, 2], "output": "3"})
    assert "input, beside instruction, is a list" in str(dropped.value.found)


def chunk(text: str | None, **more: Any) -> dict[str, Any]:
    return {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text, **more}}]}


def send(*chunks: Any) -> str:
    return "".join(f"data: {json.dumps(one)}\n\n" for one in chunks) + "data: [DONE]\n\n"


HELLO = [chunk(None, role="assistant"), chunk("Hel"), chunk("lo"), {"object": "chat.completion.chunk", "choices": []}]
FAILED = {"error": {"message": "overloaded"}}


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (send(*HELLO), None), (f": ping\r\n\r\n{send(*HELLO)}", None), (HELLO, None), (json.dumps(HELLO), None),
        ("event: message_start\n" + send(*HELLO), None), ("data: of 1999", "data: of 1999"),
        ('{"a": 1}\n{"b": 2}', '{"a": 1}\n{"b": 2}'), (None, None), (FAILED, None), (json.dumps(FAILED), None),
        (send(FAILED), None), ("event: a concert", "event: a concert"),
        ({"object": "error", "message": "x", "code": 400}, None), ({"detail": "x"}, None), ([], None), ("", None),
        ("<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n<body>nginx</body></html>", None),
        ("<html><title>Shop</title></html>", "<html><title>Shop</title></html>"),
    ],
)  # fmt: skip
def test_the_answer_of_a_log_is_what_was_said(response: Any, said: str | None) -> None:
    """Bug: the text of a stream was an answer as it came."""
    row = request_logs.unwrap_log({"request": {"messages": [{"role": "user", "content": "?"}]}, "response": response})
    messages = chat_formats.parse_conversation(row, "messages", None).messages
    assert [m["content"] for m in messages] == (["?"] if said is None else ["?", said])
    assert ("response without an answer" in chat_formats.list_unread_keys(row, "messages")) == (said is None)


@pytest.mark.parametrize("given", ["{}", "", " ", "null", "None", None, ..., {}, [], "[]", '"{}"', '""'])
def test_a_call_without_arguments_has_none_in_any_spelling(given: Any) -> None:
    """Bug: four of six spellings lost the whole conversation, in sample_target and without a line on it."""
    function = {"name": "clock"} | ({} if given is ... else {"arguments": given})
    (call,) = tool_calls.parse_calls(json.dumps([{"function": function}]))
    assert call == {"id": "call00000", "type": "function", "function": {"name": "clock", "arguments": {}}}


@pytest.mark.parametrize(
    ("key", "value"),
    [("tool_calls", [{"function": {"arguments": "{}"}}]), ("tool_calls", [{"function": {"name": "f", "arguments": "x"}}]),
     ("tool_calls", [{"function": {"name": "f", "arguments": [1]}}]), ("tool_calls", ["f"]), ("tools", [{"type": "function"}])],
)  # fmt: skip
def test_tools_that_no_template_takes_drop_the_row_where_preview_shows_it(key: str, value: Any) -> None:
    """Bug: such rows were clean to fix_data, and dropped by sample_target after the target was loaded."""
    row: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    (row["messages"][1] if key == "tool_calls" else row)[key] = value
    with pytest.raises(DroppedRowError, match="malformed_tools") as error:
        chat_formats.parse_conversation(row, "messages", None)
    assert error.value.found and error.value.expected.startswith("calls and tools with a name")
