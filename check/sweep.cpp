#include "check/sweep.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <chrono>
#include <stdexcept>

#include "base/message.h"
#include "check/bounds.h"
#include "check/refusal.h"
#include "cpu/support/isa.h"
#include "cpu/support/rows.h"
#include "cuda/forms.h"
#include "plan/choose.h"

namespace octile::check {

namespace {

constexpr int kThreads[] = {1, 2, 7};

// A row cannot do this case; not a failure.
struct Refused {
  std::string reason;
};

// Whether the plan has this row for a step; not only for unaligned operands.
bool lists(std::string_view sku, std::string_view row) {
  for (std::size_t begin = 0; begin <= sku.size();) {
    const std::size_t end = std::min(sku.find(" + ", begin), sku.size());
    const std::string_view step = sku.substr(begin, end - begin);
    if (step.substr(0, step.find(" (")) == row) return true;
    begin = end + 3;
  }
  return false;
}

// Sets a global of the library for a while.
template <class T>
class Override {
 public:
  Override(std::atomic<T>& global, T value) : global_(global), before_(global.exchange(value)) {}
  ~Override() { global_ = before_; }
  Override(const Override&) = delete;
  Override& operator=(const Override&) = delete;

 private:
  std::atomic<T>& global_;
  T before_;
};

std::int64_t total(const std::vector<RowResult>& rows, std::int64_t (*count)(const RowResult&)) {
  std::int64_t sum = 0;
  for (const RowResult& row : rows) sum += count(row);
  return sum;
}

}  // namespace

std::int64_t RowResult::skipped_cases() const {
  std::int64_t count = 0;
  for (const auto& [reason, cases] : skipped) count += cases;
  return count;
}

Sweep::Sweep(const SweepOptions& options) : options_(options) {
  if (options.device == DeviceType::cuda) gpu_.emplace(0, options.own_allocations);
  cuda::forced_form = options.form;
  const std::vector<KernelInfo> all = kernels();
  rows_.reserve(all.size());  // tasks_ points into it
  for (const KernelInfo& info : all) {
    const auto asked_for = [&](const std::string& kernel) { return matches(info.name, kernel); };
    const bool wanted =
        options.kernels.empty() || std::any_of(options.kernels.begin(), options.kernels.end(), asked_for);
    if (info.device != options.device || !wanted) continue;
    RowResult& row = rows_.emplace_back(RowResult{info});
    const Work work = work_of(info.name);
    tasks_[work.task].push_back(&row);
    row.sums_in_float = work.bound != Bound::exact || sums_columns(work.task);
  }
}

std::int64_t Sweep::steps() {
  std::int64_t count = 0;
  for (const auto& [task, rows] : tasks_) {
    count += static_cast<std::int64_t>(cases_of(task).size() * rows.size());
  }
  return count;
}

void Sweep::run(const Observer& observer) {
  for (const auto& [task, rows] : tasks_) {
    const std::vector<Case>& list = cases_of(task);
    for (std::size_t i = 0; i < list.size() && !gpu_lost_; ++i) run_case(rows, list[i], i, observer);
  }
}

const std::vector<Case>& Sweep::cases_of(Task task) {
  auto [entry, added] = cases_.try_emplace(task);
  if (added) entry->second = cases(task, options_.device, options_.every);
  return entry->second;
}

// One case with all rows of its operation.
void Sweep::run_case(const std::vector<RowResult*>& rows, const Case& c, std::size_t index, const Observer& observer) {
  const int threads = options_.threads > 0 ? options_.threads : kThreads[index % std::size(kThreads)];
  const std::string parameters = message(describe(c), " threads=", threads, " seed=", options_.seed, " case=", index);
  std::optional<Trial> trial;
  for (RowResult* const row : rows) {
    if (gpu_lost_) return;
    if (!row->info.reason.empty()) {
      ++row->skipped[row->info.reason];
    } else {
      if (observer.on_case) observer.on_case(row->info.name, parameters);
      // The case's number in the seed gives each one inputs of its own.
      if (!trial) trial = make_trial(c, options_.seed * 0x9e3779b97f4a7c15u + index);
      run_trial(*row, *trial, threads, parameters);
    }
    if (observer.on_step) observer.on_step(row->info.name);
  }
}

void Sweep::run_trial(RowResult& row, const Trial& trial, int threads, const std::string& parameters) {
  const auto began = std::chrono::steady_clock::now();
  try {
    const std::string what = options_.thorough ? try_everywhere(row, trial) : try_row(row, trial, threads);
    what.empty() ? static_cast<void>(++row.passed) : fail(row, parameters, what);
  } catch (const Refused& refused) {
    ++row.skipped[refused.reason];
  } catch (const std::exception& error) {
    fail(row, parameters, error.what());
    gpu_lost_ = gpu_ && !gpu_->usable();
  }
  row.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// What is wrong; empty: nothing.
std::string Sweep::run_and_compare(RowResult& row, const Trial& trial, const Attempt& attempt) {
  Tensors& tensors = *trial.tensors;
  tensors.spoil();
  const Choice choice = run_or_refuse(row, trial, attempt);
  if (!lists(choice.sku, row.info.name)) {
    const std::string refusal = refusal_of(row.info.name, choice.explanation);
    if (gpu_ && !refusal.empty()) throw Refused{refusal};
    return message("the plan chose ", choice.sku);
  }
  const Tensors::Comparison comparison = tensors.compare(bounds_of(choice.sku));
  row.worst = std::max(row.worst, comparison.worst);
  if (!comparison.difference.empty()) return comparison.difference;
  return tensors.inputs_changed() ? "an input was written to" : "";
}

std::string Sweep::try_row(RowResult& row, const Trial& trial, int threads) {
  Tensors& tensors = *trial.tensors;
  Attempt attempt{row.info.name, threads, gpu_ ? &*gpu_ : nullptr};
  const std::string what = run_and_compare(row, trial, attempt);
  if (options_.digest) row.digest = tensors.digest(row.digest);
  if (!what.empty()) return what;

  attempt.threads = threads == 1 ? 3 : 1;
  attempt.as_graph = gpu_ && options_.graphs;
  if (!attempt.as_graph && !tensors.sums_in_float()) return {};
  const auto first = tensors.snapshot();
  tensors.spoil();
  trial.run(attempt);
  if (tensors.outputs_are(first)) return {};
  if (attempt.as_graph) return "other bits as a graph than without";
  return message("other bits with ", attempt.threads, " threads than with ", threads);
}

std::string Sweep::try_everywhere(RowResult& row, const Trial& trial) {
  constexpr double kOutgrown = 0, kFitting = 1e9;  // cache sizes: outputs are written around the caches, or through
  for (int i = 0; i < cpu::kIsaCount; ++i) {
    const auto isa = static_cast<cpu::Isa>(i);
    // Rows for one instruction set run at no narrower one. No portable row is compiled for avx512bf16.
    const bool portable = matches(row.info.name, "portable");
    if (!cpu::machine_has(isa)) continue;
    if (portable ? isa == cpu::Isa::avx512bf16 : !matches(row.info.name, cpu::name(isa))) continue;
    const Override ceiling(cpu::isa_ceiling, isa);
    std::vector<std::vector<std::byte>> first;
    for (const int threads : kThreads) {
      if (options_.threads > 0 && threads != options_.threads) continue;
      const Override caches(cpu::cache_bytes, (threads + i) % 2 == 0 ? kOutgrown : kFitting);
      const Attempt attempt{row.info.name, threads};
      std::string what = run_and_compare(row, trial, attempt);
      if (what.empty() && !first.empty() && !trial.tensors->outputs_are(first)) what = "other bits than with 1 thread";
      if (what.empty() && first.empty()) {
        first = trial.tensors->snapshot();
        if (trial.rows_alone) what = trial.rows_alone(attempt);
      }
      if (!what.empty()) return message(what, ", at ", cpu::name(isa), " with ", threads, " threads");
    }
  }
  return {};
}

// The row's own "no" is a skip; a case that no row can do is an error in the case, unless rows are missing:
// on a GPU there is no reference.
Choice Sweep::run_or_refuse(const RowResult& row, const Trial& trial, const Attempt& attempt) {
  try {
    return trial.run(attempt);
  } catch (const Error& error) {
    if (error.status() != Status::unsupported) throw;
    const std::string refusal = refusal_of(row.info.name, error.what());
    if (gpu_) throw Refused{refusal.empty() ? one_line(error.what(), std::string(name(options_.device))) : refusal};
    trial.run({"", attempt.threads});
    if (refusal.empty()) throw;
    throw Refused{refusal};
  }
}

void Sweep::fail(RowResult& row, const std::string& parameters, const std::string& what) {
  ++row.failed;
  failures_.push_back({row.info.name, parameters, what});
}

std::int64_t Sweep::passed() const {
  return total(rows_, [](const RowResult& row) { return row.passed; });
}
std::int64_t Sweep::failed() const {
  return total(rows_, [](const RowResult& row) { return row.failed; });
}
std::int64_t Sweep::skipped() const {
  return total(rows_, [](const RowResult& row) { return row.skipped_cases(); });
}

}  // namespace octile::check
