#include "cpu/gemm/w4a8_panels.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/access.h"
#include "cpu/support/multiversion.h"
#include "cpu/support/rows.h"
#include "plan/packed_weight.h"

namespace octile::cpu {

namespace {

constexpr std::int64_t kRowBlock = 96;  // rows of a part: (kRowBlock, kTotalsStride) totals lie on the stack
constexpr std::int64_t kLine = 64;
constexpr std::int64_t kChannels = kMostPanels * kPanelChannels;  // of a part

// Workspace: rows of a, their sums over each group, and b in its packed form unless it comes so.
struct Memory {
  std::int64_t stride;
  std::int64_t groups;
  std::int8_t* a;
  std::int32_t* sums;
  std::byte* packed;
  std::int64_t size;

  Memory(const GemmProblem& p, void* workspace)
      : stride((ceil_div(p.k, kLine) | 1) * kLine), groups(p.k / std::max<std::int64_t>(p.b.group, 1)) {
    Pieces pieces(workspace);
    a = reinterpret_cast<std::int8_t*>(pieces.take(p.m * stride));
    sums = reinterpret_cast<std::int32_t*>(
        pieces.take(round_up(p.m * groups * static_cast<std::int64_t>(sizeof(std::int32_t)), kLine)));
    packed = reinterpret_cast<std::byte*>(pieces.take(p.b_packed ? 0 : packed_layout(p).size));
    size = pieces.size();
  }
};

struct SumGroup {
  template <Isa>
  OCTILE_INLINE static void run(const std::int8_t* __restrict row, std::int64_t n, std::int32_t* sum) {
    std::int32_t total = 0;
    for (std::int64_t i = 0; i < n; ++i) total += row[i];
    *sum = total;
  }
};

struct FinishRow {
  template <Isa>
  OCTILE_INLINE static void run(float* __restrict totals, float scale, const float* __restrict bias, std::int64_t n) {
    for (std::int64_t j = 0; j < n; ++j) totals[j] = bias ? std::fma(totals[j], scale, bias[j]) : totals[j] * scale;
  }
};

class Multiplication {
 public:
  Multiplication(const GroupKernel& kernel, const GemmProblem& problem, const GemmOperands& o, const Launch& launch)
      : kernel_(kernel),
        problem_(problem),
        o_(o),
        memory_(problem, launch.workspace.data),
        at_(packed_layout(problem)) {
    packed_ = problem.b_packed ? static_cast<const std::uint8_t*>(o.b.data)
                               : reinterpret_cast<const std::uint8_t*>(memory_.packed);
  }

  void run() const {
    if (!problem_.b_packed) pack_weight(problem_, o_, memory_.packed);
    const std::int64_t rows = o_.y.rows();
    const std::int64_t cols = o_.y.cols();
    const int threads = useful_threads(problem_.threads, product_units(rows, cols, problem_.k));
    parallel_for(threads, rows, [&](std::int64_t row) { convert_row(row); });
    const std::int64_t row_blocks = ceil_div(rows, kRowBlock);
    parallel_for(threads, row_blocks * ceil_div(cols, kChannels),
                 [&](std::int64_t part) { multiply(part % row_blocks * kRowBlock, part / row_blocks * kChannels); });
  }

 private:
  void convert_row(std::int64_t row) const {
    const std::int64_t depth = at_.groups * at_.group_depth;
    std::int8_t* out = memory_.a + row * memory_.stride;
    std::memcpy(out, static_cast<const std::int8_t*>(o_.a.data) + row * o_.a.strides[0],
                static_cast<std::size_t>(problem_.k));
    std::memset(out + problem_.k, 0, static_cast<std::size_t>(depth - problem_.k));
    for (std::int64_t g = 0; g < at_.groups; ++g) {
      multiversion<SumGroup>(static_cast<const std::int8_t*>(out + g * at_.group_depth), at_.group_depth,
                             memory_.sums + row * at_.groups + g);
    }
  }

  void multiply(std::int64_t first_row, std::int64_t first_col) const {
    alignas(64) float totals[kRowBlock * kTotalsStride];
    const std::int64_t rows = std::min(kRowBlock, o_.y.rows() - first_row);
    const std::int64_t cols = std::min(kChannels, o_.y.cols() - first_col);
    const std::int64_t panel = first_col / kPanelChannels;
    std::fill_n(totals, rows * kTotalsStride, 0.0f);
    GroupsRun run{};
    run.a_stride = memory_.stride;
    run.a_sums_stride = at_.groups;
    run.b_stride = at_.panel_bytes;
    run.segments_stride = at_.groups * kPanelChannels;
    run.groups = at_.groups;
    run.depth = at_.group_depth;
    run.panels = static_cast<int>(ceil_div(cols, kPanelChannels));
    const std::int64_t segment = panel * at_.groups * kPanelChannels;
    run.b = packed_ + panel * at_.panel_bytes;
    run.scales = packed_ + at_.scales_at + segment * static_cast<std::int64_t>(sizeof(float));
    run.zero_points = problem_.b.zero_point ? packed_ + at_.zero_points_at + segment : nullptr;
    for (std::int64_t i = 0; i < rows; i += kernel_.rows) {
      run.a = memory_.a + (first_row + i) * memory_.stride;
      run.a_sums = memory_.sums + (first_row + i) * at_.groups;
      run.rows = static_cast<int>(std::min<std::int64_t>(kernel_.rows, rows - i));
      run.totals = totals + i * kTotalsStride;
      kernel_.tile(run);
    }
    finish({first_row, rows}, {first_col, cols}, totals);
  }

  struct Range {
    std::int64_t first, count;
  };

  void finish(Range rows, Range cols, float* totals) const {
    float bias[kChannels];
    for (std::int64_t j = 0; problem_.bias && j < cols.count; ++j) bias[j] = load<float>(o_.bias, cols.first + j);
    for (std::int64_t i = 0; i < rows.count; ++i) {
      float* row = totals + i * kTotalsStride;
      multiversion<FinishRow>(row, load<float>(o_.a_scale, rows.first + i),
                              problem_.bias ? static_cast<const float*>(bias) : nullptr, cols.count);
      narrow<float>(o_.y.dtype, o_.y.data, (rows.first + i) * o_.y.strides[0] + cols.first, cols.count, row);
    }
  }

  const GroupKernel& kernel_;
  const GemmProblem& problem_;
  const GemmOperands& o_;
  Memory memory_;
  PackedLayout at_;
  const std::uint8_t* packed_;
};

}  // namespace

void multiply_groups(const GroupKernel& kernel, const GemmProblem& problem, const GemmOperands& operands,
                     const Launch& launch) {
  Multiplication(kernel, problem, operands, launch).run();
}

std::size_t groups_workspace(const GemmProblem& problem) {
  return static_cast<std::size_t>(Memory(problem, nullptr).size);
}

}  // namespace octile::cpu
