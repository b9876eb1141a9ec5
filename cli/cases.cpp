#include "cases.h"

#include <array>
#include <initializer_list>
#include <span>
#include <stdexcept>

#include "message.h"

namespace octile::cli {

namespace {

constexpr std::array<std::int64_t, 8> kRows = {0, 1, 2, 3, 8, 33, 64, 129};
constexpr std::array<std::int64_t, 12> kSizes = {0, 1, 2, 7, 16, 31, 64, 100, 127, 128, 255, 300};
constexpr std::array kFloats = {DType::f16, DType::bf16, DType::f32, DType::f64};
constexpr std::array kGranularities = {Granularity::tensor, Granularity::row, Granularity::column, Granularity::group};
constexpr std::array kScaleSources = {ScaleSource::dynamic, ScaleSource::given};
constexpr std::array kMappings = {Mapping::symmetric, Mapping::affine};
constexpr std::array kRoundings = {Rounding::nearest, Rounding::stochastic};
constexpr std::array kOrientations = {Orientation::row_major, Orientation::transposed, Orientation::both};
constexpr std::array kMultipliers = {Multiplier::none, Multiplier::per_column, Multiplier::per_row};
constexpr std::array kMasks = {Mask::inclusive, Mask::exclusive};
constexpr std::array kQuantized = {DType::s8, DType::u8, DType::s4};
constexpr std::array kActivations = {Activation::dynamic_per_token, Activation::dynamic_per_tensor,
                                     Activation::static_per_tensor};
constexpr std::array kLayouts = {WeightLayout::out_in, WeightLayout::in_out};
constexpr std::array kWeights = {WeightFormat::s8_per_channel, WeightFormat::s8_per_tensor};
constexpr std::array kProducts = {Product::none, Product::dequantized, Product::int8};
constexpr std::array kBools = {false, true};
// The groups of W4A16; 0 is a whole row.
constexpr std::array<std::int64_t, 4> kGroups = {0, 32, 64, 128};
constexpr std::array<double, 3> kStaticScales = {0.03, 0.25, 1.7};

// Turns through the options that a loop does not cross. SplitMix64 from a fixed start: the same list on every machine,
// and no two options in step with each other, as counters with a common divisor would be.
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
  void dress(CaseBase& c, std::int64_t& most_rows) {
    c.layout = pick({Layout::compact, Layout::padded, Layout::sliced, Layout::repeating});
    c.data = pick({Data::normal, Data::normal, Data::heavy_tailed, Data::ties, Data::constant, Data::tiny,
                   Data::zero_rows, Data::huge, Data::poisoned});
    c.rows = most_rows;
    if (one_in(4)) most_rows += pick({1, 5});
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

struct Shape {
  std::int64_t rows;
  std::int64_t cols;
};
// For the full product of options: ragged, odd, one vector register and a bit, a single row and a single column.
constexpr std::array<Shape, 8> kSmallShapes = {
    {{3, 31}, {8, 16}, {1, 64}, {33, 7}, {5, 100}, {64, 1}, {2, 127}, {17, 34}}};

class QuantizerCases {
 public:
  explicit QuantizerCases(Operation operation) : operation_(operation) {}

  std::vector<Case> all() {
    for (const DType x : kFloats) {
      for (const DType q : kQuantized) {
        for (const Granularity granularity : kGranularities) {
          for (const Mapping mapping : kMappings)
            cross({.x = x, .q = q, .granularity = granularity, .mapping = mapping});
        }
      }
    }
    for (const std::int64_t rows : kRows) {
      for (const std::int64_t cols : kSizes) {
        for (const Granularity granularity : kGranularities) {
          for (int turn = 0; turn < 3; ++turn) add(rotated(granularity), {rows, cols});
        }
      }
    }
    // Longer than a kernel's tile, or a chunk of a thread, is likely to be.
    for (const Shape shape : {Shape{257, 300}, {300, 257}, {3, 5000}, {4099, 3}, {1, 20000}}) {
      for (const Granularity granularity : kGranularities) {
        for (int turn = 0; turn < 2; ++turn) add(rotated(granularity), shape);
      }
    }
    return std::move(cases_);
  }

 private:
  bool quantizes() const { return operation_ == Operation::quantize; }
  bool has_scale_source() const { return quantizes() || operation_ == Operation::fake_quantize; }
  bool has_mask() const {
    return operation_ == Operation::quantize_backward || operation_ == Operation::fake_quantize_backward;
  }

  // The options that this operation has, beyond those given.
  void cross(QuantizeDescription d) {
    const std::span masks(kMasks.data(), has_mask() ? kMasks.size() : 1);
    const std::span sources(kScaleSources.data(), has_scale_source() ? kScaleSources.size() : 1);
    const std::span roundings(kRoundings.data(), has_scale_source() ? kRoundings.size() : 1);
    const std::span orientations(kOrientations.data(), quantizes() ? kOrientations.size() : 1);
    const std::span multipliers(kMultipliers.data(), quantizes() ? kMultipliers.size() : 1);
    for (const Mask mask : masks) {
      for (const ScaleSource scale : sources) {
        for (const Rounding rounding : roundings) {
          for (const Orientation orientation : orientations) {
            for (const Multiplier multiplier : multipliers) {
              d.mask = mask;
              d.scale = scale;
              d.rounding = rounding;
              d.orientation = orientation;
              d.multiplier = multiplier;
              for (int turn = 0; turn < 2; ++turn) add(d, turn_.pick(kSmallShapes));
            }
          }
        }
      }
    }
  }

  QuantizeDescription rotated(Granularity granularity) {
    QuantizeDescription d{.x = turn_.pick(kFloats), .q = turn_.pick(kQuantized), .granularity = granularity};
    d.mapping = turn_.pick(kMappings);
    if (has_mask()) d.mask = turn_.pick(kMasks);
    if (has_scale_source()) {
      d.scale = turn_.pick(kScaleSources);
      d.rounding = turn_.pick(kRoundings);
    }
    if (quantizes()) {
      d.orientation = turn_.pick(kOrientations);
      d.multiplier = turn_.pick(kMultipliers);
    }
    return d;
  }

  void add(QuantizeDescription d, Shape shape) {
    QuantizerCase c;
    c.operation = operation_;
    d.rows = shape.rows;
    d.cols = shape.cols;
    turn_.dress(c, d.rows);
    c.scale_out = turn_.pick(kBools);
    if (d.granularity == Granularity::group) {
      do {
        d.group = turn_.pick({std::int64_t{1}, std::int64_t{5}, std::int64_t{16}, std::int64_t{32}, std::int64_t{64},
                              std::max<std::int64_t>(d.cols, 1)});
      } while (d.cols % d.group != 0);
    }
    if (turn_.one_in(4)) {  // a range of the caller's own
      const bool affine = d.mapping == Mapping::affine;
      d.q_min = d.q == DType::u8 ? 0 : affine ? turn_.pick({-8, -5}) : turn_.pick({-8, -7});
      d.q_max = d.q == DType::s4 ? turn_.pick({1, 6}) : turn_.pick({7, 100, 127});
    }
    c.description = d;
    cases_.emplace_back(c);
  }

  Operation operation_;
  Rotation turn_;
  std::vector<Case> cases_;
};

class LinearCases {
 public:
  std::vector<Case> w8a8() {
    for (const Activation activation : kActivations) {
      for (const WeightFormat weight : kWeights) {
        for (const WeightLayout layout : kLayouts) {
          for (const bool bias : kBools) {
            w8a8_types({.activation = activation, .weight = weight, .weight_layout = layout, .bias = bias});
          }
        }
      }
    }
    for (const std::int64_t m : kRows) {
      for (const std::int64_t n : kSizes) {
        for (const std::int64_t k : kSizes) add(rotated_w8a8(), {m, n, k});
      }
    }
    for (const Sizes sizes : {Sizes{257, 33, 64}, {300, 128, 100}, {4, 700, 513}, {1, 300, 4099}, {130, 66, 1030}}) {
      for (int turn = 0; turn < 6; ++turn) add(rotated_w8a8(), sizes);
    }
    return std::move(cases_);
  }

  std::vector<Case> w4a16() {
    for (const DType x : kFloats) {
      for (const DType y : kFloats) {
        if ((x == DType::f64) != (y == DType::f64)) continue;
        for (const std::int64_t group : kGroups) {
          for (const bool zero_point : kBools) {
            for (const bool bias : kBools) {
              for (const Sizes sizes : {Sizes{3, 7, 128}, {8, 33, 256}}) {
                add(w4({.x = x, .y = y, .group = group, .weight_zero_point = zero_point, .bias = bias}), sizes);
              }
            }
          }
        }
      }
    }
    for (const std::int64_t m : kRows) {
      for (const std::int64_t n : kSizes) {
        for (const std::int64_t k : {0, 1, 7, 31, 32, 64, 100, 127, 128, 192, 255, 256, 384})
          add(rotated_w4(k), {m, n, k});
      }
    }
    for (const Sizes sizes : {Sizes{257, 33, 64}, {4, 300, 1024}, {1, 64, 4096}, {1, 5, 4099}}) {
      for (int turn = 0; turn < 6; ++turn) add(rotated_w4(sizes.k), sizes);
    }
    return std::move(cases_);
  }

  // All of both operands -128 over the longest contraction: the s32 sum is 2^31 - 2^14, one short of overflow.
  static Case longest_contraction(DType y) {
    LinearCase c;
    c.rows = 2;
    c.data = Data::constant;
    c.description = {.m = 2, .n = 3, .k = kMaxContraction, .x = DType::s8, .y = y};
    return c;
  }

 private:
  struct Sizes {
    std::int64_t m, n, k;
  };

  void w8a8_types(LinearDescription d) {
    for (const DType x : {DType::f16, DType::bf16, DType::f32, DType::f64, DType::s8}) {
      for (const DType y : kFloats) {
        if (x != DType::s8 && (x == DType::f64) != (y == DType::f64)) continue;
        for (const bool x_multiplier : kBools) {
          if (x == DType::s8 && x_multiplier) continue;
          d.x = x;
          d.y = y;
          d.x_multiplier = x_multiplier;
          for (const Sizes sizes : {Sizes{3, 7, 31}, {33, 16, 64}}) add(d, sizes);
        }
      }
    }
  }

  LinearDescription rotated_w8a8() {
    LinearDescription d;
    d.x = turn_.pick({DType::f16, DType::bf16, DType::f32, DType::f64, DType::s8});
    d.y = d.x == DType::f64  ? DType::f64
          : d.x == DType::s8 ? turn_.pick(kFloats)
                             : turn_.pick({DType::f16, DType::bf16, DType::f32});
    d.activation = turn_.pick(kActivations);
    d.weight = turn_.pick(kWeights);
    d.weight_layout = turn_.pick(kLayouts);
    d.bias = turn_.pick(kBools);
    d.x_multiplier = d.x != DType::s8 && turn_.pick(kBools);
    return d;
  }

  static LinearDescription w4(LinearDescription d) {
    d.activation = Activation::none;
    d.weight = WeightFormat::s4_group;
    return d;
  }

  LinearDescription rotated_w4(std::int64_t k) {
    LinearDescription d;
    d.x = turn_.pick(kFloats);
    d.y = d.x == DType::f64 ? DType::f64 : turn_.pick({DType::f16, DType::bf16, DType::f32});
    do {
      d.group = turn_.pick(kGroups);
    } while (d.group != 0 && k % d.group != 0);
    d.weight_zero_point = turn_.pick(kBools);
    d.bias = turn_.pick(kBools);
    return w4(d);
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

  Rotation turn_;
  std::vector<Case> cases_;
};

class LinearBackwardCases {
 public:
  explicit LinearBackwardCases(Operation operation) : operation_(operation) {}

  std::vector<Case> all() {
    for (const Product dx : kProducts) {
      for (const Product dw : kProducts) {
        for (const bool db : kBools) {
          for (const DType dy : kFloats) cross({.dy = dy, .dx = dx, .dw = dw, .db = db});
        }
      }
    }
    for (const std::int64_t m : kRows) {
      for (const std::int64_t n : kSizes) {
        for (const std::int64_t k : kSizes) add(rotated(), {m, n, k});
      }
    }
    for (const Sizes sizes : {Sizes{257, 33, 64}, {300, 128, 100}, {4, 700, 513}, {1030, 66, 31}, {2, 4099, 5}}) {
      for (int turn = 0; turn < 6; ++turn) add(rotated(), sizes);
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
  struct Sizes {
    std::int64_t m, n, k;
  };

  bool exercises(const LinearBackwardDescription& d) const {
    if (operation_ == Operation::column_sum) return d.db;
    const Product wanted = operation_ == Operation::w8a8_gemm ? Product::int8 : Product::dequantized;
    return d.dx == wanted || d.dw == wanted;
  }

  // The options that these products have; those that they have no use for stay at their defaults.
  void cross(LinearBackwardDescription d) {
    if (!exercises(d)) return;
    const bool dx = d.dx != Product::none;
    const bool dw = d.dw != Product::none;
    const bool int8 = d.dx == Product::int8 || d.dw == Product::int8;
    const bool narrow = d.dy == DType::f16 || d.dy == DType::bf16;
    for (const WeightLayout layout : std::span(kLayouts.data(), dx || dw ? 2 : 1)) {
      for (const WeightFormat weight : std::span(kWeights.data(), dx ? 2 : 1)) {
        for (const Activation activation : std::span(kActivations.data(), dw ? 3 : 1)) {
          for (const bool x_transposed : std::span(kBools.data(), dw ? 2 : 1)) {
            for (const bool dw_f32 : std::span(kBools.data(), dw && narrow ? 2 : 1)) {
              for (const Rounding rounding : std::span(kRoundings.data(), int8 ? 2 : 1)) {
                d.weight_layout = layout;
                d.weight = weight;
                d.activation = activation;
                d.x_transposed = x_transposed;
                d.dw_dtype.reset();
                if (dw_f32) d.dw_dtype = DType::f32;
                d.rounding = rounding;
                add(d, turn_.pick(kSmall));
              }
            }
          }
        }
      }
    }
  }

  LinearBackwardDescription rotated() {
    LinearBackwardDescription d;
    do {
      d.dx = turn_.pick(kProducts);
      d.dw = turn_.pick(kProducts);
      d.db = turn_.pick(kBools);
    } while (!exercises(d));
    d.dy = turn_.pick(kFloats);
    if (d.dy < DType::f32 && turn_.pick(kBools)) d.dw_dtype = DType::f32;
    d.activation = turn_.pick(kActivations);
    d.x_transposed = turn_.pick(kBools);
    d.weight = turn_.pick(kWeights);
    d.weight_layout = turn_.pick(kLayouts);
    d.rounding = turn_.pick(kRoundings);
    return d;
  }

  void add(LinearBackwardDescription d, const Sizes& sizes) {
    LinearBackwardCase c;
    d.m = sizes.m;
    d.n = sizes.n;
    d.k = sizes.k;
    if (d.activation == Activation::static_per_tensor) d.static_scale = turn_.pick(kStaticScales);
    turn_.dress(c, d.m);
    c.description = d;
    cases_.emplace_back(c);
  }

  static constexpr std::array<Sizes, 6> kSmall = {
      {{3, 31, 7}, {8, 16, 33}, {1, 64, 5}, {33, 7, 16}, {17, 34, 31}, {2, 1, 3}}};
  Operation operation_;
  Rotation turn_;
  std::vector<Case> cases_;
};

std::vector<Case> ordinary_cases(Operation operation) {
  switch (operation) {
    case Operation::quantize:
    case Operation::dequantize:
    case Operation::quantize_backward:
    case Operation::dequantize_backward:
    case Operation::fake_quantize:
    case Operation::fake_quantize_backward:
      return QuantizerCases(operation).all();
    case Operation::w8a8_gemm: {
      std::vector<Case> all = LinearCases().w8a8();
      const std::vector<Case> backward = LinearBackwardCases(operation).all();
      all.insert(all.end(), backward.begin(), backward.end());
      return all;
    }
    case Operation::w4a16_gemm:
      return LinearCases().w4a16();
    case Operation::w8a16_gemm:
    case Operation::column_sum:
      return LinearBackwardCases(operation).all();
  }
  throw std::runtime_error(message("no cases for operation ", static_cast<int>(operation)));
}

std::vector<Case> special_cases(Operation operation) {
  if (operation != Operation::w8a8_gemm) return {};
  std::vector<Case> special = LinearBackwardCases::longest_contractions();
  for (const DType y : {DType::f32, DType::f64}) special.push_back(LinearCases::longest_contraction(y));
  return special;
}

std::string describe_one(const QuantizerCase& c) {
  const QuantizeDescription& d = c.description;
  return message(name(c.operation), " x=", d.x, " q=", d.q, " rows=", c.rows, " of ", d.rows, " cols=", d.cols, ' ',
                 name(d.granularity), " group=", d.group, ' ', name(d.scale), ' ', name(d.mapping), ' ',
                 name(d.rounding), ' ', name(d.orientation), " multiplier=", name(d.multiplier), " mask=", name(d.mask),
                 " range=", d.q_min, "..", d.q_max, " scale_out=", c.scale_out);
}

std::string describe_one(const LinearCase& c) {
  const LinearDescription& d = c.description;
  return message("linear m=", c.rows, " of ", d.m, " n=", d.n, " k=", d.k, " x=", d.x, " y=", d.y, ' ',
                 name(d.activation), " static_scale=", d.static_scale, ' ', name(d.weight), ' ', name(d.weight_layout),
                 " group=", d.group, " zero_point=", d.weight_zero_point, " bias=", d.bias,
                 " x_multiplier=", d.x_multiplier);
}

std::string describe_one(const LinearBackwardCase& c) {
  const LinearBackwardDescription& d = c.description;
  return message("linear_backward m=", c.rows, " of ", d.m, " n=", d.n, " k=", d.k, " dy=", d.dy,
                 " dw_dtype=", d.dw_dtype.value_or(d.dy), " dx=", name(d.dx), " dw=", name(d.dw), " db=", d.db, ' ',
                 name(d.activation), " static_scale=", d.static_scale, " x_transposed=", d.x_transposed, ' ',
                 name(d.weight), ' ', name(d.weight_layout), ' ', name(d.rounding));
}

}  // namespace

std::string_view name(Layout value) {
  static constexpr std::array<std::string_view, 4> kNames = {"compact", "padded", "sliced", "repeating"};
  return kNames[static_cast<std::size_t>(value)];
}

std::string_view name(Data value) {
  static constexpr std::array<std::string_view, 8> kNames = {"normal", "heavy_tailed", "ties", "constant",
                                                             "tiny",   "zero_rows",    "huge", "poisoned"};
  return kNames[static_cast<std::size_t>(value)];
}

std::vector<Case> cases(Operation operation, bool quick) {
  std::vector<Case> list = ordinary_cases(operation);
  if (quick) {
    // 11 is prime to every period of the loops above, so that the sample meets every option.
    std::vector<Case> sample;
    for (std::size_t i = 0; i < list.size(); i += 11) sample.push_back(list[i]);
    list = std::move(sample);
  }
  const std::vector<Case> special = special_cases(operation);
  list.insert(list.end(), special.begin(), special.end());
  return list;
}

std::string describe(const Case& c) {
  const std::string text = std::visit([](const auto& one) { return describe_one(one); }, c);
  const CaseBase& base = std::visit([](const auto& one) -> const CaseBase& { return one; }, c);
  return message(text, " layout=", name(base.layout), " data=", name(base.data));
}

}  // namespace octile::cli
