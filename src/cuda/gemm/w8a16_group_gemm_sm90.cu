// w8a16_group_gemm_sm90, forward with a scale per channel or tensor, on Hopper:
//
//   y (m, n) = round_to_y(s[j] * sum_c a[i, c] * q[j, c] + bias[j])
//
// a f16 or bf16, q s8. The kernel is w8a16_gemm_sm90's; nothing is rounded before the sums in f32, and the scale and
// the bias take one fma at the end.
#include <string>
#include <string_view>

#include "cuda/gemm/w8a16_gemm_sm90_launch.cuh"

namespace octile::cuda {

namespace {

using namespace w8a16;

constexpr std::string_view kName = "w8a16_group_gemm_sm90";

struct Forms {
  static constexpr bool channels = true;

  static std::string supports(const GemmProblem& p) {
    if (!p.grouped() || p.b.group != p.k) return "takes a scale per channel or tensor";
    if (p.y != p.a && p.y != DType::f32) return "writes y in x's type or f32";
    return reason_against_problem(p);
  }
  // Operands have their terms along rows; strided ones are another row's.
  static bool aligned(const GemmProblem& p, const GemmOperands& o) {
    return o.a.strides[1] == 1 && o.b.strides[1] == 1 && o.y.strides[1] == 1 && w8a16::aligned(p, o);
  }

  template <class Tile, class Body>
  static void with_form(const GemmProblem& p, Tile, const Body& body) {
    p.a == DType::f16 ? body(Form<__half, Tile, false, false, true>())
                      : body(Form<__nv_bfloat16, Tile, false, false, true>());
  }
};

}  // namespace

extern constinit const GemmKernel w8a16_group_gemm_sm90 = row<Forms, kName>();

}  // namespace octile::cuda
