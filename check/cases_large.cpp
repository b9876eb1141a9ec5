// The large cases, for GPUs: sizes that fill their tiles, split their sums and reach their fast paths. No oracle could
// keep up, so what is expected comes from the CPU's rows.
#include <algorithm>
#include <tuple>

#include "check/cases_options.h"
#include "plan/packed_weight.h"

namespace octile::check {

namespace {

struct Sizes {
  std::int64_t m, n, k;
};

// Around the sizes of tiles, and where a kernel for few rows may end.
constexpr std::array<std::int64_t, 23> kManyRows = {1,  2,  4,  5,   8,   15,  16,  17,  32,  33,  48,  63,
                                                    64, 65, 96, 100, 128, 129, 200, 256, 257, 400, 1024};
// Columns and contractions: whole tiles, multiples of 16, of 8, and of nothing.
constexpr std::array<std::pair<std::int64_t, std::int64_t>, 8> kPlanes = {
    {{512, 512}, {1000, 512}, {4112, 1024}, {1024, 4096}, {640, 1000}, {4096, 1008}, {301, 4112}, {2056, 777}}};
// Several waves of tiles, and single ones of every height; long sums for few outputs.
constexpr std::array<Sizes, 12> kLarge = {{{4096, 4096, 256},
                                           {140, 8192, 256},
                                           {280, 8192, 384},
                                           {380, 8192, 256},
                                           {560, 8192, 128},
                                           {3000, 5000, 272},
                                           {8192, 1040, 128},
                                           {1, 4096, 14336},
                                           {16, 1024, 14336},
                                           {64, 512, 28672},
                                           {7, 14336, 4096},
                                           {130, 264, 65536}}};

// Weights in groups: around the sizes of tiles, long rows that blocks share (any number of blocks), and several waves
// of tiles. Few terms in all, for the sake of the bound's arithmetic.
constexpr std::array<Sizes, 28> kGrouped = {
    {{1, 4096, 1024},  {1, 272, 14336},  {5, 2064, 1024},   {8, 512, 4096},   {9, 300, 4096},   {16, 1040, 2048},
     {17, 300, 4096},  {31, 528, 4096},  {32, 1000, 1024},  {33, 512, 4096},  {48, 1040, 1024}, {64, 640, 2048},
     {65, 272, 4096},  {100, 1000, 512}, {128, 512, 1024},  {129, 1032, 512}, {257, 528, 512},  {300, 1024, 288},
     {1024, 264, 96},  {4096, 136, 128}, {2100, 2064, 256}, {2100, 2064, 32}, {20, 5120, 1152}, {40, 8192, 640},
     {24, 10000, 384}, {56, 9000, 256},  {100, 5120, 768},  {120, 2816, 1280}}};

// Gradients: more tiles of dX, and of dW, than SMs, and short sums for the sake of the bound's arithmetic.
constexpr std::array<Sizes, 4> kGradients = {
    {{2100, 208, 2100}, {2051, 136, 2049}, {208, 2100, 2056}, {131, 2049, 2051}}};

// Gradients in blocks: more tiles than SMs, long sums, short last blocks, and sizes that TMA cannot read as they are.
// The last two: dX and dW of Hopper's tiles of 208 and of 192 columns, ragged ones, on 132 SMs.
constexpr std::array<Sizes, 8> kBlockedGradients = {{{512, 1024, 768},
                                                     {1000, 640, 520},
                                                     {2048, 384, 256},
                                                     {333, 4104, 1000},
                                                     {2051, 136, 2049},
                                                     {128, 2056, 4096},
                                                     {1019, 520, 3203},
                                                     {520, 1019, 3203}}};

struct Matrix {
  std::int64_t rows, cols;
};
// Rows of one block, of several, longer than shared memory; a matrix that fits the last cache, and one that does not.
constexpr std::array<Matrix, 8> kMatrices = {
    {{1024, 4096}, {4096, 1000}, {64, 14336}, {3, 70000}, {2048, 2064}, {333, 777}, {16, 100001}, {5003, 6000}}};

class LargeCases {
 public:
  std::vector<Case> products() {
    for (const std::int64_t m : kManyRows) {
      for (const auto& [n, k] : kPlanes) {
        add({m, n, k}, DType::s8);
        add({m, n, k}, turn_.pick({DType::f16, DType::f16, DType::bf16, DType::f32}));
      }
    }
    for (const Sizes& sizes : kLarge) {
      for (int turn = 0; turn < 3; ++turn) add(sizes, turn == 0 ? DType::f16 : DType::s8);
    }
    return std::move(cases_);
  }

  std::vector<Case> grouped(GemmFormat format) {
    for (const Sizes& sizes : kGrouped) {
      for (int turn = 0; turn < 6; ++turn) {
        LinearCase c;
        LinearDescription d{.m = sizes.m, .n = sizes.n, .k = sizes.k};
        d.x = turn_.pick({DType::f16, DType::bf16});
        d.y = turn_.pick({d.x, d.x, DType::f32});
        d.activation = Activation::none;
        if (!format.float_a) {
          d.x = turn_.pick({DType::f16, DType::s8});
          d.y = turn_.pick({DType::f16, DType::bf16, DType::f32});
          d.activation = turn_.pick(kActivations);
          if (d.activation == Activation::static_per_tensor) d.static_scale = 0.02;
        }
        d.weight = WeightFormat::in_groups(format.b);
        do {
          d.weight.group = turn_.pick(kGroups);
        } while (d.weight.group != 0 && d.k % d.weight.group != 0);
        if (is_packed(format.b)) d.weight.zero_point = turn_.pick(kBools);
        d.bias = turn_.pick(kBools);
        d.packed_weight = turn % 2 == 1 && has_packed_form(format.b);
        dress(c, d.m);
        c.layout = turn_.pick({Layout::compact, Layout::compact, Layout::pitched});
        c.description = d;
        cases_.emplace_back(c);
      }
    }
    return std::move(cases_);
  }

  std::vector<Case> gradients() {
    for (const Sizes& sizes : kGradients) {
      for (const WeightLayout layout : kLayouts) {
        LinearBackwardCase c;
        LinearBackwardDescription d{.m = sizes.m, .n = sizes.n, .k = sizes.k};
        d.dy = turn_.pick({DType::f16, DType::bf16});
        d.dx = sizes.m > sizes.n ? Product::dequantized : Product::none;
        d.dw = sizes.m > sizes.n ? Product::none : Product::dequantized;
        d.weight_layout = layout;
        d.x_transposed = turn_.pick(kBools);
        if (d.dw != Product::none && turn_.pick(kBools)) d.dw_dtype = DType::f32;
        d.dw_accumulate = d.dw_dtype && turn_.pick(kBools);
        dress(c, d.m);
        c.layout = turn_.pick({Layout::compact, Layout::pitched});
        c.data = Data::normal;
        c.description = d;
        cases_.emplace_back(c);
      }
    }
    return std::move(cases_);
  }

  std::vector<Case> blocked_gradients() {
    for (const Sizes& sizes : kBlockedGradients) {
      for (int turn = 0; turn < 4; ++turn) {
        LinearBackwardCase c;
        LinearBackwardDescription d{.m = sizes.m, .n = sizes.n, .k = sizes.k};
        d.dy = turn_.pick({DType::bf16, DType::f16, DType::bf16, DType::f32});
        d.dx = turn_.pick({Product::int8, Product::int8, Product::none});
        d.dw = d.dx == Product::none ? Product::int8 : turn_.pick({Product::int8, Product::dequantized});
        d.db = turn_.pick(kBools);
        d.gradient_block = turn_.pick({128, 128, 256, 512, 1024});
        d.weight_layout = turn_.pick({WeightLayout::out_in, WeightLayout::out_in, WeightLayout::in_out});
        d.x_transposed = turn_.pick({true, true, false});
        if (d.dy != DType::f32 && turn_.pick(kBools)) d.dw_dtype = DType::f32;
        d.dw_accumulate = (d.dw_dtype || d.dy == DType::f32) && turn_.pick(kBools);
        dress(c, d.m);
        c.description = d;
        cases_.emplace_back(c);
      }
    }
    return std::move(cases_);
  }

  std::vector<Case> quantizers(Operation operation) {
    const bool has_prologue = operation == Operation::prologue_quantize;
    const int turns = operation == Operation::quantize || has_prologue ? 4 : 1;
    for (const Matrix& size : kMatrices) {
      for (const Granularity granularity : kGranularities) {
        if (has_prologue && granularity != Granularity::row) continue;
        for (int turn = 0; turn < turns; ++turn) add(operation, granularity, size);
      }
    }
    return std::move(cases_);
  }

 private:
  void dress(CaseBase& c, std::int64_t& max_rows) {
    c.large = true;
    c.rows = max_rows;
    c.layout = turn_.pick({Layout::compact, Layout::compact, Layout::compact, Layout::pitched, Layout::pitched,
                           Layout::padded, Layout::sliced, Layout::repeating});
    c.data = turn_.pick({Data::normal, Data::normal, Data::normal, Data::ties, Data::zero_rows, Data::poisoned});
    if (turn_.one_in(8)) max_rows += 3;
  }

  void add(const Sizes& sizes, DType x) {
    LinearCase c;
    LinearDescription d;
    std::tie(d.m, d.n, d.k) = std::tie(sizes.m, sizes.n, sizes.k);
    d.x = x;
    d.y = turn_.pick({DType::f16, DType::f16, DType::bf16, DType::f32});
    d.activation = turn_.pick({Activation::dynamic_per_token, Activation::dynamic_per_token,
                               Activation::static_per_tensor, Activation::dynamic_per_tensor});
    if (d.activation == Activation::static_per_tensor) d.static_scale = turn_.pick(kStaticScales);
    d.weight = turn_.pick({WeightFormat::s8_per_channel, WeightFormat::s8_per_channel, WeightFormat::s8_per_tensor});
    d.weight_layout = turn_.one_in(6) ? WeightLayout::in_out : WeightLayout::out_in;
    d.bias = turn_.pick(kBools);
    d.x_multiplier = x != DType::s8 && turn_.one_in(4);
    dress(c, d.m);
    c.description = d;
    cases_.emplace_back(c);
  }

  void add(Operation operation, Granularity granularity, const Matrix& size) {
    QuantizerCase c;
    c.operation = operation;
    QuantizeDescription d{.rows = size.rows, .cols = size.cols, .granularity = granularity};
    d.x = turn_.pick({DType::f16, DType::f16, DType::bf16, DType::f32});
    if (operation == Operation::prologue_quantize) {
      d.orientation = turn_.pick(kOrientations);
      d.prologue = turn_.pick({kPrologues[0], kPrologues[1], kNorms[0], kNorms[1]});
      (is_norm(d.prologue) ? d.residual : d.gated) = turn_.pick(kBools);
      if (is_norm(d.prologue)) d = with_norm(turn_, d);
    } else {
      d.q = turn_.pick({DType::s8, DType::s8, DType::s8, DType::u8, DType::s4});
      d.mapping = turn_.pick({Mapping::symmetric, Mapping::symmetric, Mapping::affine});
    }
    if (operation == Operation::quantize || operation == Operation::fake_quantize) {
      d.scale = turn_.pick({ScaleSource::dynamic, ScaleSource::dynamic, ScaleSource::given});
      d.rounding = turn_.pick({Rounding::nearest, Rounding::nearest, Rounding::stochastic});
    }
    if (operation == Operation::quantize) {
      d.orientation = turn_.pick(kOrientations);
      d.multiplier = turn_.pick({Multiplier::none, Multiplier::none, Multiplier::per_column, Multiplier::per_row});
    }
    if (granularity == Granularity::group) {
      d.group = d.cols;
      for (const std::int64_t group : {128, 64, 32, 8, 7}) {
        if (d.cols % group == 0) {
          d.group = group;
          break;
        }
      }
    }
    c.scale_out = turn_.pick(kBools);
    dress(c, d.rows);
    c.description = d;
    cases_.emplace_back(c);
  }

  Rotation turn_;
  std::vector<Case> cases_;
};

}  // namespace

std::vector<Case> large_cases(Task task) {
  switch (task.operation) {
    case Operation::gradient_quantize:
    case Operation::column_sum:
    case Operation::grouped_gradient:
    case Operation::grouped_gradient_quantize:
      return {};
    case Operation::blocked_gradient_quantize:
    case Operation::blocked_gemm:
      return LargeCases().blocked_gradients();
    case Operation::grouped_gemm:
      return large_expert_cases(task.format);
    case Operation::gemm:
      break;
    default:
      return LargeCases().quantizers(task.operation);
  }
  std::vector<Case> all;
  if (task.format == kW8A8) all = LargeCases().products();
  if (task.format == kW8A16) all = LargeCases().gradients();
  const std::vector<Case> grouped = LargeCases().grouped(task.format);
  all.insert(all.end(), grouped.begin(), grouped.end());
  return all;
}

}  // namespace octile::check
