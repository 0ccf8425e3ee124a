"""The torch engine's cells of loads: what was asked and answered as one by one, clocks in order, ranks as one process."""

import json
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest

from stages import benchmark, prepare_prompts
from stages.cells import table
from stages.cells.cell import Cell, locate_cell
from stages.engines.torch_engine import TorchCell
from stages.prompts import workload_prompts
from tests.conftest import ROOT, edit_params
from tests.talking import WORKLOADS

pytestmark = pytest.mark.usefixtures("one_thread", "forked_stages")
NAMES = ("e003", "t3_2_6")


@pytest.fixture
def project(talking_project: Path) -> Path:
    return talking_project


def edit_workload(project: Path, name: str, benchmark_: dict[str, Any] | None = None, **changes: Any) -> None:
    workloads = {**WORKLOADS, name: {**WORKLOADS[name], **changes}}
    edit_params(project, {"benchmark": {"workloads": workloads, **(benchmark_ or {})}})
    prepare_prompts.main(name)


def measured(project: Path, name: str, **changes: Any) -> dict[str, Any]:
    edit_workload(project, name, **changes)
    benchmark.main(name, *NAMES)
    return Cell.read("torch", name, *NAMES).model_dump()


def list_counts(point: dict[str, Any], *keys: str) -> list[tuple[Any, ...]]:
    names = ("id", "repeat", "turn", "prompt_tokens", "output_tokens", "finish_reason", *keys)
    return [tuple(row[k] for k in names) for row in point["requests"]]


def test_a_sweep_equals_decoding_prompt_by_prompt(project: Path) -> None:
    """Of each load the same answers, drafts and cycles; of the plain ones the same answers."""
    rows = measured(project, "eval", repeats=2)["points"][0]["requests"]
    found = measured(project, "eval", concurrency=[1, 2, 64], repeats=2)
    assert [p["concurrency"] for p in found["points"]] == [1, 2, 64]
    drafts = ("cycles", "accepted")
    for speculative, plain in zip(found["points"], found["baseline_points"], strict=True):
        assert list_counts(speculative, *drafts) == list_counts({"requests": rows}, *drafts)
        assert list_counts(plain) == list_counts(speculative) and plain["acceptance"] is None
        assert [r["answer"] for r in speculative["requests"]] == [r["answer"] for r in plain["requests"]]
        accepted, cycles = (sum(row[k] for row in rows) for k in ("accepted", "cycles"))
        acceptance = speculative["acceptance"]
        assert (acceptance["accepted"], acceptance["cycles"]) == (accepted, cycles)
        assert acceptance["tau"] == pytest.approx(1 + accepted / cycles)
        assert (
            sum(acceptance["histogram"]) == cycles
            and sum(i * n for i, n in enumerate(acceptance["histogram"])) == accepted
        )
    assert found["points"][-1]["warnings"] == ["5 prompts, so never 64 at once"]
    assert found["points"][0]["warnings"] == [] and found["engine"] == "torch"


RUN_LOAD = TorchCell._run_load


def note_kind(cell: TorchCell, started: list[str], kind: str, *args: Any) -> Any:
    started.append(kind)
    return RUN_LOAD(cell, kind, *args)


def test_a_mode_of_one_kind_has_the_counts_of_both(project: Path) -> None:
    """With benchmark.mode eagle or baseline the other kind is not run; what is run answers as it does beside the other."""
    changes = {"concurrency": 2, "temperature": 0.8}
    both = measured(project, "eval", **changes)
    for mode, measured_points, empty in (
        ("eagle", "points", "baseline_points"),
        ("baseline", "baseline_points", "points"),
    ):
        edit_workload(project, "eval", {"mode": mode}, **changes)
        started: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TorchCell, "_run_load", partialmethod(note_kind, started))
            benchmark.main("eval", *NAMES)
        assert set(started) == {"speculative" if mode == "eagle" else "plain"}
        found = Cell.read("torch", "eval", *NAMES).model_dump()
        assert found[empty] == [] and len(found[measured_points]) == 1
        (point,), (expected_point,) = found[measured_points], both[measured_points]
        assert list_counts(point, "cycles", "accepted", "answer") == list_counts(
            expected_point, "cycles", "accepted", "answer"
        )
        lines = table.join_lines([Cell.model_validate(found)], {}, [])
        assert [line.row.decoding for line in lines] == ["speculative" if mode == "eagle" else "plain"]
        assert lines[0].row.speedup is None and lines[0].row.output_throughput
        if mode == "eagle":
            assert lines[0].row.remark == "not compared: plain decoding was not measured (benchmark.mode: eagle)"


def test_clocks_are_in_order_and_no_more_are_under_way_than_asked_for(project: Path) -> None:
    found = measured(project, "eval", concurrency=2, max_new_tokens=[3, 12])
    assert [(p["max_new_tokens"], p["concurrency"]) for p in found["points"]] == [(3, 2), (12, 2)]
    for point in [*found["points"], *found["baseline_points"]]:
        (load,) = point["loads"]
        assert load["completed"] == load["requests"] == 5 and load["mean_at_once"] <= 2
        assert load["output_tokens"] == sum(r["output_tokens"] for r in point["requests"])
        assert load["output_throughput"] == pytest.approx(load["output_tokens"] / load["duration_s"])
        spans = [(r["wait_s"], r["wait_s"] + r["ttft_s"], r["wait_s"] + r["e2e_s"]) for r in point["requests"]]
        assert all(sent_s < first_s <= last_s for sent_s, first_s, last_s in spans)
        assert spans[0][0] == spans[1][0] and [sent_s for sent_s, *_ in spans] == sorted(sent_s for sent_s, *_ in spans)
        for n, (sent_s, *_) in enumerate(spans[2:], 2):  # each is sent when one of those before has ended
            assert sum(last_s <= sent_s for _, _, last_s in spans[:n]) >= n - 1
        assert load["duration_s"] == pytest.approx(max(last_s for *_, last_s in spans))


def test_each_load_has_its_own_number_of_prompts(project: Path) -> None:
    found = measured(project, "eval", concurrency=[1, 3], num_prompts=[2, 4])
    assert [len(point["requests"]) for point in found["points"]] == [2, 4]
    assert list_counts(found["points"][0]) == list_counts(found["points"][1])[:2]


def test_random_prompts_go_on_to_their_lengths(project: Path) -> None:
    """The seed's scenarios: end tokens ignored, lengths drawn for each prompt."""
    changes = {"prompts": "random", "input_tokens": 9, "length_range": 0.2, "ignore_eos": True, "num_prompts": 6}
    found = measured(project, "eval", concurrency=4, **changes)
    rows, _ = workload_prompts.read_prompts("eval")
    lengths = [workload_prompts.compute_max_new_tokens(share, 12) for share in rows["length_share"]]
    assert len(set(lengths)) > 2
    for point in (found["points"][0], found["baseline_points"][0]):
        assert [r["output_tokens"] for r in point["requests"]] == lengths
        assert [r["prompt_tokens"] for r in point["requests"]] == rows["prompt_ids"].list.len().to_list()
        assert {r["finish_reason"] for r in point["requests"]} == {"length"}


@pytest.mark.parametrize("concurrency", [pytest.param(1, marks=pytest.mark.long), 3])
def test_two_processes_make_the_cell_of_one(project: Path, concurrency: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are dealt out, and so are slots; what isn't a time is the same to the last answer."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cells = []
    for total in (1, 2):
        edit_workload(project, "eval", {"num_gpus_total": total}, concurrency=concurrency, repeats=2)
        benchmark.main("eval", *NAMES)
        cells.append(json.loads(locate_cell("torch", "eval", *NAMES).read_text()))
    single, double = map(drop_times, cells)
    assert single.pop("hardware") | {"num_gpus_total": 2} == double.pop("hardware")
    assert single == double


def drop_times(found: Any) -> Any:
    """Without whatever holds seconds, or follows from them."""
    if isinstance(found, list):
        return [drop_times(value) for value in found]
    if not isinstance(found, dict):
        return found
    timed = ("_s", "_tok_s", "seconds", "throughput", "mean_at_once")
    left_out = {"in_turns", "stopping"}
    left_out |= {"memory", "process_share"}  # of one process
    return {k: drop_times(v) for k, v in found.items() if not k.endswith(timed) and k not in left_out}
