"""The record of a cell comes back as it went, and is refused by name where it is broken or another."""

import json
import re
from pathlib import Path

import pytest

from stages.cells import cell
from stages.cells.cell import Cell
from stages.params.engines import SERVED
from stages.published.tables import METRICS
from tests.served_cells import made_up, point
from tests.torch_cells import timed_cell

ROOT = Path(__file__).parents[2]
NAMES = ("eval", "e003", "t8_2_16")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_cells_come_back_as_they_went() -> None:
    """Bug: cells of all engines that serve had one name, so that another engine wrote over what one had measured."""
    made = timed_cell("t8_2_16", checkpoint="e003")
    assert str(made.write()) == "results/cells/torch/eval-e003-t8_2_16.json"  # dvc.yaml's outs name it so
    assert Cell.read("torch", *NAMES) == made
    served = [
        Cell(**made_up("eval", points=[point(64, 4, 0.02)])),
        *(Cell(**made_up(*NAMES, engine=e)) for e in SERVED),
    ]
    expected = ["sglang/eval-baseline", *(f"{engine}/eval-e003-t8_2_16" for engine in SERVED)]
    assert [str(one.write()) for one in served] == [f"results/cells/{name}.json" for name in expected]
    assert [Cell.read("sglang", "eval"), *(Cell.read(engine, *NAMES) for engine in SERVED)] == served
    stages = ["benchmark@eval-e003-t8_2_16", "benchmark_served_baseline@sglang-eval"]
    stages += [f"benchmark_served@{engine}-eval-e003-t8_2_16" for engine in SERVED]
    assert [one.stage for one in (made, *served)] == stages


def test_a_missing_a_cut_and_an_old_cell_are_named_with_what_to_run() -> None:
    """Bug: `reproduce` and the table of methods read cells of any version, and laid old intervals beside new ones."""
    name = "benchmark@eval-e003-t8_2_16"
    with pytest.raises(ValueError, match=rf"eval-e003-t8_2_16\.json not found; run: dvc repro {name}$"):
        Cell.read("torch", *NAMES)
    path = timed_cell("t8_2_16", checkpoint="e003").write()
    whole = json.loads(path.read_text())
    for spoilt, message in (
        ({k: v for k, v in whole.items() if k not in ("temperature", "seed")}, r"json lacks \['seed', 'temperature'\]"),
        (
            whole | {"definitions": "docs/metrics.md, version 2"},
            r"definitions of docs/metrics\.md, version 2, expected",
        ),
        (whole | {"checkpoint": "e009"}, "holds the cell eval-e009-t8_2_16"),
    ):
        path.write_text(json.dumps(spoilt))
        with pytest.raises(ValueError, match=rf"{message}.*dvc repro -f -s {name}$"):
            Cell.read("torch", *NAMES)
    path.write_text(json.dumps(whole)[:100])
    with pytest.raises(ValueError, match=rf"eval-e003-t8_2_16\.json is not valid JSON .*run: dvc repro -f -s {name}$"):
        Cell.read("torch", *NAMES)


def test_every_metric_is_defined_in_the_docs_and_of_their_version() -> None:
    """A number without a definition is worth nothing; rivals' tables differ in what tau counts."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    missing = [name for name in METRICS if not re.search(rf"\b{re.escape(name)}\b", text)]
    assert not missing, f"docs/metrics.md does not define {missing}"
    version = re.fullmatch(r"docs/metrics\.md, version (\d+)", cell.DEFINITIONS)
    assert version and re.search(rf"\bversion {version[1]}\b", text, re.IGNORECASE)
