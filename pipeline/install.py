"""Install this project and what it needs into .venv, with uv if it is on PATH, else with pip.

    python3 pipeline/install.py                    # what `make run` starts; TORCH, UV: as for make
    python3 pipeline/install.py --torch cpu        # PyTorch from its own index: cpu, cu126, cu130 ...
    python3 pipeline/install.py --extra test       # and what the tests need

A second start after a cut goes on: complete downloads are in the cache of uv or pip, half-unpacked packages are unpacked
again. This file runs before anything is installed, so it imports the standard library only.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections import deque
from collections.abc import Iterator
from pathlib import Path

VENV = Path(".venv")
PYTHON = VENV / "bin" / "python"
CONSTRAINTS = "constraints.txt"
TORCH_INDEX = "https://download.pytorch.org/whl"
RESUMING_PIP = "pip>=25.2"  # continues a download where the line was cut; Python 3.11's own starts it again

# Sums of the sizes of all wheels for Python 3.11 on Linux x86_64, torch 2.13.0, November 2026. GB of 1e9 bytes.
CPU_GB, CUDA_GB, EXTRA_GB = 0.5, 3.0, 0.2

# Patience with a bad line; the user's own settings win. An older pip ignores what it does not know.
NETWORK_SETTINGS = {
    "PIP_RETRIES": "10",
    "PIP_RESUME_RETRIES": "20",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
    "PIP_NO_INPUT": "1",
    "UV_HTTP_RETRIES": "10",
    "UV_HTTP_TIMEOUT": "120",
}

# What is shown where the output is no terminal; of downloads those of 10 MB or more.
PHASES = re.compile(
    r"(Resolved|Prepared|Installed) \d+ packages|Downloading \S+ \(\d{2,}(\.\d+)? ?(MB|MiB|GiB)\)|[Ww]arning: |WARNING: Retrying"
)
TAIL_LINES = 30  # of an installation that failed


def main(words: list[str]) -> None:
    """Install, with a line for each phase, or the installer's own bars on a terminal."""
    parser = argparse.ArgumentParser(prog="pipeline/install.py", description="Install into .venv.")
    parser.add_argument("--torch", default="", help="cpu, or CUDA's release as cu130; default: what your index has")
    parser.add_argument("--extra", default="", help="an optional group of pyproject.toml, as test")
    parser.add_argument("--uv", default=shutil.which("uv") or "", help="path of uv; empty: pip")
    given = parser.parse_args(words)
    if given.torch and not given.torch.isalnum():
        sys.exit(f"aerie: TORCH is {given.torch!r}, expected cpu, or a release of CUDA as cu130")
    os.environ.update({name: os.environ.get(name, value) for name, value in NETWORK_SETTINGS.items()})
    tool = "uv" if given.uv else "pip"
    print(f"installing into {VENV} with {tool}: {describe_size(given.torch, given.extra)}", flush=True)
    for command in build_commands(given.uv, given.torch, given.extra):
        if status := run_installer(command):
            other = "; with pip instead of uv: make run UV=" if given.uv else ""
            sys.exit(
                f"aerie: {tool} ended with {status}, see above. Run the same again: complete downloads are kept{other}"
            )


def describe_size(torch: str, extra: str) -> str:
    """Return what is downloaded in words. What is installed or in a cache is not downloaded again."""
    if extra and PYTHON.exists():
        return f"up to {EXTRA_GB} GB to download for {extra}"
    more = f", and {EXTRA_GB} GB for {extra}" if extra else ""
    if torch == "cpu":
        return f"up to {CPU_GB} GB to download{more}"
    if torch:
        return f"up to {CUDA_GB} GB to download, most of it CUDA{more}"
    return (
        f"up to {CUDA_GB} GB to download where your index has PyTorch with CUDA, as PyPI for Linux; without CUDA {CPU_GB} GB "
        f"(make run TORCH=cpu){more}"
    )


def build_commands(uv: str, torch: str, extra: str) -> Iterator[list[str]]:
    """Yield the commands that install, and make .venv usable for the next one where they are asked for one by one."""
    project = ["-c", CONSTRAINTS, "-e", f".[{extra}]" if extra else "."]
    if uv:
        if not PYTHON.exists():
            yield [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(VENV)]
        forget_half_installed()
        backend = ["--torch-backend", torch, "--reinstall-package", "torch"] if torch else []
        yield [uv, "pip", "install", "--python", str(PYTHON), *backend, *project]
        return
    pip = [str(PYTHON), "-m", "pip", "install"]
    if not PYTHON.exists() or subprocess.run([*pip[:-1], "--version"], capture_output=True).returncode:
        make_environment()
    forget_half_installed()
    yield [*pip, "--quiet", RESUMING_PIP]
    if torch:
        # Alone: what torch needs comes from the user's index, in the versions of constraints.txt. Anew: a torch of
        # another kind has the same version.
        index = ["--index-url", f"{TORCH_INDEX}/{torch}"]
        print(
            f"torch for {torch} comes from {TORCH_INDEX}. If that can't be reached, pip retries for some minutes and stops; "
            "without TORCH it comes from your own index",
            flush=True,
        )
        yield [*pip, "--no-deps", "--force-reinstall", *index, "-c", CONSTRAINTS, read_torch_requirement()]
    yield [*pip, *project]


def make_environment() -> None:
    """Create .venv with pip, or complete one that was cut; its packages stay."""
    print(f"creating {VENV}", flush=True)
    venv.create(VENV, symlinks=True, with_pip=True)


def forget_half_installed() -> None:
    """Remove the entries of packages that a kill has cut, which uv and pip would take for installed.

    Both write INSTALLER after a package's own files.
    """
    for entry in VENV.glob("lib/python*/site-packages/*.dist-info"):
        if not (entry / "INSTALLER").exists():
            shutil.rmtree(entry)


def read_torch_requirement() -> str:
    """Return pyproject.toml's requirement of torch."""
    needs = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    (found,) = [need for need in needs if need.startswith("torch>")]
    return str(found)


def run_installer(command: list[str]) -> int:
    """Run uv or pip -> its exit status. Its own bars are shown on a terminal, elsewhere a line for each phase."""
    if sys.stdout.isatty():
        return subprocess.run(command).returncode
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            tail.append(line)
            if phase := describe_phase(line):
                print(phase, flush=True)
    if process.returncode:
        print("".join(tail), end="", flush=True)
    return process.returncode


def describe_phase(line: str) -> str | None:
    """Return what to show of a line of uv's or pip's, None for most of them."""
    if line.startswith("Obtaining "):
        return "finding packages"
    if line.startswith("Installing collected packages: "):
        count = line.count(",") + 1
        return f"unpacking {count} package{'s' if count > 1 else ''}"
    return line.strip() if PHASES.match(line.strip()) else None


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit("aerie: interrupted; run the same again: complete downloads are kept")
