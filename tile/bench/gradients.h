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

// dW^T = dY^T @ (x_q x_scale): the bytes are whole in f16.
struct BackwardDwHalf {
  template <class T, class Xq, class Xs, class Dy, class Dw, class M, class N, class K>
  TILE_KERNEL void operator()(T& t, Xq x_q, Xs x_scale, Dy dy, Dw dw, int batch, int in, int out, M bm, N bn,
                              K bk) const {
    const auto i = t.program_id(1) * bm + t.arange(bm);  // of out
    const auto j = t.program_id(0) * bn + t.arange(bn);  // of in
    auto total = t.full(bm, bn, 0.0f);
    t.pipeline(
        c<3>, cdiv(batch, bk),
        [&](int step) {
          const auto m = col(t.arange(bk) + step * bk);
          return fetches(t.fetch(dy + m * out + i, (m < batch) & (i < out), 0.0f),
                         t.fetch(x_q + m * in + j, (m < batch) & (j < in), 0));
        },
        [&](int, const auto& d, const auto& x) { total = dot(trans(d), cast<f16>(x), total); });
    t.store(dw + j * out + col(i), cast<f16>(total * t.load(x_scale)), (col(i) < out) & (j < in));
  }
};

}  // namespace octile::tile
