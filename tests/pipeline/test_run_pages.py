"""What a run's page says, without a server: its name, its error, the verdict of its report."""

import logging
from pathlib import Path

import pytest

from pipeline.dvc_output import find_error
from pipeline.forms import Changes, Sweep
from pipeline.progress import is_ours
from pipeline.run_names import list_tags, name_build, name_sweep
from stages.params.schema import load_params

CONCLUSION = "ERROR: failed to reproduce 'fit': failed to run: python -m stages.fit, exited with 1"
KILLED = (
    "ERROR: failed to reproduce 'replay_trees@e009': failed to run: python -m stages.replay_trees "
    '"$DVC_STAGE", exited with '
)
LESS = "set a smaller replay_trees.memory_gib in params.yaml, or end what else uses it"
NO_MEMORY_LEFT = f"killed (SIGKILL), which the kernel does where memory is short (dmesg then says so); {LESS}"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["aerie: tau is 1.2, expected 6", CONCLUSION], "tau is 1.2, expected 6"),
        (["aerie: 2 problems:", "  a: b", "  c: d", CONCLUSION], "2 problems: a: b c: d"),
        (["fit: 100%|##########| 3/3 [00:00<00:00,  9.86it/s]", "Killed", "", CONCLUSION], "Killed"),
        (["replay: 40 rows", f"{KILLED}-9"], NO_MEMORY_LEFT),  # Bug: the first line was taken for the error
        (["memory allocation of 1 bytes failed", f"{KILLED}134"], f"out of memory; {LESS}"),
        ([CONCLUSION], None),
    ],
)
def test_the_error_of_a_stage_is_one_line(lines: list[str], expected: list[str] | str | None) -> None:
    """Bug: a failed run's message held ten lines of log, bars among them, and the pages showed it three times."""
    assert find_error(lines) == (expected[0] if isinstance(expected, list) else expected)


def test_prefects_own_lines_on_states_are_hidden() -> None:
    """Bug: `Task run failed with state: Failed(message="...\\\\n...")` and `NoneType: None` below it."""

    def is_shown(text: str) -> bool:
        return is_ours(logging.LogRecord("prefect.task_runs", logging.ERROR, "", 0, text, (), None))

    assert not is_shown("Task run failed with %s: %r") and not is_shown("Finished in state Failed('x')")
    assert is_shown("last is stale: last.py modified")


def test_runs_are_named_and_tagged_by_what_they_do(home: Path) -> None:
    now = load_params()
    assert name_sweep(Sweep(trees=["t4_2_8"]), now) == "sweep t4_2_8 at e009"
    wide = Sweep(
        trees=["t4_2_8", "t5_1_6", "t5_2_8", "t8_2_16"], checkpoints=["e003"], workloads=["eval"], engine="served"
    )
    assert name_sweep(wide, now) == "sweep 4 trees at e003 on eval, served"
    assert name_build(Changes(epochs=[3], other={"train_draft.seed": 1})) == "build epochs 3, train_draft.seed 1"
    assert list_tags(now, "weather-tiny") == ["checkpoint:e009", "workload:eval", "recipe:weather-tiny"]


def test_lists_are_replaced_or_added_to(home: Path) -> None:
    now = load_params()
    added = Sweep(trees=["t4_2_8", "t5_1_6"], lists="add").build_sections(now)
    assert added == {"benchmark": {"trees": [*now.benchmark.trees, "t4_2_8"]}}
    changed = Changes(trees=["t4_2_8"], lists="add").build_sections(now)
    assert changed == {"benchmark": {"trees": [*now.benchmark.trees, "t4_2_8"]}}
