#!/usr/bin/env bash
# On a lent machine of two GPUs, in three calls: embedded targets and drafts that lie in .arts/RECIPE are replayed there, served
# by SGLang's kit, then put under seed 002's loads. What it found goes to $OUT as it comes.
#   benchmarks/gpu_served.sh replay    (the stages' wheels in /tmp/site; 80 s)
#   benchmarks/gpu_served.sh serve     (the kit in /tmp/kit; a cell takes a minute: seven each on both GPUs)
#   benchmarks/gpu_served.sh load
set -u
part=$1
copy() { mkdir -p "$2" && cp -r benchmarks data dvc.yaml params.yaml pipeline published recipes stages templates draft_configs tests "$1"/* "$2"; }
one() { # GPU FOLDER FLAGS...
  local gpu=$1 name=$2 log=log-$RANDOM.txt; shift 2
  (cd "/tmp/served/$name" && CUDA_VISIBLE_DEVICES=$gpu python3 -m benchmarks.served "${name%+*}" --part "$part" "$@" >"$log" 2>&1
   tar czf "$OUT/$name.part" results data/prompts log-*.txt .scratch/served 2>/dev/null; mv "$OUT/$name.part" "$OUT/$name.tar.gz"
   tail -n 30 "$log" | sed "s/^/$name: /")
}
recorded() { # what a server with a draft says of itself and of one request: what tests/serving/double.py is to say
  local port=
  for _ in $(seq 100); do
    port=$(pgrep -af 'sglang.launch_server.*EAGLE3' | grep -oP -- '--port \K[0-9]+' | head -n 1)
    [ -n "$port" ] && curl -sf "http://127.0.0.1:$port/health" >/dev/null && break
    sleep 2
  done
  curl -s "http://127.0.0.1:$port/server_info" >"$OUT/server_info.json"
  curl -s "http://127.0.0.1:$port/generate" -H 'Content-Type: application/json' \
    -d '{"input_ids": [5, 6, 7, 8], "sampling_params": {"temperature": 0, "max_new_tokens": 12}}' >"$OUT/generate.json"
}
begun=$SECONDS
if [ "$part" = replay ]; then
  for name in weather-tiny weather-tiny-moe weather-tiny-vl; do copy ".arts/$name" "/tmp/served/$name"; done
  one 0 weather-tiny --workloads eval code_gen chat completion sweep & one 0 weather-tiny-moe & one 0 weather-tiny-vl & wait
  cp -r /tmp/served/weather-tiny /tmp/served/weather-tiny+b
elif [ "$part" = serve ]; then # one server at a time on a GPU: SGLang sizes its cache by what is free while it loads
  recorded &
  one 0 weather-tiny-vl --concurrency 4 &
  one 1 weather-tiny-moe --concurrency 4 &
  wait
else
  { one 0 weather-tiny --workloads chat; one 0 weather-tiny --workloads sweep; } &
  { one 1 weather-tiny+b --workloads completion
    (cd /tmp/served/weather-tiny+b && CUDA_VISIBLE_DEVICES=1 python3 -m benchmarks.bench_serving artifacts/target 2>&1 | tee "$OUT/bench_serving.txt"); } &
  wait
fi
tar cJf "$OUT/kernels.tar.xz" -C /tmp/kit triton tvm 2>/dev/null # compiled ones, to be carried again: a first start takes a minute
echo "all of $part: $((SECONDS - begun)) s"
