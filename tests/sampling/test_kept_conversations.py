"""Tools, calls and thoughts of conversations as servers and prompts get them, and the data's own answers."""

import itertools
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from transformers import AutoTokenizer

from stages import sample_target
from stages.data import conversations
from tests.engines.misbehaving_server import Fake, completion
from tests.sampling.sampled_project import (
    CALLED,
    SPLITS,
    TOOLS,
    answers,
    conversations_of,
    report,
    set_backend,
    with_tools,
)


def rendered(body: dict[str, Any], tokenizer: Any) -> list[int]:
    """The prompt's ids as a server makes them: arguments parsed, then the template."""
    messages = json.loads(json.dumps(body["messages"]))
    for call in itertools.chain.from_iterable(m.get("tool_calls", ()) for m in messages):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    text = tokenizer.apply_chat_template(messages, tools=body["tools"], tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)


def test_tools_calls_and_thoughts_reach_the_server_and_the_prompt(project: Path) -> None:
    """Prompts are compared id by id with those of a server that renders what it was sent."""
    with_tools(thoughts=True)
    tokenizer = AutoTokenizer.from_pretrained("artifacts/target")

    def reply(body: dict[str, Any], number: int) -> dict[str, Any]:
        return completion("hi", body["model"], prompt_token_ids=rendered(body, tokenizer))

    models = {"data": [{"id": "tiny", "owned_by": "vllm"}]}
    with Fake(reply, models=models) as fake:
        set_backend(project, "server", {"base_urls": [fake.url], "model": "tiny"}, train_rows=None, eval_rows=None)
        sample_target.main()
    assert all(body["tools"] == TOOLS and body["tool_choice"] == "none" for body in fake.bodies)
    second = next(b["messages"] for b in fake.bodies if len(b["messages"]) == 3)
    assert second[1] == {"role": "assistant", "content": "", "reasoning_content": "I look up", "tool_calls": [CALLED]}
    assert second[2] == {"role": "tool", "content": "blue", "tool_call_id": "abc"}
    text = tokenizer.decode(answers(project, "train")["prompt_ids"][1])
    assert json.dumps(TOOLS[0])[:20] in text and '(I look up)<sky at="Oslo" b=[1, 2]>' in text
    set_backend(project, "keep", {"base_urls": [fake.url], "model": "tiny"}, train_rows=2, eval_rows=1)
    with Fake(reply, models=models, port=fake.port):
        sample_target.main()
    kept = [tokenizer.decode(ids) for ids in answers(project, "train")["answer_ids"]]
    assert kept == ['(I look up)<sky at="Oslo" b=[1, 2]><|im_end|>', "(so)it is blue<|im_end|>"]


@pytest.mark.parametrize("backend", ["transformers", "keep"])
def test_rows_that_the_chat_template_refuses_are_dropped_and_the_first_is_named(
    project: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: one row with a role that the template does not know ended the stage with Jinja's traceback."""
    conversations_of(project, 6, 2)
    table = pl.read_parquet("data/fixed/train.parquet")
    rows = table.to_dicts()
    rows[1]["messages"].insert(0, {"role": "tool", "content": "blue"})
    for key in ("tool_calls", "reasoning"):
        rows[1][key] = rows[1].get(key) and [None, *rows[1][key]]
    pl.DataFrame(rows, schema=table.schema).write_parquet("data/fixed/train.parquet")
    path = Path("artifacts/target/target.json")
    target = json.loads(path.read_text())
    own = AutoTokenizer.from_pretrained("artifacts/target").chat_template
    refusing = (
        "{% for m in messages if m.role == 'tool' %}{{ raise_exception('role tool not known') }}{% endfor %}" + own
    )
    path.write_text(json.dumps(target | {"chat_template": refusing}))
    set_backend(project, backend, train_rows=12, max_new_tokens=4)
    sample_target.main()
    assert report(project)["dropped"]["refused_by_template"] == 2
    assert answers(project, "train").height == 10
    output = capsys.readouterr().out
    assert f"train: 2 rows dropped as refused_by_template, the first: row {rows[1]['id']}.0" in output
    assert "refuses messages of the roles tool, user" in output and "role tool not known; leave them out" in output


def test_keep_takes_the_datas_own_answers_and_the_targets_for_eval(project: Path) -> None:
    before = {split: answers(project, split) for split in SPLITS}
    set_backend(project, "keep")
    sample_target.main()
    tokenizer = AutoTokenizer.from_pretrained("artifacts/target")
    fixed = pl.read_parquet("data/fixed/train.parquet").to_dicts()
    expected = {
        f"{row['id']}.{n}": text
        for row in fixed
        for n, text in enumerate(m["content"] for m in row["messages"] if m["role"] == "assistant")
    }
    rows = answers(project, "train").to_dicts()
    assert len(rows) == 6
    for row, sampled_before in zip(rows, before["train"].to_dicts(), strict=True):
        assert tokenizer.decode(row["answer_ids"]) == f"{expected[row['id']]}<|im_end|>"
        assert (row["id"], row["prompt_ids"], row["finish_reason"]) == (
            sampled_before["id"],
            sampled_before["prompt_ids"],
            "stop",
        )
    assert answers(project, "eval").equals(before["eval"])
    found = report(project)
    assert found["token_ids"] == {"template": 6, "exact": 6}
    assert found["temperatures"] == {"the data": 6} and found["shards"] == {"train": 2, "eval": 1, "eval_t": 1}


@pytest.mark.parametrize("backend", ["transformers", "keep"])
def test_rows_with_what_the_chat_template_hides_are_dropped_and_the_first_is_named(
    project: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug: with a template that ignores tools the target saw an empty assistant turn, and answered something else."""
    with_tools(thoughts=False)
    Path("artifacts/target/chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    plain = conversations.FIXED_SCHEMA.names()
    table = pl.read_parquet("data/fixed/train.parquet")
    other = pl.read_parquet("data/fixed/eval.parquet").with_columns(
        *[pl.lit(None, conversations.FIXED_SCHEMA[name]).alias(name) for name in ("tools", "tool_calls", "reasoning")]
    )
    questions = other.with_columns(pl.col("messages").list.head(1))
    pl.concat([table.select(plain), questions.select(plain)]).write_parquet("data/fixed/train.parquet")
    questions.write_parquet("data/fixed/eval.parquet")
    set_backend(project, backend, train_rows=None, eval_rows=1)
    if backend == "keep":  # a question alone has no answer to keep
        with pytest.raises(ValueError, match=r"no row is left in the train split.*not_in_template"):
            sample_target.main()
        return
    sample_target.main()
    assert report(project)["dropped"]["not_in_template"] >= 1
    assert "renders tools as nothing" in capsys.readouterr().out
