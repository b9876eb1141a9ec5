// The cases of the quantizer family, and the list as a whole.
#include "check/cases.h"

#include <algorithm>
#include <span>
#include <stdexcept>

#include "base/message.h"
#include "check/cases_options.h"

namespace octile::check {

namespace {

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
    if (operation_ == Operation::prologue_quantize) return prologues();
    combine([&](DType x, DType q, Granularity granularity,
                Mapping mapping) { cross({.x = x, .q = q, .granularity = granularity, .mapping = mapping}); },
            kFloats, kQuantized, kGranularities, kMappings);
    combine(
        [&](std::int64_t rows, std::int64_t cols, Granularity granularity) {
          for (int turn = 0; turn < 3; ++turn) add(rotated(granularity), {rows, cols});
        },
        kRows, kSizes, kGranularities);
    // Longer than a kernel's tile, or a chunk of a thread, is likely to be.
    for (const Shape shape : {Shape{257, 300}, {300, 257}, {3, 5000}, {4099, 3}, {1, 20000}}) {
      for (const Granularity granularity : kGranularities) {
        for (int turn = 0; turn < 2; ++turn) add(rotated(granularity), shape);
      }
    }
    return std::move(cases_);
  }

  std::vector<Case> prologues() {
    combine(
        [&](DType x, Prologue prologue, bool gated, std::int64_t rows, std::int64_t cols) {
          for (int turn = 0; turn < 2; ++turn) {
            const Orientation orientation = turn_.pick(kOrientations);
            add({.x = x, .orientation = orientation, .prologue = prologue, .gated = gated}, {rows, cols});
          }
        },
        kNarrowFloats, kPrologues, kBools, kRows, kSizes);
    combine(
        [&](DType x, Prologue norm, bool residual, std::int64_t rows, std::int64_t cols) {
          QuantizeDescription d = with_norm(turn_, {.x = x, .prologue = norm, .residual = residual});
          d.orientation = turn_.pick(kOrientations);
          add(d, {rows, cols});
        },
        kNarrowFloats, kNorms, kBools, kRows, kSizes);
    return std::move(cases_);
  }

  // Long enough for several threads, with groups of odd sizes; what quotients decide; all 16-bit values.
  std::vector<Case> special() {
    if (operation_ == Operation::prologue_quantize) {
      for (const Shape shape : {Shape{17, 1022}, {65, 1028}, {300, 1200}, {3, 5000}, {1, 20000}}) {
        add({.x = turn_.pick(kNarrowFloats),
             .orientation = Orientation::both,
             .prologue = turn_.pick(kPrologues),
             .gated = turn_.pick(kBools)},
            shape);
      }
      // Lanes of a norm's sum that have one value, two, and more than a thread keeps.
      for (const std::int64_t cols : {1023, 1024, 1032, 2056, 4096, 5001, 8192, 8200, 20000}) {
        for (const Prologue norm : kNorms) {
          for (const DType x : kNarrowFloats) {
            QuantizeDescription d = with_norm(turn_, {.x = x, .prologue = norm});
            d.residual = turn_.pick(kBools);
            d.orientation = turn_.pick(kOrientations);
            add(d, {3, cols});
          }
        }
      }
      combine(
          [&](DType x, Prologue prologue, bool gated) {
            add_whole({.rows = 256, .cols = 1024, .x = x, .prologue = prologue, .gated = gated}, Data::every_value);
          },
          std::array{DType::f16, DType::bf16}, kPrologues, kBools);
      return std::move(cases_);
    }
    for (const Shape shape : {Shape{3, 513}, {17, 1022}, {65, 1028}, {130, 514}, {130, 700}, {300, 1200}}) {
      for (const Granularity granularity : kGranularities) add(rotated(granularity), shape);
      for (const std::int64_t group : {2, 3, 7, 64, 257, 511, 600}) {
        QuantizeDescription d = rotated(Granularity::group);
        d.group = group;
        if (shape.cols % group == 0) add(d, shape);
      }
    }
    // One row of scales for all rows, in groups that do not divide a kernel's pieces.
    for (const DType x : {DType::bf16, DType::f64}) {
      for (const std::int64_t group : {3, 5, 600}) {
        add_whole({.rows = 9, .cols = 9000, .x = x, .granularity = Granularity::group, .group = group}, Data::normal);
        std::get<QuantizerCase>(cases_.back()).layout = Layout::repeating;
      }
    }
    if (operation_ == Operation::quantize || operation_ == Operation::fake_quantize ||
        operation_ == Operation::quantize_backward) {
      for (int turn = 0; turn < 20; ++turn) {
        const Granularity granularity = turn % 4 < 2 ? Granularity::row : Granularity::column;
        add_whole({.rows = 64, .cols = 1024, .granularity = granularity, .scale = ScaleSource::given},
                  turn % 2 == 0 ? Data::near_ties : Data::sparse_ties);
      }
    }
    if (operation_ == Operation::dequantize_backward) {
      for (const DType x : {DType::f16, DType::bf16}) {
        add_whole({.rows = 256, .cols = 1024, .x = x, .granularity = Granularity::row}, Data::every_value);
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
    combine(
        [&](Mask mask, ScaleSource scale, Rounding rounding, Orientation orientation, Multiplier multiplier) {
          d.mask = mask;
          d.scale = scale;
          d.rounding = rounding;
          d.orientation = orientation;
          d.multiplier = multiplier;
          for (int turn = 0; turn < 2; ++turn) add(d, turn_.pick(kSmallShapes));
        },
        masks, sources, roundings, orientations, multipliers);
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
    if (d.granularity == Granularity::group && d.group == 0) {
      do {
        d.group = turn_.pick({std::int64_t{1}, std::int64_t{5}, std::int64_t{16}, std::int64_t{32}, std::int64_t{64},
                              std::max<std::int64_t>(d.cols, 1)});
      } while (d.cols % d.group != 0);
    }
    if (turn_.one_in(4)) {  // a range of the caller's own
      const bool affine = d.mapping == Mapping::affine;
      const auto [low, high] = range_of(d.q);
      const int min = std::max(low, -8);
      d.q_min = d.q == DType::u8 ? 0 : affine ? turn_.pick({min, std::min(min + 3, -1)}) : turn_.pick({min, min + 1});
      d.q_max = is_packed(d.q) ? turn_.pick({1, std::max(high - 1, 1)}) : turn_.pick({7, 100, 127});
    }
    if ((has_scale_source() || d.prologue != Prologue::none) && turn_.one_in(4))
      d.min_scale = turn_.pick({0x1p-79, 0x1p-40, 0.125});
    c.description = d;
    cases_.emplace_back(c);
  }

  void add_whole(const QuantizeDescription& d, Data data) {
    QuantizerCase c;
    c.operation = operation_;
    c.rows = d.rows;
    c.data = data;
    c.description = d;
    cases_.emplace_back(c);
  }

  Operation operation_;
  Rotation turn_;
  std::vector<Case> cases_;
};

std::vector<Case> ordinary_cases(Task task) {
  switch (task.operation) {
    case Operation::gradient_quantize:
    case Operation::blocked_gradient_quantize:
    case Operation::blocked_gemm:
    case Operation::column_sum:
      return linear_backward_cases(task);
    case Operation::grouped_gemm:
      return expert_cases(task.format);
    case Operation::grouped_gradient:
    case Operation::grouped_gradient_quantize:
      return expert_gradient_cases(task);
    case Operation::gemm:
      break;
    default:
      return QuantizerCases(task.operation).all();
  }
  std::vector<Case> all = task.format == kW8A8 ? w8a8_cases() : std::vector<Case>();
  const auto append = [&](const std::vector<Case>& more) { all.insert(all.end(), more.begin(), more.end()); };
  if (task.format.b == DType::s8) append(linear_backward_cases(task));
  append(grouped_cases(task.format));
  return all;
}

// What a sample needs too: long sums, and sizes that several threads share.
std::vector<Case> special_cases(Task task) {
  switch (task.operation) {
    case Operation::gradient_quantize:
    case Operation::blocked_gradient_quantize:
    case Operation::blocked_gemm:
    case Operation::gemm:
    case Operation::grouped_gemm:
    case Operation::grouped_gradient:
    case Operation::grouped_gradient_quantize:
    case Operation::column_sum:
      return special_linear_cases(task);
    default:
      return QuantizerCases(task.operation).special();
  }
}

}  // namespace

std::vector<Case> cases(Task task, DeviceType device, int every) {
  std::vector<Case> list = ordinary_cases(task);
  if (device == DeviceType::cuda) {
    const std::vector<Case> large = large_cases(task);
    list.insert(list.end(), large.begin(), large.end());
  }
  if (every > 1) {
    std::vector<Case> sample;
    for (std::size_t i = 0; i < list.size(); i += static_cast<std::size_t>(every)) sample.push_back(list[i]);
    list = std::move(sample);
  }
  const std::vector<Case> special = special_cases(task);
  list.insert(list.end(), special.begin(), special.end());
  // There one launch has all experts, in rows of their own.
  const bool grouped = task.operation == Operation::grouped_gemm || task.operation == Operation::grouped_gradient ||
                       task.operation == Operation::grouped_gradient_quantize;
  if (device == DeviceType::cuda && !grouped) {
    std::erase_if(list, [](const Case& c) {
      return std::holds_alternative<GroupedLinearCase>(c) || std::holds_alternative<GroupedLinearBackwardCase>(c);
    });
  }
  return list;
}

}  // namespace octile::check
