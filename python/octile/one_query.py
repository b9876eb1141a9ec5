"""Attention of one query token a sequence over a cache, in Triton, which comes with torch for GPUs.

attend(query, key, value, mask, scale)

For each row of q, a head of a sequence, with p the cache's places that the mask shows:

    y = sum_p exp(q . k[p] scale) v[p] / sum_p exp(q . k[p] scale)

A program reads a span of the places once, for all heads that share its keys, from the first to the last place that is
shown. Where a cache has several spans, a second kernel combines their results. Spans depend on the cache's size alone, so
a sequence has the same bits in any batch with a cache of that size and the same padding.
"""

import contextlib
import math

import torch
import triton
import triton.language as tl

_STEP = (
    64  # places that a program reads at a time; half of it beyond a size of 128, for GPUs with 99 KB of shared memory
)
_SPAN = 256  # places of a program, more where there would be more than _MAX_SPANS
_MAX_SPANS = 64
_MAX_GROUP = 32  # heads that share keys


@triton.jit
def _attend_span(
    q, k, v, mask, y, sums, peaks, totals, scale, places,
    q_batch, q_head, k_batch, k_head, k_place, v_batch, v_head, v_place, mask_batch, mask_place,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    SPAN: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    # ROWS are GROUP and WIDTH is SIZE, padded.
    shared, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = shared // HEADS, shared % HEADS
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (rows < GROUP)[:, None] & (columns < SIZE)[None, :]
    at_row = (head * GROUP + rows)[:, None]
    queries = tl.load(q + batch * q_batch + at_row * q_head + columns[None, :], mask=inside, other=0)

    begin = span * SPAN
    all_places = begin + tl.arange(0, SPAN)
    shown = all_places < places
    if MASKED:
        shown &= tl.load(mask + batch * mask_batch + all_places * mask_place, mask=shown, other=0) != 0
    first = tl.min(tl.where(shown, all_places, begin + SPAN)) // STEP * STEP
    end = tl.max(tl.where(shown, all_places + 1, begin))

    peak = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, WIDTH], tl.float32)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    for step in range(first, end, STEP):
        at = step + tl.arange(0, STEP)
        seen = at < end
        if MASKED:
            seen &= tl.load(mask + batch * mask_batch + at * mask_place, mask=seen, other=0) != 0
        here = (at < places)[:, None] & (columns < SIZE)[None, :]
        keys = tl.load(k + at.to(tl.int64)[:, None] * k_place + columns[None, :], mask=here, other=0)
        values = tl.load(v + at.to(tl.int64)[:, None] * v_place + columns[None, :], mask=here, other=0)
        scores = tl.where(seen[None, :], tl.dot(queries, tl.trans(keys)) * scale, -float("inf"))
        # Finite from the first place on that is shown; until then there is nothing to scale.
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
        peak = higher
    if ALONE:
        result = tl.where(total[:, None] == 0, 0.0, result / total[:, None])
        to = y + (batch * HEADS * GROUP + at_row) * SIZE + columns[None, :]
        tl.store(to, result.to(y.dtype.element_ty), mask=inside)
    else:
        at_row = (shared * GROUP + rows) * tl.num_programs(1) + span
        tl.store(sums + at_row[:, None] * SIZE + columns[None, :], result, mask=inside)
        tl.store(peaks + at_row, peak, mask=rows < GROUP)
        tl.store(totals + at_row, total, mask=rows < GROUP)


@triton.jit
def _add_spans(
    sums, peaks, totals, y, spans, SIZE: tl.constexpr, WIDTH: tl.constexpr, SPANS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    span, columns = tl.arange(0, SPANS), tl.arange(0, WIDTH)
    peak = tl.load(peaks + row * spans + span, mask=span < spans, other=-float("inf"))
    total = tl.load(totals + row * spans + span, mask=span < spans, other=0.0)
    at = (row * spans + span)[:, None] * SIZE + columns[None, :]
    parts = tl.load(sums + at, mask=(span < spans)[:, None] & (columns < SIZE)[None, :], other=0.0)
    highest = tl.max(peak)
    weights = tl.exp2(peak - tl.where(highest == -float("inf"), 0.0, highest))
    total = tl.sum(weights * total)
    result = tl.sum(weights[:, None] * parts, 0)
    result = tl.where(total == 0, 0.0, result / total)
    tl.store(y + row * SIZE + columns, result.to(y.dtype.element_ty), mask=columns < SIZE)


def runs_on(device):
    """Whether attend() is for this device: an NVIDIA GPU from Ampere on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def takes(query, key, value, mask):
    """Whether attend() takes these tensors."""
    batch, heads, rows, size = query.shape
    shared, places = key.shape[1:3]
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.dtype == key.dtype == value.dtype
        and rows == 1
        and size <= 256
        and heads % shared == 0
        and heads // shared <= _MAX_GROUP
        and key.shape == value.shape == (batch, shared, places, size)
        and all(t.stride(-1) == 1 for t in (query, key, value))
        and (mask is None or (mask.dtype is torch.bool and mask.shape in ((batch, 1, 1, places), (1, 1, 1, places))))
    )


# Opaque to torch.compile, which cannot trace what the kernels write.
@torch.library.custom_op("octile::attend_one_query", mutates_args=())
def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """query: (batch, heads, 1, size); key and value: (batch, heads / groups, places, size); f16 or bf16, contiguous along
    size, which is 256 at most. mask: bool, (batch or 1, 1, 1, places), True where a place is shown, or None. scale:
    1 / sqrt(size) unless given. Returns (batch, 1, heads, size); zeros for a sequence of which no place is shown.
    """
    batch, heads, _, size = query.shape
    shared, places = key.shape[1], key.shape[2]
    span = max(_SPAN, triton.next_power_of_2(-(-places // _MAX_SPANS)))
    spans, width = -(-places // span), max(16, triton.next_power_of_2(size))
    rows = max(16, triton.next_power_of_2(heads // shared))  # tensor cores need at least 16
    y = _output(query, key, value, mask, scale)
    parts = [y] * 3
    if spans > 1:
        parts = [query.new_empty(batch, heads, spans, *last, dtype=torch.float32) for last in ((size,), (), ())]
    masked = mask is not None
    mask = mask.expand(batch, 1, 1, places) if masked else query
    with torch.cuda.device(query.device) if query.is_cuda else contextlib.nullcontext():
        _attend_span[batch * shared, spans](
            query, key, value, mask, y, *parts, (1 / math.sqrt(size) if scale is None else scale) * math.log2(math.e),
            places, *query.stride()[:2], *key.stride()[:3], *value.stride()[:3], mask.stride(0), mask.stride(3),
            HEADS=shared, GROUP=heads // shared, ROWS=rows, SIZE=size, WIDTH=width, SPAN=span,
            STEP=_STEP if width <= 128 else _STEP // 2, MASKED=masked, ALONE=spans == 1, num_warps=4, num_stages=3,
        )  # fmt: skip
        if spans > 1:
            padded = triton.next_power_of_2(spans)
            _add_spans[(batch * heads,)](*parts, y, spans, SIZE=size, WIDTH=width, SPANS=padded, num_warps=4)
    return y


@attend.register_fake
def _output(query, key, value, mask, scale):
    batch, heads, _, size = query.shape
    return query.new_empty(batch, 1, heads, size)
