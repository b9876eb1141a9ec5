"""W8A8 with a static scale: the op against the number contract, and W8A8StaticLinear."""

import copy
import pickle

import numpy as np
import op_reference as reference
import pytest
import torch
from octile import W8A8StaticLinear, _c
from torch import nn

ops = torch.ops.octile
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
STATIC, OUT_IN, IN_OUT = _c.STATIC_PER_TENSOR, _c.OUT_IN, _c.IN_OUT


def draw(generator, *size, dtype=torch.float32, device="cpu"):
    return torch.randn(size, generator=generator, dtype=torch.float64).to(device, dtype)


def expected(x, weight, weight_scale, bias, multiplier, scale):
    """The contract, in numpy: rows of x that hold a NaN or an infinity are NaN."""
    one = reference.working(x.dtype)[0]
    wide = reference.wide(x)
    if multiplier is not None:
        wide = wide * multiplier.cpu().numpy()
    bad = ~np.isfinite(wide).all(1, keepdims=True)
    with np.errstate(invalid="ignore"):
        q = np.where(bad, 0, np.clip(np.rint(wide / one(scale)), -127, 127)).astype(np.int8)
    scales = np.where(bad, one(np.nan), one(scale)).reshape(-1)
    bias = None if bias is None else reference.wide(bias)
    return reference.narrow(
        reference.linear(q, scales, weight.cpu().numpy(), weight_scale.cpu().numpy(), bias), x.dtype
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5), (8, 65, 129), (129, 31, 96), (0, 5, 7), (4, 5, 0)])
def test_op(shape, dtype, device, generator):
    m, n, k = shape
    of_scales = torch.float64 if dtype is torch.float64 else torch.float32
    x, bias = draw(generator, m, k, dtype=dtype, device=device), draw(generator, n, dtype=dtype, device=device)
    weight = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8).to(device)
    weight_scale = torch.rand(n, generator=generator, dtype=of_scales).to(device)
    multiplier = (torch.rand(k, generator=generator, dtype=of_scales) + 0.5).to(device)
    for scale in (0.02, 1e-3):  # the second clamps nearly everything
        for m_, b, s in (
            (None, bias, weight_scale),
            (multiplier, None, weight_scale),
            (multiplier, bias, weight_scale[:1]),
        ):
            for layout in (OUT_IN, IN_OUT):
                w = weight if layout == OUT_IN else weight.t().contiguous()
                y = ops.linear(x, w, s, b, STATIC, layout, m_, scale)
                assert y.dtype == dtype and torch.equal(y.cpu(), expected(x, weight, s, b, m_, scale))


def test_op_of_what_is_not_finite(device, generator):
    x, weight = draw(generator, 5, 64, device=device), torch.ones(3, 64, dtype=torch.int8, device=device)
    x[1, 7], x[3, 0] = torch.nan, -torch.inf
    y = ops.linear(x, weight, torch.ones(3, device=device), None, STATIC, OUT_IN, None, 0.1)
    assert y.isnan().all(1).tolist() == [False, True, False, True, False]
    assert torch.equal(y.cpu().nan_to_num(7), expected(x, weight, torch.ones(3), None, None, 0.1).nan_to_num(7))


def test_op_errors(device, generator):
    x, weight = draw(generator, 2, 64, device=device), torch.ones(3, 64, dtype=torch.int8, device=device)
    scale = torch.ones(3, device=device)
    for static in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(RuntimeError, match="static_scale = .*, expected positive and finite"):
            ops.linear(x, weight, scale, None, STATIC, OUT_IN, None, static)
    with pytest.raises(RuntimeError, match="x_multiplier"):
        ops.linear(x, weight, scale, None, STATIC, OUT_IN, torch.ones(63, device=device), 0.1)
    with pytest.raises(RuntimeError, match="x_multiplier has 2 dimensions, expected 1"):
        ops.linear(x, weight, scale, None, STATIC, OUT_IN, torch.ones(1, 64, device=device), 0.1)
    with pytest.raises(RuntimeError, match="x_multiplier"):
        ops.linear(x, weight, scale, None, STATIC, OUT_IN, torch.ones(64, device=device).half(), 0.1)


def test_a_multiplier_of_dynamic_scales(device, generator):
    x, weight = draw(generator, 4, 64, device=device), torch.ones(3, 64, dtype=torch.int8, device=device)
    multiplier, scale = (torch.rand(64, generator=generator) + 0.5).to(device), torch.ones(3, device=device)
    y = ops.linear(x, weight, scale, None, _c.DYNAMIC_PER_TOKEN, OUT_IN, multiplier)
    assert torch.equal(y, ops.linear(x * multiplier, weight, scale, None, _c.DYNAMIC_PER_TOKEN, OUT_IN))


# ---- The layer ----


def layer_of(inputs=64, outputs=24, device="cpu", dtype=torch.float32, multiplier=True, **more):
    torch.manual_seed(1)
    plain = nn.Linear(inputs, outputs, device=device, dtype=dtype)
    m = torch.rand(inputs, device=device) + 0.5 if multiplier else None
    weight = None if m is None else plain.weight.detach().float() / m
    return plain, W8A8StaticLinear.from_linear(plain, 4 / 127, input_multiplier=m, weight=weight, **more)


@pytest.mark.parametrize("default", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_number_is_not_rounded_to_torchs_default_type(dtype, default):
    plain, kept = nn.Linear(64, 24, dtype=dtype), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        with torch.device("meta"):  # nor made on torch's default device
            layer = W8A8StaticLinear.from_linear(plain, 4 / 127)
    finally:
        torch.set_default_dtype(kept)
    assert layer.input_scale.device.type == "cpu"
    assert layer.input_scale.item() == (4 / 127 if dtype is torch.float64 else np.float32(4 / 127))


@pytest.mark.parametrize("multiplier", [False, True])
@pytest.mark.parametrize("inputs", [64, 33])
def test_layer(inputs, multiplier, device, generator):
    plain, layer = layer_of(inputs, device=device, multiplier=multiplier)
    x = draw(generator, 2, 7, inputs, device=device).clamp(-2, 2)
    with torch.no_grad():
        exact = expected(
            x.reshape(14, inputs), layer.quantized_weight, layer.weight_scale, layer.bias, layer.input_multiplier,
            layer.input_scale.item(),
        )  # fmt: skip
        assert torch.equal(layer(x).cpu(), exact.reshape(2, 7, 24))
        assert (layer(x) - plain(x)).norm() / plain(x).norm() < 0.03
        assert torch.allclose(layer.to_linear().weight, plain.weight, atol=2 * layer.weight_scale.max().item())
    assert list(layer.parameters()) == [] and layer.input_scale.shape == (1,)
    text = f"{layer}"
    assert ("input_multiplier" in text) == multiplier and "kernel=" in text and "none" not in text
    assert "activation static_per_tensor" in layer.explain(2)


def test_one_scale_for_the_weight(device, generator):
    _, layer = layer_of(device=device, per_channel=False)
    other = W8A8StaticLinear(64, 24, device=device, per_channel=False, multiplier=True)
    other.load_state_dict(layer.state_dict())
    x = draw(generator, 5, 64, device=device)
    assert layer.weight_scale.shape == (1,) and torch.equal(other(x), layer(x))


def test_the_number_follows_the_buffer(device, generator):
    _, layer = layer_of(device=device)
    x = draw(generator, 5, 64, device=device)
    y = layer(x)
    state = copy.deepcopy(layer.state_dict())
    layer.input_scale.mul_(3)
    assert not torch.equal(layer(x), y)
    layer.input_scale.data.copy_(state["input_scale"])
    assert torch.equal(layer(x), y)
    layer.input_scale.data *= 3
    assert not torch.equal(layer(x), y)
    layer.input_scale.numpy()[0] = state["input_scale"].item()
    assert torch.equal(layer(x), y)
    layer.input_scale.data = state["input_scale"] * 3
    assert not torch.equal(layer(x), y)
    torch.utils.swap_tensors(layer.input_scale, state["input_scale"].clone())
    assert torch.equal(layer(x), y)
    layer.input_scale.data.mul_(3)
    layer.pack_() if device.type == "cpu" else layer
    assert not torch.equal(layer(x), y)
    layer.input_scale.data.copy_(state["input_scale"])
    assert torch.equal(layer(x), y)
    _, layer = layer_of(device=device)
    layer.input_scale = state["input_scale"].clone()
    assert torch.equal(layer(x), y)
    with torch.inference_mode():
        layer.input_scale = state["input_scale"] * 3
        assert not torch.equal(layer(x), y)
    for assign in (False, True):
        fresh = W8A8StaticLinear(64, 24, device=device, multiplier=True)
        fresh.load_state_dict(state, assign=assign)
        assert torch.equal(fresh(x), y)
    fresh = W8A8StaticLinear(64, 24, device="meta", multiplier=True)
    assert fresh(torch.empty(3, 64, device="meta")).shape == (3, 24)
    fresh.to_empty(device=device).load_state_dict(state)
    assert torch.equal(fresh(x), y)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), layer(x))


def test_fake_tensors(device):
    from torch._subclasses import FakeTensorMode

    _, layer = layer_of(device=device)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(torch.ones(3, 64, device=device))).shape == (3, 24)


def test_types(device, generator):
    _, layer = layer_of(device=device)
    scales = {name: layer.get_buffer(name).clone() for name in ("weight_scale", "input_scale", "input_multiplier")}
    for dtype in (torch.float16, torch.bfloat16):
        layer.to(dtype)
        assert all(torch.equal(layer.get_buffer(name), t) for name, t in scales.items()) and layer.bias.dtype == dtype
        x = draw(generator, 5, 64, dtype=dtype, device=device)
        assert layer(x).dtype == dtype
        assert layer(x.float()).dtype == torch.float32  # x's type decides
    with torch.autocast(device.type, torch.bfloat16):
        assert layer(draw(generator, 5, 64, device=device)).dtype == torch.bfloat16
    layer.double()
    assert layer.input_scale.dtype == torch.float64
    assert layer(draw(generator, 5, 64, dtype=torch.float64, device=device)).dtype == torch.float64


def test_refusals(device):
    _, layer = layer_of(device=device)
    x = torch.ones(2, 64, device=device)
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.func.vmap(layer)(x)
    with pytest.raises(RuntimeError, match="weight is torch.float32, expected torch.int8: load a float model first"):
        layer.load_state_dict(nn.Linear(64, 24).state_dict(), strict=False)
    layer.input_scale.zero_()
    with pytest.raises(RuntimeError, match="static_scale = 0, expected positive"):
        layer(x)
    with pytest.raises(ValueError, match=r"input_scale is \(2,\), expected one number"):
        W8A8StaticLinear.from_linear(nn.Linear(64, 24), torch.ones(2))


def test_compiled(device, generator):
    _, layer = layer_of(device=device)
    model = nn.Sequential(layer, nn.ReLU(), layer_of(24, 16, device=device)[1])
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    state = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for rows in (3, 5, 8):
            x = draw(generator, rows, 64, device=device)
            assert torch.equal(compiled(x), model(x))
        # Graphs use a newly loaded scale too.
        state["0.input_scale"] *= 2
        model.load_state_dict(state)
        assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("strict", [False, True])
def test_one_layer_alone_is_exported(strict):
    layer = W8A8StaticLinear.from_linear(nn.Linear(64, 32), 0.02)
    x = torch.randn(3, 64)
    assert torch.equal(torch.export.export(layer, (x,), strict=strict).module()(x), layer(x))
