"""Rows of well-known datasets with their expected messages, and a row for each reason to drop one."""

import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stages.data import chat_formats, chat_turns
from stages.data.row_images import DroppedRowError

ASK, SAY = "Weather in Bergen?", "Rain."
PLAIN = [{"role": "user", "content": ASK}, {"role": "assistant", "content": SAY}]
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = [{"id": "c1", "type": "function", "function": {"name": "forecast", "arguments": '{"place": "Bergen"}'}}]
TOOLS = [{"type": "function", "function": {"name": "forecast"}}]


def save_file_only(data: bytes, extension: str | None) -> str | None:
    """Replace row_cleaning.save_waiting_image: keep any file, never bytes."""
    return None if extension is None else f"{data!r}{extension}"


def read(row: dict[str, Any], folder: str | None = None) -> chat_formats.Conversation:
    kind = chat_formats.detect_format(row)
    assert kind is not None
    return chat_formats.parse_conversation(row, kind, folder, save_file_only)


@pytest.mark.parametrize(
    ("kind", "row", "messages"),
    [
        ("sharegpt", {"conversations": [{"from": "human", "value": ASK}, {"from": "gpt", "value": SAY}]}, PLAIN),
        ("sharegpt", {"conversations": PLAIN}, PLAIN),
        ("sharegpt", {"system": "Be brief.", "conversations": PLAIN}, [SYSTEM, *PLAIN]),
        ("ultrachat", {"prompt": ASK, "prompt_id": "f0e37e9f", "messages": PLAIN}, PLAIN),
        ("messages", {"messages": [SYSTEM, *PLAIN, *PLAIN]}, [SYSTEM, *PLAIN, *PLAIN]),
        ("messages", {"messages": [{**SYSTEM, "role": "developer"}, *PLAIN]}, [SYSTEM, *PLAIN]),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": ASK}]}, PLAIN[1]]}, PLAIN),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "input_text", "text": ASK}]},
                                   {"role": "assistant", "content": [{"type": "output_text", "text": SAY}]}]}, PLAIN),
        ("prompt_answer", {"prompt": ASK, "answer": SAY}, PLAIN),
        ("prompt_answer", {"question": ASK, "response": SAY, "system_prompt": "Be brief."}, [SYSTEM, *PLAIN]),
        ("prompt_answer", {"instruction": ASK, "input": "", "output": SAY}, PLAIN),
        ("prompt_answer", {"instruction": "Weather?", "input": "Bergen", "output": SAY},
         [{"role": "user", "content": "Weather?\n\nBergen"}, PLAIN[1]]),
        ("prompt_answer", {"input": ASK, "output": SAY}, PLAIN),
        ("prompt_answer", {"question_id": 81, "category": "writing", "turns": [ASK, "Shorter."]}, PLAIN[:1]),  # MT-Bench
        # LLaMA-Factory's form of Alpaca. Bug: its earlier turns were lost in silence.
        ("prompt_answer", {"instruction": ASK, "input": "", "output": SAY, "history": [["a", "b"]], "system": "Be brief."},
         [SYSTEM, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, *PLAIN]),
        ("sharegpt", {"conversations": [{"from": "human", "value": ASK}, {"from": "chatgpt", "value": SAY}]}, PLAIN),
        ("sharegpt", {"conversation_hash": "0", "conversation": [{**turn, "language": "English"} for turn in PLAIN]}, PLAIN),
        ("sharegpt", {"id": 7, "conversations": PLAIN, "status": "success"}, PLAIN),  # SpecForge's regenerate_train_data.py
        ("sharegpt", {"id": "0", "conversations": PLAIN, "metadata": {"finish_reason": "stop"}}, PLAIN),  # speculators
    ],
)  # fmt: skip
def test_a_row_of_each_format(kind: str, row: dict[str, Any], messages: list[dict[str, str]]) -> None:
    assert chat_formats.detect_format(row) == kind and chat_formats.has_format(row, kind)
    found = read(row)
    assert found.messages == messages and found.list_extras() == []


def test_tools_calls_and_reasoning_stay_with_their_messages() -> None:
    row = {
        "tools": TOOLS,
        "messages": [
            SYSTEM,
            PLAIN[0],
            {"role": "assistant", "content": None, "tool_calls": CALL, "reasoning_content": "I must look."},
            {"role": "tool", "content": "rain", "tool_call_id": "c1"},
            {"role": "assistant", "content": SAY, "reasoning_content": ""},
        ],
    }
    found = read(row)
    assert [m["role"] for m in found.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert found.messages[2]["content"] == "" and found.reasoning == [None, None, "I must look.", None, None]
    assert found.tool_calls is not None and found.tool_calls[2] is not None and '"forecast"' in found.tool_calls[2]
    assert found.tools is not None and '"forecast"' in found.tools


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}, PLAIN[1]]}, "unknown_part"),
        ({"messages": [PLAIN[0], {"role": "tool", "content": "x"}, PLAIN[1]]}, "wrong_turns"),
        ({"messages": [{**PLAIN[0], "tool_calls": CALL}, PLAIN[1]]}, "unknown_role"),
        ({"messages": [PLAIN[0], {"role": "assistant", "content": ""}, *PLAIN]}, "empty_turn"),
        ({"messages": [PLAIN[0], {**PLAIN[1], "reasoning_content": 5}]}, "not_text"),
        ({"messages": [{"role": ["user"], "content": ASK}, PLAIN[1]]}, "unknown_role"),
    ],
)
def test_a_row_that_is_dropped(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DroppedRowError, match=f"^{reason}$"):
        read(row)


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"messages": [{"who": "Ann", "says": ASK}]}, "turn 1 has the keys 'who, says'"),
        ({"messages": [PLAIN[0], {"role": "agent", "content": SAY}]}, "the role of turn 2 is a text, 'agent'"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "the content of turn 1 has half of a character"),
    ],
)
def test_a_turn_of_another_form_is_described(row: dict[str, Any], found: str) -> None:
    """Bug: `not_text` and `unknown_role` said neither what was found nor what would be read."""
    with pytest.raises(DroppedRowError, match=r"not_text|unknown_role") as dropped:
        read(row)
    assert found in str(dropped.value.found) and dropped.value.expected
    (dropped.value.found or "").encode()  # can be printed


# --- arbitrary rows --------------------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=()), max_size=6) | st.sampled_from(["<image>", "sky.png", "user", " "])
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from([*chat_turns.ROLE_NAMES, "narrator", "\ud83d"])
turn = st.fixed_dictionaries(
    {},
    optional={
        "from": names | anything, "role": names | anything, "value": texts | anything, "content": texts | anything,
        "tool_calls": anything, "reasoning_content": texts | anything,
    },
)  # fmt: skip
keys = ("conversations", "messages", "prompt", "answer", "input", "system", "tools", "image", "images", "prompt_id")
rows = st.fixed_dictionaries({}, optional={key: st.lists(turn | anything, max_size=4) | anything for key in keys})


def read_or_drop(row: dict[str, Any]) -> None:
    """Parsing raises DroppedRowError only, and every parsed row can be written."""
    kind = chat_formats.detect_format(row)
    if kind is None:
        return
    assert chat_formats.has_format(row, kind)
    try:
        found = chat_formats.parse_conversation(row, kind, "/nowhere")
    except DroppedRowError:
        return
    order = "".join(m["role"][0] for m in found.messages)
    assert re.fullmatch(r"s?(?=u)(u(a+t+)*a)*(u(a+t+)*)?", order), order
    for entries in (found.tool_calls, found.reasoning):
        assert entries is None or len(entries) == len(found.messages)
    beside = [found.tools, *(found.tool_calls or []), *(found.reasoning or []), *(found.images or [])]
    for text in [*(m["content"] for m in found.messages), *filter(None, beside)]:
        text.encode()


# Of five seeded bugs 250 examples found the two that 1,000 found.
@settings(max_examples=250, deadline=None, derandomize=True)
@example(row={"messages": PLAIN, "tools": [{"\ud83d": 1}]})
@example(row={"messages": PLAIN, "tools": [b"x"]})
@given(row=rows)
def test_no_row_stops_the_stage(row: dict[str, Any]) -> None:
    read_or_drop(row)


def test_what_specforge_marks_as_failed_is_dropped_and_its_thinking_kept() -> None:
    """Bug: a row with SpecForge's status `error` was trained on with its old answers; the key `thinking` was lost."""
    with pytest.raises(DroppedRowError, match="marked_error") as dropped:
        read({"conversations": PLAIN, "status": "error", "error": "timeout"})
    assert dropped.value.found == "timeout"
    kept = read({"conversations": [PLAIN[0], {**PLAIN[1], "thinking": "Clouds."}], "status": "success"})
    assert kept.messages == PLAIN and kept.reasoning == [None, "Clouds."]
