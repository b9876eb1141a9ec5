#!/usr/bin/env python3
"""Times an activation or a norm and the quantizer after it, in both orientations: the fused pass beside torch.compile and a
quantizer; norms for decoding, of few rows, row-major alone.

Microseconds on a GPU, the median of --runs; the operands are larger than the L2 where M x K is. "GB/s" counts what has to be
read and written: x, and up, or a residual and its sum, where there is one, and the int8 outputs.
"""

import argparse

import octile  # noqa: F401
import torch
import torch.nn.functional as F  # noqa: N812
from octile import _c

SHAPES = [(16384, 16384), (16384, 8192), (4096, 14336), (16384, 11008), (16384, 4096)]
KINDS = {"gelu": (_c.GELU_TANH, False), "silu": (_c.SILU, False), "swiglu": (_c.SILU, True)}
NORMS = {
    "rms_norm": (_c.RMS_NORM, False),
    "add + rms_norm": (_c.RMS_NORM, True),
    "add + layer_norm": (_c.LAYER_NORM, True),
}
NORM_SHAPES = [(16384, 4096), (4096, 8192), (16384, 2048), (1, 4096), (64, 4096)]


def microseconds(function, runs):
    for _ in range(3):
        function()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
    for begin, end in events:
        begin.record()
        function()
        end.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) for begin, end in events)
    return 1000 * times[len(times) // 2]


def of_norms(a, dtype):
    quantize, norm_quantize = torch.ops.octile.quantize, torch.ops.octile.norm_quantize

    @torch.compile
    def norm(x, residual, weight, bias):
        x = x if residual is None else x + residual
        size = weight.shape
        return (F.rms_norm(x, size, weight, 1e-6) if bias is None else F.layer_norm(x, size, weight, bias, 1e-6)), x

    for kind, (prologue, adds) in NORMS.items():
        for rows, columns in NORM_SHAPES:
            x = torch.randn(rows, columns, device="cuda", dtype=dtype)
            weight = torch.ones(columns, device="cuda", dtype=dtype)
            bias = torch.zeros_like(weight) if prologue == _c.LAYER_NORM else None
            residual = torch.randn_like(x) if adds else None
            orientation = _c.BOTH if rows > 64 else _c.ROW_MAJOR
            given = (x, weight, bias, residual, prologue, orientation, 1e-6)
            fused = microseconds(lambda: norm_quantize(*given), a.runs)
            h, _ = norm(x, residual, weight, bias)
            alone = microseconds(lambda: norm(x, residual, weight, bias), a.runs)
            after = microseconds(lambda: quantize(h, _c.PER_ROW, orientation), a.runs)
            rate = rows * columns * (2 + 4 * adds + (2 if rows > 64 else 1)) / fused / 1000
            row = f"{fused:.1f} | {rate:,.0f} | {alone:.1f} | {after:.1f} | {alone + after - fused:.1f}"
            print(f"| {kind} | {rows} x {columns} | {row} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--norms", action="store_true", help="norms alone")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    a = parser.parse_args()
    dtype = getattr(torch, a.dtype)
    activations = {
        "gelu": torch.compile(lambda x, _: F.gelu(x, approximate="tanh")),
        "silu": torch.compile(lambda x, _: F.silu(x)),
        "swiglu": torch.compile(lambda x, up: F.silu(x) * up),
    }
    quantize = torch.ops.octile.quantize
    print("| kind | M x K | fused, us | GB/s | activation, us | quantizer, us | saved, us |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    of_norms(a, dtype)
    for kind, (prologue, gated) in ({} if a.norms else KINDS).items():
        for rows, columns in SHAPES:
            x = torch.randn(rows, columns, device="cuda", dtype=dtype)
            up = torch.randn_like(x) if gated else None
            fused = microseconds(lambda: quantize(x, _c.PER_ROW, _c.BOTH, None, prologue, up), a.runs)
            h = activations[kind](x, up)
            alone = microseconds(lambda: activations[kind](x, up), a.runs)
            after = microseconds(lambda: quantize(h, _c.PER_ROW, _c.BOTH), a.runs)
            rate = rows * columns * (6 if gated else 4) / fused / 1000
            row = f"{fused:.1f} | {rate:,.0f} | {alone:.1f} | {after:.1f} | {alone + after - fused:.1f}"
            print(f"| {kind} | {rows} x {columns} | {row} |", flush=True)


if __name__ == "__main__":
    main()
