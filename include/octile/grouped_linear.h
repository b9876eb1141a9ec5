// Octile: E linear layers of one shape, each for its own rows: the experts of a mixture. And their gradients.
//
// The rows are sorted by expert. The offsets are on the plan's device, so a run never waits for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "octile/linear.h"
#include "octile/plan.h"
#include "octile/tensor.h"

namespace octile {

// Expert e has the rows offsets[e] .. offsets[e + 1] - 1; it may have none. Rows before offsets[0] or from offsets[E]
// on belong to no expert: a rank that holds some of the experts passes its part of the offsets.
//
//   z[r] = expert e's linear layer of X[gather ? token[r] : r], as LinearPlan computes it: the same bits
//   without slots  Y[r] = z[r]; rows that belong to no expert are left unchanged
//   with slots     z is f32, and row t of Y is a token's:
//                  acc = fma(router_weight[t, s], z[place[t, s], n], acc) from acc = 0, s in ascending order, over those s
//                  whose place is some expert's row;  Y[t, n] = round_to_y(acc)
//
// f32 is f64 when y is f64. X is quantized once per row of X, however many experts a token goes to. The bits of Y
// do not depend on the number of threads or, with an s8 X, on the backend.
struct GroupedLinearDescription {
  std::int64_t experts = 0;
  std::int64_t m = 0;  // maximum number of rows of all experts together, below 2^31; `run` accepts fewer
  std::int64_t n = 0;
  std::int64_t k = 0;       // with s8 X: at most kMaxContraction
  std::int64_t tokens = 0;  // with gather or slots: maximum number of tokens
  bool gather = false;      // rows of X are tokens, and `token` says which one a row is
  std::int64_t slots = 0;   // experts of a token; 0: rows of Y are the sorted rows
  DType x = DType::f32;     // f16, bf16, f32, f64; or s8: X is already quantized
  DType y = DType::f32;     // f16, bf16, f32; f64 exactly when x is f64, or for s8 x with f64 scales
  Activation activation = Activation::dynamic_per_token;  // or static_per_tensor, or none
  double static_scale = 0;                                // with Activation::static_per_tensor: of X, for all experts
  WeightFormat weight = WeightFormat::s8_per_channel;
  bool packed_weight = false;  // `run` takes what `pack` wrote, the fastest form
  bool bias = false;
  bool clear_rest = false;  // rows of Y that belong to no expert become 0; without slots
  Device device = {};
  int threads = 0;          // maximum number of CPU threads; 0: all. Results do not depend on it
  std::string kernel = {};  // empty: the fastest. A row's name, or an arch ("reference"), restricts the choice
};

// Values of offsets, token and place are checked only on a CPU. On a GPU nothing is copied to the host, so the offsets
// may change between runs of a graph.
// Offsets and tokens out of range then read and write outside of the tensors.
struct GroupedLinearArgs {
  ConstTensor x = {};        // (M, K); with gather (tokens, K)
  ConstTensor x_scale = {};  // only if x is s8 and not static: one for each row of x
  ConstTensor offsets = {};  // (E + 1), s32: ascending, 0 to M
  ConstTensor token = {};    // (M), s32, with gather: rows of x
  ConstTensor weight = {};   // (E * N, K), stacked by expert; packed: (packed_weight_size()), u8, at a multiple of 64
                             // bytes
  ConstTensor weight_scale = {};       // (E * N); (E) per tensor; (E * N, K / group) in groups. Absent if packed
  ConstTensor weight_zero_point = {};  // (E * N, K / group), s32, within -8..7 (unchecked on a GPU); absent if packed
  ConstTensor bias = {};               // (E, N), dtype of y
  ConstTensor place = {};              // (tokens, slots), s32, with slots: rows among the sorted ones; others: no term
  ConstTensor router_weight = {};      // (tokens, slots), scale_type(y), with slots
  Tensor y = {};                       // (M, N); with slots (tokens, N)
};

class OCTILE_API GroupedLinearPlan : public Plan {
 public:
  static GroupedLinearPlan select(const GroupedLinearDescription& description);
  // Bytes of the packed weight of all experts; 0 without packed_weight. It is the concatenation of the experts' packed
  // weights, each that of a LinearPlan with the same n, k and format.
  std::size_t packed_weight_size() const;
  // Packs the weights of all experts on the CPU, shaped as in GroupedLinearArgs.
  void pack(const LinearPackArgs& args) const;
  Verdict can_implement(const GroupedLinearArgs& args) const;
  void run(const GroupedLinearArgs& args, Workspace workspace = {}, Stream stream = {}) const;

 private:
  using Plan::Plan;
};

// The gradients of E layers from dY and the int8 tensors that the forward used; any subset, each expert's as
// LinearBackwardPlan computes them from its rows: the same bits. An expert without rows has dW = 0 and dB = 0, or adds
// nothing to dw; rows of dX that belong to no expert are left unchanged. On a GPU an int8 product needs a
// gradient_block, and 16-bit sums have no fixed order: LinearBackwardPlan's bound holds.
struct GroupedLinearBackwardDescription {
  std::int64_t experts = 0;
  std::int64_t m = 0;  // maximum number of rows of all experts together, below 2^31
  std::int64_t n = 0;  // at most kMaxContraction for an int8 dX
  std::int64_t k = 0;
  DType dy = DType::f32;               // float type of dY, dX and dB; scales are scale_type(dy)
  std::optional<DType> dw_dtype = {};  // of dW: dy's, or f32
  bool dw_accumulate = false;          // dW is added to what dw holds: LinearBackwardDescription
  Product dx = Product::dequantized;
  Product dw = Product::dequantized;
  bool db = false;
  Activation activation = Activation::dynamic_per_token;  // or static_per_tensor: the scale that Xq was quantized with
  double static_scale = 0;                                // with static_per_tensor: of X, for all experts
  WeightFormat weight = WeightFormat::s8_per_channel;     // s8_per_channel or s8_per_tensor
  Rounding rounding = Rounding::nearest;                  // of dY in the int8 products
  std::int64_t gradient_block = 0;                        // LinearBackwardDescription
  bool clear_rest = false;                                // rows of dX that belong to no expert become 0
  Device device = {};
  int threads = 0;          // maximum number of CPU threads; 0: all. Results do not depend on it
  std::string kernel = {};  // empty: the fastest. A row's name, or an arch ("reference"), restricts the choice
};

// Values of offsets are checked only on a CPU.
struct GroupedLinearBackwardArgs {
  ConstTensor dy = {};            // (M, N)
  ConstTensor offsets = {};       // (E + 1), s32: ascending, 0 to M; for an int8 dW at most kMaxContraction apart
  ConstTensor weight = {};        // (E * N, K), s8, stacked by expert; for dX
  ConstTensor weight_scale = {};  // (E * N), or (E) per tensor; for dX
  ConstTensor x = {};             // (M, K), s8; for dW
  ConstTensor x_scale = {};       // (M), or absent if static; for dW
  Tensor dx = {};                 // (M, K)
  Tensor dw = {};                 // (E * N, K)
  Tensor db = {};                 // (E, N)
  std::uint64_t seed = 0;         // of stochastic rounding: expert e has seed + e
};

class OCTILE_API GroupedLinearBackwardPlan : public Plan {
 public:
  static GroupedLinearBackwardPlan select(const GroupedLinearBackwardDescription& description);
  // The guarantee for one output, as in LinearBackwardPlan.
  const PrecisionGuarantee& precision_guarantee(Gradient gradient) const;
  using Plan::precision_guarantee;
  Verdict can_implement(const GroupedLinearBackwardArgs& args) const;
  void run(const GroupedLinearBackwardArgs& args, Workspace workspace = {}, Stream stream = {}) const;

 private:
  using Plan::Plan;
};

}  // namespace octile
