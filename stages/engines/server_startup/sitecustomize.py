"""Start-up module of the servers that `benchmark_served` starts: loads the patch of SGLang that AERIE_SGLANG_PATCH names.

Python imports a `sitecustomize` that PYTHONPATH finds in every process, so the patch also reaches the processes that a server
spawns. It needs nothing of aerie: an engine's environment does not have it.
"""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

FOLDER = str(Path(__file__).parent)

if os.environ.get("AERIE_SGLANG_PATCH") == "vision":
    import sglang_vision_patch  # type: ignore[import-not-found]  # beside this file, on PYTHONPATH

    sglang_vision_patch.install()

# The environment's own sitecustomize, which this one hides.
_others = [folder for folder in sys.path if folder and str(Path(folder).resolve()) != str(Path(FOLDER).resolve())]
if _spec := importlib.machinery.PathFinder.find_spec("sitecustomize", _others):
    _module = importlib.util.module_from_spec(_spec)
    assert _spec.loader
    _spec.loader.exec_module(_module)
