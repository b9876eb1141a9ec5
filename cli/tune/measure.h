// Times the kernels that a plan may choose among for a product.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "check/gpu.h"
#include "octile/linear.h"
#include "plan/tuning.h"

namespace octile::cli {

// The device, and how a run on it is timed.
class Stand {
 public:
  // On the first GPU, or with these threads of the CPU (0: all); `cold`: with emptied caches.
  Stand(bool on_gpu, bool cold, int threads);
  Device device() const { return gpu_ ? gpu_->device() : Device{}; }
  const check::Gpu* gpu() const { return gpu_ ? &*gpu_ : nullptr; }
  Stream stream() const { return gpu_ ? gpu_->stream() : Stream{}; }

  // Appends times of `work`: on a GPU of a few runs in a row.
  void time(const std::function<void()>& work, std::vector<double>& seconds);

 private:
  std::optional<check::Gpu> gpu_;
  bool cold_;
  int threads_;
  check::GpuBytes flush_{nullptr, [](std::byte*) {}};
  std::vector<char> evictor_;
};

struct Measured {
  std::string key;  // tuning_key()
  TunedChoice choice;
};

// The choice for the product of a layer, whose X is float: an int8 X is given quantized. Throws Error where no kernel
// can do it. The plans are the cost model's: use_tuning("off") before.
Measured measure(LinearDescription d, Stand& stand);

}  // namespace octile::cli
