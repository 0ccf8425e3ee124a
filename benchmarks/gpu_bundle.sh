#!/usr/bin/env bash
# Bundles for a GPU machine that reaches no package registry and has Python 3.12, torch and transformers.
#
#   benchmarks/gpu_bundle.sh site OUT_DIR          -> site.tar.xz: DVC and what the stages import, as installed in .venv (50 MB)
#   benchmarks/gpu_bundle.sh graph FOLDER OUT_DIR  -> NAME.tar.xz: a project of benchmarks/gpu_graph.py whose graph was made on CPUs,
#                                                     without its cache and hidden states, for its served cells there
#
# An archive has its name when it is whole. The engines: shared/gpu. A session of such a machine: benchmarks/gpu_steps.sh.
set -euo pipefail

# Not of the machine's own image, and imported by the stages or by DVC.
NEEDED="dvc polars pydantic httpx aiohttp orjson ruamel.yaml ruamel.yaml.clib psutil nvidia-ml-py toon-format typer rich tqdm jinja2 textalloc gguf"
THERE="numpy torch scipy matplotlib pandas pyarrow pillow networkx setuptools"
PLATFORMS=$(printf -- '--platform manylinux_2_%s_x86_64 ' 34 31 28 27 24 17 12 5; echo --platform manylinux2014_x86_64 --platform manylinux1_x86_64)

list_packages() {
  .venv/bin/python - "$NEEDED" "$THERE" <<'PY'
import importlib.metadata as metadata
import sys
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

needed, there = (words.split() for words in sys.argv[1:])
found, target = {}, {"extra": "", "python_version": "3.12", "python_full_version": "3.12.3"}
while needed:
    name = canonicalize_name(needed.pop())
    if name in found or name in there:
        continue
    try:
        package = metadata.distribution(name)
    except metadata.PackageNotFoundError:  # of another Python or platform
        continue
    found[name] = package.version
    required = map(Requirement, package.requires or [])
    needed += [r.name for r in required if r.marker is None or r.marker.evaluate(target)]
print(*(f"{name}=={version}" for name, version in found.items()), sep="\n")
PY
}

fetch() {
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $PLATFORMS -d "$1" "$2"
}

bundle_site() {
  local out=$1 work
  work=$(mktemp -d)
  trap 'rm -rf "$work"' RETURN
  for package in $(list_packages); do
    fetch "$work" "$package" 2>"$work/error" ||
      python3 -m pip wheel -q --no-deps -w "$work" "$package" # pure Python without a wheel
  done
  mkdir "$work/site"
  for wheel in "$work"/*.whl; do unzip -qo "$wheel" -d "$work/site"; done
  tar -C "$work" -cf - site | xz -T0 -9 >"$out/site.part"
  mv "$out/site.part" "$out/site.tar.xz"
}

bundle_graph() {
  local folder=$1 out=$2 name
  name=$(basename "$folder")
  tar -C "$(dirname "$folder")" -cf - --exclude="$name/data/hiddens" --exclude="$name/.dvc/cache" --exclude="$name/.dvc/tmp" \
    --exclude="$name/.scratch" --exclude='optimizer*' "$name" | xz -T0 -6 >"$out/$name.part"
  mv "$out/$name.part" "$out/$name.tar.xz"
}

mkdir -p "${@: -1}"
"bundle_$1" "${@:2}"
