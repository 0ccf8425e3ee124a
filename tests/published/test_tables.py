"""Published numbers: what was copied is all there, and every slip of a copyist is one clear error."""

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from stages.published import tables as published
from stages.published.tables import METRICS
from tests.conftest import ROOT

PUBLISHED = published.read_publications(ROOT / "published")


def test_rows_say_what_where_and_by_which_definition() -> None:
    for name, rows in PUBLISHED.items():
        for row in rows:
            assert row.publication == name
            assert row.definition in (row.metric, published.UNKNOWN) or " " in row.definition
            assert row.definition != row.metric or row.metric in METRICS


# Every defect is one error that names its location


SMALL: dict[str, Any] = {
    "title": "a table",
    "source": {"document": "a page", "url": "unknown", "date": "unknown"},
    "notes": [],
    "settings": dict.fromkeys(published.SETTING_NAMES, "unknown") | {"label": None},
    "metrics": {"tau": {"printed": "τ", "unit": "tokens", "decimals": 2, "definition": "tau"}},
    "tables": [{"where": "here", "columns": ["tree", "tau", "tau @ GSM8K"], "rows": [["t8_2_16", 3.5, None]]}],
}


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "small.yaml"
    YAML(typ="safe").dump(content, path)
    return path


def change(key_path: str, value: Any) -> dict[str, Any]:
    """SMALL with the value at `key_path`, as "tables.0.rows"; a value of ... leaves the key out."""

    def at(node: Any, parts: list[str]) -> Any:
        if not parts:
            return value
        if isinstance(node, list):
            n = int(parts[0])
            return [*node[:n], at(node[n], parts[1:]), *node[n + 1 :]]
        inner = at(node.get(parts[0]), parts[1:])
        return {key: kept for key, kept in (node | {parts[0]: inner}).items() if kept is not ...}

    return at(SMALL, key_path.split("."))


@pytest.mark.parametrize(
    ("key_path", "value", "message"),
    [
        ("title", ..., "title: Field required"),
        ("extra", 1, "extra: unknown key"),
        ("notes", "one", "notes: Input should be a valid list, found 'one'"),
        ("settings.tree", "8_2_16", "settings.tree: .*found '8_2_16'"),
        ("settings.tree", 8216, "tree: .*found 8216"),
        ("settings.colour", "red", "settings.colour: unknown key"),
        ("settings.draft", ..., r"rows\[0\]: no draft; give it, or null, or unknown"),
        ("metrics.tau.decimals", "2", "decimals: Input should be a valid integer"),
        ("metrics.tau.definition", "accept_rate", "expected tau, unknown or a sentence, found 'accept_rate'"),
        ("metrics.spare", {"printed": "l", "unit": "", "decimals": 1, "definition": "unknown"}, "no table has spare"),
        ("tables.0.columns", ["tree", "taux", "tau"], "expected a metric or a setting .*found 'taux'"),
        ("tables.0.rows", [["t8_2_16", 3.5]], r"rows\[0\]: expected 3 values, one a column, found 2"),
        ("tables.0.rows", [["t8_2_16", None, None]], "expected at least one number"),
        ("tables.0.rows", [["t8_2_16", 3.512, None]], "tau: expected at most 2 decimals, found 3.512"),
        ("tables.0.rows", [["t8_2_16", "3.x", None]], "tau: expected a number, or null where none is printed"),
    ],
)
def test_a_defect_is_named(tmp_path: Path, key_path: str, value: Any, message: str) -> None:
    path = written(tmp_path, change(key_path, value))
    with pytest.raises(ValueError, match=message) as raised:
        published.read_publication(path)
    assert "small.yaml" in str(raised.value)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("/data/models/qwen3-8b/", "qwen3-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        (None, ""),
    ],
)
def test_a_models_name_is_that_of_its_hub_id_or_folder(model: str | None, name: str) -> None:
    assert published.normalise_model_name(model) == name
