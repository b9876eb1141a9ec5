// Autotuning: what is measured, stored and reused, and which files are refused.
#include "octile/tile/autotune.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "octile/tile/tile.h"

namespace octile::tile {
namespace {

namespace fs = std::filesystem;

class AutotuneTest : public testing::Test {
 protected:
  AutotuneTest() : folder_(fs::temp_directory_path() / ("octile-autotune-" + std::to_string(getpid()))) {
    fs::create_directories(folder_);
  }
  ~AutotuneTest() override { fs::remove_all(folder_); }

  // A path that no other test has used: a process reads each file once.
  std::string file() {
    static int number = 0;
    return (folder_ / (std::to_string(++number) + ".tuning")).string();
  }
  static std::string contents(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }
  std::string with(const std::string& text) {
    const std::string path = file();
    std::ofstream(path) << text;
    return path;
  }

  // Blocks of 64 take 2 ms longer than those of 32.
  TunedLaunch run(const std::string& path, int n = 1000) {
    return autotuned(
        {.name = "slow_64", .sizes = {n}, .file = path},
        [&](auto executor, auto block) {
          ++launches_;
          if (block == 64) std::this_thread::sleep_for(std::chrono::milliseconds(2));
          Array<float> z("z", {n});
          launch(
              executor, Grid{cdiv(n, block)},
              [](auto& t, auto pz, int size, auto b) {
                const auto i = t.program_id(0) * b + t.arange(b);
                t.store(pz + i, 1.0f, i < size);
              },
              z, n, block);
          last_block_ = block;
        },
        choice(FastCpu{.threads = 1}, c<64>), choice(FastCpu{.threads = 1}, c<32>));
  }
  std::string refusal(const std::string& path) {
    try {
      run(path);
    } catch (const std::runtime_error& error) {
      EXPECT_NE(std::string(error.what()).find(path), std::string::npos) << error.what();
      return error.what();
    }
    return "accepted";
  }

  fs::path folder_;
  int launches_ = 0, last_block_ = 0;
};

TEST_F(AutotuneTest, MeasuresOnceForAClassOfSizes) {
  const std::string path = file();
  const TunedLaunch first = run(path);
  EXPECT_EQ(first.choice, "FastCpu threads=1 32");
  EXPECT_EQ(last_block_, 32);
  ASSERT_EQ(first.times.size(), 2u);
  EXPECT_GT(first.times[0].seconds, 2e-3);
  EXPECT_LT(first.seconds, first.times[0].seconds);
  const int measured = launches_;
  const TunedLaunch again = run(path, 1024);  // of the same class
  EXPECT_EQ(launches_, measured + 1);
  EXPECT_EQ(again.choice, first.choice);
  EXPECT_TRUE(again.times.empty());
  run(path, 1025);
  EXPECT_GT(launches_, measured + 2);

  const std::string text = contents(path);
  EXPECT_NE(text.find("octile tile tuning 1\ndevice cpu "), std::string::npos) << text;
  EXPECT_NE(text.find(" slow_64 1024 : FastCpu threads=1 32\n"), std::string::npos) << text;
  EXPECT_NE(text.find(" slow_64 2048 : FastCpu threads=1 32\nend 2\n"), std::string::npos) << text;

  // As another process would read it.
  const std::string copy = with(text);
  launches_ = 0;
  EXPECT_EQ(run(copy).seconds, again.seconds);
  EXPECT_EQ(launches_, 1);
}

TEST_F(AutotuneTest, AChoiceThatIsNoLongerOfferedIsMeasuredAgain) {
  const std::string path = file();
  run(path);
  std::string text = contents(path);
  text.replace(text.find("threads=1 32"), 12, "threads=1 16");
  const std::string other = with(text);
  EXPECT_EQ(run(other).times.size(), 2u);
  EXPECT_NE(contents(other).find("threads=1 32\nend 1\n"), std::string::npos) << contents(other);
}

TEST_F(AutotuneTest, WithoutAFileItStaysInTheProcess) {
  EXPECT_EQ(run("off", 3).times.size(), 2u);
  EXPECT_TRUE(run("off", 3).times.empty());
}

TEST_F(AutotuneTest, FilesThatAreRefused) {
  const std::string path = file();
  run(path);
  const std::string good = contents(path);
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    text.replace(text.find(from), from.size(), to);
    return refusal(with(text));
  };
  const auto has = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  has(changed("tuning 1", "tuning 2"), "its first line is \"octile tile tuning 2\"");
  has(changed("device cpu", "device cuda"), "has the line \"device cuda");
  has(changed("end 1", "end 2"), "has \"end 2\" after 1 choices");
  has(changed("end 1\n", ""), "is cut off");
  has(changed("end 1\n", "end 1\nmore\n"), "goes on after its end");
  has(changed(" : ", " "), "which is not a choice");
  has(refusal(with("")), "has no line");
  has(refusal(with(good.substr(0, good.find("device")) + "device " + std::string(1 << 23, 'x'))), "is larger than");
  has(refusal(folder_.string()), "is not a regular file");
  for (const char* seconds : {"-1", "0", "nan", "inf", "x", "1e999", ""}) {
    const std::size_t line = good.find("cpu"), start = good.find('\n', line) + 1;
    std::string text = good;
    text.replace(start, text.find(' ', start) - start, seconds);
    has(refusal(with(text)), "which is not a choice");
  }
  // A refused file is not changed, and once repaired it is read.
  const std::string damaged = with(good.substr(0, good.size() - 3));
  refusal(damaged);
  EXPECT_EQ(contents(damaged), good.substr(0, good.size() - 3));
  std::ofstream(damaged) << good;
  launches_ = 0;
  run(damaged);
  EXPECT_EQ(launches_, 1);
}

TEST_F(AutotuneTest, ChoicesThatCannotRun) {
  const auto run_or_throw = [&](const std::string& path, bool both) {
    return autotuned(
        {.name = "throws", .sizes = {}, .file = path},
        [&](auto, auto block) {
          if (block == 64 || both) throw std::invalid_argument("too large for this test");
        },
        choice(FastCpu{.threads = 1}, c<64>), choice(FastCpu{.threads = 1}, c<32>));
  };
  const TunedLaunch tuned = run_or_throw(file(), false);
  EXPECT_EQ(tuned.choice, "FastCpu threads=1 32");
  EXPECT_EQ(tuned.times[0].problem, "too large for this test");
  try {
    run_or_throw(file(), true);
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("no choice for throws can run"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("FastCpu threads=1 64: too large for this test"), std::string::npos);
  }
}

TEST_F(AutotuneTest, BadNamesAndSizes) {
  const auto tune = [](const std::string& name, std::int64_t size) {
    autotuned(
        {.name = name, .sizes = {size}, .file = "off"}, [](auto, auto) {}, choice(FastCpu{}, c<1>));
  };
  EXPECT_THROW(tune("", 1), std::invalid_argument);
  EXPECT_THROW(tune("two words", 1), std::invalid_argument);
  EXPECT_THROW(tune("a:b", 1), std::invalid_argument);
  EXPECT_THROW(tune("a\nb", 1), std::invalid_argument);
  EXPECT_THROW(tune("good", -1), std::invalid_argument);
}

TEST(AutotuneText, SaysWhatAChoiceIs) {
  EXPECT_EQ(tuning::text(choice(Cuda<Warpgroups<2>>{.band = 8}, c<128>, c<256>)),
            "Warpgroups<2,Warps<4,2,2,1>> band=8 cluster=1 128 256");
  EXPECT_EQ(tuning::text(choice(Cuda<Threads<1, 256, 4, 5>, Math::fast>{}, c<1>)), "Threads<1,256,4,5> fast 1");
}

}  // namespace
}  // namespace octile::tile
