"""Operands of the backward and of a training step, and what the results must be.

A result is a dictionary: y (M, N), dx (M, K), dw (N, K) or dw_t (K, N), db (N).
"""

import torch
from gpu.problem import normal, quantize

SAMPLED_ROWS = 64
BLOCK = 256  # terms of a contraction with a scale of their own, in "int8 in blocks": those of backward="int8"
CHUNK = 1 << 24  # elements that are checked at once


def rows_of(x):
    """Quantized per row, as the contract has it."""
    q, scale = quantize(x, x.abs().amax(1, keepdim=True))
    return q.to(torch.int8), scale.reshape(-1)


class Gradients:
    """x, w and dy in f16, and all that is made from them. Triton's homework has one scale for x: xq_one."""

    def __init__(self, shape, seed=1):
        generator = torch.Generator("cuda").manual_seed(seed)
        self.shape, self.known = shape, {}
        self.x = normal(shape.m, shape.k, generator=generator).half()
        self.w = (0.02 * normal(shape.n, shape.k, generator=generator)).half()
        self.dy = (0.05 * normal(shape.m, shape.n, generator=generator)).half()
        self.bias = normal(shape.n, generator=generator).half()
        self.xq, self.x_scale = rows_of(self.x)
        self.wq, self.w_scale = rows_of(self.w)
        self.xq_t, self.wq_t = self.xq.T.contiguous(), self.wq.T.contiguous()
        q, scale = quantize(self.x, self.x.abs().amax().reshape(1, 1))
        self.xq_one, self.one_scale = q.to(torch.int8), scale.reshape(1)
        self.one = torch.ones(1, device="cuda")
        # Of dY * s_w the rows, of s_x * dY the columns, transposed.
        self.q1, self.s1 = rows_of(self.dy.float() * self.w_scale)
        self.q2_t, self.s2 = rows_of((self.dy.float() * self.x_scale[:, None]).T.contiguous())

    def empty(self, *names, dtype=torch.float16):
        s = self.shape
        sizes = {"y": (s.m, s.n), "dx": (s.m, s.k), "dw": (s.n, s.k), "dw_t": (s.k, s.n), "db": (s.n,)}
        return {name: torch.empty(sizes[name], dtype=dtype, device="cuda") for name in names}

    def in_blocks(self, name):
        """dY as rows_of() has it for dX or dW, block by block of the contraction: [(q, scale)]."""
        d = self.dy.float() * self.w_scale if name == "dx" else (self.dy.float() * self.x_scale[:, None]).T
        return [rows_of(block.contiguous()) for block in d.split(BLOCK, 1)]

    def floats(self, dtype):
        """x and w as the integers have them, dy and the bias: what a float peer is handed."""
        if dtype not in self.known:
            x, w = self.xq * self.x_scale[:, None], self.wq * self.w_scale[:, None]
            self.known[dtype] = x.to(dtype), w.to(dtype), self.dy.to(dtype), self.bias.to(dtype)
        return self.known[dtype]


def some_of(count):
    if count <= SAMPLED_ROWS:
        return torch.arange(count, device="cuda")
    ends = torch.tensor([0, count - 1], device="cuda")
    return torch.cat((ends, torch.randperm(count, device="cuda")[:SAMPLED_ROWS]))


class Expected:
    """int8 results must have the bits of the contract, everywhere; floats are compared with sums in f64, some rows."""

    def __init__(self, gradients):
        self.g = gradients

    def verdict(self, contender, call):
        """ "exact", or the relative error in words. Raises where a result is wrong, or not written everywhere."""
        task = contender.task
        for result in call().values():
            result.fill_(float("nan"))
        errors = []
        for name, result in call().items():
            if unwritten := int((~torch.isfinite(result)).sum()):
                raise RuntimeError(f"WRONG: {unwritten} elements of {name} are not written, or not finite")
            if task == "int8 in blocks" and name in ("dx", "dw"):
                self.same_bits_in_blocks(name, result)
            elif task.startswith("int8") and name != "db":
                self.same_bits(name, result)
            else:
                errors.append(self.error(name, task, result))
        if not errors:
            return "exact"
        return f"exact, dB within {max(errors):.0e}" if task.startswith("int8") else f"within {max(errors):.0e}"

    def same_bits(self, name, result):
        g = self.g
        if name == "dw_t":
            name, result = "dw", result.T
        a, b, scale = {
            "y": (g.xq, g.wq, g.x_scale),
            "dx": (g.q1, g.wq_t, g.s1),
            "dw": (g.q2_t, g.xq_t, g.s2),
        }[name]
        at_once = max(1, CHUNK // len(b) // 64) * 64
        for first in range(0, len(a), at_once):
            part = slice(first, first + at_once)
            sums = torch._int_mm(a[part], b.T).float()
            if name == "y":
                # An fma. In f64 the product is exact, the sum rounded once more, which shows in a tie of ties alone.
                both = (scale[part, None] * g.w_scale).double()
                value = (sums.double() * both + g.bias.double()).float()
            else:
                value = sums * scale[part, None]
            if wrong := int((result[part] != value.to(result.dtype)).sum()):
                raise RuntimeError(f"WRONG: {wrong} elements of {name} have not the bits of the contract")

    def same_bits_in_blocks(self, name, result):
        g = self.g
        other = (g.wq_t if name == "dx" else g.xq_t).split(BLOCK, 1)
        value = torch.zeros(result.shape, device=result.device)
        for (q, scale), b in zip(g.in_blocks(name), other, strict=True):
            # An fma, as above.
            sums = torch._int_mm(q, b.contiguous().T)
            value = (sums.double() * scale.double()[:, None] + value.double()).float()
        if wrong := int((result != value.to(result.dtype)).sum()):
            raise RuntimeError(f"WRONG: {wrong} elements of {name} have not the bits of the contract")

    def error(self, name, task, result):
        g, one = self.g, task == "one scale"
        x = (g.xq_one, g.one_scale) if one else (g.xq, g.x_scale[:, None])
        dy = g.dy.to(result.dtype) if result.dtype == torch.bfloat16 else g.dy
        if name == "db":
            got, value = result.double(), dy.double().sum(0)
        elif name in ("dw", "dw_t"):
            picked = some_of(g.shape.n)
            got = (result[picked] if name == "dw" else result[:, picked].T).double()
            value = (dy[:, picked].double() * (x[1].double())).T @ x[0].double()
        else:
            picked = some_of(g.shape.m)
            got = result[picked].double()
            if name == "dx":
                value = (dy[picked].double() * g.w_scale.double()) @ g.wq.double()
            else:
                value = (x[0].double() * x[1].double())[picked] @ g.wq.double().T * g.w_scale.double() + g.bias.double()
        error = float((got - value).norm() / value.norm())
        # f16 keeps 11 bits, bf16 8; an error of NaN is wrong too.
        if not error < (6e-3 if result.dtype == torch.bfloat16 else 1e-3):
            raise RuntimeError(f"WRONG: relative error of {name} {error:.1e}")
        return error
