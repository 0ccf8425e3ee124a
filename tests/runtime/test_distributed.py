"""Ranks end with the stage that started them."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from stages.runtime import distributed
from stages.telemetry import fork_server


def test_a_rank_whose_stage_died_before_it_could_ask_ends_itself() -> None:
    """Bug: killed between the fork and prctl, a stage left a rank that wrote beside the next run."""
    elsewhere = os.getpid() + 1  # the parent that has died; this process took its place
    orphan = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        preexec_fn=partial(distributed._die_with_parent, elsewhere),
    )
    try:
        assert orphan.wait(30) == -signal.SIGKILL
    finally:
        orphan.kill()


def test_ranks_are_told_of_the_fork_server_by_the_name_they_read() -> None:
    source = Path(distributed.__file__).read_text()
    assert f'"{fork_server.RANKS_VARIABLE}"' in source and f'"{fork_server.ADDRESS_VARIABLE}"' in source
