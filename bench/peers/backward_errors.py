#!/usr/bin/env python3
"""How far each mode of the backward lies from f64: the tables of docs/explanation/backward-errors.md.

It needs a PyTorch, of any kind. The int8 modes give the same bits on every machine.
"""

import argparse
import pathlib
import sys

import octile_c
import octile_torch
import torch
from gpu.report import grid
from gpu.shape import Shape

ROOT = pathlib.Path(__file__).resolve().parents[2]
ONE_IN = 64  # of the columns or rows stand out
SEEDS = 16

# name: dtype of dY, product, rounding, gradient_block
MODES = {
    "16-bit, f16": (torch.float16, octile_c.DEQUANTIZED, octile_c.NEAREST, 0),
    "16-bit, bf16": (torch.bfloat16, octile_c.DEQUANTIZED, octile_c.NEAREST, 0),
    "int8, blocks of 128": (torch.float16, octile_c.INT8, octile_c.NEAREST, 128),
    "int8, nearest": (torch.float16, octile_c.INT8, octile_c.NEAREST, 0),
    "int8, stochastic": (torch.float16, octile_c.INT8, octile_c.STOCHASTIC, 0),
}


# ---- Inputs: the same kind for X and dY; W is normal, as trained weights nearly are ----


def normal(rows, columns, generator):
    return torch.randn(rows, columns, generator=generator)


def heavy_tailed(rows, columns, generator):
    """Student's t with 3 degrees of freedom."""
    squares = normal(3, rows * columns, generator).square().sum(0).reshape(rows, columns)
    return normal(rows, columns, generator) / (squares / 3).sqrt()


def factors(count, generator):
    """20 to 100 for one in ONE_IN, else 1."""
    out = torch.ones(count)
    chosen = torch.randperm(count, generator=generator)[: max(1, count // ONE_IN)]
    out[chosen] = 20 + 80 * torch.rand(len(chosen), generator=generator)
    return out


def outlier_columns(rows, columns, generator):
    return normal(rows, columns, generator) * factors(columns, generator)


def outlier_rows(rows, columns, generator):
    return normal(rows, columns, generator) * factors(rows, generator)[:, None]


INPUTS = {
    "normal": normal,
    "heavy tails (t, 3 degrees)": heavy_tailed,
    f"1 in {ONE_IN} columns x 20 to 100": outlier_columns,
    f"1 in {ONE_IN} rows (tokens) x 20 to 100": outlier_rows,
}


class Layer:
    """X, W and dY in floats, and X and W as the forward quantizes them."""

    def __init__(self, library, shape, make, device):
        generator = torch.Generator().manual_seed(1)
        self.library, self.shape = library, shape
        self.x = make(shape.m, shape.k, generator).to(device)
        self.w = normal(shape.n, shape.k, generator).to(device) * 0.02
        # Small, so that f16 holds every sum; large enough to stay clear of its subnormals.
        self.dy = make(shape.m, shape.n, generator).to(device) * 0.05
        self.xq, self.x_scale = self.quantized(self.x)
        self.wq, self.w_scale = self.quantized(self.w)

    def quantized(self, x):
        q, scale = torch.empty(x.shape, dtype=torch.int8, device=x.device), torch.empty(len(x), device=x.device)
        octile_torch.quantize(self.library, x, {"q": q, "scale": scale}, granularity=octile_c.PER_ROW)()
        return q, scale

    def gradients(self, mode, seed=1):
        """{name: values in f64}, and dY as the products were handed it, in f64."""
        dtype, product, rounding, block = MODES[mode]
        dy = self.dy.to(dtype)
        out = {"dX": torch.empty_like(self.x, dtype=dtype), "dW": torch.empty_like(self.w, dtype=dtype)}
        tensors = {"dy": dy, "weight": self.wq, "weight_scale": self.w_scale, "x": self.xq, "x_scale": self.x_scale}
        tensors |= {"dx": out["dX"], "dw": out["dW"]}
        fields = {"dx": product, "dw": product, "rounding": rounding, "gradient_block": block}
        octile_torch.backward(self.library, self.shape, tensors, seed=seed, **fields)()
        return {name: t.double() for name, t in out.items()}, dy.double()

    def exact(self, dy, quantized=True):
        """In f64, of the integers and scales that the forward used, or of the floats that they were made from."""
        x, w = self.x.double(), self.w.double()
        if quantized:
            x, w = self.xq.double() * self.x_scale.double()[:, None], self.wq.double() * self.w_scale.double()[:, None]
        return {"dX": dy @ w, "dW": dy.T @ x}


def relative(got, expected):
    return float((got - expected).norm() / expected.norm())


def largest(got, expected):
    return float((got - expected).abs().max() / expected.square().mean().sqrt())


def per_cent(value):
    return f"{100 * value:.2g} %"


# ---- The tables ----


def measure(layer):
    """{gradient: {mode: (relative, largest)}}, and {gradient: what quantizing X or W costs}."""
    errors, forward = {"dX": {}, "dW": {}}, {}
    for mode in MODES:
        got, dy = layer.gradients(mode)
        exact = layer.exact(dy)
        for name in errors:
            errors[name][mode] = relative(got[name], exact[name]), largest(got[name], exact[name])
    floats = layer.exact(dy, quantized=False)
    for name in errors:
        forward[name] = relative(exact[name], floats[name])
    return errors, forward


def averaged(layer):
    """{gradient: the relative error of the mean over SEEDS seeds of stochastic rounding}"""
    sums = {}
    for seed in range(1, SEEDS + 1):
        got, dy = layer.gradients("int8, stochastic", seed)
        sums = {name: sums.get(name, 0) + t for name, t in got.items()}
    exact = layer.exact(dy)
    return {name: relative(total / SEEDS, exact[name]) for name, total in sums.items()}


def tables(library, shape, device):
    errors, worst, mean_of = [], [], []
    for inputs, make in INPUTS.items():
        layer = Layer(library, shape, make, device)
        found, forward = measure(layer)
        for name, modes in found.items():
            errors.append([inputs, name, *(per_cent(modes[m][0]) for m in MODES), per_cent(forward[name])])
            worst.append([inputs, name, *(f"{modes[m][1]:.2g}" for m in MODES)])
        mean_of.append((inputs, averaged(layer), found))
    head = ["inputs", "gradient", *MODES]
    return (
        f"Relative error, ||error|| / ||gradient||:\n\n{grid([*head, 'X and W in 8 bits, for comparison'], errors)}",
        f"Largest error of an element, over the gradient's root mean square:\n\n{grid(head, worst)}",
        f"The mean of {SEEDS} seeds of stochastic rounding:\n\n{mean_table(mean_of)}",
    )


def mean_table(found):
    rows = []
    for inputs, mean, errors in found:
        for name, value in mean.items():
            one, nearest = errors[name]["int8, stochastic"][0], errors[name]["int8, nearest"][0]
            rows.append([inputs, name, per_cent(one), per_cent(value), per_cent(nearest)])
    return grid(["inputs", "gradient", "one seed", f"mean of {SEEDS}", "nearest"], rows)


def main():
    usual = ROOT / "build/release/liboctile.so"
    parser = argparse.ArgumentParser(description="How far each mode of the backward lies from f64.")
    parser.add_argument("--shape", default="1024x1024x1024", metavar="MxKxN", help="default: %(default)s")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda:0 (default: %(default)s)")
    parser.add_argument("--library", type=pathlib.Path, default=usual, metavar="FILE", help="default: %(default)s")
    arguments = parser.parse_args()
    try:
        shape = Shape.parse(arguments.shape)
    except ValueError as error:
        parser.error(str(error))
    made = tables(octile_c.Library(arguments.library), shape, torch.device(arguments.device))
    print("\n".join(made))
    return 0


if __name__ == "__main__":
    sys.exit(main())
