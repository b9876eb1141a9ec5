#!/usr/bin/env bash
# All checks of the kernels on a GPU: the tests of plans on a GPU, and then, in parallel, the full sweep of each row of the
# kernel table (alone and as a graph) and the quick sweep under compute-sanitizer's memcheck and racecheck. The tests run
# alone: one of them compares the GPU's free memory before and after a run.
#
# usage: tools/gpu_check.sh OCTILE CUDA_TEST FOLDER
#
#   OCTILE     the command, built with OCTILE_CUDA
#   CUDA_TEST  tests/octile_cuda_test of the same build
#   FOLDER     for the logs
#
# It needs only these two files and the CUDA toolkit, so they can be copied to a machine without the checkout. It prints a
# line per part; the last one counts the failures, and the exit status is 1 if there are any.
set -euo pipefail

[ $# = 3 ] || {
  sed -n '2,14s/^# \{0,1\}//p' "$0" >&2
  exit 2
}
octile=$1 cuda_test=$2 folder=$3
mkdir -p "$folder"
rm -f "$folder"/*.failed

# part NAME SUMMARY COMMAND...: runs in the background; SUMMARY matches the line of its log to show.
part() {
  local name=$1 summary=$2
  shift 2
  {
    local status=0
    timeout 600 "$@" >"$folder/$name.log" 2>&1 </dev/null || status=$?
    if [ "$status" != 0 ]; then touch "$folder/$name.failed"; fi
    printf '%-40s exit %-3s %s\n' "$name" "$status" "$(grep -E "$summary" "$folder/$name.log" | tail -n 1)"
  } &
}

part tests '^\[  (PASSED|FAILED) ' "$cuda_test"
wait
rows=$("$octile" info | awk '$3 == "cuda" && $4 != "no:" { print $1 }')
[ -n "$rows" ] || {
  "$octile" info | grep -E '^[a-z0-9_]+ +[a-z0-9_]+ +cuda' >&2
  exit 1
}
sanitizer=(compute-sanitizer --error-exitcode 9)
for row in $rows; do
  check=("$octile" check --device cuda --kernel "$row")
  part "sweep.$row" 'passed, [0-9]+ failed' "${check[@]}"
  part "memcheck.$row" 'ERROR SUMMARY' "${sanitizer[@]}" --tool memcheck "${check[@]}" --quick --no-graph --own-allocations
  part "racecheck.$row" 'RACECHECK SUMMARY' "${sanitizer[@]}" --tool racecheck "${check[@]}" --quick --no-graph
done
wait
failed=$(find "$folder" -name '*.failed' | wc -l)
for mark in "$folder"/*.failed; do
  [ -e "$mark" ] || continue
  grep -hE -A 4 'FAILED|Invalid|Error: Race|error:' "${mark%.failed}.log" | cut -c 1-240 | head -n 12
done
echo "$failed of $((3 * $(wc -w <<<"$rows") + 1)) parts failed; logs in $folder"
[ "$failed" = 0 ]
