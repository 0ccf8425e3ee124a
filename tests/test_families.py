"""The arithmetic of benchmarks/families.py: equal training time, rates, groups of answers, and what is printed of seeds."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks import families, families_record, families_tables
from benchmarks.families_record import FamilyFigure, make_figure
from stages.results.replay_records import TreeBucket
from stages.runtime import atomic


def test_epochs_are_those_whose_time_is_closest_to_the_budget() -> None:
    seconds = {"eagle3": 4.0, "dflash8": 1.5, "slow": 100.0}
    assert families.choose_epochs(seconds, 36.0) == {"eagle3": 9, "dflash8": 24, "slow": 1}


def test_times_are_compared_with_those_of_the_first_family() -> None:
    assert families.find_unequal({"eagle3": 40.0, "near": 43.9, "long": 46.0, "short": 30.0}) == {
        "long": 1.15,
        "short": 0.75,
    }


def test_each_family_keeps_the_rate_of_its_highest_tau_and_the_lowest_of_equal_ones() -> None:
    taus = {("a", 0.002): 3.0, ("a", 0.001): 2.0, ("a", 0.004): 1.0, ("b", 0.004): 5.0, ("b", 0.002): 5.0}
    assert families.choose_rates(taus) == {"a": 0.002, "b": 0.002}


@pytest.mark.parametrize(
    ("row", "tokens", "question", "groups"),
    [
        (
            "w.0",
            74,
            "Weather for Graz, 3 days starting 2026-01-30, unit C.",
            ["below 75 tokens", "first answer", "unit C"],
        ),
        ("w.1", 75, "Forecast for Perth from 2026-04-02, 6 days, in F.", ["75 to 99 tokens", "follow-up", "unit F"]),
        ("w.0", 100, "And in Cairo?", ["100 tokens and more", "first answer", "no unit"]),
        ("w.0", 150, "What is the weather in Lima from x? Use F.", ["100 tokens and more", "first answer", "unit F"]),
    ],
)
def test_an_answer_is_in_groups_of_length_turn_and_unit(
    row: str, tokens: int, question: str, groups: list[str]
) -> None:
    assert families_record.name_groups(row, tokens, question) == groups


def count(row: str, cycles: int, accepted: int) -> TreeBucket:
    return TreeBucket(
        checkpoint="x",
        tree="t7_1_8",
        by="row",
        bucket=row,
        cycles=cycles,
        nodes=0,
        expected_accepted=0.0,
        accepted=accepted,
    )


def test_tau_of_a_group_is_pooled_and_its_interval_is_over_conversations() -> None:
    value, ends = families_record.pool_tau([count("a.0", 10, 20), count("a.1", 10, 10), count("b.0", 20, 60)], 7)
    assert value == (90 + 40) / 40
    assert ends["low"] is not None and ends["high"] is not None and ends["low"] < value < ends["high"]
    alone, none = families_record.pool_tau([count("a.0", 10, 20), count("a.1", 10, 10)], 7)  # one conversation
    assert (alone, none) == (2.5, {"low": None, "high": None})


def test_group_values_take_each_group_apart() -> None:
    groups = {"a.0": ["short", "first answer"], "b.0": ["long", "first answer"]}
    found = families_record.list_group_values([count("a.0", 10, 20), count("b.0", 20, 60)], groups)
    assert [(measure, value, more["group"]) for measure, value, more in found] == [
        ("tau", 3.0, "short"),
        ("tau", (80 + 30) / 30, "first answer"),
        ("tau", 4.0, "long"),
    ]


def test_the_integers_of_a_vocabulary_are_no_weights(tmp_path: Path) -> None:
    weights = {"fc.weight": torch.zeros(3, 4, dtype=torch.bfloat16), "norm.weight": torch.zeros(5)}
    save_file({**weights, "d2t": torch.zeros(7, dtype=torch.int64)}, tmp_path / "model.safetensors")
    assert families_record.count_parameters(tmp_path) == 17


def figure(value: float, low: float | None = None, high: float | None = None, seed: int = 5) -> FamilyFigure:
    return make_figure("weather-tiny", "eagle3", seed, 0.001, "tau", value, low=low, high=high)


def test_a_printed_value_has_the_mean_and_the_ends_over_seeds() -> None:
    figures = [figure(3.0, 2.9, 3.1), figure(4.0, 3.7, 4.3, seed=6)]
    assert families_tables.format_spread_of_seeds(figures) == "3.50 (3.00–4.00)"
    assert families_tables.format_half_width(figures) == "± 0.20"
    assert families_tables.format_spread_of_seeds(figures[:1]) == "3.00"
    assert families_tables.format_spread_of_seeds([]) == "–"


def test_a_speedup_is_bold_where_its_interval_lies_above_one() -> None:
    assert families_tables.format_speedups([figure(1.5, 1.2, 1.8)]) == "**1.50** (1.20-1.80)"
    assert families_tables.format_speedups([figure(1.5, 0.9, 2.1)]) == "1.50 (0.90-2.10)"


def test_figures_replace_those_of_their_own_targets_alone(tmp_path: Path) -> None:
    path = tmp_path / "families.csv"
    other = make_figure("weather-tiny-moe", "eagle3", 5, 0.001, "tau", 2.0)
    families_record.write_figures(path, [figure(3.0), other])
    families_record.write_figures(path, [figure(4.0, 3.5, 4.5)])
    assert FamilyFigure.read_csv(path, "families") == [other, figure(4.0, 3.5, 4.5)]


def test_a_trainings_time_and_tokens_are_read_from_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    epochs = [
        {"epoch": n, "loss": 2.0, "step_loss": [2.0], "step_accuracy": [0.5], "tokens": 100 * n, "seconds": seconds}
        for n, seconds in enumerate([9.0, 2.0, 4.0, 3.0], 1)
    ]
    report = {"checkpoint": "dflash8", "from": "e000", "epochs": epochs, "seconds": 18.0, "weights": "ab" * 32}
    atomic.write_json(Path("results/train/dflash8.json"), report)
    draft = families_record.ComparedDraft("dflash8", 5, 0.001, "dflash8", "t7_1_8", ())
    found = {measure: value for measure, value, _ in families_record.list_training_values(draft, epochs=4)}
    assert found == {"epochs": 4, "training_seconds": 18.0, "training_tokens": 1000, "parameters": 0}
    assert families.read_epoch_seconds("dflash8", is_on_gpu=True) == 3.0  # without the first epoch
