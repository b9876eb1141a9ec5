// What the grouped plans share: rows of tensors by expert, and which threads take which experts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/access.h"
#include "base/ceil_div.h"
#include "base/message.h"
#include "base/parts.h"
#include "base/thread_pool.h"
#include "base/validate.h"
#include "cpu/support/rows.h"

namespace octile {

// Numbers of rows are s32.
inline constexpr std::int64_t kMaxGroupedRows = std::numeric_limits<std::int32_t>::max();
// Maximum number of rows of an expert that a single thread computes.
inline constexpr std::int64_t kFewGroupedRows = 128;
// Values of a weight from which on all threads share it: waking them up costs little beside reading it, and threads
// with a weight each would not finish together.
inline constexpr std::int64_t kLargeGroupedWeight = std::int64_t{1} << 24;

// What the descriptions of grouped plans have in common, beside what their dense plan's check sees.
template <class Description>
void check_grouped(std::string_view function, const Description& d) {
  check_size(function, "experts", d.experts);
  for (const auto& [name, size] : {std::pair{"m", d.m}, std::pair{"experts", d.experts}}) {
    if (size > kMaxGroupedRows) {
      fail(Status::unsupported, function, ": ", name, " = ", size, ", expected at most ", kMaxGroupedRows);
    }
  }
  if (d.activation == Activation::dynamic_per_tensor) {
    fail(Status::unsupported, function,
         ": activation = dynamic_per_tensor, expected a scale per token, a static one or none");
  }
  check_bytes(function, "W", d.experts, d.n * std::max<std::int64_t>(d.k, 1));
}

// The plan of an expert; its errors are the grouped plan's.
template <class ExpertPlan, class Description>
ExpertPlan select_expert(std::string_view function, const Description& d) {
  try {
    return ExpertPlan::select(d);
  } catch (const Error& error) {
    const std::string_view text = error.what();  // "LinearPlan::select: ..."
    throw Error(error.status(), message(function, text.substr(std::min(text.size(), text.find(": ")))));
  }
}

inline void check_offsets(const TensorChecks& checks, const ConstTensor& offsets, std::int64_t rows) {
  std::int64_t before = 0;
  for (std::int64_t e = 0; e < offsets.rows(); ++e) {
    const std::int64_t offset = load_integer(offsets, e);
    if (offset < before || offset > rows) {
      fail(Status::invalid_argument, checks.function(), ": offsets[", e, "] = ", offset, ", expected ", before, " to ",
           rows);
    }
    before = offset;
  }
}

inline int threads_of_groups(int threads) {
  return std::min(threads > 0 ? threads : cpu::hardware_threads(), cpu::kMaxThreads);
}

inline constexpr std::int64_t kPartBytes = 1 << 16;  // of rows that a thread moves or clears at a time

// Rows of y without an expert become 0.
inline void clear_rest(const ConstTensor& offsets, const Tensor& y, int threads) {
  const std::int64_t begin = load_integer(offsets, 0), end = load_integer(offsets, offsets.rows() - 1);
  const std::int64_t row_bytes = y.cols() * bits(y.dtype) / 8;
  if (row_bytes == 0) return;
  const std::int64_t step = std::max<std::int64_t>(kPartBytes / row_bytes, 1);
  for (const auto& [first, last] : {std::pair<std::int64_t, std::int64_t>{0, begin}, {end, y.rows()}}) {
    cpu::parallel_for(threads, ceil_div(last - first, step), [&, first = first, last = last](std::int64_t part) {
      for (std::int64_t r = first + part * step; r < std::min(last, first + (part + 1) * step); ++r) {
        std::memset(rows_at(y, r, 1).data, 0, static_cast<std::size_t>(row_bytes));
      }
    });
  }
}

// The experts of one run that have rows, the largest first.
class Schedule {
 public:
  struct Size {
    int threads;
    std::int64_t n;
    std::int64_t k;
  };

  // order: room for a number of each expert.
  Schedule(const ConstTensor& offsets, const Size& size, std::int32_t* order)
      : offsets_(offsets), order_(order), large_(size.n * size.k > kLargeGroupedWeight) {
    double units = 0;
    for (std::int64_t e = 0; e + 1 < offsets.rows(); ++e) {
      if (rows(e) == 0) continue;
      order_[count_++] = static_cast<std::int32_t>(e);
      units += cpu::product_units(rows(e), size.n, size.k);
    }
    threads_ = cpu::useful_threads(size.threads, units);
    std::sort(order_, order_ + count_,
              [&](std::int32_t a, std::int32_t b) { return rows(a) != rows(b) ? rows(a) > rows(b) : a < b; });
  }

  int threads() const { return threads_; }
  std::span<const std::int32_t> all() const { return {order_, count_}; }

  // many(expert) for those that all threads work at, few(expert, thread) for the others.
  template <class Many, class Few>
  void run(const Many& many, const Few& few) const {
    const std::size_t alone = threads_ > 1 && !large_ ? shared_out() : 0;
    for (const std::int32_t e : all().first(count_ - alone)) many(e);
    // Thread i begins with part alone * i / threads: the largest are dealt out to the threads, and come first.
    const auto of_thread = static_cast<std::int64_t>(alone) / threads_;
    cpu::parallel_for(threads_, static_cast<std::int64_t>(alone), [&](std::int64_t part, int thread) {
      const std::int64_t i = part / of_thread + part % of_thread * threads_;
      few(order_[count_ - alone + static_cast<std::size_t>(i)], thread);
    });
  }

 private:
  std::int64_t rows(std::int64_t e) const { return load_integer(offsets_, e + 1) - load_integer(offsets_, e); }

  // How many of the last of `order` the threads take one by one: a multiple of their number.
  std::size_t shared_out() const {
    const auto threads = static_cast<std::size_t>(threads_);
    std::size_t first = 0;
    while (first < count_ && rows(order_[first]) > kFewGroupedRows) ++first;
    // An expert that is larger than a thread's share of what is left goes to all of them.
    double left = 0;
    for (std::size_t i = first; i < count_; ++i) left += cost(order_[i]);
    for (; first < count_ && cost(order_[first]) * static_cast<double>(threads) > left; ++first) {
      left -= cost(order_[first]);
    }
    return (count_ - first) / threads * threads;
  }

  // Up to 16 rows take as long as reading the weight.
  double cost(std::int64_t e) const { return static_cast<double>(std::max<std::int64_t>(rows(e), 16)); }

  ConstTensor offsets_;
  std::int32_t* order_;
  bool large_;
  std::size_t count_ = 0;
  int threads_ = 1;
};

}  // namespace octile
