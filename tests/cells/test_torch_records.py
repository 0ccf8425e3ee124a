"""A benchmark cell holds every metric docs/metrics.md defines, comes back as it went, and is refused by name."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from stages.cells import torch_records
from tests.torch_cells import ENDED

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made_up() -> dict[str, Any]:
    prompt = dict.fromkeys(torch_records.PROMPT_COLUMNS, 1) | {"id": "q7.0", "identical": True, "finish_reason": "stop"}
    return {
        "workload": "eval",
        "checkpoint": "e003",
        "tree": "t8_2_16",
        "num_steps": 8,
        "topk": 2,
        "num_draft_tokens": 16,
        "engine": "torch",
        "definitions": torch_records.DEFINITIONS,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": None,
        "metrics": {name: n + 0.5 for n, name in enumerate(torch_records.METRICS)},
        "histogram": [3, 2, 0, 1],
        "prompts": [prompt, prompt],
        "hardware": {"cpu": "abacus"},
        "versions": {"torch": "2"},
        "seconds": 1.5,
        "seed": 0,
        "repeats": [{"output_tok_s": 3.0, "baseline_output_tok_s": 1.5, "speedup": 2.0}],
        "quality": None,
        "gpus": [],
        "joules": None,
        **ENDED,
    }


def test_a_cell_comes_back_as_it_went() -> None:
    path = torch_records.write_torch_cell(made_up())
    assert str(path) == "results/cells/eval-e003-t8_2_16.json"  # dvc.yaml's outs name it so
    assert torch_records.read_torch_cell("eval", "e003", "t8_2_16") == torch_records.TorchCell(**made_up())


def test_a_cell_is_written_as_given_to_the_byte() -> None:
    """Its keys in the given order, an integer not as a float: the models check, and convert nothing."""
    for cell in (made_up() | {"temperature": 0}, dict(reversed(made_up().items()))):
        path = torch_records.write_torch_cell(cell)
        assert path.read_text() == json.dumps(cell, indent=1, ensure_ascii=False) + "\n"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c: c.pop("seed"),
        lambda c: c.update(note="x"),
        lambda c: c["metrics"].pop("tau_low"),
        lambda c: c["metrics"].update(mean=1.0),
        lambda c: c["prompts"][1].pop("cycles"),
    ],
    ids=["a key less", "a key more", "a metric less", "a metric more", "a prompt's column less"],
)
def test_a_cell_that_is_not_whole_is_not_written(spoil: Any) -> None:
    broken = json.loads(json.dumps(made_up()))
    spoil(broken)
    with pytest.raises(AssertionError):
        torch_records.write_torch_cell(broken)
    assert not Path("results").exists()


def test_a_missing_a_cut_and_an_old_cell_are_named_with_what_to_run() -> None:
    name = "benchmark@eval-e003-t8_2_16"
    with pytest.raises(ValueError, match=rf"eval-e003-t8_2_16\.json not found; run: dvc repro {name}$"):
        torch_records.read_torch_cell("eval", "e003", "t8_2_16")
    path = torch_records.write_torch_cell(made_up())
    whole = path.read_text()
    path.write_text(whole[:100])
    with pytest.raises(ValueError, match=rf"eval-e003-t8_2_16\.json is not valid JSON .*run: dvc repro -f -s {name}$"):
        torch_records.read_torch_cell("eval", "e003", "t8_2_16")
    path.write_text(json.dumps({k: v for k, v in made_up().items() if k not in ("histogram", "seed")}))
    with pytest.raises(ValueError, match=rf"json lacks \['histogram', 'seed'\].*: dvc repro -f -s {name}$"):
        torch_records.read_torch_cell("eval", "e003", "t8_2_16")


def test_cells_measured_by_an_older_definition_are_refused_by_name() -> None:
    """Bug: `reproduce` and the table of methods read cells of any version, and laid old intervals beside new ones."""
    torch_records.write_torch_cell(made_up() | {"definitions": "docs/metrics.md, version 2"})
    page = r"docs/metrics\.md, version"
    message = rf"was measured with the definitions of {page} 2, expected {page} 3; run: dvc repro -f -s "
    with pytest.raises(ValueError, match=rf"eval-e003-t8_2_16\.json {message}benchmark@eval-e003-t8_2_16$"):
        torch_records.read_torch_cell("eval", "e003", "t8_2_16")


def test_every_metric_is_defined_in_the_docs_and_of_their_version() -> None:
    """A number without a definition is worth nothing; rivals' tables differ in what tau counts."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    missing = [name for name in torch_records.METRICS if not re.search(rf"\b{re.escape(name)}\b", text)]
    assert not missing, f"docs/metrics.md does not define {missing}"
    version = re.fullmatch(r"docs/metrics\.md, version (\d+)", torch_records.DEFINITIONS)
    assert version and re.search(rf"\bversion {version[1]}\b", text, re.IGNORECASE)


def test_hardware_says_what_compares_and_never_whose_machine() -> None:
    words = torch_records.describe_hardware("cpu", 2)
    assert words["threads"] == 2 and words["cpu"] and "gpu" not in words
    assert len(socket.gethostname()) < 3 or socket.gethostname() not in json.dumps(words)


def test_versions_are_the_installed_ones() -> None:
    import polars

    assert torch_records.list_versions("polars") == {"polars": polars.__version__}
