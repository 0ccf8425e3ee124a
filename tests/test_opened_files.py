"""What stages open is what dvc.yaml declares: the kernel's record of the small run beside deps and outs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.conftest import ROOT
from tests.opened.declared import undeclared
from tests.opened.watch import opening

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")


def test_every_stage_of_the_small_run_opens_only_what_it_declares(small_run: Path) -> None:
    """Bug: the house test compared imports only, so a stage could read data that is no dependency of it.

    On a worker and in a clone with `--pull --allow-missing` such data is not there, and here it is stale unnoticed.
    """
    stages = YAML(typ="safe").load((small_run / "dvc.lock").read_text())["stages"]
    found = {}
    for name, stage in stages.items():
        words = stage["cmd"].removeprefix("python -m ").replace('"$DVC_STAGE"', name)
        opened = json.loads((small_run.with_suffix(".opened") / f"{words}.json").read_text())
        assert opened, f"{name}: nothing was recorded"
        if extra := undeclared(opened, stage):
            found[name] = extra
    assert not found, f"add what is read to the deps of these stages in dvc.yaml: {found}"


def test_native_readers_and_children_are_seen(tmp_path: Path) -> None:
    """A file read by polars's own code and one by a child process; none of before, and no folder."""
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}/table.csv").write_text("x\n1\n")
    (tmp_path / "a/table.csv").read_text()
    with opening(tmp_path) as opened:
        import polars as pl

        assert pl.scan_csv(tmp_path / "b/table.csv").collect().height == 1
        subprocess.run([sys.executable, "-c", "open('c/table.csv').read()"], cwd=tmp_path, check=True)
        list((tmp_path / "a").iterdir())
    assert opened == ["b/table.csv", "c/table.csv"]


def test_a_dep_is_a_file_or_all_in_a_folder_under_any_name_of_the_graph() -> None:
    stage = {
        "deps": ["data/a", "drafts/${item.from}/draft"],
        "outs": [{"out/h": {"push": False}}],
        "metrics": ["m.json"],
    }
    allowed = [
        "data/a",
        "data/a/b/c",
        "drafts/e003/draft/config.json",
        "out/h/x",
        "m.json",
        ".m.json.17.part",
        "params.yaml",
        "tiny/x",
    ]
    other = ["data/ab", "drafts/e003/state/x", "m.json.part"]
    assert undeclared([*allowed, *other], stage, ["tiny"]) == other
    real = YAML(typ="safe").load((ROOT / "dvc.yaml").read_text())["stages"]["train_draft"]["do"]
    assert undeclared(["drafts/e003/draft/model.safetensors", "data/fixed/train.parquet"], real) == [
        "data/fixed/train.parquet"
    ]
