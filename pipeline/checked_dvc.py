"""Run DVC with two changes: cached copies are compared with their names before use, and dvc.lock is replaced whole.

    python -m pipeline.checked_dvc repro      # as `dvc repro`

Outputs are hard links into DVC's cache (.dvc/config), so that no data is stored twice. DVC makes both read-only and then
trusts a read-only copy. Root can still write into it: an output edited in place changes the cached copy too, and DVC would
restore the edit as the result of the stage. DVC hashes copies that are not read-only; this module has it hash all of them,
by its own record of sizes, times and inodes, so that an unchanged copy costs one look-up.

DVC empties dvc.lock and then writes it, 30 ms or longer: a kill leaves it cut, and who reads it without DVC's lock finds
it empty.
"""

import logging
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

from stages.runtime import atomic

DAMAGED = "damaged"  # folder of the cache, beside DVC's own `files` and `runs`

log = logging.getLogger("dvc.damaged")  # below DVC's own, whose handlers print warnings


def change_dvc() -> None:
    """Make every repository that this process opens from now on compare cached copies, and rename. Safe to call twice."""
    from dvc import dvcfile
    from dvc.cachemgr import CacheManager  # 0.2 s

    original = CacheManager.__init__
    if getattr(original, "checks", False):
        return
    dvcfile.modify_yaml = partial(_modify_whole, dvcfile.modify_yaml)

    def initialize(manager: Any, *words: Any, **options: Any) -> None:
        original(manager, *words, **options)
        # The local cache only: a remote's copies are checked by its `verify` option (docs/dvc.md).
        if manager.local is not None:
            manager.local.check = MethodType(_check_copy, manager.local)

    initialize.checks = True  # type: ignore[attr-defined]
    CacheManager.__init__ = initialize


@contextmanager
def _modify_whole(modify: Callable[..., AbstractContextManager[Any]], path: str, fs: Any = None) -> Iterator[Any]:
    """Yield the content of dvc.lock or dvc.yaml to change; replaces `modify_yaml` of DVC, which works on a copy here."""
    file = Path(path).resolve()
    with atomic.write_file(file) as temporary:
        if file.exists():
            shutil.copy2(file, temporary)
        with modify(str(temporary), fs=fs) as data:
            yield data


def _check_copy(cache: Any, oid: str, check_hash: bool = True, _info: dict[str, Any] | None = None) -> Any:
    """Return the metadata of a cached copy; replaces `LocalHashFileDB.check` of dvc-data.

    Raises:
        FileNotFoundError: there is no copy.
        ObjectFormatError: its bytes do not have the hash in its name; it is set aside, and DVC finds none.
    """
    from dvc_data.hashfile.hash import hash_file
    from dvc_data.hashfile.meta import Meta
    from dvc_objects.errors import ObjectFormatError

    path = cache.oid_to_path(oid)
    info = _info or cache.fs.info(path)
    if not check_hash:
        return Meta.from_info(info)
    meta, found = hash_file(path, cache.fs, cache.hash_name, cache.state, info=info)
    if found.value and found.value.partition(".")[0] == oid.partition(".")[0]:
        if stat.S_IMODE(info["mode"]) != cache.CACHE_MODE:
            cache.protect(path)
        return meta
    # Out of DVC's folders, and not removed: its bytes may be an edit that the user wants.
    root = Path(path).parents[3]  # of CACHE/files/md5/ab/cdef...
    (root / DAMAGED).mkdir(exist_ok=True)
    kept = root / DAMAGED / f"{oid}.{Path(path).stat().st_mtime_ns}"  # the same name may be damaged twice, differently
    os.replace(path, kept)
    log.warning(
        f"the cached copy {oid} does not have the bytes it was kept with: a program wrote into an output in place. It is set "
        f"aside as {os.path.relpath(kept)}; the stage that made it runs again, or `dvc fetch` brings the result back"
    )
    raise ObjectFormatError(f"{path} is damaged")


if __name__ == "__main__":
    from dvc.cli import main

    change_dvc()
    sys.exit(main(sys.argv[1:]))
