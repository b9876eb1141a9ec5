"""Norms with int8 output: their bits against the contract in numpy, and gradients against torch's."""

import copy

import numpy as np
import octile
import op_reference
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from octile import _c
from octile.quantized_input import layer_norm, rms_norm
from torch import nn
from torch.utils.checkpoint import checkpoint

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
NORMS = [_c.RMS_NORM, _c.LAYER_NORM]
norm_quantize = torch.ops.octile.norm_quantize
quantize = torch.ops.octile.quantize


def draw(generator, device, *size, dtype=FULL):
    return torch.randn(size, generator=generator).to(device, dtype)


def off(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# ---- Bits ----


def sum_of(lanes, rows):
    """Of (R, C) in the contract's order; lanes(t, column) adds a column of 1,024 at most."""
    t = np.zeros((rows.shape[0], 1024), np.float32)
    for c in range(0, rows.shape[1], 1024):
        part = rows[:, c : c + 1024]
        t[:, : part.shape[1]] = lanes(t[:, : part.shape[1]], part)
    while t.shape[1] > 1:
        t = t[:, ::2] + t[:, 1::2]
    return t[:, 0]


def fma(a, b, c):
    return op_reference._FMA[np.float32](a, b, c).astype(np.float32)


def norm(x, weight, bias, eps):
    """h of x (R, C) in float32, mean and rstd: docs/reference/contract.md, "Prologues"."""
    terms = np.float32(x.shape[1])
    mean = np.zeros(x.shape[0], np.float32) if bias is None else sum_of(np.add, x) / terms
    d = x - mean[:, None]
    rstd = np.float32(1) / np.sqrt(sum_of(lambda t, part: fma(part, part, t), d) / terms + np.float32(eps))
    z = d * rstd[:, None]
    return z * weight if bias is None else fma(z, weight, np.broadcast_to(bias, z.shape)), mean, rstd


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("prologue", NORMS)
@pytest.mark.parametrize("dtype", [HALF, BRAIN, FULL])
def test_bits_are_the_contracts(dtype, prologue, residual, device, generator):
    for rows, columns in ((1, 8), (33, 200), (5, 1032), (3, 7), (2, 4096)):
        x = 2 * draw(generator, device, rows, columns, dtype=dtype)
        added = draw(generator, device, rows, columns, dtype=dtype) if residual else None
        weight = draw(generator, device, columns, dtype=dtype if rows % 2 else FULL)
        bias = draw(generator, device, columns, dtype=weight.dtype) if prologue == _c.LAYER_NORM else None
        found = norm_quantize(x, weight, bias, added, prologue, _c.BOTH, 1e-5)
        q, q_transposed, scale, total, mean, rstd = found
        assert torch.equal(q_transposed, q.t())
        expected_sum = x + added if residual else x
        if residual:
            assert torch.equal(total, expected_sum)
        h, expected_mean, expected_rstd = norm(
            *(None if t is None else op_reference.wide(t) for t in (expected_sum, weight, bias)), 1e-5
        )
        expected, _, expected_scale = quantize(op_reference.narrow(h, dtype), _c.PER_ROW, _c.ROW_MAJOR)
        assert torch.equal(q.cpu(), expected) and torch.equal(scale.cpu(), expected_scale)
        assert torch.equal(rstd.cpu(), torch.from_numpy(expected_rstd))
        if bias is not None:
            assert torch.equal(mean.cpu(), torch.from_numpy(expected_mean))
        if device.type == "cuda":
            there = (None if t is None else t.cpu() for t in (x, weight, bias, added))
            there = norm_quantize(*there, prologue, _c.BOTH, 1e-5)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(found, there, strict=True))


def test_bad_values_spoil_their_row(device):
    x = torch.ones(3, 16, device=device, dtype=BRAIN)
    x[1, 3] = float("nan")
    x[2, 5] = float("-inf")
    q, _, scale, *_ = norm_quantize(x, torch.ones(16, device=device), None, None, _c.RMS_NORM, _c.BOTH, 1e-6)
    assert scale.isnan().tolist() == [False, True, True]
    assert not q[1:].any()


# ---- Gradients ----


class Block(nn.Module):
    """A norm and the layers behind it. Fused or not: its layers are octile's."""

    def __init__(self, device, centred, backward, fused, dtype=FULL):
        super().__init__()
        torch.manual_seed(0)
        words = {"device": device, "dtype": dtype}
        kind = (octile if fused else nn).LayerNorm if centred else (octile if fused else nn).RMSNorm
        self.norm = kind(48, eps=1e-5, **({"backward": backward} if fused else {}), **words)
        self.layers = nn.ModuleList(octile.Linear(48, 40, backward=backward, **words) for _ in range(2))
        with torch.no_grad():
            for p in self.norm.parameters():
                p.add_(torch.randn(48).to(p))
        self.fused = fused

    def forward(self, x, residual=None):
        if residual is None:
            x, total = self.norm(x), x
        elif self.fused:
            x, total = self.norm(x, residual)
        else:
            total = x + residual
            x = self.norm(total)
        return sum(layer(x) for layer in self.layers), total


def of_block(block, inputs, dy, dtotal):
    inputs = [t.detach().requires_grad_() for t in inputs]
    y, total = block(*inputs)
    ys, dys = ([y, total], [dy, dtotal]) if len(inputs) > 1 else ([y], [dy])
    return [y, *torch.autograd.grad(ys, [*inputs, *block.parameters()], dys)]


def inputs_of(generator, device, residual, dtype=FULL, rows=50):
    inputs = [draw(generator, device, 3, rows, 48, dtype=dtype) for _ in range(2 if residual else 1)]
    return inputs, draw(generator, device, 3, rows, 40, dtype=dtype), draw(generator, device, 3, rows, 48, dtype=dtype)


@pytest.mark.parametrize("backward", ["16bit", "int8", ("int8", "16bit")])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("dtype", [BRAIN, FULL])
def test_gradients_beside_torch(dtype, centred, residual, backward, device, generator):
    given = inputs_of(generator, device, residual, dtype)
    fused, plain = (of_block(Block(device, centred, backward, fused, dtype), *given) for fused in (True, False))
    for a, b in zip(fused, plain, strict=True):
        assert a.shape == b.shape and a.dtype is b.dtype
        assert off(a, b) < (2e-2 if dtype == BRAIN else 5e-3)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("shape", [(30, 64), (3, 10, 64), (64,)])
def test_gradients_of_the_norm_are_torchs(shape, centred, device, generator):
    """Through a layer that multiplies by one, so that dH is known."""
    one = octile.Linear(64, 64, False, device=device)
    with torch.no_grad():
        one.weight.copy_(torch.eye(64))
    x, dy, weight = (draw(generator, device, *size) for size in (shape, shape, (64,)))
    parameters = [weight, draw(generator, device, 64)] if centred else [weight]
    norm, plain = (layer_norm, F.layer_norm) if centred else (rms_norm, F.rms_norm)
    ours = [t.detach().requires_grad_() for t in (x, *parameters)]
    theirs = [t.detach().requires_grad_() for t in (x, *parameters)]
    ours = torch.autograd.grad(one(norm(*ours, 1e-5, backward="16bit")), ours, dy)
    theirs = torch.autograd.grad(plain(theirs[0], (64,), *theirs[1:], eps=1e-5), theirs, dy)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_layer_norm_without_a_bias(device, generator):
    """As torch's, which is not the norm without a mean."""
    given = [draw(generator, device, 5, 48) + 3, draw(generator, device, 48)]
    layer = octile.Linear(48, 8, device=device, backward="int8")

    def step(bias):
        x, weight = (t.detach().requires_grad_() for t in given)
        quantized = layer_norm(x, weight, bias)
        dequantized = quantized.q * quantized.scale[:, None]
        return dequantized, *torch.autograd.grad(layer(quantized).square().sum(), [x, weight])

    ours = step(None)
    assert all(torch.equal(a, b) for a, b in zip(ours, step(torch.zeros(48, device=device)), strict=True))
    assert off(ours[0], F.layer_norm(given[0], (48,), given[1])) < 1e-2


def test_sum_that_nothing_else_reads(device, generator):
    block = Block(device, False, "int8", True)
    inputs, dy, _ = inputs_of(generator, device, True)
    x, residual = (t.requires_grad_() for t in inputs)
    dx, dresidual = torch.autograd.grad(block(x, residual)[0], [x, residual], dy)
    assert torch.equal(dx, dresidual)
    total = block(x, residual)[1]
    assert torch.equal(torch.autograd.grad(total.sum(), residual)[0], torch.ones_like(residual))


def test_loads_what_torchs_norm_saves(device):
    for ours, theirs in ((octile.RMSNorm, nn.RMSNorm), (octile.LayerNorm, nn.LayerNorm)):
        ours(48, device=device).load_state_dict(theirs(48, device=device).state_dict())


# ---- torch ----


def test_checkpointing(device, generator):
    block = Block(device, False, "int8", True)
    given = inputs_of(generator, device, True)
    x, residual = (t.requires_grad_() for t in given[0])
    y, total = checkpoint(block, x, residual, use_reentrant=False)
    again = [y, *torch.autograd.grad([y, total], [x, residual, *block.parameters()], list(given[1:]))]
    assert all(torch.equal(a, b) for a, b in zip(again, of_block(block, *given), strict=True))


@pytest.mark.parametrize("centred", [False, True])
def test_autocast(centred, device, generator):
    inputs, dy, dtotal = inputs_of(generator, device, True, BRAIN)
    fused, plain = (Block(device, centred, "int8", fused) for fused in (True, False))
    with torch.autocast(device.type, BRAIN):
        ours, theirs = (of_block(block, inputs, dy, dtotal) for block in (fused, plain))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype is b.dtype and off(a, b) < 2e-2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_compiled(centred, residual, backend, device, generator):
    if backend == "inductor" and device.type == "cpu":
        pytest.skip("compiles C++ for a minute, and fuses nothing of ours")
    torch._dynamo.reset()
    block = Block(device, centred, "int8", True, BRAIN)
    compiled = torch.compile(copy.deepcopy(block), backend=backend, fullgraph=True)
    for rows in (9, 9, 24):
        given = inputs_of(generator, device, residual, BRAIN, rows)
        ours, eager = of_block(compiled, *given), of_block(block, *given)
        for a, b in zip(ours, eager, strict=True):
            assert torch.equal(a, b) if backend == "aot_eager" else off(a, b) < 1e-2
    torch._dynamo.reset()


# ---- What is refused ----


def test_refusals(device, generator):
    x, weight = draw(generator, device, 4, 48), draw(generator, device, 48)
    with pytest.raises(ValueError, match="backward is 'int9'"):
        octile.RMSNorm(48, backward="int9")
    with pytest.raises(ValueError, match="backward is 'int9'"):
        octile.LayerNorm(48, backward="int9")
    with pytest.raises(RuntimeError, match=r"x is \(4, 48\), the norm's weight \(47,\)"):
        rms_norm(x, weight[:47])
    with pytest.raises(RuntimeError, match=r"residual \(4, 48\) of torch.float16"):
        rms_norm(x, weight, residual=x.half())
    for norm in (rms_norm, lambda x, w, **more: layer_norm(x, w, None, **more)):
        for given, text in (((x, None), "weight is a NoneType"), ((None, weight), "x is a NoneType")):
            with pytest.raises(TypeError, match=f"octile: {text}, expected a tensor"):
                norm(*given)
        with pytest.raises(TypeError, match="octile: residual is a float, expected a tensor"):
            norm(x, weight, residual=1.0)
    with pytest.raises(RuntimeError, match="prologue = rms_norm with x = f64"):
        rms_norm(x.double(), weight)
    with pytest.raises(RuntimeError, match="epsilon = -1"):
        rms_norm(x, weight, -1.0)
    with pytest.raises(RuntimeError, match="prologue is 1, expected 3"):
        norm_quantize(x, weight, None, None, 1, _c.BOTH, 1e-6)
    with pytest.raises(RuntimeError, match="orientation is 3"):
        norm_quantize(x, weight, None, None, _c.RMS_NORM, 3, 1e-6)
    with pytest.raises(RuntimeError, match="norm_bias is absent"):
        norm_quantize(x, weight, None, None, _c.LAYER_NORM, _c.BOTH, 1e-6)
    with pytest.raises(RuntimeError, match="norm_weight is absent"):
        quantize(x, _c.PER_ROW, _c.BOTH, None, _c.RMS_NORM)
    with pytest.raises(TypeError):
        nn.Linear(48, 8, device=device)(rms_norm(x, weight))


def test_differentiated_once(device, generator):
    block = Block(device, False, "int8", True)
    x = draw(generator, device, 4, 48).requires_grad_()
    (dx,) = torch.autograd.grad(block(x)[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        dx.sum().backward()


def test_what_tracing_refuses():
    x, weight = torch.empty(4, 8, device="meta"), torch.empty(8, device="meta")
    rest = (_c.RMS_NORM, _c.ROW_MAJOR, 1e-6)
    octile._ops._fake_norm_quantize(x, weight, None, x, *rest)
    for residual in (x[:2], x.half()):
        with pytest.raises(RuntimeError, match="residual is"):
            octile._ops._fake_norm_quantize(x, weight, None, residual, *rest)
    for bad in (weight[:7], weight.half()):
        with pytest.raises(RuntimeError, match="weight is"):
            octile._ops._fake_norm_quantize(x, bad, None, None, *rest)
        with pytest.raises(RuntimeError, match="bias is"):
            octile._ops._fake_norm_quantize(x, weight, bad, None, *rest)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_default_eps(dtype, device):
    x, weight = 1e-3 * torch.randn(4, 64, device=device).to(dtype), torch.ones(64, device=device, dtype=dtype)
    q = rms_norm(x, weight)
    expected = F.rms_norm(x, (64,), weight)
    torch.testing.assert_close(q.q * q.scale[:, None], expected.float(), atol=0.03, rtol=0)
