#!/usr/bin/env bash
# On a lent machine of two GPUs, in two calls: embedded targets and drafts that lie in .arts/RECIPE are replayed there, then
# served by SGLang's kit, with seed 002's scenarios. What it found goes to $OUT as it comes.
#   benchmarks/gpu_served.sh replay    (the stages' wheels in /tmp/site)
#   benchmarks/gpu_served.sh serve     (the kit in /tmp/kit)
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
else
  recorded &
  # Servers at once: the wait for released memory would wait for the others'
  for name in moe vl; do sed -i 's/RELEASE_S = 1.0, 30.0/RELEASE_S = 1.0, 0.0/' /tmp/served/weather-tiny-$name/stages/benchmark_served.py; done
  for load in code_gen chat sweep; do one 0 weather-tiny --workloads $load; done &
  { one 1 weather-tiny-moe --jobs 3 --concurrency 4 --mem-fraction 0.1 & moe=$!
    one 1 weather-tiny-vl --jobs 3 --concurrency 4 --mem-fraction 0.1 & wait $moe $!
    one 1 weather-tiny+b --workloads completion
    (cd /tmp/served/weather-tiny+b && CUDA_VISIBLE_DEVICES=1 python3 -m benchmarks.bench_serving artifacts/target 2>&1 | tee "$OUT/bench_serving.txt"); } &
  wait
fi
echo "all of $part: $((SECONDS - begun)) s"
