"""The table of methods: what the cells say and what training took, and the engine's part beside the method's."""

from pathlib import Path
from typing import Any

import pytest

from stages import report
from stages.params import schema
from stages.reporting import methods, timing_noise
from stages.reporting.benchmark_table import DOUBTED_NOTE
from stages.reporting.methods import MethodRow
from stages.results import method_records, torch_records
from stages.results.method_records import MethodCell
from stages.results.served_table import ServedRow, ServedTableLine
from stages.results.torch_records import CellMetrics, StoppingRecord, TorchCell
from stages.results.training_records import TrainingReport
from tests.conftest import edit_params
from tests.reporting.made_up_results import made_up_project, make_up_spent

TRAINED = {
    name: TrainingReport.model_validate({"from": parent, "seconds": seconds, "epochs": [], "weights": ""})
    for name, parent, seconds in (("e003", "e000", 30.0), ("e009", "e003", 60.0), ("heads", "e000", 25.0))
}
DRAFTED = {
    "medusa": {"method": "medusa", "checkpoint": "heads", "depth": 4, "nodes": 9},
    "dynamic": {"method": "eagle3", "checkpoint": "e009", "tree": "t5_2_8"},
}
DRAFTLESS = {"ngram": {"method": "ngram", "longest": 3, "shortest": 1, "length": 8}}


def made_up_row(
    row: str, speed: float, settings: dict[str, Any], mixture: bool = False, plain: float = 200.0
) -> dict[str, Any]:
    draft = settings.get("checkpoint")
    metrics = dict.fromkeys(method_records.METHOD_METRICS, 1.0) | {
        "tau": 2.5, "accept_rate": 0.375, "output_tok_s": speed, "baseline_output_tok_s": plain, "speedup": speed / plain,
        "speedup_low": speed / plain - 0.1, "speedup_high": speed / plain + 0.1,
    }  # fmt: skip
    return {
        "row": row, "method": settings["method"], "checkpoint": draft, "workload": "eval", "engine": "torch",
        "settings": {k: v for k, v in settings.items() if k not in ("method", "checkpoint")}, "num_steps": 4,
        "definitions": torch_records.DEFINITIONS, "temperature": 0.0, "top_p": 1.0, "top_k": None, "metrics": metrics,
        "histogram": [1, 2],
        "prompts": [dict.fromkeys(method_records.METHOD_PROMPT_COLUMNS, 0) | {"id": "q", "finish_reason": "stop"}],
        "memory": {"weights": 3 * 2**20 if draft else 0, "state": 1536}, "parameters": 786432 if draft else 0,
        "mixture": mixture, "model": "builtin/weather-tiny", "hardware": {"cpu": "a chip", "threads": 1, "system": "Linux"},
        "versions": {"torch": "2"}, "seconds": 3.0, "seed": 1, "gpus": [], "joules": None,
    }  # fmt: skip


def every_row(**how: Any) -> list[MethodCell]:
    speeds = {"medusa": 380.0, "dynamic": 440.0, "ngram": 250.0}
    return [MethodCell(**made_up_row(name, speeds[name], row, **how)) for name, row in {**DRAFTED, **DRAFTLESS}.items()]


def test_rows_are_the_cells_and_training_is_that_of_the_whole_chain() -> None:
    found = methods.build_method_rows(every_row(), TRAINED)
    assert [row["row"] for row in found] == ["baseline", "medusa", "dynamic", "ngram"]
    by = {row["row"]: row for row in found}
    assert (by["baseline"]["speedup"], by["baseline"]["output_tok_s"], by["baseline"]["parameters"]) == (1.0, 200.0, 0)
    assert {name: row["training_s"] for name, row in by.items()} == {
        "baseline": None, "medusa": 25.0, "dynamic": 90.0, "ngram": 0.0,
    }  # fmt: skip
    assert {name: row["needs_training"] for name, row in by.items()} == {
        "baseline": "no", "medusa": "yes", "dynamic": "yes", "ngram": "no",
    }  # fmt: skip
    assert {row["moe"] for row in found} == {"not run"}
    assert {row["moe"] for row in methods.build_method_rows(every_row(mixture=True), TRAINED)} == {"works"}
    assert methods.build_method_rows([], TRAINED) == [] and methods.format_method_table([]) == []


def test_training_of_a_draft_that_others_trained_is_not_known() -> None:
    assert methods.sum_training_seconds("theirs", TRAINED) is None


def test_the_table_survives_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"methods\.csv not found; run: dvc repro report"):
        MethodRow.read_table()
    found = methods.build_method_rows(every_row(), TRAINED)
    MethodRow.write_table(found)
    assert MethodRow.read_table() == found
    lines = methods.format_method_table(found)
    assert methods.format_method_table(MethodRow.read_table()) == lines
    cells = {line.split()[0]: line for line in lines if line}
    assert "dynamic (eagle3)" in cells["dynamic"] and " 5_2_8 " in cells["dynamic"] and "2.20x" in cells["dynamic"]
    assert (
        "static, 9 nodes, 4 deep" in cells["medusa"] and "3.00 MiB" in cells["medusa"] and "786,432" in cells["medusa"]
    )
    assert "3- to 1-grams, 8 tokens" in cells["ngram"] and "1.50 KiB" in cells["ngram"]


def test_a_row_whose_repeats_did_not_suffice_is_told_and_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = every_row()
    stopping = StoppingRecord(repeats=8, rule="most_repeats", half_width=0.123)
    cells = [cell.model_copy(update={"stopping": stopping if cell.row == "ngram" else None}) for cell in cells]
    (remark,) = timing_noise.find_timing_remarks([], cells, [], [])
    assert str(remark) == (
        "ngram (eval): its 8 repeats, the most, were spent at ±12% of its speedup; "
        "again: aerie rerun benchmark_methods_baseline@ngram"
    )
    found, doubted = methods.build_method_rows(cells, TRAINED), [remark.stage]
    lines = methods.format_method_table(found, doubted)
    assert [line.split()[0] for line in lines if " ! " in line] == ["ngram"] and lines[-2] == DOUBTED_NOTE
    page = methods.build_methods_page(found, [], doubted)
    assert page and [line.texts[0] for line in page.lines if line.is_doubted] == ["ngram"]


def served(decoding: str, speed: float | None, **changes: Any) -> Any:
    row = {"workload": "eval", "engine": "sglang", "decoding": decoding, "concurrency": 1, "output_throughput": speed}
    return ServedTableLine(ServedRow(**row | {"temperature": 0.0, "status": "ran"} | changes), None, None)


def benchmark_cell(workload: str, **metrics: float) -> TorchCell:
    figures = CellMetrics.model_construct(**metrics)
    return TorchCell.model_construct(workload=workload, metrics=figures)


def test_the_engines_part_beside_the_methods() -> None:
    found = methods.build_method_rows(every_row(), TRAINED)
    nothing = methods.compare_engines(found, [], [])
    assert nothing == [
        methods.EngineSpeeds("autoregressive", 200.0, None),
        methods.EngineSpeeds("medusa", pytest.approx(380.0), None),
        methods.EngineSpeeds("eagle3", pytest.approx(440.0), None),
    ]
    cells = [
        benchmark_cell(workload, speedup=speedup, baseline_output_tok_s=plain)
        for workload, speedup, plain in (("eval", 2.5, 210.0), ("chat", 9.0, 999.0))
    ]
    lines = [
        served("plain", 600.0), served("speculative", 900.0), served("speculative", 1000.0), served("speculative", None),
        served("speculative", 9999.0, concurrency=8), served("plain", 9999.0, workload="chat"),
        served("speculative", 9999.0, engine="vllm"),
    ]  # fmt: skip
    both = {row.way: (row.torch, row.sglang) for row in methods.compare_engines(found, cells, lines)}
    assert both == {"autoregressive": (210.0, 600.0), "medusa": (210.0 * 1.9, None), "eagle3": (210.0 * 2.5, 1000.0)}
    assert methods.compare_engines([], cells, lines) == [] and methods.format_speed(None) == "not measured"


def test_the_page_shows_both_tables_and_the_csv_has_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    made_up_project(tmp_path, monkeypatch)
    checkpoints = {**{n: s.model_dump(by_alias=True) for n, s in schema.load_params().train_draft.checkpoints.items()},
                   "heads": {"from": "e000", "epochs": 1, "method": "medusa", "heads": 4}}  # fmt: skip
    edit_params(tmp_path, {
        "train_draft": {"checkpoints": checkpoints}, "benchmark_methods": {"with_draft": DRAFTED, "without_draft": DRAFTLESS},
    })  # fmt: skip
    epoch = {"epoch": 1, "loss": 3.0, "step_loss": [1.0] * 4, "step_accuracy": [0.5] * 4, "tokens": 900, "seconds": 2.0}
    heads = {"checkpoint": "heads", "from": "e000", "epochs": [epoch], "seconds": 25.0, "weights": "0" * 64}
    report.atomic.write_json(Path("results/train/heads.json"), heads)
    make_up_spent("train_draft@heads")
    with pytest.raises(ValueError, match=r"method-medusa\.json not found; run: dvc repro benchmark_methods@medusa"):
        report.main()
    for row in every_row():
        method_records.write_method_cell(row.model_dump())
    report.main()
    page, terminal = Path("results/report/index.html").read_text(), capsys.readouterr().out
    assert "Methods on one verifier" in page and "What the engine gives" in page and "static, 9 nodes, 4 deep" in page
    assert "not measured" in page and "Methods on one verifier, eval" in terminal
    assert [row["row"] for row in MethodRow.read_table()] == ["baseline", "medusa", "dynamic", "ngram"]
    assert Path("results/report/table.txt").read_text() == terminal


def test_without_rows_the_page_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up_project(tmp_path, monkeypatch)
    report.main()
    assert "Methods on one verifier" not in Path("results/report/index.html").read_text()
    assert MethodRow.read_table() == []
