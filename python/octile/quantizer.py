"""Weights to 8 and 4 bits: each value to the nearest level, or better; and the layouts of levels in memory and files."""

import warnings

import torch
from torch import nn

from . import _c, _ops, _plans  # noqa: F401  (_ops registers torch.ops.octile)

METHODS = {"nearest": _c.METHOD_NEAREST, "clip": _c.CLIP_SEARCH, "feedback": _c.ERROR_FEEDBACK}


def nearest_s8(w, group, per_channel):
    """w (N, K) as int8 (N, K), and scales: (N), (1) unless per_channel, (N, K / group) for a group."""
    n, k = w.shape
    rows = w.reshape(n * (k // group), group) if group else w
    granularity = _c.PER_ROW if per_channel else _c.PER_TENSOR
    q, _, scale = torch.ops.octile.quantize(rows, granularity, _c.ROW_MAJOR)
    if group is not None:
        scale = scale.reshape(n, k // group if group else 1)
    return (q.reshape(w.shape) if group else q), scale


def nearest_s8_into(w, weight, scale, group):
    """What nearest_s8() gives of w (N, K), into weight and scale as that has made them: they stay where they are."""
    if w.numel() == 0:
        return
    if group:
        w, weight, scale = w.reshape(-1, group), weight.view(-1, group), scale.view(-1)
    w = _plans.readable(w)
    granularity = _c.PER_TENSOR if scale.numel() == 1 and len(w) != 1 else _c.PER_ROW
    fields = {"rows": w.shape[0], "cols": w.shape[1], "x": _plans.DTYPES[w.dtype]}
    plan = _plans.plan("quantize", w.device, **fields, granularity=granularity, orientation=_c.ROW_MAJOR)
    views = {"x": _plans.view(w), "q": _plans.view(weight), "scale": _plans.view(scale.view(-1))}
    _plans.run("quantize", plan, _c.QuantizeArguments, views, w.device)
    torch.autograd.graph.increment_version((weight, scale))  # the kernel writes past torch


def aligned(weight):
    """An int8 weight (N, K), or a copy whose rows begin at multiples of 16, as kernels like it."""
    n, k = weight.shape
    if weight.is_meta or (weight.stride() == (weight.stride(0), 1) and weight.stride(0) % 16 == 0):
        return weight
    return weight.new_empty_strided((n, k), ((k + 15) // 16 * 16, 1)).copy_(weight)


def nearest_packed(w, group, bits):
    """w (N, K) as bytes of 8 / bits values each, the first in the lowest bits, and scales (N, K / group)."""
    parts = [_packed_rows(rows, group, bits) for rows in _some_rows(w)]
    return tuple(part[0] if len(parts) == 1 else torch.cat(part) for part in zip(*parts, strict=True))


def _some_rows(w):
    """w (N, K) in parts, so that what is computed of each stays small: on a CPU, in its cache."""
    values = 2**18 if w.device.type == "cpu" else 2**24
    return w.split(max(1, values // max(w.shape[1], 1)))


def _packed_rows(w, group, bits):
    n, k = w.shape
    high = (1 << bits - 1) - 1
    length = group or max(k, 1)
    values = w.to(torch.float64 if w.dtype is torch.float64 else torch.float32).reshape(n, k // length, length)
    scale = _nearest_scale(values, high)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    q = (values / scale).round().clamp(-high - 1, high).nan_to_num(0).to(torch.int8).reshape(n, k)
    return pack(q, bits), scale.squeeze(-1).contiguous()


def _nearest_scale(values, high):
    """Of each group (..., K), the scale of the minimum squared error among those of weight_quantizer.h."""
    low, top = (values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0))
    largest = torch.maximum(-low, top)

    def over(t, number):
        return t / torch.full_like(t, number)  # a GPU multiplies by 1 / number for a number's sake

    scale = over(largest, high).clamp(min=1e-8)
    min_error = _squared_error(values, scale, high)
    full = torch.maximum(over(-low, high + 1), over(top, high))
    for candidate in (full, over(largest, high + 0.5), over(largest, high + 1)):
        candidate = candidate.clamp(min=1e-8)
        error = _squared_error(values, candidate, high)
        better = error < min_error
        scale, min_error = torch.where(better, candidate, scale), torch.where(better, error, min_error)
    return scale


def _squared_error(values, scale, high):
    """In the order of rounding_errors() in src/calibration/weight_scales.cpp, so that near ties are decided alike."""
    error = (values * (torch.ones_like(scale) / scale)).clamp(-high - 1, high).round() * scale - values
    lanes = nn.functional.pad(error * error, (0, -error.shape[-1] % 16)).unflatten(-1, (-1, 16))
    sums = lanes[..., 0, :]
    for i in range(1, lanes.shape[-2]):
        sums = sums + lanes[..., i, :]
    sums = sums.double()
    for half in (8, 4, 2, 1):
        sums = sums[..., :half] + sums[..., half:]
    return sums


def by_the_library(w, format, method, second_moments):
    """w (N, K) as `format` has it, and its scales, by a method of octile/weight_quantizer.h, on the CPU.

    method: "clip" or "feedback". second_moments (K, K): of the inputs; "feedback" needs it, "clip" weighs errors with it.
    """
    weight = w.detach().cpu().contiguous()
    (n, k), moments = weight.shape, None if second_moments is None else second_moments.detach().cpu().contiguous()
    q, scale, _ = format.zeros(n, k, torch.float32, device="cpu")
    fields = format.fields()
    description = {"n": n, "k": k, "group": fields["group"], "weight": fields["weight"]}
    description |= {"w": _plans.DTYPES[w.dtype], "method": METHODS[method], "threads": torch.get_num_threads()}
    _plans.library().quantize_weight(
        description,
        weight=_plans.view(weight),
        second_moments=None if moments is None else _plans.view(moments),
        q=_plans.view_of_levels(q, k),
        scale=_plans.view(scale),
    )
    return q.to(w.device), scale.to(w.device, torch.float64 if w.dtype is torch.float64 else torch.float32)


def warn_of_vanished(w, q, group=0):
    """Warns of rows of w (N, K), or groups of them, that q, integers of that shape, has as zeros and w has not."""
    if w.is_meta:
        return
    length, vanished = group or max(w.shape[1], 1), 0
    for levels, values in zip(_some_rows(q), _some_rows(w), strict=True):
        levels, values = (t.unflatten(1, (w.shape[1] // length, length)) for t in (levels, values))
        zeros = (levels == 0).all(-1)
        vanished += (zeros & (values != 0).any(-1) & values.isfinite().all(-1)).sum()
    if vanished := int(vanished):
        warnings.warn(
            f"octile: {vanished} of {w.numel() // length} {'groups' if group else 'rows'} of a weight {tuple(w.shape)} "
            "became all zero: their values are too small for the smallest scale, 1e-8",
            stacklevel=5,
        )


def pack(q, bits=4):
    """int8 (N, K) of values of few bits -> bytes (N, ceil(K * bits / 8))."""
    each = 8 // bits
    q = nn.functional.pad(q, (0, -q.shape[1] % each)).to(torch.uint8) & ((1 << bits) - 1)
    packed = q[:, 0::each]
    for i in range(1, each):
        packed = packed | (q[:, i::each] << (bits * i))
    return packed.contiguous()  # also of a transposed weight


def unpack(packed, k):
    """bytes (N, ceil(k * bits / 8)) -> int8 (N, k)."""
    bits = _c.packed_bits(packed.shape[1], k)
    if bits is None:
        raise ValueError(f"octile: {tuple(packed.shape)} of uint8 does not hold {k} values a row")
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    values = torch.stack(parts, -1).flatten(1)[:, :k].to(torch.int8)
    return torch.where(values >= 1 << bits - 1, values - (1 << bits), values)


# ---- As files have them: int32 words of levels, each stored plus half its range, the first in the lowest bits ----


def unpack_words(words, k, bits=4):
    """int32 (R, ceil(k * bits / 32)) -> int8 (R, k)."""
    values = (words.unsqueeze(-1) >> torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)) & (
        (1 << bits) - 1
    )
    return (values.flatten(1)[:, :k] - (1 << bits - 1)).to(torch.int8).contiguous()


def pack_words(q, bits=4):
    """int8 (R, K) -> int32 (R, ceil(K * bits / 32))."""
    count = 32 // bits
    q = nn.functional.pad(q, (0, -q.shape[1] % count)).to(torch.int32) + (1 << bits - 1)
    words = torch.zeros(q.shape[0], q.shape[1] // count, dtype=torch.int32, device=q.device)
    for i in range(count):
        words |= q[:, i::count] << (bits * i)
    return words


# ---- From the packed weight: docs/reference/packed-weights.md ----

_PANEL = 16


def _take(packed, at, count, dtype):
    size = count * dtype.itemsize
    return packed[at : at + size].view(dtype), at + size


def unpack_panels(packed, n, k, format):
    """weight, weight_scale and weight_zero_point, or None, of packed bytes, as `format` has them."""
    s4, group = format.bits == 4, format.group or max(k, 1)
    panels, groups = -(-n // _PANEL), max(k // group, 1)
    unit = 8 if s4 else 32 if group == 32 and groups > 1 else 64
    depth, count = -(-group // unit) * unit, panels * groups * _PANEL

    def by_row(t):
        rows = t.reshape(panels, groups, _PANEL).transpose(1, 2).reshape(-1, groups)[:n]
        return rows.clone(memory_format=torch.contiguous_format)

    values, at = _take(packed, 0, count * depth // (2 if s4 else 1), torch.uint8 if s4 else torch.int8)
    at += 0 if s4 else 4 * count  # the sums
    scale, at = _take(packed, at, count, torch.float32)
    values = values.reshape(panels, groups, -1, _PANEL, 1, 4)
    if s4:
        values = torch.cat((values & 15, values >> 4), -2).to(torch.int8) - 8
    values = values.permute(0, 3, 1, 2, 4, 5).reshape(panels * _PANEL, groups, depth)[:n, :, :group].reshape(n, k)
    points = by_row(_take(packed, at, count, torch.uint8)[0]).int() - 8 if format.zero_point else None
    scale = by_row(scale)
    return pack(values) if s4 else values.contiguous(), scale.flatten() if format.group is None else scale, points
