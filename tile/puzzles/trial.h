// A trial of a case: its tensors, its launches, and the comparison with the expected values.
#pragma once

#include <cmath>
#include <cstring>
#include <utility>

#include "octile/tile/tile.h"
#include "puzzles/puzzle.h"

namespace octile::tile::puzzles {

// What does not depend on the executor. Every call with the same case gives the same inputs.
class Trial {
 public:
  explicit Trial(const Case& a_case) { outcome.the_case = a_case; }

  int size(int i) const { return outcome.the_case.sizes[static_cast<std::size_t>(i)]; }
  int blocks() const { return outcome.the_case.blocks; }
  Values values() const { return outcome.the_case.values; }
  void assume(bool) const {}  // of a proof: every case is so

  struct Place {
    std::int64_t line, at, length;
  };
  float next_float(Values values, Place place);
  float next_float() { return next_float(Values::mixed, {}); }
  float next_scale();           // [1/256, 1/128): of int8 operands, so that a product is about as large as a bias
  std::int32_t next_integer();  // any of the 2^32
  s8 next_byte();               // -127 .. 127

  Outcome outcome;
  bool keeps_tensors = false;

 protected:
  std::uint64_t next();

 private:
  std::uint64_t state_ = 0;
  int drawn_ = 0;
};

template <class AnyTrial>
inline constexpr bool has_values = requires(AnyTrial t) {
  t.outcome;
};  // not so of a proof

// Large values for int8: half of the maximum is a tie but for the roundings of the scale and of the quotient.
inline float enlarged(float value, Trial::Place place) {
  const float max = 48000.0f - 1024.0f * static_cast<float>(place.line % 16), size = std::fabs(value) * 300.0f;
  return std::copysign(size > 0.875f * max ? max : size > 0.4375f * max && size < 0.5f * max ? max / 2 : size, value);
}

template <class T>
T next_value(Trial& t, Trial::Place place) {
  if constexpr (std::is_same_v<T, f32>) return t.next_float(t.values(), place);
  if constexpr (std::is_same_v<T, f16>) {
    const float value = t.next_float(t.values(), place);
    return f16(t.values() == Values::large ? enlarged(value, place) : value);
  }
  if constexpr (std::is_same_v<T, s32>) return t.next_integer();
  if constexpr (std::is_same_v<T, s8>) return t.next_byte();
}

template <class T>
double as_double(T value) {
  return static_cast<double>(widen(value));
}

// value(i) gives element i.
template <class T = f32, class F>
Array<T> input(Trial& t, const char* name, std::vector<std::int64_t> shape, F value) {
  Array<T> result(name, std::move(shape));
  for (std::int64_t i = 0; i < result.size(); ++i) result.set(i, value(i));
  t.outcome.min_bytes += result.size() * static_cast<std::int64_t>(sizeof(T));
  t.outcome.inputs.push_back(result.name());
  if (t.keeps_tensors) t.outcome.tensors.push_back(tensor_values(result));
  return result;
}

// Values of the case's kind.
template <class T = f32>
Array<T> input(Trial& t, const char* name, std::vector<std::int64_t> shape) {
  const std::int64_t columns = shape.back();
  return input<T>(t, name, std::move(shape), [&t, columns](std::int64_t i) {
    return next_value<T>(t, {i / columns, i % columns, columns});
  });
}

inline Array<f32> scales(Trial& t, const char* name, std::vector<std::int64_t> shape) {
  return input(t, name, std::move(shape), [&t](std::int64_t) { return t.next_scale(); });
}

// Not written yet, and poisoned.
template <class T = f32>
Array<T> output(Trial& t, const char* name, std::vector<std::int64_t> shape) {
  Array<T> result(name, std::move(shape));
  t.outcome.min_bytes += result.size() * static_cast<std::int64_t>(sizeof(T));
  return result;
}

// Neither: the launches' own.
template <class T>
Array<T> between_launches(Trial&, const char* name, T value) {
  return Array<T>(name, {1}, {value});
}

// expected(i) gives an Expected for element i.
template <class T, class F>
void expect(Trial& t, const Array<T>& array, F expected) {
  Mismatch mismatch;
  TensorValues* const shown = t.keeps_tensors ? &t.outcome.tensors.emplace_back(tensor_values(array)) : nullptr;
  for (std::int64_t i = 0; i < array.size(); ++i) {
    const Expected want = expected(i);
    if (shown != nullptr) {
      shown->expected.push_back(want.value);
      shown->bounds.push_back(want.bound);
    }
    const double got = as_double(array[i]);
    const bool same = got == want.value || (std::isnan(got) && std::isnan(want.value));
    const bool written = array.written(i);
    const double error = std::fabs(got - want.value);
    if (written && !same && want.bound > 0) t.outcome.worst = std::fmax(t.outcome.worst, error / want.bound);
    if (written && (same || error <= want.bound)) continue;
    if (mismatch.count++ > 0) continue;
    mismatch.index = i;
    mismatch.got = got;
    mismatch.expected = want;
    mismatch.written = written;
  }
  const auto bytes = static_cast<std::size_t>(array.size()) * sizeof(T), before = t.outcome.outputs.size();
  t.outcome.outputs.resize(before + bytes);
  if (bytes != 0) memcpy(t.outcome.outputs.data() + before, array.data(), bytes);
  for (std::int64_t i = 0; i < array.size(); ++i) {  // which NaN it is depends on the compiler
    if (!std::isnan(as_double(array[i]))) continue;
    memset(t.outcome.outputs.data() + before + static_cast<std::size_t>(i) * sizeof(T), 0xFF, sizeof(T));
  }
  if (mismatch.count == 0) return;
  mismatch.tensor = array.name();
  mismatch.size = array.size();
  t.outcome.mismatches.push_back(mismatch);
}

// Adds what the launches' reports show: what wrote a wrong value, and whether an input was written.
void read_reports(Outcome& outcome);

// Of a program: thousands of times what the largest size needs, and a second's work.
inline constexpr std::int64_t kMaxSteps = 1'000'000;

struct CheckedTrial : Trial {
  explicit CheckedTrial(const Case& a_case) : Trial(a_case) { keeps_tensors = true; }
  template <class Kernel, class... Args>
  void launch(Grid grid, const Kernel& kernel, Args&&... args) {
    outcome.reports.push_back(
        tile::launch(CheckedCpu{.max_steps = kMaxSteps}, grid, kernel, std::forward<Args>(args)...));
  }
};

// Keeps no record of what it wrote: what it left out shows as the poison.
struct FastTrial : Trial {
  explicit FastTrial(const Case& a_case, int threads) : Trial(a_case), threads_(threads) {}
  template <class Kernel, class... Args>
  void launch(Grid grid, const Kernel& kernel, Args&&... args) {
    tile::launch(FastCpu{threads_}, grid, kernel, std::forward<Args>(args)...);
  }

 private:
  int threads_;
};

// P::run(trial, kernels...) is a puzzle: it makes the tensors, launches the kernels, and says what is expected.
template <class P, class... Kernels>
Outcome checked(const Case& a_case, const Kernels&... kernels) {
  CheckedTrial trial(a_case);
  P::run(trial, kernels...);
  read_reports(trial.outcome);
  return std::move(trial.outcome);
}
template <class P, class... Kernels>
Outcome fast(const Case& a_case, int threads, const Kernels&... kernels) {
  FastTrial trial(a_case, threads);
  P::run(trial, kernels...);
  return std::move(trial.outcome);
}

template <class P, class... Kernels>
Puzzle puzzle(std::vector<Wrong> wrong, const Kernels&... kernels) {
  return {P::facts(), type_name(typeid(P)), [kernels...](const Case& a_case) { return checked<P>(a_case, kernels...); },
          [kernels...](const Case& a_case, int threads) { return fast<P>(a_case, threads, kernels...); },
          std::move(wrong)};
}
template <class P, class... Kernels>
Wrong wrong(const char* kernel, std::optional<Problem> problem, const char* lesson, const Kernels&... kernels) {
  return {kernel, problem, lesson, [kernels...](const Case& a_case) { return checked<P>(a_case, kernels...); }};
}
// Kernels with a mistake: a function of the wrong kernel's name, the mistake, the lesson, and what the checker finds.
template <class P, class... But>
auto mistakes() {
  return [](const char* kernel, auto mistake, const char* lesson, std::optional<Problem> problem = {}) {
    return wrong<P>(kernel, problem, lesson, But{mistake}...);
  };
}
inline Wrong leaves_out(Wrong wrong) {
  wrong.leaves_out = true;
  return wrong;
}

// For a learner's main(): runs every case, says what went wrong first, and returns the exit status.
int check_main(const Facts& facts, const Try& a_try, const std::vector<std::string>& command);

template <class P, class... Kernels>
Try try_of(const Kernels&... kernels) {
  return {[&](const Case& a_case) { return checked<P>(a_case, kernels...); },
          [&](const Case& a_case, int threads) { return fast<P>(a_case, threads, kernels...); }};
}
template <class P, class... Kernels>
int check(int argc, char** argv, const Kernels&... kernels) {
  return check_main(P::facts(), try_of<P>(kernels...), {argv, argv + argc});
}

}  // namespace octile::tile::puzzles
