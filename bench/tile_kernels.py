"""Speeds of ten small kernels in the tile language (tile/tests/ten_kernels.h) beside torch.compile, on one GPU. Each is checked, then
both are timed in turns, nothing in L2. Usage: bench/tile_kernels.py [--build sm_90a] [--json FILE] [NAME ...]; --build compiles the
kernels without a GPU, into the cache that the timings then take them from."""

import argparse
import json
import pathlib
from dataclasses import dataclass
from typing import Any

import octile.tile as tile
import torch

FILE = pathlib.Path(__file__).resolve().parents[1] / "tile/tests/ten_kernels.h"


@dataclass
class Case:
    """One kernel: its arguments, outputs last among the tensors, and what torch does in its place."""

    name: str
    kernel: str
    layouts: list  # (layout, constants)
    grid: Any  # of the constants
    arguments: list
    key: list
    outputs: list
    reference: Any  # of no arguments
    moved: int  # bytes
    tolerance: float = 0.0
    eager: bool = False  # torch has one operator for it


def randn(*shape):
    return torch.randn(*shape, device=DEVICE)


def empty_like(x):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def strided_add():
    n = 1 << 25
    x, y, z = randn(2 * n), randn(3 * n), torch.empty(n, device=DEVICE)
    blocks = [("Threads<1, 256>", {"b": 1024}), ("Threads<1, 128>", {"b": 512})]
    return Case("vector add, strides 2 and 3", "StridedAdd", blocks, lambda c: tile.cdiv(n, c["b"]), [x, y, z, n, 2, 3], ["n"],
                [z], lambda: x[::2] + y[::3], 4 * 6 * n)  # fmt: skip


def copy_2d():
    rows, columns, pitch = 8192, 8192, 8256
    x, z = randn(rows, pitch), torch.empty(rows, columns, device=DEVICE)
    blocks = [("Threads<1, 256>", {"b0": 1, "b1": 1024}), ("Threads<4, 32>", {"b0": 8, "b1": 256})]
    return Case("copy of a matrix with a pitch", "Copy2d", blocks,
                lambda c: (tile.cdiv(rows, c["b0"]), tile.cdiv(columns, c["b1"])), [x, z, rows, columns, pitch], ["rows"], [z],
                lambda: x[:, :columns].contiguous(), 8 * rows * columns)  # fmt: skip


def layer_norm():
    rows, columns = 16384, 4096
    x, gamma, beta = randn(rows, columns), randn(columns), randn(columns)
    z, mean, rstd = empty_like(x), torch.empty(rows, device=DEVICE), torch.empty(rows, device=DEVICE)
    blocks = [("Threads<1, 256, 4, 5>", {"b": 4096}), ("Threads<1, 128, 4, 6>", {"b": 4096})]
    return Case("layer norm", "LayerNorm", blocks, lambda c: rows, [x, gamma, beta, z, mean, rstd, columns], ["columns"], [z],
                lambda: torch.nn.functional.layer_norm(x, (columns,), gamma, beta), 8 * rows * columns, 1e-5)  # fmt: skip


def layer_norm_backward():
    rows, columns = 16384, 4096
    x, gamma, dz = randn(rows, columns), randn(columns), randn(rows, columns)
    mean, rstd = x.mean(1), 1 / (x.var(1, unbiased=False) + 1e-5).sqrt()
    dx = empty_like(x)

    def reference():
        g, v = dz * gamma, (x - mean[:, None]) * rstd[:, None]
        return rstd[:, None] * (g - g.mean(1, keepdim=True) - v * (g * v).mean(1, keepdim=True))

    blocks = [("Threads<1, 256, 4, 4>", {"b": 4096}), ("Threads<1, 256, 4, 4>", {"b": 2048})]
    return Case("layer norm, backward", "LayerNormBackward", blocks, lambda c: rows,
                [x, gamma, mean, rstd, dz, dx, columns], ["columns"], [dx], reference, 12 * rows * columns, 1e-5)  # fmt: skip


def rope():
    tokens, heads, half = 16384, 32, 64
    x, angle = randn(tokens, heads, 2 * half), randn(tokens, half)
    cosine, sine = angle.cos(), angle.sin()
    z = empty_like(x)

    def reference():
        a, b = x[..., :half], x[..., half:]
        c, s = cosine[:, None], sine[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    blocks = [("Threads<1, 32>", {"half": half})]
    return Case("RoPE", "Rope", blocks, lambda c: (tokens, heads), [x, cosine, sine, z, heads], ["heads"], [z], reference,
                8 * x.numel(), 1e-6)  # fmt: skip


def top_k():
    rows, n, k = 65536, 128, 8
    x = randn(rows, n)
    z = empty_like(x)
    blocks = [("Threads<4, 32>", {"b": 128}), ("Threads<8, 16>", {"b": 128})]
    return Case("top-k mask, 8 of 128", "TopKMask", blocks, lambda c: rows, [x, z, n, k], ["n"], [z],
                lambda: torch.where(x >= x.topk(k, 1).values[:, -1:], x, -float("inf")), 8 * rows * n)  # fmt: skip


def histogram():
    n, count = 1 << 26, 4096
    x, bins = torch.randint(0, count, (n,), device=DEVICE, dtype=torch.int32), torch.empty(count, dtype=torch.int32, device=DEVICE)
    blocks = [("Threads<1, 256>", {"b": 1024}), ("Threads<1, 256>", {"b": 4096})]
    return Case("histogram, 4,096 bins", "Histogram", blocks, lambda c: tile.cdiv(n, c["b"]), [x, bins, n], ["n"], [bins],
                lambda: torch.bincount(x, minlength=count).int(), 4 * n, eager=True)  # fmt: skip


def batched_transpose():
    batches, rows, columns = 64, 1024, 1024
    x, z = randn(batches, rows, columns), torch.empty(batches, columns, rows, device=DEVICE)
    blocks = [("Threads<8, 16>", {"b0": 64, "b1": 64}), ("Threads<8, 16>", {"b0": 32, "b1": 64})]
    return Case("batched transpose", "BatchedTranspose", blocks,
                lambda c: (tile.cdiv(rows, c["b0"]), tile.cdiv(columns, c["b1"]), batches), [x, z, rows, columns], ["rows"], [z],
                lambda: x.transpose(1, 2).contiguous(), 8 * x.numel())  # fmt: skip


def segmented_sum():
    segments, longest = 65536, 1024
    lengths = torch.randint(0, longest + 1, (segments,), device=DEVICE)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device=DEVICE), lengths.cumsum(0)])
    x, z = randn(int(lengths.sum()) if DEVICE == "cuda" else 1), torch.empty(segments, device=DEVICE)
    narrow = offsets.int()
    blocks = [("Threads<4, 32>", {"b0": 4, "b1": 1024}), ("Threads<4, 32>", {"b0": 4, "b1": 256})]
    return Case("segmented sum", "SegmentedSum", blocks, lambda c: tile.cdiv(segments, c["b0"]),
                [x, narrow, z, segments, longest], ["segments"], [z],
                lambda: torch.segment_reduce(x, "sum", offsets=offsets), 4 * x.numel(), 1e-3, eager=True)  # fmt: skip


def int4_unpack():
    n = 1 << 28
    packed = torch.randint(0, 256, (n // 2,), device=DEVICE, dtype=torch.uint8)
    z = torch.empty(n, dtype=torch.int8, device=DEVICE)

    def reference():
        both = torch.stack([packed & 15, packed >> 4], -1)
        return (both.to(torch.int8) - 8).flatten()

    blocks = [("Threads<1, 256, 16>", {"b": 4096}), ("Threads<1, 128, 8>", {"b": 4096})]
    return Case("int4 unpack", "Int4Unpack", blocks, lambda c: tile.cdiv(n, c["b"]), [packed, z, n], ["n"], [z], reference,
                3 * n // 2)  # fmt: skip


def softmax_with_lengths():
    rows, columns = 16384, 4096
    x, lengths = randn(rows, columns), torch.randint(1, columns + 1, (rows,), device=DEVICE, dtype=torch.int32)
    z = empty_like(x)
    j = torch.arange(columns, device=DEVICE)
    blocks = [("Threads<1, 256, 4, 5>", {"b0": 1, "b1": 4096}), ("Threads<1, 128>", {"b0": 1, "b1": 2048})]
    return Case("softmax with lengths", "SoftmaxWithLengths", blocks, lambda c: tile.cdiv(rows, c["b0"]),
                [x, lengths, z, rows, columns], ["columns"], [z],
                lambda: torch.softmax(x.masked_fill(j[None] >= lengths[:, None], -float("inf")), 1),
                4 * (rows * columns + int(lengths.sum()) if DEVICE == "cuda" else 1), 1e-6)  # fmt: skip


CASES = [strided_add, copy_2d, layer_norm, layer_norm_backward, rope, top_k, histogram, batched_transpose, segmented_sum, int4_unpack,
         softmax_with_lengths]  # fmt: skip


def kernel_of(case):
    choices = [tile.Choice(constants, layout=layout) for layout, constants in case.layouts]
    return tile.load(FILE, f"ten::{case.kernel}", choices=choices, key=case.key)


def build(architecture, names):
    """Compiles all kernels, of tensors that have types alone."""
    for make in CASES:
        if names and make.__name__ not in names:
            continue
        case = make()
        kernel = kernel_of(case)
        values = kernel._bind(case.arguments, {})
        signature = tuple(kernel._kind(name, number, values.get(name)) for name, number in kernel.parameters)
        print(tile._build(kernel, signature, True, architecture), flush=True)


def measure(case):
    from triton.testing import do_bench

    kernel = kernel_of(case)
    ours = lambda: kernel[case.grid](*case.arguments)  # noqa: E731
    by_torch = case.reference if case.eager else torch.compile(case.reference)
    exact = by_torch()
    for output in case.outputs:
        output.fill_(0)
    ours()  # tunes, so a kernel that adds to its output starts again
    for output in case.outputs:
        output.fill_(0)
    ours()
    found = case.outputs[0]
    # Infinities are equal to themselves alone.
    close = (found == exact) | ((found - exact).abs() <= case.tolerance * (1 + exact.abs()))
    wrong = int((~close).sum())
    times = {"tile": [], "torch": []}
    for _ in range(3):
        times["tile"].append(do_bench(ours, warmup=5, rep=40, return_mode="median"))
        times["torch"].append(do_bench(by_torch, warmup=5, rep=40, return_mode="median"))
    us = {side: sorted(all_times)[1] * 1e3 for side, all_times in times.items()}
    result = {
        "name": case.name,
        "tile_us": round(us["tile"], 1),
        "torch_us": round(us["torch"], 1),
        "of_torch": round(us["torch"] / us["tile"], 2),
        "tile_tb_s": round(case.moved / us["tile"] * 1e-6, 2),
        "torch": "one operator" if case.eager else "torch.compile",
        "choice": f"{kernel.taken.layout} {kernel.taken.constants}",
        "wrong": wrong,
    }
    print(json.dumps(result), flush=True)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", metavar="ARCHITECTURE")
    parser.add_argument("--json")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(make.__name__ for make in CASES))
    options = parser.parse_args()
    global DEVICE
    DEVICE = "meta" if options.build else "cuda"
    if options.build:
        return build(options.build, options.names)
    torch.manual_seed(0)
    results = []
    for make in CASES:
        if not options.names or make.__name__ in options.names:
            results.append(measure(make()))
            torch.cuda.empty_cache()
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    raise SystemExit(any(result["wrong"] for result in results))


if __name__ == "__main__":
    main()
