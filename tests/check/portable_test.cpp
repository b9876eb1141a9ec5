// The portable rows, which run at every instruction set: each of this machine's, with 1, 2 and 7 threads, must give the
// oracle's bits, and float sums the same bits with any number of threads and for a row alone.
#include <gtest/gtest.h>

#include "check/sweep.h"

namespace octile {
namespace {

class PortableTest : public testing::TestWithParam<const char*> {};

TEST_P(PortableTest, AtEveryInstructionSet) {
  check::SweepOptions options;
  options.kernels = {std::string(GetParam()) + "_portable"};
  options.seed = 7;
  options.every = check::kQuick;
  options.thorough = true;
#ifdef __SANITIZE_ADDRESS__
  options.threads = 7;  // the bits are compared without it
  options.every = 31;
#endif
  check::Sweep sweep(options);
  sweep.run({});
  for (const check::Failure& f : sweep.failures()) ADD_FAILURE() << f.row << ": " << f.parameters << "\n  " << f.what;
  ASSERT_EQ(sweep.rows().size(), 1u);
  EXPECT_GE(sweep.passed(), options.every > check::kQuick ? 60 : 160);
  for (const auto& [reason, cases] : sweep.rows().front().skipped) {
    EXPECT_EQ(reason, "takes the weight as it is, not packed") << cases << " cases";
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, PortableTest,
                         testing::Values("quantize", "dequantize", "quantize_backward", "dequantize_backward",
                                         "fake_quantize", "fake_quantize_backward", "prologue_quantize", "w8a8_gemm",
                                         "w8a16_gemm", "w4a16_gemm", "column_sum"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace octile
