// One case of `octile check`, prepared: tensors, the oracle's results, and how to run a row on them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "check/cases.h"
#include "check/device_tensors.h"
#include "check/tensors.h"

namespace octile::check {

// How a trial is run.
struct Attempt {
  std::string kernel;
  int threads = 0;
  DeviceTensors* gpu = nullptr;  // null: on the CPU
  bool as_graph = false;         // on a GPU
};

// What the plan said of itself.
struct Choice {
  std::string sku;
  std::string explanation;
};

struct Trial {
  std::shared_ptr<Tensors> tensors;
  // Makes the plan and runs it. Throws what select and run throw, and std::runtime_error if the workspace was overrun.
  std::function<Choice(const Attempt&)> run;
  // If a row of an output depends on no other row of the inputs, and sums floats: runs some rows alone. Returns what is
  // wrong if their bits differ from those in the output; empty: nothing. Null: not such a case.
  std::function<std::string(const Attempt&)> rows_alone = {};
};

// The contents depend only on the case and the seed.
Trial make_trial(const Case& c, std::uint64_t seed);

}  // namespace octile::check
