#!/bin/sh
# The GPU tests of the tile language, and its benchmarks beside Triton and torch. FOLDER is where the programs are.
#   cuda.sh build FOLDER            compiles them (nvcc, no GPU; stripped, so that they are quick to carry)
#   cuda.sh test FOLDER             runs the test programs of the folder
#   cuda.sh bench FOLDER [NAME ...] runs all benchmarks, or those named (python3 with torch and triton)
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
action=${1:?build, test or bench}
folder=${2:?a folder}
shift 2
programs=""  # a part of the tests and the number of a layout
for part in elementwise rows tiles integers bytes_forward float_dots; do
  programs="$programs ${part}0 ${part}1 ${part}2 ${part}3"
done
for part in rows tiles bytes_forward float_dots rows_of_warpgroups warpgroups by_wgmma; do
  programs="$programs ${part}4 ${part}5"
done
programs="$programs tf326 large7"
case $action in
build)
  mkdir -p "$folder"
  flags="-std=c++20 -O3 -arch=sm_90a --fmad=false -I$root/tile --diag-suppress=554,20011,20012,20013,20014,20015 \
-Xcompiler -ffp-contract=off,-fno-trapping-math,-fno-math-errno"
  {
    for part in 0 1 2 3 4; do
      echo "nvcc $flags -I$root/src -Xcompiler -fPIC -shared -Xlinker -s -DTILE_PART=$part $root/tile/bench/cuda_bench.cu \
$root/tile/autotune/store.cpp $root/src/base/output.cpp -o $folder/bench$part.so"
    done
    for program in $programs; do
      part=${program%?}
      echo "nvcc $flags -Xlinker -s -DTILE_LAYOUT=${program#"$part"} -DTILE_PART=$part $root/tile/tests/cuda_test.cu \
$root/tile/fast.cpp -o $folder/$program"
    done
  } | xargs -P "$(nproc)" -I{} sh -c '{}'
  ;;
test)
  wrong=0 ran=0
  for program in $(for program in $programs; do ls "$folder/$program" 2>/dev/null; done); do
    ran=$((ran + 1))
    printf '%s ' "$(basename "$program")"
    timeout 60 "$program" || wrong=$((wrong + 1))
  done
  echo "test programs: $ran, failed: $wrong"
  [ "$ran" -gt 0 ] && [ "$wrong" -eq 0 ]
  ;;
bench)
  python3 "$root/tile/bench/cuda_bench.py" "$folder" "$@"
  ;;
*)
  echo "cuda.sh: no action $action; there are build, test and bench" >&2
  exit 2
  ;;
esac
