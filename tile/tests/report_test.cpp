// The HTML report: its verdicts, what its text says, and that nothing in it can break out. report_html_test.py
// opens the pages that the last test writes; OCTILE_REPORT_PAGES names their directory.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <stdexcept>

#include "report_pages.h"

namespace octile::tile {
namespace {

using namespace report_pages;

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
  EXPECT_TRUE(has(report_html(race.report, race.page), "the same element at <code>report_pages.h:"));
}

// A mask that is true everywhere is a mask all the same.
TEST(TileReport, HintsAtTheMask) {
  auto x = normal("x", {40});
  const auto page = [&](auto mask) {
    const Report report = launch(
        CheckedCpu{}, Grid{1},
        [&](auto& t, auto px) {
          const auto i = t.arange(c<64>);
          if constexpr (mask != 0) (void)t.load(px + i, i < 100, 0.0f);
          if constexpr (mask == 0) (void)t.load(px + i);
        },
        x);
    return report_html(report, {});
  };
  EXPECT_TRUE(has(page(c<1>), "The mask is too wide: the index must stay below 40, the size of <code>x</code>."));
  EXPECT_TRUE(has(page(c<0>), "This access has no mask. Give it one: the index must stay below 40"));
}

TEST(TileReport, NamesBothAccessesOfAMissingBarrier) {
  auto x = normal("x", {40});
  const Report report = launch(
      CheckedCpu{}, Grid{1},
      [](auto& t, auto px) {
        const auto i = t.arange(c<32>);
        t.store(px + i, t.load(px + i + 1));
      },
      x);
  EXPECT_TRUE(has(report_html(report, {}), "lane 1, stores to <b>x[1]</b>; it also reads the same element at <code>"));
}

TEST(TileReport, NamesTheLoadOfAnUndefinedLane) {
  auto x = normal("x", {20}), z = normal("z", {32});
  const Report report = launch(
      CheckedCpu{}, Grid{1},
      [](auto& t, auto px, auto pz) {
        const auto i = t.arange(c<32>);
        t.store(pz + i, exp2(t.load(px + i, i < 20)));
      },
      x, z);
  EXPECT_TRUE(
      has(report_html(report, {}), "stores to <b>z[20]</b>; the lane was left undefined at <code>report_test.cpp:"));
}

TEST(TileReport, SaysThatALoopDoesNotEnd) {
  auto x = normal("x", {32});
  const Report report = launch(
      CheckedCpu{.max_steps = 9}, Grid{1},
      [](auto& t, auto px) {
        while (true) (void)t.load(px + t.arange(c<32>));
      },
      x);
  const std::string html = report_html(report, {});
  EXPECT_TRUE(has(html, "<h3>Endless loop</h3>"));
  EXPECT_TRUE(has(html, "<b>9 steps</b>"));
  EXPECT_TRUE(has(html, "<p>Program 0 does not end.</p>"));
}

TEST(TileReport, ScoreOfTheLeastPossible) {
  const Page p = masked_add();
  const std::string html = report_html(p.report, p.page);
  EXPECT_TRUE(has(html, "<b>1.60 KB</b>"));  // 200 elements in, 200 out, 4 bytes each
  EXPECT_TRUE(has(html, "<b>1.00 ×</b>"));
  EXPECT_TRUE(has(html, "48 of 448 lanes"));
  EXPECT_TRUE(has(html, "<b>89 %</b><span>1.60 KB of the 56 sectors of 32 bytes"));  // as the puzzles' score has it
}

TEST(TileReport, SourceIsTheKernelAlone) {
  const Page p = masked_add();
  const std::string html = report_html(p.report, p.page);
  EXPECT_TRUE(has(html, "MaskedAdd</td>") || has(html, "MaskedAdd {"));
  EXPECT_FALSE(has(html, "OuterAdd"));
  Page q = masked_add();
  q.page.sources = {{"elementwise_kernels.h", "too short"}};
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
  // A page comes under its name when it is whole, and nothing is left where that fails.
  const std::filesystem::path directory = std::filesystem::path(testing::TempDir()) / "octile_report_place";
  std::filesystem::create_directories(directory / "page.html" / "in_the_way");
  EXPECT_THROW(write_report((directory / "page.html").string(), p.report, p.page), std::runtime_error);
  EXPECT_FALSE(std::filesystem::exists(directory / "page.html.part"));
  std::filesystem::remove_all(directory);
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
