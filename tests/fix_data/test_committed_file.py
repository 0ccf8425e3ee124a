"""fix_data on the committed raw file: counts add up, and every kept row is the conversation before the export damaged it."""

from collections import Counter
from pathlib import Path

import polars as pl
import pytest
import toon_format
import toons

from stages.toy import weather
from tests.fix_data.raw_rows import RAW, outcome
from tests.toy import damaged_exports


def test_counts_add_up_on_the_committed_file(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train, evaluation, report = outcome()
    lines = RAW.read_text().splitlines()
    assert report["rows_in"] == len(lines) == report["clean"] + report["repaired"] + report["dropped"]
    assert report["rows_out"] == report["clean"] + report["repaired"] == train.height + evaluation.height
    assert (report["train"], report["eval"]) == (train.height, evaluation.height)
    assert sum(report["dropped_reasons"].values()) == report["dropped"] > 0

    # Counted again from the tables, not from the report.
    kept = pl.concat([train, evaluation])
    rules = Counter(rule for v in kept["verdict"] if v != "clean" for rule in v.removeprefix("repaired:").split(","))
    assert report["rules"] == rules and set(report["examples"]) == set(rules)
    assert all(example["before"] != example["after"] for example in report["examples"].values())
    assert 0.10 < report["eval"] / report["rows_out"] < 0.20 and report["seconds"] > 0
    assert len(capsys.readouterr().out.strip().splitlines()) == 1

    for table in (train, evaluation):
        assert table["source_row"].to_list() == sorted(table["source_row"])
    assert kept["id"].is_unique().all() and kept["source_row"].is_unique().all()


def test_every_kept_row_equals_the_undamaged_conversation(home: Path) -> None:
    """Compared by both decoders with the conversations before the export damaged them."""
    train, evaluation, _ = outcome()
    stream = weather.generate_conversations(damaged_exports.EXPORT_SEED)
    clean = [next(stream) for _ in range(damaged_exports.EXPORT_ROWS)]
    trimmed = []
    for identifier, messages, verdict in pl.concat([train, evaluation]).select("id", "messages", "verdict").iter_rows():
        truth = clean[int(identifier.split("-")[1])]
        if "opening_answer" in verdict:
            trimmed.append(identifier)
            truth = [truth[0], *truth[1 - len(messages) :]]
        if len(messages) < len(truth):  # the export lost the last answer, which leaves a question
            trimmed.append(identifier)
            truth = truth[: len(messages)]
        assert [m["role"] for m in messages] == [m["role"] for m in truth], identifier
        for message, was in zip(messages, truth, strict=True):
            if message["role"] != "assistant":
                assert message == was
                continue
            decoded = toon_format.loads(message["content"])
            assert decoded == toons.loads(message["content"]) == toon_format.loads(was["content"]), identifier
    assert len(trimmed) == 14  # of 18 exports that lost a turn; the others lost one in the middle
