"""What a chat template shows, hides and reads, and where an answer's tokens begin."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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


def prefixing_tokenizer() -> tuple[Any, list[int]]:
    """Return a tokenizer that marks the start of a text, as Llama 2's, with plain-text headers, as Vicuna's."""
    words = ["▁USER:", "▁ASSISTANT:", "▁Name", "▁Nile", "Nile", "▁a", "▁river", ".", "</s>"]
    letters = sorted({c for word in words for c in word} | {"▁"})
    vocab = {text: i for i, text in enumerate(dict.fromkeys([*words, *letters, "<unk>"]))}
    whole = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    whole.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.Split(".", "isolated")]
    )
    whole.decoder = decoders.Metaspace(prepend_scheme="first")
    tok = PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="</s>", unk_token="<unk>")
    tok.chat_template = (
        "{% for m in messages %}{{ 'USER: ' + m.content if m.role == 'user' else ' ASSISTANT: ' + m.content + '</s>' }}"
        "{% endfor %}{% if add_generation_prompt %} ASSISTANT:{% endif %}"
    )
    return tok, [tok.convert_tokens_to_ids("</s>")]


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


def test_a_template_that_takes_parts_only_shows_texts() -> None:
    """Bug: with SmolVLM's and Idefics3's templates every question rendered as nothing, and the target answered an empty one."""
    tok, _ = with_template(PARTS)
    assert chat_template.probe_template(tok).parts == ("user", "assistant", "system", "tool")
    assert (
        tok.decode(chat_template.encode_prompt(tok, [ASK]))
        == "<|im_start|>user\nName a river.<|im_end|><|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("condition", "keys"),
    [("thinking is defined and thinking", ("thinking",)), ("enable_thinking", ("enable_thinking",)), ("false", ())],
)
def test_thinking_has_the_name_that_the_template_reads(condition: str, keys: tuple[str, ...]) -> None:
    """Bug: Granite's, DeepSeek-V3.1's and Kimi's templates read `thinking`; enable_thinking alone was passed, in vain."""
    tok, _ = with_template("{% if " + condition + " %}Think first.{% endif %}" + PARTS)
    assert chat_template.build_template_kwargs(tok, True) == dict.fromkeys(keys, True)
    text = tok.decode(chat_template.encode_prompt(tok, [ASK], thinking=True))
    assert text.startswith("Think first.") == bool(keys)
    if not keys:
        with pytest.raises(ValueError, match=r"sample_target\.thinking is true, expected null"):
            chat_template.check_thinking(tok, True)


def test_an_answer_has_the_tokens_that_follow_its_header() -> None:
    """Bug: an answer was tokenised alone, so with tokenizers that mark the start of a text, its first token was another."""
    tok, eos = prefixing_tokenizer()
    ((prompt, answer),) = chat_template.encode_turns(tok, [ASK, ANSWER], eos)
    whole = tok.encode("USER: Name a river. ASSISTANT: Nile.</s>", add_special_tokens=False)
    assert prompt + answer == whole and tok.convert_ids_to_tokens(answer) == ["▁Nile", ".", "</s>"]
    for text in ("Nile.", " Nile."):  # a server's decoder drops the space, or keeps it
        assert chat_template.encode_answer(tok, [ASK], text, None, eos) == answer[:-1]


def test_a_template_that_never_ends_or_raises_anything_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: prepare_target hung on the one, and sampling ended in a traceback on the other."""
    tok, eos = with_template("{{ 1 / (messages | length - 2) }}" + BETWEEN)
    with pytest.raises(chat_template.TemplateRefusalError, match="of the roles user, assistant: division by zero"):
        chat_template.encode_turns(tok, [ASK, ANSWER], eos)
    monkeypatch.setattr(chat_template, "PROBE_S", 0.5)
    nested = "{% for i in range(99999) %}"
    tok, _ = with_template(nested * 4 + "{{ i }}" + "{% endfor %}" * 4)
    with pytest.raises(ValueError, match="has not rendered one question in"):
        chat_template.probe_template(tok)
