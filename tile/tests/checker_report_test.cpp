// The checked executor's counts and records.
#include <numeric>

#include "checker.h"

namespace octile::tile {
namespace {

// ---- Coalescing, records, counts ----

// A copy of 64 x 64 floats by tiles of 8 x 64: by rows, by columns, and from an odd address.
Report copied(int row, int column, int first, std::int64_t size) {
  auto x = ramp("x", {size});
  Array<f32> z("z", {64, 64});
  const Report report = launch(
      CheckedCpu{.layout = {4, 32, 4}}, Grid{8},
      [](auto& t, auto px, auto pz, int r, int k, int start) {
        const auto i = col(t.program_id(0) * 8 + t.arange(c<8>));
        const auto j = t.arange(c<64>);
        t.store(pz + i * 64 + j, t.load(px + i * r + j * k + start));
      },
      x, z, row, column, first);
  EXPECT_TRUE(report.clean()) << all(report);
  return report;
}

TEST(Coalescing, CountsWhatWarpsAskFor) {
  const Site rows = copied(64, 1, 0, 4096).sites[0];
  EXPECT_EQ(rows.sectors, 512);
  // With j * k the compiler cannot tell that neighbours are adjacent, but the addresses are. 4 x 32 threads of four
  // elements: two requests of each warp, half of whose threads hold 64 columns.
  EXPECT_EQ(rows.requests, 64);
  EXPECT_EQ(rows.request_sectors, 512);
  EXPECT_EQ(rows.request_bytes, 512 * 32);
  EXPECT_EQ(rows.scalar_calls, 0);

  const Site columns = copied(1, 64, 0, 4096).sites[0];
  EXPECT_EQ(columns.sectors, 512);  // a tile reads whole sectors, but
  EXPECT_EQ(columns.requests, 256);
  EXPECT_EQ(columns.request_sectors, 4096);  // each thread reads a different one
  EXPECT_EQ(columns.request_bytes, 512 * 32);

  const Site odd = copied(64, 1, 1, 4097).sites[0];
  EXPECT_EQ(odd.scalar_calls, 8);
  EXPECT_EQ(odd.misaligned_calls, 8);
  EXPECT_EQ(odd.requests, 256);
  EXPECT_GT(odd.request_sectors, 3 * odd.request_bytes / 32);
}

TEST(Coalescing, DependsOnWhereInASectorAnAccessStarts) {
  auto x = ramp("x", {67});
  const Report report = launch(
      CheckedCpu{.layout = {1, 32, 1}}, Grid{8},
      [](auto& t, auto px) { (void)t.load(px + t.program_id(0) * 5 + t.arange(c<32>)); }, x);
  EXPECT_TRUE(report.clean()) << all(report);
  EXPECT_EQ(report.sites[0].requests, 8);
  EXPECT_EQ(report.sites[0].request_sectors, 4 + 7 * 5);  // 128 bytes; all but the first touch a fifth sector
  EXPECT_EQ(report.sites[0].request_bytes, 8 * 4 * 32);
}

// Like a view into a larger tensor.
TEST(Coalescing, DependsOnWhereTheTensorStarts) {
  auto x = ramp("x", {129});
  const auto loaded = [&](int first) {
    return launch(
               CheckedCpu{}, Grid{1}, [](auto& t, auto px) { (void)t.load(px + t.arange(c<128>)); },
               Tensor<f32>{"view", x.data() + first, {128}})
        .sites[0];
  };
  EXPECT_EQ(loaded(0).sectors, 16);
  EXPECT_EQ(loaded(0).request_sectors, 16);
  EXPECT_EQ(loaded(0).misaligned_calls, 0);
  EXPECT_EQ(loaded(1).sectors, 17);
  EXPECT_EQ(loaded(1).misaligned_calls, 1);
}

TEST(Coalescing, OfTilesOfTwoShapesInOneLine) {
  auto x = ramp("x", {4096});
  const auto requests = [&](auto... sizes) {
    return launch(
               CheckedCpu{}, Grid{1},
               [](auto& t, auto px, auto... n) {
                 const auto load = [&](auto size) { (void)t.load(px + t.arange(size)); };
                 (load(n), ...);
               },
               x, sizes...)
        .sites[0]
        .requests;
  };
  EXPECT_EQ(requests(c<4096>, c<128>), requests(c<4096>) + requests(c<128>));
}

TEST(Report, CountsLanesBytesAndElements) {
  auto x = ramp("x", {200});
  Array<f32> z("z", {200});
  const Report report = launch(
      CheckedCpu{}, Grid{7},
      [](auto& t, auto px, auto pz) {
        const auto i = t.program_id(0) * 32 + t.arange(c<32>);
        t.store(pz + i, t.load(px + i, i < 200) + t.load(px + (199 - i), i < 200), i < 200);
      },
      x, z);
  ASSERT_EQ(report.sites.size(), 3u);
  for (const Site& site : report.sites) {
    EXPECT_EQ(site.calls, 7);
    EXPECT_EQ(site.lanes, 224);
    EXPECT_EQ(site.active, 200);
    EXPECT_EQ(site.bytes, 800);
  }
  EXPECT_EQ(report.tensors[0].elements_read, 200);
  EXPECT_EQ(report.tensors[1].elements_written, 200);
  EXPECT_EQ(report.tensors[1].elements_read, 0);
}

// The records list, element by element, what was read and written; counting from them gives the same numbers.
TEST(Report, RecordsCountTheSame) {
  auto x = ramp("x", {3, 11, 13});
  Array<s32> index("index", {16}, {5, 6, 7, 8, 1, 3, 5, 7, 9, 11, 0, 0, 4, 2, 1, 0});
  Array<f32> z("z", {3, 11, 13}), gathered("gathered", {16});
  const Report report = launch(
      CheckedCpu{}, Grid{1, 2},
      [](auto& t, auto px, auto pi, auto pz, auto pg) {
        const auto p = col(col(t.arange(c<4>)));
        const auto i = col(t.arange(c<16>));
        const auto j = t.program_id(1) * 8 + t.arange(c<8>);
        const auto in = (p < 3) & (i < 11) & (j < 13);
        const auto odd = t.load(px + p * 143 + i * 13 + j, in & (j != 4), 0.0f);
        t.store(pz + p * 143 + i * 13 + j, odd, in);
        const auto k = t.arange(c<16>);
        if (t.program_id(1) == 0) t.store(pg + k, t.load(px + t.load(pi + k)));
      },
      x, index, z, gathered);
  EXPECT_TRUE(report.clean()) << all(report);
  std::vector<std::int64_t> active(report.sites.size());
  std::vector<std::vector<int>> touched(report.sites.size());
  for (std::size_t s = 0; s < touched.size(); ++s) {
    touched[s].resize(static_cast<std::size_t>(report.tensors[static_cast<std::size_t>(report.sites[s].tensor)].size));
  }
  for (const Record& r : report.records) {
    for (int p = 0; p < r.planes; ++p) {
      for (int i = 0; i < r.rows; ++i) {
        for (int j = 0; j < r.columns; ++j) {
          ++active[static_cast<std::size_t>(r.site)];
          ++touched[static_cast<std::size_t>(r.site)]
                   [static_cast<std::size_t>(r.base + p * r.plane_stride + i * r.row_stride + j * r.column_stride)];
        }
      }
    }
  }
  for (std::size_t s = 0; s < active.size(); ++s) EXPECT_EQ(active[s], report.sites[s].active) << s;
  for (int k = 0; k < 429; ++k) {
    EXPECT_EQ(touched[0][static_cast<std::size_t>(k)], k % 13 == 4 ? 0 : 1) << k;  // j != 4
    EXPECT_EQ(touched[1][static_cast<std::size_t>(k)], 1) << k;
  }
  EXPECT_LE(report.records.size(), 20u);  // not one for each element
}

TEST(Report, KeepsNoMoreRecordsThanAsked) {
  auto x = ramp("x", {200});
  const Report report = launch(
      CheckedCpu{.max_records = 3}, Grid{5}, [](auto& t, auto px) { (void)t.load(px + t.program_id(0)); }, x);
  EXPECT_EQ(report.records.size(), 3u);
  EXPECT_EQ(report.records_left_out, 2);
}

TEST(Report, EmptyGridAndEmptyTensor) {
  Array<f32> x("x", {0, 5});
  const Report report = launch(
      CheckedCpu{}, Grid{0}, [](auto& t, auto px) { (void)t.load(px); }, x);
  EXPECT_TRUE(report.clean());
  const Report outside = launch(
      CheckedCpu{}, Grid{1}, [](auto& t, auto px) { (line = __LINE__, t.load(px)); }, x);
  only(outside, Problem::out_of_bounds, 1);
}

}  // namespace
}  // namespace octile::tile
