#!/usr/bin/env python3
"""Two builds of the library on a GPU, in turns, in one run: does a change that should cost nothing cost something?

    bench/two_builds.py BEFORE/liboctile.so AFTER/liboctile.so [--only TEXT,...] [--rounds N]

A line per problem: medians in microseconds with a cold L2, after / before, and the ratio of two halves of the rounds
of BEFORE, which shows the noise. Needs torch with CUDA. tools/digests.py compares the results.
"""

import argparse
import math
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent / "peers"))

import octile_c
import octile_torch
import torch
from gpu.clock import Clock
from gpu.layer import Layer, Weight
from gpu.peer_octile import serve
from gpu.problem import Operands
from gpu.shape import Shape

LAYERS = ((4096, 14336), (8192, 8192))
BATCHES = (1, 16, 64, 256, 1024, 4096)
W4_BATCHES = (1, 4, 16, 32, 64, 128, 256, 1024)
OTHERS = ((333, 4104, 1000), (100000, 64, 512), (17, 4096, 4096), (1024, 4096, 4096))


def empty(*sizes, dtype=torch.float16):
    return torch.empty(*sizes, dtype=dtype, device="cuda")


def product(library, o, **fields):
    y = empty(o.shape.m, o.shape.n)
    tensors = {"x": o.xq, "x_scale": o.x_scale, "weight": o.w, "weight_scale": o.w_scale, "bias": o.bias, "y": y}
    return octile_torch.linear(library, o.shape, tensors, **fields)


def layer(library, o):
    tensors = {"x": o.x, "weight": o.w, "weight_scale": o.w_scale, "y": empty(o.shape.m, o.shape.n)}
    return octile_torch.linear(library, o.shape, tensors)


def backward(library, o, dy, kind):
    s = o.shape
    tensors = {"dy": dy, "weight": o.w, "weight_scale": o.w_scale, "x": o.xq, "x_scale": o.x_scale}
    tensors |= {"dx": empty(s.m, s.k), "dw": empty(s.n, s.k), "db": empty(s.n)}
    return octile_torch.backward(library, s, tensors, dx=kind, dw=kind)


def quantizer(library, x, granularity, orientation):
    rows, columns = x.shape
    scales = {octile_c.PER_ROW: rows, octile_c.PER_COLUMN: columns, octile_c.PER_TENSOR: 1}[granularity]
    tensors = {"scale": empty(scales, dtype=torch.float32)}
    if orientation != octile_c.TRANSPOSED:
        tensors["q"] = empty(rows, columns, dtype=torch.int8)
    if orientation != octile_c.ROW_MAJOR:
        tensors["q_transposed"] = empty(columns, rows, dtype=torch.int8)
    return octile_torch.quantize(library, x, tensors, granularity=granularity, orientation=orientation)


def problems(libraries):
    """(name, [call of each library])"""

    def both(name, make):
        return name, lambda: [make(library) for library in libraries]

    for k, n in LAYERS:
        for m in BATCHES:
            o = Operands(Shape(m, k, n))
            yield both(f"w8a8 product {m}x{k}x{n}", lambda library, o=o: product(library, o))
            yield both(f"w8a8 layer {m}x{k}x{n}", lambda library, o=o: layer(library, o))
        weight = Weight(k, n, 4, 128, torch.float16)
        for m in W4_BATCHES:
            for name, packed in (("w4a16", True), ("w4a16", False), ("w4a8", True)):
                p = Layer(weight, m, name)
                text = f"{name} {'packed' if packed else 'plain'} {m}x{k}x{n}"
                yield both(text, lambda library, p=p, packed=packed: next(iter(serve(library, p, packed).values())))
    for shape in OTHERS:
        o = Operands(Shape(*shape))
        for kernel in ("", "sm80"):
            name = f"w8a8 product {'x'.join(map(str, shape))} {kernel}"
            yield both(name, lambda library, o=o, kernel=kernel: product(library, o, kernel=kernel.encode()))
    o, dy = Operands(Shape(4096, 4096, 4096)), torch.randn(4096, 4096, device="cuda").half()
    for name, kind in (("int8", octile_c.INT8), ("16 bit", octile_c.DEQUANTIZED)):
        yield both(f"backward {name} 4096x4096x4096", lambda library, kind=kind: backward(library, o, dy, kind))
    x = torch.randn(8192, 8192, device="cuda").half()
    for name, granularity in (
        ("row", octile_c.PER_ROW),
        ("column", octile_c.PER_COLUMN),
        ("tensor", octile_c.PER_TENSOR),
    ):
        for text, orientation in (
            ("", octile_c.ROW_MAJOR),
            (" transposed", octile_c.TRANSPOSED),
            (" both", octile_c.BOTH),
        ):
            yield both(
                f"quantize 8192x8192 per {name}{text}",
                lambda library, g=granularity, orientation=orientation: quantizer(library, x, g, orientation),
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=pathlib.Path)
    parser.add_argument("after", type=pathlib.Path)
    parser.add_argument("--only", default="", metavar="TEXT,...", help="problems whose name holds one of these")
    parser.add_argument("--rounds", type=int, default=21)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    libraries = [octile_c.Library(path) for path in (arguments.before, arguments.after)]
    clock, ratios = Clock(3), []
    for name, make in problems(libraries):
        if not any(text in name for text in arguments.only.split(",")):
            continue
        times = clock.rounds(make(), arguments.rounds)
        before, after = (statistics.median(t) for t in times)
        noise = statistics.median(times[0][::2]) / statistics.median(times[0][1::2])
        ratios.append(after / before)
        print(f"{name:40} {before * 1e6:8.2f} {after * 1e6:8.2f}  {ratios[-1]:.3f}  noise {noise:.3f}", flush=True)
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    print(f"{len(ratios)} problems: geometric mean {mean:.4f}, from {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
