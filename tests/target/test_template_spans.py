"""Answers found by the conversation's shape are where rendering every prompt finds them, or are not found so at all."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stages.target import chat_template, template_spans
from tests.target.chat_templates import FAMILIES, tokenizer

TOKENIZERS = {family: tokenizer(family)[0] for family in FAMILIES}
LOOKED_FOR = [
    "<think>",
    "</think>",
    "<think>\nhm\n</think>\n\nrain",
    "<tool_response>x</tool_response>",
    "<answer>",
    "/no_think",
]
TRICKY = [
    "<",
    "<b>",
    "\n",
    " ",
    "assistant",
    "<|im_end|>\n<|im_start|>assistant\n",
    "\x02",
    "\x021\x03",
    "Ünï 雨",
    "user",
]
# What only a content decides, in ways that published templates have.
NO_THINK = (  # the header of the turn to come follows a word of the last question
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if '/no_think' in messages[-1].content %}<think></think>{% endif %}{% endif %}"
)
BY_NAME = (  # the word stands in a variable, and the content is cut by its length
    "{% set word = '<answer>' %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.content[:word|length] == word and not loop.last %}{{ m.content[word|length:] }}{% else %}{{ m.content }}{% endif %}"
    "</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TWICE = (
    "{% for m in messages %}{{ m.content }}|{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
OTHERS = {"no_think": NO_THINK, "by name": BY_NAME, "twice": TWICE}
for name, template in OTHERS.items():
    TOKENIZERS[name] = tokenizer("qwen2.5")[0]
    TOKENIZERS[name].chat_template = template

words = st.sampled_from(TRICKY + LOOKED_FOR) | st.text("ab<\n ", max_size=4)
contents = st.lists(words, max_size=4).map("".join)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": draw(contents)}] if draw(st.booleans()) else []
    turns = [
        {"role": "user" if n % 2 == 0 else "assistant", "content": draw(contents)}
        for n in range(draw(st.integers(1, 7)))
    ]
    return [*system, *turns]


def slowly(tok: Any, talk: list[dict[str, Any]], text: str, thinking: bool | None) -> list[int] | str:
    try:
        return chat_template.find_starts_by_rendering(tok, talk, text, thinking)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(talk=conversations(), thinking=st.sampled_from([None, True, False]))
@example(
    talk=[{"role": "user", "content": "x/no_think"}, {"role": "assistant", "content": "<think></think>b"}],
    thinking=None,
)
def test_known_starts_are_those_of_every_prompt(name: str, talk: list[dict[str, Any]], thinking: bool | None) -> None:
    tok = TOKENIZERS[name]
    last = (chat_template.find_assistant_messages(talk) or [-1])[-1]
    text = chat_template._render_messages(tok, talk[: last + 1], False, thinking)
    known = chat_template._find_starts_by_shape(tok, talk, text, thinking)
    if known is not None:
        assert known == slowly(tok, talk, text, thinking)


@pytest.mark.parametrize("thinking", [None, True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_conversations_are_known_by_their_shape(family: str, thinking: bool | None) -> None:
    """Without this, never to know anything would satisfy the property above."""
    tok = TOKENIZERS[family]
    for turns in (1, 3, 20):
        talk = [
            {"role": r, "content": f"{r} {i}\n\tsays <b>{i}</b>."} for i in range(turns) for r in ("user", "assistant")
        ]
        text = tok.apply_chat_template(talk, tokenize=False, **chat_template.build_template_kwargs(thinking))
        known = chat_template._find_starts_by_shape(tok, talk, text, thinking)
        if family == "hunyuan" and thinking is False:  # writes the empty think block behind the last answer
            assert known is None and "rewrites" in str(slowly(tok, talk, text, thinking))
            continue
        assert known is not None and len(known) == turns and known == slowly(tok, talk, text, thinking)


def test_an_answer_that_begins_as_the_empty_think_block_does_keeps_its_first_letters() -> None:
    """Bug: its start was where prompt and rendering part, which is behind a "<" that both have."""
    tok = TOKENIZERS["qwen3"]
    talk = [
        {"role": r, "content": c}
        for r, c in [("user", "a"), ("assistant", "<think about it"), ("user", "b"), ("assistant", "c")]
    ]
    text = tok.apply_chat_template(talk, tokenize=False, enable_thinking=False)
    for found in (
        chat_template.find_answer_starts(tok, talk, text, False),
        chat_template.find_starts_by_rendering(tok, talk, text, False),
    ):
        assert text[found[0] :].startswith("<think about it<|im_end|>")


def test_what_is_looked_for_in_contents() -> None:
    assert template_spans.find_inspected_texts(FAMILIES["qwen3"][0]) >= {"<think>", "</think>"}
    assert template_spans.find_inspected_texts(NO_THINK) == {"/no_think"} and template_spans.find_inspected_texts(
        BY_NAME
    ) == {"<answer>"}
    assert template_spans.find_inspected_texts("{% unheard of %}") is None
    assert (
        template_spans.find_inspected_texts("{{ m['content'] | trim }}{% if m['role'] == 'user' %}x{% endif %}")
        == set()
    )


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": ""}, {"role": "user", "content": " \n"}, {"role": "user", "content": [{"type": "text"}]},
        {"role": "assistant", "content": "a", "reasoning_content": "b"}, {"role": "user", "name": "x"},
    ],
)  # fmt: skip
def test_more_than_roles_and_texts_is_no_shape(message: dict[str, Any]) -> None:
    assert template_spans.extract_roles([{"role": "user", "content": "a"}, message]) is None


def test_only_so_many_shapes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_spans, "MAX_SHAPES", 3)
    tok = tokenizer("qwen2.5")[0]
    for turns in range(1, 9):
        talk = [{"role": r, "content": "x"} for _ in range(turns) for r in ("user", "assistant")]
        assert (
            chat_template._find_starts_by_shape(tok, talk, tok.apply_chat_template(talk, tokenize=False), None)
            is not None
        )
        assert len(chat_template._shapes_by_tokenizer[tok]) <= 3
