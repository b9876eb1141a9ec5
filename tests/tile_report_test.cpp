// The HTML report: its verdicts, what its text says, and that nothing in it can break out. tile_report_html_test.py
// opens the pages that the last test writes; OCTILE_REPORT_PAGES names their directory.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <limits>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

#include "octile/tile/tile.h"
#include "report/write_report.h"
#include "tile_kernels.h"

namespace octile::tile {
namespace {

using namespace kernels;

struct Page {
  Report report;
  ReportPage page;
};

Array<f32> normal(const char* name, std::vector<std::int64_t> shape, float scale = 1.0f) {
  Array<f32> result(name, std::move(shape));
  std::mt19937 random(static_cast<unsigned>(result.size()));
  std::normal_distribution<float> distribution(0.0f, scale);
  for (std::int64_t i = 0; i < result.size(); ++i) result.set(i, distribution(random));
  return result;
}

std::vector<float> added(const Array<f32>& x) {
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

struct RacyQuantize {  // the whole tensor's greatest value, found by all programs at once, and used right away
  TILE_KERNEL void operator()(auto& t, auto x, auto scale, auto q, int n, auto b) const {
    const auto i = t.program_id(0) * b + t.arange(b);
    const auto v = t.load(x + i, i < n, 0.0f);
    t.store(scale, maximum(t.load(scale), max(abs(v)) / 127.0f));
    t.store(q + i, cast<s8, Round::even>(clamp(v / t.load(scale), -127.0f, 127.0f)), i < n);
  }
};

struct Negative {  // reads one element to the left: x[-1] of the first program, and what nobody wrote
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

// ---- Pages ----

Page masked_add() {
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

Page masked_add_wrong() {
  auto x = normal("x", {200});
  Array<f32> z("z", {200});
  Page p{launch(CheckedCpu{}, Grid{7}, WideMask{}, x, z, 200, c<32>), {}};
  p.page.title = "Puzzle 2, with a mask that is too wide";
  p.page.facts = {{"sizes", "n0 = 200"}, {"blocks", "b0 = 32"}};
  p.page.tensors = {tensor_values(x), tensor_values(z, added(x))};
  return p;
}

Page long_sum_wrong() {
  auto x = normal("x", {4, 200});
  Array<f32> z("z", {4});
  Page p{launch(CheckedCpu{}, Grid{4}, NoOther{}, x, z, 200, c<32>), {}};
  p.page.title = "Puzzle 7, without other";
  std::vector<float> expected(4, 0.0f);
  for (int i = 0; i < 800; ++i) expected[static_cast<std::size_t>(i / 200)] += x[i];
  p.page.tensors = {tensor_values(x), tensor_values(z, expected)};
  return p;
}

Page outer_add_wrong() {
  auto x = normal("x", {100}), y = normal("y", {90});
  Array<f32> z("z", {90, 100});
  Page p{launch(CheckedCpu{}, Grid{4, 3}, NarrowMask{}, x, y, z, 100, 90, c<32>, c<32>), {}};
  p.page.title = "Puzzle 4, safe and wrong";
  std::vector<float> expected;
  for (int i = 0; i < 9000; ++i) expected.push_back(x[i % 100] + y[i / 100]);
  p.page.tensors = {tensor_values(x), tensor_values(y), tensor_values(z, expected)};
  return p;
}

Page softmax() {
  auto x = normal("x", {4, 200}, 3.0f);
  Array<f32> z("z", {4, 200});
  Page p{launch(CheckedCpu{}, Grid{4}, Softmax{}, x, z, 4, 200, c<1>, c<32>), {}};
  p.page.title = "Puzzle 8: softmax of long rows";
  std::vector<double> expected(800);
  for (int i = 0; i < 4; ++i) {
    double most = -1e30, total = 0;
    for (int j = 0; j < 200; ++j) most = std::max<double>(most, x[i * 200 + j]);
    for (int j = 0; j < 200; ++j) total += std::exp(x[i * 200 + j] - most);
    for (int j = 0; j < 200; ++j) {
      expected[static_cast<std::size_t>(i * 200 + j)] = std::exp(x[i * 200 + j] - most) / total;
    }
  }
  p.page.tensors = {tensor_values(x), tensor_values(z, expected)};
  return p;
}

Page matmul() {
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

Page racy_quantizer() {
  auto x = normal("x", {1000});
  Array<f32> scale("scale", {1}, {1e-8f});
  Array<s8> q("q", {1000});
  Page p{launch(CheckedCpu{}, Grid{8}, RacyQuantize{}, x, scale, q, 1000, c<128>), {}};
  p.page.title = "Quantize with the tensor's greatest value, in one launch";
  p.page.tensors = {tensor_values(x), tensor_values(scale), tensor_values(q)};
  return p;
}

Page negative() {
  auto x = normal("x", {6, 10});
  Array<f32> z("z", {6, 10});
  Page p{launch(CheckedCpu{}, Grid{4}, Negative{}, x, z, 60, c<16>), {}};
  return p;
}

Page histogram() {
  constexpr int kN = 100;
  Array<s32> x("x", {kN}), h("h", {2, 5}), z("z", {3 * kN});
  for (int i = 0; i < kN; ++i) x.set(i, i * i % 11);  // 0, 1, 3, 4, 5, 9
  h.fill(0);
  Page p{launch(CheckedCpu{}, Grid{4}, Histogram{}, x, h, z, kN, c<32>), {}};
  p.page.tensors = {tensor_values(x), tensor_values(h), tensor_values(z)};
  return p;
}

Page sampled() {
  auto x = normal("x", {4096});
  Array<f32> z("z", {4096});
  Page p{launch(CheckedCpu{.most_records = 100}, Grid{128}, MaskedAdd{}, x, z, 4090, c<32>), {}};
  p.page.title = "More accesses than are kept";
  return p;
}

Page large() {
  auto x = normal("x", {1500, 1100});
  Array<f32> z("z", {1500, 1100});
  Page p{launch(CheckedCpu{}, Grid{375}, Softmax{}, x, z, 1500, 1100, c<4>, c<512>), {}};
  p.page.tensors = {tensor_values(x), tensor_values(z)};
  return p;
}

constexpr const char* kHostile = "</script><script>document.title = 'broken'</script><!-- <b>\"&'";

Page hostile() {
  Array<f32> x(kHostile, {40}, std::vector<float>(40, 1.0f)), z("z", {40});
  Page p{launch(CheckedCpu{}, Grid{2}, MaskedAdd{}, x, z, 40, c<32>), {}};
  p.page.title = p.page.statement = p.page.command = p.page.version = kHostile;
  p.page.facts = {{kHostile, kHostile}};
  std::string text;
  for (int i = 0; i < 40; ++i) text += std::string(kHostile) + "\n";
  p.page.sources = {{"tile_kernels.h", text}};
  return p;
}

const std::pair<const char*, std::function<Page()>> kPages[] = {{"masked_add", masked_add},
                                                                {"masked_add_wrong", masked_add_wrong},
                                                                {"long_sum_wrong", long_sum_wrong},
                                                                {"outer_add_wrong", outer_add_wrong},
                                                                {"softmax", softmax},
                                                                {"matmul", matmul},
                                                                {"racy_quantizer", racy_quantizer},
                                                                {"negative", negative},
                                                                {"histogram", histogram},
                                                                {"sampled", sampled},
                                                                {"large", large},
                                                                {"hostile", hostile}};

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++n;
  return n;
}
bool has(const std::string& text, const std::string& part) { return count(text, part) > 0; }

// ---- The tests ----

TEST(TileReport, Verdicts) {
  const auto verdict = [](const Page& p) { return judge(p.report, p.page).verdict; };
  EXPECT_EQ(verdict(masked_add()), Verdict::correct);
  EXPECT_EQ(verdict(masked_add_wrong()), Verdict::unsafe);
  EXPECT_EQ(verdict(outer_add_wrong()), Verdict::wrong);
  EXPECT_EQ(verdict(large()), Verdict::unchecked);
}

TEST(TileReport, NamesWhoWroteAWrongValue) {
  const Page p = outer_add_wrong();
  const Judgement judgement = judge(p.report, p.page);
  EXPECT_EQ(judgement.compared, 9000);
  EXPECT_EQ(judgement.wrong, 87 + 3 * 100);
  EXPECT_EQ(judgement.wrong_of, (std::vector<std::int64_t>{0, 0, 387}));
  ASSERT_FALSE(judgement.worst.empty());
  EXPECT_LE(judgement.worst.size(), 12u);
  std::set<std::int64_t> seen;
  for (const WrongElement& element : judgement.worst) {
    EXPECT_TRUE(seen.insert(element.index).second);
    EXPECT_EQ(element.tensor, 2);
    const std::int64_t row = element.index / 100, column = element.index % 100;
    if (row >= 87) {
      EXPECT_FALSE(element.written);
      EXPECT_EQ(element.program, -1);
    } else {
      EXPECT_EQ(column, 7);
      EXPECT_TRUE(element.written);
      EXPECT_EQ(element.program, row / 32 * 4);
      EXPECT_EQ(p.report.sites[static_cast<std::size_t>(element.site)].access, Access::store);
    }
  }
  EXPECT_EQ(judgement.worst.front().index, 7);  // the first one leads
}

TEST(TileReport, ToleranceAndSpecialValues) {
  Array<f32> z("z", {6}, {1.0f, 1.002f, NAN, NAN, INFINITY, 0.0f});
  const auto expected = std::vector<float>{1.0f, 1.0f, NAN, 0.0f, INFINITY, -INFINITY};
  Page p{launch(
             CheckedCpu{}, Grid{1}, [](auto& t, auto pz) { (void)t.load(pz + t.arange(c<4>)); }, z),
         {}};
  p.page.tensors = {tensor_values(z, expected)};
  EXPECT_EQ(judge(p.report, p.page).wrong, 2);  // the lone NaN and the infinity; 1.002 is within 1e-3 + 1e-3
  p.page.tensors = {tensor_values(z, expected, {0, 0})};
  EXPECT_EQ(judge(p.report, p.page).wrong, 3);
  p.page.tensors[0].bounds = {0, 0.01, 0, 0, 0, 0};
  EXPECT_EQ(judge(p.report, p.page).wrong, 2);
}

TEST(TileReport, ProblemsInWords) {
  const Page p = masked_add_wrong();
  const std::string html = report_html(p.report, p.page);
  EXPECT_EQ(count(html, "<article class=\"problem\""), 2u);
  EXPECT_TRUE(has(html, "Program 6, lane 8, reads <b>x[200]</b>; x has 200 elements, 0 to 199."));
  EXPECT_TRUE(has(html, "const auto v = t.load(x + i, i &lt; n0 + 20);"));
  EXPECT_TRUE(has(html, "The mask is too wide: the index must stay below 200"));
  const Page race = racy_quantizer();
  EXPECT_TRUE(has(report_html(race.report, race.page), "the same element at <code>tile_report_test.cpp:"));
}

TEST(TileReport, ScoreOfTheLeastPossible) {
  const Page p = masked_add();
  const std::string html = report_html(p.report, p.page);
  EXPECT_TRUE(has(html, "<b>1.60 KB</b>"));  // 200 elements in, 200 out, 4 bytes each
  EXPECT_TRUE(has(html, "<b>1.00 ×</b>"));
  EXPECT_TRUE(has(html, "48 of 448 lanes"));
}

TEST(TileReport, SourceIsTheKernelAlone) {
  const Page p = masked_add();
  const std::string html = report_html(p.report, p.page);
  EXPECT_TRUE(has(html, "MaskedAdd</td>") || has(html, "MaskedAdd {"));
  EXPECT_FALSE(has(html, "OuterAdd"));
  Page q = masked_add();
  q.page.sources = {{"tile_kernels.h", "too short"}};
  EXPECT_TRUE(has(report_html(q.report, q.page), "The source is not at hand"));
}

TEST(TileReport, NothingBreaksOut) {
  const Page p = hostile();
  const std::string html = report_html(p.report, p.page);
  EXPECT_EQ(count(html, "<script"), 2u);
  EXPECT_EQ(count(html, "</script>"), 2u);
  EXPECT_FALSE(has(html, kHostile));
  EXPECT_FALSE(has(html, "http://") || has(html, "https://"));
}

TEST(TileReport, LargeTensorsCarryNoValues) {
  const Page p = large();
  const std::string html = report_html(p.report, p.page);
  EXPECT_FALSE(has(html, "\"values\""));
  EXPECT_LT(html.size(), 1'000'000u);
  const Page small = masked_add();
  EXPECT_EQ(count(report_html(small.report, small.page), "\"values\":["), 2u);
}

TEST(TileReport, SamplesProgramsAllOverTheGrid) {
  const Page p = sampled();
  EXPECT_LE(p.report.records.size(), 100u);
  EXPECT_GE(p.report.records.size(), 40u);
  EXPECT_EQ(p.report.records.size() + static_cast<std::size_t>(p.report.records_left_out), 256u);
  int late = 0;
  for (const Record& record : p.report.records) late += record.program >= 64 ? 1 : 0;
  EXPECT_NEAR(late, static_cast<double>(p.report.records.size()) / 2, 8);
  EXPECT_TRUE(has(report_html(p.report, p.page), "a sample of the programs"));
}

TEST(TileReport, UnwrittenElements) {
  Array<f32> x("x", {8}), z("z", {4});
  for (const int i : {0, 1, 5}) x.set(i, 1.0f);
  const Report report = launch(
      CheckedCpu{}, Grid{1},
      [](auto& t, auto px, auto pz) { t.store(pz + t.arange(c<2>), t.load(px + t.arange(c<2>))); }, x, z);
  EXPECT_EQ(report.tensors[0].unwritten, (std::vector<std::array<std::int64_t, 2>>{{2, 5}, {6, 8}}));
  EXPECT_EQ(report.tensors[0].never_written, 5);
  EXPECT_EQ(report.tensors[1].never_written, 2);
}

TEST(TileReport, EmptyLaunch) {
  Array<f32> x("x", {0, 5});
  const Report report = launch(
      CheckedCpu{}, Grid{0}, [](auto& t, auto px) { (void)t.load(px); }, x);
  EXPECT_TRUE(has(report_html(report, {}), "No problem found"));
}

TEST(TileReport, RefusesAPlaceItCannotWrite) {
  const Page p = masked_add();
  EXPECT_THROW(write_report("/no/such/directory/page.html", p.report, p.page), std::runtime_error);
}

TEST(TileReportPages, AreWritten) {
  const char* const named = std::getenv("OCTILE_REPORT_PAGES");
  const std::string directory = named != nullptr ? std::string(named) + "/" : testing::TempDir();
  for (const auto& [name, make] : kPages) {
    const Page p = make();
    write_report(directory + name + ".html", p.report, p.page);
    // What the browser's test compares the page with.
    std::ofstream totals(directory + name + ".totals");
    const Judgement judgement = judge(p.report, p.page);
    totals << "wrong " << judgement.wrong << "\nfindings " << p.report.findings.size() << "\nleft_out "
           << p.report.records_left_out << '\n';
    for (const Site& site : p.report.sites) {
      totals << "site " << site.line << ' ' << site.active << ' ' << site.bytes << ' ' << site.sectors << '\n';
    }
    for (const TensorUse& tensor : p.report.tensors) {
      totals << "tensor " << tensor.elements_read << ' ' << tensor.elements_written << ' ' << tensor.never_written
             << '\n';
    }
    for (const Finding& finding : p.report.findings) {
      totals << "finding " << static_cast<int>(finding.problem) << ' ' << finding.count << '\n';
    }
  }
}

}  // namespace
}  // namespace octile::tile
