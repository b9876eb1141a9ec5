// The solutions of the puzzles on the emulated GPU: within their tolerance at every size, and the bits of the CPU where
// no sum of floats is in an order of the executor's own.
#include <gtest/gtest.h>

#include <new>
#include <set>

#include "puzzles/cuda_trial.h"
#include "puzzles/solutions.h"

namespace octile::tile::puzzles {

DeviceBytes::DeviceBytes(std::size_t bytes) : bytes_(bytes) {
  data_ = static_cast<std::byte*>(::operator new (bytes, std::align_val_t{256}));
}
DeviceBytes::~DeviceBytes() { ::operator delete (data_, std::align_val_t{256}); }
void DeviceBytes::upload(const std::byte* from) const { memcpy(data_, from, bytes_); }
void DeviceBytes::download(std::byte* to) const { memcpy(to, data_, bytes_); }

namespace {

TEST(Emulated, KernelsAreRight) {
  const std::set<std::string> sums_of_its_own = {"batched_matmul", "quantized_matmul", "backward_dx", "backward_dw"};
  for (const Puzzle& puzzle : puzzles()) {
    for (const Case& a_case : puzzle.facts.cases) {
      SCOPED_TRACE(puzzle.facts.name + ": " + text(puzzle.facts, a_case));
      CudaTrial trial(a_case);
      EXPECT_TRUE(run_solution(puzzle.facts.number, trial));
      EXPECT_TRUE(trial.outcome.right()) << text(puzzle.facts, trial.outcome);
      if (sums_of_its_own.count(puzzle.facts.name) == 0) {
        EXPECT_TRUE(trial.outcome.outputs == puzzle.checked(a_case).outputs) << "other bits";
      }
    }
  }
}

}  // namespace
}  // namespace octile::tile::puzzles
