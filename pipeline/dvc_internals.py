"""The private functions of DVC that aerie calls or replaces: for entries of its run-cache, one stage at a time; for dvc.lock; for
the file of its locks.

DVC's public commands (`dvc push --run-cache`, `dvc pull --run-cache`) transfer every entry of the cache each time, a file for
each run of each stage, and `StageCache.restore` writes into the workspace. tests/pipeline/test_dvc_internals.py fails where a
version of DVC has changed one of these functions.
"""

import io
import json
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from ruamel.yaml import YAML
from ruamel.yaml.representer import SafeRepresenter


def compute_run_cache_key(stage: Any) -> str:
    """Return the run-cache's key: a hash of the command, the parameters, the dependencies' bytes and the outputs' paths.

    Raises:
        ValueError: DVC keeps no run-cache of the stage.
    """
    from dvc.stage.cache import _can_hash, _get_stage_hash

    if not _can_hash(stage):
        raise ValueError(f"{stage.addressing} can't be made elsewhere, for DVC keeps no run-cache of it")
    return str(_get_stage_hash(stage))


def locate_run_cache_entries(repo: Any, key: str) -> Path:
    """Return the folder of the entries of this key, which may not exist."""
    return Path(repo.stage_cache.cache_dir, key[:2], key)


def load_cached_run(repo: Any, stage: Any) -> Any:
    """Return a DVC stage with the outputs of the newest run with these inputs; None if the run-cache here has none."""
    entry = repo.stage_cache._load(stage)
    return entry and repo.stage_cache._create_stage(entry)


def mend_lock_list(folder: Path = Path(".dvc/tmp")) -> None:
    """Empty DVC's list of who reads and writes which path if it is cut, as a full disk leaves it.

    DVC would refuse to work for good. The processes that were in it have ended, or end with the same error.
    """
    from dvc.lock import make_lock  # 0.2 s
    from dvc.rwlock import RWLOCK_FILE, RWLOCK_LOCK

    def is_whole() -> bool:
        try:
            return isinstance(json.loads((folder / RWLOCK_FILE).read_bytes()), dict)
        except FileNotFoundError:
            return True
        except ValueError:
            return False

    if not is_whole():
        with make_lock(str(folder / RWLOCK_LOCK), tmp_dir=str(folder), wait=True):
            if not is_whole():  # another process may have been first, or was writing it
                (folder / RWLOCK_FILE).write_text("{}", encoding="utf-8")


def use_libyaml_for_lock_file() -> None:
    """Have this process's DVC read and write dvc.lock with libyaml: 0.3 s after each stage instead of 1.3. Safe to call twice.

    DVC takes ruamel.yaml's Python parser and emitter, which keep comments; a file that DVC generates has none. The bytes are
    the same.
    """
    from dvc import dvcfile
    from dvc.utils.serialize._common import _modify_data
    from dvc.utils.serialize._yaml import parse_yaml

    original = dvcfile.modify_yaml
    if getattr(original, "is_fast", False):
        return

    @contextmanager
    def modify(path: str, fs: Any = None) -> Iterator[Any]:
        is_lock = Path(path).name == dvcfile.LOCK_FILE
        opened = _modify_data(path, parse_yaml, dump_with_libyaml, fs=fs) if is_lock else original(path, fs=fs)
        with opened as data:
            yield data

    dvcfile.modify_yaml = modify
    dvcfile.modify_yaml.is_fast = True


class _LockFileRepresenter(SafeRepresenter):
    """Writes mappings in their order, and each null as a string that occurs nowhere else.

    A class of its own: `add_representer` changes a class, and SafeRepresenter is that of every YAML(typ="safe") in the process.
    """

    null = uuid.uuid4().hex

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sort_base_mapping_type_on_output = False


_LockFileRepresenter.add_representer(type(None), lambda to, _: to.represent_str(to.null))
_LockFileRepresenter.add_representer(OrderedDict, lambda to, mapping: to.represent_dict(mapping))


def dump_with_libyaml(data: Any, stream: TextIO) -> None:
    """Write what DVC's own `_dump` writes, but for the quotes of strings with quotes or line ends.

    That leaves nulls out, also the space before them in a mapping.
    """
    yaml: Any = YAML(typ="safe")
    yaml.default_flow_style = False
    yaml.Representer = _LockFileRepresenter
    text = io.StringIO()
    yaml.dump(data, text)
    null = _LockFileRepresenter.null
    stream.write(text.getvalue().replace(f": {null}\n", ":\n").replace(null, ""))
