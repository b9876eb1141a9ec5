"""Kernels in the tile language beside Triton and torch on one GPU: checks the results, then times all of them with the
same timer, in turns. Usage: cuda_bench.py FOLDER [NAME ...], with bench0.so and bench1.so in the folder and the
names of functions below; without names, all of them."""

import ctypes
import functools
import json
import sys

import torch
import triton
import triton.language as tl
from triton.testing import do_bench
from triton.tools.tensor_descriptor import TensorDescriptor

ROWS, COLUMNS = 32768, 4096
LOG2E = tl.constexpr(1.44269504)


@triton.jit
def add_kernel(x, z, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    tl.store(z + i, v + 10.0, mask=i < n)


@triton.jit
def softmax_kernel(x, z, n0, length, B0: tl.constexpr, B1: tl.constexpr):
    i = (tl.program_id(0) * B0 + tl.arange(0, B0))[:, None]
    running_max = tl.full((B0, 1), -float("inf"), tl.float32)
    total = tl.full((B0, 1), 0.0, tl.float32)
    for k in range(0, length, B1):
        j = (k + tl.arange(0, B1))[None, :]
        v = tl.load(x + i * length + j, mask=(i < n0) & (j < length), other=-float("inf"))
        new_max = tl.maximum(running_max, tl.max(v, axis=1, keep_dims=True))
        total *= tl.exp2(LOG2E * (running_max - new_max))
        total += tl.sum(tl.exp2(LOG2E * (v - new_max)), axis=1, keep_dims=True)
        running_max = new_max
    for k in range(0, length, B1):
        j = (k + tl.arange(0, B1))[None, :]
        inside = (i < n0) & (j < length)
        v = tl.load(x + i * length + j, mask=inside, other=-float("inf"))
        tl.store(z + i * length + j, tl.exp2(LOG2E * (v - running_max)) / total, mask=inside)


@triton.jit
def softmax_held_kernel(x, z, length, BLOCK: tl.constexpr):
    j = tl.arange(0, BLOCK)
    start = tl.program_id(0) * length
    v = tl.load(x + start + j, mask=j < length, other=-float("inf"))
    e = tl.exp2(LOG2E * (v - tl.max(v, axis=0)))
    tl.store(z + start + j, e / tl.sum(e, axis=0), mask=j < length)


@triton.jit
def round_to_byte(v):
    v = tl.minimum(tl.maximum(v, -127.0), 127.0)
    return (v + 12582912.0 - 12582912.0).to(tl.int8)  # ties to even


@triton.jit
def quantize_kernel(x, q, s, n0, length, B0: tl.constexpr, B1: tl.constexpr):
    i = (tl.program_id(0) * B0 + tl.arange(0, B0))[:, None]
    running_max = tl.full((B0, 1), 0.0, tl.float32)
    for k in range(0, length, B1):
        j = (k + tl.arange(0, B1))[None, :]
        v = tl.load(x + i * length + j, mask=(i < n0) & (j < length), other=0.0)
        running_max = tl.maximum(running_max, tl.max(tl.abs(v), axis=1, keep_dims=True))
    scale = tl.maximum(running_max / 127.0, 1e-8)
    tl.store(s + i, scale, mask=i < n0)
    for k in range(0, length, B1):
        j = (k + tl.arange(0, B1))[None, :]
        inside = (i < n0) & (j < length)
        v = tl.load(x + i * length + j, mask=inside, other=0.0)
        tl.store(q + i * length + j, round_to_byte(v / scale), mask=inside)


@triton.jit
def quantize_held_kernel(x, q, s, length, BLOCK: tl.constexpr):
    j = tl.arange(0, BLOCK)
    start = tl.program_id(0) * length
    v = tl.load(x + start + j, mask=j < length, other=0.0)
    scale = tl.maximum(tl.max(tl.abs(v), axis=0) / 127.0, 1e-8)
    tl.store(s + tl.program_id(0), scale)
    tl.store(q + start + j, round_to_byte(v / scale), mask=j < length)


@triton.jit
def sum_kernel(x, z, n0, length, B0: tl.constexpr, B1: tl.constexpr):
    i = (tl.program_id(0) * B0 + tl.arange(0, B0))[:, None]
    total = tl.full((B0, 1), 0.0, tl.float32)
    for k in range(0, length, B1):
        j = (k + tl.arange(0, B1))[None, :]
        total += tl.sum(tl.load(x + i * length + j, mask=(i < n0) & (j < length), other=0.0), axis=1, keep_dims=True)
    tl.store(z + i, total, mask=i < n0)


def configurations(blocks):
    """Of Triton's autotuner: rows, columns and terms of a block, warps, stages."""
    return [
        triton.Config({"BM": m, "BN": n, "BK": k, "GROUP": 8}, num_warps=w, num_stages=s) for m, n, k, w, s in blocks
    ]


@triton.jit
def place(n0, n1, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Programs in groups of rows, so that their operands stay in L2."""
    program = tl.program_id(0)
    rows, columns = tl.cdiv(n0, BM), tl.cdiv(n1, BN)
    first = program // (GROUP * columns) * GROUP
    height = tl.minimum(rows - first, GROUP)
    within = program % (GROUP * columns)
    return (first + within % height) * BM + tl.arange(0, BM), within // height * BN + tl.arange(0, BN)


@triton.autotune(
    configurations(((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 128, 64, 4, 4))),
    key=["n0", "n1", "middle"],
)
@triton.jit
def matmul_kernel(x, y, z, n0, n1, middle, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    i, j = place(n0, n1, BM, BN, GROUP)
    k = tl.arange(0, BK)
    a = x + (i % n0)[:, None] * middle + k[None, :]
    b = y + k[:, None] * n1 + (j % n1)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(0, middle, BK):
        in_k = k < middle - step
        total = tl.dot(tl.load(a, in_k[None, :], 0.0), tl.load(b, in_k[:, None], 0.0), total)
        a += BK
        b += BK * n1
    inside = (i < n0)[:, None] & (j < n1)[None, :]
    tl.store(z + i[:, None] * n1 + j[None, :], total.to(z.dtype.element_ty), inside)


@triton.autotune(
    configurations(
        (
            (128, 256, 128, 8, 3),
            (256, 128, 128, 8, 3),
            (128, 128, 128, 4, 4),
            (128, 128, 64, 4, 4),
            (128, 256, 64, 8, 4),
        )
    ),
    key=["batch", "inner", "out", "ALONG"],
)
@triton.jit
def forward_kernel(
    x, x_scale, w, w_scale, bias, y, batch, inner, out,
    ALONG: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    i, j = place(batch, out, BM, BN, GROUP)
    k = tl.arange(0, BK)
    a = x + (i % batch)[:, None] * inner + k[None, :]
    b = w + k[:, None] + (j % out)[None, :] * inner if ALONG else w + k[:, None] * out + (j % out)[None, :]
    total = tl.zeros((BM, BN), tl.int32)
    for step in range(0, inner, BK):
        in_k = k < inner - step
        total = tl.dot(tl.load(a, in_k[None, :], 0), tl.load(b, in_k[:, None], 0), total, out_dtype=tl.int32)
        a += BK
        b += BK if ALONG else BK * out
    scale = tl.load(x_scale) * tl.load(w_scale + j, j < out, 0.0)
    result = total.to(tl.float32) * scale[None, :] + tl.load(bias + j, j < out, 0.0)[None, :]
    inside = (i < batch)[:, None] & (j < out)[None, :]
    tl.store(y + i[:, None] * out + j[None, :], result.to(tl.float16), inside)


GRADIENT_BLOCKS = ((128, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 128, 32, 4, 4))


@triton.autotune(configurations(GRADIENT_BLOCKS), key=["batch", "inner", "out"])
@triton.jit
def dx_kernel(
    dy, w, w_scale, dx, batch, inner, out,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    i, j = place(batch, inner, BM, BN, GROUP)
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(0, out, BK):
        n = step + tl.arange(0, BK)
        a = tl.load(dy + (i % batch)[:, None] * out + n[None, :], (n < out)[None, :], 0.0)
        b = tl.load(w + (j % inner)[:, None] * out + n[None, :], (n < out)[None, :], 0)
        s = tl.load(w_scale + n, n < out, 0.0)
        total = tl.dot(a, tl.trans((b * s[None, :]).to(tl.float16)), total)
    inside = (i < batch)[:, None] & (j < inner)[None, :]
    tl.store(dx + i[:, None] * inner + j[None, :], total.to(tl.float16), inside)


@triton.autotune(configurations(GRADIENT_BLOCKS), key=["batch", "inner", "out"])
@triton.jit
def dw_kernel(
    x, x_scale, dy, dw, batch, inner, out,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    i, j = place(inner, out, BM, BN, GROUP)
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(0, batch, BK):
        m = step + tl.arange(0, BK)
        a = tl.load(x + m[:, None] * inner + (i % inner)[None, :], (m < batch)[:, None], 0)
        d = tl.load(dy + m[:, None] * out + (j % out)[None, :], (m < batch)[:, None], 0.0)
        total = tl.dot(tl.trans(a.to(tl.float16)), d, total)
    inside = (i < inner)[:, None] & (j < out)[None, :]
    tl.store(dw + i[:, None] * out + j[None, :], (total * tl.load(x_scale)).to(tl.float16), inside)


def set_blocks(arguments):
    """The blocks of attention_kernel's tensor descriptors, for a configuration."""
    for name, rows in (("q", "BM"), ("k", "BN"), ("v", "BN"), ("o", "BM")):
        arguments[name].block_shape = [arguments[rows], arguments["HEAD"]]


@triton.jit
def attention_part(
    total, weight, top, query, k, v, start, first, last, i, scale,
    DIAGONAL: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    for j in range(first, last, BN):
        j = tl.multiple_of(j, BN)
        scores = tl.dot(query, k.load([start + j, 0]).T)
        if DIAGONAL:
            inside = i[:, None] >= (j + tl.arange(0, BN))[None, :]
            scores = scores * scale + tl.where(inside, 0, -1.0e6)
            new_top = tl.maximum(top, tl.max(scores, 1))
            scores -= new_top[:, None]
        else:
            new_top = tl.maximum(top, tl.max(scores, 1) * scale)
            scores = scores * scale - new_top[:, None]
        p = tl.math.exp2(scores)
        faded = tl.math.exp2(top - new_top)
        added = tl.sum(p, 1)
        total = total * faded[:, None]
        total = tl.dot(p.to(tl.float16), v.load([start + j, 0]), total)
        weight = weight * faded + added
        top = new_top
    return total, weight, top


@triton.autotune(
    [
        triton.Config({"BM": 128, "BN": n}, num_warps=w, num_stages=s, pre_hook=set_blocks)
        for n in (64, 128)
        for w in (4, 8)
        for s in (2, 3, 4)
        if (n, w) != (128, 4)
    ],
    key=["n"],
)
@triton.jit
def attention_kernel(q, k, v, o, scale, n, HEAD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """As in Triton's tutorial of fused attention, forward, causal."""
    block = tl.program_id(0)
    start = tl.program_id(1) * n
    i = block * BM + tl.arange(0, BM)
    total = tl.zeros([BM, HEAD], tl.float32)
    weight = tl.zeros([BM], tl.float32) + 1.0
    top = tl.zeros([BM], tl.float32) - float("inf")
    query = q.load([start + block * BM, 0])
    total, weight, top = attention_part(
        total, weight, top, query, k, v, start, 0, block * BM, i, scale, False, BN)
    total, weight, top = attention_part(
        total, weight, top, query, k, v, start, block * BM, (block + 1) * BM, i, scale, True, BN)
    o.store([start + block * BM, 0], (total / weight[:, None]).to(tl.float16))


def autotuned(kernel, n0, n1, *arguments):
    """One candidate: the best of the autotuner's."""

    def grid(meta):
        return (triton.cdiv(n0, meta["BM"]) * triton.cdiv(n1, meta["BN"]),)

    kernel[grid](*arguments)
    torch.cuda.synchronize()
    return [(str(kernel.best_config), lambda: kernel[grid](*arguments))]


def pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def stream():
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def variants(function, *arguments):
    """The variants of a C function that exist, as callables."""
    found = []
    for variant in range(16):
        if function(variant, *arguments, stream()) != 0:
            break
        found.append((f"variant {variant}", lambda v=variant: function(v, *arguments, stream())))
    torch.cuda.synchronize()
    return found


def compare(name, work, unit, sides):
    """The best of each side, by the medians of a few rounds in turns."""
    times = {side: {} for side in sides}
    for _ in range(3):
        for side, candidates in sides.items():
            for label, call in candidates:
                ms = do_bench(call, warmup=10, rep=40, return_mode="median")
                times[side][label] = min(ms, times[side].get(label, ms))
    line, best = {"kernel": name}, {}
    for side, each in times.items():
        label = min(each, key=each.get)
        best[side] = each[label]
        line[side] = {"us": round(best[side] * 1e3, 1), unit: round(work / best[side] / 1e9, 3), "by": label}
        line[side]["each"] = {label: round(ms * 1e3, 1) for label, ms in each.items()}
    print(json.dumps(line), flush=True)
    return best


def verdict(text, value, minimum):
    print(f"{'PASS' if value >= minimum else 'MISS'}  {text}: {value:.1%} (at least {minimum:.0%})", flush=True)


WRONG = []


def expect(name, right):
    if not right:
        WRONG.append(name)
        print("WRONG", name, flush=True)


@functools.cache
def copy_rate():
    """Bytes a millisecond, read and written, of torch's copy of a matrix."""
    x = torch.randn(ROWS, COLUMNS, device="cuda")
    z = torch.empty_like(x)
    ms = min(do_bench(lambda: z.copy_(x), warmup=10, rep=40, return_mode="median") for _ in range(3))
    print(f"copy of {ROWS} x {COLUMNS} f32: {8 * x.numel() / ms / 1e9:.3f} TB/s", flush=True)
    return 8 * x.numel() / ms


def judge(name, times, bytes_moved):
    verdict(f"{name}, of Triton's speed", times["triton"] / times["tile"], 0.95)
    verdict(f"{name}, of a copy's rate", bytes_moved / times["tile"] / copy_rate(), 0.90)


def masked_add(library):
    n = 1 << 28
    x, z = torch.randn(n, device="cuda"), torch.empty(n, device="cuda")
    tile = variants(library.tile_masked_add, pointer(x), pointer(z), n)
    for label, call in tile:
        z.fill_(float("nan"))
        call()
        expect(f"masked add {label}", torch.equal(z, x + 10.0))
    triton_kernels = [
        (f"{b}/{w}", lambda b=b, w=w: add_kernel[(triton.cdiv(n, b),)](x, z, n, b, num_warps=w))
        for b, w in ((1024, 4), (1024, 8), (2048, 8), (4096, 8))
    ]
    judge("masked add", compare("masked add", 8 * n, "TB/s", {"tile": tile, "triton": triton_kernels}), 8 * n)


BLOCKS = ((1, 4096, 4), (1, 4096, 8), (1, 2048, 4), (4, 1024, 4))  # of Triton: rows, columns, warps


def softmax(library):
    x = torch.randn(ROWS, COLUMNS, device="cuda")
    z = torch.empty_like(x)
    exact = torch.softmax(x.double(), dim=1)
    shape = (pointer(x), pointer(z), ROWS, COLUMNS)
    two_passes = [
        (
            f"{b0}x{b1}/{w}",
            lambda b0=b0, b1=b1, w=w: softmax_kernel[(triton.cdiv(ROWS, b0),)](
                x, z, ROWS, COLUMNS, b0, b1, num_warps=w
            ),
        )
        for b0, b1, w in BLOCKS
    ]
    held = [
        (f"4096/{w}", lambda w=w: softmax_held_kernel[(ROWS,)](x, z, COLUMNS, 4096, num_warps=w)) for w in (4, 8, 16)
    ]
    for name, function, kernels in (
        ("softmax, two passes", library.tile_softmax, two_passes),
        ("softmax, two passes, Math::fast", library.tile_softmax_fast, two_passes),
        ("softmax, row held", library.tile_softmax_held, held),
    ):
        tile = variants(function, *shape)
        for label, call in tile:
            z.fill_(float("nan"))
            call()
            expect(f"{name} {label}", bool(((z - exact).abs() <= 4e-6 * exact + 1e-30).all()))
        judge(name, compare(name, 8 * x.numel(), "TB/s", {"tile": tile, "triton": kernels}), 8 * x.numel())


def quantize(library):
    x = torch.randn(ROWS, COLUMNS, device="cuda")
    q, s = torch.empty(ROWS, COLUMNS, dtype=torch.int8, device="cuda"), torch.empty(ROWS, device="cuda")
    scale = torch.clamp(x.abs().amax(dim=1) / torch.tensor(127.0, device="cuda"), min=1e-8)
    level = torch.clamp(torch.round(x / scale[:, None]), -127, 127).to(torch.int8)
    two_passes = [
        (
            f"{b0}x{b1}/{w}",
            lambda b0=b0, b1=b1, w=w: quantize_kernel[(triton.cdiv(ROWS, b0),)](
                x, q, s, ROWS, COLUMNS, b0, b1, num_warps=w
            ),
        )
        for b0, b1, w in BLOCKS
    ]
    held = [
        (f"4096/{w}", lambda w=w: quantize_held_kernel[(ROWS,)](x, q, s, COLUMNS, 4096, num_warps=w))
        for w in (4, 8, 16)
    ]
    for name, function, kernels in (
        ("row quantize, two passes", library.tile_quantize_rows, two_passes),
        ("row quantize, row held", library.tile_quantize_rows_held, held),
    ):
        tile = variants(function, pointer(x), pointer(q), pointer(s), ROWS, COLUMNS)
        for label, call in tile:
            q.fill_(99), s.fill_(-1)
            call()
            expect(f"{name} {label}", torch.equal(s, scale) and torch.equal(q, level))
        judge(name, compare(name, 5 * x.numel(), "TB/s", {"tile": tile, "triton": kernels}), 5 * x.numel())


def long_sum(library):
    x, z = torch.randn(ROWS, COLUMNS, device="cuda"), torch.empty(ROWS, device="cuda")
    exact, size = x.double().sum(dim=1), x.double().abs().sum(dim=1)
    tile = variants(library.tile_long_sum, pointer(x), pointer(z), ROWS, COLUMNS)
    for label, call in tile:
        z.fill_(float("nan"))
        call()
        expect(f"long sum {label}", bool(((z - exact).abs() <= 16 * 2.0**-24 * size).all()))
    triton_kernels = [
        (
            f"{b0}x{b1}/{w}",
            lambda b0=b0, b1=b1, w=w: sum_kernel[(triton.cdiv(ROWS, b0),)](x, z, ROWS, COLUMNS, b0, b1, num_warps=w),
        )
        for b0, b1, w in ((1, 4096, 4), (1, 2048, 4), (4, 1024, 4), (4, 2048, 4))
    ]
    judge(
        "long sum", compare("long sum", 4 * x.numel(), "TB/s", {"tile": tile, "triton": triton_kernels}), 4 * x.numel()
    )


def matmul(library):
    n = 4096
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.float16) for _ in range(2))
    y = torch.empty(n, n, device="cuda", dtype=torch.float16)
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    tile = variants(library.tile_matmul, pointer(a), pointer(b), pointer(y), n, n, n)
    for label, call in tile:
        y.fill_(float("nan"))
        call()
        bound = 2.0**-11 * exact.abs() + 2 * n * 2.0**-24 * size + 1e-4
        expect(f"matmul {label}", bool(((y.double() - exact).abs() <= bound).all()))
    cublas = [("torch", lambda: torch.mm(a, b, out=y))]
    times = compare("f16 matmul 4096", 2 * n**3, "TFLOP/s", {"tile": tile, "cublas": cublas})
    verdict("f16 matmul, of cuBLAS", times["cublas"] / times["tile"], 0.50)


def forward(library):
    n = 4096
    xq, wq = (torch.randint(-127, 128, (n, n), device="cuda", dtype=torch.int8) for _ in range(2))
    xs, ws = torch.tensor([0.013], device="cuda"), torch.rand(n, device="cuda") * 0.01
    bias, y = torch.randn(n, device="cuda").half(), torch.empty(n, n, device="cuda", dtype=torch.float16)
    arguments = (ctypes.c_void_p * 6)(*(t.data_ptr() for t in (xq, xs, wq, ws, bias, y)))
    tile = variants(library.tile_forward, arguments, n, n, n)
    exact = torch._int_mm(xq, wq).double() * (xs * ws).double() + bias.double()
    for label, call in tile:
        y.fill_(float("nan"))
        call()
        expect(f"forward {label}", bool(((y.double() - exact).abs() <= 2.0**-10 * exact.abs() + 1e-6).all()))
    cublas = [("_int_mm", lambda: torch._int_mm(xq, wq))]
    compare("s8 forward 4096", 2 * n**3, "TOP/s", {"tile": tile, "cublas": cublas})


def close(y, exact, bound):
    return bool(((y.double() - exact).abs() <= bound).all())


def matmul_wgmma(library):
    for name, n in (("f16", 4096), ("f16", 8192), ("bf16", 4096), ("bf16", 8192)):
        dtype, ours = {"f16": (torch.float16, library.tile_matmul_f16), "bf16": (torch.bfloat16, library.tile_matmul_bf16)}[name]
        a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
        y, z = (torch.empty(n, n, device="cuda", dtype=dtype) for _ in range(2))
        arguments = pointer(a), pointer(b), pointer(y), n, n, n
        tile = variants(ours, *arguments)
        if name == "f16":
            tuned = functools.partial(library.tile_matmul_tuned, *arguments, stream())
            expect(f"autotuned matmul {n}", tuned() == 0)
            tile.append(("autotuned", tuned))
        exact = torch.mm(a, b).double()  # the sums of both are within n 2^-24 of the products' size, about 0.64 n
        bound = torch.finfo(dtype).eps * exact.abs() + 0.13 * n * n * 2.0**-24
        for label, call in tile:
            y.fill_(float("nan"))
            call()
            expect(f"matmul of {name}, {n}, by WGMMA, {label}", close(y, exact, bound))
        sides = {
            "tile": tile,
            "triton": autotuned(matmul_kernel, n, n, a, b, z, n, n, n),
            "cublas": [("torch", functools.partial(torch.mm, a, b, out=z))],
        }
        times = compare(f"{name} matmul {n} by WGMMA", 2 * n**3, "TFLOP/s", sides)
        verdict(f"{name} matmul {n}, of Triton", times["triton"] / times["tile"], 0.95)
        verdict(f"{name} matmul {n}, of cuBLAS", times["cublas"] / times["tile"], 0.85)


def matmul_tf32(library):
    n = 4096
    torch.backends.cuda.matmul.allow_tf32 = True
    a, b = (torch.randn(n, n, device="cuda") for _ in range(2))
    y, z = torch.empty_like(a), torch.empty_like(a)
    exact = a.double() @ b.double().t()
    tile = variants(library.tile_matmul_tf32, pointer(a), pointer(b), pointer(y), n)
    for label, call in tile:
        y.fill_(float("nan"))
        call()
        expect(f"matmul in tf32, {label}", close(y, exact, 2.0**-10 * exact.abs() + 0.3))
    sides = {"tile": tile, "cublas": [("torch", functools.partial(torch.mm, a, b.t(), out=z))]}
    compare("tf32 matmul 4096", 2 * n**3, "TFLOP/s", sides)


def forward_wgmma(library):
    n = 4096
    xq, wq = (torch.randint(-127, 128, (n, n), device="cuda", dtype=torch.int8) for _ in range(2))
    xs, ws = torch.tensor([0.013], device="cuda"), torch.rand(n, device="cuda") * 0.01
    bias, y = torch.randn(n, device="cuda").half(), torch.empty(n, n, device="cuda", dtype=torch.float16)
    along = wq.t().contiguous()
    exact = torch._int_mm(xq, wq).double() * (xs * ws).double() + bias.double()
    for name, function, weights, is_along in (
        ("weights (in, out)", library.tile_forward_wgmma, wq, False),
        ("weights (out, in)", library.tile_forward_along, along, True),
    ):
        arguments = (ctypes.c_void_p * 6)(*(t.data_ptr() for t in (xq, xs, weights, ws, bias, y)))
        tile = variants(function, arguments, n, n, n)
        for label, call in tile:
            y.fill_(float("nan"))
            call()
            expect(f"forward by WGMMA, {name}, {label}", close(y, exact, 2.0**-10 * exact.abs() + 1e-6))
        z = torch.empty_like(y)
        call = autotuned(forward_kernel, n, n, xq, xs, weights, ws, bias, z, n, n, n, is_along)
        expect(f"Triton's forward, {name}", close(z, exact, 2.0**-10 * exact.abs() + 1e-6))
        sides = {"tile": tile, "triton": call, "cublas": [("_int_mm", functools.partial(torch._int_mm, xq, along.t()))]}
        times = compare(f"s8 forward 4096 by WGMMA, {name}", 2 * n**3, "TOP/s", sides)
        verdict(f"s8 forward, {name}, of Triton", times["triton"] / times["tile"], 1.0)


def gradients(library):
    n = 4096
    xq, wq = (torch.randint(-127, 128, (n, n), device="cuda", dtype=torch.int8) for _ in range(2))
    xs, ws = torch.tensor([0.013], device="cuda"), torch.rand(n, device="cuda") * 0.01
    dy, out = torch.randn(n, n, device="cuda").half(), torch.empty(n, n, device="cuda", dtype=torch.float16)
    z, room = torch.empty_like(out), torch.empty_like(out)
    w = (wq * ws).half()
    for name, function, tensors, exact, kernel, arguments in (
        ("dX", library.tile_dx, (dy, wq, ws, out, room), torch.mm(dy, w.t()).double(), dx_kernel, (dy, wq, ws, z)),
        (
            "dW",
            library.tile_dw,
            (xq, xs, dy, out),
            torch.mm(xq.half().t().float(), dy.float()).double() * xs.double(),
            dw_kernel,
            (xq, xs, dy, z),
        ),
    ):
        pointers = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
        tile = variants(function, pointers, n, n, n)
        bound = 2.0**-9 * exact.abs() + 2.0**-11 * exact.abs().mean()
        for label, call in tile:
            out.fill_(float("nan"))
            call()
            expect(f"{name} by WGMMA, {label}", close(out, exact, bound))
        call = autotuned(kernel, n, n, *arguments, n, n, n)
        expect(f"Triton's {name}", close(z, exact, bound))
        half = [("torch.mm of f16", lambda: torch.mm(dy, w, out=z))]
        times = compare(f"{name} 4096 by WGMMA", 2 * n**3, "TFLOP/s", {"tile": tile, "triton": call, "cublas": half})
        verdict(f"{name}, of Triton", times["triton"] / times["tile"], 1.8)


def attention(library):
    heads, n, head = 4 * 32, 4096, 128
    q, k, v = (torch.randn(heads, n, head, device="cuda", dtype=torch.float16) for _ in range(3))
    o = torch.empty_like(q)
    by_head = [t.view(4, heads // 4, n, head) for t in (q, k, v)]
    by_torch = functools.partial(torch.nn.functional.scaled_dot_product_attention, *by_head, is_causal=True)
    few = slice(0, heads, 37)
    scores = q[few].float() @ k[few].float().transpose(1, 2) * head**-0.5
    scores.masked_fill_(torch.ones(n, n, device="cuda", dtype=torch.bool).triu(1), -float("inf"))
    exact = torch.softmax(scores, dim=2) @ v[few].float()
    del scores
    scale = head**-0.5 * 1.44269504
    pointers = (ctypes.c_void_p * 4)(*(t.data_ptr() for t in (q, k, v, o)))
    tile = variants(library.tile_attention, pointers, heads, n, ctypes.c_float(scale))
    for label, call in tile:
        o.fill_(float("nan"))
        call()
        wrong = ((o[few].float() - exact).abs() > 2e-3 + 2e-3 * exact.abs()).sum().item()
        expect(f"attention {label}", wrong == 0 and not bool(o.isnan().any()))
    flat = [TensorDescriptor.from_tensor(t.view(heads * n, head), [128, head]) for t in (q, k, v, o)]
    o.fill_(float("nan"))

    def by_triton():
        attention_kernel[lambda meta: (triton.cdiv(n, meta["BM"]), heads)](*flat, scale, n, head)

    by_triton()
    expect("Triton's attention", bool(((o[few].float() - exact).abs() <= 2e-3 + 2e-3 * exact.abs()).all()))
    sides = {
        "tile": tile,
        "triton": [(str(attention_kernel.best_config), by_triton)],
        "torch": [("scaled_dot_product_attention", by_torch)],
    }
    times = compare("causal attention 4 x 32 x 4096 x 128", 2 * heads * n * n * head, "TFLOP/s", sides)
    verdict("attention, of Triton", times["triton"] / times["tile"], 0.9)


BENCHMARKS = {
    attention: 4,
    matmul_tf32: 4,
    matmul_wgmma: 2,
    forward_wgmma: 3,
    gradients: 3,
    masked_add: 0,
    softmax: 0,
    quantize: 0,
    long_sum: 0,
    matmul: 1,
    forward: 1,
}  # which library has it


def main():
    folder, names = sys.argv[1], sys.argv[2:]
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, flush=True)
    unknown = set(names) - {benchmark.__name__ for benchmark in BENCHMARKS}
    if unknown:
        raise SystemExit(
            f"no benchmark {', '.join(sorted(unknown))}; there are: "
            + ", ".join(benchmark.__name__ for benchmark in BENCHMARKS)
        )
    for benchmark, part in BENCHMARKS.items():
        if not names or benchmark.__name__ in names:
            benchmark(ctypes.CDLL(f"{folder}/bench{part}.so"))
    print("wrong:", ", ".join(WRONG) if WRONG else "none")
    return 1 if WRONG else 0


if __name__ == "__main__":
    sys.exit(main())
