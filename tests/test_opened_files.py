"""What stages open is what dvc.yaml declares: the kernel's record of the small run beside deps and outs."""

import json
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from tests.opened.declared import undeclared

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
