// What the lists of cases are made of: the options that are crossed, and how the others take turns.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <vector>

#include "check/cases.h"

namespace octile::check {

inline constexpr std::array<std::int64_t, 8> kRows = {0, 1, 2, 3, 8, 33, 64, 129};
inline constexpr std::array<std::int64_t, 12> kSizes = {0, 1, 2, 7, 16, 31, 64, 100, 127, 128, 255, 300};
inline constexpr std::array kFloats = {DType::f16, DType::bf16, DType::f32, DType::f64};
inline constexpr std::array kNarrowFloats = {DType::f16, DType::bf16, DType::f32};
inline constexpr std::array kGranularities = {Granularity::tensor, Granularity::row, Granularity::column,
                                              Granularity::group};
inline constexpr std::array kScaleSources = {ScaleSource::dynamic, ScaleSource::given};
inline constexpr std::array kMappings = {Mapping::symmetric, Mapping::affine};
inline constexpr std::array kRoundings = {Rounding::nearest, Rounding::stochastic};
inline constexpr std::array kOrientations = {Orientation::row_major, Orientation::transposed, Orientation::both};
inline constexpr std::array kMultipliers = {Multiplier::none, Multiplier::per_column, Multiplier::per_row};
inline constexpr std::array kPrologues = {Prologue::gelu_tanh, Prologue::silu};
inline constexpr std::array kNorms = {Prologue::rms_norm, Prologue::layer_norm};
inline constexpr std::array kMasks = {Mask::inclusive, Mask::exclusive};
inline const std::vector<DType> kQuantized = [] {
  std::vector<DType> types;
  for (int i = 0; i <= static_cast<int>(kLastDType); ++i) {
    if (is_quantized(static_cast<DType>(i))) types.push_back(static_cast<DType>(i));
  }
  return types;
}();
inline constexpr std::array kActivations = {Activation::dynamic_per_token, Activation::dynamic_per_tensor,
                                            Activation::static_per_tensor};
inline constexpr std::array kLayouts = {WeightLayout::out_in, WeightLayout::in_out};
inline constexpr std::array kWeights = {WeightFormat::s8_per_channel, WeightFormat::s8_per_tensor};
inline constexpr std::array kProducts = {Product::none, Product::dequantized, Product::int8};
inline constexpr std::array kBools = {false, true};
// The groups of a weight; 0 is a whole row.
inline constexpr std::array<std::int64_t, 4> kGroups = {0, 32, 64, 128};
inline constexpr std::array<double, 3> kStaticScales = {0.03, 0.25, 1.7};

// Calls visit with every combination of an option of each list, the last list's the fastest.
template <class Visit>
void combine(const Visit& visit) {
  visit();
}
template <class Visit, class List, class... Lists>
void combine(const Visit& visit, const List& list, const Lists&... lists) {
  for (const auto& option : list) combine([&](const auto&... others) { visit(option, others...); }, lists...);
}

// Turns through the options that `combine` does not cross. SplitMix64 from a fixed start: the same list on every
// machine, and no two options in step with each other, as counters with a common divisor would be.
class Rotation {
 public:
  template <class Options>
  auto pick(const Options& options) {
    return options[static_cast<std::size_t>(next() % std::size(options))];
  }
  template <class T>
  T pick(std::initializer_list<T> options) {
    return options.begin()[next() % options.size()];
  }
  bool one_in(std::uint64_t n) { return next() % n == 0; }

  // Layout and data of a case, and how many rows fewer than the description's it runs.
  void dress(CaseBase& c, std::int64_t& max_rows) {
    c.layout = pick({Layout::compact, Layout::padded, Layout::sliced, Layout::repeating});
    c.data = pick({Data::normal, Data::normal, Data::heavy_tailed, Data::ties, Data::constant, Data::tiny,
                   Data::zero_rows, Data::huge, Data::poisoned});
    c.rows = max_rows;
    if (one_in(4)) max_rows += pick({1, 5});
  }

 private:
  std::uint64_t next() {
    state_ += 0x9e3779b97f4a7c15u;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  std::uint64_t state_ = 0;
};

// Of cases.cpp's list: what exercises products (cases_linear.cpp), and what is large (cases_large.cpp).
std::vector<Case> w8a8_cases();
std::vector<Case> large_cases(Task task);
std::vector<Case> grouped_cases(GemmFormat format);
std::vector<Case> expert_cases(GemmFormat format);
std::vector<Case> large_expert_cases(GemmFormat format);
std::vector<Case> linear_backward_cases(Task task);
std::vector<Case> expert_gradient_cases(Task task);
std::vector<Case> special_linear_cases(Task task);

// The options of a norm that take turns.
inline QuantizeDescription with_norm(Rotation& turn, QuantizeDescription d) {
  d.epsilon = turn.pick({1e-6, 1e-5, 0.0, 0.25});
  d.norm_weight = turn.pick({DType::f32, d.x});
  return d;
}

}  // namespace octile::check
