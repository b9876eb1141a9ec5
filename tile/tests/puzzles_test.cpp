// The solutions of the puzzles: right at every size, without a finding, the same bits on both CPU executors. And every
// wrong kernel is caught, and blamed on the line that its source marks.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <set>
#include <string>

#include "puzzles/elementwise.h"
#include "puzzles/linear.h"
#include "puzzles/linear_kernels.h"
#include "puzzles/products_kernels.h"
#include "puzzles/rows.h"
#include "puzzles/starter.h"

namespace octile::tile::puzzles {
namespace {

std::string source_line(const Site& site) {
  std::ifstream file(site.file);
  EXPECT_TRUE(file.good()) << site.file;
  std::string line;
  for (unsigned i = 0; i < site.line; ++i) std::getline(file, line);
  return line;
}

bool marked(const Site& site, const std::string& kernel) {
  const std::string line = source_line(site), mark = "// wrong: ";
  const std::size_t marks = line.find(mark);
  if (marks == std::string::npos) return false;
  const std::string names = ", " + line.substr(marks + mark.size()) + ", ";
  return names.find(", " + kernel.substr(0, kernel.find('.')) + ", ") != std::string::npos;
}

// What the checker says of the first case that goes wrong.
void expect_caught(const Puzzle& puzzle, const Wrong& wrong) {
  for (const Case& a_case : puzzle.facts.cases) {
    const Outcome outcome = wrong.run(a_case);
    if (outcome.right() && outcome.clean()) continue;
    const std::string said = text(puzzle.facts, outcome);
    SCOPED_TRACE(said);
    if (!wrong.problem) {
      EXPECT_TRUE(outcome.clean());
      ASSERT_FALSE(outcome.right());
      EXPECT_EQ(outcome.mismatches[0].written, !wrong.leaves_out);
      if (wrong.leaves_out) return;
      const Site* const site = blamed(outcome, outcome.mismatches[0]);
      ASSERT_NE(site, nullptr);
      EXPECT_TRUE(marked(*site, wrong.kernel)) << source_line(*site);
    } else {
      ASSERT_FALSE(outcome.clean());
      const Report& report = outcome.reports[outcome.reports[0].clean() ? 1 : 0];
      const Finding& finding = report.findings[0];
      const Site& site = report.sites[static_cast<std::size_t>(finding.site)];
      EXPECT_STREQ(name(finding.problem), name(*wrong.problem));
      EXPECT_TRUE(marked(site, wrong.kernel)) << source_line(site);
      EXPECT_NE(said.find(source_line(site)), std::string::npos);
    }
    return;
  }
  ADD_FAILURE() << "not caught";
}

TEST(Puzzles, AllAreThere) {
  std::set<std::string> names;
  int number = 0;
  for (const Puzzle& puzzle : puzzles()) {
    EXPECT_EQ(puzzle.facts.number, ++number);
    EXPECT_TRUE(names.insert(puzzle.facts.name).second);
    EXPECT_FALSE(puzzle.wrong.empty());
    EXPECT_EQ(find_puzzle(puzzle.facts.name), &puzzle);
    EXPECT_EQ(find_puzzle(std::to_string(number)), &puzzle);
    int stated = 0;
    for (const Case& a_case : puzzle.facts.cases) {
      stated += a_case.stated ? 1 : 0;
      EXPECT_EQ(a_case.sizes.size(), puzzle.facts.size_names.size());
    }
    EXPECT_EQ(stated, 1);
    EXPECT_TRUE(puzzle.facts.cases[0].stated);
  }
  EXPECT_EQ(number, 18);
  EXPECT_EQ(find_puzzle("19"), nullptr);
}

TEST(Puzzles, KernelsAreRight) {
  for (const Puzzle& puzzle : puzzles()) {
    int cases = 0;
    const Verdict verdict = judge(puzzle.facts.cases, {puzzle.checked, puzzle.fast, true, [&] { ++cases; }});
    EXPECT_TRUE(verdict.right()) << text(puzzle.facts, verdict);
    EXPECT_EQ(cases, static_cast<int>(puzzle.facts.cases.size()));
    EXPECT_EQ(verdict.cases, cases);
  }
}

TEST(Puzzles, WrongKernelsAreCaughtAtTheirLine) {
  for (const Puzzle& puzzle : puzzles()) {
    for (const Wrong& wrong : puzzle.wrong) {
      SCOPED_TRACE(wrong.kernel);
      expect_caught(puzzle, wrong);
    }
  }
}

TEST(Puzzles, AnotherWayToTheSameResult) {
  for (const Case& a_case : Convolution::facts().cases) {
    const Outcome outcome = checked<Convolution>(a_case, products::ConvolutionByPixel{});
    EXPECT_TRUE(outcome.right() && outcome.clean()) << text(Convolution::facts(), outcome);
  }
  // Pixel by pixel, a warp reads single elements of different images.
  const Case stated = Convolution::facts().cases[0];
  EXPECT_LT(score(checked<Convolution>(stated, products::ConvolutionByPixel{})).sector_use(),
            score(checked<Convolution>(stated, products::Convolution{})).sector_use());
}

struct SoftmaxOfPowersOf2 {  // log2(e) first, and the maximum after it: a rounding as large as the element is
  void operator()(auto& t, auto x, auto z, int n0, int length, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    auto highest = t.full(b0, c<1>, -kInfinity);
    auto total = t.full(b0, c<1>, 0.0f);
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      const auto v = kLog2E * t.load(x + i * length + j, (i < n0) & (j < length), -kInfinity);
      const auto new_max = maximum(highest, max(v));
      total = total * exp2(highest - new_max) + sum(exp2(v - new_max));
      highest = new_max;
    }
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      const auto in = (i < n0) & (j < length);
      const auto v = kLog2E * t.load(x + i * length + j, in, 0.0f);
      t.store(z + i * length + j, exp2(v - highest) * (1.0f / total), in);
    }
  }
};

TEST(Puzzles, SoftmaxInAnotherOrderOfRoundings) {
  for (const Case& a_case : LongSoftmax::facts().cases) {
    const Outcome outcome = checked<LongSoftmax>(a_case, SoftmaxOfPowersOf2{});
    EXPECT_TRUE(outcome.right() && outcome.clean()) << text(LongSoftmax::facts(), outcome);
  }
}

struct Empty {
  void operator()(auto&, auto, auto, int, auto) const {}
};

TEST(Puzzles, NothingWritten) {
  const Verdict verdict =
      judge(MaskedAdd::facts().cases,
            {[](const Case& a_case) { return checked<MaskedAdd>(a_case, Empty{}); },
             [](const Case& a_case, int threads) { return fast<MaskedAdd>(a_case, threads, Empty{}); }});
  EXPECT_EQ(text(MaskedAdd::facts(), verdict),
            "2 masked_add: wrong, at n0 = 200\n  z: 200 of 200 are wrong; first: z[0] of 200 was never written\n");
}

struct WritesItsInput {
  void operator()(auto& t, auto x, auto z, int n0, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto v = t.load(x + i, i < n0);
    t.store(z + i, v + 10.0f, i < n0);
    t.store(x + i, v, i < n0);  // wrong: WritesItsInput
  }
};

TEST(Puzzles, InputsMayNotBeWritten) {
  const Outcome outcome = checked<MaskedAdd>(MaskedAdd::facts().cases[0], WritesItsInput{});
  EXPECT_TRUE(outcome.clean());
  ASSERT_EQ(outcome.mismatches.size(), 1u);
  EXPECT_TRUE(outcome.mismatches[0].input);
  EXPECT_EQ(outcome.mismatches[0].count, 200);
  EXPECT_TRUE(marked(*blamed(outcome, outcome.mismatches[0]), "WritesItsInput"));
  EXPECT_NE(text(MaskedAdd::facts(), outcome).find("store to x, which is an input"), std::string::npos);
}

TEST(Puzzles, ExecutorsHaveToAgree) {
  const Puzzle& puzzle = *find_puzzle("long_sum");
  const auto other = [&](const Case& a_case, int threads) {
    Outcome outcome = puzzle.fast(a_case, threads);
    if (threads == 2) outcome.outputs[3] ^= std::byte{1};
    return outcome;
  };
  const Verdict verdict = judge(puzzle.facts.cases, {puzzle.checked, other});
  EXPECT_FALSE(verdict.right());
  EXPECT_EQ(verdict.disagreement, "the fast executor gives other bits than the checked one with 2 threads");
}

TEST(Puzzles, StatedSizesAlone) {
  const Puzzle& puzzle = *find_puzzle("batched_matmul");
  const Wrong& wrong = puzzle.wrong[0];
  Verdict verdict = judge(puzzle.facts.cases, {wrong.run, puzzle.fast, false});
  EXPECT_TRUE(verdict.right());  // as in the notebook: all is square
  EXPECT_EQ(verdict.cases, 1);
  verdict = judge(puzzle.facts.cases, {wrong.run, puzzle.fast});
  EXPECT_FALSE(verdict.right());
  EXPECT_NE(text(puzzle.facts, verdict).find("(a hidden size)"), std::string::npos);
}

TEST(Puzzles, Starter) {
  const Toolbox toolbox{{"/usr/include", "/home/some one/it's"}, {"/usr/lib/libx.a"}};
  const std::string command = compile_command("a b/outer.cpp", toolbox);
  EXPECT_NE(command.find(" -I /usr/include -I '/home/some one/it'\\''s' 'a b/outer.cpp' /usr/lib/libx.a "),
            std::string::npos);
  EXPECT_NE(command.find(" -o 'a b/outer' && 'a b/outer'"), std::string::npos);
  EXPECT_NE(compile_command("outer.cpp", toolbox).find(" -o outer && ./outer"), std::string::npos);
  const std::string text = starter(*find_puzzle("3"), "octile puzzles check outer.cpp", command);
  EXPECT_EQ(text.find("// Puzzle 3: add every element"), 0u);
  EXPECT_NE(text.find("//   octile puzzles check outer.cpp\n"), std::string::npos);
  EXPECT_NE(text.find("//   " + command + "\n"), std::string::npos);
  EXPECT_NE(text.find("puzzles::check<puzzles::OuterAdd>(argc, argv, MyKernel{})"), std::string::npos);
}

TEST(Puzzles, Score) {
  const Puzzle& puzzle = *find_puzzle("masked_add");
  const Score result = score(puzzle.checked(puzzle.facts.cases[0]));
  EXPECT_EQ(result.moved_bytes, 1600);
  EXPECT_EQ(result.times_minimum(), 1);
  EXPECT_EQ(result.used_bytes, 1600);
  EXPECT_EQ(result.sector_bytes, 2 * (24 + 4) * 32);  // the mask cuts into the last block: four loads for one
  EXPECT_EQ(result.lanes, 2 * 224);
  EXPECT_EQ(result.active, 2 * 200);
  const Puzzle& matmul = *find_puzzle("batched_matmul");
  EXPECT_EQ(matmul.checked(matmul.facts.cases[0]).reports[0].flops, 4 * 2 * 32 * 32 * 32);
  const Puzzle& attention = *find_puzzle("scalar_attention");
  const Score again = score(attention.checked(attention.facts.cases[0]));
  ASSERT_EQ(again.reuse.size(), 3u);
  EXPECT_EQ(again.reuse[0].times(), 1);  // q
  EXPECT_EQ(again.reuse[1].times(), 4);  // k: each of four programs reads all of it
}

// ---- Values that no case has ----

Outcome quantized_rows(float special) {
  CheckedTrial trial({{3, 70}, true});
  Array<f16> x("x", {3, 70});
  for (int i = 0; i < 210; ++i) x.set(i, f16(static_cast<float>(i - 100) * 0.25f));
  x.set(75, f16(special));
  Array<s8> q("q", {3, 70});
  Array<f32> scale("scale", {3});
  trial.launch({1}, linear::QuantizeRows{}, x, q, scale, 3, 70, c<4>, c<64>);
  EXPECT_TRUE(std::isnan(scale[1]));
  EXPECT_FALSE(std::isnan(scale[0]) || std::isnan(scale[2]));
  for (int i = 70; i < 140; ++i) EXPECT_EQ(q[i], 0);
  EXPECT_EQ(q[0], -127);
  return trial.outcome;
}

TEST(Puzzles, ValuesThatAreNotFinite) {
  for (const float special : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity()}) {
    EXPECT_TRUE(quantized_rows(special).clean());
  }
}

}  // namespace
}  // namespace octile::tile::puzzles
