// One case of `octile check` made ready: tensors, what the oracle makes of them, and how to run a row on them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "cases.h"
#include "check_tensors.h"

namespace octile::cli {

struct Trial {
  std::shared_ptr<Tensors> tensors;
  // Makes the plan with this row and number of threads, runs it, and returns its sku. Throws what select and run throw,
  // and std::runtime_error if the workspace was overrun.
  std::function<std::string(const std::string& kernel, int threads)> run;
};

// The contents depend on the case and the seed alone.
Trial make_trial(const Case& c, std::uint64_t seed);

}  // namespace octile::cli
