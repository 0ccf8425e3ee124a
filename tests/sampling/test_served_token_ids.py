"""Token ids of answers that come from servers: whose ids they are, and what a run does where they are not known."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from stages import sample_target
from tests.engines.misbehaving_server import Fake, completion
from tests.sampling.sampled_project import answers, report, set_backend

WRONG_COUNT = {"usage": {"completion_tokens": 99}}


def serve_as(engine: str, reply: Any) -> Fake:
    """A server that says which engine it is, as the models of vLLM and SGLang do; the builtin target's name is `builtin`."""
    return Fake(reply, models={"data": [{"id": "tiny", "owned_by": engine}]})


def spell(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text whose characters are tokens each, where the tokenizer would take fewer."""
    return [token for character in text for token in tokenizer.encode(character, add_special_tokens=False)]


def ended(tokenizer: Any, text: str) -> list[int]:
    """The same with the target's end token, which engines return with the others."""
    return [*spell(tokenizer, text), tokenizer.convert_tokens_to_ids("<|im_end|>")]


@pytest.fixture
def tokenizer(project: Path) -> Any:
    return AutoTokenizer.from_pretrained("artifacts/target")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engines_own_ids_are_taken_though_its_text_tells_others(project: Path, tokenizer: Any, engine: str) -> None:
    """Bug: SGLang's ids, which it returns from 0.5.17 on, were not asked for, and such rows were dropped."""
    ids = ended(tokenizer, "place: Graz")
    assert len(ids) > len(tokenizer.encode("place: Graz", add_special_tokens=False)) + 2

    def reply(body: dict[str, Any], number: int) -> dict[str, Any]:
        assert body["return_token_ids"] is True
        return completion("place: Graz", choice={"token_ids": ids}, usage={"completion_tokens": len(ids)})

    with serve_as(engine, reply) as fake:
        set_backend(project, "server", {"base_urls": [fake.url], "model": "tiny"})
        sample_target.main()
    found = report(project)
    assert found["token_ids"] == {"server": found["rows_in"]} and not found["dropped"]
    assert all(row == ids for row in answers(project, "train")["answer_ids"].to_list())


ENDED_ELSEWHERE = (
    r"dropped: 6 token_ids_unknown.*the server ended the answer {}, expected an end token of the target \("
)


@pytest.mark.parametrize(
    ("choice", "found"),
    [
        ({"stop_reason": "place:"}, "at the string 'place:'"),
        ({"matched_stop": 5}, r"at token 5, '\S+'"),
        ({"token_ids": "bare"}, r"after token \d+, 'z'"),
        ({"token_ids": "bare", "stop_reason": "Graz"}, "at the string 'Graz'"),
        ({"token_ids": "bare", "matched_stop": "end"}, None),
        ({"token_ids": "beyond", "finish_reason": "length"}, None),
        ({"matched_stop": "end"}, None),
    ],
)
def test_no_row_gets_an_end_token_that_the_target_did_not_write(
    project: Path, tokenizer: Any, choice: dict[str, Any], found: str | None
) -> None:
    """Bug: an answer that the server ended at a string, or at a token of its own, got the target's end token behind it."""
    bare, (*_, end) = spell(tokenizer, "place: Graz"), ended(tokenizer, "")
    lists = {"bare": bare, "beyond": [*bare, end, 5, 6], "end": end}
    choice = {key: lists.get(value, value) for key, value in choice.items()}
    with serve_as("vllm", lambda b, n: completion("place: Graz", choice=choice)) as fake:
        set_backend(project, "server", {"base_urls": [fake.url], "model": "tiny"})
        if found:
            with pytest.raises(ValueError, match=ENDED_ELSEWHERE.format(found)):
                sample_target.main()
            return
        sample_target.main()
    texts = [tokenizer.decode(ids) for ids in answers(project, "train")["answer_ids"]]
    assert set(texts) == {"place: Graz<|im_end|>"}
    assert set(answers(project, "train")["finish_reason"]) == {"stop"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda ids: [*range(40), *ids], "returned 52 token ids and counted 12"),
        (
            lambda ids: [token + 1 for token in ids],
            "token ids of another text than its own, which begins 'place: Graz'",
        ),
        (lambda ids: [*ids[:-1], 10**6], "returned token id 1000000, of a vocabulary of "),
    ],
)
def test_ids_that_cannot_be_the_texts_are_dropped(
    project: Path, tokenizer: Any, capsys: pytest.CaptureFixture, change: Any, says: str
) -> None:
    """Bug: any ids were trained on: the prompt's among them, another text's, and some outside the vocabulary."""
    ids = ended(tokenizer, "place: Graz")
    odd = completion("place: Graz", choice={"token_ids": change(ids)}, usage={"completion_tokens": len(ids)})
    good = completion("place: Graz", choice={"token_ids": ids}, usage={"completion_tokens": len(ids)})
    with serve_as("vllm", lambda b, n: good if n else odd) as fake:
        set_backend(project, "server", {"base_urls": [fake.url], "model": "tiny", "concurrency": 1})
        sample_target.main()
    assert report(project)["dropped"] == {"token_ids_unknown": 1}
    output = capsys.readouterr().out
    assert "train: 1 rows dropped as token_ids_unknown, the first: row weather-" in output and says in output


def test_servers_of_which_no_ids_are_known_stop_the_run_and_others_go_on_with_it(project: Path) -> None:
    """Bug: it went on to the end, said "0 cut at max_new_tokens; raise max_new_tokens", and kept the answers for the next run."""
    with Fake(lambda b, n: completion("hi", b["model"], **WRONG_COUNT)) as fake:
        set_backend(project, "server", {"base_urls": [fake.url], "concurrency": 4}, train_rows=60)
        with pytest.raises(
            ValueError,
            match=r"none of the first 32 answers are known.*The first: row \S+ \(weather_toon.jsonl, row \d+\)",
        ) as error:
            sample_target.main()
        assert "the server counted 99 tokens" in str(error.value) and len(fake.bodies) < 40
    with Fake(lambda b, n: completion("hi", b["model"])) as fake:
        set_backend(project, "server", {"base_urls": [fake.url], "concurrency": 4}, train_rows=60)
        sample_target.main()
    assert answers(project, "train").height == 60 and not report(project)["dropped"]


def test_unknown_ids_are_asked_for_again_once_the_server_is_mended(project: Path) -> None:
    """Bug: every second answer was kept with its wrong count, and dropped again by each run after."""

    def reply(body: dict[str, Any], number: int) -> Any:
        return 404 if number > 15 else completion("hi", body["model"], **(WRONG_COUNT if number % 2 else {}))

    settings: dict[str, Any] = {"train_rows": 30, "shard_size": 50}
    with Fake(reply) as fake:
        set_backend(project, "server", {"base_urls": [fake.url], "concurrency": 1}, **settings)
        with pytest.raises(ValueError, match="404"):
            sample_target.main()
    with Fake(lambda b, n: completion("hi", b["model"])) as fake:
        set_backend(project, "server", {"base_urls": [fake.url], "concurrency": 1}, **settings)
        sample_target.main()
    found = report(project)
    assert not found["dropped"] and len(fake.bodies) == found["rows_in"] - 8  # what was usable is kept


def test_answers_that_nothing_checks_are_a_warning(project: Path, capsys: pytest.CaptureFixture) -> None:
    """Bug: a server without `usage` and with another template was taken without a word."""
    with Fake(lambda b, n: completion("hi", b["model"])) as fake:
        set_backend(project, "server", {"base_urls": [fake.url]})
        sample_target.main()
    assert "warning: of 12 of 12 answers the servers returned neither token ids nor how many" in capsys.readouterr().out
