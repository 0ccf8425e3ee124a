"""What a chat template shows, hides and reads, and where an answer's tokens begin."""

import datetime
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stages.runtime import limited_call
from stages.target import chat_template, template_facts
from stages.target.prompt_encoder import PromptEncoder
from tests.target.chat_templates import FAMILIES, tokenizer

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
    call = {"role": "assistant", "content": "", "tool_calls": [template_facts.CALL]}
    result = {"role": "tool", "content": "wet"}
    found = template_facts.explain_hidden(tok, [ASK, call, result], [template_facts.TOOL])
    assert "renders tools and tool calls as nothing" in str(found)
    thought = ANSWER | {"reasoning_content": "The longest."}
    assert template_facts.explain_hidden(tok, [ASK, thought, ASK], None) is None
    assert "renders reasoning as nothing" in str(template_facts.explain_hidden(tok, [ASK, thought], None))


@pytest.mark.parametrize("template", [R1, BETWEEN])
def test_an_end_token_is_known_where_the_template_shows_none(template: str) -> None:
    """Bug: DeepSeek-R1-Distill's generation prompt opens a thought that its history drops; no backend could sample it."""
    tok, eos = with_template(template)
    assert chat_template.find_end_token(tok, eos) == eos[0]


def test_a_template_that_takes_parts_only_shows_texts() -> None:
    """Bug: with SmolVLM's and Idefics3's templates every question rendered as nothing, and the target answered an empty one."""
    tok, _ = with_template(PARTS)
    assert template_facts.probe_template(tok).parts == ("user", "assistant", "system", "tool")
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
            template_facts.check_thinking(tok, True)


def test_an_answer_has_the_tokens_that_follow_its_header() -> None:
    """Bug: an answer was tokenised alone, so with tokenizers that mark the start of a text, its first token was another."""
    tok, eos = prefixing_tokenizer()
    ((prompt, answer),) = chat_template.encode_turns(tok, [ASK, ANSWER], eos)
    whole = tok.encode("USER: Name a river. ASSISTANT: Nile.</s>", add_special_tokens=False)
    assert prompt + answer == whole and tok.convert_ids_to_tokens(answer) == ["▁Nile", ".", "</s>"]
    for text in ("Nile.", " Nile."):  # a server's decoder drops the space, or keeps it
        assert chat_template.encode_answer(tok, [ASK], text, None, eos) == answer[:-1]


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("{% for i in range(99999) %}" * 4 + "{{ i }}" + "{% endfor %}" * 4, "has not ended in 1 seconds"),
        ("{{ 'x' * 10 ** 7 }}", "it renders 10,000,"),
        ("{{ messages | tojson(indent=10 ** 9) }}", "needs more than 512 MiB of memory"),
        ("{{ 9 ** (9 ** 9) }}", "has not ended in 1 seconds"),
    ],
)
def test_a_template_that_computes_without_end_or_fills_the_memory_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str, limit: str
) -> None:
    """Bug: no limit held inside C (a power ran for 150 s), none for memory (12 GiB by an indent), none for the text."""
    if "seconds" in limit:
        monkeypatch.setattr(limited_call, "LIMIT_S", 1)
    tok, _ = with_template(text + BETWEEN)
    with pytest.raises(ValueError, match=f"by the target's chat template .*{limit}"):
        template_facts.probe_template(tok)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_closes_an_answer_is_an_end_token_though_no_config_names_it(family: str) -> None:
    """Bug: of a target whose eos_token_id is another token than its template's, each answer ran on to max_new_tokens."""
    tok, eos = tokenizer(family)
    assert chat_template.find_closing_token(tok, set()) == eos[0]
    assert chat_template.find_closing_token(tok, {0}) == eos[0]
    assert chat_template.find_closing_token(tok, {eos[0]}) is None


@pytest.mark.parametrize(
    ("template", "closing"),
    [
        (BETWEEN, "<|im_end|>"),
        (R1, "<|im_end|>"),
        # GLM-4's: nothing closes an answer but the next header.
        ("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", None),
        # Cohere's: two tokens, of which the configs name the second.
        (LOOP.replace("%s", "<|im_start|>{{ m.content }}<|im_end|><|endoftext|>"), None),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
    ],
)
def test_a_header_is_no_end_token(template: str, closing: str | None) -> None:
    tok, _ = with_template(template)
    known = {tok.convert_tokens_to_ids("<|endoftext|>")}
    found = chat_template.find_closing_token(tok, known)
    assert found == (None if closing is None else tok.convert_tokens_to_ids(closing))


@pytest.mark.parametrize("flag", ["", "{% if messages[-1].role != 'user' or true %}"])
def test_a_header_behind_every_conversation_is_no_text_of_the_row(flag: str) -> None:
    """Bug: Llama 3's first template ignores add_generation_prompt; `keep` stopped at the first row and blamed its text."""
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>"
    header = f"{flag}<|im_start|>assistant{{{{ '\\n' }}}}" + "{% endif %}" * bool(flag)
    tok, eos = with_template("{% for m in messages %}" + turn + "{% endfor %}" + header)
    rows = chat_template.encode_turns(tok, [ASK, ANSWER, ASK, ANSWER], eos)
    assert [tok.decode(answer) for _, answer in rows] == ["Nile.<|im_end|>"] * 2
    assert all(tok.decode(prompt).endswith("<|im_end|><|im_start|>assistant\n") for prompt, _ in rows)
    with pytest.raises(ValueError, match="goes on after its end token"):
        chat_template.encode_turns(tok, [ASK, ANSWER | {"content": "Nile.<|im_end|> And Po."}], eos)


@pytest.mark.parametrize(
    ("content", "mark"),
    [
        ("<|im_start|>user\nName a river.<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"),
        ("Name a river.<|im_end|>", "<|im_end|>"),
        ([{"type": "text", "text": "<|im_start|>user\na"}], "<|im_start|>"),
        ("<think> is text to this template, and so is assistant", None),
    ],
)
def test_a_prompt_that_is_rendered_already_is_known_by_the_templates_marks(content: Any, mark: str | None) -> None:
    """Bug: a prompt of a completions log was rendered twice, and the target asked what no server sees."""
    tok, _ = tokenizer("qwen2.5")
    found = chat_template.explain_rendered(tok, [{"role": "user", "content": content}])
    assert (found is None) == (mark is None) and (mark is None or f"message 0 (user) holds {mark!r}" in str(found))


@pytest.mark.parametrize("family", ["llama3.2", "harmony"])
def test_a_template_with_a_fixed_date_renders_what_it_did_that_day(family: str) -> None:
    tok, _ = tokenizer(family)
    assert template_facts.reads_date(tok.chat_template) and not template_facts.reads_date(
        tokenizer("qwen3")[0].chat_template
    )
    today = datetime.date.today()
    wanted = chat_template.encode_prompt(tok, [ASK])
    own = tok.chat_template
    tok.chat_template = template_facts.fix_date(own, today)
    assert chat_template.encode_prompt(tok, [ASK]) == wanted and not template_facts.reads_date(tok.chat_template)
    tok, _ = with_template(template_facts.fix_date(own, datetime.date(2024, 7, 4)))
    text = tok.decode(chat_template.encode_prompt(tok, [ASK]))
    assert ("04 Jul 2024" if family == "llama3.2" else "2024-07-04") in text
    encoder = PromptEncoder(tok, [0], 9, 0, None, None, today - datetime.timedelta(3))
    dated = list(encoder.list_dated_prompts("a", [ASK], None, []))
    assert len(dated) == 6 and f"{today:%d}" in tok.decode(dated[0])
