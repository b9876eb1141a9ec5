// Causal attention as a kernel in the tile language: o = softmax(scale q k^T) v, where row i sees the rows up to i.
#pragma once

#include "octile/tile/context.h"

namespace octile::tile {

// (heads, n, head) each, in f16; a block of bm rows of a head, and its mirror image, so that all programs have the same
// work: Grid{cdiv(cdiv(n, bm), 2), heads}. The softmax is online, to the base 2: `scale` includes log2(e). bm is a
// multiple of bn.
struct CausalAttention {
  template <class T, class Q, class K, class V, class O, class M, class N, class D>
  TILE_KERNEL void operator()(T& t, Q q, K k, V v, O o, int n, float scale, M bm, N bn, D head) const {
    const int blocks = cdiv(n, bm), first = t.program_id(0);
    const int mirrored = blocks - 1 - first;
    for (int block = first;; block = mirrored) {
      rows(t, q, k, v, o, n, scale, bm, bn, head, block);
      if (block == mirrored || mirrored < first) break;
    }
  }

 private:
  template <class T, class Q, class K, class V, class O, class M, class N, class D>
  TILE_KERNEL static void rows(T& t, Q q, K k, V v, O o, int n, float scale, M bm, N bn, D head, int block) {
    const auto start = t.program_id(1) * (n * head);
    const auto i = col(t.arange(bm) + block * bm);
    const auto across = t.arange(head);
    const auto query = t.load(q + start + i * head + across, i < n, 0.0f);
    auto top = t.full(bm, c<1>, -kInfinity), total = t.full(bm, c<1>, 0.0f);
    auto sums = t.full(bm, head, 0.0f);
    const auto stage_from = [&](int first) {
      return [&, first](int step) {
        const auto j = col(t.arange(bn) + (first + step) * bn);
        return fetches(t.fetch(k + start + j * head + across, j < n, 0.0f),
                       t.fetch(v + start + j * head + across, j < n, 0.0f));
      };
    };
    const auto add = [&](const auto& scores, const auto& values) {
      const auto next = maximum(top, max(scores) * scale);
      const auto weights = exp2(fma(scores, scale, -next));
      const auto faded = exp2(top - next);
      total = total * faded + sum(weights);
      sums = dot(cast<f16>(weights), values, sums * faded);
      top = next;
    };
    const int whole = block * bm / bn;
    t.pipeline(c<2>, whole, stage_from(0), [&](int, const auto& keys, const auto& values) {
      add(dot(query, trans(keys), t.full(bm, bn, 0.0f)), values);
    });
    t.pipeline(c<2>, bm / bn, stage_from(whole), [&](int step, const auto& keys, const auto& values) {
      const auto scores = dot(query, trans(keys), t.full(bm, bn, 0.0f));
      add(where(t.arange(bn) + (whole + step) * bn <= i, scores, -kInfinity), values);
    });
    t.store(o + start + i * head + across, cast<f16>(sums / total), i < n);
  }
};

}  // namespace octile::tile
