#!/bin/sh
# Builds and runs the benchmark of the tile language's CPU executors beside plain loops: about ten seconds.
# Usage, from anywhere: cpu.sh [compiler]
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
"${1:-c++}" -std=c++20 -O3 -march=native -ffp-contract=off -fno-trapping-math -fno-math-errno -Wno-psabi -I"$root/tile" \
  "$root/tile/bench/cpu_bench.cpp" "$root"/tile/*.cpp -pthread -o "$build/cpu_bench"
"$build/cpu_bench"
