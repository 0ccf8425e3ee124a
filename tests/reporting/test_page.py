"""The report page: it needs no network, escapes what users wrote, and shows what the stages reported."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stages import report
from stages.cells.replay_records import TreeBucket
from stages.params import schema
from stages.runtime import atomic
from tests.conftest import ROOT
from tests.reporting.made_up_results import INSIDE, PICTURE, PLOTS, _made_up_report, made_up_inside


def test_the_page_shows_what_is_trained_on_and_escapes_it(made_up: schema.Params) -> None:
    """An answer may hold any text: a page that ran it as HTML would show another mask, or worse."""
    report.main()
    page = report.PAGE_FILE.read_text()
    assert "<strong>q7.0</strong> (part-3&lt;b&gt;.jsonl, row 8): 3 of 12 tokens, a whole answer" in page
    assert (
        '<pre class="masked" tabindex="0" role="region" aria-label="Training row q7.0">'
        "<span>&lt;|im_start|&gt;user\nIs 2 &lt; 3 &amp; &lt;b&gt;so&lt;/b&gt;?&lt;|im_end|&gt;\n</span>"
        "<mark>&lt;i&gt;yes&lt;/i&gt;\n&lt;/mark&gt;</mark></pre>"
    ) in page


def test_rows_that_do_not_add_up_are_shown(made_up: schema.Params, capsys: pytest.CaptureFixture[str]) -> None:
    atomic.write_json(Path("results/sample_report.json"), _made_up_report("sample_target") | {"rows_out": 250})
    report.main()
    assert "10 unaccounted for" in report.PAGE_FILE.read_text()
    assert json.loads(report.METRICS_FILE.read_text())["rows_unaccounted"] == 10
    assert "warning: 10 rows" in capsys.readouterr().out


def test_what_happens_inside_trees_is_shown_where_any_was_looked_into(made_up: schema.Params) -> None:
    report.main()
    assert "Inside some trees" not in report.PAGE_FILE.read_text()
    for name in made_up.replay_trees.checkpoints:
        TreeBucket.write_csv(TreeBucket.locate(name), made_up_inside(name))
    report.main()
    page = report.PAGE_FILE.read_text()
    assert page.count(PICTURE) == PLOTS + INSIDE and "#0303" not in page
    text = re.sub(r"(\s|<[^>]+>)+", " ", page)
    assert "Inside some trees" in text and "8_1_9 (8_1_8) 60 2.33 8 2.67 1.33 0.50 33% → 33%" in text


def test_the_advice_starts_without_the_heavy_libraries() -> None:
    code = "import sys, stages.report; print(*{'matplotlib', 'jinja2', 'polars', 'torch', 'numpy'} & set(sys.modules))"
    heavy = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert heavy.stdout.split() == []


def test_warnings_of_sampling_are_with_the_verdict(made_up: schema.Params, capsys: pytest.CaptureFixture[str]) -> None:
    """Bug: a target whose answers never end gave drafts of 100% and "Launch", without a word on the page."""
    warning = "100 of 100 answers are cut (train 60 of 60, eval 40 of 40)"
    atomic.write_json(Path("results/sample_report.json"), _made_up_report("sample_target") | {"warnings": [warning]})
    report.main()
    assert warning in capsys.readouterr().out and warning in report.PAGE_FILE.read_text()
