"""The page in a browser: its layout at three widths, in light, dark and print; who can read it; what its script does.

And plots of DVC, which must be drawn without a network. Headless Chromium, where there is one.
"""

import csv
import io
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stages import report
from stages.cells.replay_records import ReplayedTree, TreeBucket
from stages.cells.table import ResultRow
from stages.params import schema
from tests.chromium import CHROMIUM, launch_chromium
from tests.conftest import EVAL, ROOT
from tests.reporting.made_up_results import made_up_inside, made_up_project, make_up_served, serve

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH: nothing to lay the page out with")

SIZES = {390: 844, 1024: 768, 1920: 1080}  # of a phone, a tablet and a wide screen
OPEN_ALL = "() => document.querySelectorAll('details').forEach((part) => { part.open = true; })"
Open = Callable[..., Any]  # (width, **of a browser's context) -> playwright's page, loaded


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A page with served cells, a row that is off, and what happens inside trees."""
    with pytest.MonkeyPatch.context() as patch:
        made_up_project(tmp_path_factory.mktemp("page"), patch)
        p = schema.load_params()
        for name in p.replay_trees.checkpoints:
            TreeBucket.write_csv(TreeBucket.locate(name), made_up_inside(name))
        serve({"code": {**EVAL, "concurrency": 64, "repeats": 3}})
        make_up_served("code", off=0.7)
        report.main()
        yield report.PAGE_FILE.resolve()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launch_chromium() as started:
        yield started


@pytest.fixture
def open_page(browser: Any, file: Path) -> Iterator[Open]:
    """Open the page at a width. After the test, no page has asked for anything but itself, and none has complained."""
    contexts, heard = [], []

    def open_at(width: int, fragment: str = "", **how: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": SIZES.get(width, 800)}, **how)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: heard.append(request.url.split("#")[0]))
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.goto(file.as_uri() + fragment)
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert {url for url in heard if not url.startswith("blob:")} == {file.as_uri()}


# Layout


@pytest.mark.parametrize("width", SIZES)
def test_the_page_is_no_wider_than_its_window(open_page: Open, width: int) -> None:
    page = open_page(width)
    measure = "() => document.documentElement.scrollWidth"
    assert page.evaluate(measure) == width
    page.evaluate(OPEN_ALL)
    assert page.evaluate(measure) == width
    page.evaluate("() => { document.querySelector('main').style.minWidth = '3000px'; }")  # that the measure finds one
    assert page.evaluate(measure) > width


# Who can read it


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1024, "dark"), (1920, "light")])
def test_axe_finds_nothing_serious(open_page: Open, width: int, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python", reason="axe-core is not installed: make install the test extra")
    page = open_page(width, color_scheme=scheme, bypass_csp=True)
    page.evaluate(OPEN_ALL)
    page.evaluate(
        "() => document.querySelectorAll('#all-trees tbody tr:nth-child(n+9)').forEach((row) => row.remove())"
    )
    page.add_script_tag(content=Path(axe.__file__).with_name("axe.min.js").read_text(encoding="utf-8"))
    assert find_serious(page) == []
    page.evaluate("() => { document.querySelector('.about').style.color = 'rgba(128, 128, 128, .3)'; }")
    assert find_serious(page, ".about") == ["color-contrast"]  # that it looks


def find_serious(page: Any, where: str = "html") -> list[str]:
    # Only violations leave the browser: all that axe has looked at takes seconds to read in Python.
    find = "async (where) => (await axe.run(where, {resultTypes: ['violations']})).violations"
    found = page.evaluate(find, where)
    return [rule["id"] for rule in found if rule["impact"] in ("serious", "critical")]


# The script


def test_no_other_script_runs_and_nothing_is_fetched(open_page: Open, browser: Any, file: Path) -> None:
    """What users and models wrote is escaped; should any of it get through, the page's policy stops it."""
    page = open_page(1024)
    assert page.locator("button.unfold").is_visible()  # its own script runs
    bad = file.with_name("bad.html")
    add = "<script>document.title = 'ran'; fetch('https://example.org/')</script><img src='https://example.org/a.png'>"
    bad.write_text(file.read_text(encoding="utf-8").replace("<main>", f"<main>{add}"), encoding="utf-8")
    other = browser.new_page()
    errors: list[str] = []
    other.on("console", lambda message: errors.append(message.text))
    other.goto(bad.as_uri())
    assert other.title() == page.title() and len(errors) == 2
    assert all("Content Security Policy" in error for error in errors)
    other.close()


def test_the_main_table_sorts_and_plain_decoding_stays_below(open_page: Open) -> None:
    page = open_page(1920)
    table = page.locator(".results").first
    rows = table.locator("tbody tr")

    def column(at: int) -> list[str]:
        return [row.split("\t")[at].strip() for row in rows.all_inner_texts()]

    before = column(0)
    table.get_by_role("button", name="speedup (95% interval)").click()
    speedups = [float(text.split("×")[0]) for text in column(5)]
    assert speedups[:-1] == sorted(speedups[:-1], reverse=True) and column(0)[-1] == "plain decoding"
    assert table.locator("th[aria-sort=descending]").inner_text().startswith("speedup")
    table.get_by_role("button", name="speedup (95% interval)").press("Enter")
    assert [float(text.split("×")[0]) for text in column(5)][:-1] == sorted(speedups[:-1])
    table.get_by_role("button", name="tree").click()
    shapes = [[int(part) for part in name.split()[0].split("_")] for name in column(0)[:-1]]
    assert shapes == sorted(shapes) and sorted(before) == sorted(column(0))


def test_all_trees_are_filtered_by_words_and_bounds(open_page: Open) -> None:
    page = open_page(1920, "#all-trees")
    field, part = page.get_by_label("Filter All trees"), page.locator("#all-trees")
    shown = part.locator("tbody tr:visible")
    trees = [tree for tree in read_trees() if tree.temperature == 0]
    assert shown.count() == len(trees)
    for wanted, kept in {
        "topk=2 tau>3": [t for t in trees if t.topk == 2 and float(f"{t.tau:.2f}") > 3],
        "num_draft_tokens<=16 num_steps>=5": [t for t in trees if t.num_draft_tokens <= 16 and t.num_steps >= 5],
        "8_2_": [t for t in trees if "8_2_" in t.shape.name],
    }.items():
        field.fill(wanted)
        assert shown.count() == len(kept) > 0
        assert part.locator("output").inner_text() == f"{len(kept)} of {len(trees)} trees"
    field.fill("colour=3")
    assert part.locator("output").inner_text() == "no column colour"
    field.fill("")
    assert shown.count() == len(trees) and part.locator("output").inner_text() == ""


def read_trees() -> list[ReplayedTree]:
    best = report.json.loads(report.METRICS_FILE.read_text())["best_checkpoint"]
    return ReplayedTree.read(best)


def download(page: Any, name: str) -> tuple[str, list[dict[str, str]]]:
    with page.expect_download() as started:
        page.get_by_role("button", name=f"Download {name} as CSV", exact=True).click()
    text = Path(started.value.path()).read_text(encoding="utf-8")
    return started.value.suggested_filename, list(csv.DictReader(io.StringIO(text)))


def test_every_table_is_downloaded_as_csv(open_page: Open) -> None:
    page = open_page(1920)
    page.evaluate(OPEN_ALL)
    assert page.get_by_role("button", name="as CSV").count() == page.locator("table").count()
    caption = page.locator(".results caption").first.inner_text().strip()
    name, rows = download(page, caption)
    assert name == re.sub(r"[^a-z0-9_]+", "-", caption.lower()) + ".csv"
    cells = {row.tree: row for row in ResultRow.read_table() if str(row.checkpoint) in caption}
    assert len(rows) == len(cells) + 1 and rows[-1]["tree"] == "plain decoding"
    for row in rows[:-1]:
        cell = cells["t" + row["tree"].split()[0]]
        assert row["speedup (95% interval)"] == f"{cell.speedup:.2f}"
        low, high = (f"{value:.2f}" for value in (cell.speedup_low, cell.speedup_high))
        assert row["speedup (95% interval) note"] == f"({low}-{high})"


# DVC's plots


def browse(page: Path, *flags: str) -> str:
    """The document after its scripts have run, every host unknown."""
    assert CHROMIUM
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND",
        "--allow-file-access-from-files", "--virtual-time-budget=10000", f"--user-data-dir={page.parent}/browser", *flags,
    ]  # fmt: skip
    return subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120).stdout


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
