"""Published numbers beside our own: which agree in target and tree, and what still differs."""

import pytest

from stages.literature import own_beside_published, published
from stages.results import torch_records
from stages.results.torch_records import CellMetrics, TorchCell
from tests.conftest import ROOT
from tests.served_cells import join, made_up, point

PUBLISHED = published.read_publications(ROOT / "published")


def ours(
    tree: str, workload: str = "eval", temperature: float = 0.0, **metrics: float
) -> own_beside_published.OwnPoint:
    cell = TorchCell.model_construct(
        workload=workload, checkpoint="e009", tree=tree, engine="torch", temperature=temperature,
        metrics=CellMetrics(**dict.fromkeys(torch_records.METRICS, 1.0) | metrics), hardware={"cpu": "one core", "gpu": "H200"},
    )  # fmt: skip
    (point_,) = own_beside_published.convert_torch_cells([cell])
    return point_


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("builtin/weather-tiny", set()),
        ("Qwen/Qwen3-8B", {"angelslim-pytorch", "angelslim-vllm", "angelslim-tool"}),
        ("/data/models/qwen3-8b/", {"angelslim-pytorch", "angelslim-vllm", "angelslim-tool"}),
        ("Qwen/Qwen3-VL-2B-Instruct", {"angelslim-vllm"}),
        ("meta-llama/Llama-3.1-8B-Instruct", {"eagle3-paper", "specforge-sweep"}),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", {"qwen3-coder-h100", "specforge-sweep"}),
        ("Qwen/Qwen3-30B-A3B", {"angelslim-issue-163", "angelslim-pytorch", "angelslim-vllm"}),
    ],
)
def test_whose_target_is_ours(model: str, names: set[str]) -> None:
    assert set(own_beside_published.select_target_rows(PUBLISHED, model)) == names


def test_a_percentage_is_compared_as_a_share_and_a_definition_of_ours_is_no_difference() -> None:
    rows = PUBLISHED["qwen3-vl-weather"].rows
    (line,) = (
        line
        for line in own_beside_published.pair_rows(rows, [ours("t10_3_32", accept_rate=0.62)])
        if line.published.metric == "accept_rate"
    )
    assert (line.published_value, line.own_value, line.ratio) == pytest.approx((0.31, 0.62, 2))
    assert line.differences == ("its temperature isn't stated", "data set _toon, the first 100 against eval")


def test_a_tree_that_only_one_side_has_is_left_out() -> None:
    rows = PUBLISHED["qwen3-vl-weather"].rows
    found = list(own_beside_published.pair_rows(rows, [ours("t8_2_16"), ours("t9_9_9")]))
    assert {line.published.setting.tree for line in found} == {"t8_2_16"}
    assert [line.published_value for line in found if line.published.metric == "tau"] == [3.73, 3.9]


def test_times_hang_on_engine_and_machine_and_accept_lengths_do_not() -> None:
    rows = [
        row
        for row in PUBLISHED["angelslim-vllm"].rows
        if (row.setting.target, row.setting.dataset) == ("Qwen3-4B", "GSM8K")
    ]
    tau, tok_s = sorted(
        own_beside_published.pair_rows(rows, [ours("t2_1_3", workload="gsm8k", temperature=0.5)]),
        key=lambda line: line.published_value,
    )
    said = "its temperature isn't stated"
    assert tau.differences == ("defined as 1 + accepted / drafts, from vLLM's counters", said)
    assert tok_s.differences[1:] == (said, "engine vLLM against torch", "hardware 1 H20 against H200")
    sweep = [row for row in PUBLISHED["specforge-sweep"].rows if (row.metric, row.setting.tree) == ("tau", "t3_1_4")][
        :1
    ]
    (line,) = own_beside_published.pair_rows(sweep, [ours("t3_1_4", temperature=0.5)])
    assert "temperature 0.0 against 0.5" in line.differences


def test_served_points_are_compared_in_the_publications_units_and_at_its_load() -> None:
    baseline = made_up("random", points=[point(1024, 64, 0.02), point(1024, 32, 0.02)], temperature=1.0)
    drafts = [point(1024, 64, 0.01, tau=2.9, tree="t5_8_32"), point(1024, 32, 0.01, tau=2.9, tree="t5_8_32")]
    cell_ = made_up("random", "e009", "t5_8_32", drafts, baseline_points=[point(1024, 64, 0.03)])
    cells = list(own_beside_published.convert_served_points(join([baseline, cell_])))
    assert [(c.checkpoint, c.tree) for c in cells] == [(None, None)] * 2 + [("e009", "t5_8_32")] * 2 + [(None, None)]
    rows = [r for r in PUBLISHED["qwen3-coder-h100"].rows if r.setting.output_tokens == 1024]
    found = {(line.published.metric, line.checkpoint): line for line in own_beside_published.pair_rows(rows, cells)}
    load = drafts[0]["loads"][0]
    line = found["ttft_mean_ms", "e009"]
    assert (line.published_value, line.own_value) == (168, pytest.approx(1000 * load["ttft_s"]["mean"]))
    assert found["total_tok_s", "e009"].own_value == load["total_throughput"]
    assert found["tau", "e009"].own_value == 2.9 and ("tau", None) not in found
    assert found["total_tok_s", None].published_value == 2847
    assert line.differences == (
        "its definition isn't stated", "its temperature isn't stated",
        "hardware 1 H100 80GB SXM, driver 550.127.08, CUDA 12.4 against NVIDIA H200",
    )  # fmt: skip
