"""The copy of params.yaml that a stage began with: the user may edit params.yaml for the next run meanwhile.

pipeline/input_snapshot.py makes the copy and names it to the stage in an environment variable, which the stage's own processes
inherit.
"""

import os
from pathlib import Path

COPY_VARIABLE = "AERIE_STARTED_PARAMS"


def locate_started_params(path: Path) -> Path:
    """Return the copy of params.yaml for this stage, or `path` itself where no run has made one."""
    return Path(os.environ.get(COPY_VARIABLE, path))
