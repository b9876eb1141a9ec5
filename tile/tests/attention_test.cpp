// The kernel of causal attention on both CPU executors, against a plain reference.
#include "bench/attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "octile/tile/tile.h"

namespace octile::tile {
namespace {

constexpr int kHeads = 2, kHead = 32;

Array<f16> normal(const char* name, int n, unsigned seed) {
  Array<f16> values(name, {kHeads, n, kHead});
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution;
  for (std::int64_t i = 0; i < values.size(); ++i) values.set(i, f16(distribution(random)));
  return values;
}

std::vector<double> reference(const Array<f16>& q, const Array<f16>& k, const Array<f16>& v, int n, double scale) {
  std::vector<double> o(static_cast<std::size_t>(q.size()));
  const auto at = [&](int head, int row, int column) { return (std::int64_t{head} * n + row) * kHead + column; };
  for (int head = 0; head < kHeads; ++head) {
    for (int i = 0; i < n; ++i) {
      std::vector<double> weights;
      double total = 0;
      for (int j = 0; j <= i; ++j) {
        double score = 0;
        for (int d = 0; d < kHead; ++d) score += double{q[at(head, i, d)]} * double{k[at(head, j, d)]};
        total += weights.emplace_back(std::exp(scale * score));
      }
      for (int j = 0; j <= i; ++j) {
        for (int d = 0; d < kHead; ++d) {
          o[static_cast<std::size_t>(at(head, i, d))] +=
              weights[static_cast<std::size_t>(j)] / total * v[at(head, j, d)];
        }
      }
    }
  }
  return o;
}

TEST(Attention, AgreesWithThePlainSum) {
  for (const int n : {1, 64, 100, 129}) {  // an odd and an even number of blocks, whole and partial
    auto q = normal("q", n, 1), k = normal("k", n, 2), v = normal("v", n, 3);
    Array<f16> fast("o", {kHeads, n, kHead}), checked("o", {kHeads, n, kHead});
    const Grid grid{cdiv(cdiv(n, 64), 2), kHeads};
    const float scale = kLog2E / std::sqrt(static_cast<float>(kHead));
    launch(FastCpu{2}, grid, CausalAttention{}, q, k, v, fast, n, scale, c<64>, c<32>, c<kHead>);
    const Report report =
        launch(CheckedCpu{}, grid, CausalAttention{}, q, k, v, checked, n, scale, c<64>, c<32>, c<kHead>);
    for (const Finding& finding : report.findings) ADD_FAILURE() << text(report, finding);
    const std::vector<double> exact = reference(q, k, v, n, 1 / std::sqrt(double{kHead}));
    for (std::int64_t i = 0; i < fast.size(); ++i) {
      ASSERT_TRUE(checked.written(i));
      ASSERT_EQ(fast[i].bits, checked[i].bits) << n << ' ' << i;
      ASSERT_NEAR(fast[i], exact[static_cast<std::size_t>(i)], 2e-3) << n << ' ' << i;  // weights are rounded to f16
    }
  }
}

}  // namespace
}  // namespace octile::tile
