// The cases of products: the forward, and the backward.
#include <algorithm>
#include <span>

#include "check/cases_options.h"
#include "plan/packed_weight.h"

namespace octile::check {

namespace {

struct Sizes {
  std::int64_t m, n, k;
};

// Several threads have work; the last has more rows than are packed at a time.
constexpr std::array<Sizes, 6> kSharedByThreads = {
    {{97, 200, 257}, {130, 97, 512}, {200, 130, 700}, {400, 40, 300}, {7, 10, 300}, {2100, 9, 70}}};

// Rows of experts: none, one, two and many.
const std::vector<std::int64_t> kRowsOfExperts[] = {
    {0, 1, 2, 40}, {3}, {0, 0, 0}, {1, 1, 1, 1, 1, 1, 1, 1}, {2, 133, 0, 5, 1}};

// around: rows before the first expert's, and behind the last one's. Returns all rows.
std::int64_t set_offsets(std::vector<std::int32_t>& offsets, const std::vector<std::int64_t>& rows,
                         std::int64_t around) {
  std::int64_t end = around;
  for (const std::int64_t count : rows) {
    offsets.push_back(static_cast<std::int32_t>(end));
    end += count;
  }
  offsets.push_back(static_cast<std::int32_t>(end));
  return end + around;
}

class LinearCases {
 public:
  std::vector<Case> w8a8() {
    combine(
        [&](Activation activation, WeightFormat weight, WeightLayout layout, bool bias) {
          w8a8_types({.activation = activation, .weight = weight, .weight_layout = layout, .bias = bias});
        },
        kActivations, kWeights, kLayouts, kBools);
    combine([&](auto m, auto n, auto k) { add(rotated_w8a8(), {m, n, k}); }, kRows, kSizes, kSizes);
    for (const Sizes sizes : {Sizes{257, 33, 64}, {300, 128, 100}, {4, 700, 513}, {1, 300, 4099}, {130, 66, 1030}}) {
      for (int turn = 0; turn < 6; ++turn) add(rotated_w8a8(), sizes);
    }
    return std::move(cases_);
  }

  // Weights in groups, and under a float X also s8 with a scale per channel or tensor.
  std::vector<Case> grouped(GemmFormat format) {
    constexpr std::array kNone = {Activation::none};
    combine(
        [&](Activation activation, DType x, DType y) {
          if (go_together(x, y)) group_options(format, {.x = x, .y = y, .activation = activation});
        },
        format.float_a ? std::span<const Activation>(kNone) : kActivations,
        format.float_a ? std::span<const DType>(kFloats) : kSomeX, kFloats);
    group_sizes(format);
    return std::move(cases_);
  }

  std::vector<Case> shared_by_threads(GemmFormat format, bool in_groups) {
    for (const Sizes sizes : kSharedByThreads) {
      for (int turn = 0; turn < 3; ++turn) {
        add(in_groups ? rotated_grouped(format, sizes.k) : rotated_w8a8(), sizes);
      }
    }
    return std::move(cases_);
  }

  // sizes.m: rows that belong to no expert.
  std::vector<Case> experts(GemmFormat format) {
    for (const auto& of_experts : kRowsOfExperts) {
      for (const Sizes sizes : {Sizes{0, 33, 64}, {2, 100, 257}, {0, 1, 31}, {1, 70, 128}}) {
        add_experts(format, of_experts, sizes);
      }
    }
    return std::move(cases_);
  }

  // Every option with every number of rows; no term at all.
  std::vector<Case> more_experts(GemmFormat format) {
    for (const auto& of_experts : kRowsOfExperts) {
      for (const Sizes sizes : {Sizes{0, 16, 32}, {1, 64, 256}, {3, 130, 96}, {0, 77, 384}, {2, 5, 0}}) {
        for (int turn = 0; turn < 3; ++turn) add_experts(format, of_experts, sizes);
      }
    }
    return std::move(cases_);
  }

  // Around the sizes of tiles; whole ones, multiples of 16, and of nothing.
  std::vector<Case> large_experts(GemmFormat format) {
    std::vector<std::int64_t> many;
    for (std::int64_t e = 0; e < 100; ++e) many.push_back(e * 7 % 5);
    const auto add_large = [&](const std::vector<std::int64_t>& rows, const Sizes& sizes, int turns,
                               bool packed = false) {
      for (int turn = 0; turn < turns; ++turn) {
        add_experts(format, rows, sizes);
        auto& c = std::get<GroupedLinearCase>(cases_.back());
        c.large = true;
        // What rows of tensor cores take.
        GroupedLinearDescription& d = c.description;
        if (d.x == DType::f64 || (format.float_a && d.x == DType::f32)) d.x = DType::bf16;
        if (d.y == DType::f64) d.y = DType::f32;
        if (packed) d.packed_weight = true;
        if (format.float_a) d.y = turn % 3 == 2 ? DType::f32 : d.x;
      }
    };
    const std::vector<std::int64_t> some = {0, 200, 1, 64, 33, 0, 129, 17};
    for (const auto& rows : {some, {300, 5}, {15, 16, 17, 48}, many}) {
      for (const Sizes sizes : {Sizes{0, 512, 512}, {2, 264, 1024}, {1, 136, 2048}, {0, 300, 272}, {3, 520, 256}}) {
        if (static_cast<std::int64_t>(rows.size()) * sizes.n * sizes.k > 9'000'000) continue;
        add_large(rows, sizes, 6);
      }
    }
    // Few rows in all, also of more than eight of an expert; many rows of the weight, and many terms.
    std::vector<std::int64_t> sparse(300, 0);
    for (std::size_t e = 5; e < sparse.size(); e += 23) sparse[e] = 1 + static_cast<std::int64_t>(e) % 3;
    if (format.b == DType::s4) {
      for (const std::vector<std::int64_t>& rows : {std::vector<std::int64_t>{1, 0, 3, 8, 1}, {9, 2, 17, 0, 4}}) {
        for (const Sizes sizes : {Sizes{0, 512, 512}, {2, 264, 1024}, {1, 8200, 256}, {0, 40, 8192}, {1, 1000, 4128}}) {
          add_large(rows, sizes, 6, true);
        }
      }
      add_large(sparse, {1, 200, 768}, 6, true);
      // Experts' weights divided evenly among all blocks, so that many blocks have rows of two experts.
      std::vector<std::int64_t> thin(100, 0);
      for (std::size_t e = 0; e < thin.size(); e += 2) thin[e] = e % 8 == 0 ? 2 : 1;
      add_large(thin, {0, 1000, 1056}, 2, true);
      add_large(thin, {1, 520, 2080}, 1, true);
    }
    for (std::int64_t e = 100; e < 300; ++e) many.push_back(e * 7 % 5);  // more than a warp looks at in one turn
    for (const Sizes sizes : {Sizes{0, 24, 256}, {1, 40, 128}}) add_large(many, sizes, 6);
    std::vector<std::int64_t> more;  // more tiles a block than its shared memory holds, and than its table does
    for (std::int64_t e = 0; e < 300; ++e) more.push_back(e * 5 % 13 + 3);
    add_large(more, {0, 16, 4096}, 2);
    for (std::int64_t& rows : more) rows += 90;
    add_large(more, {1, 16, 128}, 2);
    if (format != kW8A16) {  // several waves of Hopper's tiles for few rows and for many
      add_large({1, 5, 2, 8, 3, 1, 16, 4}, {0, 8192, 512}, 3);
      if (format.float_a) {  // in f64, by one thread
        add_large({600, 0, 450}, {1, 4096, 128}, 6);
      } else {
        add_large(some, {2, 4096, 2048}, 3);
        add_large({2200, 0, 1900}, {1, 4096, 512}, 3);
      }
    }
    if (is_packed(format.b)) {
      // 20 and 31 tiles a block, of one step each.
      add_large(many, {0, 2576, 128}, 1, true);
      add_large(many, {0, 4112, 32}, 1, true);
      // An odd number of panels, whose last one is not whole, for streams of each shape.
      add_large({1, 5, 2, 8, 3, 1, 16, 4}, {0, 8165, 512}, 2, true);
      if (format.float_a) {
        add_large({17, 24, 20}, {1, 8181, 512}, 1, true);
        // Tiles of 64 tokens, one after another.
        add_large({56, 50, 64, 49, 61, 58, 57, 63}, {0, 4100, 416}, 2, true);
      } else {
        add_large({49, 53, 56}, {2, 4091, 512}, 1, true);
      }
    }
    return std::move(cases_);
  }

  // All of both operands -128 over the longest contraction: the s32 sum is 2^31 - 2^14, one short of overflow.
  static Case longest_contraction(DType y, bool packed) {
    LinearCase c;
    c.rows = 2;
    c.data = Data::constant;
    c.description = {.m = 2, .n = 3, .k = kMaxContraction, .x = DType::s8, .y = y, .packed_weight = packed};
    return c;
  }

 private:
  static constexpr std::array kX = {DType::f16, DType::bf16, DType::f32, DType::f64, DType::s8};
  static constexpr std::array kSomeX = {DType::f16, DType::f32, DType::f64, DType::s8};

  static bool go_together(DType x, DType y) { return x == DType::s8 || (x == DType::f64) == (y == DType::f64); }

  void group_options(GemmFormat format, LinearDescription d) {
    d.weight = WeightFormat::in_groups(format.b);
    combine(
        [&](std::int64_t group, bool zero_point, bool bias, const Sizes& sizes) {
          d.weight.group = group;
          d.weight.zero_point = zero_point;
          d.bias = bias;
          d.packed_weight = turn_.pick(kBools) && has_packed_form(format.b);
          add(d, sizes);
        },
        kGroups, std::span(kBools.data(), is_packed(format.b) ? 2 : 1), kBools,
        std::array{Sizes{3, 7, 128}, Sizes{8, 33, 256}});
  }

  void group_sizes(GemmFormat format) {
    combine(
        [&](auto m, auto n, std::int64_t k) {
          add(rotated_grouped(format, k), {m, n, k});
        },
        kRows, kSizes, std::array{0, 1, 7, 31, 32, 64, 100, 127, 128, 192, 255, 256, 384});
    for (const Sizes sizes : {Sizes{257, 33, 64}, {4, 300, 1024}, {1, 64, 4096}, {1, 5, 4099}}) {
      for (int turn = 0; turn < 6; ++turn) add(rotated_grouped(format, sizes.k), sizes);
    }
  }

  void w8a8_types(LinearDescription d) {
    combine(
        [&](DType x, DType y, bool x_multiplier) {
          if (!go_together(x, y) || (x == DType::s8 && x_multiplier)) return;
          d.x = x;
          d.y = y;
          d.x_multiplier = x_multiplier;
          d.packed_weight = turn_.pick(kBools);
          for (const Sizes sizes : {Sizes{3, 7, 31}, {33, 16, 64}}) add(d, sizes);
        },
        kX, kFloats, kBools);
  }

  LinearDescription rotated_w8a8() {
    LinearDescription d;
    d.x = turn_.pick(kX);
    d.y = d.x == DType::f64  ? DType::f64
          : d.x == DType::s8 ? turn_.pick(kFloats)
                             : turn_.pick({DType::f16, DType::bf16, DType::f32});
    d.activation = turn_.pick(kActivations);
    d.weight = turn_.pick(kWeights);
    d.weight_layout = turn_.pick(kLayouts);
    d.bias = turn_.pick(kBools);
    d.x_multiplier = d.x != DType::s8 && turn_.pick(kBools);
    d.packed_weight = turn_.pick(kBools);
    return d;
  }

  LinearDescription rotated_grouped(GemmFormat format, std::int64_t k) {
    LinearDescription d;
    if (!format.float_a) {
      d = rotated_w8a8();
      d.weight_layout = WeightLayout::out_in;
    } else {
      d.x = turn_.pick(kFloats);
      d.y = d.x == DType::f64 ? DType::f64 : turn_.pick({DType::f16, DType::bf16, DType::f32});
      d.activation = Activation::none;
    }
    d.weight = WeightFormat::in_groups(format.b);
    do {
      d.weight.group = turn_.pick(kGroups);
    } while (d.weight.group != 0 && k % d.weight.group != 0);
    if (is_packed(format.b)) d.weight.zero_point = turn_.pick(kBools);
    if (format == kW8A16 && turn_.one_in(2)) d.weight = turn_.pick(kWeights);
    d.bias = turn_.pick(kBools);
    d.packed_weight = turn_.pick(kBools) && has_packed_form(format.b);
    return d;
  }

  void add(LinearDescription d, const Sizes& sizes) {
    LinearCase c;
    d.m = sizes.m;
    d.n = sizes.n;
    d.k = sizes.k;
    if (d.activation == Activation::static_per_tensor) d.static_scale = turn_.pick(kStaticScales);
    turn_.dress(c, d.m);
    c.description = d;
    cases_.emplace_back(c);
  }

  void add_experts(GemmFormat format, const std::vector<std::int64_t>& rows, const Sizes& sizes) {
    const LinearDescription e = format == kW8A8 && turn_.one_in(2) ? rotated_w8a8() : rotated_grouped(format, sizes.k);
    GroupedLinearCase c;
    GroupedLinearDescription& d = c.description;
    d.experts = static_cast<std::int64_t>(rows.size());
    d.n = sizes.n;
    d.k = sizes.k;
    d.x = e.x;
    d.y = e.y;
    d.activation = e.activation == Activation::dynamic_per_tensor ? Activation::dynamic_per_token : e.activation;
    if (d.activation == Activation::static_per_tensor) d.static_scale = turn_.pick(kStaticScales);
    d.weight = e.weight;
    d.bias = e.bias;
    d.packed_weight = e.packed_weight;
    d.m = set_offsets(c.offsets, rows, sizes.m);
    turn_.dress(c, d.m);
    if (c.layout == Layout::repeating) c.layout = Layout::compact;  // offsets do not repeat
    // Where sums are rounded differently, so would be what overflows.
    if (format.float_a && (c.data == Data::huge || c.data == Data::poisoned)) c.data = Data::normal;
    constexpr std::array<std::int32_t, 7> kTokens = {0, 3, 1, 6, 2, 5, 4};
    constexpr std::array<std::int64_t, 4> kSlots = {0, 1, 2, 5};
    d.gather = turn_.pick(kBools);
    d.slots = turn_.pick(kSlots);
    d.clear_rest = d.slots == 0 && turn_.pick(kBools);
    if (d.gather || d.slots > 0) d.tokens = kTokens.size();
    for (std::int64_t r = 0; d.gather && r < c.rows; ++r) c.token.push_back(turn_.pick(kTokens));
    for (std::int64_t i = 0; i < d.slots * d.tokens; ++i) {
      // Some are not rows, or belong to no expert.
      c.place.push_back(turn_.one_in(5) ? -1 : static_cast<std::int32_t>((i * 5 + 2) % (c.rows + 2)));
    }
    cases_.emplace_back(c);
  }

  Rotation turn_;
  std::vector<Case> cases_;
};

class LinearBackwardCases {
 public:
  explicit LinearBackwardCases(Task task) : task_(task) {}

  std::vector<Case> all() {
    combine([&](Product dx, Product dw, bool db, DType dy) { cross({.dy = dy, .dx = dx, .dw = dw, .db = db}); },
            kProducts, kProducts, kBools, kFloats);
    combine([&](auto m, auto n, auto k) { add(rotated(), {m, n, k}); }, kRows, kSizes, kSizes);
    for (const Sizes sizes : {Sizes{257, 33, 64}, {300, 128, 100}, {4, 700, 513}, {1030, 66, 31}, {2, 4099, 5}}) {
      for (int turn = 0; turn < 6; ++turn) add(rotated(), sizes);
    }
    // Several blocks of either contraction, the last one whole or short.
    for (const Sizes sizes : {Sizes{129, 260, 40}, {256, 128, 17}, {260, 385, 70}, {513, 129, 33}, {1100, 300, 20}}) {
      for (int turn = 0; is_blocked() && turn < 8; ++turn) add(rotated(), sizes);
    }
    return std::move(cases_);
  }

  std::vector<Case> shared_by_threads() {
    for (const Sizes sizes : kSharedByThreads) {
      for (int turn = 0; turn < 3; ++turn) add(rotated(), sizes);
    }
    return std::move(cases_);
  }

  std::vector<Case> experts() {
    for (const auto& of_experts : kRowsOfExperts) {
      for (const Sizes sizes : {Sizes{0, 33, 64}, {2, 100, 257}, {0, 1, 31}, {1, 150, 70}}) {
        add_experts(of_experts, sizes);
      }
    }
    // Several blocks of either contraction.
    add_experts({2, 300, 1}, {1, 260, 40});
    return std::move(cases_);
  }

  // Every kind with every number of rows; no term at all; around the sizes of tiles.
  std::vector<Case> more_experts() {
    for (const auto& of_experts : kRowsOfExperts) {
      for (const Sizes sizes : {Sizes{0, 16, 32}, {1, 256, 64}, {3, 130, 96}, {0, 300, 77}, {2, 5, 0}, {1, 0, 24}}) {
        for (int turn = 0; turn < 8; ++turn) add_experts(of_experts, sizes);
      }
    }
    std::vector<std::int64_t> many;
    for (std::int64_t e = 0; e < 150; ++e) many.push_back(e * 7 % 5);
    const std::vector<std::int64_t> some = {0, 200, 1, 128, 33, 0, 129, 17};
    for (const auto& rows : {some, {300, 5}, {127, 128, 256, 600}, many}) {
      for (const Sizes sizes : {Sizes{0, 256, 128}, {2, 384, 264}, {3, 130, 96}}) {
        if (static_cast<std::int64_t>(rows.size()) * sizes.n * sizes.k > 3'000'000) continue;
        for (int turn = 0; turn < 8; ++turn) {
          add_experts(rows, sizes);
          std::get<GroupedLinearBackwardCase>(cases_.back()).large = true;
        }
      }
    }
    return std::move(cases_);
  }

  // One case each for dX and dW, with a column of dY quantized to 127 beside weights of -128 over the longest sum.
  static std::vector<Case> longest_contractions() {
    LinearBackwardCase dx;
    dx.rows = 2;
    dx.data = Data::constant;
    dx.description = {.m = 2, .n = kMaxContraction, .k = 3, .dx = Product::int8, .dw = Product::none};
    LinearBackwardCase dw = dx;
    dw.rows = kMaxContraction;
    dw.description = {.m = kMaxContraction, .n = 2, .k = 3, .dx = Product::none, .dw = Product::int8};
    return {dx, dw};
  }

 private:
  // Where experts share a launch.
  bool is_grouped() const {
    return task_.operation == Operation::grouped_gradient || task_.operation == Operation::grouped_gradient_quantize;
  }
  bool is_blocked() const {
    return task_.operation == Operation::blocked_gemm || task_.operation == Operation::blocked_gradient_quantize;
  }

  bool exercises(const LinearBackwardDescription& d) const {
    if (task_.operation == Operation::column_sum) return d.db;
    if (task_.operation == Operation::grouped_gradient_quantize && d.db) return true;
    if (is_blocked() || task_.operation == Operation::grouped_gradient_quantize) {
      return d.dx == Product::int8 || d.dw == Product::int8;
    }
    if (task_.operation == Operation::gradient_quantize) return d.dx == Product::int8 && d.dw == Product::int8;
    const Product wanted = task_.format == kW8A8 ? Product::int8 : Product::dequantized;
    return d.dx == wanted || d.dw == wanted;
  }

  // The options that these products have; those that they have no use for stay at their defaults.
  void cross(LinearBackwardDescription d) {
    if (!exercises(d)) return;
    const bool dx = d.dx != Product::none;
    const bool dw = d.dw != Product::none;
    const bool int8 = d.dx == Product::int8 || d.dw == Product::int8;
    const bool narrow = d.dy == DType::f16 || d.dy == DType::bf16;
    combine(
        [&](WeightLayout layout, WeightFormat weight, Activation activation, bool x_transposed, bool dw_f32,
            Rounding rounding) {
          d.weight_layout = layout;
          d.weight = weight;
          d.activation = activation;
          d.x_transposed = x_transposed;
          d.dw_dtype.reset();
          if (dw_f32) d.dw_dtype = DType::f32;
          d.dw_layout.reset();
          if (dw && turn_.one_in(3)) d.dw_layout = turn_.pick(kLayouts);
          d.dw_accumulate = dw && (dw_f32 || !narrow) && turn_.pick(kBools);
          d.rounding = rounding;
          add(d, turn_.pick(kSmall));
        },
        std::span(kLayouts.data(), dx || dw ? 2 : 1), std::span(kWeights.data(), dx ? 2 : 1),
        std::span(kActivations.data(), dw ? 3 : 1), std::span(kBools.data(), dw ? 2 : 1),
        std::span(kBools.data(), dw && narrow ? 2 : 1), std::span(kRoundings.data(), int8 ? 2 : 1));
  }

  LinearBackwardDescription rotated() {
    LinearBackwardDescription d;
    do {
      d.dx = turn_.pick(kProducts);
      d.dw = turn_.pick(kProducts);
      d.db = turn_.pick(kBools);
    } while (!exercises(d));
    d.dy = turn_.pick(kFloats);
    const bool narrow = d.dy == DType::f16 || d.dy == DType::bf16;
    if (narrow && turn_.pick(kBools)) d.dw_dtype = DType::f32;
    d.dw_accumulate = d.dw != Product::none && (!narrow || d.dw_dtype) && turn_.pick(kBools);
    d.activation = turn_.pick(kActivations);
    d.x_transposed = turn_.pick(kBools);
    d.weight = turn_.pick(kWeights);
    d.weight_layout = turn_.pick(kLayouts);
    if (turn_.one_in(3)) d.dw_layout = turn_.pick(kLayouts);
    d.rounding = turn_.pick(kRoundings);
    return d;
  }

  void add(LinearBackwardDescription d, const Sizes& sizes) {
    LinearBackwardCase c;
    d.m = sizes.m;
    d.n = sizes.n;
    d.k = sizes.k;
    if (d.activation == Activation::static_per_tensor) d.static_scale = turn_.pick(kStaticScales);
    if (is_blocked()) d.gradient_block = turn_.pick(kGradientBlocks);
    turn_.dress(c, d.m);
    c.description = d;
    cases_.emplace_back(c);
  }

  void add_experts(const std::vector<std::int64_t>& rows, const Sizes& sizes) {
    const LinearBackwardDescription e = rotated();
    GroupedLinearBackwardCase c;
    GroupedLinearBackwardDescription& d = c.description;
    d.experts = static_cast<std::int64_t>(rows.size());
    d.n = sizes.n;
    d.k = sizes.k;
    d.dy = e.dy;
    d.dw_dtype = e.dw_dtype;
    d.dw_accumulate = e.dw_accumulate;
    d.dx = e.dx;
    d.dw = e.dw;
    d.db = e.db;
    if (e.activation == Activation::static_per_tensor) {
      d.activation = e.activation;
      d.static_scale = turn_.pick(kStaticScales);
    }
    d.weight = e.weight;
    d.rounding = e.rounding;
    if (is_blocked()) d.gradient_block = turn_.pick(kGradientBlocks);
    if (is_grouped()) {
      if (d.dx == Product::int8 || d.dw == Product::int8) d.gradient_block = turn_.pick(kGradientBlocks);
      if (d.db && d.dy == DType::f64) d.dy = DType::f32;
    }
    d.clear_rest = turn_.pick(kBools);
    d.m = set_offsets(c.offsets, rows, sizes.m);
    turn_.dress(c, d.m);
    if (c.layout == Layout::repeating) c.layout = Layout::compact;  // offsets do not repeat
    cases_.emplace_back(c);
  }

  static constexpr std::array<std::int64_t, 6> kGradientBlocks = {128, 256, 128, 512, 128, 1024};
  static constexpr std::array<Sizes, 6> kSmall = {
      {{3, 31, 7}, {8, 16, 33}, {1, 64, 5}, {33, 7, 16}, {17, 34, 31}, {2, 1, 3}}};
  Task task_;
  Rotation turn_;
  std::vector<Case> cases_;
};

}  // namespace

std::vector<Case> w8a8_cases() { return LinearCases().w8a8(); }

std::vector<Case> grouped_cases(GemmFormat format) { return LinearCases().grouped(format); }

std::vector<Case> expert_cases(GemmFormat format) { return LinearCases().more_experts(format); }

std::vector<Case> large_expert_cases(GemmFormat format) { return LinearCases().large_experts(format); }

std::vector<Case> linear_backward_cases(Task task) { return LinearBackwardCases(task).all(); }

std::vector<Case> expert_gradient_cases(Task task) { return LinearBackwardCases(task).more_experts(); }

std::vector<Case> special_linear_cases(Task task) {
  const auto append = [](std::vector<Case>& all, const std::vector<Case>& more) {
    all.insert(all.end(), more.begin(), more.end());
  };
  const bool w8a8 = task == Task{Operation::gemm, kW8A8};
  std::vector<Case> all;
  if (task.operation == Operation::grouped_gradient || task.operation == Operation::grouped_gradient_quantize) {
    return LinearBackwardCases(task).experts();
  }
  if (w8a8) {
    all = LinearBackwardCases::longest_contractions();
    for (const DType y : {DType::f32, DType::f64}) {
      for (const bool packed : kBools) all.push_back(LinearCases::longest_contraction(y, packed));
    }
  }
  if (has_format(task.operation)) append(all, LinearCases().experts(task.format));
  if (task.operation == Operation::grouped_gemm) return all;
  if (w8a8) append(all, LinearCases().shared_by_threads(kW8A8, false));
  if (task.operation == Operation::gemm) append(all, LinearCases().shared_by_threads(task.format, true));
  if (task.format.b == DType::s8) {
    append(all, LinearBackwardCases(task).shared_by_threads());
    append(all, LinearBackwardCases(task).experts());
  }
  return all;
}

}  // namespace octile::check
