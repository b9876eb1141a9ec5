"""Inputs of layers that are quantized once, with an activation or without: their bits, and gradients against torch's."""

import copy

import octile
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from octile import _c
from octile.quantized_input import gelu, swiglu
from torch import nn
from torch.utils.checkpoint import checkpoint

HALF, BRAIN, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
BACKWARDS = ["16bit", "int8", "int8-whole", ("int8", "16bit")]
quantize = torch.ops.octile.quantize


def draw(generator, device, *size, dtype=FULL):
    return torch.randn(size, generator=generator).to(device, dtype)


def gradients(function, inputs, dy):
    inputs = [t.detach().requires_grad_() for t in inputs]
    y = function(*inputs)
    return [y, *torch.autograd.grad(y, inputs, dy)]


def off(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# ---- Bits ----


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("prologue", [_c.GELU_TANH, _c.SILU])
@pytest.mark.parametrize("dtype", [HALF, BRAIN, FULL])
def test_integers_are_those_of_the_rounded_activation(dtype, prologue, gated, device, generator):
    for rows, columns in ((1, 8), (33, 200), (70, 1032), (3, 7)):
        x = 2 * draw(generator, device, rows, columns, dtype=dtype)
        up = draw(generator, device, rows, columns, dtype=dtype) if gated else None
        q, q_transposed, scale = quantize(x, _c.PER_ROW, _c.BOTH, None, prologue, up)
        assert torch.equal(q_transposed, q.t())
        h = x.double()
        h = F.gelu(h, approximate="tanh") if prologue == _c.GELU_TANH else F.silu(h)
        h = (h * up.double() if gated else h).to(dtype)
        expected, _, expected_scale = quantize(h, _c.PER_ROW, _c.ROW_MAJOR)
        # The contract's sums sometimes round differently from the exact activation.
        torch.testing.assert_close(scale, expected_scale, rtol=2**-8, atol=0)
        assert (q.int() - expected.int()).abs().max() <= 1
        same = (q == expected).float().mean()
        assert same > 0.98, same
        if device.type == "cuda":
            there = quantize(x.cpu(), _c.PER_ROW, _c.BOTH, None, prologue, None if up is None else up.cpu())
            assert all(torch.equal(a.cpu(), b) for a, b in zip((q, q_transposed, scale), there, strict=True))


def test_slices_of_one_matrix(device, generator):
    both = draw(generator, device, 2, 19, 96, dtype=BRAIN)
    gate, up = both.chunk(2, -1)
    sliced, whole = swiglu(gate, up), swiglu(gate.contiguous(), up.contiguous())
    assert torch.equal(sliced.q, whole.q) and torch.equal(sliced.scale, whole.scale)


def test_bad_values_spoil_their_row(device):
    x = torch.ones(3, 16, device=device, dtype=BRAIN)
    x[1, 3] = float("nan")
    x[2, 5] = float("-inf")
    q, _, scale = quantize(x, _c.PER_ROW, _c.BOTH, None, _c.SILU)
    assert scale.isnan().tolist() == [False, True, True]
    assert not q[1:].any()


# ---- Layers ----


def layers(device, backward, dtype=FULL, bias=True, **words):
    torch.manual_seed(1)
    words |= {"device": device, "dtype": dtype, "backward": backward}
    return nn.ModuleList(octile.Linear(70, n, bias, **words) for n in (50, 33, 50))


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("dtype", [HALF, BRAIN, FULL, DOUBLE])
def test_shared_by_layers_with_their_own_bits(dtype, backward, device, generator):
    if dtype == DOUBLE and device.type == "cuda" and "int8" in (backward, backward[0]):
        pytest.skip("blocks of float64 are for a CPU")
    x = draw(generator, device, 2, 40, 70, dtype=dtype)
    for layer in layers(device, backward, dtype):
        dy = draw(generator, device, 2, 40, layer.out_features, dtype=dtype)
        parameters = list(layer.parameters())
        alone = gradients(lambda x, *_: layer(x), [x], dy)
        shared = gradients(lambda x: layer(octile.quantize_input(x, backward)), [x], dy)
        assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))
        of_parameters = [
            torch.autograd.grad(layer(one), parameters, dy) for one in (x, octile.quantize_input(x, backward))
        ]
        assert all(torch.equal(a, b) for a, b in zip(*of_parameters, strict=True))


def test_gradients_of_several_layers_add_up(device, generator):
    x = draw(generator, device, 40, 70)
    several = layers(device, "int8")
    dys = [draw(generator, device, 40, layer.out_features) for layer in several]
    alone = [gradients(layer, [x], dy)[1] for layer, dy in zip(several, dys, strict=True)]
    leaf = x.requires_grad_()
    quantized = octile.quantize_input(leaf)
    ys = [layer(quantized) for layer in several]
    together = torch.autograd.grad(ys, leaf, dys)[0]
    torch.testing.assert_close(together, sum(alone))


class Mlp(nn.Module):
    """Fused or not: its layers are octile's."""

    def __init__(self, device, gated, backward, dtype=FULL, fused=False):
        super().__init__()
        torch.manual_seed(0)
        words = {"device": device, "dtype": dtype, "backward": backward}
        self.gated = gated
        self.up = octile.Linear(48, 192 if gated else 96, **words)
        self.down = octile.Linear(96, 40, **words)
        if fused:
            self.activation = octile.SwiGLU(backward=backward) if gated else octile.GELU(backward=backward)
        else:
            self.activation = (lambda g, u: F.silu(g) * u) if gated else nn.GELU(approximate="tanh")

    def forward(self, x):
        y = self.up(x)
        return self.down(self.activation(*y.chunk(2, -1)) if self.gated else self.activation(y))


def of_mlp(mlp, x, dy):
    x = x.detach().requires_grad_()
    y = mlp(x)
    return [y, *torch.autograd.grad(y, [x, *mlp.parameters()], dy)]


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [BRAIN, FULL])
def test_gradients_beside_torch(dtype, gated, backward, device, generator):
    x, dy = draw(generator, device, 3, 50, 48, dtype=dtype), draw(generator, device, 3, 50, 40, dtype=dtype)
    fused, plain = (of_mlp(Mlp(device, gated, backward, dtype, fused), x, dy) for fused in (True, False))
    for a, b in zip(fused, plain, strict=True):
        assert a.shape == b.shape and a.dtype is b.dtype
        assert off(a, b) < (2e-2 if dtype == BRAIN else 5e-3)


@pytest.mark.parametrize("prologue", [gelu, swiglu])
def test_gradient_of_the_activation_is_torchs(prologue, device, generator):
    """Through a layer that multiplies by one, so that dH is known."""
    layer = octile.Linear(64, 64, False, device=device)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(64))
    inputs = [draw(generator, device, 30, 64) for _ in range(2 if prologue is swiglu else 1)]
    plain = (lambda g, u: F.silu(g) * u) if prologue is swiglu else lambda x: F.gelu(x, approximate="tanh")
    dy = draw(generator, device, 30, 64)
    ours = gradients(lambda *t: layer(prologue(*t, backward="16bit")), inputs, dy)
    theirs = gradients(plain, inputs, dy)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_inference_makes_no_transpose(device, generator):
    mlp = Mlp(device, True, "int8", fused=True).eval()
    x = draw(generator, device, 5, 48)
    with torch.no_grad():
        gate, up = mlp.up(x).chunk(2, -1)
        quantized = mlp.activation(gate, up)
        assert quantized.q_transposed is None and not quantized.like.requires_grad
        y = mlp(x)
    assert torch.equal(y, mlp(x)) and y.shape == (5, 40)


def test_weights_that_are_kept(device, generator):
    mlp = Mlp(device, False, "int8", fused=True)
    x, dy = draw(generator, device, 9, 48), draw(generator, device, 9, 40)
    before = of_mlp(mlp, x, dy)
    octile.cache_weights_(mlp)
    assert all(torch.equal(a, b) for a, b in zip(before, of_mlp(mlp, x, dy), strict=True))


def test_frozen_weights(device, generator):
    mlp = Mlp(device, False, "int8", fused=True)
    x, dy = draw(generator, device, 9, 48), draw(generator, device, 9, 40)
    expected = of_mlp(mlp, x, dy)[1]
    mlp.requires_grad_(False)
    assert torch.equal(gradients(mlp, [x], dy)[1], expected)


# ---- torch ----


@pytest.mark.parametrize("gated", [False, True])
def test_checkpointing(gated, device, generator):
    mlp = Mlp(device, gated, "int8", fused=True)
    x, dy = draw(generator, device, 9, 48), draw(generator, device, 9, 40)
    for again in (of_mlp(mlp, x, dy), of_mlp_checkpointed(mlp, x, dy)):
        assert all(torch.equal(a, b) for a, b in zip(again, of_mlp(mlp, x, dy), strict=True))


def of_mlp_checkpointed(mlp, x, dy):
    x = x.detach().requires_grad_()
    y = checkpoint(mlp, x, use_reentrant=False)
    return [y, *torch.autograd.grad(y, [x, *mlp.parameters()], dy)]


@pytest.mark.parametrize("gated", [False, True])
def test_autocast(gated, device, generator):
    fused, plain = (Mlp(device, gated, "int8", fused=fused) for fused in (True, False))
    x, dy = draw(generator, device, 50, 48), draw(generator, device, 50, 40, dtype=BRAIN)
    with torch.autocast(device.type, BRAIN):
        ours, theirs = (of_mlp(mlp, x, dy) for mlp in (fused, plain))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype is b.dtype and off(a, b) < 2e-2


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("gated", [False, True])
def test_compiled(gated, backend, device, generator):
    if backend == "inductor" and device.type == "cpu":
        pytest.skip("compiles C++ for a minute, and fuses nothing of ours")
    torch._dynamo.reset()
    mlp = Mlp(device, gated, "int8", BRAIN, fused=True)
    compiled = torch.compile(copy.deepcopy(mlp), backend=backend, fullgraph=True)
    for rows in (9, 9, 24):
        x, dy = draw(generator, device, rows, 48, dtype=BRAIN), draw(generator, device, rows, 40, dtype=BRAIN)
        ours, eager = of_mlp(compiled, x, dy), of_mlp(mlp, x, dy)
        for a, b in zip(ours, eager, strict=True):
            assert torch.equal(a, b) if backend == "aot_eager" else off(a, b) < 1e-2
    with torch.no_grad():
        assert torch.equal(compiled(x), mlp(x))
    torch._dynamo.reset()


# ---- What is refused ----


def test_refusals(device, generator):
    x = draw(generator, device, 4, 70)
    layer = layers(device, "int8")[0]
    with pytest.raises(ValueError, match=r"approximate is 'none', expected 'tanh'"):
        octile.GELU("none")
    with pytest.raises(ValueError, match="backward is 'int9'"):
        octile.SwiGLU(backward="int9")
    with torch.no_grad():
        without_gradients = octile.quantize_input(x, "int8")
    for given in (octile.quantize_input(x, "16bit"), without_gradients):
        with pytest.raises(ValueError, match="transpose.*with the layer's `backward`, and with gradients enabled"):
            layer(given)
    with pytest.raises(RuntimeError, match=r"gate is \(4, 70\) of torch.float32, up \(4, 35\)"):
        swiglu(x, x[:, :35])
    for gate, up, text in ((x, None, "up is a NoneType"), (x.tolist(), x, "gate is a list")):
        with pytest.raises(TypeError, match=f"octile: {text}, expected a tensor"):
            swiglu(gate, up)
    for function in (gelu, octile.quantize_input):
        with pytest.raises(TypeError, match="octile: x is a QuantizedInput, expected a tensor"):
            function(octile.quantize_input(x))
    with pytest.raises(RuntimeError, match="prologue = gelu_tanh with x = f64"):
        gelu(x.double())
    with pytest.raises(RuntimeError, match="the layer's in_features, its last size, is 70"):
        layer(octile.quantize_input(x[:, :64].contiguous()))
    for one in (layer, octile.W8A8Linear(70, 8, device=device)):
        with pytest.raises(RuntimeError, match="x is torch.float64, the layer torch.float32"):
            one(octile.quantize_input(x.double()))
        quantized = octile.quantize_input(x)
        with pytest.raises(RuntimeError, match="scales of x were cast to torch.bfloat16.*cast_forward_inputs=False"):
            one(quantized._replace(scale=quantized.scale.bfloat16()))
    with pytest.raises(ValueError, match="this layer's activation is 'per_tensor'"):
        octile.QuantizedLinear(70, 8, device=device, dtype=FULL)(octile.quantize_input(x))
    with pytest.raises(TypeError):
        nn.Linear(70, 8, device=device)(octile.quantize_input(x))
    with pytest.raises(RuntimeError, match="prologue = 7"):
        quantize(x, _c.PER_ROW, _c.BOTH, None, 7)
    with pytest.raises(RuntimeError, match="gated without a prologue"):
        quantize(x, _c.PER_ROW, _c.BOTH, None, 0, x)
    with pytest.raises(RuntimeError, match="granularity = tensor"):
        quantize(x, _c.PER_TENSOR, _c.BOTH, None, _c.SILU)


def test_differentiated_once(device, generator):
    x = draw(generator, device, 4, 70).requires_grad_()
    layer = layers(device, "int8")[0]
    (dx,) = torch.autograd.grad(layer(gelu(x)).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        dx.sum().backward()


def test_what_tracing_refuses():
    x = torch.empty(4, 8, device="meta")
    row = (_c.PER_ROW, _c.ROW_MAJOR)
    octile._ops._fake_quantize(x, *row, None, 1, x)
    for arguments in ((x, *row, None, 0, x), (x, *row, None, 1, x[:2]), (x, *row, None, 1, x.half())):
        with pytest.raises(RuntimeError, match="up is"):
            octile._ops._fake_quantize(*arguments)
    for arguments in ((x.double(), *row, None, 1), (x, _c.PER_TENSOR, row[1], None, 1), (x, *row, x[:, 0], 1)):
        with pytest.raises(RuntimeError, match="a prologue needs dynamic scales of rows"):
            octile._ops._fake_quantize(*arguments)


def test_bytes_that_hold_no_such_row():
    packed = torch.zeros(2, 40, dtype=torch.uint8)
    with pytest.raises(ValueError, match="does not hold 128 values a row"):
        octile.quantizer.unpack(packed, 128)
    with pytest.raises(ValueError, match="does not hold 128 values a row"):
        octile._plans.view_of_levels(packed, 128)
