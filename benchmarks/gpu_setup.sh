#!/usr/bin/env bash
# The first call of a GPU session: copy the repository and the packages, and start the drivers, one for each GPU.
#
#   bash benchmarks/gpu_setup.sh SITE_ARCHIVE DRIVERS_FOLDER     # gpu0.sh, gpu1.sh ...: benchmarks/gpu_steps.sh; afterwards in /tmp:
#
#   /tmp/repo   this tree, which a driver runs: the next call's copy may replace the files here
#   /tmp/site   DVC and what the stages import (benchmarks/gpu_bundle.sh site): PYTHONPATH=/tmp/site:/tmp/repo
#   /tmp/res    results; order.txt says what has run
set -euo pipefail

site=$1 drivers=$2
mkdir -p /tmp/res /tmp/repo /tmp/gpu
touch /tmp/res/order.txt
tar -C /tmp -xJf "$site" &
tar -cf - --exclude=.git --exclude="./$(dirname "$site")" . | tar -C /tmp/repo -xf -
cp -r "$drivers"/. /tmp/gpu/
wait $!
(cd /tmp/repo && PYTHONPATH=/tmp/site:/tmp/repo python3 -c "import dvc, polars, pydantic, orjson, torch; print(torch.__version__, torch.cuda.device_count())")
for driver in /tmp/gpu/gpu[0-9].sh; do
  setsid nohup bash "$driver" >"/tmp/res/$(basename "$driver" .sh).log" 2>&1 &
done
sleep 2
nvidia-smi --query-gpu=name,memory.used --format=csv
nproc
df -h /tmp | tail -n 1
cat /tmp/res/order.txt
