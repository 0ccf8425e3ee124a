"""Servers that measure in turn with their baseline's: when they start, what fits a GPU, and when repeats end."""

import contextlib
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stages import benchmark_served
from stages.cells.cell import Cell
from stages.engines import gpu_memory, server
from stages.engines.protocol import ServerSetup
from stages.measuring import measurement_lock, repeats
from stages.measuring.server_setup import ServedWorkload
from stages.params.benchmark_sections import Workload
from tests.conftest import EVAL, edit_params
from tests.measuring.served_project import LOAD


def test_the_turn_to_measure_ends_when_the_server_has_ended(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: SGLang takes seven seconds to end, in which the next stage measured its first repeat, 20 to 30% too slow."""
    monkeypatch.setattr(measurement_lock, "open_user_folder", lambda *_: tmp_path)
    stop, were_free = server.ServerGroup.__exit__, []

    def watch(servers: server.ServerGroup, *_: object) -> None:
        stop(servers)
        were_free.append(measurement_lock.is_free("starting"))

    monkeypatch.setattr(server.ServerGroup, "__exit__", watch)
    workload = {**LOAD, "max_new_tokens": 5, "num_prompts": 1, "warmup": 0}
    edit_params(project, {"benchmark": {"workloads": {"eval": workload}}})
    benchmark_served.main("sglang", "eval")
    assert were_free == [False] and measurement_lock.is_free("starting")


@pytest.mark.parametrize("starts_together", [True, False])
def test_servers_that_are_up_together_start_at_once_where_their_caches_have_a_size(
    starts_together: bool, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that sizes its cache by the free memory that it finds would find what another is about to take."""
    events: list[str] = []
    for name in ("start", "await_start"):
        original = getattr(server.ServerProcess, name)
        monkeypatch.setattr(
            server.ServerProcess, name, lambda self, name=name, run=original: (events.append(name), run(self))[1]
        )
    monkeypatch.setattr(ServedWorkload, "can_start_together", lambda _: starts_together)
    workload = {**LOAD, "max_new_tokens": 5, "num_prompts": 1, "warmup": 0, "repeats": 2}
    edit_params(project, {"benchmark": {"workloads": {"eval": workload}}, "benchmark_served": {"interleave": True}})
    benchmark_served.main("sglang", "eval", "e003", "t5_1_6")
    # Bug: a baseline's log had one name in all cells of its workload, so that cells made at once wrote over each other's.
    assert {path.name for path in Path(".scratch/served/sglang-eval-e003-t5_1_6").iterdir()} == {
        "baseline.log",
        "e003-t5_1_6.log",
    }
    assert events == (["start"] * 2 + ["await_start"] * 2 if starts_together else ["start", "await_start"] * 2)
    cell = Cell.read("sglang", "eval", "e003", "t5_1_6")
    assert len(cell.points[0].loads) == len(cell.baseline_points[0].loads) == 2


def make_work(base_urls: dict[str, str] | None = None, **changes: Any) -> ServedWorkload:
    """Servers of a GPU."""
    settings = SimpleNamespace(base_urls=base_urls or {}, vision_patch=False)
    params = SimpleNamespace(
        benchmark_served=SimpleNamespace(get_server=lambda engine: settings), target=SimpleNamespace(dtype="float32")
    )
    sizes = SimpleNamespace(num_layers=1, num_key_value_heads=1, head_dim=1)
    workload = SimpleNamespace(list_loads=lambda: [(1, 1)])
    context: Any = SimpleNamespace(
        params=params, manifest=sizes, workload=workload, prompts=[1], longest_prompt=1, engine="sglang"
    )
    setup = ServerSetup("sglang", "t", "float32", "cuda", False, 1, 0.8, None, None, None, False, ())
    work = ServedWorkload(context, {})
    vars(work)["setup"] = dataclasses.replace(setup, **changes)
    return work


def test_two_servers_start_at_once_on_a_gpu_of_which_a_little_is_used() -> None:
    """Bug: two servers of mem_fraction 0.5 asked for a GPU of which all is free, and a driver always uses some MiB."""
    work = make_work(mem_fraction=0.5, max_total_tokens=100)
    assert work.can_start_together() and work.count_servers_at_once() == 2
    gpu_memory.check_free_memory([gpu_memory.GpuMemory("H200", 0.02, 140.4)], work.setup.mem_fraction)
    with pytest.raises(ValueError, match=r"another process holds 90\.0 GiB"):
        gpu_memory.check_free_memory([gpu_memory.GpuMemory("H200", 90.0, 140.4)], work.setup.mem_fraction)


def test_two_servers_that_do_not_fit_are_started_for_each_turn(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    one, half, sized = make_work(), make_work(mem_fraction=0.5), make_work(mem_fraction=0.1, max_total_tokens=9)
    assert [work.count_servers_at_once() for work in (one, half, sized)] == [1, 2, 10]
    assert [work.can_start_together() for work in (one, half, sized)] == [False, False, True]
    assert make_work({"baseline": "http://x"}).count_servers_at_once() == 2
    monkeypatch.setattr(ServedWorkload, "count_servers_at_once", lambda _: 1)
    workload = {**LOAD, "max_new_tokens": 5, "num_prompts": 1, "warmup": 0, "repeats": 2}
    edit_params(project, {"benchmark": {"workloads": {"eval": workload}}, "benchmark_served": {"interleave": True}})
    benchmark_served.main("sglang", "eval", "e003", "t5_1_6")
    output_lines = capfd.readouterr().out.splitlines()
    started = [line.split(";")[0].rpartition(" ")[2] for line in output_lines if line.startswith("starting")]
    assert started == ["baseline", "e003-t5_1_6", "e003-t5_1_6", "baseline"]


@pytest.mark.parametrize("is_together", [True, False])
def test_repeats_beside_the_baseline_end_when_the_speedup_is_known(
    is_together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server that comes first still changes from repeat to repeat, and all loads have as many repeats."""
    halves, order = iter([None, 0.2, 0.06, 0.04]), []
    monkeypatch.setattr(repeats, "_measure_widest_half", lambda cell, loads: next(halves))
    monkeypatch.setattr(repeats, "run_load", lambda server, load, repeat: order.append((server.name, load, repeat)))
    loads = {"max_new_tokens": 9, "concurrency": [1, 4], "repeats": 8, "until": {}}
    context = SimpleNamespace(workload=Workload.model_validate({**EVAL, **loads}))
    pair = ["baseline", "drafts"]
    cell: Any = SimpleNamespace(
        context=context,
        subjects=[SimpleNamespace(name=name, context=context, results={name: {}}) for name in pair],
        in_turns=False,
        fits_together=is_together,
        is_first=True,
        group_loads=lambda: [context.workload.list_loads()],
        open=lambda servers: contextlib.nullcontext(),
    )
    ended = repeats.measure_repeats(cell)
    expected = {"repeats": 4, "rule": "half_width", "half_width": 0.04}
    assert [found.model_dump() for found in ended.values()] == [expected] * 2
    one_by_one = [(name, cap, n) for n in range(4) for name in (pair if n % 2 == 0 else pair[::-1]) for cap in (1, 4)]
    in_turns = [
        (name, cap, n)
        for n in range(4)
        for index, cap in enumerate((1, 4))
        for name in (pair if (n + index) % 2 == 0 else pair[::-1])
    ]
    assert order == [(name, (9, cap), n) for name, cap, n in (in_turns if is_together else one_by_one)]
