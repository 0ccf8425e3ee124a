"""The page as a browser lays it out: no wider than a phone, with every part that it can have and every fold open.

And plots of DVC, which must be drawn without a network. Headless Chromium, where there is one.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from stages import report
from stages.params import schema
from stages.results import replay_records, timing_grid
from tests import costs
from tests.conftest import EVAL, ROOT
from tests.test_report import made_up_inside, made_up_project, make_up_served, serve

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on the PATH: nothing to lay the page out with")

# A frame of a phone's width, for a window can't be as narrow; it writes down how wide its content came out.
FRAME = """<body><iframe src="{page}" style="width:{width}px;height:900px;border:0"
onload="document.body.dataset.found = this.contentDocument.documentElement.scrollWidth"></iframe></body>"""


def browse(page: Path, *flags: str) -> str:
    """The document after its scripts have run, every host unknown."""
    assert BROWSER
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND",
        "--allow-file-access-from-files", "--virtual-time-budget=10000", f"--user-data-dir={page.parent}/browser", *flags,
    ]  # fmt: skip
    return subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120).stdout


def laid_out(page: Path, width: int) -> int:
    frame = page.with_name("frame.html")
    frame.write_text(FRAME.format(page=page.as_uri(), width=width))
    found = re.search(r'data-found="(\d+)"', browse(frame))
    assert found, "the frame was not loaded"
    return int(found[1])


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With served cells, a row that is off, what happens inside trees, and published numbers; all of it unfolded."""
    made_up_project(tmp_path, monkeypatch)
    model = "meta-llama/Llama-3.1-8B-Instruct"
    text = Path("params.yaml").read_text().replace("model: builtin/weather-tiny ", f"model: {model} ")
    Path("params.yaml").write_text(text)
    timing_grid.write_timing_grid(costs.made_up(model=model))
    p = schema.load_params()
    for name in p.replay_trees.checkpoints:
        buckets = made_up_inside(name, p.replay_trees.traced_trees())
        replay_records.TreeBucket.write_csv(replay_records.locate_tree_statistics(name), buckets)
    serve({"code": {**EVAL, "concurrency": 64, "repeats": 3}})
    make_up_served("code", off=0.7)
    report.main()
    unfolded = tmp_path / "unfolded.html"
    unfolded.write_text(report.PAGE_FILE.read_text().replace("<details>", "<details open>"))
    return unfolded


def test_the_page_is_no_wider_than_its_window(page: Path) -> None:
    assert {width: laid_out(page, width) for width in (390, 820)} == {390: 390, 820: 820}
    wide = page.with_name("wide.html")  # that the measure can find one
    wide.write_text(page.read_text().replace("<main>", '<main><div style="width: 500px">wide</div>'))
    assert laid_out(wide, 390) > 390


def test_dvc_plots_are_drawn_without_a_network(tmp_path: Path) -> None:
    """DVC's own page loads Vega from the internet; ours holds it."""
    spec = (
        '{"data": {"values": [{"a": 1}]}, "mark": "point", "encoding": {"x": {"field": "a", "type": "quantitative"}}}'
    )
    plot = f'<div id="plot"></div><script>vegaEmbed("#plot", {spec});</script>'
    text = (ROOT / ".dvc/plots/page.html").read_text(encoding="utf-8")
    assert not re.search(r"<(script|link)[^>]*(src|href)=", text)
    shown = tmp_path / "plots.html"
    shown.write_text(text.replace("{plot_divs}", plot).replace("{refresh_tag}", ""), encoding="utf-8")
    found = browse(shown)
    assert 'class="vega-embed' in found and "<canvas" in found.split('id="plot"')[1]
