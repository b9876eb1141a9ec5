"""The homework in Triton: homework.py."""

import torch
from gpu import homework
from gpu.contender import Contender, Quantizer
from gpu.problem import quantize


class Homework:
    versions = {"triton": homework.triton.__version__}

    def contenders(self, o):
        def product():
            y = torch.empty(o.shape.m, o.shape.n, dtype=torch.float16, device="cuda")

            def call():
                homework.forward(o.xq, o.one_scale, o.w, o.w_scale, o.bias, y)
                return y

            return {"": call}

        def layer():
            y = torch.empty(o.shape.m, o.shape.n, dtype=torch.float16, device="cuda")
            q, scale, maximum = torch.empty_like(o.xq), torch.empty_like(o.one_scale), torch.empty_like(o.one_scale)

            def call():
                homework.quantize_global(o.x, q, scale, maximum)
                homework.forward(q, scale, o.w, o.w_scale, o.bias, y)
                return y

            return {"": call}

        return [
            Contender("Triton", "product", "product, one scale", product),
            Contender("Triton", "layer", "layer, one scale", layer),
        ]

    def quantizers(self, x):
        def rows():
            q, scale = torch.empty(x.shape, dtype=torch.int8, device="cuda"), torch.empty(len(x), device="cuda")
            rows.q = q
            return lambda: homework.quantize_rows(x, q, scale)

        def tensor():
            q = torch.empty(x.shape, dtype=torch.int8, device="cuda")
            scale, maximum = torch.empty(2, 1, device="cuda")
            tensor.q = q
            return lambda: homework.quantize_global(x, q, scale, maximum)

        def check(of, amax):
            def differences():
                # Its division is not that of IEEE 754.
                count = int((of.q != quantize(x, amax())[0].to(torch.int8)).sum())
                return f"{count:,} of {x.numel():,} differ" if count else "exact"

            return differences

        return [
            Quantizer("Triton rows", 3, rows, check(rows, lambda: x.abs().amax(1, keepdim=True))),
            Quantizer("Triton tensor", 3, tensor, check(tensor, lambda: x.abs().amax().reshape(1, 1))),
        ]
