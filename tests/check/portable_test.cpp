// The portable rows run at every instruction set. At each that this machine has, with 1, 2 and 7 threads, they must
// give the oracle's bits, and float sums the same bits with any number of threads and for a row alone. So must the bf16
// rows for AVX-512 BF16 and AMX.
#include <gtest/gtest.h>

#include "check/sweep.h"

namespace octile {
namespace {

class PortableTest : public testing::TestWithParam<const char*> {};

TEST_P(PortableTest, AtEveryInstructionSet) {
  check::SweepOptions options;
  options.kernels = {GetParam()};
  options.seed = 7;
  options.every = check::kQuick;
  options.thorough = true;
#ifdef __SANITIZE_ADDRESS__
  options.threads = 7;  // the bits are compared without it
  options.every = 31;
#endif
  check::Sweep sweep(options);
  const bool portable = options.kernels.front().ends_with("_portable");
  if (!portable && sweep.rows().empty()) GTEST_SKIP() << "not of this architecture";
  ASSERT_EQ(sweep.rows().size(), 1u);
  if (!portable && !sweep.rows().front().info.reason.empty()) GTEST_SKIP() << sweep.rows().front().info.reason;
  sweep.run({});
  for (const check::Failure& f : sweep.failures()) ADD_FAILURE() << f.row << ": " << f.parameters << "\n  " << f.what;
  if (!portable) {  // part of their task's cases
    EXPECT_GE(sweep.passed(), options.every > check::kQuick ? 5 : 25);
    return;
  }
  EXPECT_GE(sweep.passed(), options.every > check::kQuick ? 60 : 160);
  for (const auto& [reason, cases] : sweep.rows().front().skipped) {
    EXPECT_EQ(reason, "takes the weight as it is, not packed") << cases << " cases";
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, PortableTest,
                         testing::Values("quantize_portable", "dequantize_portable", "quantize_backward_portable",
                                         "dequantize_backward_portable", "fake_quantize_portable",
                                         "fake_quantize_backward_portable", "prologue_quantize_portable",
                                         "w8a8_gemm_portable", "w8a16_gemm_portable", "w4a16_gemm_portable",
                                         "column_sum_portable", "w8a16_gemm_avx512bf16", "w4a16_gemm_avx512bf16",
                                         "w8a16_gemm_amx", "w4a16_gemm_amx"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace octile
