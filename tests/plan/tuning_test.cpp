// Measured choices: they are used and explained, they change no bit of an exact path, and a file that is damaged, for
// another device or malicious is refused with a reason.
#include "plan/tuning.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <fstream>
#include <locale>
#include <random>
#include <thread>

#include "octile/linear.h"
#include "octile/octile.h"
#include "plan/plan.h"

namespace octile {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kReference = "w8a8_gemm_reference";  // in every build; only a scalar one would choose it

// A temporary folder as the user's cache; nothing is tuned before or after.
class TuningTest : public testing::Test {
 protected:
  TuningTest() {
    std::string name = (fs::temp_directory_path() / "octile_tuning_XXXXXX").string();
    folder_ = mkdtemp(name.data());
    setenv("XDG_CACHE_HOME", folder_.c_str(), 1);
    use_tuning("off");
  }
  ~TuningTest() override {
    use_tuning("off");
    unsetenv("XDG_CACHE_HOME");
    fs::remove_all(folder_);
  }
  fs::path write(std::string_view text) const {
    const fs::path path = folder_ / "file.tuning";
    std::ofstream(path) << text;
    return path;
  }
  fs::path write_default(std::string_view text) const {
    const fs::path path = default_tuning_path(tuning_device({}));
    EXPECT_TRUE(path.string().starts_with(folder_.string())) << path;
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text;
    return path;
  }
  const fs::path& folder() const { return folder_; }

 private:
  fs::path folder_;
};

std::string file_for(const GemmProblem& p, std::int64_t m, std::string_view kernel, std::string_view device = {}) {
  TuningFile file{device.empty() ? tuning_device({}) : std::string(device), {}};
  file.choices[tuning_key(p)][m] = {m, std::string(kernel), 0.25, std::string(kernel), 0.5};
  return text_of(file);
}

std::string product_of(const LinearPlan& plan) {
  const std::string sku = plan.sku();
  return sku.substr(sku.rfind(' ') + 1);
}

bool says(const LinearPlan& plan, const std::string& words) { return plan.explain().find(words) != std::string::npos; }

LinearDescription w8a8(std::int64_t m) { return {.m = m, .n = 48, .k = 96, .threads = 2}; }

LinearDescription w4a16(std::int64_t m) {
  LinearDescription d{.m = m, .n = 48, .k = 96, .activation = Activation::none, .weight = WeightFormat::s4_group};
  d.weight.group = 32;
  return d;
}

TEST_F(TuningTest, AMeasuredRowIsChosenAndExplained) {
  const std::string free_choice = product_of(LinearPlan::select(w8a8(64)));
  EXPECT_TRUE(says(LinearPlan::select(w8a8(64)), "\ntuning: off\n"));
  const fs::path path = write(file_for(gemm_problem(w8a8(64)), 64, kReference));
  use_tuning(path.string());
  const LinearPlan plan = LinearPlan::select(w8a8(64));
  EXPECT_EQ(product_of(plan), kReference);
  EXPECT_TRUE(says(plan, "  tuning: w8a8_gemm_reference measured 250 ms at m = 64, the cost model's choice too\n"))
      << plan.explain();
  EXPECT_TRUE(says(plan, "\ntuning: " + path.string() + "\n")) << plan.explain();
  // A kernel named in the description wins.
  LinearDescription named = w8a8(64);
  named.kernel = free_choice;
  EXPECT_EQ(product_of(LinearPlan::select(named)), free_choice);
  use_tuning("off");
  EXPECT_EQ(product_of(LinearPlan::select(w8a8(64))), free_choice);
}

TEST_F(TuningTest, AChoiceServesMoreThanHalfOfItsRows) {
  const std::string free_choice = product_of(LinearPlan::select(w8a8(64)));
  if (free_choice == kReference) GTEST_SKIP() << "a scalar build has only reference rows";
  use_tuning(write(file_for(gemm_problem(w8a8(64)), 64, kReference)).string());
  for (const std::int64_t m : {33, 40, 64}) EXPECT_EQ(product_of(LinearPlan::select(w8a8(m))), kReference) << m;
  for (const std::int64_t m : {1, 31, 32, 65, 128}) EXPECT_NE(product_of(LinearPlan::select(w8a8(m))), kReference) << m;
  // A plan for more rows uses that row when it runs this few.
  const LinearPlan plan = LinearPlan::select(w8a8(500));
  EXPECT_TRUE(says(plan, "  up to 64 rows: w8a8_gemm_reference: expected ")) << plan.explain();
  EXPECT_TRUE(says(plan, "; tuning: w8a8_gemm_reference measured 250 ms at m = 64")) << plan.explain();
}

TEST_F(TuningTest, OtherProductsFollowTheModel) {
  use_tuning(write(file_for(gemm_problem(w8a8(64)), 64, kReference)).string());
  std::vector<LinearDescription> others(6, w8a8(64));
  others[0].n = 49;
  others[1].k = 97;
  others[2].threads = 1;
  others[3].packed_weight = true;
  others[4].y = DType::f16;
  others[5].weight_layout = WeightLayout::in_out;
  for (const LinearDescription& d : others) {
    EXPECT_NE(tuning_key(gemm_problem(d)), tuning_key(gemm_problem(w8a8(64))));
    EXPECT_FALSE(says(LinearPlan::select(d), "measured"));
  }
  LinearDescription same = w8a8(64);
  same.bias = true;
  EXPECT_EQ(product_of(LinearPlan::select(same)), kReference);
}

TEST_F(TuningTest, TheProgramsLocaleIsNone) {
  struct Grouped : std::numpunct<char> {
    char do_thousands_sep() const override { return '.'; }
    char do_decimal_point() const override { return ','; }
    std::string do_grouping() const override { return "\3"; }
  };
  LinearDescription d = w8a8(2000);
  d.n = d.k = 4096;
  const std::string text = file_for(gemm_problem(d), 2000, kReference);
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new Grouped));
  EXPECT_EQ(file_for(gemm_problem(d), 2000, kReference), text);
  std::locale::global(before);
}

TEST_F(TuningTest, ARowThatCannotDoItIsNotChosen) {
  const std::vector<KernelInfo> table = kernels();
  const auto absent = std::find_if(table.begin(), table.end(), [](const KernelInfo& row) {
    return row.operation == "w8a8_gemm" && !row.reason.empty();
  });
  if (absent == table.end()) GTEST_SKIP() << "every row runs here";
  const std::string free_choice = product_of(LinearPlan::select(w8a8(64)));
  use_tuning(write(file_for(gemm_problem(w8a8(64)), 64, absent->name)).string());
  const LinearPlan plan = LinearPlan::select(w8a8(64));
  EXPECT_EQ(product_of(plan), free_choice);
  EXPECT_TRUE(says(plan, ", cannot do this\n")) << plan.explain();
}

// Y of `d` on fixed operands.
std::vector<float> run(const LinearDescription& d) {
  std::mt19937 random(7);
  const auto size = [](std::int64_t rows, std::int64_t cols) { return static_cast<std::size_t>(rows * cols); };
  std::vector<float> x(size(d.m, d.k)), y(size(d.m, d.n)), scale(size(d.n, 4));
  std::vector<std::int8_t> w(size(d.n, d.k));
  for (float& value : x) value = std::normal_distribution<float>()(random);
  for (float& value : scale) value = std::uniform_real_distribution<float>(0.01f, 0.1f)(random);
  for (std::int8_t& value : w) value = static_cast<std::int8_t>(random());
  LinearArgs args;
  args.x = matrix(x.data(), d.m, d.k);
  args.weight = matrix(w.data(), d.n, d.k);
  args.weight_scale = vector(scale.data(), d.n);
  if (d.weight.granularity == Granularity::group) {
    const bool s4 = d.weight.type == DType::s4;
    if (s4) args.weight = matrix_s4(reinterpret_cast<std::uint8_t*>(w.data()), d.n, d.k);
    args.weight_scale = matrix(scale.data(), d.n, d.k / d.weight.group);
  }
  args.y = matrix(y.data(), d.m, d.n);
  const LinearPlan plan = LinearPlan::select(d);
  std::vector<std::byte> workspace(plan.workspace_size());
  plan.run(args, {workspace.data(), workspace.size()});
  return y;
}

TEST_F(TuningTest, ExactPathsHaveTheSameBits) {
  std::vector<LinearDescription> descriptions;
  for (const std::int64_t m : {1, 5, 64}) {
    for (const WeightFormat& weight : {WeightFormat::s8_per_channel, WeightFormat::s8_group, WeightFormat::s4_group}) {
      LinearDescription d = w8a8(m);
      d.weight = weight;
      if (weight.granularity == Granularity::group) d.weight.group = 32;
      descriptions.push_back(d);
    }
  }
  for (const LinearDescription& d : descriptions) {
    use_tuning("off");
    const std::vector<float> expected = run(d);
    const GemmProblem p = gemm_problem(d);
    for (const GemmKernel* row : gemm_kernels()) {
      if (row->task != task_of(p) || row->device != DeviceType::cpu || !refusal(*row, p).empty()) continue;
      use_tuning(write(file_for(p, d.m, row->name)).string());
      EXPECT_EQ(product_of(LinearPlan::select(d)), row->name);
      EXPECT_EQ(run(d), expected) << row->name << " " << d.m;
    }
  }
}

TEST_F(TuningTest, SumsOfFloatsOnACpuFollowNone) {
  const std::string free_choice = product_of(LinearPlan::select(w4a16(64)));
  if (free_choice == "w4a16_gemm_reference") GTEST_SKIP() << "a scalar build has only reference rows";
  const std::string text = file_for(gemm_problem(w4a16(64)), 64, "w4a16_gemm_reference");
  const fs::path path = write_default(text);
  use_tuning("");
  EXPECT_EQ(product_of(LinearPlan::select(w4a16(64))), free_choice);
  EXPECT_TRUE(says(LinearPlan::select(w4a16(64)), "\ntuning: " + path.string() + ", for exact sums alone\n"));
  use_tuning(path.string());
  EXPECT_EQ(product_of(LinearPlan::select(w4a16(64))), free_choice);
}

TEST_F(TuningTest, TheDefaultFileIsFollowed) {
  use_tuning("");
  EXPECT_TRUE(says(LinearPlan::select(w8a8(64)), ".tuning does not exist\n"));
  write_default(file_for(gemm_problem(w8a8(64)), 64, kReference));
  use_tuning("");
  EXPECT_EQ(product_of(LinearPlan::select(w8a8(64))), kReference);
}

TEST_F(TuningTest, ReadsWhatItWrites) {
  TuningFile file{"cuda Some GPU", {}};
  file.choices[tuning_key(gemm_problem(w8a8(64)))][64] = {64, std::string(kReference), 1.5e-5, std::string(kReference),
                                                          1};
  file.choices[tuning_key(gemm_problem(w8a8(64)))][1] = {1, std::string(kReference), 2e-300, std::string(kReference),
                                                         1e9};
  file.choices[tuning_key(gemm_problem(w4a16(8)))][8] = {8, "w4a16_gemm_reference", 1, "w4a16_gemm_reference", 1};
  const TuningFile read = read_tuning(write(text_of(file)));
  EXPECT_EQ(read.device, file.device);
  EXPECT_EQ(text_of(read), text_of(file));
}

// An unusable file: select() throws if the file was named, and uses the model if it was only found.
void expect_refused(const fs::path& path, const std::string& words) {
  use_tuning(path.string());
  try {
    LinearPlan::select(w8a8(64));
    ADD_FAILURE() << "was not refused: " << words;
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::invalid_argument);
    const std::string what = error.what();
    EXPECT_EQ(what.find("LinearPlan::select: the tuning file " + path.string() + " "), 0u) << what;
    EXPECT_NE(what.find(words), std::string::npos) << what << "\nexpected " << words;
  }
  EXPECT_THROW(LinearBackwardPlan::select({.m = 4, .n = 8, .k = 8}), Error);
}

TEST_F(TuningTest, DamagedFilesAreRefusedInWords) {
  const std::string good = file_for(gemm_problem(w8a8(64)), 64, kReference);
  const auto with = [&](std::string_view old, std::string_view put) {
    std::string text = good;
    EXPECT_NE(text.find(old), std::string::npos) << old;
    return text.replace(text.find(old), old.size(), put);
  };
  const std::pair<std::string, std::string> cases[] = {
      {"", "is not a tuning file: it has no line"},
      {"{\"json\": 1}\n", "is not a tuning file: its first line is \"{\"json\": 1}\""},
      {std::string("\0\x1b[31m\n", 7), "its first line is \"??[31m\""},
      {std::string(100'000, 'x') + "\n", "its first line is \"xxxxxx"},
      {with("library ", "library 9"), "is of version \"90.1.0\" of the library, this is "},
      {with("device ", "chip "), "line 3 is \"chip "},
      {good.substr(0, good.size() / 2), "is cut off"},
      {good.substr(0, good.rfind("end")), "is cut off: it has no \"end\""},
      {good.substr(0, good.size() - 1), "is cut off"},
      {with("end 1", "end 2"), "line 5 has \"end 2\" after 1 products"},
      {with("end 1", "end -1"), "line 5 has \"-1\" where a number belongs"},
      {good + "more\n", "goes on after its end"},
      {with("64 ", "0 "), "line 4 has m = 0"},
      {with("64 ", "1e3 "), "line 4 has \"1e3\" where a number belongs"},
      {with("64 ", "99999999999999999999 "), "where a number belongs"},
      {with("0.25", "nan"), "line 4 has \"nan\" where a number belongs"},
      {with("0.25", "inf"), "line 4 has \"inf\""},
      {with("0.25", "-1"), "line 4 has \"-1\""},
      {with("0.25", "0"), "line 4 has \"0\""},
      {with("0.25", "1e999"), "line 4 has \"1e999\""},
      {with("0.25", "fast"), "line 4 has \"fast\""},
      {with("w8a8_gemm_reference", "w8a8_gemm_magic"),
       "line 4 has \"w8a8_gemm_magic\", which is not a kernel of this library"},
      {with("w8a8_gemm_reference", "w4a8_gemm_reference"),
       "line 4 has the kernel w4a8_gemm_reference for \"w8a8_gemm\""},
      // What builds before release 0.1.0 wrote.
      {with("w8a8_gemm_reference", "two_steps"), "line 4 has \"two_steps\", which is not a kernel of this library"},
      {with("w8a8_gemm n=", "w8a8_linear n="), "line 4 has the kernel w8a8_gemm_reference for \"w8a8_linear\""},
      {with("64 w8a8_gemm_reference", "w8a8_gemm_reference"), "line 4 has \"w8a8_gemm_reference\" where a number"},
      {with("end 1", "64"), "line 5 is \"64\", which is not a product"},
  };
  for (const auto& [text, words] : cases) {
    SCOPED_TRACE(words);
    expect_refused(write(text), words);
    const fs::path path = write_default(text);
    use_tuning("");
    const LinearPlan plan = LinearPlan::select(w8a8(64));
    EXPECT_TRUE(says(plan, "\ntuning: none; " + path.string() + " ")) << plan.explain();
    EXPECT_TRUE(says(plan, words)) << plan.explain();
  }
  std::string twice = good;
  const std::size_t line = good.find("64 "), end = good.find("end");
  twice.insert(end, good.substr(line, end - line));
  expect_refused(write(twice), "line 5 has a product for the second time");
}

TEST_F(TuningTest, AnyDamageIsRefusedOrAnotherGoodFile) {
  TuningFile file{tuning_device({}), {}};
  for (const std::int64_t m : {1, 64, 4096}) {
    file.choices[tuning_key(gemm_problem(w8a8(m)))][m] = {m, std::string(kReference), 1e-3, std::string(kReference),
                                                          2e300};
  }
  const std::string good = text_of(file);
  std::mt19937 random(3);
  int accepted = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string text = good;
    for (std::uint32_t changes = random() % 3 + 1; changes > 0; --changes) {
      const std::size_t at = random() % text.size();
      const char byte = random() % 2 ? good[random() % good.size()] : static_cast<char>(random());
      switch (random() % 4) {
        case 0:
          text[at] = byte;
          break;
        case 1:
          text.insert(at, 1, byte);
          break;
        case 2:
          text.erase(at, random() % 20 + 1);
          break;
        default:
          text.insert(at, good.substr(random() % good.size(), random() % 200));
      }
      if (text.empty()) break;
    }
    try {
      const std::string again = text_of(parse_tuning(text));
      EXPECT_EQ(text_of(parse_tuning(again)), again) << text;
      ++accepted;
    } catch (const Error& error) {
      const std::string_view what = error.what();
      EXPECT_EQ(std::find_if(what.begin(), what.end(), [](unsigned char c) { return c < 0x20 || c > 0x7e; }),
                what.end());
    }
  }
  EXPECT_GT(accepted, 0);  // for example, a changed digit of a time
}

TEST_F(TuningTest, WhatIsNoFileIsRefused) {
  expect_refused(folder() / "absent", "cannot be read: No such file");
  expect_refused(folder(), "is not a regular file");
  const fs::path fifo = folder() / "fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  expect_refused(fifo, "is not a regular file");
  expect_refused("/dev/zero", "is not a regular file");
  const fs::path huge = write("octile tuning 1\n");
  ASSERT_EQ(truncate(huge.c_str(), std::int64_t{1} << 40), 0);
  expect_refused(huge, "is larger than ");
}

TEST_F(TuningTest, AFileOfAnotherDeviceIsRefused) {
  const GemmProblem p = gemm_problem(w8a8(64));
  expect_refused(write(file_for(p, 64, kReference, "cpu Another CPU")), "is for \"cpu Another CPU\", this is cpu ");
  expect_refused(write(file_for(p, 64, kReference, "tpu 4")), "is for \"tpu 4\"");
  // A file for a GPU does not affect plans for a CPU.
  use_tuning(write(file_for(p, 64, kReference, "cuda NVIDIA H200")).string());
  const LinearPlan plan = LinearPlan::select(w8a8(64));
  EXPECT_TRUE(says(plan, " is for \"cuda NVIDIA H200\", this is cpu ")) << plan.explain();
  EXPECT_FALSE(says(plan, "measured"));
}

TEST_F(TuningTest, ManyThreadsReadItOnce) {
  const fs::path path = write(file_for(gemm_problem(w8a8(64)), 64, kReference));
  use_tuning(path.string());
  std::vector<std::string> chosen(8);
  std::vector<std::thread> threads;
  for (std::string& name : chosen) threads.emplace_back([&] { name = product_of(LinearPlan::select(w8a8(64))); });
  for (std::thread& thread : threads) thread.join();
  fs::remove(path);
  chosen.push_back(product_of(LinearPlan::select(w8a8(64))));
  for (const std::string& name : chosen) EXPECT_EQ(name, kReference);
}

#if !defined(__SANITIZE_THREAD__)  // which does not follow a fork of a multithreaded process
// Whatever a thread of the parent is doing: some of many children are made while it has the tuning's lock.
TEST_F(TuningTest, AForkedChildDoesNotWaitForTheParentsThreads) {
  std::atomic<bool> over = false;
  std::thread other([&] {
    while (!over) tuning_of({});
  });
  bool waits = false;
  for (int i = 0; i < 100 && !waits; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      tuning_of({});
      _exit(0);
    }
    int status = 0;
    waits = child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status);
  }
  over = true;
  other.join();
  EXPECT_FALSE(waits);
}
#endif

}  // namespace
}  // namespace octile
