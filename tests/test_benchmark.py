"""The torch engine's cell: later turns after plain decoding's answers, repeats in turns, a speedup's interval, grades."""

import json
import random
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages import benchmark, prepare_prompts
from stages.cells import interval, metrics, torch_records
from stages.cells.torch_records import PromptRow
from stages.grading import sandbox
from stages.measuring import torch_context
from stages.prompts import workload_prompts
from tests.conftest import ROOT, edit_params
from tests.talking import WORKLOADS

ROOM = 12
WORKLOAD = SimpleNamespace(temperature=0.8, top_p=1.0, top_k=None, seed=42)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def project(talking_project: Path) -> Path:
    return talking_project


def measured(project: Path, name: str, **changes: Any) -> dict[str, Any]:
    """The cell of a workload."""
    edit_params(project, {"benchmark": {"workloads": {**WORKLOADS, name: {**WORKLOADS[name], **changes}}}})
    prepare_prompts.main(name)
    benchmark.main(name, "e003", "t3_2_6")
    return torch_records.read_torch_cell(name, "e003", "t3_2_6").model_dump()


def greedy(model: Any, ids: list[int]) -> list[int]:
    """transformers' own answer."""
    out = model.generate(torch.tensor([ids]), max_new_tokens=ROOM, do_sample=False)
    return out[0, len(ids) :].tolist()


def test_later_turns_come_after_plain_decodings_own_answers(project: Path) -> None:
    """Of each turn as many tokens as transformers says, after the history as its template renders it."""
    found = measured(project, "mt_bench", turns="all")
    tokenizer, model = AutoTokenizer.from_pretrained("tiny"), AutoModelForCausalLM.from_pretrained("tiny")
    questions = [json.loads(line) for line in (ROOT / "data/prompt_sets/mt_bench.jsonl").read_text().splitlines()[:3]]
    rows = iter(found["prompts"])
    for question in questions:
        messages: list[dict[str, str]] = []
        for turn, user_message in enumerate(question["turns"]):
            messages.append({"role": "user", "content": user_message})
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
            answer, row = greedy(model, ids), next(rows)
            assert (row["id"], row["turn"], row["repeat"]) == (str(question["question_id"]), turn, 0)
            assert (row["prompt_tokens"], row["output_tokens"]) == (len(ids), len(answer))
            assert row["identical"] and row["baseline_output_tokens"] == len(answer)
            messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
    assert next(rows, None) is None and found["metrics"]["identical_share"] == 1.0


def test_first_turns_alone_are_the_first_rows_of_both(project: Path) -> None:
    keys = ("id", "prompt_tokens", "output_tokens", "cycles", "accepted")
    first_turns = [row for row in measured(project, "mt_bench", turns="all")["prompts"] if row["turn"] == 0]
    single_turns = measured(project, "mt_bench")["prompts"]
    assert [[row[k] for k in keys] for row in single_turns] == [[row[k] for k in keys] for row in first_turns]


def test_the_kind_decoded_first_alternates_over_prompts_and_repeats(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[str, str]] = []
    real = benchmark._start_decoding

    def note_kind(work: Any, kind: str, ids: list[int], name: str, sampling_params: Any) -> Any:
        begun.append((name, kind))
        return real(work, kind, ids, name, sampling_params)

    monkeypatch.setattr(benchmark, "_start_decoding", note_kind)
    measured(project, "eval", num_prompts=3, repeats=2, warmup=1)
    plain, speculative = "plain", "speculative"
    prompts, warmup = workload_prompts.read_prompts("eval")
    names, (warm_name,) = prompts["id"].to_list(), warmup["id"].to_list()
    assert len(set(names)) == 3 and warm_name not in names
    warm = [(warm_name, plain), (warm_name, speculative)]
    orders = [(plain, speculative), (speculative, plain)]
    expected = [(names[n], kind) for repeat in range(2) for n in range(3) for kind in orders[(n + repeat) % 2]]
    assert begun == warm + expected


def test_repeats_move_no_count_and_no_interval_of_tau(project: Path) -> None:
    """Bug to be: a prompt decoded twice is one prompt, not two, to an interval over prompts."""
    single, double = measured(project, "eval"), measured(project, "eval", repeats=2)
    for name in ("tau", "tau_low", "tau_high", "accept_rate", "identical_share"):
        assert double["metrics"][name] == single["metrics"][name]
    assert [row["repeat"] for row in double["prompts"]] == [n for n in range(2) for _ in range(5)]
    assert double["histogram"] == [2 * n for n in single["histogram"]]
    assert len(double["repeats"]) == 2 and len(single["repeats"]) == 1
    assert single["repeats"][0]["speedup"] == single["metrics"]["speedup"]


def test_repeats_end_when_the_speedup_is_known_or_the_budget_is_spent(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One real run of each: nothing is as narrow as a millionth, and anything is narrower than itself twice over."""
    fixed = measured(project, "eval")
    assert fixed["stopping"]["rule"] == "repeats" and fixed["stopping"]["repeats"] == 1
    spent = measured(project, "eval", until={"half_width": 1e-6, "most_repeats": 4})
    assert (spent["stopping"]["rule"], spent["stopping"]["repeats"], len(spent["repeats"])) == ("most_repeats", 4, 4)
    assert capsys.readouterr().out.count("wanted ±0.0%") == 4
    ends, speedup = spent["metrics"], spent["metrics"]["speedup"]
    half = (ends["speedup_high"] - ends["speedup_low"]) / 2 / speedup
    assert spent["stopping"]["half_width"] == pytest.approx(half, rel=1e-12) and half > 1e-6
    assert [row["repeat"] for row in spent["prompts"]] == [n for n in range(4) for _ in range(5)]


def test_a_speedup_that_is_known_ends_the_repeats_but_not_before_the_third(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = iter([0.01, 0.02, 0.06, None, 0.05])
    monkeypatch.setattr(metrics, "measure_answers_half_width", lambda rows, prompt_set: next(halves))
    found = measured(project, "eval", until={"half_width": 0.05, "most_repeats": 8})
    assert found["stopping"] == {"repeats": 5, "rule": "half_width", "half_width": 0.05}


def test_on_a_cpu_each_answer_has_its_processs_own_time(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that sleeps while it decodes has used less CPU than time has passed."""
    busy = torch_records.TorchCell.model_validate(measured(project, "eval")).process_share
    assert busy is not None and busy > 0
    real = benchmark._start_decoding

    def sleepy(*words: Any) -> Any:
        for step in real(*words):
            time.sleep(0.01)
            yield step

    monkeypatch.setattr(benchmark, "_start_decoding", sleepy)
    slept = torch_records.TorchCell.model_validate(measured(project, "eval")).process_share
    assert slept is not None and slept < 0.8


def test_drawn_answers_are_the_seeds_and_each_repeat_draws_its_own(project: Path) -> None:
    """Plain and speculative decoding draw alike; `identical` is not defined, and other seeds say something else."""
    first = measured(project, "eval", temperature=0.8, top_p=0.95, top_k=40, repeats=2)
    same_seed = measured(project, "eval", temperature=0.8, top_p=0.95, top_k=40, repeats=2)
    other_seed = measured(project, "eval", temperature=0.8, top_p=0.95, top_k=40, repeats=2, seed=43)
    counts = [
        [(r["output_tokens"], r["cycles"], r["accepted"]) for r in c["prompts"]] for c in (first, same_seed, other_seed)
    ]
    assert counts[0] == counts[1] and first["histogram"] == same_seed["histogram"]
    assert (first["temperature"], first["top_p"], first["top_k"]) == (0.8, 0.95, 40)
    for found in (first, other_seed):
        assert found["metrics"]["identical_share"] is None
        assert {(r["identical"], r["divergence_margin"]) for r in found["prompts"]} == {(None, None)}
        assert all(r["output_tokens"] == r["baseline_output_tokens"] for r in found["prompts"])
    seeds = [
        torch_context.make_sampling_params(SimpleNamespace(workload=WORKLOAD, samples_drafts=False), *key)
        for key in product("ab", (0, 1), (0, 1))
    ]
    assert len({params.seed for params in seeds}) == 8, "each prompt, repeat and turn has draws of its own"


# --- the speedup's interval -----------------------------------------------------------------------------------------


def make_rows(prompts: int, repeats: int, turns: int, draw: random.Random) -> list[PromptRow]:
    return [
        PromptRow(
            id=f"q{p}", repeat=r, turn=t, output_tokens=draw.randrange(5, 90), e2e_latency_s=draw.uniform(1, 2),
            baseline_output_tokens=draw.randrange(5, 90), baseline_e2e_latency_s=draw.uniform(2, 5),
            prompt_tokens=7, cycles=10, accepted=20, identical=True, divergence_margin=None, finish_reason="stop",
            prefill_latency_s=0.1, baseline_prefill_latency_s=0.1, correct=None, baseline_correct=None,
        )
        for r in range(repeats) for p in range(prompts) for t in range(turns)
    ]  # fmt: skip


@pytest.mark.parametrize(("prompts", "repeats", "turns"), [(7, 1, 1), (6, 4, 2)])
def test_the_speedups_interval_is_over_prompts_and_repeats(prompts: int, repeats: int, turns: int) -> None:
    rows = make_rows(prompts, repeats, turns, random.Random(3))
    low, high = interval.compute_speedup_interval(*metrics.collect_speed_columns(rows, "mt_bench"))
    total = {key: sum(row[key] for row in rows) for key in metrics.SPEED_COLUMNS}
    speedup = total["output_tokens"] / total["e2e_latency_s"]
    speedup /= total["baseline_output_tokens"] / total["baseline_e2e_latency_s"]
    assert low < speedup < high and low * high == pytest.approx(speedup**2), "the same share to both sides"


def test_one_prompt_has_no_interval_of_its_speedup() -> None:
    """Bug: one prompt decoded once had an interval of zero width, as if its speedup were certain."""
    for repeats in (1, 5):
        rows = make_rows(1, repeats, 1, random.Random(3))
        found = metrics.compute_cell_metrics(rows, 3, 6, "mt_bench")
        assert [found[key] for key in ("tau_low", "tau_high", "speedup_low", "speedup_high")] == [None] * 4


def test_turns_of_one_conversation_are_one_cluster_of_the_eval_split() -> None:
    """Bug: of the eval split each turn of a conversation is a row, and each counted as independent."""
    rows = make_rows(6, 1, 1, random.Random(3))
    turns = [row.model_copy(update={"id": f"{row.id}.{turn}"}) for row in rows for turn in range(4)]
    single = metrics.compute_cell_metrics(rows, 3, 6, "mt_bench")
    repeated = metrics.compute_cell_metrics(turns, 3, 6, "eval")
    for name in ("tau_low", "tau_high", "speedup_low", "speedup_high"):
        assert repeated[name] == pytest.approx(single[name])


def test_each_repeat_has_a_speedup_of_its_own() -> None:
    rows = make_rows(4, 3, 2, random.Random(5))
    for repeat, found in enumerate(metrics.summarise_repeats(rows, "mt_bench")):
        repeat_rows = [row for row in rows if row.repeat == repeat]
        plain = sum(r.baseline_output_tokens for r in repeat_rows) / sum(r.baseline_e2e_latency_s for r in repeat_rows)
        speed = sum(r.output_tokens for r in repeat_rows) / sum(r.e2e_latency_s for r in repeat_rows)
        expected = {"output_tok_s": speed, "baseline_output_tok_s": plain, "speedup": speed / plain}
        assert found.model_dump() == pytest.approx(expected)


# --- grades ---------------------------------------------------------------------------------------------------------


def test_programs_are_refused_before_anything_is_decoded_where_the_kernel_cannot_protect_files(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ran by limits alone, and the cell told of it an hour later."""
    monkeypatch.setattr(sandbox, "read_landlock_abi", lambda: 2)
    monkeypatch.setattr(torch_context, "_build_engine", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(ValueError, match=r"found Landlock ABI 2 on .* set benchmark.allow_unsandboxed_code to true"):
        measured(project, "humaneval", grade=True)


def test_answers_are_graded_where_that_is_asked_for(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a random target says is wrong; what we put into its mouth is right for two problems of three."""
    found = measured(project, "gsm8k", grade=True)
    assert found["quality"]["plain"] == {
        "graded": 3, "correct": 0, "accuracy": 0.0, "how": "gsm8k: exact match of the last number",
    }  # fmt: skip
    assert [row["correct"] for row in found["prompts"]] == [False] * 3
    questions = [json.loads(line) for line in (ROOT / "data/prompt_sets/humaneval.jsonl").read_text().splitlines()[:3]]
    answers = iter([row["canonical_solution"] for row in questions[:2] for _ in range(2)] + ["    return 0\n"] * 2)
    monkeypatch.setattr(torch_context, "decode_text", lambda work, ids: next(answers))
    found = measured(project, "humaneval", grade=True)
    assert [row["correct"] for row in found["prompts"]] == [True, True, False]
    assert [row["baseline_correct"] for row in found["prompts"]] == [True, True, False]
    quality = found["quality"]["speculative"]
    assert (quality["graded"], quality["correct"]) == (3, 2) and quality["how"].startswith("humaneval: pass@1")


def test_answers_are_not_graded_by_default(project: Path) -> None:
    found = measured(project, "gsm8k")
    assert found["quality"] is None and {row["correct"] for row in found["prompts"]} == {None}


def test_a_set_without_answers_is_refused_before_anything_is_decoded(project: Path) -> None:
    (project / "data/prompt_sets").unlink()
    (project / "data/prompt_sets").mkdir()
    rows = [{"question_id": n, "turns": ["How many?"], "reference": ["#### 5"] if n else None} for n in range(3)]
    (project / "data/prompt_sets/gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(
        ValueError, match=r"workloads\.gsm8k\.grade is true, but 1 of its 3 prompts have no reference to grade by"
    ):
        measured(project, "gsm8k", grade=True)
    assert not Path("results").exists()


def test_prompts_that_are_not_there_are_named(project: Path) -> None:
    with pytest.raises(ValueError, match=r"data/prompts/eval\.parquet not found; run: dvc repro prepare_prompts@eval"):
        benchmark.main("eval", "e003", "t3_2_6")
