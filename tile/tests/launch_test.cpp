// Launches on both CPU executors: grids, threads and exceptions, loops, program indices, large tiles, far pointers.
#include <stdexcept>

#include "operators.h"

namespace octile::tile {
namespace {

// ---- Exceptions ----

TEST(Exceptions, OfAKernelReachTheCaller) {
  Array<f32> z("z", {64});
  const auto kernel = [](auto& t, auto pz) {
    if (static_cast<int>(t.program_id(0)) == 40) throw std::runtime_error("at 40");
    t.store(pz + t.program_id(0), 1.0f);
  };
  for (const int threads : {1, 4}) {
    try {
      launch(FastCpu{.threads = threads}, Grid{64}, kernel, z);
      ADD_FAILURE() << threads << " threads";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "at 40");
    }
  }
  EXPECT_THROW(launch(CheckedCpu{}, Grid{64}, kernel, z), std::runtime_error);
}

TEST(Exceptions, OfEveryThread) {
  Array<f32> z("z", {64});
  const auto kernel = [](auto& t, auto pz) { t.store(pz + t.program_id(3), 1.0f); };
  EXPECT_THROW(launch(FastCpu{.threads = 4}, Grid{1000}, kernel, z), std::invalid_argument);
}

TEST(Exceptions, EndALaunchEarly) {
  Array<s32> z("z", {1}, {0});
  const auto kernel = [](auto& t, auto pz) {
    if (static_cast<int>(t.program_id(0)) == 0) throw std::runtime_error("at 0");
    t.atomic_add(pz, 1);
  };
  EXPECT_THROW(launch(FastCpu{.threads = 2}, Grid{1 << 22}, kernel, z), std::runtime_error);
  EXPECT_LT(z[0], (1 << 22) - 1);
}

}  // namespace
}  // namespace octile::tile
