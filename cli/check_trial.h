// One case of `octile check` made ready: tensors, what the oracle makes of them, and how to run a row on them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "cases.h"
#include "check_device.h"
#include "check_tensors.h"

namespace octile::cli {

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
};

// The contents depend on the case and the seed alone.
Trial make_trial(const Case& c, std::uint64_t seed);

}  // namespace octile::cli
