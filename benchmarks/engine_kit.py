"""SGLang as a kit (shared/gpu) for machines without a package registry: how it starts, and the flags it needs there."""

import sys
from pathlib import Path

KIT_FLAGS = [  # what runs without the kernels that the kit leaves out
    "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
    "--disable-custom-all-reduce", "--cuda-graph-backend-prefill", "disabled", "--mm-feature-transport", "cpu",
    "--mm-attention-backend", "triton_attn",
]  # fmt: skip
# In place of "disabled": SGLang's own default, for passes of fewer sizes. A pass of less than half a size runs without a graph.
PREFILL_GRAPHS = [
    "--cuda-graph-backend-prefill", "breakable",
    "--cuda-graph-bs-prefill", "4", "8", "16", "32", "64", "128", "256", "512", "1024",
]  # fmt: skip
KIT_VERSION = "0.5.17"
LAUNCHER = '#!/usr/bin/env bash\n. /tmp/kit/env.sh\nshift\nexec python3 -m sglang.launch_server "$@"\n'
DOUBLE = [sys.executable, "-m", "tests.engines.engine_double", "serve"]  # of the tests, for a rehearsal without a GPU


def list_sglang_flags(prefill_graphs: bool = False) -> list[str]:
    """Return the flags of the kit's SGLang, which reads prompts without CUDA graphs, or with them."""
    if not prefill_graphs:
        return KIT_FLAGS
    first = KIT_FLAGS.index(PREFILL_GRAPHS[0])
    return [*KIT_FLAGS[:first], *PREFILL_GRAPHS, *KIT_FLAGS[first + 2 :]]


def write_launcher(folder: Path) -> None:
    """Write the program of a project's serving-env, which starts SGLang in its kit's own environment, and its version."""
    environment = folder / "serving-env/sglang"
    program = environment / "bin/sglang"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(LAUNCHER)
    program.chmod(0o755)
    (environment / f"lib/python3/site-packages/sglang-{KIT_VERSION}.dist-info").mkdir(parents=True, exist_ok=True)
