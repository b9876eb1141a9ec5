"""The homework in Triton: homework.py."""

import torch
from gpu import homework
from gpu.contender import Contender, Peer, Quantizer
from gpu.problem import quantize


class Homework(Peer):
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

    def backward(self, g):
        """W as its quantizer and the forward have it, (OUT, IN), or as dX likes it, (IN, OUT), which a step then writes."""

        def dx(w):
            out = g.empty("dx")

            def call():
                homework.dx(g.dy, w, g.w_scale, out["dx"])
                return out

            return call

        def dw():
            out = g.empty("dw_t")

            def call():
                homework.dw(g.dy, g.xq_one, g.one_scale, out["dw_t"])
                return out

            return {"": call}

        def db():
            out = g.empty("db")

            def call():
                homework.db(g.dy, out["db"])
                return out

            return {"": call}

        def backward(w):
            out = g.empty("dx", "dw_t", "db")

            def call():
                homework.dx(g.dy, w, g.w_scale, out["dx"])
                homework.dw(g.dy, g.xq_one, g.one_scale, out["dw_t"])
                homework.db(g.dy, out["db"])
                return out

            return call

        def step(turned):
            out = g.empty("y", "dx", "dw_t", "db")
            wq, w_scale = torch.empty_like(g.wq), torch.empty_like(g.w_scale)
            wq_t = torch.empty_like(g.wq_t) if turned else wq.T
            xq, scale, maximum = torch.empty_like(g.xq), torch.empty_like(g.one), torch.empty_like(g.one)

            def call():
                homework.quantize_rows(g.w, wq, w_scale)
                if turned:
                    wq_t.copy_(wq.T)
                homework.quantize_global(g.x, xq, scale, maximum)
                homework.forward(xq, scale, wq, w_scale, g.bias, out["y"])
                homework.dx(g.dy, wq_t, w_scale, out["dx"])
                homework.dw(g.dy, xq, scale, out["dw_t"])
                homework.db(g.dy, out["db"])
                return out

            return call

        def layouts(call):
            return lambda: {"W (IN, OUT)": call(g.wq_t), "W (OUT, IN)": call(g.wq.T)}

        return [
            Contender("Triton", "dx", "one scale", layouts(dx)),
            Contender("Triton", "dw", "one scale", dw),
            Contender("Triton", "db", "one scale", db),
            Contender("Triton", "backward", "one scale", layouts(backward)),
            Contender("Triton", "step", "one scale", lambda: {"W transposed": step(True), "W as it is": step(False)}),
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
