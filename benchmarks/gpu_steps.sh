# Steps of a GPU session whose machine is given back after 30 s without a call: source it in a detached driver.
#
#   mkdir -p /tmp/res; . benchmarks/gpu_steps.sh
#   step NAME SECONDS COMMAND...   run a command with a limit; its output is /tmp/res/NAME.log, its status a line of order.txt
#   keep NAME FOLDER PATH...       add files of FOLDER to the results as NAME.tar.xz
#   wait_for FILE                  wait until a later call has brought a kit or a graph
#   stay SECONDS                   stay in a call, and bring all results back in $OUT at its end; returns at once without a driver
#
# What travels in a call has 64 MiB, tar's headers with it: `git ls-files -z | tar --null -T - -cf - FOLDERS | wc -c` before the
# first. A larger archive is cut (`split -b 26000000`), brought by two calls and joined by `cat`. The calls of a session are issued
# together, so one that is refused must end those after it at once.
#
# A driver, one for each GPU, is started by benchmarks/gpu_setup.sh; it sets CUDA_VISIBLE_DEVICES and a TMPDIR of its own: the turns in
# which servers are measured (stages/measuring/measurement_lock.py) are kept by locks in TMPDIR.

RESULTS=${RESULTS:-/tmp/res}

step() {
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  echo "$(date +%T) $name begins" >>$RESULTS/order.txt
  timeout -k 5 "$limit" "$@" >"$RESULTS/$name.log" 2>&1
  local status=$?
  echo "$(date +%T) $name: status $status, $((SECONDS - began)) s" >>$RESULTS/order.txt
  return $status
}

keep() {
  local name=$1 folder=$2
  shift 2
  (cd "$folder" && tar -cf - --ignore-failed-read "$@" 2>/dev/null | xz -T4 -6 >"$RESULTS/$name.tar.xz.part" && mv "$RESULTS/$name.tar.xz.part" "$RESULTS/$name.tar.xz")
}

wait_for() {
  until [ -e "$1" ]; do sleep 0.5; done
}

collect() {
  # Cells and grids of projects that are still at work, in case no later call comes.
  tar -cJf $RESULTS/partial.tar.xz --ignore-failed-read /tmp/{*,*/*}/results/{cells,cost} 2>/dev/null
  tar -C /tmp -cf - --exclude='*.part' res | xz -T4 -2 >"$OUT/results.tar.xz"
}

stay() {
  local until=$((SECONDS + $1))
  if ! [ -e $RESULTS/order.txt ]; then
    echo "no driver has begun here: $RESULTS/order.txt is missing; give the machine back" >&2
    return 1
  fi
  while [ $SECONDS -lt $until ] && ! [ -e $RESULTS/ended0 -a -e $RESULTS/ended1 ]; do sleep 2; done
  collect
  cat $RESULTS/order.txt
}
