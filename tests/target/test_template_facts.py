"""What a chat template shows, hides and reads, and where an answer's tokens begin."""

from typing import Any

import pytest

from stages.target import chat_template
from tests.target.chat_templates import tokenizer

ASK, ANSWER = {"role": "user", "content": "Name a river."}, {"role": "assistant", "content": "Nile."}
LOOP = "{% for m in messages %}%s{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def with_template(text: str) -> tuple[Any, list[int]]:
    tok, eos = tokenizer("qwen2.5")
    tok.chat_template = text
    return tok, eos


PARTS = LOOP.replace(
    "%s",
    "<|im_start|>{{ m.role }}\n{% for c in m.content %}{% if c.type == 'text' %}{{ c.text }}{% endif %}{% endfor %}<|im_end|>",
)
R1 = LOOP.replace(
    "%s",
    "{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}{% else %}<|im_start|>assistant\n"
    "{{ m.content.split('</think>')[-1] }}<|im_end|>{% endif %}",
).replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
BETWEEN = LOOP.replace("%s", "<|im_start|>{{ m.role }}\n{{ m.content }}{% if not loop.last %}<|im_end|>{% endif %}")


def test_what_a_template_hides_is_known_by_kind() -> None:
    """Bug: a template that ignores tools rendered a row with calls as an empty assistant turn, which the target then saw."""
    tok, _ = with_template(LOOP.replace("%s", "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"))
    call = {"role": "assistant", "content": "", "tool_calls": [chat_template._CALL]}
    result = {"role": "tool", "content": "wet"}
    assert chat_template.list_hidden_kinds(tok, [ASK, call, result], [chat_template._TOOL]) == ["tools", "tool calls"]
    assert chat_template.list_hidden_kinds(tok, [ASK, ANSWER, ASK], None) == []
    assert "reasoning" in chat_template.probe_template(tok).hides


@pytest.mark.parametrize("template", [R1, BETWEEN])
def test_an_end_token_is_known_where_the_template_shows_none(template: str) -> None:
    """Bug: DeepSeek-R1-Distill's generation prompt opens a thought that its history drops; no backend could sample it."""
    tok, eos = with_template(template)
    assert chat_template.find_end_token(tok, eos) == eos[0]


def test_keep_refuses_a_header_that_the_history_drops_and_says_what_else_to_do() -> None:
    tok, eos = with_template(R1)
    with pytest.raises(ValueError, match=r"set sample_target\.backend: transformers or server"):
        chat_template.encode_turns(
            tok, [ASK, {"role": "assistant", "content": "<think>\nNile.\n</think>\n\nNile."}], eos
        )
