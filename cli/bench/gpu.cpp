// Times on a GPU, and what it can do at most.
#include "cli/bench/gpu.h"

#include <algorithm>

namespace octile::cli {

namespace {

constexpr int kRuns = 40;
constexpr int kWarmUp = 5;
constexpr int kHostRuns = 200;
constexpr int kHostBurst = 50;      // without a wait: far from the end of the queue
constexpr double kHostSeconds = 1;  // of the GPU; fewer runs where that is over
constexpr std::size_t kFlush = std::size_t{256} << 20;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

GpuTiming time_on(const Gpu& gpu, const std::function<void()>& work, int runs, bool cold) {
  const GpuBytes evictor = gpu.allocate(kFlush);
  const auto flush = [&] {
    if (cold) gpu.fill(evictor.get(), std::byte{1}, kFlush);
  };
  GpuTiming timing;
  timing.runs = runs > 0 ? runs : kRuns;
  gpu.time(kWarmUp, flush, work);
  timing.seconds = median(gpu.time(timing.runs, flush, work));
  std::vector<double> host;
  const int host_runs = static_cast<int>(std::clamp<double>(kHostSeconds / timing.seconds, 10, kHostRuns));
  while (static_cast<int>(host.size()) < host_runs) {
    for (int i = 0; i < std::min(kHostBurst, host_runs); ++i) {
      const double start = seconds_now();
      work();
      host.push_back(seconds_now() - start);
    }
    gpu.wait();
  }
  timing.host = median(host);
  return timing;
}

Peaks peaks_of(const Gpu& gpu) {
  Peaks peaks;
  peaks.int8.rate = gpu.int8_rate(peaks.int8.how);
  peaks.f32 = {peaks.int8.rate / 2, "f16 tensor cores"};
  peaks.read = {gpu.read_rate(), "read from memory"};
  peaks.copy = {gpu.copy_rate(), "copied in memory, bytes read and written"};
  return peaks;
}

}  // namespace octile::cli
