// Kernels in the tile language as C functions on device pointers, for tile/bench/cuda_bench.py. `variant` picks a
// layout and block sizes; an unknown variant gives -1. TILE_PART 0 has the memory-bound kernels, 1 the
// products by mma.sync, 2 and 3 the products by WGMMA, 4 attention and products of f32 as tf32.
#include <cstdio>

#include "bench/attention.h"
#include "bench/gradients.h"
#include "octile/tile/autotune.h"
#include "octile/tile/cuda.h"
#include "puzzles/elementwise_kernels.h"
#include "puzzles/linear_kernels.h"
#include "puzzles/rows_kernels.h"

namespace octile::tile {
namespace {

using puzzles::elementwise::MaskedAdd;
using puzzles::linear::Forward;
using puzzles::linear::QuantizeRows;
using puzzles::rows::LongSum;

struct SoftmaxHeld {  // a row in one tile, read once
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int length, auto b1) const {
    const auto j = t.arange(b1);
    const auto from = t.program_id(0) * length + j;
    const auto v = t.load(x + from, j < length, -kInfinity);
    const auto e = exp2(kLog2E * (v - max(v)));
    t.store(z + from, e / sum(e), j < length);
  }
};

struct SoftmaxTwoPasses {  // a row in blocks, read twice
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, int length, auto b0, auto b1) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const float log2e = kLog2E;
    auto top = t.full(b0, c<1>, -kInfinity), total = t.full(b0, c<1>, 0.0f);  // top: of v log2(e)
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      const auto v = t.load(x + i * length + j, (i < n0) & (j < length), -kInfinity);
      const auto next = maximum(top, max(v) * log2e);
      total = total * exp2(top - next) + sum(exp2(fma(v, log2e, -next)));
      top = next;
    }
    for (int k : range(0, length, b1)) {
      const auto j = t.arange(b1) + k;
      const auto inside = (i < n0) & (j < length);
      t.store(z + i * length + j, exp2(fma(t.load(x + i * length + j, inside), log2e, -top)) / total, inside);
    }
  }
};

struct QuantizeRowsHeld {
  TILE_KERNEL void operator()(auto& t, auto x, auto q, auto scale, int columns, auto b1) const {
    const auto j = t.arange(b1);
    const auto from = t.program_id(0) * columns + j;
    const auto v = t.load(x + from, j < columns, 0.0f);
    const auto s = maximum(max(abs(v)) / 127.0f, 1e-8f);
    t.store(scale + t.program_id(0), s);
    t.store(q + from, cast<s8, Round::even>(clamp(v / s, -127.0f, 127.0f)), j < columns);
  }
};

struct Matmul {  // f16 or bf16, summed in f32
  TILE_KERNEL void operator()(auto& t, auto x, auto y, auto z, int n0, int n1, int middle, auto b0, auto b1, auto b2,
                              auto stages) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const auto j = t.program_id(1) * b1 + t.arange(b1);
    auto total = t.full(b0, b1, 0.0f);
    t.pipeline(
        stages, cdiv(middle, b2),
        [&](int step) {
          const auto k = t.arange(b2) + step * b2;
          return fetches(t.fetch(x + i * middle + k, (i < n0) & (k < middle), 0.0f),
                         t.fetch(y + col(k) * n1 + j, (col(k) < middle) & (j < n1), 0.0f));
        },
        [&](int, const auto& a, const auto& b) { total = dot(a, b, total); });
    t.store(z + i * n1 + j, cast<typename decltype(z)::Element>(total), (i < n0) & (j < n1));
  }
};

// s8 weights as (out, in): both operands with their terms side by side.
struct ForwardAlong {
  template <class T, class Xq, class Xs, class Wq, class Ws, class Bias, class Y, class M, class N, class K>
  TILE_KERNEL void operator()(T& t, Xq x_q, Xs x_scale, Wq w_q, Ws w_scale, Bias bias, Y y, int batch, int in, int out,
                              M bm, N bn, K bk) const {
    const auto i = col(t.program_id(0) * bm + t.arange(bm));
    const auto j = t.program_id(1) * bn + t.arange(bn);
    auto total = t.full(bm, bn, 0);
    t.pipeline(
        c<3>, cdiv(in, bk),
        [&](int step) {
          const auto k = t.arange(bk) + step * bk;
          return fetches(t.fetch(x_q + i * in + k, (i < batch) & (k < in), 0),
                         t.fetch(w_q + col(j) * in + k, (col(j) < out) & (k < in), 0));
        },
        [&](int, const auto& a, const auto& b) { total = dot(a, trans(b), total); });
    const auto scale = t.load(x_scale) * t.load(w_scale + j, j < out, 0.0f);
    const auto b = t.load(bias + j, j < out, 0.0f);
    t.store(y + i * out + j, cast<f16>(fma(cast<f32>(total), scale, b)), (i < batch) & (j < out));
  }
};

template <class T>
Tensor<T> tensor(const void* p) {
  return {"", static_cast<T*>(const_cast<void*>(p)), {}};
}

}  // namespace
}  // namespace octile::tile

using namespace octile::tile;

#if !defined(TILE_PART) || TILE_PART == 0
extern "C" int tile_masked_add(int variant, const void* px, void* pz, int n, void* stream) {
  const auto x = tensor<f32>(px), z = tensor<f32>(pz);
  const auto run = [&](auto layout, auto block) {
    launch(Cuda<decltype(layout)>{stream}, Grid{cdiv(n, block)}, MaskedAdd{}, x, z, n, block);
    return 0;
  };
  if (variant == 0) return run(Threads<1, 256>{}, c<1024>);
  if (variant == 1) return run(Threads<1, 128>{}, c<1024>);
  return -1;
}

template <Math kMath>
int softmax(int variant, const void* px, void* pz, int rows, int columns, void* stream) {
  const auto x = tensor<f32>(px), z = tensor<f32>(pz);
  const auto run = [&](auto layout, auto b0, auto b1) {
    launch(Cuda<decltype(layout), kMath>{stream}, Grid{cdiv(rows, b0)}, SoftmaxTwoPasses{}, x, z, rows, columns, b0,
           b1);
    return 0;
  };
  if (variant == 0) return run(Threads<1, 256, 4, 5>{}, c<1>, c<4096>);
  if (variant == 1) return run(Threads<1, 128, 4, 6>{}, c<1>, c<4096>);
  if (variant == 2) return run(Threads<1, 128>{}, c<1>, c<2048>);
  if (variant == 3) return run(Threads<1, 128, 4, 8>{}, c<1>, c<2048>);
  return -1;
}
extern "C" int tile_softmax(int variant, const void* px, void* pz, int rows, int columns, void* stream) {
  return softmax<Math::exact>(variant, px, pz, rows, columns, stream);
}
extern "C" int tile_softmax_fast(int variant, const void* px, void* pz, int rows, int columns, void* stream) {
  return softmax<Math::fast>(variant, px, pz, rows, columns, stream);
}

extern "C" int tile_softmax_held(int variant, const void* px, void* pz, int rows, int columns, void* stream) {
  const auto x = tensor<f32>(px), z = tensor<f32>(pz);
  if (columns > 4096) return -1;
  const auto run = [&](auto layout) {
    launch(Cuda<decltype(layout)>{stream}, Grid{rows}, SoftmaxHeld{}, x, z, columns, c<4096>);
    return 0;
  };
  if (variant == 0) return run(Threads<1, 256>{});
  if (variant == 1) return run(Threads<1, 128>{});
  return -1;
}

extern "C" int tile_quantize_rows(int variant, const void* px, void* pq, void* ps, int rows, int columns,
                                  void* stream) {
  const auto x = tensor<f32>(px), s = tensor<f32>(ps);
  const auto q = tensor<s8>(pq);
  const auto run = [&](auto layout, auto b0, auto b1) {
    launch(Cuda<decltype(layout)>{stream}, Grid{cdiv(rows, b0)}, QuantizeRows{}, x, q, s, rows, columns, b0, b1);
    return 0;
  };
  if (variant == 0) return run(Threads<1, 128, 4, 7>{}, c<1>, c<4096>);
  if (variant == 1) return run(Threads<1, 64, 4, 8>{}, c<1>, c<4096>);
  if (variant == 2) return run(Threads<1, 128>{}, c<1>, c<2048>);
  return -1;
}

extern "C" int tile_quantize_rows_held(int variant, const void* px, void* pq, void* ps, int rows, int columns,
                                       void* stream) {
  const auto x = tensor<f32>(px), s = tensor<f32>(ps);
  const auto q = tensor<s8>(pq);
  if (columns > 4096) return -1;
  const auto run = [&](auto layout) {
    launch(Cuda<decltype(layout)>{stream}, Grid{rows}, QuantizeRowsHeld{}, x, q, s, columns, c<4096>);
    return 0;
  };
  if (variant == 0) return run(Threads<1, 128>{});
  if (variant == 1) return run(Threads<1, 128, 4, 6>{});
  return -1;
}

extern "C" int tile_long_sum(int variant, const void* px, void* pz, int rows, int columns, void* stream) {
  const auto x = tensor<f32>(px), z = tensor<f32>(pz);
  const auto run = [&](auto layout, auto b0, auto b1) {
    launch(Cuda<decltype(layout)>{stream}, Grid{cdiv(rows, b0)}, LongSum{}, x, z, rows, columns, b0, b1);
    return 0;
  };
  if (variant == 0) return run(Threads<4, 32>{}, c<4>, c<1024>);
  if (variant == 1) return run(Threads<4, 32>{}, c<4>, c<2048>);
  if (variant == 2) return run(Threads<1, 128>{}, c<1>, c<4096>);
  return -1;
}
#endif

#if !defined(TILE_PART) || TILE_PART == 1
extern "C" int tile_matmul(int variant, const void* px, const void* py, void* pz, int n0, int n1, int middle,
                           void* stream) {
  const auto x = tensor<f16>(px), y = tensor<f16>(py), z = tensor<f16>(pz);
  const auto run = [&](auto layout, auto b0, auto b1, auto b2, auto stages) {
    launch(Cuda<decltype(layout)>{stream}, Grid{cdiv(n0, b0), cdiv(n1, b1)}, Matmul{}, x, y, z, n0, n1, middle, b0, b1,
           b2, stages);
    return 0;
  };
  if (variant == 0) return run(Warps<2, 2>{}, c<128>, c<128>, c<32>, c<4>);
  if (variant == 1) return run(Warps<2, 2>{}, c<128>, c<128>, c<64>, c<3>);
  if (variant == 2) return run(Warps<2, 4>{}, c<128>, c<256>, c<32>, c<4>);
  if (variant == 3) return run(Warps<2, 4>{}, c<128>, c<256>, c<64>, c<4>);
  if (variant == 4) return run(Warps<4, 2>{}, c<256>, c<128>, c<64>, c<3>);
  return -1;
}

// The forward product of puzzle 15: s8, summed in s32.
extern "C" int tile_forward(int variant, const void* const* p, int batch, int in, int out, void* stream) {
  const auto x = tensor<s8>(p[0]), w = tensor<s8>(p[2]);
  const auto x_scale = tensor<f32>(p[1]), w_scale = tensor<f32>(p[3]);
  const auto bias = tensor<f16>(p[4]), y = tensor<f16>(p[5]);
  const auto run = [&](auto layout, auto b0, auto b1, auto b2) {
    launch(Cuda<decltype(layout)>{stream}, Grid{cdiv(batch, b0), cdiv(out, b1)}, Forward{}, x, x_scale, w, w_scale,
           bias, y, batch, in, out, c<1>, c<1>, b0, b1, b2);
    return 0;
  };
  if (variant == 0) return run(Warps<2, 2, 4>{}, c<128>, c<128>, c<64>);
  if (variant == 1) return run(Warps<2, 4, 4>{}, c<128>, c<256>, c<128>);
  return -1;
}
#endif

#if !defined(TILE_PART) || TILE_PART >= 2
namespace {
// A launch of warpgroups; -2, and a message, if it fell back.
template <class L, Math kMath = Math::exact, class... A>
int run_by_wgmma(Cuda<L, kMath> executor, void* stream, Grid grid, const A&... a) {
  executor.stream = stream;
  const LaunchReport report = launch(executor, grid, a...);
  if (!report.by_wgmma()) std::fprintf(stderr, "%s\n", report.text().c_str());
  return report.by_wgmma() ? 0 : -2;
}
}  // namespace
#endif

#if !defined(TILE_PART) || TILE_PART == 2
template <class T>
int matmul_wgmma(int variant, const void* px, const void* py, void* pz, int n0, int n1, int middle, void* stream) {
  const auto x = tensor<T>(px), y = tensor<T>(py), z = tensor<T>(pz);
  const auto run = [&](auto b0, auto b1, auto b2, Cuda<Warpgroups<2>> executor) {
    return run_by_wgmma(executor, stream, Grid{cdiv(n0, b0), cdiv(n1, b1)}, Matmul{}, x, y, z, n0, n1, middle, b0, b1,
                        b2, c<4>);
  };
  if (variant == 0) return run(c<128>, c<256>, c<64>, {});
  if (variant == 1) return run(c<128>, c<256>, c<64>, {.band = 8});
  if (variant == 2) return run(c<256>, c<128>, c<64>, {.band = 8});
  return -1;
}
extern "C" int tile_matmul_f16(int variant, const void* px, const void* py, void* pz, int n0, int n1, int middle,
                               void* stream) {
  return matmul_wgmma<f16>(variant, px, py, pz, n0, n1, middle, stream);
}
extern "C" int tile_matmul_bf16(int variant, const void* px, const void* py, void* pz, int n0, int n1, int middle,
                                void* stream) {
  return matmul_wgmma<bf16>(variant, px, py, pz, n0, n1, middle, stream);
}

// The same for f16, by the fastest of the choices that autotuned() has.
extern "C" int tile_matmul_tuned(const void* px, const void* py, void* pz, int n0, int n1, int middle,
                                 void* stream) try {
  const auto x = tensor<f16>(px), y = tensor<f16>(py), z = tensor<f16>(pz);
  const Cuda<Warpgroups<2>> plain{.stream = stream}, narrow{.stream = stream, .band = 8};
  autotuned(
      {.name = "matmul_f16", .sizes = {n0, n1, middle}},
      [&](auto executor, auto b0, auto b1, auto b2) {
        launch(executor, Grid{cdiv(n0, b0), cdiv(n1, b1)}, Matmul{}, x, y, z, n0, n1, middle, b0, b1, b2, c<4>);
      },
      choice(plain, c<128>, c<256>, c<64>), choice(narrow, c<128>, c<256>, c<64>), choice(plain, c<256>, c<128>, c<64>),
      choice(narrow, c<256>, c<128>, c<64>));
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return -2;
}
#endif

#if !defined(TILE_PART) || TILE_PART == 3
extern "C" int tile_forward_wgmma(int variant, const void* const* p, int batch, int in, int out, void* stream) {
  const auto x = tensor<s8>(p[0]), w = tensor<s8>(p[2]);
  const auto x_scale = tensor<f32>(p[1]), w_scale = tensor<f32>(p[3]);
  const auto bias = tensor<f16>(p[4]), y = tensor<f16>(p[5]);
  const auto run = [&](auto b0, auto b1, auto b2) {
    return run_by_wgmma(Cuda<Warpgroups<2, Warps<2, 4, 4>>>{}, stream, Grid{cdiv(batch, b0), cdiv(out, b1)}, Forward{},
                        x, x_scale, w, w_scale, bias, y, batch, in, out, c<1>, c<1>, b0, b1, b2);
  };
  if (variant == 0) return run(c<128>, c<256>, c<128>);
  if (variant == 1) return run(c<256>, c<128>, c<128>);
  return -1;
}
extern "C" int tile_forward_along(int variant, const void* const* p, int batch, int in, int out, void* stream) {
  const auto x = tensor<s8>(p[0]), w = tensor<s8>(p[2]);
  const auto x_scale = tensor<f32>(p[1]), w_scale = tensor<f32>(p[3]);
  const auto bias = tensor<f16>(p[4]), y = tensor<f16>(p[5]);
  const auto run = [&](auto b0, auto b1, auto b2) {
    return run_by_wgmma(Cuda<Warpgroups<2, Warps<2, 4, 4>>>{}, stream, Grid{cdiv(batch, b0), cdiv(out, b1)},
                        ForwardAlong{}, x, x_scale, w, w_scale, bias, y, batch, in, out, b0, b1, b2);
  };
  if (variant == 0) return run(c<128>, c<256>, c<128>);
  if (variant == 1) return run(c<256>, c<128>, c<128>);
  return -1;
}
// p: dy, w_q, w_scale, dx, and room for the weight in f16.
extern "C" int tile_dx(int variant, const void* const* p, int batch, int in, int out, void* stream) {
  const auto dy = tensor<f16>(p[0]), dx = tensor<f16>(p[3]), w = tensor<f16>(p[4]);
  const auto w_q = tensor<s8>(p[1]);
  const auto w_scale = tensor<f32>(p[2]);
  const Cuda<Warpgroups<2>> executor{};
  if (variant == 0) {
    launch(Cuda<Threads<1, 256, 8>>{stream}, Grid{in, cdiv(out, 4096)}, DequantizeHalf{}, w_q, w_scale, w, in, out,
           c<1>, c<4096>);
    return run_by_wgmma(executor, stream, Grid{cdiv(batch, 256), cdiv(in, 128)}, MatmulAlong{}, dy, w, dx, batch, in,
                        out, c<256>, c<128>, c<64>);
  }
  if (variant == 1) {
    return run_by_wgmma(executor, stream, Grid{cdiv(in, 128), cdiv(batch, 256)}, BackwardDxHalf{}, dy, w_q, w_scale, dx,
                        batch, in, out, c<128>, c<256>, c<64>);
  }
  return -1;
}
extern "C" int tile_dw(int variant, const void* const* p, int batch, int in, int out, void* stream) {
  const auto dy = tensor<f16>(p[2]), dw = tensor<f16>(p[3]);
  const auto x = tensor<s8>(p[0]);
  const auto x_scale = tensor<f32>(p[1]);
  if (variant != 0) return -1;
  return run_by_wgmma(Cuda<Warpgroups<2>>{}, stream, Grid{cdiv(in, 128), cdiv(out, 256)}, BackwardDwHalf{}, x, x_scale,
                      dy, dw, batch, in, out, c<128>, c<256>, c<64>);
}
#endif

#if !defined(TILE_PART) || TILE_PART == 4
extern "C" int tile_matmul_tf32(int variant, const void* px, const void* py, void* pz, int n, void* stream) {
  const auto x = tensor<f32>(px), y = tensor<f32>(py), z = tensor<f32>(pz);
  const auto run = [&](auto b0, auto b1, auto b2) {
    return run_by_wgmma(Cuda<Warpgroups<2, Warps<4, 2>, true>>{}, stream, Grid{cdiv(n, b0), cdiv(n, b1)}, MatmulAlong{},
                        x, y, z, n, n, n, b0, b1, b2);
  };
  if (variant == 0) return run(c<128>, c<256>, c<32>);
  if (variant == 1) return run(c<128>, c<128>, c<32>);
  return -1;
}

// Causal attention of `heads` heads of n rows of 128, in f16.
extern "C" int tile_attention(int variant, const void* const* p, int heads, int n, float scale, void* stream) {
  const auto q = tensor<f16>(p[0]), k = tensor<f16>(p[1]), v = tensor<f16>(p[2]), o = tensor<f16>(p[3]);
  const auto run = [&](auto bm, auto bn, Cuda<Warpgroups<2>, Math::fast> executor) {
    return run_by_wgmma(executor, stream, Grid{cdiv(cdiv(n, bm), 2), heads}, CausalAttention{}, q, k, v, o, n, scale,
                        bm, bn, c<128>);
  };
  if (variant == 0) return run(c<128>, c<128>, {});
  if (variant == 1) return run(c<128>, c<64>, {});
  if (variant == 2) return run(c<128>, c<128>, {.persistent = false});
  return -1;
}
#endif
