// The memory of one case of `octile check`: inputs with random contents, outputs with canaries around and between their
// elements, and the comparison of what a kernel wrote with what the oracle wrote. All of it is host memory; what a GPU
// works on is a copy (check_device.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "check/bounds.h"
#include "check/cases.h"
#include "check/operands.h"
#include "octile/tensor.h"
#include "plan/bound.h"

namespace octile::check {

inline constexpr std::uint64_t kEmptyDigest = 0xcbf29ce484222325u;

class Tensors {
 public:
  Tensors(const CaseBase& base, std::uint64_t seed)
      : layout_(base.layout), data_(base.data), large_(base.large), random_(seed) {}

  // Views of memory that this object owns, in the case's layout, one for each operand. Between the elements of an input
  // there is NaN, or -1.
  std::vector<Tensor> add(const std::vector<Operand>& operands);
  // Data::near_ties and sparse_ties: fills the f32 inputs, now that the scales are known.
  void put_near_ties(const std::function<double(std::int64_t, std::int64_t)>& scale);

  // Data::huge stays so small that a float sum of it cannot overflow. Before the inputs are made.
  void keep_sums_finite() { sums_finite_ = true; }
  // A scale that makes this case's data fill about a range of -q_max..q_max.
  double typical_scale(DType dtype, int q_max) const;
  std::uint64_t random() { return random_(); }

  // Fills all outputs with the canary, or with what they held at first.
  void spoil();
  // The current values of the outputs become the expected ones: the oracle's, or those of rows with these bounds.
  void keep_expected(const Bounds& bounds = {});
  // An output whose values are sums in float, by a row of this task: what the error of element (r, c) depends on, apart
  // from the rounding to the output's type. An output without it is compared bit for bit (any NaN is NaN).
  using Facts = std::function<SumFacts(Bound bound, std::int64_t r, std::int64_t c)>;
  void set_facts(std::string_view output, Task task, const Facts& facts);

  struct Comparison {
    std::string difference;  // empty: as expected
    double worst = 0;        // the largest error as a share of its bound
  };
  Comparison compare(const Bounds& bounds) const;

  bool sums_in_float() const;
  // The bytes of all outputs.
  std::vector<std::vector<std::byte>> snapshot() const;
  bool outputs_are(const std::vector<std::vector<std::byte>>& snapshot) const;
  // Of the outputs' elements, in their order, after those before it; one NaN is as good as another.
  std::uint64_t digest(std::uint64_t before) const;
  // Some input has changed since it was filled.
  bool inputs_changed() const;

  // The memory of one tensor, for a copy of it elsewhere.
  struct Block {
    std::byte* data;
    std::size_t size;
    std::size_t lead;  // bytes before what a compact view would begin with
    std::byte around;  // what belongs around the copy
  };
  std::vector<Block> blocks();

 private:
  struct Input {
    std::vector<std::byte> bytes;
    std::vector<std::byte> before;
    Tensor view;
    Content content;
  };
  struct Output {
    std::string name;
    std::vector<std::byte> bytes;
    std::vector<std::byte> first;
    std::vector<std::byte> expected;
    Tensor view;
    Task task;
    Facts facts;

    ConstTensor expected_view() const;
    Comparison compare(const Bounds& bounds, const Bounds& expected_bounds) const;
    std::string compare_elements(const Bounds& bounds, const Bounds& expected_bounds, double& worst) const;
  };

  Tensor add_input(const Operand& operand);
  Tensor add_output(const Operand& operand);
  double scale(const Operand& operand, std::int64_t row);
  double largest(DType dtype) const;
  double float_value(DType dtype, std::int64_t row, std::int64_t col);
  double uniform();  // -1..1
  double normal();
  bool one_in(std::uint64_t n) { return random_() % n == 0; }

  Layout layout_;
  Data data_;
  bool large_;
  bool sums_finite_ = false;
  std::optional<int> exponent_;  // of the scales beside ties
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Input>> inputs_;
  std::vector<std::unique_ptr<Output>> outputs_;
  Bounds expected_bounds_;  // of the rows that computed what is expected
};

// As s8 -53, as f16 -15.6, as bf16 and f32 -2.7e7: in no format a value that a result is likely to have.
inline constexpr std::byte kCanary{0xcb};
bool all_canaries(std::span<const std::byte> bytes);

// Scratch for a plan: of exactly the size it asked for, unaligned, with canaries on both sides.
class GuardedWorkspace {
 public:
  static constexpr std::size_t kGuard = 65;

  explicit GuardedWorkspace(std::size_t size);
  Workspace get() { return {bytes_.data() + kGuard, bytes_.size() - 2 * kGuard}; }
  bool intact() const;

 private:
  std::vector<std::byte> bytes_;
};

}  // namespace octile::check
