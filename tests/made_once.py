"""What the report's tests would otherwise compute for every page from the same input: plots, templates and read publications.

A plot is kept by all that it is drawn from, so a test that changes the data gets its own.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest

from stages.published import tables as published
from stages.reporting import plots

PLOTS: dict[bytes, Any] = {}
ENVIRONMENTS: dict[tuple[str, ...], jinja2.Environment] = {}
PUBLICATIONS: dict[tuple[tuple[str, bytes], ...], Any] = {}

render_svg, Environment, read_publications = plots.render_svg, jinja2.Environment, published.read_publications


def make_once(patch: pytest.MonkeyPatch) -> None:
    """Let pages share them as long as `patch` holds."""
    patch.setattr(plots, "render_svg", _render_svg)
    patch.setattr(jinja2, "Environment", _build_environment)
    patch.setattr(published, "read_publications", _read_publications)


def _render_svg(draw: Callable[[Any], Any], *settings: Any) -> Any:
    try:
        key = pickle.dumps((draw, settings))
    except (pickle.PicklingError, AttributeError):  # of a function that a test has put in its place
        return render_svg(draw, *settings)
    if key not in PLOTS:
        PLOTS[key] = render_svg(draw, *settings)
    return PLOTS[key]


def _build_environment(*, loader: jinja2.FileSystemLoader, **settings: Any) -> jinja2.Environment:
    key = tuple(map(str, loader.searchpath))
    if key not in ENVIRONMENTS:
        ENVIRONMENTS[key] = Environment(loader=loader, **settings)
    return ENVIRONMENTS[key]


def _read_publications(folder: Path = published.PUBLISHED_FOLDER) -> Any:
    key = tuple((str(file), file.read_bytes()) for file in sorted(folder.rglob("*")) if file.is_file())
    if key not in PUBLICATIONS:
        PUBLICATIONS[key] = read_publications(folder)
    return PUBLICATIONS[key]
