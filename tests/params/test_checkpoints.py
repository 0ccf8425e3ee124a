"""Checkpoints that can be trained, imported, replayed and measured, and chains of segments of one draft."""

from pathlib import Path

import pytest

from stages.params.schema import load_params
from tests.params.params_edits import SECOND, edit_params_text, list_problems


@pytest.mark.parametrize(("old", "section"), [("[e003, e009]", "replay_trees"), ("time_cycles|[e000]", "time_cycles")])
def test_what_servers_do_not_run_is_not_replayed_or_timed(old: str, section: str) -> None:
    heads = "heads: {from: e000, epochs: 2, method: medusa, heads: 4}"
    edit_params_text((SECOND, f"{SECOND}\n    {heads}"), (old, "[heads]"))
    (line,) = list_problems()
    assert line.startswith(f"{section}.checkpoints: 'heads' is of medusa, expected EAGLE-3 or block drafts")


def test_a_lookup_is_replayed_at_the_shapes_of_its_kind() -> None:
    made = ("import_draft|checkpoints: {}", "checkpoints: {suffix: {model: builtin/suffix}}")
    edit_params_text(made, ("[e003, e009]", "[e003, suffix]"))
    (line,) = list_problems()
    assert line.startswith(
        "replay_trees.checkpoints: 'suffix' is replayed at shapes of benchmark.trees, expected chains by suffixes"
    )
    edit_params_text(made, ("[e003, e009]", "[e003, suffix]"), ("benchmark|trees: [", "trees: [x4_2, "))
    assert load_params(Path("params.yaml")).replay_trees.checkpoints == ["e003", "suffix"]


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            "report:",
            "time_trees: {checkpoints: [e000]}\nserving_costs: {workloads: []}\n\nreport:",
            "time_trees and serving_costs are one section now; write time_cycles: {engines: [torch]",
        ),
        (
            "engines: [sglang] ",
            "engine: sglang ",
            "benchmark_served: engine: a run has several engines now; write engines: [sglang]",
        ),
    ],
)
def test_keys_of_earlier_versions_are_refused_with_what_to_write_now(old: str, new: str, line: str) -> None:
    edit_params_text((old, new))
    (found,) = list_problems()
    assert found.startswith(line)


def test_drafts_of_the_same_shapes_are_timed_once() -> None:
    edit_params_text(("time_cycles|[e000]", "[e000, e009]"))
    (line,) = list_problems()
    assert line.startswith("time_cycles.checkpoints is ['e000', 'e009'], expected drafts of different shapes")
