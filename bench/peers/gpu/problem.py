"""Operands, and what the results must be."""

import torch

SAMPLED_ROWS = 64
POISON = -(2**31)


def normal(*sizes, generator):
    return torch.randn(*sizes, device="cuda", generator=generator)


def quantized_normal(rows, columns, generator):
    """A normal times 30, rounded and clipped: it reaches the whole range. Zeros would take less power, and time."""
    out = torch.empty(rows, columns, dtype=torch.int8, device="cuda")
    for part in out.split(4096):
        part.copy_((30 * normal(*part.shape, generator=generator)).round_().clamp_(-127, 127))
    return out


class Operands:
    """Those of a layer, in 8 bits and in floats. x is not what xq was made from."""

    def __init__(self, shape, seed=1):
        generator = torch.Generator("cuda").manual_seed(seed)
        self.shape = shape
        self.xq = quantized_normal(shape.m, shape.k, generator)
        self.w = quantized_normal(shape.n, shape.k, generator)
        self.x_scale = 0.01 + 0.02 * torch.rand(shape.m, device="cuda", generator=generator)
        self.one_scale = self.x_scale[:1].clone()
        self.w_scale = 1e-4 + 1e-3 * torch.rand(shape.n, device="cuda", generator=generator)
        self.bias = normal(shape.n, generator=generator).half()
        self.x = normal(shape.m, shape.k, generator=generator).half()

    def float_weight(self, dtype):
        return (self.w * self.w_scale[:, None]).to(dtype)


def quantize(x, amax):
    """As Octile's contract has it, for rows whose largest magnitudes are amax (rows, 1), or (1, 1) for all."""
    # By a tensor: PyTorch divides by a number as it multiplies by its reciprocal, which is not the same.
    scale = (amax.float() / torch.full((), 127.0, device=x.device)).clamp_min(1e-8)
    return (x.float() / scale).round().clamp(-127, 127), scale


class Expected:
    """Some rows of the result: exact values in f64, and where a rounding is defined, the bits."""

    def __init__(self, o):
        rows = o.shape.m
        if rows > SAMPLED_ROWS:
            picked = torch.randperm(rows - 2, device=o.x.device)[: SAMPLED_ROWS - 2] + 1
            self.rows = torch.cat((picked.new_tensor([0, rows - 1]), picked))
        else:
            self.rows = torch.arange(rows, device=o.x.device)
        self.o, self.known = o, {}

    def values(self, task):
        """(f64, bits or None) of the picked rows."""
        if task not in self.known:
            self.known[task] = self._values(task)
        return self.known[task]

    def _values(self, task):
        o, rows = self.o, self.rows
        if task == "float":
            x, w = o.x[rows].double(), o.float_weight(torch.float16).double()
            return x @ w.T + o.bias.double(), None
        one = task.endswith("one scale")
        if task == "sums" or task.startswith("product"):
            xq, scale = o.xq[rows].double(), (o.one_scale if one else o.x_scale[rows])[:, None]
        else:
            amax = o.x.abs().amax() if one else o.x[rows].abs().amax(1, keepdim=True)
            xq, scale = quantize(o.x[rows], amax.reshape(-1, 1))
        sums = xq.double() @ o.w.double().T  # exact: below 2^53
        if task == "sums":
            return sums, sums.int()
        both = scale * o.w_scale
        value = sums * both.double() + o.bias.double()
        # An fma in f32, then f16. The product is exact in f64; the sum is rounded there once more than in an fma, which
        # shows in a tie of ties alone.
        bits = (sums.float().double() * both.double() + o.bias.double()).float().half()
        return value, bits

    def bound(self, contender, dtype):
        """Of the relative error: f16 keeps 11 bits, bf16 8."""
        return 5e-3 if dtype == torch.bfloat16 else 1e-3

    def verdict(self, contender, call):
        """ "exact", or the relative error in words. Raises where the result is wrong, or not written everywhere."""
        first = call()
        first.fill_(float("nan") if first.is_floating_point() else POISON)
        result = call()
        if unwritten := int((~torch.isfinite(result) if result.is_floating_point() else result == POISON).sum()):
            raise RuntimeError(f"WRONG: {unwritten} elements are not written, or not finite")
        value, bits = self.values(contender.task)
        got = result[self.rows]
        if bits is not None and torch.equal(got, bits.to(got.dtype)):
            return "exact"
        error = float((got.double() - value).norm() / value.norm())
        if not error < self.bound(contender, result.dtype):  # an error of NaN is wrong too
            raise RuntimeError(f"WRONG: relative error {error:.1e}")
        return f"within {error:.0e}"
