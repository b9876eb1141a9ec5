// Sizes for tests of the CUDA executor: each kernel runs on a machine (a GPU, or emulated blocks of threads) and on the
// fast CPU executor, and the results are compared: bit for bit, or within the error bound of a sum for dots of
// floats. Outputs start as poison on both sides.
#pragma once

#include <array>
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "bench/attention.h"
#include "bench/gradients.h"
#include "cuda_kernels.h"
#include "octile/tile/cuda.h"
#include "octile/tile/fast.h"
#include "puzzles/elementwise_kernels.h"
#include "puzzles/linear_kernels.h"
#include "puzzles/products_kernels.h"
#include "puzzles/rows_kernels.h"

namespace octile::tile::cuda_cases {

using puzzles::elementwise::BlockedOuterAdd;
using puzzles::elementwise::MaskedAdd;
using puzzles::linear::Forward;
using puzzles::linear::QuantizeRows;
using puzzles::products::BatchedMatmul;
using puzzles::rows::LongSoftmax;
using puzzles::rows::LongSum;

inline Array<f32> normal(const char* name, std::vector<std::int64_t> shape, float scale = 1.0f) {
  Array<f32> result(name, std::move(shape));
  std::mt19937 random(static_cast<unsigned>(result.size()));
  std::normal_distribution<float> distribution(0.0f, scale);
  for (std::int64_t i = 0; i < result.size(); ++i) result.set(i, distribution(random));
  return result;
}
template <class T>
Array<T> rounded(const Array<f32>& from) {
  Array<T> result(from.name(), from.shape());
  for (std::int64_t i = 0; i < from.size(); ++i) result.set(i, scalar::Cast<T, Round::even>{}(from[i]));
  return result;
}
inline Array<f32> absolute(const Array<f32>& from) {
  Array<f32> result(from.name(), from.shape());
  for (std::int64_t i = 0; i < from.size(); ++i) result.set(i, std::fabs(from[i]));
  return result;
}

// Machine: has `template <class L> void launch(Grid, kernel, args...)` on arrays in host memory.
template <class L, class Machine>
class Cases {
 public:
  explicit Cases(Machine& machine) : machine_(machine) {}
  int wrong() const { return wrong_; }
  int runs() const { return runs_; }

  void all() {
    elementwise();
    rows();
    tiles();
    integers();
    bytes_forward();
    float_dots();
    if constexpr (L::kWgmma) {
      rows_of_warpgroups();
      warpgroups();
      by_wgmma();
      if constexpr (L::kTf32) tf32();
    }
  }

  void elementwise() {
    for (const int n : {1, 31, 128, 1009, 4096, 5000}) {
      auto x = normal("x", {n}, 3.0f);
      Array<f32> z("z", {n}), mine("z", {n});
      check("masked add", z, mine, {cdiv(n, 1024)}, MaskedAdd{}, x, Out{}, n, c<1024>);
      check("masked add, blocks of 32", z, mine, {cdiv(n, 32)}, MaskedAdd{}, x, Out{}, n, c<32>);
      for (const int first : {0, 1, 4, 7}) {
        check("add from", z, mine, {cdiv(n, 512)}, AddFrom{}, x, Out{}, first, n, c<512>);
      }
    }
    for (const auto& [n0, n1] : {std::pair{100, 90}, {1, 1}, {7, 65}, {128, 64}}) {
      auto x = normal("x", {n0}), y = normal("y", {n1});
      Array<f32> z("z", {n1, n0}), mine("z", {n1, n0});
      check("outer add", z, mine, {cdiv(n0, 32), cdiv(n1, 32)}, BlockedOuterAdd{}, x, y, Out{}, n0, n1, c<32>, c<32>);
    }
  }

  void rows() {
    for (const auto& [n, length] : {std::pair{4, 200}, {1, 1}, {5, 31}, {6, 1000}, {9, 4096}, {3, 4100}}) {
      auto x = normal("x", {n, length}, 20.0f);
      for (int j = 0; j < length && n > 4; ++j) x.set(j, j % 3 ? 0.0f : -0.0f);  // a row of zeros with both signs
      Array<f32> z("z", {n}), mine("z", {n}), y("y", {n, length}), my("y", {n, length});
      Array<s8> q("q", {n, length}), mq("q", {n, length});
      check("long sum", z, mine, {cdiv(n, 4)}, LongSum{}, x, Out{}, n, length, c<4>, c<512>);
      check("softmax", y, my, {n}, LongSoftmax{}, x, Out{}, n, length, c<1>, c<1024>);
      check("softmax, two rows", y, my, {cdiv(n, 2)}, LongSoftmax{}, x, Out{}, n, length, c<2>, c<64>);
      Array<f32> scale("scale", {n});
      check("quantize rows", q, mq, {cdiv(n, 2)}, QuantizeRows{}, x, Out{}, scale, n, length, c<2>, c<256>);
      check("row scales", z, mine, {cdiv(n, 2)}, QuantizeRows{}, x, q, Out{}, n, length, c<2>, c<256>);
    }
  }

  void tiles() {
    rearranged_tiles();
    reductions();
    pipelines();
  }
  void reductions() {
    reduce_tile<1, 1, 4>();
    reduce_tile<2, 4, 32>();
    reduce_tile<2, 32, 64>();
    reduce_tile<1, 2, 1024>();
    reduce_tile<1, 64, 8>();
  }
  void rearranged_tiles() {
    auto x = normal("x", {32, 32});
    Array<f32> z("z", {32 * 32 * 2 + 32}), mine("z", {32 * 32 * 2 + 32});
    check("rearrange", z, mine, {1}, Rearrange{}, x, Out{}, c<32>, c<32>);
    auto w = normal("w", {4, 256});
    Array<f32> doubled("doubled", {4, 256}), backwards("w", {4, 256}), my("w", {4, 256});
    check("store then load", backwards, my, {4}, StoreThenLoad{}, w, doubled, Out{}, c<256>);
    in_place<1>();
    in_place<8>();
    in_place<64>();
  }
  void pipelines() {
    for (const int n1 : {4, 100, 128}) {
      auto columns = normal("x", {9, n1});
      Array<f32> column_sums("z", {n1}), my_column_sums("z", {n1});
      check("column sums", column_sums, my_column_sums, {cdiv(n1, 32)}, ColumnSums{}, columns, Out{}, 9, n1, c<32>);
    }
    auto outer = normal("x", {4, 5 * 32}), inside = normal("y", {5, 100});
    Array<f32> nested("z", {4}), my_nested("z", {4});
    check("nested pipelines", nested, my_nested, {1}, Nested{}, outer, inside, Out{}, 5, 100, c<4>, c<32>);
    for (const int length : {1, 100, 128, 1024}) {
      auto v = normal("v", {7, length});
      Array<s32> index("index", {length});
      for (int j = 0; j < length; ++j) index.set(j, (j * 37 + 5) % length);
      Array<f32> sums("z", {7}), my_sums("z", {7});
      check("pipelined rows", sums, my_sums, {cdiv(7, 4)}, PipelinedRows{}, v, index, Out{}, 7, length, c<4>, c<32>);
      check("pipelined long rows", sums, my_sums, {7}, PipelinedRows{}, v, index, Out{}, 7, length, c<1>, c<1024>);
    }
  }

  void integers() {
    std::mt19937 random(9);
    for (const int n : {1, 77, 500}) {
      Array<s32> x("x", {cdiv(n, 4)}), z("z", {n}), mine("z", {n});
      Array<s8> bytes("bytes", {n});
      for (std::int64_t i = 0; i < x.size(); ++i) x.set(i, static_cast<s32>(random()));
      for (std::int64_t i = 0; i < n; ++i) bytes.set(i, static_cast<s8>(random()));
      check("integers", z, mine, {cdiv(n, 128)}, Integers{}, x, bytes, Out{}, n, c<128>);
      auto v = normal("v", {n}, 2.0f);
      if (n > 5) v.set(4, INFINITY), v.set(5, -INFINITY);
      Array<f16> half("half", {n}), my_half("half", {n});
      Array<bf16> brain("brain", {n}), my_brain("brain", {n});
      Array<s8> byte("byte", {n}), my_byte("byte", {n});
      Array<u8> small("small", {n}), my_small("small", {n});
      Array<s64> wide("wide", {n}), my_wide("wide", {n});
      check("casts", half, my_half, {cdiv(n, 64)}, Casts{}, v, Out{}, brain, byte, small, wide, n, c<64>);
      check("casts", brain, my_brain, {cdiv(n, 64)}, Casts{}, v, half, Out{}, byte, small, wide, n, c<64>);
      if (n > 5) v.set(3, std::nanf(""));  // 16-bit floats: the language does not define a NaN's payload
      check("casts", byte, my_byte, {cdiv(n, 64)}, Casts{}, v, half, brain, Out{}, small, wide, n, c<64>);
      check("casts", small, my_small, {cdiv(n, 64)}, Casts{}, v, half, brain, byte, Out{}, wide, n, c<64>);
      check("casts", wide, my_wide, {cdiv(n, 64)}, Casts{}, v, half, brain, byte, small, Out{}, n, c<64>);
      auto finite = normal("v", {n}, 2.0f);
      Array<s32> count("count", {8}), my_count("count", {8}), largest("largest", {2}), my_largest("largest", {2});
      Array<f32> highest("highest", {1}), my_highest("highest", {1});
      start_ = true;
      check("atomic add", count, my_count, {cdiv(n, 64)}, Atomics{}, finite, Out{}, highest, largest, n, c<64>);
      check("atomic max of floats", highest, my_highest, {cdiv(n, 64)}, Atomics{}, finite, count, Out{}, largest, n,
            c<64>);
      check("atomic max", largest, my_largest, {cdiv(n, 64)}, Atomics{}, finite, count, highest, Out{}, n, c<64>);
      start_ = false;
    }
  }

  void bytes_forward() {
    struct Size {
      int batch, in, out;
    };
    for (const Size& s : {Size{1, 1, 1}, {16, 32, 16}, {33, 100, 47}, {64, 128, 96}, {3, 257, 20}, {5, 0, 9}}) {
      std::mt19937 random(7);
      Array<s8> x("x", {s.batch, s.in}), w("w", {s.in, s.out});
      for (std::int64_t i = 0; i < x.size(); ++i) x.set(i, static_cast<s8>(static_cast<int>(random() % 255) - 127));
      for (std::int64_t i = 0; i < w.size(); ++i) w.set(i, static_cast<s8>(static_cast<int>(random() % 255) - 127));
      Array<f32> x_scale("x_scale", {1}, {0.013f});
      auto w_scale = normal("w_scale", {s.out}, 0.01f);
      Array<f16> bias("bias", {s.out}), y("y", {s.batch, s.out}), mine("y", {s.batch, s.out});
      for (int j = 0; j < s.out; ++j) {
        bias.set(j, f16(w_scale[j] * 50.0f));
      }
      check("forward", y, mine, {cdiv(s.batch, 32), cdiv(s.out, 32)}, Forward{}, x, x_scale, w, w_scale, bias, Out{},
            s.batch, s.in, s.out, c<1>, c<1>, c<32>, c<32>, c<64>);
      check("forward, blocks of 64", y, mine, {cdiv(s.batch, 64), cdiv(s.out, 64)}, Forward{}, x, x_scale, w, w_scale,
            bias, Out{}, s.batch, s.in, s.out, c<1>, c<1>, c<64>, c<64>, c<32>);
    }
  }

  void float_dots() {
    struct Size {
      int n0, n1, middle;
    };
    for (const Size& s : {Size{64, 64, 64}, {1, 1, 1}, {33, 65, 40}, {128, 96, 200}, {17, 8, 0}}) {
      auto x = normal("x", {s.n0, s.middle}), y = normal("y", {s.middle, s.n1});
      const Grid grid{cdiv(s.n0, 64), cdiv(s.n1, 64)};
      const auto blocks = [&](const char* name, const auto& kernel, auto& a, auto& b, auto& small_a, auto& small_b) {
        Array<f32> z("z", {s.n0, s.n1}), mine("z", {s.n0, s.n1}), size("z", {s.n0, s.n1});
        octile::tile::launch(FastCpu{2}, grid, kernel, small_a, small_b, size, s.n0, s.n1, s.middle, c<64>, c<64>,
                             c<32>);
        octile::tile::launch(FastCpu{2}, grid, kernel, a, b, z, s.n0, s.n1, s.middle, c<64>, c<64>, c<32>);
        machine_.template launch<L>(grid, kernel, a, b, mine, s.n0, s.n1, s.middle, c<64>, c<64>, c<32>);
        ++runs_;
        for (std::int64_t i = 0; i < z.size(); ++i) {
          // Two sums of `middle` products, each in its own order; tensor cores may truncate instead of rounding.
          const float bound = 4.0f * static_cast<float>(s.middle + 8) * 0x1p-24f * size[i] + 1e-30f;
          if (!(std::fabs(z[i] - mine[i]) <= bound)) return fail(name, i, z[i], mine[i]);
        }
      };
      auto ax = absolute(x), ay = absolute(y);
      blocks("matmul f32", Matmul{}, x, y, ax, ay);
      auto hx = rounded<f16>(x), hy = rounded<f16>(y), ahx = rounded<f16>(ax), ahy = rounded<f16>(ay);
      blocks("matmul f16", Matmul{}, hx, hy, ahx, ahy);
      auto bx = rounded<bf16>(x), by = rounded<bf16>(y), abx = rounded<bf16>(ax), aby = rounded<bf16>(ay);
      blocks("matmul bf16", Matmul{}, bx, by, abx, aby);
      auto tx = rounded<f16>(normal("x", {s.middle, s.n0})),
           atx = rounded<f16>(absolute(normal("x", {s.middle, s.n0})));
      blocks("matmul of a transposed tile", MatmulTransposed{}, tx, hy, atx, ahy);
    }
    // Named, because nvcc's front end spells the deduced type in a way that g++ rejects.
    using Four = std::array<int, 4>;
    for (const Four& size_of : {Four{32, 32, 4, 32}, Four{17, 33, 3, 40}, Four{5, 70, 1, 50}}) {
      const int n0 = size_of[0], n1 = size_of[1], n2 = size_of[2], middle = size_of[3];
      auto x = normal("x", {n2, n0, middle}), y = normal("y", {n2, middle, n1});
      auto ax = absolute(x), ay = absolute(y);
      Array<f32> z("z", {n2, n0, n1}), mine("z", {n2, n0, n1}), size("z", {n2, n0, n1});
      const Grid grid{cdiv(n0, 16), cdiv(n1, 16), cdiv(n2, 2)};
      const auto on = [&](const auto& run, auto& a, auto& b, auto& to) {
        run(BatchedMatmul{}, a, b, to, n0, n1, n2, middle, c<16>, c<16>, c<2>, c<16>);
      };
      const auto cpu = [&](auto&&... a) { octile::tile::launch(FastCpu{2}, grid, a...); };
      on(cpu, ax, ay, size);
      on(cpu, x, y, z);
      on([&](auto&&... a) { machine_.template launch<L>(grid, a...); }, x, y, mine);
      ++runs_;
      for (std::int64_t i = 0; i < z.size(); ++i) {
        const float bound = 4.0f * static_cast<float>(middle + 8) * 0x1p-24f * size[i] + 1e-30f;
        if (!(std::fabs(z[i] - mine[i]) <= bound)) return fail("batched matmul", i, z[i], mine[i]);
      }
    }
  }

  // Tiles whose rows are laid out as in WGMMA's sums.
  void rows_of_warpgroups() {
    reduce_tile<1, 128, 8>();
    reduce_tile<1, 256, 4>();
    reduce_tile<1, 512, 2>();
    reduce_tile<2, 128, 4>();
  }

  // Rows that TMA can load, and rows that it cannot.
  void warpgroups() {
    for (const Three& s : {Three{128, 64, 64}, {200, 136, 80}, {64, 320, 208}, {8, 16, 16}, {300, 48, 544}}) {
      products<64, 64>(s[0], s[1], s[2]);
    }
    products<64, 64>(100, 100, 100);
    for (const Three& s : {Three{128, 64, 64}, {136, 88, 72}, {40, 50, 60}}) scaled_product(s[0], s[1], s[2]);
  }

  // TMA can load all of it. Not every product: one for each layout in boxes.
  template <bool kAllProducts = true>
  void by_wgmma() {
    if constexpr (kAllProducts) {
      products<128, 32>(200, 304, 160);
      products<256, 128>(200, 256, 144);
    } else {
      product<s32, s8, false, false, 128, 32>(200, 304, 160);
      product<s32, s8, false, true, 128, 32>(200, 304, 160);
      product<f32, f16, false, true, 128, 32>(200, 304, 160);
      product<s32, s8, false, false, 256, 128>(200, 256, 144);
      product<f32, f16, false, false, 256, 128>(200, 256, 144);
      product<f32, bf16, true, true, 256, 128>(200, 256, 144);
    }
    running_sums(144, 72, 176);
    computed_factors();
    for (const int n : {200, 40}) attention(n);
  }

  // Operands that a step computes, from small integers and powers of two, so that all sums are exact.
  void computed_factors() {
    computed_factor<Factor::scaled_rows>();
    computed_factor<Factor::columns>();
    computed_factor<Factor::columns_before>();
    computed_factor<Factor::right_rows>();
    computed_factor<Factor::right_columns>();
    computed_factor<Factor::masked>();
    computed_factor<Factor::sum_with_row>();
    computed_factor<Factor::assigned>();
    computed_factor<Factor::assigned_columns>();
    gradients(144, 80, 112);
  }
  void tf32() {
    for (const Three& s : {Three{128, 64, 64}, {200, 132, 100}}) {
      product<f32, f32, false, false, 64, 32>(s[0], s[1], s[2]);
      product<f32, f32, false, true, 64, 32>(s[0], s[1], s[2]);
      product<f32, f32, true, true, 64, 16>(s[0], s[1], s[2]);
    }
  }

 private:
  using Three = std::array<int, 3>;
  struct Out {};  // stands for the compared array

  template <int kColumns, int kTerms>
  void products(int n0, int n1, int middle) {
    product<s32, s8, false, false, kColumns, kTerms>(n0, n1, middle);
    product<s32, s8, false, true, kColumns, kTerms>(n0, n1, middle);
    product<f32, f16, false, false, kColumns, kTerms>(n0, n1, middle);
    product<f32, f16, false, true, kColumns, kTerms>(n0, n1, middle);
    product<f32, f16, true, false, kColumns, kTerms>(n0, n1, middle);
    product<f32, bf16, true, true, kColumns, kTerms>(n0, n1, middle);
  }

  template <class Sum, class T, bool kAcross, bool kAlong, int kColumns, int kTerms>
  void product(int n0, int n1, int middle) {
    using Kernel = Product<Sum, kAcross, kAlong>;
    constexpr int kRows = 64 * 2;
    constexpr bool kWhole = std::is_same_v<Sum, s32>;
    const auto values = [&](const char* name, std::vector<std::int64_t> shape) {
      auto v = normal(name, std::move(shape), kWhole ? 60.0f : 1.0f);
      if constexpr (!kWhole) {
        for (std::int64_t i = 0; i < v.size(); ++i) v.set(i, widen(scalar::Cast<T, Round::even>{}(v[i])));
      }
      return v;
    };
    auto x = values("x", {n0, middle}), y = values("y", {middle, n1});
    auto ax = rounded<T>(absolute(x)), ay = rounded<T>(absolute(y)), tx = rounded<T>(x), ty = rounded<T>(y);
    Array<Sum> z("z", {n0, n1}), mine("z", {n0, n1}), size("z", {n0, n1});
    const Grid grid{cdiv(n0, kRows), cdiv(n1, kColumns)};
    const auto on = [&](const auto& run, auto& a, auto& b, auto& to) {
      run(Kernel{}, a, b, to, n0, n1, middle, c<kRows>, c<kColumns>, c<kTerms>);
    };
    const auto cpu = [&](auto&&... a) { octile::tile::launch(FastCpu{2}, grid, a...); };
    poison(mine);
    on(cpu, tx, ty, z);
    on([&](auto&&... a) { machine_.template launch<L>(grid, a...); }, tx, ty, mine);
    ++runs_;
    if constexpr (std::is_same_v<Sum, s32>) {
      compare("product of bytes", z, mine);
    } else {
      on(cpu, ax, ay, size);
      for (std::int64_t i = 0; i < z.size(); ++i) {
        float bound = 4.0f * static_cast<float>(middle + 8) * 0x1p-24f * size[i] + 1e-30f;
        if (std::is_same_v<T, f32>) bound += 0x1p-9f * size[i];  // each factor 2^-10 off, at most
        if (!(std::fabs(z[i] - mine[i]) <= bound)) return fail("product", i, z[i], mine[i]);
      }
    }
  }

  void scaled_product(int n0, int n1, int middle) {
    constexpr int kBatches = 3;
    auto x = rounded<f16>(normal("x", {kBatches, n0, middle})), y = rounded<f16>(normal("y", {kBatches, middle, n1}));
    auto s = normal("s", {middle});
    Array<f16> z("z", {kBatches, n0, n1}), mine("z", {kBatches, n0, n1});
    const Grid grid{cdiv(n0, 128), cdiv(n1, 64), kBatches};
    const auto on = [&](const auto& run, auto& to) {
      run(ScaledProduct{}, x, y, s, to, n0, n1, middle, c<128>, c<64>, c<64>);
    };
    poison(mine);
    on([&](auto&&... a) { octile::tile::launch(FastCpu{2}, grid, a...); }, z);
    on([&](auto&&... a) { machine_.template launch<L>(grid, a...); }, mine);
    ++runs_;
    for (std::int64_t i = 0; i < z.size(); ++i) {
      // Sums of about 2 sqrt(middle), each within 4 middle / 2^24 of the sum of the products' magnitudes, rounded to
      // f16.
      const float bound = 0x1p-10f * std::fabs(z[i]) + 1e-3f;
      if (!(std::fabs(z[i] - mine[i]) <= bound)) return fail("scaled product", i, z[i], mine[i]);
    }
  }

  // Small integers, so that all sums are exact.
  void running_sums(int n0, int n1, int middle) {
    std::mt19937 random(11);
    Array<s8> x("x", {middle, n0});
    Array<f16> y("y", {middle, n1}), z("z", {n1, n0}), mine("z", {n1, n0});
    for (std::int64_t i = 0; i < x.size(); ++i) x.set(i, static_cast<s8>(static_cast<int>(random() % 7) - 3));
    for (std::int64_t i = 0; i < y.size(); ++i) y.set(i, f16(static_cast<float>(random() % 5) - 2.0f));
    check("running sums", z, mine, {cdiv(n0, 128), cdiv(n1, 64)}, RunningSums{}, x, y, Out{}, n0, n1, middle, c<128>,
          c<64>, c<64>);
  }

  template <Factor kFactor>
  void computed_factor() {
    constexpr int n0 = 144, n1 = 80, middle = 112;
    std::mt19937 random(13);
    const bool right = kFactor == Factor::right_rows || kFactor == Factor::right_columns;
    Array<s8> x("x", {right ? n1 : n0, middle});
    Array<f16> y("y", {right ? n0 : n1, middle});
    Array<f32> scale("scale", {middle}), z("z", {n0, n1}), mine("z", {n0, n1});
    for (std::int64_t i = 0; i < x.size(); ++i) x.set(i, static_cast<s8>(static_cast<int>(random() % 255) - 127));
    for (std::int64_t i = 0; i < y.size(); ++i) y.set(i, f16(static_cast<float>(random() % 5) - 2.0f));
    for (std::int64_t i = 0; i < scale.size(); ++i) scale.set(i, random() % 2 == 0 ? 0.5f : 2.0f);
    check("computed factor", z, mine, {cdiv(n0, 128), cdiv(n1, 64)}, ComputedFactor<kFactor>{}, x, y, scale, Out{}, n0,
          n1, middle, c<128>, c<64>, c<64>);
    if constexpr (kFactor == Factor::columns_before || kFactor == Factor::right_columns) {
      check("computed factor, 32 terms", z, mine, {cdiv(n0, 128), cdiv(n1, 128)}, ComputedFactor<kFactor>{}, x, y,
            scale, Out{}, n0, n1, middle, c<128>, c<128>, c<32>);
    }
  }
  void gradients(int batch, int in, int out) {
    std::mt19937 random(17);
    Array<s8> x("x", {batch, in}), w("w", {in, out});
    Array<f16> dy("dy", {batch, out}), dx("dx", {batch, in}), my_dx("dx", {batch, in}), dw("dw", {in, out}),
        my_dw("dw", {in, out});
    Array<f32> scales("w_scale", {out}), scale("x_scale", {1}, {0.25f});
    for (std::int64_t i = 0; i < x.size(); ++i) x.set(i, static_cast<s8>(static_cast<int>(random() % 15) - 7));
    for (std::int64_t i = 0; i < w.size(); ++i) w.set(i, static_cast<s8>(static_cast<int>(random() % 15) - 7));
    for (std::int64_t i = 0; i < dy.size(); ++i) dy.set(i, f16(static_cast<float>(random() % 5) - 2.0f));
    for (std::int64_t i = 0; i < scales.size(); ++i) scales.set(i, random() % 2 == 0 ? 0.5f : 1.0f);
    check("dX", dx, my_dx, {cdiv(in, 128), cdiv(batch, 64)}, BackwardDxHalf{}, dy, w, scales, Out{}, batch, in, out,
          c<128>, c<64>, c<64>);
    check("dW", dw, my_dw, {cdiv(in, 128), cdiv(out, 64)}, BackwardDwHalf{}, x, scale, dy, Out{}, batch, in, out,
          c<128>, c<64>, c<64>);
    Array<f16> half("w", {in, out}), my_half("w", {in, out});
    check("dequantized", half, my_half, {in, cdiv(out, 64)}, DequantizeHalf{}, w, scales, Out{}, in, out, c<1>, c<64>);
    check("dX of it", dx, my_dx, {cdiv(batch, 128), cdiv(in, 64)}, MatmulAlong{}, dy, half, Out{}, batch, in, out,
          c<128>, c<64>, c<64>);
  }

  void attention(int n) {
    constexpr int kHeads = 2, kHead = 64;
    const auto values = [&](const char* name) { return rounded<f16>(normal(name, {kHeads, n, kHead})); };
    auto q = values("q"), k = values("k"), v = values("v");
    Array<f16> o("o", {kHeads, n, kHead}), mine("o", {kHeads, n, kHead});
    const Grid grid{cdiv(cdiv(n, 128), 2), kHeads};
    const float scale = 0.125f * kLog2E;
    poison(mine);
    const auto on = [&](const auto& run, auto& to) {
      run(CausalAttention{}, q, k, v, to, n, scale, c<128>, c<64>, c<kHead>);
    };
    on([&](auto&&... a) { octile::tile::launch(FastCpu{2}, grid, a...); }, o);
    on([&](auto&&... a) { machine_.template launch<L>(grid, a...); }, mine);
    ++runs_;
    for (std::int64_t i = 0; i < o.size(); ++i) {
      const float bound = 0x1p-10f * std::fabs(o[i]) + 1e-4f;
      if (!(std::fabs(o[i] - mine[i]) <= bound)) return fail("attention", i, o[i], mine[i]);
    }
  }

  template <int C>
  void in_place() {
    Array<f32> z("z", {3, 16, C}), mine("z", {3, 16, C});
    auto x = normal("x", {C}), again = normal("x", {C});
    Array<f32> s("s", {1}, {3.0f}), s_again("s", {1}, {3.0f});
    Array<s32> highest("highest", {C}), highest_again("highest", {C});
    highest.fill(7);
    highest_again.fill(7);
    octile::tile::launch(FastCpu{1}, Grid{1}, InPlace{}, x, z, s, highest, c<16>, c<C>);
    machine_.template launch<L>(Grid{1}, InPlace{}, again, mine, s_again, highest_again, c<16>, c<C>);
    ++runs_;
    compare("in place", z, mine);
    compare("in place, x", x, again);
    compare("in place, s", s, s_again);
    compare("in place, highest", highest, highest_again);
  }

  template <int P, int R, int C>
  void reduce_tile() {
    auto x = normal("x", {P, R, C});
    if (x.size() > 100) {
      for (std::int64_t i = 0; i < x.size(); i += 3) x.set(i, i % 2 ? 0.0f : -0.0f);
      for (std::int64_t i = 0; i < x.size() / 2; ++i) x.set(i, x[i] > 0.0f ? -x[i] : x[i]);  // maxima that are zero
    }
    const int n = 3 * (P * R + P * C + R * C);
    Array<f32> z("z", {n}), mine("z", {n});
    check("reduce", z, mine, {1}, Reduce{}, x, Out{}, c<P>, c<R>, c<C>);
  }

  template <class T, class A>
  static auto& with(Array<T>& out, A& a) {
    if constexpr (std::is_same_v<A, Out>) {
      return out;
    } else {
      return a;
    }
  }
  template <class T>
  void poison(Array<T>& array) {
    if (array.size() == 0) return;
    memset(static_cast<void*>(array.data()), start_ ? 0x80 : 0xA5, static_cast<std::size_t>(array.size()) * sizeof(T));
  }

  template <class T, class Kernel, class... Args>
  void check(const char* name, Array<T>& expected, Array<T>& mine, Grid grid, const Kernel& kernel, Args&&... args) {
    poison(expected);
    poison(mine);
    octile::tile::launch(FastCpu{2}, grid, kernel, with(expected, args)...);
    machine_.template launch<L>(grid, kernel, with(mine, args)...);
    ++runs_;
    compare(name, expected, mine);
  }

  template <class T>
  void compare(const char* name, const Array<T>& expected, const Array<T>& mine) {
    for (std::int64_t i = 0; i < mine.size(); ++i) {
      if (memcmp(static_cast<const void*>(expected.data() + i), static_cast<const void*>(mine.data() + i), sizeof(T))) {
        return fail(name, i, static_cast<double>(widen(expected[i])), static_cast<double>(widen(mine[i])));
      }
    }
  }

  void fail(const char* name, std::int64_t i, double expected, double got) {
    ++wrong_;
    std::printf("WRONG %s: element %lld is %.9g, not %.9g\n", name, static_cast<long long>(i), got, expected);
  }

  Machine& machine_;
  int wrong_ = 0, runs_ = 0;
  bool start_ = false;  // outputs start as a very small number, for atomics
};

}  // namespace octile::tile::cuda_cases
