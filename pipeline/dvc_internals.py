"""The private functions of DVC that aerie calls, for entries of its run-cache, one stage at a time.

DVC's public commands (`dvc push --run-cache`, `dvc pull --run-cache`) transfer every entry of the cache each time, a file for
each run of each stage, and `StageCache.restore` writes into the workspace. tests/pipeline/test_dvc_remote.py fails where a
version of DVC has changed one of these functions.
"""

from typing import Any


def compute_run_cache_key(stage: Any) -> str:
    """Return the run-cache's key: a hash of the command, the parameters, the dependencies' bytes and the outputs' paths.

    Raises:
        ValueError: DVC keeps no run-cache of the stage.
    """
    from dvc.stage.cache import _can_hash, _get_stage_hash

    if not _can_hash(stage):
        raise ValueError(f"{stage.addressing} can't be made elsewhere, for DVC keeps no run-cache of it")
    return str(_get_stage_hash(stage))


def load_cached_run(repo: Any, stage: Any) -> Any:
    """Return a DVC stage with the outputs of the newest run with these inputs; None if the run-cache here has none."""
    from dvc.stage.cache import _can_hash

    if not _can_hash(stage):
        return None
    entry = repo.stage_cache._load(stage)
    return entry and repo.stage_cache._create_stage(entry)
