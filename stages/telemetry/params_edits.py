"""Tell of edits of params.yaml while a stage is at work that DVC itself runs (`dvc repro`), which records them as its inputs.

Under `aerie run`, Prefect and `python -m pipeline.checked_dvc repro` a stage reads a copy (stages/params/started_params.py).
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from stages.params.section import PARAMS_FILE
from stages.params.started_params import COPY_VARIABLE

MISSING = object()


@contextmanager
def warn_about_params_edits(stage: str) -> Iterator[None]:
    """Print a warning after the block where DVC itself runs the stage and params.yaml is not as it was before."""
    is_watched = "DVC_STAGE" in os.environ and not {COPY_VARIABLE, "RANK"} & {*os.environ}
    before = _read_values() if is_watched else {}
    yield
    if is_watched and (edited := _list_differences(before, _read_values())):
        print(
            f"warning: {PARAMS_FILE} was edited while {stage} was at work ({', '.join(edited)}), and DVC records its result with "
            f"the edited values. If {stage} reads one of these keys, run: dvc repro -f -s {stage}. `aerie run` and "
            "`python -m pipeline.checked_dvc repro` record what a stage began with",
            file=sys.stderr,
        )


def _read_values() -> dict[str, Any]:
    """Return the values of params.yaml; none where it can't be read, which the stage itself tells."""
    try:
        found = YAML(typ="safe").load(PARAMS_FILE.read_text())
    except (OSError, YAMLError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _list_differences(before: Any, after: Any, key_path: str = "") -> list[str]:
    """Return the keys whose values differ, as `train_draft.learning_rate`."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return [] if before == after else [key_path]
    names = dict.fromkeys([*before, *after])
    inner = (
        _list_differences(before.get(name, MISSING), after.get(name, MISSING), f"{key_path}.{name}".lstrip("."))
        for name in names
    )
    return [key for keys in inner for key in keys]
