#include "cli/bench/timing.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "cli/bench/peaks.h"

namespace octile::cli {

namespace {

constexpr int kRuns = 20;
constexpr int kMinRuns = 3;
constexpr int kBlock = 5;
constexpr double kLong = 1;  // a run of this many seconds is neither warmed up again nor repeated without need

// OpenBLAS's threads go on spinning for some 26 ms after a call, on the cores that the next run needs.
constexpr auto kPause = std::chrono::milliseconds(40);

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

double seconds_of(const std::function<void()>& work, const Schedule& schedule) {
  if (schedule.cold) parallel_read(schedule.threads, schedule.evictor.data(), schedule.evictor.size());
  const double start = seconds_now();
  work();
  return seconds_now() - start;
}

int affordable_runs(double seconds_each, const Schedule& schedule) {
  if (schedule.runs > 0) return schedule.runs;
  const int min_runs = seconds_each > kLong ? 1 : kMinRuns;
  return static_cast<int>(std::clamp(schedule.seconds / seconds_each, static_cast<double>(min_runs), double{kRuns}));
}

}  // namespace

Timing time_in_turns(const std::function<void()>& ours, const std::function<void()>& baseline,
                     const Schedule& schedule) {
  // The first run of all touches its memory, and may start threads.
  ours();
  baseline();
  std::this_thread::sleep_for(kPause);
  const double estimate_start = seconds_now();
  const double our_estimate = seconds_of(ours, schedule);
  seconds_of(baseline, schedule);
  const int runs = affordable_runs(seconds_now() - estimate_start, schedule);

  std::vector<double> ours_each;
  std::vector<double> baseline_each;
  while (static_cast<int>(ours_each.size()) < runs) {
    const int block = std::min(kBlock, runs - static_cast<int>(ours_each.size()));
    std::this_thread::sleep_for(kPause);
    if (our_estimate < kLong) ours();
    for (int i = 0; i < block; ++i) ours_each.push_back(seconds_of(ours, schedule));
    baseline();
    for (int i = 0; i < block; ++i) baseline_each.push_back(seconds_of(baseline, schedule));
  }
  return {median(ours_each), median(baseline_each), runs};
}

}  // namespace octile::cli
