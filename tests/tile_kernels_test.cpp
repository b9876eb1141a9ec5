// Kernels of the tile language: right at ragged sizes, clean under the checker, and the same bits on both executors
// with any number of threads.
#include "tile_kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "octile/tile/tile.h"

namespace octile::tile {
namespace {

using namespace kernels;

Array<f32> normal(const char* name, std::vector<std::int64_t> shape, float scale = 1.0f) {
  Array<f32> result(name, std::move(shape));
  std::mt19937 random(static_cast<unsigned>(result.size()));
  std::normal_distribution<float> distribution(0.0f, scale);
  for (std::int64_t i = 0; i < result.size(); ++i) result.set(i, distribution(random));
  return result;
}

template <class T>
std::vector<T> values(const Array<T>& array) {
  return {array.data(), array.data() + array.size()};
}

void expect_all_written() {}
template <class T, class... More>
void expect_all_written(const Array<T>& array, const More&... more) {
  for (std::int64_t i = 0; i < array.size(); ++i) ASSERT_TRUE(array.written(i)) << array.name() << ' ' << i;
  expect_all_written(more...);
}

// Runs the kernel everywhere; `out` are the arrays it writes, and stay as the checked run left them.
template <class Out, class Kernel, class... Args>
Report run(Out& out, Grid grid, const Kernel& kernel, Args&&... args) {
  const Report report = launch(CheckedCpu{}, grid, kernel, args...);
  for (const Finding& finding : report.findings) ADD_FAILURE() << text(report, finding);
  expect_all_written(out);
  const auto bytes = [&] {
    std::vector<std::byte> copy(static_cast<std::size_t>(out.size()) * sizeof(*out.data()));
    if (!copy.empty()) std::memcpy(copy.data(), out.data(), copy.size());
    return copy;
  };
  const auto checked = bytes();
  for (const int threads : {1, 2, 16}) {
    if (out.size() != 0) memset(static_cast<void*>(out.data()), 0x5A, checked.size());
    launch(FastCpu{threads}, grid, kernel, args...);
    EXPECT_TRUE(bytes() == checked) << "other bits with " << threads << " threads";
  }
  return report;
}

TEST(Puzzle2, MaskedAdd) {
  for (const int n : {0, 1, 31, 32, 33, 200, 1009}) {
    auto x = normal("x", {n});
    Array<f32> z("z", {n});
    const Report report = run(z, {cdiv(n, 32)}, MaskedAdd{}, x, z, n, c<32>);
    for (int i = 0; i < n; ++i) EXPECT_EQ(z[i], x[i] + 10.0f);
    if (n > 0) {
      EXPECT_EQ(report.sites[0].bytes, 4 * n);  // the least possible
    }
  }
}

TEST(Puzzle4, OuterAdd) {
  for (const auto& [n0, n1] : {std::pair{100, 90}, {1, 1}, {7, 65}, {64, 32}, {0, 5}}) {
    auto x = normal("x", {n0}), y = normal("y", {n1});
    Array<f32> z("z", {n1, n0});
    run(z, {cdiv(n0, 32), cdiv(n1, 32)}, OuterAdd{}, x, y, z, n0, n1, c<32>, c<32>);
    for (int j = 0; j < n1; ++j) {
      for (int i = 0; i < n0; ++i) EXPECT_EQ(z[j * n0 + i], x[i] + y[j]);
    }
  }
}

TEST(Puzzle7, LongSum) {
  for (const auto& [n, length] : {std::pair{4, 200}, {1, 1}, {5, 31}, {3, 64}, {6, 1000}, {2, 0}}) {
    auto x = normal("x", {n, length});
    Array<f32> z("z", {n});
    run(z, {cdiv(n, 2)}, LongSum{}, x, z, n, length, c<2>, c<32>);
    for (int i = 0; i < n; ++i) {
      double sum = 0, size = 0;
      for (int j = 0; j < length; ++j) {
        sum += x[i * length + j];
        size += std::fabs(x[i * length + j]);
      }
      EXPECT_LE(std::fabs(z[i] - sum), (length + 1) * 0x1p-24 * size);
    }
  }
}

TEST(Puzzle8, Softmax) {
  for (const auto& [n, length] : {std::pair{4, 200}, {1, 1}, {5, 31}, {3, 64}, {6, 1000}}) {
    auto x = normal("x", {n, length}, 20.0f);
    Array<f32> z("z", {n, length});
    run(z, {cdiv(n, 2)}, Softmax{}, x, z, n, length, c<2>, c<32>);
    for (int i = 0; i < n; ++i) {
      double most = -1e30, total = 0;
      for (int j = 0; j < length; ++j) most = std::max<double>(most, x[i * length + j]);
      for (int j = 0; j < length; ++j) total += std::exp(x[i * length + j] - most);
      for (int j = 0; j < length; ++j) {
        const double exact = std::exp(x[i * length + j] - most) / total;
        // log2(e) * (x - m) is rounded twice, at up to 2^7: 2^-17 of 2^x each; the sum is of a few hundred roundings.
        EXPECT_NEAR(z[i * length + j], exact, 4e-5 * exact + 1e-30);
      }
    }
  }
}

TEST(Puzzle11, BatchedMatmul) {
  struct Size {
    int n0, n1, n2, middle;
  };
  for (const Size& s :
       {Size{32, 32, 4, 32}, {48, 32, 2, 64}, {1, 1, 1, 1}, {17, 33, 3, 40}, {5, 70, 1, 50}, {16, 16, 2, 0}}) {
    auto x = normal("x", {s.n2, s.n0, s.middle}), y = normal("y", {s.n2, s.middle, s.n1});
    Array<f32> z("z", {s.n2, s.n0, s.n1});
    const Report report = run(z, {cdiv(s.n0, 16), cdiv(s.n1, 16), cdiv(s.n2, 2)}, BatchedMatmul{}, x, y, z, s.n0, s.n1,
                              s.n2, s.middle, c<16>, c<16>, c<2>, c<16>);
    for (int b = 0; b < s.n2; ++b) {
      for (int i = 0; i < s.n0; ++i) {
        for (int j = 0; j < s.n1; ++j) {
          double sum = 0, size = 0;
          for (int k = 0; k < s.middle; ++k) {
            const double term =
                static_cast<double>(x[(b * s.n0 + i) * s.middle + k]) * y[(b * s.middle + k) * s.n1 + j];
            sum += term;
            size += std::fabs(term);
          }
          EXPECT_LE(std::fabs(z[(b * s.n0 + i) * s.n1 + j] - sum), (s.middle + 1) * 0x1p-24 * size);
        }
      }
    }
    EXPECT_EQ(report.flops, std::int64_t{2} * cdiv(s.n0, 16) * cdiv(s.n1, 16) * cdiv(s.n2, 2) * cdiv(s.middle, 16) * 2 *
                                16 * 16 * 16);
  }
}

float row_scale(const Array<f32>& x, int row, int columns) {
  float most = 0;
  for (int j = 0; j < columns; ++j) most = std::max(most, std::fabs(x[row * columns + j]));
  return std::max(most / 127.0f, 1e-8f);
}

TEST(Homework, QuantizeRows) {
  for (const auto& [rows, columns] : {std::pair{4, 200}, {1, 1}, {33, 65}, {7, 128}, {2, 0}}) {
    auto x = normal("x", {rows, columns});
    for (int j = 0; j < columns; ++j) x.set(j, 0.0f);  // a row of zeros
    Array<s8> q("q", {rows, columns});
    Array<f32> scale("scale", {rows});
    run(q, {cdiv(rows, 4)}, QuantizeRows{}, x, q, scale, rows, columns, c<4>, c<64>);
    for (int i = 0; i < rows; ++i) {
      EXPECT_EQ(scale[i], row_scale(x, i, columns));
      for (int j = 0; j < columns; ++j) {
        const float level = std::nearbyint(x[i * columns + j] / scale[i]);
        EXPECT_EQ(q[i * columns + j], static_cast<int>(std::min(std::max(level, -127.0f), 127.0f)));
      }
    }
  }
}

TEST(Homework, Forward) {
  struct Size {
    int batch, in, out;
  };
  for (const Size& s : {Size{1, 1, 1}, {16, 32, 16}, {33, 100, 47}, {3, 257, 20}, {5, 0, 9}}) {
    std::mt19937 random(7);
    std::uniform_int_distribution<int> byte(-127, 127);
    const auto bytes = [&](const char* name, int rows, int columns) {
      Array<s8> result(name, {rows, columns});
      for (std::int64_t i = 0; i < result.size(); ++i) result.set(i, static_cast<s8>(byte(random)));
      return result;
    };
    auto x = bytes("x", s.batch, s.in), w = bytes("w", s.in, s.out);
    Array<f32> x_scale("x_scale", {1}, {0.013f});
    auto w_scale = normal("w_scale", {s.out}, 0.01f);
    Array<f16> bias("bias", {s.out}), y("y", {s.batch, s.out});
    for (int j = 0; j < s.out; ++j) bias.set(j, f16{f32_to_f16(w_scale[j] * 50.0f)});
    run(y, {cdiv(s.batch, 16), cdiv(s.out, 16)}, Forward{}, x, x_scale, w, w_scale, bias, y, s.batch, s.in, s.out,
        c<16>, c<16>, c<32>);
    for (int i = 0; i < s.batch; ++i) {
      for (int j = 0; j < s.out; ++j) {
        s32 sum = 0;
        for (int k = 0; k < s.in; ++k) sum += x[i * s.in + k] * w[k * s.out + j];
        const float result = std::fma(static_cast<float>(sum), x_scale[0] * w_scale[j], widen(bias[j]));
        EXPECT_EQ(y[i * s.out + j].bits, f32_to_f16(result));
      }
    }
  }
}

}  // namespace
}  // namespace octile::tile
