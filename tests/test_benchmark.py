"""The torch engine's cell: later turns after plain decoding's answers, repeats in turns, a speedup's interval, grades."""

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stages import benchmark, prepare_prompts
from stages.cells import table
from stages.cells.cell import Cell
from stages.cells.table import TableLine
from stages.engines import torch_engine
from stages.engines.cell_engine import CellContext
from stages.engines.torch_engine import TorchCell
from stages.prompts import workload_prompts
from tests.conftest import ROOT, edit_params
from tests.talking import WORKLOADS
from tests.torch_cells import read_line

ROOM = 12
WORKLOAD: Any = SimpleNamespace(temperature=0.8, top_p=1.0, top_k=None, seed=42)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def project(talking_project: Path) -> Path:
    return talking_project


def measured(project: Path, name: str, **changes: Any) -> TableLine:
    """The line of a workload's cell."""
    edit_params(project, {"benchmark": {"workloads": {**WORKLOADS, name: {**WORKLOADS[name], **changes}}}})
    prepare_prompts.main(name)
    benchmark.main(name, "e003", "t3_2_6")
    return read_line(name, "e003", "t3_2_6")


def greedy(model: Any, ids: list[int]) -> list[int]:
    """transformers' own answer."""
    out = model.generate(torch.tensor([ids]), max_new_tokens=ROOM, do_sample=False)
    return out[0, len(ids) :].tolist()


def test_later_turns_come_after_plain_decodings_own_answers(project: Path) -> None:
    """Of each turn as many tokens as transformers says, after the history as its template renders it."""
    found = measured(project, "mt_bench", turns="all")
    tokenizer, model = AutoTokenizer.from_pretrained("tiny"), AutoModelForCausalLM.from_pretrained("tiny")
    questions = [json.loads(line) for line in (ROOT / "data/prompt_sets/mt_bench.jsonl").read_text().splitlines()[:3]]
    rows = {(row.id, row.turn): row for row in found.point.requests}
    plain = {(row.id, row.turn): row for row in found.baseline_point.requests}
    for question in questions:
        messages: list[dict[str, str]] = []
        for turn, user_message in enumerate(question["turns"]):
            messages.append({"role": "user", "content": user_message})
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
            answer, key = greedy(model, ids), (str(question["question_id"]), turn)
            row = rows.pop(key)
            assert (row.prompt_tokens, row.output_tokens) == (len(ids), len(answer)) and row.repeat == 0
            assert plain[key].answer == row.answer and plain[key].output_tokens == len(answer)
            messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
    assert not rows and found.row.identical_share == 1.0


def test_the_kind_decoded_first_alternates_over_prompts_and_repeats(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[str, str]] = []
    real = TorchCell._start_decoding

    def note_kind(work: Any, kind: str, turn: Any, length: int, repeat: int) -> Any:
        begun.append((turn.question.id, kind))
        return real(work, kind, turn, length, repeat)

    monkeypatch.setattr(TorchCell, "_check_accepted", lambda cell: None)
    monkeypatch.setattr(TorchCell, "_start_decoding", note_kind)
    measured(project, "eval", num_prompts=3, repeats=2, warmup=1)
    plain, speculative = "plain", "speculative"
    prompts, warmup = workload_prompts.read_prompts("eval")
    names, (warm_name,) = prompts["id"].to_list(), warmup["id"].to_list()
    assert len(set(names)) == 3 and warm_name not in names
    warm = [(warm_name, plain), (warm_name, speculative)]
    orders = [(plain, speculative), (speculative, plain)]
    expected = [(names[n], kind) for repeat in range(2) for n in range(3) for kind in orders[(n + repeat) % 2]]
    assert begun == warm + expected


def test_repeats_end_when_the_speedup_is_known_or_the_seconds_are_spent(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One real run of each: all answers take more than a microsecond, and no speedup is known to a millionth."""
    line = measured(project, "eval", repeats=4, until={"half_width": 1e-6})
    spent = line.point.stopping
    assert (spent.rule, spent.repeats, len(line.point.loads)) == ("repeats", 4, 4)
    assert capsys.readouterr().out.count("wanted ±0.0%") == 4
    half = (line.row.speedup_high - line.row.speedup_low) / 2 / line.row.speedup
    assert spent.half_width == pytest.approx(half, rel=1e-12) and half > 1e-6
    ended = measured(project, "eval", repeats=4, until={"half_width": 1e-6, "most_seconds": 1e-6}).point.stopping
    assert (ended.rule, ended.repeats) == ("most_seconds", 1)


def test_drawn_answers_are_the_seeds_and_each_repeat_draws_its_own(project: Path) -> None:
    """Plain and speculative decoding draw alike; `identical` is not defined, and other seeds say something else."""
    first = measured(project, "eval", temperature=0.8, top_p=0.95, top_k=40, repeats=2)
    same_seed = measured(project, "eval", temperature=0.8, top_p=0.95, top_k=40, repeats=2)
    other_seed = measured(project, "eval", temperature=0.8, top_p=0.95, top_k=40, repeats=2, seed=43)
    lines = first, same_seed, other_seed
    counts = [[(r.output_tokens, r.cycles, r.accepted) for r in line.point.requests] for line in lines]
    assert counts[0] == counts[1] and first.point.acceptance.histogram == same_seed.point.acceptance.histogram
    assert (first.cell.temperature, first.cell.top_p, first.cell.top_k) == (0.8, 0.95, 40)
    for found in (first, other_seed):
        assert found.row.identical_share is None
        assert {r.divergence_margin for r in found.point.requests} == {None}
        both = zip(found.point.requests, found.baseline_point.requests, strict=True)
        assert all(r.output_tokens == plain.output_tokens for r, plain in both)
    seeds = [torch_engine.make_sampling_params(WORKLOAD, False, *key) for key in product("ab", (0, 1), (0, 1))]
    assert len({params.seed for params in seeds}) == 8, "each prompt, repeat and turn has draws of its own"


# --- grades ---------------------------------------------------------------------------------------------------------


def test_answers_are_graded_where_that_is_asked_for(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a random target says is wrong; what we put into its mouth is right for two problems of three."""
    found = measured(project, "gsm8k", grade=True)
    assert vars(found.baseline_point.quality) == {
        "graded": 3, "correct": 0, "accuracy": 0.0, "how": "gsm8k: exact match of the last number",
    }  # fmt: skip
    assert [row.correct for row in found.point.requests] == [False] * 3
    questions = [json.loads(line) for line in (ROOT / "data/prompt_sets/humaneval.jsonl").read_text().splitlines()[:3]]
    said = iter([*(row["canonical_solution"] for row in questions[:2]), "    return 0\n"] * 2)
    monkeypatch.setattr(CellContext, "decode_text", lambda context, answer: next(said))
    edit_params(project, {"benchmark": {"run_generated_code": True}})
    found = measured(project, "humaneval", grade=True)
    for point in (found.point, found.baseline_point):
        assert [row.correct for row in point.requests] == [True, True, False]
    quality = found.point.quality
    assert (quality.graded, quality.correct) == (3, 2) and quality.how.startswith("humaneval: pass@1")


def test_a_draft_of_which_nothing_is_accepted_is_not_measured(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a draft whose every replayed tau is 1.0 was measured for as long as a good one, in each of its cells."""
    real = TorchCell._start_decoding

    def accept_none(*words: Any) -> Any:
        return (step._replace(num_accepted=0) for step in real(*words))

    monkeypatch.setattr(torch_engine, "MIN_JUDGED_CYCLES", 5)
    monkeypatch.setattr(TorchCell, "_start_decoding", accept_none)
    with pytest.raises(AssertionError):  # a line of measurements, of which there is none
        measured(project, "eval", num_prompts=3)
    cell = Cell.read("torch", "eval", "e003", "t3_2_6")
    (line,) = table.join_lines([cell], {}, [])
    assert (line.row.status, line.row.is_measured, line.point) == ("skipped", False, None)
    assert line.row.remark == "skipped: no draft was accepted in the first 5 cycles, so tau is 1.00"
    monkeypatch.setattr(torch_engine, "MIN_JUDGED_CYCLES", 1000)  # more than all answers have: too few to judge by
    assert measured(project, "eval", num_prompts=3).row.is_measured
