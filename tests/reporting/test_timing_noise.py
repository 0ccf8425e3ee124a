"""Times that are odd beside others of the same work, and what is said of them."""

import pytest

from stages.cells import table
from stages.cells.cell import Cell
from stages.cells.table import TableLine
from stages.reporting.timing_noise import find_timing_remarks
from tests import costs
from tests.served_cells import join, point
from tests.served_cells import made_up as served_cell
from tests.torch_cells import timed_cell

TREES = ("t5_1_6", "t5_2_8", "t8_2_16", "t10_2_32")


def say(*cells: Cell, lines: list[TableLine] | None = None) -> list[str]:
    return list(map(str, find_timing_remarks([*table.join_lines(cells, {}, []), *(lines or [])])))


def test_nothing_is_said_of_an_even_machine() -> None:
    """Plain decoding that varies by a few per cent lies within every interval."""
    assert say(*(timed_cell(tree, step_s=costs.PLAIN_S * (1 + 0.02 * n)) for n, tree in enumerate(TREES))) == []


def test_plain_decoding_far_from_the_neighbours_is_told_with_the_command() -> None:
    cells = [timed_cell(tree) for tree in TREES[1:]]
    (remark,) = say(timed_cell("t5_1_6", step_s=1.5 * costs.PLAIN_S), *cells)
    assert remark.startswith("t5_1_6 with e009 (eval): plain decoding, 273 tokens/s, is 32% below its neighbours' 404")
    assert remark.endswith("; again: dvc repro -fs benchmark@eval-e009-t5_1_6")


@pytest.mark.parametrize(("share", "is_remarked"), [(0.6, True), (0.9, False), (1.8, False), (None, False)])
def test_a_process_that_did_not_have_the_cpu_is_told(share: float | None, is_remarked: bool) -> None:
    """More than one thread takes more CPU time than wall time; a GPU has none."""
    found = say(*(timed_cell(tree) for tree in TREES[1:]), timed_cell("t5_1_6", process_share=share))
    assert [
        "another process had the CPU: this one computed 60% of the wall time; again: dvc repro -fs benchmark@eval-e009-t5_1_6"
        in each
        for each in found
    ] == [True] * is_remarked


def test_a_load_beside_a_busy_process_is_told_and_its_baseline_compared() -> None:
    cells = []
    for tree, plain_s in (("t5_1_6", 0.02), ("t5_2_8", 0.02), ("t8_2_16", 0.02), ("t8_1_9", 0.05)):
        made = point(64, 8, 0.01, 2.0, tree, repeats=3) | {"process_share": 0.5 if tree == "t5_1_6" else 1.0}
        plain = [point(64, 8, plain_s, repeats=3)]
        cells.append(served_cell("load", "e009", tree, [made], engine="torch", baseline_points=plain))
    busy, slow = say(lines=join(cells))
    assert busy.startswith("t5_1_6 with e009 (load, 64 tokens, concurrency 8): another process had the CPU")
    assert slow.startswith("t8_1_9 with e009 (load, 64 tokens, concurrency 8): plain decoding, ")
    assert slow.endswith("dvc repro -fs benchmark@load-e009-t8_1_9")
