// w8a16_gemm_sm90: y (m, n) = sum_c a[i, c] * (b[j, c] * c_scale[c]), of 16-bit a in either orientation, on Hopper.
#include <string>
#include <string_view>

#include "cuda/dispatch.h"
#include "cuda/gemm/w8a16_gemm_sm90_launch.cuh"

namespace octile::cuda {

namespace {

using namespace w8a16;

constexpr std::string_view kName = "w8a16_gemm_sm90";

struct Forms {
  static constexpr bool channels = false;

  static std::string supports(const GemmProblem& p) {
    return p.grouped() ? "has no groups" : reason_against_problem(p);
  }
  static bool aligned(const GemmProblem& p, const GemmOperands& o) { return w8a16::aligned(p, o); }

  template <class Tile, class Body>
  static void with_form(const GemmProblem& p, Tile, const Body& body) {
    const auto with = [&]<bool half, bool a_outer, bool b_outer>() {
      body(Form<std::conditional_t<half, __half, __nv_bfloat16>, Tile, a_outer, b_outer>());
    };
    with_flags(with, p.a == DType::f16, p.a_major == Major::outer, p.b_major == Major::outer);
  }
};

}  // namespace

extern constinit const GemmKernel w8a16_gemm_sm90 = row<Forms, kName>();

}  // namespace octile::cuda
