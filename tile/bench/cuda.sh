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
parts="elementwise rows tiles integers bytes_forward float_dots"
case $action in
build)
  mkdir -p "$folder"
  flags="-std=c++20 -O3 -arch=sm_90a --fmad=false -I$root/tile --diag-suppress=554,20011,20012,20013,20014,20015 \
-Xcompiler -ffp-contract=off,-fno-trapping-math,-fno-math-errno"
  {
    for part in 0 1; do
      echo "nvcc $flags -Xcompiler -fPIC -shared -Xlinker -s -DTILE_PART=$part $root/tile/bench/cuda_bench.cu \
-o $folder/bench$part.so"
    done
    for part in $parts; do
      for layout in 0 1 2 3; do
        echo "nvcc $flags -Xlinker -s -DTILE_LAYOUT=$layout -DTILE_PART=$part $root/tile/tests/cuda_test.cu \
$root/tile/fast.cpp -o $folder/$part$layout"
      done
    done
  } | xargs -P "$(nproc)" -I{} sh -c '{}'
  ;;
test)
  wrong=0 ran=0
  for program in $(for part in $parts; do ls "$folder/$part"[0-3] 2>/dev/null; done); do
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
