"""Ranks end with the stage that started them."""

import os
import signal
import subprocess
import sys
from functools import partial

from stages.runtime import distributed


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
