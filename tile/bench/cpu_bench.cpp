// The tile language's CPU executors beside plain loops, on one thread: tile/bench/cpu.sh builds and runs it. Times are
// the thread's own, and the two take turns; a line is the median of the rounds.
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "octile/tile/tile.h"
#include "puzzles/elementwise_kernels.h"
#include "puzzles/linear_kernels.h"
#include "puzzles/products_kernels.h"
#include "puzzles/rows_kernels.h"

namespace octile::tile {
namespace {

using puzzles::elementwise::MaskedAdd;
using puzzles::linear::QuantizeRows;
using puzzles::products::BatchedMatmul;
using puzzles::rows::LongSoftmax;

constexpr int kRounds = 9;

double seconds() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

template <class F>
double time_of(const F& f) {  // of one call; short ones are repeated
  double start = seconds();
  f();
  double once = seconds() - start;
  const int repeats = once < 2e-3 ? static_cast<int>(2e-3 / (once + 1e-9)) + 1 : 1;
  start = seconds();
  for (int i = 0; i < repeats; ++i) f();
  return (seconds() - start) / repeats;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// `work` is what one call does, in millions of `unit`.
template <class Plain, class Tile>
void compare(const char* what, const char* unit, double work, const Plain& plain, const Tile& tile) {
  std::vector<double> plain_times, tile_times, shares;
  for (int round = 0; round < kRounds; ++round) {
    const double a = time_of(plain), b = time_of(tile);
    plain_times.push_back(a);
    tile_times.push_back(b);
    shares.push_back(a / b);
  }
  std::printf("| %-44s | %7.0f | %7.0f | %3.0f %% | %s |\n", what, work / median(plain_times),
              work / median(tile_times), 100 * median(shares), unit);
}

template <class F>
void rate(const char* what, const char* unit, double work, const F& f) {
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) times.push_back(time_of(f));
  std::printf("| %-44s | %7s | %7.0f | %5s | %s |\n", what, "", work / median(times), "", unit);
}

// ---- Plain loops, written so that the compiler vectorizes them ----

__attribute__((noinline)) void plain_add(const float* x, float* z, int n) {
  for (int i = 0; i < n; ++i) z[i] = x[i] + 10.0f;
}

__attribute__((noinline)) void plain_quantize(const float* x, s8* q, float* scale, int rows, int columns) {
  for (int r = 0; r < rows; ++r, x += columns, q += columns) {
    float highest = 0;
    for (int i = 0; i < columns; ++i) highest = std::fabs(x[i]) > highest ? std::fabs(x[i]) : highest;
    const float s = std::max(highest / 127.0f, 1e-8f);
    scale[r] = s;
    for (int i = 0; i < columns; ++i) {
      float v = std::rint(x[i] / s);
      v = v > 127.0f ? 127.0f : v;
      v = v < -127.0f ? -127.0f : v;
      q[i] = static_cast<s8>(static_cast<int>(v));
    }
  }
}

__attribute__((noinline)) void plain_softmax(const float* x, float* z, int rows, int columns) {
  for (int r = 0; r < rows; ++r, x += columns, z += columns) {
    float highest = -kInfinity, total = 0;
    for (int i = 0; i < columns; ++i) highest = x[i] > highest ? x[i] : highest;
    for (int i = 0; i < columns; ++i) {
      z[i] = std::exp(x[i] - highest);
      total += z[i];
    }
    for (int i = 0; i < columns; ++i) z[i] /= total;
  }
}

Array<f32> normal(const char* name, std::vector<std::int64_t> shape) {
  Array<f32> result(name, std::move(shape));
  std::mt19937 random(1);
  std::normal_distribution<float> distribution;
  for (std::int64_t i = 0; i < result.size(); ++i) result.set(i, distribution(random));
  return result;
}

void require(bool same, const char* what) {
  if (same) return;
  std::fprintf(stderr, "%s: the results differ\n", what);
  std::exit(1);
}

constexpr FastCpu kFast{.threads = 1};

template <int kBlock>
void add(const char* what, int n) {
  auto x = normal("x", {n});
  Array<f32> z("z", {n}), expected("expected", {n});
  const int used = n - 3;  // ragged
  expected.fill(0);
  z.fill(0);
  compare(
      what, "MB/s", 8e-6 * used, [&] { plain_add(x.data(), expected.data(), used); },
      [&] { launch(kFast, Grid{cdiv(used, kBlock)}, MaskedAdd{}, x, z, used, c<kBlock>); });
  require(std::equal(z.data(), z.data() + n, expected.data()), what);
}

void rows() {
  constexpr int kRows = 2048, kColumns = 4096;
  auto x = normal("x", {kRows, kColumns});
  Array<f32> z("z", {kRows, kColumns}), plain_z("plain_z", {kRows, kColumns});
  Array<f32> scale("scale", {kRows}), plain_scale("plain_scale", {kRows});
  Array<s8> q("q", {kRows, kColumns}), plain_q("plain_q", {kRows, kColumns});
  const double elements = 1e-6 * kRows * kColumns;
  compare(
      "row quantizer, 2048 x 4096, blocks of 1024", "M elements/s", elements,
      [&] { plain_quantize(x.data(), plain_q.data(), plain_scale.data(), kRows, kColumns); },
      [&] { launch(kFast, Grid{kRows}, QuantizeRows{}, x, q, scale, kRows, kColumns, c<1>, c<1024>); });
  require(std::equal(q.data(), q.data() + q.size(), plain_q.data()), "row quantizer");
  require(std::equal(scale.data(), scale.data() + kRows, plain_scale.data()), "row quantizer, scales");
  compare(
      "softmax, 2048 x 4096, blocks of 256", "M elements/s", elements,
      [&] { plain_softmax(x.data(), plain_z.data(), kRows, kColumns); },
      [&] { launch(kFast, Grid{kRows}, LongSoftmax{}, x, z, kRows, kColumns, c<1>, c<256>); });
  bool near = true;  // 4096 roundings of the plain sum, and those of the exponents up to 10
  for (std::int64_t i = 0; i < z.size(); ++i) near = near && std::fabs(z[i] - plain_z[i]) <= 4200 * 0x1p-24f * z[i];
  require(near, "softmax");
}

void checked() {
  constexpr int kSize = 1 << 22, kRows = 256, kColumns = 4096, kSide = 256;
  auto x = normal("x", {kSize});
  Array<f32> z("z", {kSize});
  rate("checked: masked add, blocks of 1024", "M accesses/s", 2e-6 * kSize,
       [&] { launch(CheckedCpu{}, Grid{kSize / 1024}, MaskedAdd{}, x, z, kSize, c<1024>); });
  auto r = normal("r", {kRows, kColumns});
  Array<f32> s("s", {kRows, kColumns});
  rate("checked: softmax, 256 x 4096, blocks of 256", "M accesses/s", 3e-6 * kRows * kColumns,
       [&] { launch(CheckedCpu{}, Grid{kRows}, LongSoftmax{}, r, s, kRows, kColumns, c<1>, c<256>); });
  auto a = normal("a", {1, kSide, kSide}), b = normal("b", {1, kSide, kSide});
  Array<f32> p("p", {1, kSide, kSide});
  rate("checked: matmul, 256 cubed, blocks of 32", "M accesses/s", 1e-6 * kSide * kSide * (2.0 * kSide / 32 + 1), [&] {
    launch(CheckedCpu{}, Grid{kSide / 32, kSide / 32}, BatchedMatmul{}, a, b, p, kSide, kSide, 1, kSide, c<32>, c<32>,
           c<1>, c<32>);
  });
}

}  // namespace
}  // namespace octile::tile

int main() {
  using namespace octile::tile;
  std::printf("| %-44s |   plain |    tile | share | unit |\n| --- | ---: | ---: | ---: | --- |\n",
              "kernel, one thread");
  add<256>("masked add of 2^24 floats, blocks of 256", 1 << 24);
  add<1024>("masked add of 2^24 floats, blocks of 1024", 1 << 24);
  rows();
  checked();
}
