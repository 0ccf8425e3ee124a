"""Masks through seven families' templates, against what a server would have been prompted with and have generated."""

import pytest

from stages.target import chat_template
from tests.target.chat_templates import FAMILIES, tokenizer

every_family = pytest.mark.parametrize("family", FAMILIES)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "rain: 3\nsun: 0"},
    {"role": "user", "content": "And the day after\n"},
    {"role": "assistant", "content": "sun"},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "zwölf 雨 a er\n\n er"},
]


def answers(family: str) -> list[str]:
    """What the target would have said to each question of TALK, written by hand: the format after its header."""
    answers = [m["content"] for m in TALK if m["role"] == "assistant"]
    before, after = {
        "qwen3": ("<think>\n\n</think>\n\n", "<|im_end|>"),
        "llama3": ("", "<|eot_id|>"),
        "llama3.2": ("", "<|eot_id|>"),
        "hunyuan": ("", "<｜hy_place▁holder▁no▁2｜>"),
        "harmony": ("<|channel|>final<|message|>", "<|return|>"),
    }.get(family, ("", "<|im_end|>"))
    return [before + text + after for text in answers]


@every_family
def test_a_row_is_what_the_server_is_prompted_with_and_what_the_target_says(family: str) -> None:
    tok, eos = tokenizer(family)
    rows = chat_template.encode_turns(tok, TALK, eos)
    assert [a for _, a in rows] == [tok.encode(a, add_special_tokens=False) for a in answers(family)]
    for turn, (prompt_ids, answer_ids) in zip((2, 4, 6), rows, strict=True):
        assert prompt_ids == chat_template.encode_prompt(tok, TALK[:turn])  # found piecewise, and yet as if in one
        chat_template.check_loss_mask("a", prompt_ids, answer_ids, eos)
        assert answer_ids[-1] in eos and not set(answer_ids[:-1]) & set(eos)


@pytest.mark.parametrize(
    "text", ["\n\nstarts with breaks", " a space", "er", "\n", "t\n", "ends in breaks\n\n\n", "雨"]
)
@pytest.mark.parametrize("family", [f for f in FAMILIES if "llama" not in f])  # which trim
def test_no_token_spans_prompt_and_answer(family: str, text: str) -> None:
    """Bug of masks found by offsets: a line break of the answer that merges with the header's is masked away."""
    tok, eos = tokenizer(family)
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]
    ((prompt_ids, answer_ids),) = chat_template.encode_turns(tok, talk, eos)
    assert prompt_ids == chat_template.encode_prompt(tok, talk[:1])
    expected = text.lstrip("\n") if family == "qwen3" else text
    assert tok.decode(answer_ids[:-1]).endswith(expected)


def test_qwen3_history_is_without_thoughts_and_the_answer_is_with_them() -> None:
    tok, eos = tokenizer("qwen3")
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nfirst thoughts\n</think>\n\nfirst"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "second", "reasoning_content": "second thoughts"},
    ]
    (_, first_ids), (prompt_ids, second_ids) = chat_template.encode_turns(tok, talk, eos)
    assert tok.decode(first_ids) == "<think>\nfirst thoughts\n</think>\n\nfirst<|im_end|>"
    assert tok.decode(second_ids) == "<think>\nsecond thoughts\n</think>\n\nsecond<|im_end|>"
    assert "thoughts" not in tok.decode(prompt_ids)


@every_family
def test_text_with_a_token_of_the_template_is_refused(family: str) -> None:
    """An end token inside an answer would teach the draft to end there."""
    tok, eos = tokenizer(family)
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b {FAMILIES[family][2][0]} c"}]
    with pytest.raises(ValueError, match="message 1 goes on after its end token"):
        chat_template.encode_turns(tok, talk, eos)


def test_masks_that_teach_nothing_everything_or_never_to_end_name_the_row() -> None:
    tok, eos = tokenizer("qwen2.5")
    with pytest.raises(ValueError, match=r"row w\.0: its mask is all zero"):
        chat_template.check_loss_mask("w.0", [1], [], eos)
    with pytest.raises(ValueError, match="all zero"):
        chat_template.check_loss_mask("w.0", [1], [eos[0]], eos)
    with pytest.raises(ValueError, match=r"row w\.0: its mask is all one"):
        chat_template.check_loss_mask("w.0", [], [5, eos[0]], eos)
    with pytest.raises(ValueError, match=r"row w\.0: its answer ends in token 5, expected one of the target's \("):
        chat_template.check_loss_mask("w.0", [1], [5], eos)
    tok.chat_template = tok.chat_template.replace("<|im_end|>\n{% endfor %}", "\n{% endfor %}")
    ((prompt_ids, answer_ids),) = chat_template.encode_turns(tok, TALK[1:3], eos)
    with pytest.raises(ValueError, match="would not learn to end"):
        chat_template.check_loss_mask("w.0", prompt_ids, answer_ids, eos)


@every_family
def test_a_servers_text_becomes_the_ids_it_came_from(family: str) -> None:
    tok, eos = tokenizer(family)
    rows = chat_template.encode_turns(tok, TALK, eos)
    content = tok.decode(rows[-1][1][:-1])
    assert chat_template.encode_answer(tok, TALK[:-1], content, None, eos) == rows[-1][1][:-1]
    assert chat_template.find_end_token(tok, eos) == rows[-1][1][-1]


@pytest.mark.parametrize("name", ["thinking", "reasoning_content"])
def test_harmony_thoughts_are_part_of_the_answer(name: str) -> None:
    """Their own end token is not the answer's. Bug: under the name that exports use, the template left them out."""
    tok, eos = tokenizer("harmony")
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "hm"}]
    ((_, answer_ids),) = chat_template.encode_turns(tok, talk, eos)
    assert tok.decode(answer_ids) == (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>"
    )
