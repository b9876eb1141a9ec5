#!/bin/sh
# Builds the GPU tests and benchmarks of the tile language, runs the tests, then the benchmarks beside Triton and torch.
# Needs nvcc, and a python3 with torch and triton. Usage, from anywhere: tile_cuda.sh [build folder]
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
build=${1:-/tmp/octile_tile_cuda}
mkdir -p "$build"
flags="-std=c++20 -O3 -arch=sm_90a --fmad=false -I$root/tile --diag-suppress=554,20011,20012,20013,20014,20015 \
-Xcompiler -ffp-contract=off,-fno-trapping-math,-fno-math-errno"
{
  for part in 0 1; do
    echo "nvcc $flags -Xcompiler -fPIC -shared -DTILE_PART=$part $root/bench/tile_cuda_bench.cu -o $build/bench$part.so"
  done
  for part in elementwise rows tiles integers bytes_forward float_dots; do
    for layout in 0 1 2 3; do
      echo "nvcc $flags -DTILE_LAYOUT=$layout -DTILE_PART=$part $root/tests/tile_cuda_test.cu -o $build/$part$layout"
    done
  done
} | xargs -P "$(nproc)" -I{} sh -c '{}' || echo "something did not compile"
wrong=0
for part in elementwise rows tiles integers bytes_forward float_dots; do
  for layout in 0 1 2 3; do
    printf '%s ' "$part"
    timeout 60 "$build/$part$layout" || wrong=$((wrong + 1))
  done
done
echo "test programs that failed: $wrong"
timeout 240 python3 "$root/bench/tile_cuda_bench.py" "$build/bench0.so" "$build/bench1.so" || wrong=$((wrong + 1))
exit $wrong
