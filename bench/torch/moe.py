#!/usr/bin/env python3
"""The experts of a mixture on a GPU: grouped_linear beside torch._grouped_mm (bf16), an int8 product in Triton,
vLLM's Marlin (4-bit weights, bf16 tokens) and humming (every format).

    python3 bench/torch/moe.py [--shapes qwen3-up ...] [--tokens 1 16 ...] [--formats w8a8 w4a8 w4a16]
                               [--vllm vllm/_moe_C_stable_libtorch.abi3.so of its wheel] [--json FILE]

A layer from bf16 tokens to bf16: "up" gathers the rows of its experts, "down" sums a token's rows over its slots, weighted.
Each contender is a graph, with nothing of it in L2; the median of the replays. Routing is random: distinct experts for
each token, whose tokens the host does not know. What sorts them (octile.experts.sort_by_expert) is nobody's time, nor is
the map of tiles that Triton's product, Marlin and humming want. Triton's quantizes rows as vLLM's does; all three keep rows
of "down" in bf16. humming takes the configuration that it chooses by itself, and compiles each on its first call. A peer
that cannot be had is named, and left out.
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


# ---- vLLM's Marlin ----


def marlin_weight(q):
    """(n, k) in -8 .. 7, in the order of Marlin's threads: tiles of 16 x 16, eight values a word."""
    n, k = q.shape
    order = []
    for lane in range(32):
        terms = [lane % 4 * 2 + i for i in (0, 1, 8, 9)]
        of_lane = [16 * term + lane // 4 + 8 * half for half in (0, 1) for term in terms]
        order += [place + 256 * tile for tile in range(4) for place in of_lane]
    order = torch.tensor(order, device="cuda").view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
    tiles = (q.t() + 8).reshape(k // 16, 16, n // 16, 16).transpose(1, 2).reshape(-1, len(order))[:, order]
    words = torch.zeros(k // 16, 2 * n, dtype=torch.int32, device="cuda")
    for i in range(8):
        words |= tiles.reshape(k // 16, -1, 8)[..., i].int() << 4 * i
    return words


class Marlin:
    """Rows are in the order of tokens and their slots."""

    TYPE = 1 << 50 | 4 << 8 | 8 << 17  # vLLM's number of 4 bits, less 8

    def __init__(self, layer):
        p = self.layer = layer
        mean = p.rows / p.experts
        block = self.block = next((b for b in (8, 16, 32, 48) if mean < 0.9 * b), 64)  # as vLLM chooses it
        most = p.rows + p.experts * (block - 1)
        self.sorted, self.expert = (torch.empty(c, dtype=torch.int32, device="cuda") for c in (most, -(-most // block)))
        self.count = torch.empty(1, dtype=torch.int32, device="cuda")
        index = p.index.int().contiguous()
        maps = (self.sorted, self.expert, self.count, None, None)
        torch.ops._moe_C.moe_align_block_size(index, p.experts, block, *maps)
        self.x = p.x if p.gather else p.x[p.place.view(-1).long()]
        self.z = torch.empty(p.rows, p.n, dtype=torch.bfloat16, device="cuda")
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.space = torch.zeros(4 * sms, dtype=torch.int32, device="cuda")
        if not hasattr(p, "marlin"):
            p.marlin = torch.stack([marlin_weight(p.plain_s4(e)) for e in range(p.experts)])
            p.marlin_scale = torch.full((p.experts, p.k // GROUP, p.n), p.s4_scale, device="cuda").bfloat16()

    def __call__(self):
        p = self.layer
        weights = (p.marlin, None, p.marlin_scale, None, None, None, self.space)
        tiles = (self.sorted, self.expert, self.count, p.weights, self.block, p.slots if p.gather else 1, not p.gather)
        sizes = (self.TYPE, len(self.x), p.n, p.k, False, True, False, -1, -1, -1)
        torch.ops._moe_C.moe_wna16_marlin_gemm(self.x, self.z, *weights, *tiles, *sizes)
        return self.z if p.gather else torch.sum(self.z.view(p.tokens, p.slots, p.n), 1, out=p.y)


# ---- humming ----


class Humming:
    """Rows are in the order of tokens and their slots; its weights are quantized separately, from ours."""

    CONFIGS = {"w8a8": ("int8", 0, "int8"), "w4a8": ("int4", GROUP, "int8"), "w4a16": ("int4", GROUP, None)}

    def __init__(self, layer, name):
        from humming.testing.data import generate_moe_tensors
        from humming.tune import get_heuristics_config

        p = self.layer = layer
        weights = p.__dict__.setdefault("humming", {})
        if name not in weights:
            weights[name] = self.convert(p, name)
        self.weights = weights[name]
        meta = self.weights.humming_metas[""]
        self.tuning = get_heuristics_config(meta, shape_m=p.rows, gemm_type="indexed")
        self.slots = p.slots if p.gather else 1
        index = p.index if p.gather else p.index.reshape(-1, 1)
        _, _, *maps = generate_moe_tensors(index.int(), p.experts, "indexed", self.tuning["block_shape"][0])
        self.maps = dict(zip(("sorted_ids", "expert_ids", "num_tokens_padded"), maps, strict=True))
        self.x = p.x if p.gather else p.x[p.place.view(-1).long()]

    @staticmethod
    def convert(p, name):
        from humming.layer import HummingLayer

        weight, group, x = Humming.CONFIGS[name]
        words = {"dtype": weight} | ({"group_size": group} if group else {})
        layer = HummingLayer(
            p.n, p.k, words, {"dtype": x} if x else None, num_experts=p.experts, torch_dtype=torch.bfloat16
        ).cuda()
        if name == "w8a8":
            w = p.w8.view(p.experts, p.n, p.k).bfloat16() * (0.02 / 32)
        else:
            w = torch.stack([p.plain_s4(e).bfloat16() * p.s4_scale for e in range(p.experts)])
        layer.load_from_unquantized(w)
        layer.transform()
        return layer

    def __call__(self):
        p = self.layer
        z = self.weights(
            self.x, top_k=self.slots, compute_config={"gemm_type": "indexed"}, tuning_config=self.tuning, **self.maps
        )
        return z if p.gather else torch.sum(z.view(p.tokens, p.slots, p.n), 1, out=p.y)


# ---- A layer ----


class Layer:
    s4_scale = 2.0**-7  # exact in bf16, as Marlin takes it

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
        """The packed weights, made in place: docs/reference/packed-weights.md. Nibbles of a normal distribution."""
        values, scales = self.n * self.k // 2, self.n * self.k // GROUP * 4
        size = -(-(-(-values // 64) * 64 + scales) // 64) * 64
        w = torch.empty(self.experts, size, dtype=torch.uint8, device="cuda")
        for e in range(self.experts):
            q = (torch.randn(values, 2, generator=self.generator, device="cuda") * 2.5).round_().clamp_(-8, 7) + 8
            w[e, :values] = (q[:, 0] + 16 * q[:, 1]).to(torch.uint8)
        w[:, values : values + scales] = torch.full((scales // 4,), self.s4_scale, device="cuda").view(torch.uint8)
        return w.view(-1)

    def plain_s4(self, e):
        """The values (n, k) of an expert's packed weight."""
        panels = self.w4.view(self.experts, -1)[e, : self.n * self.k // 2].view(self.n // 16, self.k // 8, 16, 4)
        nibbles = torch.stack([panels & 15, panels >> 4], 3)  # terms 0 to 3, and 4 to 7
        return nibbles.permute(0, 2, 1, 3, 4).reshape(self.n, self.k).to(torch.int8) - 8

    def route(self, tokens):
        g = self.generator
        index = torch.rand(tokens, self.experts, generator=g, device="cuda").topk(self.slots).indices
        self.tokens, self.rows, self.index = tokens, tokens * self.slots, index
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
            return z if self.gather else self.sum_slots(z)

        return run

    def sum_slots(self, z):
        return (z.index_select(0, self.place.view(-1)).view(*self.place.shape, -1) * self.weights[..., None]).sum(1)


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


# What each format is compared with.
PEERS = {
    "w8a8": ("triton", "torch", "humming-w8a8"),
    "w4a8": ("triton", "torch", "marlin", "humming-w4a8", "humming-w4a16"),
    "w4a16": ("torch", "marlin", "humming-w4a16"),
}


def peers(a):
    """Those that can be had."""
    if a.no_peers:
        return []
    names = ["triton", "torch"]
    if a.vllm is None:
        print("left out: marlin, which wants --vllm")
    elif any(name != "w8a8" for name in a.formats):
        torch.ops.load_library(a.vllm)
        names.append("marlin")
    try:
        import humming  # noqa: F401

        names += [f"humming-{name}" for name in a.formats]
    except ImportError as e:
        print("left out:", e)
    return [name for name in names if not a.peers or name in a.peers]


def contenders(name, layer):
    """(what, run) of a peer."""
    if name == "torch":
        return [(name, layer.torch())]
    if name == "marlin":
        return [(name, Marlin(layer))]
    if name.startswith("humming"):
        return [(name, Humming(layer, name.removeprefix("humming-")))]
    mean = layer.rows / layer.experts
    fitting = [t for t in TILES if t[0] <= max(16, 2 * mean)][-3:]
    return [((name, *tile), Triton(layer, tile)) for tile in fitting]


def compare(what, layer, y, ours):
    by_humming = str(what).startswith("humming")
    like = ours.get(what.removeprefix("humming-") if by_humming else "w4a16" if what == "marlin" else "w8a8")
    if like is None or (by_humming and not layer.gather):  # which does not weigh the slots
        return
    if (what == "marlin" or by_humming) and layer.gather:
        like = like[layer.place.view(-1).long()]
    c = cosine(like, y)
    if c < (0.99 if by_humming else 0.999):
        print(f"  {what} computes something else: cosine {c:.4f}")


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    p.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    p.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    p.add_argument("--budget", type=float, default=0.1, help="seconds of a contender's replays")
    p.add_argument("--no-peers", action="store_true")
    p.add_argument("--peers", nargs="+", help="only these: triton, torch, marlin, humming-w8a8, ...")
    p.add_argument("--vllm", type=pathlib.Path, help="_moe_C_stable_libtorch.abi3.so of vLLM's wheel, for Marlin")
    p.add_argument("--json", type=pathlib.Path)
    a = p.parse_args()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    names = peers(a)
    results = []
    print(torch.cuda.get_device_name(), octile.__file__)
    heads = [f"{name[-13:]:>9}" for name in (*a.formats, *names)]
    print("us".ljust(14), "tokens", *heads, " best peer /", *a.formats)
    for shape in a.shapes:
        layer = Layer(shape, a.formats)
        for tokens in a.tokens:
            layer.route(tokens)
            row, ours = {"shape": shape, "tokens": tokens}, {}
            for name in a.formats:
                graph, y = captured(layer.octile(name))
                row[name], ours[name] = measure(graph, flush, a.budget), y.clone()
                del graph, y
            for name in names:
                times = {}
                try:
                    for what, run in contenders(name, layer):
                        graph, y = captured(run)
                        times[what] = measure(graph, flush, a.budget / 2)
                        compare(what, layer, y, ours)
                        del graph, y
                except Exception as e:  # a peer's
                    print(f"  {name}: {' '.join(str(e).split())[:200]}")
                    continue
                row[name] = min(times.values())
                if name == "triton":
                    row["tile"] = min((t, what) for what, t in times.items())[1][1:]
            results.append(row)
            words = [f"{row.get(name, float('nan')):9.1f}" for name in (*a.formats, *names)]
            ratios = []
            for name in a.formats:
                of = [row[peer] for peer in PEERS[name] if peer in row]
                ratios.append(f"{min(of) / row[name]:.2f}" if of else "-")
            print(f"{shape:14} {tokens:6}", *words, "", *ratios, *row.get("tile", ()), flush=True)
        del layer
        torch.cuda.empty_cache()
    if a.json:
        a.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": results}) + "\n")


if __name__ == "__main__":
    main()
