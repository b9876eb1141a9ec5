"""int8 weights in groups, and int8 weights with float activations: operators, layers, whole models."""

import copy
import io
import pickle

import numpy as np
import octile
import op_reference as reference
import pytest
import torch
from octile import W4A8, W4A16, W8A8Dynamic, W8A8Linear, W8A16, W8A16Linear, _c, quantize_
from octile.weight_format import WeightFormat
from torch import nn

OUT_IN = _c.OUT_IN
ops = torch.ops.octile
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def draw(generator, device, *size, dtype=torch.float32):
    return torch.randn(size, generator=generator).to(device, dtype)


def by_reference(x, w, scale, bias):
    """y of an int8 weight w with its scales (N, G), in x's type."""
    q, x_scale = reference.quantize(reference.wide(x), 1)
    bias = None if bias is None else reference.wide(bias)
    return reference.narrow(reference.linear_groups(q, x_scale, w.cpu().numpy(), reference.wide(scale), bias), x.dtype)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows", [1, 9, 70])
@pytest.mark.parametrize(("k", "group"), [(128, 32), (192, 64), (256, 128), (96, 0), (33, 0)])
def test_linear_in_groups(k, group, rows, dtype, device, generator):
    x, plain = draw(generator, device, rows, k, dtype=dtype), draw(generator, device, 37, k, dtype=dtype)
    w, scale = WeightFormat(group=group).quantize(plain)
    assert w.dtype == torch.int8 and scale.shape == (37, k // group if group else 1)
    for bias in (None, draw(generator, device, 37, dtype=dtype)):
        expected = by_reference(x, w, scale, bias)
        assert torch.equal(ops.linear(x, w, scale, bias, _c.DYNAMIC_PER_TOKEN, OUT_IN).cpu(), expected)
        q, _, x_scale = ops.quantize(x, _c.PER_ROW, _c.ROW_MAJOR)
        assert torch.equal(ops.linear_int8(q, x_scale, w, scale, bias, OUT_IN, dtype).cpu(), expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("group", [None, 0, 32])
def test_linear_of_float_activations(group, dtype, device, generator):
    x, plain = draw(generator, device, 9, 96, dtype=dtype), draw(generator, device, 37, 96, dtype=dtype)
    format = WeightFormat(group=group)
    for per_channel in (True, False) if group is None else (True,):
        w, scale = format.quantize(plain, per_channel)
        exact_w = reference.wide(format.dequantize(w, scale, None, 96)).astype(np.float64)
        wide, bias = reference.wide(x).astype(np.float64), draw(generator, device, 37, dtype=dtype)
        exact = wide @ exact_w.T + reference.wide(bias)
        magnitudes = np.abs(wide) @ np.abs(exact_w).T + np.abs(reference.wide(bias))
        y = ops.linear(x, w, scale, bias, _c.NONE, OUT_IN)
        reference.assert_sum(y, exact, magnitudes, 96, dtype, device)


def test_what_the_operators_refuse(device):
    x, w = torch.ones(4, 64, device=device), torch.ones(6, 64, dtype=torch.int8, device=device)
    for scale, says in (
        (torch.ones(6, 3), "weight_scale has 3 columns, which do not divide 64"),
        (torch.ones(6, 0), "weight_scale has 0 columns"),
        (torch.ones(6, 4), "linear: "),  # groups of 16
        (torch.ones(5, 2), "linear: "),
        (torch.ones(6, 2, 1), "3 dimensions, expected 1"),
    ):
        with pytest.raises(RuntimeError, match=says):
            ops.linear(x, w, scale.to(device), None, _c.DYNAMIC_PER_TOKEN, OUT_IN)


def test_quantization(device, generator):
    """A group's scale and levels equal those of a separate row, bit for bit as from torch.ops.octile.quantize."""
    w = draw(generator, device, 12, 128)
    w[0], w[1, 40] = 0, torch.nan
    q, scale = WeightFormat(group=32).quantize(w)
    rows, _, row_scale = ops.quantize(w.reshape(48, 32), _c.PER_ROW, _c.ROW_MAJOR)
    assert torch.equal(q, rows.reshape(12, 128))
    assert torch.equal(scale.isnan(), row_scale.reshape(12, 4).isnan()) and scale[1, 1].isnan()
    assert torch.equal(scale.nan_to_num(0), row_scale.reshape(12, 4).nan_to_num(0))
    assert scale[0].eq(1e-8).all()
    q, scale = WeightFormat(group=0).quantize(w[2:])
    per_channel, channel_scale = WeightFormat().quantize(w[2:])
    assert torch.equal(q, per_channel) and torch.equal(scale, channel_scale[:, None])


@pytest.mark.parametrize("group", [None, 0, 32, 64])
@pytest.mark.parametrize("kind", [W8A8Linear, W8A16Linear])
def test_layers(kind, group, device, generator):
    plain, x = nn.Linear(128, 24, device=device), draw(generator, device, 2, 3, 128)
    layer = kind.from_linear(plain, group=group)
    assert layer.group == group and layer.weight_scale.shape == (
        (24,) if group is None else (24, 128 // (group or 128))
    )
    with torch.no_grad():
        y, exact = layer(x), layer.to_linear()(x)
        assert (y - exact).norm() < (0.02 if kind is W8A8Linear else 1e-6) * exact.norm()
        assert torch.equal(layer.weight, layer.to_linear().weight)
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        blank = kind(128, 24, device=device, group=group)
        blank.load_state_dict(torch.load(file))
        for other in (blank, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(other(x), y)
        half = copy.deepcopy(layer).half()
        assert torch.equal(half.weight_scale, layer.weight_scale) and half(x.half()).dtype == torch.float16
        with torch.autocast(device.type, torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        with pytest.raises(RuntimeError, match="in_features, its last size, is 128"):
            layer(x[..., :64])
        assert f"group={group}" in repr(layer) if group is not None else "group=" not in repr(layer)
        assert "gemm" in layer.explain(4)


@pytest.mark.parametrize("group", [None, 0, 32, 64, 128])
@pytest.mark.parametrize("kind", [W8A8Linear, W8A16Linear])
def test_packed(kind, group, generator):
    layer, x = kind.from_linear(nn.Linear(256, 40), group=group), draw(generator, "cpu", 3, 256)
    with torch.no_grad():
        plain, y = layer.plain_weight(), layer(x)
        assert octile.pack_(layer) == [""] and "packed" in repr(layer)
        exact = layer.to_linear()(x)
        assert (layer(x) - exact).norm() < (0.02 if kind is W8A8Linear else 1e-6) * exact.norm()
        assert kind is W8A16Linear or torch.equal(layer(x), y)
    for mine, theirs in zip(layer.plain_weight(), plain, strict=True):
        assert (mine is None and theirs is None) or torch.equal(mine, theirs)


@pytest.mark.parametrize("method", ["nearest", "clip", "feedback"])
def test_methods_of_eight_bits(method, generator):
    model = nn.Sequential(nn.Linear(64, 32))
    x = draw(generator, "cpu", 300, 64)
    with torch.no_grad(), octile.calibrate(model, second_moments=True) as calibration:
        exact = model(x)
    with torch.no_grad():
        assert quantize_(model, W8A16(method=method, calibration=calibration)).converted == ["0"]
        assert (model(x) - exact).norm() < 0.01 * exact.norm()


def test_models(device, generator):
    def model():
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 40), nn.ReLU(), nn.Linear(40, 8)).to(device)

    x = draw(generator, device, 6, 64)
    with torch.no_grad():
        exact = model()(x)
        for config, converted, bound in (
            (W8A8Dynamic(group=32), ["0", "2"], 0.03),
            (W8A8Dynamic(group=0), ["0", "2", "4"], 0.03),
            (W8A16(), ["0", "2", "4"], 0.01),
            (W8A16(32), ["0", "2"], 0.01),
        ):
            quantized = model()
            report = quantize_(quantized, config)
            assert report.converted == converted
            if "4" not in converted:
                assert report.skipped == {"4": "group is 32, which does not divide in_features, 40"}
            assert (quantized(x) - exact).norm() < bound * exact.norm()
            assert report.bytes_after < 0.5 * report.bytes_before


@pytest.mark.parametrize("shape", [(64, 0), (0, 5), (0, 0)])
@pytest.mark.parametrize(
    "config",
    [
        W8A8Dynamic(),
        W8A8Dynamic(per_channel=False),
        W8A8Dynamic(group=32),
        W8A16(),
        W4A16(32),
        W4A16(32, "clip"),
        W4A8(0),
    ],
)
def test_no_inputs_or_no_outputs(config, shape):
    model = nn.Sequential(nn.Linear(*shape))
    report = quantize_(model, config)
    if shape[0] == 0 and getattr(config, "group", None) is not None:
        assert report.skipped == {"0": f"group is {config.group}, and in_features is 0"}
    else:
        assert report.converted == ["0"]
        assert torch.equal(model(torch.randn(3, shape[0])), model[0].bias.expand(3, -1))


def test_unknown_choices():
    for make in (W8A16, lambda group: W8A8Dynamic(group=group), lambda group: W8A16Linear(64, 8, group=group)):
        for group in (16, 32.0, "32", True):
            with pytest.raises(ValueError, match=f"group is {group!r}, expected 32, 64, 128, or 0 for a whole row"):
                make(group)
        make(np.int64(32))
    with pytest.raises(ValueError, match="per_channel=False"):
        W8A8Dynamic(per_channel=False, group=32)
    with pytest.raises(ValueError, match="does not divide in_features, 40"):
        W8A8Linear(40, 8, group=32)
    with pytest.raises(ValueError, match="method is 'best'"):
        W8A16(method="best")


def test_one_graph(device, generator):
    """The fake kernels accept all formats: one graph contains them, with the bits of eager code."""
    model = nn.Sequential(
        W8A8Linear.from_linear(nn.Linear(64, 32), group=32), W8A16Linear.from_linear(nn.Linear(32, 16)),
        W8A16Linear.from_linear(nn.Linear(16, 8), group=0),
    ).to(device)  # fmt: skip
    x = draw(generator, device, 5, 64)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), model(x))
