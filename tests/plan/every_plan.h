// Every kind of plan in every mode that has its own code path, with its tensors, to test what all plans promise.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "octile/octile.hpp"

namespace octile::test {

// A tensor of a call.
struct Piece {
  std::string name;
  std::byte* begin;
  std::size_t bytes;
  bool output;
};

// A selected plan and the tensors of one call, kGap bytes apart from each other.
struct Call {
  std::string name;
  std::size_t workspace_size = 0;
  std::vector<Piece> pieces = {};
  std::function<void(Workspace)> run = {};

  std::vector<std::byte> outputs() const {
    std::vector<std::byte> all;
    for (const Piece& piece : pieces) {
      if (piece.output) all.insert(all.end(), piece.begin, piece.begin + piece.bytes);
    }
    return all;
  }
};

struct Size {
  std::int64_t m, n, k;
};

struct Choice {
  Size size;
  int threads = 1;
  std::string kernel = {};
};

class EveryPlan {
 public:
  static constexpr std::size_t kGap = 1 << 19;
  static constexpr std::size_t kBytes = 24 << 20;
  static constexpr std::size_t kLine = 256;

  explicit EveryPlan(const Choice& choice) : choice_(choice), memory_(kBytes + kLine) {
    begin_ = memory_.data() + (kLine - reinterpret_cast<std::uintptr_t>(memory_.data()) % kLine);
  }

  // The memory of the visited call, and the gaps around its tensors.
  std::byte* begin() const { return begin_; }
  std::byte* end() const { return begin_ + at_; }

  // Calls visit(call) for each; the call lives until visit returns.
  void for_each(const std::function<void(const Call&)>& visit) {
    visit_ = &visit;
    quantizers();
    linears();
    backwards();
    experts();
    experts_backwards();
  }

 private:
  std::byte* take(const std::string& name, std::int64_t elements, DType dtype, bool output) {
    const auto bytes = static_cast<std::size_t>((elements * bits(dtype) + 7) / 8);
    std::byte* data = begin_ + at_;
    at_ = (at_ + bytes + kGap + kLine - 1) / kLine * kLine;
    if (at_ > kBytes) throw std::runtime_error("the memory of the tests is too small");
    call_.pieces.push_back({name, data, bytes, output});
    fill(data, elements, dtype);
    return data;
  }

  // Floats of both signs whose last bits matter, a seventh of them subnormal; positive where they are scales.
  void fill(std::byte* data, std::int64_t elements, DType dtype, bool scales = false) {
    std::mt19937 random(static_cast<unsigned>(elements) + 7u);
    for (std::int64_t i = 0; i < elements; ++i) {
      const double unit = (static_cast<double>(random() >> 1) + 0.5) / 2147483648.0;  // in (0, 1)
      const double tiny = dtype == DType::f64 ? 0x1p-1025 : dtype == DType::f16 ? 0x1p-15 : 0x1p-128;
      const double value = scales ? 0.001 + 0.01 * unit : (i % 7 == 3 ? tiny : 1.0) * (2 * unit - 1);
      switch (dtype) {
        case DType::f16:
          reinterpret_cast<Half*>(data)[i] = Half(static_cast<float>(value));
          break;
        case DType::bf16:
          reinterpret_cast<BFloat16*>(data)[i] = BFloat16(static_cast<float>(value));
          break;
        case DType::f32:
          reinterpret_cast<float*>(data)[i] = static_cast<float>(value);
          break;
        case DType::f64:
          reinterpret_cast<double*>(data)[i] = value;
          break;
        case DType::s32:
          reinterpret_cast<std::int32_t*>(data)[i] = static_cast<std::int32_t>(random() % 3) + 1;
          break;
        case DType::s4:
          if (i % 2 == 0) data[i / 2] = static_cast<std::byte>(random() & 0xff);
          break;
        default:
          data[i] = static_cast<std::byte>(random() & 0x7f);
          break;
      }
    }
  }

  Tensor matrix_of(const std::string& name, DType dtype, std::int64_t rows, std::int64_t cols, bool output = false) {
    const std::int64_t pitch = dtype == DType::s4 ? (cols + 1) / 2 * 2 : cols;
    return {take(name, rows * pitch, dtype, output), dtype, {}, 2, {rows, cols}, {pitch, 1}};
  }
  Tensor vector_of(const std::string& name, DType dtype, std::int64_t size, bool output = false) {
    return {take(name, size, dtype, output), dtype, {}, 1, {size, 0}, {1, 0}};
  }
  // In place of the weight, its scales and zero points.
  template <class WeightPlan, class Args>
  void pack_weight(const WeightPlan& plan, Args& args) {
    const LinearPackArgs pack{
        args.weight, args.weight_scale, args.weight_zero_point,
        vector_of("packed weight", DType::u8, static_cast<std::int64_t>(plan.packed_weight_size()))};
    plan.pack(pack);
    args.weight = pack.packed;
    args.weight_scale = args.weight_zero_point = {};
    std::erase_if(call_.pieces, [](const Piece& piece) {
      return piece.name == "weight" || piece.name == "weight_scale" || piece.name == "weight_zero_point";
    });
  }

  Tensor scales_of(const std::string& name, DType dtype, std::int64_t rows, std::int64_t cols = 0) {
    const Tensor t = cols > 0 ? matrix_of(name, dtype, rows, cols) : vector_of(name, dtype, rows);
    fill(static_cast<std::byte*>(t.data), rows * std::max<std::int64_t>(cols, 1), dtype, true);
    return t;
  }
  // Scales or zero points of a quantizer's description.
  Tensor segments_of(const std::string& name, const QuantizeDescription& d, DType dtype, bool output) {
    const bool scale = dtype != DType::s32 && !output;
    switch (d.granularity) {
      case Granularity::tensor:
        return scale ? scales_of(name, dtype, 1) : vector_of(name, dtype, 1, output);
      case Granularity::row:
        return scale ? scales_of(name, dtype, d.rows) : vector_of(name, dtype, d.rows, output);
      case Granularity::column:
        return scale ? scales_of(name, dtype, d.cols) : vector_of(name, dtype, d.cols, output);
      default:
        return scale ? scales_of(name, dtype, d.rows, d.cols / d.group)
                     : matrix_of(name, dtype, d.rows, d.cols / d.group, output);
    }
  }

  void start(const std::string& name) {
    at_ = kGap;
    call_ = {name};
  }
  template <class Plan, class Args>
  void finish(const Plan& plan, const Args& args) {
    call_.name += ": " + plan.sku() + ", " + std::to_string(choice_.threads) + " threads";
    call_.workspace_size = plan.workspace_size();
    call_.run = [plan, args](Workspace workspace) { plan.run(args, workspace); };
    (*visit_)(call_);
  }

  QuantizeDescription quantizer(DType x, DType q, Granularity granularity, Mapping mapping) const {
    return {.rows = choice_.size.m,
            .cols = choice_.size.k,
            .x = x,
            .q = q,
            .granularity = granularity,
            .group = granularity == Granularity::group ? 32 : 0,
            .mapping = mapping,
            .threads = choice_.threads,
            .kernel = choice_.kernel};
  }

  void quantizers() {
    for (const Granularity granularity :
         {Granularity::tensor, Granularity::row, Granularity::column, Granularity::group}) {
      for (const Mapping mapping : {Mapping::symmetric, Mapping::affine}) {
        for (const DType x : {DType::f32, DType::f16, DType::f64}) {
          const DType q = granularity == Granularity::group ? DType::s4 : DType::s8;
          quantizers(quantizer(x, q, granularity, mapping));
        }
      }
    }
    for (const DType x : {DType::f32, DType::bf16}) {
      for (const Orientation orientation : {Orientation::row_major, Orientation::both}) {
        QuantizeDescription d = quantizer(x, DType::s8, Granularity::row, Mapping::symmetric);
        d.orientation = orientation;
        d.prologue = Prologue::silu;
        d.gated = true;
        prologues(d);
        d.gated = false;
        d.prologue = Prologue::layer_norm;
        prologues(d);
        d.prologue = Prologue::rms_norm;
        d.residual = true;
        prologues(d);
      }
    }
  }

  void prologues(QuantizeDescription d) {
    const std::int64_t rows = d.rows, cols = d.cols;
    start("quantize a prologue of " + std::string(name(d.x)));
    QuantizeArgs quantize;
    quantize.x = matrix_of("x", d.x, rows, cols);
    if (d.gated) quantize.up = matrix_of("up", d.x, rows, cols);
    const bool norm = d.prologue == Prologue::rms_norm || d.prologue == Prologue::layer_norm;
    if (norm) quantize.norm_weight = vector_of("norm_weight", DType::f32, cols);
    if (d.prologue == Prologue::layer_norm) quantize.norm_bias = vector_of("norm_bias", DType::f32, cols);
    if (d.residual) {
      quantize.residual = matrix_of("residual", d.x, rows, cols);
      quantize.sum = matrix_of("sum", d.x, rows, cols, true);
    }
    if (norm) quantize.rstd = vector_of("rstd", DType::f32, rows, true);
    quantize.q = matrix_of("q", d.q, rows, cols, true);
    if (d.orientation == Orientation::both) {
      quantize.q_transposed = matrix_of("q_transposed", d.q, cols, rows, true);
    }
    quantize.scale = vector_of("scale", DType::f32, rows, true);
    finish(QuantizePlan::select(d), quantize);
  }

  void quantizers(QuantizeDescription d) {
    const std::string mode =
        std::string(name(d.x)) + " " + std::string(name(d.granularity)) + " " + std::string(name(d.mapping));
    const bool affine = d.mapping == Mapping::affine;
    const std::int64_t rows = d.rows, cols = d.cols;
    const DType real = scale_type(d.x);

    start("dequantize " + mode);
    DequantizeArgs dequantize;
    dequantize.q = matrix_of("q", d.q, rows, cols);
    dequantize.scale = segments_of("scale", d, real, false);
    if (affine) dequantize.zero_point = segments_of("zero_point", d, DType::s32, false);
    dequantize.x = matrix_of("x", d.x, rows, cols, true);
    finish(DequantizePlan::select(d), dequantize);

    start("dequantize backward " + mode);
    finish(DequantizeBackwardPlan::select(d),
           DequantizeBackwardArgs{matrix_of("dy", d.x, rows, cols), segments_of("scale", d, real, false),
                                  matrix_of("dq", d.x, rows, cols, true)});

    start("quantize backward " + mode);
    QuantizeBackwardArgs backward;
    backward.dy = matrix_of("dy", d.x, rows, cols);
    backward.x = matrix_of("x", d.x, rows, cols);
    backward.scale = segments_of("scale", d, real, false);
    if (affine) backward.zero_point = segments_of("zero_point", d, DType::s32, false);
    backward.dx = matrix_of("dx", d.x, rows, cols, true);
    finish(QuantizeBackwardPlan::select(d), backward);

    start("fake quantize backward " + mode);
    FakeQuantizeBackwardArgs fake_backward;
    fake_backward.dy = matrix_of("dy", d.x, rows, cols);
    fake_backward.x = matrix_of("x", d.x, rows, cols);
    fake_backward.scale = segments_of("scale", d, real, false);
    if (affine) fake_backward.zero_point = segments_of("zero_point", d, DType::s32, false);
    fake_backward.dx = matrix_of("dx", d.x, rows, cols, true);
    finish(FakeQuantizeBackwardPlan::select(d), fake_backward);

    start("fake quantize " + mode);
    FakeQuantizeArgs fake;
    fake.x = matrix_of("x", d.x, rows, cols);
    fake.y = matrix_of("y", d.x, rows, cols, true);
    fake.scale = segments_of("scale", d, real, true);
    if (affine) fake.zero_point = segments_of("zero_point", d, DType::s32, true);
    finish(FakeQuantizePlan::select(d), fake);

    d.orientation = Orientation::both;
    d.multiplier = d.granularity == Granularity::column ? Multiplier::per_row : Multiplier::per_column;
    d.rounding = d.x == DType::f16 ? Rounding::stochastic : Rounding::nearest;
    start("quantize " + mode);
    QuantizeArgs quantize;
    quantize.x = matrix_of("x", d.x, rows, cols);
    quantize.multiplier = scales_of("multiplier", real, d.multiplier == Multiplier::per_row ? rows : cols);
    quantize.q = matrix_of("q", d.q, rows, cols, true);
    quantize.q_transposed = matrix_of("q_transposed", d.q, cols, rows, true);
    quantize.scale = segments_of("scale", d, real, true);
    if (affine) quantize.zero_point = segments_of("zero_point", d, DType::s32, true);
    finish(QuantizePlan::select(d), quantize);
  }

  void linears() {
    constexpr WeightFormat kGroupsOf32 = {DType::s4, Granularity::group, 32};
    const auto base = [&](DType x, Activation activation, WeightFormat weight) {
      return LinearDescription{.m = choice_.size.m,
                               .n = choice_.size.n,
                               .k = choice_.size.k,
                               .x = x,
                               .y = x == DType::s8 ? DType::f32 : x,
                               .activation = activation,
                               .weight = weight,
                               .bias = true,
                               .threads = choice_.threads,
                               .kernel = choice_.kernel};
    };
    for (const DType x : {DType::f32, DType::bf16, DType::f64}) {
      for (const bool packed : {false, true}) {
        LinearDescription d = base(x, Activation::dynamic_per_token, WeightFormat::s8_per_channel);
        d.packed_weight = packed;
        linear("w8a8", d);
        d.weight_layout = WeightLayout::in_out;
        linear("w8a8 in_out", d);
        d = base(x, Activation::dynamic_per_tensor, kGroupsOf32);
        d.packed_weight = packed;
        linear("w4a8", d);
        d.activation = Activation::none;
        linear("w4a16", d);
        d.weight.zero_point = true;
        linear("w4a16 zero points", d);
      }
      LinearDescription d = base(x, Activation::static_per_tensor, WeightFormat::s8_per_tensor);
      d.static_scale = 1.0 / 97;
      d.x_multiplier = true;
      linear("w8a8 static", d);
    }
    linear("w8a8 of s8", base(DType::s8, Activation::dynamic_per_token, WeightFormat::s8_per_channel));
  }

  void linear(const std::string& name, const LinearDescription& d) {
    start("linear " + name + " " + std::string(octile::name(d.x)) + (d.packed_weight ? " packed" : ""));
    const LinearPlan plan = LinearPlan::select(d);
    const DType real = scale_type(d.y);
    const bool s4 = d.weight.type == DType::s4;
    LinearArgs args;
    args.x = matrix_of("x", d.x, d.m, d.k);
    if (d.x == DType::s8) args.x_scale = scales_of("x_scale", real, d.m);
    if (d.x_multiplier) args.x_multiplier = scales_of("x_multiplier", real, d.k);
    const bool in_out = d.weight_layout == WeightLayout::in_out;
    args.weight = matrix_of("weight", s4 ? DType::s4 : DType::s8, in_out ? d.k : d.n, in_out ? d.n : d.k);
    args.weight_scale = s4 ? scales_of("weight_scale", real, d.n, d.k / d.weight.group)
                           : scales_of("weight_scale", real, d.weight == WeightFormat::s8_per_tensor ? 1 : d.n);
    if (d.weight.zero_point) {
      args.weight_zero_point = matrix_of("weight_zero_point", DType::s32, d.n, d.k / d.weight.group);
    }
    if (d.packed_weight) pack_weight(plan, args);
    args.bias = vector_of("bias", d.y, d.n);
    args.y = matrix_of("y", d.y, d.m, d.n, true);
    finish(plan, args);
  }

  Tensor integers_of(const std::string& name, std::int64_t rows, std::int64_t cols, std::int64_t below) {
    const Tensor t = cols > 0 ? matrix_of(name, DType::s32, rows, cols) : vector_of(name, DType::s32, rows);
    for (std::int64_t i = 0; i < rows * std::max<std::int64_t>(cols, 1); ++i) {
      static_cast<std::int32_t*>(t.data)[i] = static_cast<std::int32_t>(i * 5 % below);
    }
    return t;
  }

  void experts() {
    constexpr WeightFormat kZeroPoints = {DType::s4, Granularity::group, 32, true};
    for (const DType x : {DType::f32, DType::bf16, DType::f64}) {
      for (const bool gather : {false, true}) {
        GroupedLinearDescription d{.experts = 4, .m = choice_.size.m, .n = choice_.size.n, .k = choice_.size.k};
        d.x = d.y = x;
        d.bias = true;
        d.threads = choice_.threads;
        d.kernel = choice_.kernel;
        d.gather = gather;
        d.slots = gather ? 2 : 0;
        d.tokens = gather ? choice_.size.m / 2 : 0;
        d.packed_weight = gather;
        experts("w8a8", d);
        d.weight = kZeroPoints;
        experts("w4a8", d);
        d.activation = Activation::none;
        experts("w4a16", d);
      }
    }
  }

  // The rows of four experts: none, one, and the rest divided between the other two.
  Tensor offsets_of(std::int64_t m) {
    const Tensor offsets = vector_of("offsets", DType::s32, 5);
    const std::int64_t ends[] = {0, 0, 1, 1 + (m - 1) / 3, m};
    std::copy(std::begin(ends), std::end(ends), static_cast<std::int32_t*>(offsets.data));
    return offsets;
  }

  void experts(const std::string& name, const GroupedLinearDescription& d) {
    start("experts " + name + " " + std::string(octile::name(d.x)) + (d.gather ? " gathered and summed" : ""));
    const GroupedLinearPlan plan = GroupedLinearPlan::select(d);
    const DType real = scale_type(d.y);
    const bool s4 = d.weight.type == DType::s4;
    const std::int64_t rows = d.experts * d.n, groups = s4 ? d.k / d.weight.group : 0;
    GroupedLinearArgs args;
    args.x = matrix_of("x", d.x, d.gather ? d.tokens : d.m, d.k);
    args.offsets = offsets_of(d.m);
    if (d.gather) args.token = integers_of("token", d.m, 0, d.tokens);
    args.weight = matrix_of("weight", d.weight.type, rows, d.k);
    args.weight_scale = scales_of("weight_scale", real, rows, groups);
    if (s4) args.weight_zero_point = matrix_of("weight_zero_point", DType::s32, rows, groups);
    if (d.packed_weight) pack_weight(plan, args);
    args.bias = matrix_of("bias", d.y, d.experts, d.n);
    if (d.slots > 0) {
      args.place = integers_of("place", d.tokens, d.slots, d.m);
      args.router_weight = matrix_of("router_weight", real, d.tokens, d.slots);
    }
    args.y = matrix_of("y", d.y, d.slots > 0 ? d.tokens : d.m, d.n, true);
    finish(plan, args);
  }

  void backwards() {
    for (const DType dy : {DType::f32, DType::f16, DType::f64}) {
      for (const Product product : {Product::dequantized, Product::int8}) {
        for (const WeightLayout layout : {WeightLayout::out_in, WeightLayout::in_out}) {
          LinearBackwardDescription d{.m = choice_.size.m,
                                      .n = choice_.size.n,
                                      .k = choice_.size.k,
                                      .dy = dy,
                                      .dx = product,
                                      .dw = product,
                                      .db = true,
                                      .x_transposed = layout == WeightLayout::in_out,
                                      .weight_layout = layout,
                                      .threads = choice_.threads,
                                      .kernel = choice_.kernel};
          if (dy == DType::f16) d.dw_dtype = DType::f32;
          const std::string title =
              std::string(name(dy)) + " " + std::string(name(product)) + " " + std::string(name(layout));
          backward(title, d);
          if (product != Product::int8) continue;
          d.gradient_block = 128;
          backward(title + " in blocks", d);
        }
      }
    }
  }

  void backward(const std::string& name, const LinearBackwardDescription& d) {
    start("backward " + name);
    const DType real = scale_type(d.dy);
    const bool in_out = d.weight_layout == WeightLayout::in_out;
    LinearBackwardArgs args;
    args.dy = matrix_of("dy", d.dy, d.m, d.n);
    args.weight = matrix_of("weight", DType::s8, in_out ? d.k : d.n, in_out ? d.n : d.k);
    args.weight_scale = scales_of("weight_scale", real, d.n);
    args.x = matrix_of("x", DType::s8, d.x_transposed ? d.k : d.m, d.x_transposed ? d.m : d.k);
    args.x_scale = scales_of("x_scale", real, d.m);
    args.dx = matrix_of("dx", d.dy, d.m, d.k, true);
    args.dw = matrix_of("dw", d.dw_dtype.value_or(d.dy), in_out ? d.k : d.n, in_out ? d.n : d.k, true);
    args.db = vector_of("db", d.dy, d.n, true);
    args.seed = 3;
    finish(LinearBackwardPlan::select(d), args);
  }

  void experts_backwards() {
    for (const DType dy : {DType::f32, DType::f16, DType::f64}) {
      for (const Product product : {Product::dequantized, Product::int8}) {
        GroupedLinearBackwardDescription d{.experts = 4,
                                           .m = choice_.size.m,
                                           .n = choice_.size.n,
                                           .k = choice_.size.k,
                                           .dy = dy,
                                           .dx = product,
                                           .dw = product,
                                           .db = true,
                                           .threads = choice_.threads,
                                           .kernel = choice_.kernel};
        const std::string title = std::string(name(dy)) + " " + std::string(name(product));
        experts_backward(title, d);
        if (product != Product::int8) continue;
        d.gradient_block = 128;
        experts_backward(title + " in blocks", d);
      }
    }
  }

  void experts_backward(const std::string& name, const GroupedLinearBackwardDescription& d) {
    start("experts backward " + name);
    const DType real = scale_type(d.dy);
    GroupedLinearBackwardArgs args;
    args.dy = matrix_of("dy", d.dy, d.m, d.n);
    args.offsets = offsets_of(d.m);
    args.weight = matrix_of("weight", DType::s8, d.experts * d.n, d.k);
    args.weight_scale = scales_of("weight_scale", real, d.experts * d.n);
    args.x = matrix_of("x", DType::s8, d.m, d.k);
    args.x_scale = scales_of("x_scale", real, d.m);
    args.dx = matrix_of("dx", d.dy, d.m, d.k, true);
    args.dw = matrix_of("dw", d.dy, d.experts * d.n, d.k, true);
    args.db = matrix_of("db", d.dy, d.experts, d.n, true);
    finish(GroupedLinearBackwardPlan::select(d), args);
  }

  Choice choice_;
  std::vector<std::byte> memory_;
  std::byte* begin_ = nullptr;
  std::size_t at_ = 0;
  Call call_;
  const std::function<void(const Call&)>* visit_ = nullptr;
};

}  // namespace octile::test
