"""The number contract (docs/reference/contract.md) of the ops in numpy, one readable function each."""

import ctypes
import ctypes.util

import numpy as np
import torch

_libm = ctypes.CDLL(ctypes.util.find_library("m"))
for _name, _type in (("fma", ctypes.c_double), ("fmaf", ctypes.c_float)):
    getattr(_libm, _name).restype = _type
    getattr(_libm, _name).argtypes = [_type] * 3

# a * b + c, rounded once.
_FMA = {
    np.float32: np.frompyfunc(_libm.fmaf, 3, 1),
    np.float64: np.frompyfunc(_libm.fma, 3, 1),
}


def working(dtype):
    """The type that a float type is computed in: numpy's and torch's."""
    return (np.float64, torch.float64) if dtype == torch.float64 else (np.float32, torch.float32)


def wide(t):
    """t in numpy, widened to the type it is computed in."""
    return t.detach().cpu().to(working(t.dtype)[1]).numpy()


def narrow(array, dtype):
    """array, rounded to dtype once, to nearest even."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)


def uniform(shape, seed):
    """u in [0, 1) of every element of a matrix: 16 bits of Philox-4x32-10, keyed by the seed."""
    index = np.arange(shape[0] * shape[1], dtype=np.uint64)
    low, word = np.uint64(0xFFFFFFFF), np.uint64(32)
    counter = index // np.uint64(8)
    x = [counter & low, counter >> word, np.zeros_like(counter), np.zeros_like(counter)]
    key = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * x[0], np.uint64(0xCD9E8D57) * x[2]
        x = [
            second >> word ^ x[1] ^ np.uint64(key[0]),
            second & low,
            first >> word ^ x[3] ^ np.uint64(key[1]),
            first & low,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    place = (index % np.uint64(8)).astype(np.int64)
    words = np.stack(x)[place // 2, np.arange(len(index))]
    halves = np.where(place % 2 == 1, words >> np.uint64(16), words & np.uint64(0xFFFF))
    return (halves.astype(np.float64) / 2**16).reshape(shape)


def quantize(x, axis, least_scale=1e-8, noise=None):
    """x (R, C) in its working type; axis None, 0 or 1: what one scale reduces over. q int8, scale of one dimension.

    noise: of uniform(), for stochastic rounding.
    """
    one = x.dtype.type
    with np.errstate(invalid="ignore"):
        largest = np.max(np.abs(x), axis=axis, keepdims=True, initial=0)
        scale = np.maximum(largest / one(127), one(least_scale))
        bad = ~np.isfinite(largest)
        scale = np.where(bad, one(np.nan), scale)
        levels = np.rint(x / scale) if noise is None else np.floor(x / scale + noise.astype(one))
        q = np.clip(levels, -127, 127)
    return np.where(np.broadcast_to(bad, x.shape), 0, q).astype(np.int8), scale.reshape(-1)


def accumulate(x, weight):
    """x (M, K) * weight (N, K)^T of integers, exact, as s32."""
    return (x.astype(np.int64) @ weight.astype(np.int64).T).astype(np.int32)


def linear(x, x_scale, weight, weight_scale, bias):
    """x (M, K), weight (N, K) int8; scales (M) or (1), (N) or (1); bias (N) or None. Not rounded to y's type yet."""
    one = x_scale.dtype.type
    product = x_scale.reshape(-1, 1) * weight_scale.reshape(1, -1)
    sums = accumulate(x, weight).astype(one)
    if bias is None:
        return sums * product
    m, n = sums.shape
    return _FMA[one](sums, np.broadcast_to(product, (m, n)), np.broadcast_to(bias, (m, n))).astype(one).reshape(m, n)


def linear_groups(x, x_scale, weight, weight_scale, bias):
    """linear() with weight_scale (N, G): the groups' sums are added in ascending order."""
    one, (m, k), (n, groups) = x_scale.dtype.type, x.shape, weight_scale.shape
    t, length = np.zeros((m, n), one), k // groups
    for g in range(groups):
        part = slice(g * length, (g + 1) * length)
        sums = accumulate(x[:, part], weight[:, part]).astype(one)
        t = _FMA[one](sums, np.broadcast_to(weight_scale[:, g], (m, n)), t).astype(one)
    x_scale = np.broadcast_to(x_scale.reshape(-1, 1), (m, n))
    return t * x_scale if bias is None else _FMA[one](t, x_scale, np.broadcast_to(bias, (m, n))).astype(one)


def gradient(d, integers, block, noise):
    """d (R, C) quantized with a scale for each row and block of C, times integers (K, C): (R, K)."""
    one, (rows, terms) = d.dtype.type, d.shape
    t = np.zeros((rows, integers.shape[0]), one)
    for first in range(0, terms, block or max(terms, 1)):
        part = slice(first, first + block if block else terms)
        q, s = quantize(d[:, part], 1, 2.0**-79, None if noise is None else noise[:, part])
        sums = accumulate(q, integers[:, part]).astype(one)
        t = _FMA[one](sums, np.broadcast_to(s.reshape(-1, 1), sums.shape), t).astype(one).reshape(t.shape)
    return t


def backward_int8(dy, weight, weight_scale, x, x_scale, seed=None, block=0):
    """dX (M, K) and dW (N, K) of int8 products, from dy (M, N), weight (N, K), x (M, K). Before the last rounding.

    seed: of stochastic rounding. block: terms of the contraction that share a scale of dY; 0: all.
    """
    noise = None if seed is None else uniform(dy.shape, seed)
    turned = None if noise is None else noise.T
    dx = gradient(dy * weight_scale.reshape(1, -1), weight.T, block, noise)
    dw = gradient((dy * x_scale.reshape(-1, 1)).T, x.T, block, turned)
    return dx, dw


def dequantize_s4(weight, k, scale, zero_point):
    """weight (N, ceil(k / 2)) of bytes, the low nibble first -> (N, k) in f64."""
    low, high = (weight & 15).astype(np.int64), (weight >> 4).astype(np.int64)
    q = np.stack([low, high], -1).reshape(weight.shape[0], 2 * weight.shape[1])[:, :k]
    q = np.where(q > 7, q - 16, q)
    group = k // scale.shape[1]
    z = 0 if zero_point is None else np.repeat(zero_point.astype(np.int64), group, 1)
    return (q - z) * np.repeat(scale.astype(np.float64), group, 1)


def assert_sum(actual, exact, magnitudes, terms, dtype, device, *, roundings=1):
    """actual, of dtype, is a float sum of `terms` products within the contract's bound of the exact one.

    magnitudes: the sum of the terms' magnitudes. On a GPU a 16-bit type rounds the dequantized operand as well.
    roundings: to dtype, of the sum and of what it is multiplied with afterwards.
    """
    unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    last = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}.get(dtype, unit)
    bound = (terms + 2 + roundings) * unit * magnitudes + roundings * last * np.abs(exact) + 1e-30
    if device.type == "cuda" and last != unit:
        bound = bound + 2 * last * magnitudes
    if dtype == torch.float16:
        bound = bound + 2.0**-24  # below its normal numbers
    error = np.abs(actual.detach().cpu().double().numpy() - exact)
    worst = np.max(error / bound, initial=0)
    assert worst <= 1, f"{worst} times the bound"
