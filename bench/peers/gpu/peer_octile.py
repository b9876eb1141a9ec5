"""Octile through its C interface, on CUDA tensors of torch's."""

import octile_c
import octile_torch
import torch
from gpu.contender import Contender, Quantizer
from gpu.peer_octile_backward import Backward
from gpu.problem import quantize

GRANULARITIES = {"rows": octile_c.PER_ROW, "tensor": octile_c.PER_TENSOR, "columns": octile_c.PER_COLUMN}
ORIENTATIONS = {octile_c.ROW_MAJOR: "", octile_c.TRANSPOSED: ", transposed", octile_c.BOTH: ", both orientations"}


class Octile:
    def __init__(self, path):
        self.library = octile_c.Library(path)
        self.versions = {"octile": self.library.version()}

    def linear(self, o, x, x_scale=None):
        """{the plan's kernels: call}. With x_scale X is in 8 bits, and else quantized in the call."""
        y = torch.empty(o.shape.m, o.shape.n, dtype=torch.float16, device="cuda")
        tensors = {"x": x, "weight": o.w, "weight_scale": o.w_scale, "bias": o.bias, "y": y}
        if x_scale is not None:
            tensors["x_scale"] = x_scale
        run = octile_torch.linear(self.library, o.shape, tensors)

        def call():
            run()
            return y

        return {run.plan.sku: call}

    def contenders(self, o):
        return [
            Contender("Octile", "product", "product", lambda: self.linear(o, o.xq, o.x_scale)),
            Contender("Octile", "layer", "layer", lambda: self.linear(o, o.x)),
        ]

    def backward(self, g):
        return Backward(self.library, g).contenders()

    def quantizers(self, x):
        return [
            self.quantizer(x, "rows", octile_c.ROW_MAJOR, 3),
            self.quantizer(x, "rows", octile_c.TRANSPOSED, 3),
            self.quantizer(x, "rows", octile_c.BOTH, 4),
            self.quantizer(x, "tensor", octile_c.ROW_MAJOR, 3),
            self.quantizer(x, "tensor", octile_c.BOTH, 4),
            self.quantizer(x, "columns", octile_c.ROW_MAJOR, 3),
            self.quantizer(x, "columns", octile_c.TRANSPOSED, 3),
            self.quantizer(x, "columns", octile_c.BOTH, 4),
        ]

    def quantizer(self, x, granularity, orientation, bytes_per_element):
        (rows, columns), made = x.shape, {}

        def prepare():
            scales = {"rows": rows, "tensor": 1, "columns": columns}[granularity]
            tensors = {"scale": torch.empty(scales, device="cuda")}
            if orientation != octile_c.TRANSPOSED:
                tensors["q"] = torch.full((rows, columns), -128, dtype=torch.int8, device="cuda")
            if orientation != octile_c.ROW_MAJOR:
                tensors["q_transposed"] = torch.full((columns, rows), -128, dtype=torch.int8, device="cuda")
            fields = {"granularity": GRANULARITIES[granularity], "orientation": orientation}
            run = octile_torch.quantize(self.library, x, tensors, **fields)
            made.update(tensors, sku=run.plan.sku)
            return run

        def check():
            dimension = {"rows": 1, "tensor": (0, 1), "columns": 0}[granularity]
            q, scale = quantize(x, x.abs().amax(dimension, keepdim=True))
            q = q.to(torch.int8)
            same = torch.equal(made["scale"], scale.reshape(-1))
            same &= "q" not in made or torch.equal(made["q"], q)
            same &= "q_transposed" not in made or torch.equal(made["q_transposed"], q.T)
            if not same:
                raise RuntimeError("WRONG: not the bits of the contract")
            return f"{made['sku']}: exact"

        return Quantizer(f"Octile {granularity}{ORIENTATIONS[orientation]}", bytes_per_element, prepare, check)
