"""Attention of one query token per sequence for GPUs, in Triton, which comes with torch for them: see one_query.py.

For each row of q, a head of a sequence, over the positions p of the cache that the mask lets through:

    y = sum_p exp(q . k[p] scale) v[p] / sum_p exp(q . k[p] scale)

Split-KV: a program reads a part of the cache once, for all query heads of a KV head, from the first to the last visible
position. If there are several splits, a second kernel combines their results. Splits depend on the cache's size alone,
so a sequence has the same bits in any batch with a cache of that size and the same padding.
"""

import inspect
import math

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton before 3.4
    gdc_launch_dependents = gdc_wait = None

# Positions that a program reads at a time; half as many beyond a head size of 128, for GPUs with 99 KB of shared memory.
_STEP = 64
_SPLIT = 256  # positions of a program, more if there would be more than _MAX_SPLITS
_MAX_SPLITS = 64
# Triton 3.4 cannot compile these functions: its compiler passes an argument that they do not have.
_CAN_WAIT = gdc_wait is not None and "_semantic" in inspect.signature(gdc_wait).parameters


@triton.jit
def _attend_split(
    q, k, v, mask, y, partial, maxima, denominators, scale, positions,
    q_batch, q_head, k_batch, k_head, k_position, v_batch, v_head, v_position, mask_batch, mask_position,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    SPLIT: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr, ALONE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # ROWS are GROUP and WIDTH is SIZE, padded; q_batch and the like are strides.
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    pair, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = pair // KV_HEADS, pair % KV_HEADS
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (rows < GROUP)[:, None] & (columns < SIZE)[None, :]
    at_row = (head * GROUP + rows)[:, None]
    queries = tl.load(q + batch * q_batch + at_row * q_head + columns[None, :], mask=inside, other=0)

    begin = split * SPLIT
    all_positions = begin + tl.arange(0, SPLIT)
    visible = all_positions < positions
    if MASKED:
        visible &= tl.load(mask + batch * mask_batch + all_positions * mask_position, mask=visible, other=0) != 0
    first = tl.min(tl.where(visible, all_positions, begin + SPLIT)) // STEP * STEP
    end = tl.max(tl.where(visible, all_positions + 1, begin))

    row_max = tl.full([ROWS], -float("inf"), tl.float32)
    denominator = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([ROWS, WIDTH], tl.float32)
    k += batch * k_batch + head * k_head
    v += batch * v_batch + head * v_head
    for step in range(first, end, STEP):
        at = step + tl.arange(0, STEP)
        step_visible = at < end
        if MASKED:
            step_visible &= tl.load(mask + batch * mask_batch + at * mask_position, mask=step_visible, other=0) != 0
        here = (at < positions)[:, None] & (columns < SIZE)[None, :]
        keys = tl.load(k + at.to(tl.int64)[:, None] * k_position + columns[None, :], mask=here, other=0)
        values = tl.load(v + at.to(tl.int64)[:, None] * v_position + columns[None, :], mask=here, other=0)
        scores = tl.where(step_visible[None, :], tl.dot(queries, tl.trans(keys)) * scale, -float("inf"))
        # Finite from the first visible position on; until then there is nothing to scale.
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        base = tl.where(new_max == -float("inf"), 0.0, new_max)
        weights = tl.exp2(scores - base[:, None])
        rescale = tl.exp2(row_max - base)
        denominator = denominator * rescale + tl.sum(weights, 1)
        accumulator = accumulator * rescale[:, None] + tl.dot(weights.to(values.dtype), values)
        row_max = new_max
    if ALONE:
        accumulator = tl.where(denominator[:, None] == 0, 0.0, accumulator / denominator[:, None])
        to = y + (batch * KV_HEADS * GROUP + at_row) * SIZE + columns[None, :]
        tl.store(to, accumulator.to(y.dtype.element_ty), mask=inside)
    else:
        at_row = (pair * GROUP + rows) * tl.num_programs(1) + split
        tl.store(partial + at_row[:, None] * SIZE + columns[None, :], accumulator, mask=inside)
        tl.store(maxima + at_row, row_max, mask=rows < GROUP)
        tl.store(denominators + at_row, denominator, mask=rows < GROUP)


@triton.jit
def _add_splits(
    partial, maxima, denominators, y, splits, SIZE: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    split, columns = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    row_max = tl.load(maxima + row * splits + split, mask=split < splits, other=-float("inf"))
    denominator = tl.load(denominators + row * splits + split, mask=split < splits, other=0.0)
    at = (row * splits + split)[:, None] * SIZE + columns[None, :]
    parts = tl.load(partial + at, mask=(split < splits)[:, None] & (columns < SIZE)[None, :], other=0.0)
    highest = tl.max(row_max)
    weights = tl.exp2(row_max - tl.where(highest == -float("inf"), 0.0, highest))
    denominator = tl.sum(weights * denominator)
    accumulator = tl.sum(weights[:, None] * parts, 0)
    accumulator = tl.where(denominator == 0, 0.0, accumulator / denominator)
    tl.store(y + row * SIZE + columns, accumulator.to(y.dtype.element_ty), mask=columns < SIZE)


def _starts_early(device):
    """How to launch: whether a kernel may start before the preceding one has ended (programmatic dependent launch, Hopper
    and newer). It reads nothing until that one has."""
    early = _CAN_WAIT and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": early} | ({"launch_pdl": True} if early else {})


def attend(query, key, value, mask, scale):
    """For tensors that have been checked. torch.compile cannot trace what the kernels write: an operator calls this."""
    batch, heads, _, size = query.shape
    kv_heads, positions = key.shape[1], key.shape[2]
    if positions == 0:
        return query.new_zeros(batch, 1, heads, size)
    split = max(_SPLIT, triton.next_power_of_2(-(-positions // _MAX_SPLITS)))
    splits, width = -(-positions // split), max(16, triton.next_power_of_2(size))
    rows = max(16, triton.next_power_of_2(heads // kv_heads))  # tensor cores need at least 16
    y = query.new_empty(batch, 1, heads, size)
    parts = [y] * 3
    if splits > 1:
        parts = [query.new_empty(batch, heads, splits, *last, dtype=torch.float32) for last in ((size,), (), ())]
    masked = mask is not None
    mask = mask.expand(batch, 1, 1, positions) if masked else query
    early = _starts_early(query.device)
    with torch.cuda.device_of(query):
        _attend_split[batch * kv_heads, splits](
            query, key, value, mask, y, *parts, (1 / math.sqrt(size) if scale is None else scale) * math.log2(math.e),
            positions, *query.stride()[:2], *key.stride()[:3], *value.stride()[:3], mask.stride(0), mask.stride(3),
            KV_HEADS=kv_heads, GROUP=heads // kv_heads, ROWS=rows, SIZE=size, WIDTH=width, SPLIT=split,
            STEP=_STEP if width <= 128 else _STEP // 2, MASKED=masked, ALONE=splits == 1, num_warps=4, num_stages=3,
            **early,
        )  # fmt: skip
        if splits > 1:
            padded = triton.next_power_of_2(splits)
            _add_splits[(batch * heads,)](
                *parts, y, splits, SIZE=size, WIDTH=width, SPLITS=padded, num_warps=4, **early
            )
    return y
