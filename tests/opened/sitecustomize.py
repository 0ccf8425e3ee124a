"""Record which files each stage opens: Python imports this module first, where its folder is on PYTHONPATH.

`python -m stages.NAME WORDS`, started in a project, leaves the list in $AERIE_OPENED/NAME WORDS.json when it ends.
"""

import atexit
import json
import os
import sys
from pathlib import Path

import watch


def _leave(started: watch.Watch, name: str) -> None:
    Path(os.environ["AERIE_OPENED"], f"{name}.json").write_text(json.dumps(started.opened()))


if sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2].startswith("stages.") and "AERIE_OPENED" in os.environ:
    atexit.register(_leave, watch.Watch(Path()), " ".join(sys.orig_argv[2:]))
