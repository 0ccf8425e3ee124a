"""time_cycles of servers: against the tests' double of SGLang and vLLM, whose simulated cycles take a known time."""

import json
from pathlib import Path
from typing import Any

import pytest

from stages import time_cycles
from stages.cells import timing_grid
from stages.cells.timing_grid import TimingGrid
from stages.engines import cell_engine, registry
from stages.engines.sglang import SGLang
from stages.measuring import repeats, server_setup, simulated_answers
from stages.measuring.measured_server import MeasuredServer
from stages.measuring.server_setup import ServedWorkload
from stages.params import schema
from stages.prompts import workload_prompts
from stages.runtime import scratch
from tests.conftest import EVAL, edit_params

VLLM_TREES = ["t1_1_2", "t2_1_3", "t4_1_5", "t5_1_6"]
TREES = ["t2_1_3", "t6_1_7", "t3_2_8", "t6_4_32"]
LOAD = {
    **EVAL, "prompts": "random", "input_tokens": 12, "num_prompts": 3, "warmup": 0, "ignore_eos": True,
    "max_new_tokens": 20, "concurrency": [1, 2], "repeats": 1,
}  # fmt: skip


@pytest.fixture
def load(project: Path) -> Path:
    edit_params(
        project,
        {
            "benchmark": {"workloads": {"eval": EVAL, "load": LOAD}},
            "time_cycles": {
                "engines": ["sglang"],
                "checkpoints": ["e003"],
                "workload": "load",
                "trees": TREES,
                "accept_length": 2.5,
            },
        },
    )
    prompts = [
        workload_prompts.WorkloadPrompt(str(n), [5 + (n + k) % 50 for k in range(12)], images=[], length_share=1.0)
        for n in range(3)
    ]
    workload_prompts.write_prompts("load", prompts, [])
    return project


def compute_floor(grid: TimingGrid) -> list[tuple[float, float]]:
    """Half of the seconds that the double sleeps in a cycle, beside those found.

    A busy machine hands over an answer's first tokens late, by a cycle or two, which shortens what is left.
    """
    return [(0.5 * (0.001 * cycle.num_steps + 0.0002 * cycle.num_draft_tokens), cycle.cycle_s) for cycle in grid.grid]


def test_cycles_are_timed_without_any_tau(load: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_params(load, {"benchmark": {"workloads": {"eval": EVAL, "load": {**LOAD, "max_new_tokens": [8, 16]}}}})
    time_cycles.main("sglang", "e003")
    short, long = timing_grid.read_grids("sglang", "e003", "builtin/weather-tiny")
    assert (short.max_new_tokens, long.max_new_tokens) == (8, 16)
    for grid in (short, long):
        assert [(c.shape.name, c.batch) for c in grid.grid] == [(tree, batch) for tree in TREES for batch in (1, 2)]
        assert [plain.batch for plain in grid.plain] == [1, 2] and all(plain.step_s > 0 for plain in grid.plain)
        assert grid.settings["simulated_accept_length"] == 2.5 and grid.versions == {"sglang": "0.5.17"}
    # Nothing of a cycle is left out; answers of three cycles have too few to tell on a busy machine.
    assert all(found > floor for floor, found in compute_floor(long))
    cycle_times = {c.shape.name: c.cycle_s for c in long.grid if c.batch == 1}
    assert cycle_times["t6_4_32"] > cycle_times["t2_1_3"]
    with pytest.raises(
        ValueError, match=r"has timed the draft e003 of the target builtin/weather-tiny, expected e003 of other"
    ):
        timing_grid.read_grids("sglang", "e003", "other")
    text = timing_grid.locate_grids("sglang", "e003").read_text()
    assert '"tau' not in text and not list(Path("results/cells").glob("*"))
    printed = capsys.readouterr().out
    assert "acceptance simulated" in printed and "tau" not in printed
    (line,) = (line for line in printed.splitlines() if "fewer than the 2 at once" in line)  # of all loads, once
    assert (
        line.startswith("warning: baseline, 8 tokens, concurrency 2 and ") and "0 requests warmed the server up" in line
    )
    assert not list(Path(".scratch").glob("time_cycles-*"))


def check_arrivals() -> None:
    """A workload of one length is measured at a quarter of it too; one request at a time is never interrupted."""
    (grid,) = timing_grid.read_grids("sglang", "e003", "builtin/weather-tiny")
    assert grid.max_new_tokens == 20 and len(grid.fit.left_out_s) == 2 * len(grid.grid) == 16
    assert len(grid.other_lengths) == 8  # a quarter as long, fitted with the others
    read = {(c.shape.name, c.batch): c.arrivals.per_step for c in grid.grid}
    assert all(read[tree, 1] == 0 and read[tree, 2] > 0 for tree in TREES)
    single, double = (plain.arrivals.per_step for plain in grid.plain)
    assert single == 0 and double == pytest.approx((2 - 1) * (3 - 2) / 3 / 19)  # three requests, 19 steps each


@pytest.mark.parametrize(
    ("changes", "lengths", "expected"),
    [
        ({"max_new_tokens": 40}, [40, 10], None),  # drawn, since all real ones have 40
        ({"max_new_tokens": [20, 40]}, [20, 40], None),
        ({"max_new_tokens": 40, "concurrency": [1]}, [40], None),
        (
            {"max_new_tokens": 40, "ignore_eos": False, "prompts": "eval", "input_tokens": None},
            [40, 10],
            [7, 30, 40],
        ),  # those stored, cut
    ],
)
def test_answers_of_a_server_that_simulates(
    changes: dict[str, Any], lengths: list[int], expected: list[int] | None, load: Path
) -> None:
    keys = {**LOAD, **changes}
    edit_params(
        load,
        {
            "benchmark": {"workloads": {"eval": EVAL, "load": keys}},
            "time_cycles": {"trees": [*TREES, *VLLM_TREES[:1], *VLLM_TREES[2:], "t7_1_8"]},
        },
    )
    rows = [workload_prompts.WorkloadPrompt(str(n), [5, 6], answer_tokens=count) for n, count in enumerate((7, 30, 90))]
    workload_prompts.write_prompts("load", rows, [])
    p = schema.load_params()
    context = cell_engine.build_context(p, "sglang", "load", None, None)
    work = ServedWorkload(context, server_setup.read_draft_config(p, "e003"))
    simulated, turns = simulated_answers.simulate_answers(work), context.list_first_turns(context.prompts)
    assert list(dict.fromkeys(length for length, _ in simulated.context.workload.list_loads())) == lengths
    requests_by_length = {length: [simulated.make_request(turn, length) for turn in turns] for length in lengths}
    assert all(request.ignore_eos for length_requests in requests_by_length.values() for request in length_requests)
    for length, length_requests in requests_by_length.items():
        tokens = [request.max_tokens for request in length_requests]
        if expected:
            assert tokens == [round(count * length / 40) for count in expected]
        else:
            assert len(set(tokens)) > 1 and all(0.5 * length - 1 <= count <= length for count in tokens)
    plain = work.make_request(turns[0], lengths[0])
    assert (plain.max_tokens, plain.ignore_eos) == (lengths[0], keys["ignore_eos"])


def list_turns(names: list[str]) -> list[tuple[str, tuple[int, int], int]]:
    """Return what is measured on servers that are open together; the baseline has no load of the shorter answers."""
    return [
        (name, of, repeat)
        for repeat in (0, 1)
        for index, of in enumerate([(20, 1), (20, 2), (5, 1), (5, 2)])
        for name in (names if (repeat + index) % 2 == 0 else names[::-1])
        if of[0] == 20 or name != "baseline"
    ]


def test_servers_take_turns_and_a_killed_run_goes_on_with_the_servers_that_are_left(
    load: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A machine that is slower for a while then slows one repeat of a load on all servers, not all loads of one server."""
    edit_params(load, {"benchmark": {"workloads": {"eval": EVAL, "load": {**LOAD, "repeats": 2}}}})
    monkeypatch.setattr(ServedWorkload, "count_servers_at_once", lambda _: 2)
    names = ["baseline", *(f"e003-{tree}" for tree in TREES)]
    first, *others = (list_turns(names[start : start + 2]) for start in (0, 2, 4))
    run, turns = repeats.run_load, []

    def fall(server: MeasuredServer, of: Any, repeat: int) -> None:
        turns.append((server.name, of, repeat))
        if len(turns) == len(first) + 3:
            raise KeyboardInterrupt
        run(server, of, repeat)

    monkeypatch.setattr(repeats, "run_load", fall)
    with pytest.raises(KeyboardInterrupt):
        time_cycles.main("sglang", "e003")
    # Bug: another's took this one's away.
    scratch.remove_scratch(scratch.locate_scratch("time_cycles-sglang-e009"))
    time_cycles.main("sglang", "e003")
    assert turns == [*first, *others[0][:3], *others[0], *others[1]]
    assert "resumed: 2 of 5 servers were measured before" in capsys.readouterr().out
    check_arrivals()
    (grid,) = timing_grid.read_grids("sglang", "e003", "builtin/weather-tiny")
    assert {cycle.samples for cycle in grid.grid} == {step.samples for step in grid.plain} == {2}


def test_vllm_simulates_by_its_speculative_config() -> None:
    """No more tokens than a chain has drafts, and one: vLLM refuses a longer acceptance."""
    flags = ["--speculative-config", json.dumps({"method": "eagle3", "num_speculative_tokens": 1}), "--x"]
    _, config, other_flag = registry.get("vllm").simulate_acceptance(2.0, flags)[0]
    assert json.loads(config) == {
        "method": "eagle3", "num_speculative_tokens": 1, "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 2.0,
    }  # fmt: skip
    assert other_flag == "--x"


def test_a_server_that_does_not_accept_as_told_is_refused(load: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that passes over the setting would be timed at the draft's own tau, and the file would say another."""
    edit_params(load, {"time_cycles": {"accept_length": 2.9}})
    timing_grid.locate_grids("sglang", "e003").unlink(missing_ok=True)  # of another test
    monkeypatch.setattr(SGLang, "simulate_acceptance", lambda *words: (words[-1], {"SGLANG_SIMULATE_ACC_LEN": "1.5"}))
    with pytest.raises(ValueError, match=r"e003-t2_1_3: 1\.\d\d tokens in each of \d+ cycles, expected 2.9"):
        time_cycles.main("sglang", "e003")
    assert not timing_grid.locate_grids("sglang", "e003").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ignore_eos": False}, r"workloads.load has ignore_eos False, .* expected true .or prompts: eval., inf and false"),
        ({"request_rate": 8.0}, r"request_rate 8.0 and grade False, expected true"),
        ({"concurrency": None}, r"sends 3 prompts at concurrency .None., expected different"),
        ({"concurrency": [2, 2]}, r"at concurrency .2, 2., expected different numbers"),
        ({"concurrency": 1}, r"4 pairs of a tree that sglang runs with e003 .*, expected at least 8 for a fit; name more"),
        ({"num_prompts": [1, 2], "concurrency": [1, 4]}, r"concurrency .1, 4., expected .* as many prompts"),
    ],
)  # fmt: skip
def test_a_workload_whose_cycles_say_nothing_is_refused(changes: dict[str, Any], message: str, load: Path) -> None:
    edit_params(load, {"benchmark": {"workloads": {"eval": EVAL, "load": {**LOAD, **changes}}}})
    with pytest.raises(ValueError, match=message):
        schema.load_params()
