"""docs/trees.md says what its record says, in figures and in words."""

import copy
import random
from statistics import fmean

import pytest

from benchmarks import trees_page
from benchmarks.trees_record import EASY, THREE, TWO, Record, last_record, name


@pytest.fixture(scope="module")
def record() -> Record:
    return Record(last_record())


def test_the_page_is_what_its_record_gives(record: Record) -> None:
    written = trees_page.PAGE.read_text(encoding="utf-8")
    assert written == trees_page.page(record), "run: python -m benchmarks.trees_page"


def test_a_record_that_does_not_bear_the_words_out_is_refused(record: Record) -> None:
    other = copy.deepcopy(record)
    answers = [other.inside[EASY, name(shape), "row"] for shape in (TWO, THREE)]
    answers[0].update(answers[1])
    with pytest.raises(
        ValueError, match=r"docs/trees.md says 10_3_32 is ahead of 10_2_32 with every draft.*doesn't bear out"
    ):
        trees_page.page(other)


def test_every_cycle_of_a_record_is_counted_everywhere(record: Record) -> None:
    """Buckets of one tree add up to the same drafts, and to the row of replay's own table."""
    for draft, shape in ((d, s) for d in record.trees for s in (TWO, THREE)):
        row, cycles = record.trees[draft][shape], record.total(draft, shape, "cycles")
        assert (cycles, record.total(draft, shape, "accepted")) == (row["cycles"], row["accepted"])
        assert record.tau(draft, shape) == pytest.approx(1 + row["accepted"] / cycles, abs=1e-4)
        for by in (
            "context",
            "answer",
            "after",
            "token",
            "expected_accepted",
            "depth",
            "sibling",
            "level",
            "rank",
            "path_probability",
        ):
            found = record.buckets(draft, shape, by).values()
            assert sum(b["accepted"] for b in found) == row["accepted"], (draft, shape, by)
            if by != "token":
                assert sum(b["nodes"] for b in found) == cycles * (shape[2] - 1)
        depths = record.buckets(draft, shape, "depth")
        assert row["mean_depth"] <= max(map(int, depths)) <= shape[0]


def test_a_difference_is_that_of_pooled_taus_and_its_interval_is_of_answers(record: Record) -> None:
    less, low, high = record.difference(EASY, TWO, THREE)
    rows = [record.buckets(EASY, shape, "row") for shape in (TWO, THREE)]

    def gap(answers: list[str]) -> float:
        one, other = (
            1 + sum(of[a]["accepted"] for a in answers) / sum(of[a]["cycles"] for a in answers) for of in rows
        )
        return one - other

    assert less == pytest.approx(gap(list(rows[0])))
    rng = random.Random(1)
    drawn = sorted(gap(rng.choices(list(rows[0]), k=len(rows[0]))) for _ in range(1000))
    assert low == pytest.approx(fmean(drawn[20:30]), abs=0.03)
    assert high == pytest.approx(fmean(drawn[970:980]), abs=0.03)
    assert record.difference(EASY, TWO, TWO) == (0, 0, 0)
