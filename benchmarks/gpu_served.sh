#!/usr/bin/env bash
# On a lent machine of two GPUs, in three calls: embedded targets and drafts that lie in .arts/RECIPE are replayed there, served
# by SGLang's kit, then put under seed 002's loads. What it found goes to $OUT as it comes.
#   benchmarks/gpu_served.sh replay    (the stages' wheels in /tmp/site; 80 s)
#   benchmarks/gpu_served.sh serve     (the kit in /tmp/kit, from serving-env, so that the vision patch applies, or
#                                      weather-tiny-vl is served a third below replay; seven cells each on both GPUs, 140 s)
#   benchmarks/gpu_served.sh load
set -u
part=$1
copy() { mkdir -p "$2" && cp -r benchmarks data dvc.yaml params.yaml pipeline published recipes stages templates draft_configs tests "$1"/* "$2"; }
one() { # GPU FOLDER FLAGS...
  local gpu=$1 name=$2 log=log-$RANDOM.txt; shift 2
  (cd "/tmp/served/$name" && CUDA_VISIBLE_DEVICES=$gpu python3 -m benchmarks.served "${name%+*}" --part "${part/load/serve}" "$@" >"$log" 2>&1
   tar czf "$OUT/${name/+/-}.part" results data/prompts log-*.txt .scratch/served 2>/dev/null; mv "$OUT/${name/+/-}.part" "$OUT/${name/+/-}.tar.gz"
   tail -n 30 "$log" | sed "s/^/$name: /")
}
begun=$SECONDS
if [ "$part" = replay ]; then
  for name in weather-tiny weather-tiny-moe weather-tiny-vl; do copy ".arts/$name" "/tmp/served/$name"; done
  one 0 weather-tiny --workloads eval code_gen chat completion sweep & one 0 weather-tiny-moe & one 0 weather-tiny-vl & wait
  cp -r /tmp/served/weather-tiny /tmp/served/weather-tiny+b
elif [ "$part" = serve ]; then # six servers on a GPU: their starts are what takes long
  one 0 weather-tiny-vl --concurrency 4 --jobs 6 &
  one 1 weather-tiny-moe --concurrency 4 --jobs 6 &
  wait
else
  { one 0 weather-tiny --workloads chat; one 0 weather-tiny --workloads sweep; } &
  one 1 weather-tiny+b --workloads completion &
  wait
fi
tar cJf "$OUT/kernels.tar.xz" -C /tmp/kit triton tvm 2>/dev/null # compiled ones, to be carried again: a first start takes a minute
echo "all of $part: $((SECONDS - begun)) s"
