// Launches, right and wrong ones, and what their reports are to show beside them: for the tests of the report.
#pragma once

#include <cmath>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "octile/tile/tile.h"
#include "puzzles/elementwise_kernels.h"
#include "puzzles/products_kernels.h"
#include "puzzles/rows_kernels.h"
#include "report/write_report.h"

namespace octile::tile::report_pages {

using puzzles::elementwise::MaskedAdd;
using puzzles::products::BatchedMatmul;
using puzzles::rows::LongSoftmax;

struct Page {
  Report report;
  ReportPage page;
};

inline Array<f32> normal(const char* name, std::vector<std::int64_t> shape, float scale = 1.0f) {
  Array<f32> result(name, std::move(shape));
  std::mt19937 random(static_cast<unsigned>(result.size()));
  std::normal_distribution<float> distribution(0.0f, scale);
  for (std::int64_t i = 0; i < result.size(); ++i) result.set(i, distribution(random));
  return result;
}

inline std::vector<float> added(const Array<f32>& x) {
  std::vector<float> result;
  for (std::int64_t i = 0; i < x.size(); ++i) result.push_back(x[i] + 10.0f);
  return result;
}

// ---- Kernels that are wrong ----

struct WideMask {  // the mask forgets where x ends
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto v = t.load(x + i, i < n0 + 20);
    t.store(z + i, v + 10.0f, i < n0 + 20);
  }
};

struct NoOther {  // the masked lanes of the load have no value
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int length, auto b1) const {
    const auto row = t.program_id(0);
    auto total = t.full(c<1>, 0.0f);
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      total += sum(t.load(x + (row * length + j), j < length));
    }
    t.store(z + (row + t.arange(c<1>)), total);
  }
};

struct NarrowMask {  // safe, but the last rows are never written, and one column is off by one
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, auto b0, auto b1) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto j = col(t.program_id(1) * b1 + t.arange(b1));
    const auto sum = t.load(x + i, i < n0, 0.0f) + t.load(y + j, j < n1, 0.0f);
    t.store(z + j * n0 + i, where(i == 7, sum + 1.0f, sum), (i < n0) & (j < n1 - 3));
  }
};

struct RacyQuantize {  // the tensor's maximum, found by all programs at once, and used right away
  TILE_KERNEL void operator()(auto& t, auto x, auto scale, auto q, int n, auto b) const {
    const auto i = t.program_id(0) * b + t.arange(b);
    const auto v = t.load(x + i, i < n, 0.0f);
    t.store(scale, maximum(t.load(scale), max(abs(v)) / 127.0f));
    t.store(q + i, cast<s8, Round::even>(clamp(v / t.load(scale), -127.0f, 127.0f)), i < n);
  }
};

struct Negative {  // reads one element to the left: x[-1] in the first program, and z before anything wrote it
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n, auto b) const {
    const auto i = t.program_id(0) * b + t.arange(b);
    t.store(z + i, t.load(x + (i + (-1)), i < n, 0.0f) + t.load(z + i, i < n, 0.0f), i < n);
  }
};

struct Histogram {  // indices that are data, steps back and of three, atomics; x is read past its end
  TILE_KERNEL void operator()(auto& t, auto x, auto h, auto z, int n, auto b) const {
    const auto i = t.program_id(0) * b + t.arange(b);
    const auto v = t.load(x + i, i < n, 0);
    t.atomic_add(h + v, 1, i < n);
    t.store(z + (i * (-3) + (n * 3 - 3)), v, (i < n) & (i % 2 == 0));
    const auto w = t.load(x + (v * 7 + (n - 40)), i < n, 0);
    t.store(z + (i * 3 + 1), w, i < n);
  }
};

struct Overlap {  // in the planes after the first, programs write one element and two of the next one's
  TILE_KERNEL void operator()(auto& t, auto z, int n, auto b) const {
    const auto i = t.program_id(0) * b + t.arange(b * c<2>);
    t.store(z + i, cast<f32>(i), (i < n) & (t.arange(b * c<2>) < b + t.program_id(0) / 4));
  }
};

// ---- Pages ----

inline Page masked_add() {
  auto x = normal("x", {200});
  Array<f32> z("z", {200});
  Page p{launch(CheckedCpu{}, Grid{7}, MaskedAdd{}, x, z, 200, c<32>), {}};
  p.page.title = "Puzzle 2: masked add";
  p.page.statement = "z[i] = x[i] + 10, in blocks of 32 where 32 does not divide the length";
  p.page.facts = {{"sizes", "n0 = 200"}, {"blocks", "b0 = 32"}, {"seed", "0"}};
  p.page.command = "octile puzzles run 2 --report out.html";
  p.page.version = "octile";
  p.page.tensors = {tensor_values(x), tensor_values(z, added(x))};
  return p;
}

inline Page masked_add_wrong() {
  auto x = normal("x", {200});
  Array<f32> z("z", {200});
  Page p{launch(CheckedCpu{}, Grid{7}, WideMask{}, x, z, 200, c<32>), {}};
  p.page.title = "Puzzle 2, with a mask that is too wide";
  p.page.facts = {{"sizes", "n0 = 200"}, {"blocks", "b0 = 32"}};
  p.page.tensors = {tensor_values(x), tensor_values(z, added(x))};
  return p;
}

inline Page long_sum_wrong() {
  auto x = normal("x", {4, 200});
  Array<f32> z("z", {4});
  Page p{launch(CheckedCpu{}, Grid{4}, NoOther{}, x, z, 200, c<32>), {}};
  p.page.title = "Puzzle 7, without other";
  std::vector<float> expected(4, 0.0f);
  for (int i = 0; i < 800; ++i) expected[static_cast<std::size_t>(i / 200)] += x[i];
  p.page.tensors = {tensor_values(x), tensor_values(z, expected)};
  return p;
}

inline Page outer_add_wrong() {
  auto x = normal("x", {100}), y = normal("y", {90});
  Array<f32> z("z", {90, 100});
  Page p{launch(CheckedCpu{}, Grid{4, 3}, NarrowMask{}, x, y, z, 100, 90, c<32>, c<32>), {}};
  p.page.title = "Puzzle 4, safe and wrong";
  std::vector<float> expected;
  for (int i = 0; i < 9000; ++i) expected.push_back(x[i % 100] + y[i / 100]);
  p.page.tensors = {tensor_values(x), tensor_values(y), tensor_values(z, expected)};
  return p;
}

inline Page softmax() {
  auto x = normal("x", {4, 200}, 3.0f);
  Array<f32> z("z", {4, 200});
  Page p{launch(CheckedCpu{}, Grid{4}, LongSoftmax{}, x, z, 4, 200, c<1>, c<32>), {}};
  p.page.title = "Puzzle 8: softmax of long rows";
  std::vector<double> expected(800);
  for (int i = 0; i < 4; ++i) {
    double highest = -1e30, total = 0;
    for (int j = 0; j < 200; ++j) highest = std::max<double>(highest, x[i * 200 + j]);
    for (int j = 0; j < 200; ++j) total += std::exp(x[i * 200 + j] - highest);
    for (int j = 0; j < 200; ++j) {
      expected[static_cast<std::size_t>(i * 200 + j)] = std::exp(x[i * 200 + j] - highest) / total;
    }
  }
  p.page.tensors = {tensor_values(x), tensor_values(z, expected)};
  return p;
}

inline Page matmul() {
  constexpr int kN0 = 40, kN1 = 50, kN2 = 3, kMiddle = 33;
  auto x = normal("x", {kN2, kN0, kMiddle}), y = normal("y", {kN2, kMiddle, kN1});
  Array<f32> z("z", {kN2, kN0, kN1});
  Page p{
      launch(CheckedCpu{}, Grid{3, 4, 3}, BatchedMatmul{}, x, y, z, kN0, kN1, kN2, kMiddle, c<16>, c<16>, c<1>, c<16>),
      {}};
  p.page.title = "Puzzle 11: batched matmul";
  p.page.facts = {{"sizes", "3 × (40 × 33) @ (33 × 50)"}, {"blocks", "16 × 16 × 1, 16 at a time"}};
  std::vector<double> expected;
  for (int b = 0; b < kN2; ++b) {
    for (int i = 0; i < kN0; ++i) {
      for (int j = 0; j < kN1; ++j) {
        double sum = 0;
        for (int k = 0; k < kMiddle; ++k) {
          sum += static_cast<double>(x[(b * kN0 + i) * kMiddle + k]) * y[(b * kMiddle + k) * kN1 + j];
        }
        expected.push_back(sum);
      }
    }
  }
  p.page.tensors = {tensor_values(x), tensor_values(y), tensor_values(z, expected)};
  return p;
}

inline Page matmul_wrong() {  // right except for the last plane
  Page p = matmul();
  p.page.title = "Puzzle 11: the last matrix is wrong";
  std::vector<double>& expected = p.page.tensors[2].expected;
  for (std::size_t k = 2 * 40 * 50 + 50; k < expected.size(); k += 7) expected[k] += 1;
  return p;
}

inline Page overlap() {
  Array<f32> z("z", {3, 4, 8});
  std::vector<float> expected;
  for (int k = 0; k < 96; ++k) expected.push_back(static_cast<float>(k));
  Page p{launch(CheckedCpu{}, Grid{12}, Overlap{}, z, 96, c<8>), {}};
  p.page.title = "Programs overlap";
  p.page.tensors = {tensor_values(z, expected)};
  return p;
}

inline Page racy_quantizer() {
  auto x = normal("x", {1000});
  Array<f32> scale("scale", {1}, {1e-8f});
  Array<s8> q("q", {1000});
  Page p{launch(CheckedCpu{}, Grid{8}, RacyQuantize{}, x, scale, q, 1000, c<128>), {}};
  p.page.title = "Quantize with the tensor's maximum, in one launch";
  p.page.tensors = {tensor_values(x), tensor_values(scale), tensor_values(q)};
  return p;
}

inline Page negative() {
  auto x = normal("x", {6, 10});
  Array<f32> z("z", {6, 10});
  Page p{launch(CheckedCpu{}, Grid{4}, Negative{}, x, z, 60, c<16>), {}};
  return p;
}

inline Page histogram() {
  constexpr int kN = 100;
  Array<s32> x("x", {kN}), h("h", {2, 5}), z("z", {3 * kN});
  for (int i = 0; i < kN; ++i) x.set(i, i * i % 11);  // 0, 1, 3, 4, 5, 9
  h.fill(0);
  Page p{launch(CheckedCpu{}, Grid{4}, Histogram{}, x, h, z, kN, c<32>), {}};
  p.page.tensors = {tensor_values(x), tensor_values(h), tensor_values(z)};
  return p;
}

inline Page sampled() {
  auto x = normal("x", {4096});
  Array<f32> z("z", {4096});
  Page p{launch(CheckedCpu{.max_records = 100}, Grid{128}, MaskedAdd{}, x, z, 4090, c<32>), {}};
  p.page.title = "More accesses than are kept";
  return p;
}

inline Page large() {
  auto x = normal("x", {1500, 1100});
  Array<f32> z("z", {1500, 1100});
  Page p{launch(CheckedCpu{}, Grid{375}, LongSoftmax{}, x, z, 1500, 1100, c<4>, c<512>), {}};
  p.page.tensors = {tensor_values(x), tensor_values(z)};
  return p;
}

inline constexpr const char* kHostile = "</script><script>document.title = 'broken'</script><!-- <b>\"&'";

inline Page hostile() {
  Array<f32> x(kHostile, {40}, std::vector<float>(40, 1.0f)), z("z", {40});
  Page p{launch(CheckedCpu{}, Grid{2}, MaskedAdd{}, x, z, 40, c<32>), {}};
  p.page.title = p.page.statement = p.page.command = p.page.version = kHostile;
  p.page.facts = {{kHostile, kHostile}};
  std::string text;
  for (int i = 0; i < 40; ++i) text += std::string(kHostile) + "\n";
  p.page.sources = {{"elementwise_kernels.h", text}};
  return p;
}

inline const std::pair<const char*, std::function<Page()>> kPages[] = {{"masked_add", masked_add},
                                                                       {"masked_add_wrong", masked_add_wrong},
                                                                       {"long_sum_wrong", long_sum_wrong},
                                                                       {"outer_add_wrong", outer_add_wrong},
                                                                       {"softmax", softmax},
                                                                       {"matmul", matmul},
                                                                       {"matmul_wrong", matmul_wrong},
                                                                       {"overlap", overlap},
                                                                       {"racy_quantizer", racy_quantizer},
                                                                       {"negative", negative},
                                                                       {"histogram", histogram},
                                                                       {"sampled", sampled},
                                                                       {"large", large},
                                                                       {"hostile", hostile}};

}  // namespace octile::tile::report_pages
