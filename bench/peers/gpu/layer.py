"""A layer as servers have it: a weight in one of the formats, some rows of X, and what the results must be."""

import functools

import torch
from gpu import problem
from gpu.report import is_ours
from gpu.shape import Shape

LARGEST = {8: 127, 4: 7.5}  # the level of a group's largest magnitude; with 7.5 all 16 levels occur, as in GPTQ's files
PEERS_BOUND = 0.1  # of their errors: they round where they like, fp8 by up to 6 %; beyond it the layer is another one


class Weight:
    """W (N, K) as integers with a scale for each group of a row (0: for a row); scales are values of dtype.

    It stays for all numbers of rows, and so does what the contenders make of it: `once`.
    """

    def __init__(self, k, n, bits, group, dtype, zero_points=False, device="cuda", seed=1):
        self.k, self.n, self.bits, self.group, self.dtype = k, n, bits, group, dtype
        generator = torch.Generator(device).manual_seed(seed)
        groups = 0.02 * torch.randn(n, k, device=device, generator=generator).view(n, -1, group or k)
        self.scale = (groups.abs().amax(2) / LARGEST[bits]).to(dtype).float()
        self.zero, zero = None, 0
        if zero_points:
            sizes = {"size": self.scale.shape, "device": device, "dtype": torch.int32, "generator": generator}
            self.zero = torch.randint(-3, 4, **sizes)
            zero = self.zero[..., None]
        levels = (groups / self.scale[..., None]).round() + zero
        levels = levels.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        self.q = levels.view(n, k).to(torch.int8)
        self.exact = ((levels - zero).double() * self.scale[..., None].double()).view(n, k)
        self.kept = {}

    def once(self, key, make):
        """What `make` returned, or raised, at its first call for this key."""
        if key not in self.kept:
            try:
                self.kept[key] = make(), None
            except Exception as error:  # as for every peer
                self.kept[key] = None, error
        made, error = self.kept[key]
        if error:
            raise error
        return made

    @property
    def floats(self):
        return self.once("floats", lambda: self.exact.to(self.dtype))

    @property
    def codes(self):
        """The levels as unsigned numbers: 0 is 2^(bits - 1)."""
        return self.q.int() + 2 ** (self.bits - 1)


class Layer:
    """Rows of a 16-bit X, and the same in 8 bits with a scale each, for a weight. No bias, as in most decoders."""

    def __init__(self, weight, m, format, seed=2):
        self.weight, self.format, self.shape = weight, format, Shape(m, weight.k, weight.n)
        device = weight.q.device
        generator = torch.Generator(device).manual_seed(seed)
        self.x = torch.randn(m, weight.k, device=device, generator=generator).to(weight.dtype)

    @functools.cached_property
    def quantized(self):
        """(X in 8 bits, scales (M)), as the contract has it."""
        q, scale = problem.quantize(self.x, self.x.abs().amax(1, keepdim=True))
        return q.to(torch.int8), scale[:, 0].contiguous()

    def empty(self):
        return self.x.new_empty(self.shape.m, self.shape.n)


class Expected(problem.Expected):
    """Tasks: "float", X in 16 bits; "int8", X in 8 bits, given or quantized; "sums", its bare sums; "read", nothing."""

    def _values(self, task):
        w = self.o.weight
        if task == "float":
            return self.o.x[self.rows].double() @ w.exact.T, None
        xq, scale = (t[self.rows] for t in self.o.quantized)
        if w.bits == 4:
            return (xq * scale[:, None].double()) @ w.exact.T, None
        sums = xq.double() @ w.once("doubles", w.q.double).T  # exact: below 2^53
        if task == "sums":
            return sums, sums.int()
        both = (scale[:, None] * w.scale[:, 0]).double()
        return sums * both, (sums.float().double() * both).float()

    def bound(self, contender, dtype):
        if not is_ours(contender.name):
            return PEERS_BOUND
        return 5e-3 if dtype == torch.bfloat16 else 6e-4

    def verdict(self, contender, call):
        if contender.task == "read":
            call()
            return ""
        return super().verdict(contender, call)
