// dX and dW of a linear layer of int8 weights and inputs as kernels in the tile language, with operands in f16.
#pragma once

#include "octile/tile/context.h"

namespace octile::tile {

// dX^T = (w_q w_scale) @ dY^T.
struct BackwardDxHalf {
  template <class T, class Dy, class Wq, class Ws, class Dx, class M, class N, class K>
  TILE_KERNEL void operator()(T& t, Dy dy, Wq w_q, Ws w_scale, Dx dx, int batch, int in, int out, M bm, N bn,
                              K bk) const {
    const auto i = col(t.program_id(0) * bm + t.arange(bm));  // of in
    const auto j = t.program_id(1) * bn + t.arange(bn);       // of the batch
    auto total = t.full(bm, bn, 0.0f);
    t.pipeline(
        c<3>, cdiv(out, bk),
        [&](int step) {
          const auto n = t.arange(bk) + step * bk;
          return fetches(t.fetch(w_q + i * out + n, (i < in) & (n < out), 0), t.fetch(w_scale + n, n < out, 0.0f),
                         t.fetch(dy + col(j) * out + n, (col(j) < batch) & (n < out), 0.0f));
        },
        [&](int, const auto& w, const auto& s, const auto& d) { total = dot(cast<f16>(w * s), trans(d), total); });
    t.store(dx + j * in + i, cast<f16>(total), (i < in) & (j < batch));
  }
};

// dX in two launches: the weight in f16, which every block would otherwise compute again; then MatmulAlong, dY @ w^T.
struct DequantizeHalf {
  TILE_KERNEL void operator()(auto& t, auto w_q, auto w_scale, auto w, int in, int out, auto bm, auto bn) const {
    const auto i = col(t.program_id(0) * bm + t.arange(bm));
    const auto j = t.program_id(1) * bn + t.arange(bn);
    const auto inside = (i < in) & (j < out);
    t.store(w + i * out + j, cast<f16>(t.load(w_q + i * out + j, inside, 0) * t.load(w_scale + j, j < out, 0.0f)),
            inside);
  }
};
struct MatmulAlong {  // z = x (n0, middle) @ y^T, y (n1, middle), summed in f32
  template <class T, class X, class Y, class Z, class M, class N, class K>
  TILE_KERNEL void operator()(T& t, X x, Y y, Z z, int n0, int n1, int middle, M b0, N b1, K b2) const {
    const auto i = col(t.program_id(0) * b0 + t.arange(b0));
    const auto j = t.program_id(1) * b1 + t.arange(b1);
    auto total = t.full(b0, b1, 0.0f);
    t.pipeline(
        c<3>, cdiv(middle, b2),
        [&](int step) {
          const auto k = t.arange(b2) + step * b2;
          return fetches(t.fetch(x + i * middle + k, (i < n0) & (k < middle), 0.0f),
                         t.fetch(y + col(j) * middle + k, (col(j) < n1) & (k < middle), 0.0f));
        },
        [&](int, const auto& a, const auto& b) { total = dot(a, trans(b), total); });
    t.store(z + i * n1 + j, cast<typename Z::Element>(total), (i < n0) & (j < n1));
  }
};

// dW = x_q^T @ dY, then the scale: the bytes are exact in f16. They are the left operand, where a block has fewer rows.
struct BackwardDwHalf {
  template <class T, class Xq, class Xs, class Dy, class Dw, class M, class N, class K>
  TILE_KERNEL void operator()(T& t, Xq x_q, Xs x_scale, Dy dy, Dw dw, int batch, int in, int out, M bm, N bn,
                              K bk) const {
    const auto i = t.program_id(0) * bm + t.arange(bm);  // of in
    const auto j = t.program_id(1) * bn + t.arange(bn);  // of out
    auto total = t.full(bm, bn, 0.0f);
    t.pipeline(
        c<3>, cdiv(batch, bk),
        [&](int step) {
          const auto m = col(t.arange(bk) + step * bk);
          return fetches(t.fetch(x_q + m * in + i, (m < batch) & (i < in), 0),
                         t.fetch(dy + m * out + j, (m < batch) & (j < out), 0.0f));
        },
        [&](int, const auto& x, const auto& d) { total = dot(trans(cast<f16>(x)), d, total); });
    t.store(dw + col(i) * out + j, cast<f16>(total * t.load(x_scale)), (col(i) < in) & (j < out));
  }
};

}  // namespace octile::tile
