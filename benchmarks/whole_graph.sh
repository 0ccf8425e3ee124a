#!/usr/bin/env bash
# Every stage once, in order, without DVC: for a machine that has torch but not our installation (a lent GPU).
#
#   benchmarks/whole_graph.sh DEVICE DTYPE [CELL ...]     cells as "WORKLOAD CHECKPOINT TREE"
#
# Edits params.yaml's target in place, so run it in a copy. Prints each stage's closing lines and seconds.
set -euo pipefail
device=$1 dtype=$2
shift 2
sed -i -E "/^target:/,/^[a-z]/ s/^(  dtype:) [a-z0-9]+/\1 $dtype/; /^target:/,/^[a-z]/ s/^(  device:) [a-z0-9:]+/\1 $device/" params.yaml
grep -nE "^  (dtype|device):" params.yaml | head -2

stage() {
  local begin=$SECONDS
  python3 -m "stages.$@" 2>/tmp/stage.err | tail -4 || { tail -20 /tmp/stage.err; exit 1; }
  echo "== $* took $((SECONDS - begin)) s"
}
for name in fix_data prepare_target sample_target extract_hiddens init_draft check_overfit \
  "train_draft e003" "train_draft e009" "replay_trees e003" "replay_trees e009"; do
  # shellcheck disable=SC2086 - the name carries its argument
  stage $name
done
for cell in "$@"; do
  # shellcheck disable=SC2086
  stage benchmark $cell
done
