"""SGLang and vLLM as kits (shared/gpu) for machines without a package registry: how they start, and the flags they need there."""

import subprocess
import sys
from pathlib import Path

KIT_FLAGS = {  # what runs without the kernels that the kits leave out
    "sglang": [
        "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
        "--disable-custom-all-reduce", "--cuda-graph-backend-prefill", "disabled", "--mm-feature-transport", "cpu",
        "--mm-attention-backend", "triton_attn",
    ],
    "vllm": ["--kv-cache-memory-bytes", "4294967296", "--enforce-eager"],
}  # fmt: skip
# In place of "disabled": SGLang's own default, for passes of fewer sizes. A pass of less than half a size runs without a graph.
PREFILL_GRAPHS = [
    "--cuda-graph-backend-prefill", "breakable",
    "--cuda-graph-bs-prefill", "4", "8", "16", "32", "64", "128", "256", "512", "1024",
]  # fmt: skip
KIT_VERSIONS = {"sglang": "0.5.17", "vllm": "0.26.0"}
LAUNCHERS = {
    "sglang": '. /tmp/kit/env.sh\nshift\nexec python3 -m sglang.launch_server "$@"\n',
    "vllm": '. /tmp/vllm_kit/env.sh\nexec vllm "$@"\n',
}
DOUBLE = [sys.executable, "-m", "tests.serving.engine_double", "serve"]  # of the tests, for a rehearsal without a GPU


def list_sglang_flags(prefill_graphs: bool = False) -> list[str]:
    """Return the flags of the kit's SGLang, which reads prompts without CUDA graphs, or with them."""
    flags = KIT_FLAGS["sglang"]
    if not prefill_graphs:
        return flags
    first = flags.index(PREFILL_GRAPHS[0])
    return [*flags[:first], *PREFILL_GRAPHS, *flags[first + 2 :]]


def write_launchers(folder: Path) -> None:
    """Write the programs of a project's serving-env, which start an engine in its kit's own environment, and its version."""
    for engine, lines in LAUNCHERS.items():
        program = folder / f"serving-env/{engine}/bin/{engine}"
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/usr/bin/env bash\n{lines}")
        program.chmod(0o755)
        packages = folder / f"serving-env/{engine}/lib/python3/site-packages"
        (packages / f"{engine}-{KIT_VERSIONS[engine]}.dist-info").mkdir(parents=True, exist_ok=True)


def build_sglang_command(kit: str) -> list[str]:
    """Return the command that starts SGLang in the kit's environment; that of the tests' double without a kit."""
    if not kit:
        return DOUBLE
    settings = subprocess.run(
        ["bash", "-c", f"PYTHONPATH= KIT={kit}; . {kit}/env.sh; env"], capture_output=True, text=True
    )
    names = ("PYTHONPATH", "TVM_FFI", "TRITON", "HF_HUB", "TRANSFORMERS", "TORCHDYNAMO", "SGLANG", "CUDA_HOME")
    kept = [line for line in settings.stdout.splitlines() if line.startswith(names)]
    return ["env", *kept, "python3", "-m", "sglang.launch_server"]
