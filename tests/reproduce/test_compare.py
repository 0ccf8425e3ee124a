"""A recipe's table: what is laid beside what, how far they may differ, and why two numbers can't be compared."""

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline import recipes
from stages.cells.cell import Cell, locate_cell
from stages.params import schema
from stages.params.recipe import Recipe
from stages.published import comparison
from stages.published import tables as published
from stages.reproduce import compare
from stages.runtime import atomic
from tests.served_cells import made_up, point
from tests.torch_cells import timed_cell

pytestmark = pytest.mark.usefixtures("home")
H20 = {"gpu": "NVIDIA H20", "cpu": "one core"}


def recipe_of(name: str) -> Recipe:
    about, _ = schema.read_recipe(Path(f"recipes/{name}.yaml"))
    assert about is not None
    return about


def torch_cell(
    workload: str, tree: str = "t6_10_60", checkpoint: str = "theirs", tau: float = 3.7, spread: float = 0.1
) -> None:
    """Two questions, one of two turns: 4 and 3 tokens a cycle; twice and three times as fast as plain decoding."""
    made = timed_cell(
        tree, workload=workload, checkpoint=checkpoint, tau=tau, hardware=H20, versions={"torch": "2.13.0"}
    )
    drafted, plain = made.points[0], made.baseline_points[0]
    for kind in (drafted, plain):
        kind.requests = [
            kind.requests[0].model_copy(
                update={"id": name, "cycles": cycles, "accepted": accepted, "output_tokens": 10 * cycles,
                        "e2e_s": 0.1 * cycles / (speed if kind is drafted else 1.0)}
            )
            for name, cycles, accepted, speed in (("a", 6, 22, 2.0), ("a", 4, 8, 2.0), ("b", 20, 40, 3.0))
        ]  # fmt: skip
    assert drafted.acceptance
    drafted.acceptance.tau_low, drafted.acceptance.tau_high = tau - spread, tau + spread
    made.write()


def served_cell(workload: str, checkpoint: str | None, tree: str | None, rate: float, **changes: Any) -> None:
    """Two loads, a tenth apart in throughput."""
    made = point(64, None, 0.01, 2.0 if checkpoint else None, tree, repeats=2)
    for load, r in zip(made["loads"], (0.95 * rate, 1.05 * rate), strict=True):
        load |= {"output_throughput": r, "total_throughput": 2 * r}
    if checkpoint:
        made["acceptance"] |= {"tau_low": 1.98, "tau_high": 2.02}
    shared = {"engine": "vllm", "hardware": H20, "versions": {"vllm": "0.11.2"}}
    points = changes.pop("points", [made])
    Cell.model_validate(made_up(workload, checkpoint, tree, points, **shared | changes)).write()


def sides_of(name: str) -> tuple[list[comparison.PublishedComparison], Counter[str]]:
    with recipes.merge_recipe(name) as (file, _):
        model = schema.load_params(file).target.model
    return compare.match_published_numbers(recipe_of(name), model, published.read_publications())


def side(sides: list[comparison.PublishedComparison], metric: str, **setting: Any) -> comparison.PublishedComparison:
    (found,) = [
        s for s in sides if s.published.metric == metric
        and all(getattr(s.published.setting, key) == value for key, value in setting.items())
    ]  # fmt: skip
    return found


@pytest.mark.parametrize(
    "name", ["angelslim-qwen3-8b", "angelslim-hunyuan-4b", "qwen3-coder-30b-a3b", "qwen3-vl-2b-weather"]
)
def test_every_number_of_the_target_is_laid_beside_or_counted_with_a_reason(name: str) -> None:
    recipe, publications = recipe_of(name), published.read_publications()
    wanted = 0
    for publication in {match.publication for match in recipe.beside}:
        targets = {match.rows["target"] for match in recipe.beside if match.publication == publication}
        wanted += sum(row.setting.target in targets for row in publications[publication])
    sides, left_out = sides_of(name)
    assert len(sides) + left_out.total() == wanted > 10
    assert {s.verdict for s in sides} == {"not run"}


def test_an_accept_length_is_compared_by_the_definition_it_was_printed_with() -> None:
    """AngelSlim's are means over questions: (1 + 3 + 1 + 2) / 2, not the cell's 3.7, and (200 + 300) / (100 + 100)."""
    torch_cell("mt_bench")
    sides, _ = sides_of("angelslim-qwen3-8b")
    tau = side(sides, "tau", dataset="MT-bench", temperature=0.0, engine="AngelSlim, PyTorch")
    assert tau.own == comparison.MeasuredNumber(
        3.5, pytest.approx(12.7062 * 0.5, rel=1e-5)
    )  # Student's t of two questions
    assert tau.published_value == 3.65 and tau.ratio == pytest.approx(3.5 / 3.65)
    assert (tau.verdict, tau.obstacles) == ("within", ())
    assert tau.assumptions == ("tree t6_10_60, which isn't stated",)
    speedup = side(sides, "speedup", dataset="MT-bench", temperature=0.0)
    assert speedup.own is not None and speedup.own.value == 2.5 and speedup.own.spread > 1  # of two questions
    assert (
        speedup.obstacles == ("engine version unknown against 2.13.0; assume one in assumed of the recipe",)
        and speedup.verdict == "not comparable"
    )


@pytest.mark.parametrize(
    ("tau", "verdict"), [(2.0, "within"), (2.124, "within"), (2.126, "outside"), (1.876, "within"), (1.874, "outside")]
)
def test_the_tolerance_is_the_sum_of_rounding_interval_and_declared_share(tau: float, verdict: str) -> None:
    """2.00 is printed: 0.005 by rounding, 0.02 by our interval, 5% declared are 0.1 of it: 0.125."""
    served_cell("gsm8k_1024", "theirs", "t2_1_3", 250.0)
    path = locate_cell("vllm", "gsm8k_1024", "theirs", "t2_1_3")
    found = atomic.read_json(path, "a test")
    found["points"][0]["acceptance"] |= {"tau": tau, "tau_low": tau - 0.02, "tau_high": tau + 0.02}
    atomic.write_json(path, found)
    sides, _ = sides_of("angelslim-qwen3-8b")
    found_side = side(sides, "tau", dataset="GSM8K", engine="vLLM")
    assert found_side.published_value == 2.0 and found_side.tolerance == pytest.approx(0.125 / 2)
    assert found_side.verdict == verdict


def test_times_need_the_same_machine_and_engine_and_accept_lengths_do_not() -> None:
    served_cell("gsm8k_1024", "theirs", "t2_1_3", 257.0)
    served_cell("alpaca_1024", "theirs", "t2_1_3", 266.0, hardware={"gpu": "NVIDIA H200"})
    served_cell("humaneval_1024", "theirs", "t2_1_3", 244.0, versions={"vllm": "0.12.0"})
    sides, _ = sides_of("angelslim-qwen3-8b")
    same, machine, version = (
        side(sides, "output_tok_s", dataset=d, engine="vLLM", method="EAGLE-3")
        for d in ("GSM8K", "Alpaca", "HumanEval")
    )
    assert same.verdict == "within" and same.own is not None
    assert same.own.value == pytest.approx(257.0)
    assert same.own.spread == pytest.approx(12.7062 * 257.0 * 0.05, rel=1e-5)  # Student's t of two loads
    assert (
        machine.obstacles == ("hardware 1 H20 against NVIDIA H200; run the cell on 1 H20",)
        and machine.verdict == "not comparable"
    )
    assert version.obstacles[0].startswith("engine version 0.11.2 against 0.12.0; install 0.11.2 in serving-env and")
    for dataset in ("GSM8K", "Alpaca", "HumanEval"):
        assert side(sides, "tau", dataset=dataset, engine="vLLM").verdict == "within"


def test_another_draft_bars_what_it_does_and_not_plain_decoding() -> None:
    machine = {"gpu": "NVIDIA H100 80GB HBM3"}
    like = {"engine": "sglang", "hardware": machine, "versions": {"sglang": "0.4.5"}}
    served_cell("code_gen", None, None, 1400.0, **like)
    served_cell("code_gen", "theirs", "t5_8_32", 2800.0, **like)
    recipe = recipe_of("qwen3-coder-30b-a3b").model_copy(update={"substitutes": {"draft": "another stands in for it"}})
    sides, left_out = compare.match_published_numbers(
        recipe, "Qwen/Qwen3-Coder-30B-A3B-Instruct", published.read_publications()
    )
    change = side(sides, "total_tok_s_change", label="Code Gen")
    assert change.own is not None and change.own.value == pytest.approx(1.0) and change.published_value == 0.87
    assert [obstacle.split(":")[0] for obstacle in change.obstacles] == ["another draft"]
    plain = side(sides, "total_tok_s", label="Code Gen", method="plain")
    assert plain.obstacles == () and plain.verdict == "within"
    assert plain.conditional_verdict == "within, if total_tok_s means input and output tokens / s"
    assert plain.ratio == pytest.approx(2800 / 2847)
    assert left_out["accept_rate (4.2, against other methods): its tree isn't stated"] == 1


def test_another_target_is_no_twin_whatever_the_recipe_says() -> None:
    """Bug: a recipe that named Qwen3-8B's rows for a target of a million parameters got its verdict."""
    torch_cell("mt_bench")
    sides, _ = compare.match_published_numbers(
        recipe_of("angelslim-qwen3-8b"), "builtin/weather-tiny", published.read_publications()
    )
    tau = side(sides, "tau", dataset="MT-bench", temperature=0.0, engine="AngelSlim, PyTorch")
    assert tau.obstacles == ("another target: builtin/weather-tiny against Qwen3-8B; name that target in target.model",)
    assert tau.verdict == "not comparable"


def test_a_baseline_measured_in_turns_with_the_cell_is_its_own() -> None:
    served_cell("code_gen", None, None, 9999.0, engine="sglang")
    served_cell("code_gen", "other", "t5_8_32", 1000.0, engine="sglang")
    slow = Cell.read("sglang", "code_gen", "other", "t5_8_32").points
    served_cell("code_gen", "theirs", "t5_8_32", 2800.0, engine="sglang", baseline_points=slow)
    sides, _ = sides_of("qwen3-coder-30b-a3b")
    assert side(sides, "speedup", label="Code Gen").own == comparison.MeasuredNumber(
        pytest.approx(2.8), pytest.approx(0.388 * 12.7062 / 1.96, rel=0.01)
    )


def test_the_page_and_the_csv_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    torch_cell("mt_bench")
    name = "angelslim-qwen3-8b"
    with recipes.merge_recipe(name) as (file, _):
        compare.main(f"recipes/{name}.yaml", str(file))
    page = Path(f"results/reproduce/{name}.md").read_text()
    assert capsys.readouterr().out == page + "\n"
    with Path(f"results/reproduce/{name}.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    verdicts = Counter(row["verdict"] for row in rows)
    assert verdicts == {"within": 1, "not comparable": 1, "not run": 26}
    assert "28 published numbers: 1 within, 0 outside, 0 consistent, 1 not comparable, 26 not run. 7 more" in page
    assert "| AngelSlim's, for the target | MT-bench | 0.0 | t6_10_60 | tau (tokens) | 3.65 | 3.5 | 0.9589 |" in page
    assert "Status of the recipe: validated only. Pins: vllm 0.11.2." in page
    assert "5% of tau, 10% of speedup" in page


def seed_cells(change: dict[str, float] | None = None, spread: float = 0.01) -> list[comparison.PublishedComparison]:
    """Cells of seed 000's trees, on another target whose taus run as its own do, twice as far above 1; some changed."""
    published_taus = {
        row.setting.tree: row.value
        for row in published.read_publications()["qwen3-vl-weather"]
        if row.metric == "tau" and row.setting.draft == "the team's, ep=9"
    }
    for tree, value in published_taus.items():
        tau = (change or {}).get(tree, 2 * value - 1)
        torch_cell("eval", tree, "e009", tau, spread)
    sides, _ = compare.match_published_numbers(
        recipe_of("weather-tiny-vl-trees"), "builtin/weather-tiny-vl", published.read_publications()
    )
    return [each for each in sides if each.published.metric == "tau" and each.own]


def test_a_table_whose_order_agrees_is_consistent() -> None:
    """Bug: all 79 numbers of seed 000 were "not comparable" by construction."""
    rows = seed_cells()
    assert len(rows) == 15 and {row.verdict for row in rows} == {"consistent"}
    assert all("another target" in row.notes[0] for row in rows)
    agreement = rows[0].agreement
    assert agreement and agreement.trees == 15 and agreement.correlation == pytest.approx(1.0)
    assert agreement.agreeing == agreement.differences > 50
    assert rows[0].notes[-1].startswith("order over 15 trees: rank correlation 1.00, ")


def test_one_difference_of_the_other_sign_outside_the_intervals_is_not_consistent() -> None:
    ranked = sorted(seed_cells(), key=lambda row: row.published.value)
    lowest, low = (row.published.setting.tree for row in ranked[:2])
    swapped = {lowest: 2 * ranked[1].published.value - 1, low: 2 * ranked[0].published.value - 1}
    rows = seed_cells(swapped)
    assert {row.verdict for row in rows} == {"not comparable"}
    agreement = rows[0].agreement
    assert agreement and agreement.correlation > 0.9 and agreement.agreeing < agreement.differences
    wide = abs(ranked[1].published.value - ranked[0].published.value) * 2  # then the two can't be told apart
    assert {row.verdict for row in seed_cells(swapped, wide)} == {"consistent"}
