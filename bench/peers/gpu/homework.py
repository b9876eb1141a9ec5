"""The homework's six kernels in Triton, as a student would hand them in: written plainly, autotuned over nine tiles.

Xq (M, K) has one scale, Wq (N, K) or (K, N) one per output channel. The layer rounds to f16 before it adds the bias.
"""

import torch
import triton
import triton.language as tl


# ---- Quantize: the whole tensor with one scale, in two passes; rows with a scale each ----


@triton.jit
def _absolute_maximum(x, maximum, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.atomic_max(maximum, tl.max(tl.abs(value)))


@triton.jit
def _quantize_global(x, q, maximum, scale, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.maximum(tl.load(maximum) / 127.0, 1e-8)
    value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32) / s
    rounded = tl.extra.cuda.libdevice.rint(value)
    tl.store(q + at, tl.clamp(rounded, -127.0, 127.0).to(tl.int8), mask=at < count)
    if tl.program_id(0) == 0:
        tl.store(scale, s)


@triton.jit
def _quantize_rows(x, q, scale, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    value = tl.load(x + row * columns + at, mask=at < columns, other=0.0).to(tl.float32)
    s = tl.maximum(tl.max(tl.abs(value)) / 127.0, 1e-8)
    tl.store(scale + row, s)
    rounded = tl.extra.cuda.libdevice.rint(value / s)
    tl.store(q + row * columns + at, tl.clamp(rounded, -127.0, 127.0).to(tl.int8), mask=at < columns)


def quantize_global(x, q, scale, maximum):
    maximum.zero_()
    grid = (triton.cdiv(x.numel(), 8192),)
    _absolute_maximum[grid](x, maximum, x.numel(), 8192)
    _quantize_global[grid](x, q, maximum, scale, x.numel(), 8192)


def quantize_rows(x, q, scale):
    columns = x.shape[1]
    _quantize_rows[(x.shape[0],)](x, q, scale, columns, triton.next_power_of_2(columns), num_warps=8)


# ---- Forward: Y (M, N) = Xq * Wq^T * scales + bias ----


def tiles():
    """(rows, columns, depth, warps, stages)"""
    sizes = [
        (128, 256, 64, 8, 4),
        (128, 128, 128, 8, 3),
        (128, 256, 128, 8, 3),
        (256, 128, 128, 8, 3),
        (64, 128, 128, 4, 4),
        (16, 128, 128, 4, 4),
        (16, 64, 256, 4, 4),
        (64, 64, 128, 4, 4),
        (128, 128, 64, 4, 4),
    ]
    return [
        triton.Config({"BM": rows, "BN": columns, "BK": depth}, num_warps=warps, num_stages=stages)
        for rows, columns, depth, warps, stages in sizes
    ]


def programs(rows, columns):
    return lambda tile: (triton.cdiv(rows, tile["BM"]) * triton.cdiv(columns, tile["BN"]),)


@triton.autotune(tiles(), key=["M", "N", "K"])
@triton.jit
def _forward(
    xq, x_scale, wq, w_scale, bias, y, M, K, N, w_step_k, w_step_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    # Eight rows of tiles go together down the columns, so that their tiles of W are still in L2.
    program, tall, tiles_m, tiles_n = tl.program_id(0), 8, tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = program // (tall * tiles_n) * tall
    height = min(tiles_m - first, tall)
    tile_m = first + (program % (tall * tiles_n)) % height
    tile_n = (program % (tall * tiles_n)) // height

    m, n, k = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    sums = tl.zeros((BM, BN), tl.int32)
    x_at = xq + m[:, None] * K + k[None, :]
    w_at = wq + k[:, None] * w_step_k + n[None, :] * w_step_n
    for done in range(0, K, BK):
        x = tl.load(x_at, mask=(m[:, None] < M) & (k[None, :] + done < K), other=0)
        w = tl.load(w_at, mask=(n[None, :] < N) & (k[:, None] + done < K), other=0)
        sums = tl.dot(x, w, sums, out_dtype=tl.int32)
        x_at += BK
        w_at += BK * w_step_k
    scale = tl.load(x_scale) * tl.load(w_scale + n, mask=n < N, other=0.0)
    value = (sums.to(tl.float32) * scale[None, :]).to(tl.float16)
    value += tl.load(bias + n, mask=n < N, other=0.0)[None, :]
    tl.store(y + m[:, None] * N + n[None, :], value, mask=(m[:, None] < M) & (n[None, :] < N))


def forward(xq, x_scale, wq, w_scale, bias, y):
    """wq is (N, K), or a view of that shape of a (K, N) tensor."""
    (rows, depth), columns = xq.shape, wq.shape[0]
    step_n, step_k = wq.stride()
    grid = programs(rows, columns)
    _forward[grid](xq, x_scale, wq, w_scale, bias, y, rows, depth, columns, step_k, step_n)


# ---- Backward: dX = dY * dequant(Wq)^T, dW = dequant(Xq)^T * dY, dB = sum of dY; Wq is (IN, OUT), of any strides ----


@triton.autotune(tiles(), key=["M", "N", "K", "w_step_k"])
@triton.jit
def _dx(
    dy, wq, w_scale, dx, M, N, K, w_step_n, w_step_k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    # dX (M, N = IN) = dY (M, K = OUT) * Wq (IN, OUT)^T
    tile_m, tile_n = tl.program_id(0) // tl.cdiv(N, BN), tl.program_id(0) % tl.cdiv(N, BN)
    m, n, k = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    sums = tl.zeros((BM, BN), tl.float32)
    for done in range(0, K, BK):
        at = done + k
        d = tl.load(dy + m[:, None] * K + at[None, :], mask=(m[:, None] < M) & (at[None, :] < K), other=0.0)
        w_at = wq + n[None, :] * w_step_n + at[:, None] * w_step_k
        w = tl.load(w_at, mask=(n[None, :] < N) & (at[:, None] < K), other=0)
        scale = tl.load(w_scale + at, mask=at < K, other=0.0)
        sums = tl.dot(d, (w.to(tl.float32) * scale[:, None]).to(tl.float16), sums)
    tl.store(dx + m[:, None] * N + n[None, :], sums.to(tl.float16), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.autotune(tiles(), key=["M", "N", "K"])
@triton.jit
def _dw(xq, x_scale, dy, dw, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    # dW (M = IN, N = OUT) = Xq (K = batch, IN)^T * dY (batch, OUT)
    tile_m, tile_n = tl.program_id(0) // tl.cdiv(N, BN), tl.program_id(0) % tl.cdiv(N, BN)
    m, n, k = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    sums = tl.zeros((BM, BN), tl.float32)
    for done in range(0, K, BK):
        at = done + k
        x = tl.load(xq + at[None, :] * M + m[:, None], mask=(m[:, None] < M) & (at[None, :] < K), other=0)
        d = tl.load(dy + at[:, None] * N + n[None, :], mask=(n[None, :] < N) & (at[:, None] < K), other=0.0)
        sums = tl.dot(x.to(tl.float16), d, sums)
    value = (sums * tl.load(x_scale)).to(tl.float16)
    tl.store(dw + m[:, None] * N + n[None, :], value, mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def _db(dy, db, M, N, BM: tl.constexpr, BN: tl.constexpr):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    sums = tl.zeros((BN,), tl.float32)
    for done in range(0, M, BM):
        m = done + tl.arange(0, BM)
        d = tl.load(dy + m[:, None] * N + n[None, :], mask=(m[:, None] < M) & (n[None, :] < N), other=0.0)
        sums += tl.sum(d.to(tl.float32), 0)
    tl.store(db + n, sums.to(tl.float16), mask=n < N)


def dx(dy, wq, w_scale, out):
    """wq is (IN, OUT), or a view of that shape of an (OUT, IN) tensor."""
    (batch, columns), depth = dy.shape, wq.shape[0]
    _dx[programs(batch, depth)](dy, wq, w_scale, out, batch, depth, columns, *wq.stride())


def dw(dy, xq, x_scale, out):
    """out is (IN, OUT), as the homework has it."""
    (batch, columns), depth = dy.shape, xq.shape[1]
    _dw[programs(depth, columns)](xq, x_scale, dy, out, depth, columns, batch)


def db(dy, out):
    batch, columns = dy.shape
    _db[(triton.cdiv(columns, 64),)](dy, out, batch, columns, 64, 64)
