"""What sample_target asks of servers and of this process, which rows it drops, and what it tells."""

import itertools
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages import sample_target
from stages.engine import pooled_decode
from stages.engine.pooled_decode import PooledEngine
from stages.sampling import local_backends, write_questions
from stages.target import generation
from tests.engines.misbehaving_server import Fake, completion, echo
from tests.sampling.sampled_project import SPLITS, answers, report, set_backend

FILE = r"\(weather_toon\.jsonl, row \d+\)"


def test_another_template_in_the_server_stops_the_run(project: Path) -> None:
    """Bug: here and below the messages named a row without its file, as fix_data's do."""
    with Fake(lambda b, n: completion("hi", b["model"], usage={"prompt_tokens": 3, "completion_tokens": 2})) as fake:
        set_backend(project, "server", {"base_urls": [fake.url], "attempts": 1})
        with pytest.raises(
            ValueError, match=rf"row \S+\.0 {FILE}: the server was prompted with 3 tokens, .* give \d+; let the server"
        ):
            sample_target.main()


def test_a_refused_row_is_dropped_and_refusing_servers_stop_the_run(project: Path) -> None:
    with Fake(lambda b, n: 400 if n == 1 else completion("hi", b["model"])) as fake:
        set_backend(project, "server", {"base_urls": [fake.url]})
        sample_target.main()
    assert report(project)["dropped"]["refused"] == 1
    with Fake(lambda *_: 400) as fake:
        set_backend(project, "server", {"base_urls": [fake.url]}, train_rows=20)
        with pytest.raises(ValueError, match="the servers refused the first 8 rows"):
            sample_target.main()


def test_servers_get_the_next_split_while_the_last_answers_of_one_are_awaited(project: Path) -> None:
    """Bug: servers ran empty at the end of each split, for as long as its longest answer took."""
    wait_s = 2.0
    with Fake(delay_s=lambda body: wait_s * (body is fake.bodies[0])) as fake:
        set_backend(project, "server", {"base_urls": [fake.url]}, temperature=0.7)
        sample_target.main()
    temperatures = [body["temperature"] for body in fake.bodies]
    assert temperatures[0] == 0.7  # of train, still unanswered when eval is asked
    assert fake.arrived[temperatures.index(0.0)] < fake.arrived[0] + wait_s
    assert all(answers(project, split).height for split in SPLITS)


def test_each_rows_temperature_is_its_own(project: Path) -> None:
    """AngelSlim draws one for each process; here it follows from the row, wherever and whenever it is asked."""
    mixture = [{"temperature": heat, "weight": weight} for heat, weight in ((0.0, 2), (0.5, 1), (1.0, 1.0))]
    with Fake(echo) as fake:
        set_backend(project, "server", {"base_urls": [fake.url]}, temperature=mixture, train_rows=400, shard_size=64)
        sample_target.main()
        temperature_by_seed = {b["seed"]: b["temperature"] for b in fake.bodies[:400]}
        rows = answers(project, "train")
        shares = Counter(rows["temperature"].to_list())
        assert Counter(temperature_by_seed.values()) == shares
        assert set(shares) == {0.0, 0.5, 1.0}
        assert abs(shares[0.0] - 200) < 40 and abs(shares[0.5] - 100) < 35  # four standard deviations
        assert report(project)["temperatures"] == {"0": shares[0.0], "0.5": shares[0.5], "1": shares[1.0]}
        assert set(answers(project, "eval_t")["temperature"]) == {0.5}  # the heaviest above 0, the first of equals
        set_backend(project, "server", {"base_urls": [fake.url], "concurrency": 1}, train_rows=100, shard_size=7)
        sample_target.main()
        some = answers(project, "train")  # a part of the four hundred
        assert len(some) == 100 and some.equals(rows.filter(pl.col("id").is_in(some["id"].to_list())))


def test_an_answer_without_a_word_is_dropped_and_one_without_an_end_stops_the_run(project: Path) -> None:
    """A target may end at once: that row teaches nothing, and is no reason to stop a run of days."""

    def reply(body: dict[str, Any], number: int) -> dict[str, Any]:
        return completion("hi" if number else "", body["model"])

    with Fake(reply) as fake:
        set_backend(project, "server", {"base_urls": [fake.url], "concurrency": 1})
        sample_target.main()
    assert report(project)["dropped"] == {"empty": 1}
    set_backend(project, "transformers", max_new_tokens=4)
    plain, ends = generation.generate_answers, []

    def answers_without_end(*args: Any, **kwargs: Any) -> list[tuple[list[int], str]]:
        ends.append(1)
        return [(ids[:1], "stop") for ids, _ in plain(*args, **kwargs)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooled_decode, "explain_unsupported", lambda _: "it is another")
        patch.setattr(generation, "generate_answers", answers_without_end)
        with pytest.raises(
            ValueError, match=rf"row \S+\.0 {FILE}: its answer ends in token \d+, expected one of the target's"
        ):
            sample_target.main()
    assert ends


def test_a_batch_of_long_prompts_has_few(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: 20 prompts of 450 to 7,700 tokens were one batch, padded to 20 times 7,700."""
    sizes, plain = [], generation.generate_answers

    def note_size(model: Any, prompts: list[list[int]], *settings: Any) -> Any:
        sizes.append((len(prompts), len(prompts) * max(map(len, prompts))))
        return plain(model, prompts, *settings)

    monkeypatch.setattr(pooled_decode, "explain_unsupported", lambda _: "it is another")
    monkeypatch.setattr(generation, "generate_answers", note_size)
    monkeypatch.setattr(local_backends, "MAX_BATCH_TOKENS", 100)
    set_backend(project, "transformers", max_new_tokens=4)
    sample_target.main()
    assert all(count == 1 or padded <= 100 for count, padded in sizes) and max(sizes)[0] > 1


def test_answers_in_this_process_are_greedy_ones_and_outlive_a_kill_and_a_full_memory(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is killed after five answers; the next asks for the others alone, and memory holds but two of them at once."""
    set_backend(project, "transformers", temperature=0.7, max_new_tokens=24, batch_size=4)
    sample_target.main()
    assert capsys.readouterr().out.endswith(", by the torch engine\n")
    whole = {split: answers(project, split) for split in SPLITS}
    model, tokenizer = (kind.from_pretrained("artifacts/target") for kind in (AutoModelForCausalLM, AutoTokenizer))
    for prompt, answer in whole["eval"].select("prompt_ids", "answer_ids").iter_rows():
        out = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0)
        assert answer == out[0, len(prompt) :].tolist(), tokenizer.decode(answer)

    shutil.rmtree("data/sampled")
    plain, asked, slots = PooledEngine.answer, [], []

    def answer_five(self: PooledEngine, *given: Any) -> Any:
        yield from itertools.islice(plain(self, *given), 5)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PooledEngine, "answer", answer_five)
        with pytest.raises(KeyboardInterrupt):
            sample_target.main()

    def note_rows(self: PooledEngine, requests: Any, num_slots: int) -> Any:
        asked.append(len(requests))
        return plain(self, requests, num_slots)

    def read_two(self: PooledEngine, run: Any, started: Any) -> Any:
        slots.append(run.slots.num_slots)
        if run.slots.num_slots > 2 or (len(slots) == 4):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return read_packed(self, run, started)

    read_packed = PooledEngine._prefill_packed
    monkeypatch.setattr(PooledEngine, "answer", note_rows)
    monkeypatch.setattr(PooledEngine, "_prefill_packed", read_two)
    sample_target.main()
    out = capsys.readouterr()
    assert "out of memory with 4 answers at once, going on with 2" in out.out + out.err
    assert "out of memory with 2 answers at once, going on with 1" in out.out + out.err
    assert asked[:2] == [7, 7] and 0 < asked[2] < 7  # of twelve; those answered before the second are kept
    assert all(answers(project, split).equals(whole[split]) for split in SPLITS)


def test_a_target_writes_questions_of_which_those_it_ends_are_kept_once(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(small_run)
    words = [str(tmp_path / "written.jsonl"), "24", "1.0", "0.95", "48", "3"]
    write_questions.main(*words)
    rows = [json.loads(line)["prompt"] for line in Path(words[0]).read_text().splitlines()]
    assert len(set(rows)) == len(rows) and f"24 written, {len(rows)} kept" in capsys.readouterr().out
    seen, texts = set[str](), ["Why is it so?", "why is it so", "So is it, why", "?!"]
    judged = [write_questions.judge_question(text, "stop", seen) for text in texts]
    assert judged == ["kept", "like another", "like another", "empty"]
    with pytest.raises(ValueError, match="may hold questions that you want to keep"):
        write_questions.main(*words)  # the file is there
    Path(words[0]).unlink()
    monkeypatch.setattr(write_questions.loading, "load_target", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_questions.main(*words)
    assert not Path(words[0]).exists()  # or a second try would be refused
