#!/usr/bin/env python3
"""The experts of a mixture on a GPU: grouped_linear beside torch._grouped_mm (bf16) and an int8 product in Triton.

    python3 bench/torch/moe.py [--shapes qwen3-up ...] [--tokens 1 16 ...] [--formats w8a8 w4a8 w4a16] [--json FILE]

A layer from bf16 tokens to bf16: "up" gathers the rows of its experts, "down" sums a token's rows over its slots, weighted.
Each contender is a graph, with nothing of it in L2; the median of the replays. Routing is random: distinct experts for
each token, whose tokens the host does not know. What sorts them (octile.experts.sort_by_expert) is nobody's time, nor is
the map of tiles that the Triton product wants. It quantizes rows as vLLM's does, and keeps rows of "down" in bf16.
"""

import argparse
import json
import pathlib
import statistics
import sys

import torch
import triton
import triton.language as tl

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python"))
import octile  # noqa: E402
from octile import _c, experts  # noqa: E402

# experts, slots, k, n, whether tokens are gathered (or rows summed)
SHAPES = {
    "qwen3-up": (128, 8, 2048, 1536, True),
    "qwen3-down": (128, 8, 768, 2048, False),
    "mixtral-up": (8, 2, 4096, 28672, True),
    "mixtral-down": (8, 2, 14336, 4096, False),
}
TOKENS = [1, 16, 64, 256, 1024, 4096, 16384]
FORMATS = {
    "w8a8": (_c.DYNAMIC_PER_TOKEN, _c.S8_PER_CHANNEL),
    "w4a8": (_c.DYNAMIC_PER_TOKEN, _c.S4_GROUP),
    "w4a16": (_c.NONE, _c.S4_GROUP),
}
GROUP = 128


# ---- The peer in Triton ----


@triton.jit
def quantize_rows(x, q, scale, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    values = tl.load(x + row * k + at, mask=at < k, other=0).to(tl.float32)
    s = tl.maximum(tl.max(tl.abs(values)) / 127, 1e-8)
    tl.store(scale + row, s)
    levels = values / s
    tl.store(q + row * k + at, (levels + tl.where(levels < 0, -0.5, 0.5)).to(tl.int8), mask=at < k)


@triton.jit
def multiply_experts(
    x, x_scale, w, w_scale, y, token, ends, tile_expert, tile_row, n, k, GATHER: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, BAND: tl.constexpr
):  # fmt: skip
    columns = tl.cdiv(n, N)
    tiles = tl.num_programs(0) // columns
    band = tl.program_id(0) // (BAND * columns)
    height = tl.minimum(tiles - band * BAND, BAND)
    tile = band * BAND + tl.program_id(0) % (BAND * columns) % height
    column = tl.program_id(0) % (BAND * columns) // height
    expert = tl.load(tile_expert + tile).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(tile_row + tile) + tl.arange(0, M)
    here = row < tl.load(ends + expert)
    source = tl.load(token + row, mask=here, other=0).to(tl.int64) if GATHER else row.to(tl.int64)
    channel = column * N + tl.arange(0, N)
    term = tl.arange(0, K)
    a = x + source[:, None] * k + term[None, :]
    b = w + (expert * n + channel[None, :]) * k + term[:, None]
    acc = tl.zeros((M, N), tl.int32)
    for _ in range(0, k, K):
        acc = tl.dot(tl.load(a, mask=here[:, None], other=0), tl.load(b), acc, out_dtype=tl.int32)
        a += K
        b += K
    scale = tl.load(x_scale + source, mask=here, other=0)[:, None] * tl.load(w_scale + expert * n + channel)[None, :]
    out = y + row[:, None].to(tl.int64) * n + channel[None, :]
    tl.store(out, (acc.to(tl.float32) * scale).to(tl.bfloat16), mask=here[:, None])


@triton.jit
def sum_slots(z, place, weight, y, n, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    t, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(SLOTS):
        row = tl.load(place + t * SLOTS + s).to(tl.int64)
        total += tl.load(weight + t * SLOTS + s) * tl.load(z + row * n + at).to(tl.float32)
    tl.store(y + t * n + at, total.to(tl.bfloat16))


# rows, columns, terms, warps, stages
TILES = [(16, 64, 256, 4, 4), (16, 128, 128, 4, 4), (32, 128, 128, 4, 4), (64, 128, 128, 4, 4), (128, 128, 128, 8, 3),
         (128, 256, 128, 8, 3)]  # fmt: skip


class Triton:
    """int8 of the same tokens and weights; the fastest of the tiles that fit the rows of an expert."""

    def __init__(self, layer, tile):
        self.layer, self.tile = layer, tile
        rows = layer.offsets.diff()
        tiles = (rows + tile[0] - 1) // tile[0]
        most = (layer.rows + min(layer.experts, layer.rows) * (tile[0] - 1)) // tile[0]
        self.expert = torch.full((most,), -1, dtype=torch.int32, device="cuda")
        self.row = torch.zeros(most, dtype=torch.int32, device="cuda")
        expert = torch.repeat_interleave(torch.arange(layer.experts, device="cuda"), tiles)
        first = torch.cumsum(tiles, 0) - tiles
        number = torch.arange(len(expert), device="cuda") - first[expert]
        self.expert[: len(expert)] = expert.int()
        self.row[: len(expert)] = (layer.offsets[expert] + number * tile[0]).int()
        x = layer.x
        self.q, self.scale = torch.empty(x.shape, dtype=torch.int8, device="cuda"), torch.empty(len(x), device="cuda")
        self.z = torch.empty(layer.rows, layer.n, dtype=torch.bfloat16, device="cuda")

    def __call__(self):
        p, (m, n, k, warps, stages) = self.layer, self.tile
        quantize_rows[(len(p.x),)](p.x, self.q, self.scale, p.k, BLOCK=triton.next_power_of_2(p.k), num_warps=8)
        grid = (len(self.expert) * triton.cdiv(p.n, n),)
        multiply_experts[grid](
            self.q, self.scale, p.w8, p.w8_scale, self.z, p.token, p.offsets[1:], self.expert, self.row, p.n, p.k,
            GATHER=p.gather, M=m, N=n, K=k, BAND=8, num_warps=warps, num_stages=stages
        )  # fmt: skip
        if p.gather:
            return self.z
        sum_slots[(p.tokens, p.n // 1024)](self.z, p.place, p.weights, p.y, p.n, SLOTS=p.slots, BLOCK=1024)
        return p.y


# ---- A layer ----


class Layer:
    def __init__(self, shape, formats):
        self.experts, self.slots, self.k, self.n, self.gather = SHAPES[shape]
        g = self.generator = torch.Generator("cuda").manual_seed(1)
        rows = self.experts * self.n
        self.w8 = torch.empty(rows, self.k, dtype=torch.int8, device="cuda")
        self.w16 = torch.empty(self.experts, self.n, self.k, dtype=torch.bfloat16, device="cuda")
        for e in range(self.experts):
            w = torch.randn(self.n, self.k, generator=g, device="cuda")
            self.w16[e] = w * 0.02
            self.w8[e * self.n : (e + 1) * self.n] = (w * 32).round_().clamp_(-127, 127)
        self.w8_scale = torch.full((rows,), 0.02 / 32, device="cuda")
        if any(name != "w8a8" for name in formats):
            self.w4 = self.packed()

    def packed(self):
        """The packed weights, made where they lie: docs/reference/packed-weights.md. Nibbles of a normal distribution."""
        values, scales = self.n * self.k // 2, self.n * self.k // GROUP * 4
        size = -(-(-(-values // 64) * 64 + scales) // 64) * 64
        w = torch.empty(self.experts, size, dtype=torch.uint8, device="cuda")
        for e in range(self.experts):
            q = (torch.randn(values, 2, generator=self.generator, device="cuda") * 2.5).round_().clamp_(-8, 7) + 8
            w[e, :values] = (q[:, 0] + 16 * q[:, 1]).to(torch.uint8)
        w[:, values : values + scales] = torch.full((scales // 4,), 0.008, device="cuda").view(torch.uint8)
        return w.view(-1)

    def route(self, tokens):
        g = self.generator
        index = torch.rand(tokens, self.experts, generator=g, device="cuda").topk(self.slots).indices
        self.tokens, self.rows = tokens, tokens * self.slots
        self.weights = torch.softmax(torch.randn(tokens, self.slots, generator=g, device="cuda"), 1)
        self.offsets, self.token, self.place = experts.sort_by_expert(self.experts, index)
        count = tokens if self.gather else self.rows
        self.x = torch.randn(count, self.k, generator=g, device="cuda").to(torch.bfloat16)
        self.y = torch.empty(tokens, self.n, dtype=torch.bfloat16, device="cuda")

    def octile(self, name):
        activation, weight = FORMATS[name]
        s4 = weight == _c.S4_GROUP
        stored = (self.w4, None, None) if s4 else (self.w8, self.w8_scale, None)
        routing = (self.token, None, None) if self.gather else (None, self.place, self.weights)
        token, place, router = routing
        words = self.n, activation, weight, GROUP if s4 else 0, False, torch.bfloat16
        return lambda: torch.ops.octile.grouped_linear(
            self.x, None, self.offsets, token, *stored, None, place, router, *words
        )

    def torch(self):
        def run():
            x = self.x.index_select(0, self.token) if self.gather else self.x
            z = torch._grouped_mm(x, self.w16.mT, offs=self.offsets[1:])
            if self.gather:
                return z
            return (z.index_select(0, self.place.view(-1)).view(*self.place.shape, -1) * self.weights[..., None]).sum(1)

        return run


# ---- Times ----


def captured(run):
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    return graph, y


def measure(graph, flush, budget):
    """Median microseconds of replays within a budget of seconds."""
    times = []
    spent = 0
    while len(times) < 5 or (spent < budget * 1e6 and len(times) < 60):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
        spent += times[-1] + 100
    return statistics.median(times[1:])


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.float().flatten(), b.float().flatten(), dim=0).item()


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    p.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    p.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    p.add_argument("--budget", type=float, default=0.1, help="seconds of a contender's replays")
    p.add_argument("--no-peers", action="store_true")
    p.add_argument("--json", type=pathlib.Path)
    a = p.parse_args()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    results = []
    print(torch.cuda.get_device_name(), octile.__file__)
    print("us".ljust(14), "tokens", *(f"{name:>9}" for name in a.formats), f"{'triton':>9} {'torch':>9}  best / w8a8")
    for shape in a.shapes:
        layer = Layer(shape, a.formats)
        for tokens in a.tokens:
            layer.route(tokens)
            row, ours = {"shape": shape, "tokens": tokens}, None
            for name in a.formats:
                graph, y = captured(layer.octile(name))
                row[name] = measure(graph, flush, a.budget)
                if name == "w8a8":
                    ours = y.clone()
                del graph, y
            if not a.no_peers:
                mean = layer.rows / layer.experts
                fitting = [t for t in TILES if t[0] <= max(16, 2 * mean)][-3:]
                times = {}
                for tile in fitting:
                    graph, y = captured(Triton(layer, tile))
                    times[tile] = measure(graph, flush, a.budget / 2)
                    if ours is not None and (c := cosine(ours, y)) < 0.999:
                        print(f"  triton {tile} computes something else: cosine {c:.4f}")
                    del graph, y
                row["triton"], row["tile"] = min((t, tile) for tile, t in times.items())
                graph, y = captured(layer.torch())
                row["torch"] = measure(graph, flush, a.budget / 2)
                if ours is not None and (c := cosine(ours, y)) < 0.999:
                    print(f"  torch computes something else: cosine {c:.4f}")
                del graph, y
            results.append(row)
            words = [f"{row[name]:9.1f}" if name in row else " " * 9 for name in (*a.formats, "triton", "torch")]
            peers = [row[name] for name in ("triton", "torch") if name in row]
            ratio = f"{min(peers) / row['w8a8']:.2f}" if peers and "w8a8" in row else ""
            print(f"{shape:14} {tokens:6}", *words, "", ratio, *row.get("tile", ()), flush=True)
        del layer
        torch.cuda.empty_cache()
    if a.json:
        a.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": results}) + "\n")


if __name__ == "__main__":
    main()
