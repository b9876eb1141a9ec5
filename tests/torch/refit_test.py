"""refit_(): new weights in the memory of a layer for inference."""

import octile
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = {
    "W8A8": (octile.W8A8Linear, {}),
    "W8A8, per tensor": (octile.W8A8Linear, {"per_channel": False}),
    "W8A8, groups": (octile.W8A8Linear, {"group": 32}),
    "W8A8, rows": (octile.W8A8Linear, {"group": 0}),
    "static": (octile.W8A8StaticLinear, {"input_scale": 0.02}),
    "W8A16": (octile.W8A16Linear, {"group": 64}),
    "W4A16": (octile.W4A16Linear, {"group": 32}),
    "W4A8": (octile.W4A8Linear, {"group": 0}),
}


def linears(dtype, shape=(192, 48)):
    return [torch.nn.Linear(*shape, dtype=dtype) for _ in range(2)]


def places(layer):
    return {name: t.data_ptr() for name, t in layer.named_buffers()}


@pytest.mark.parametrize("name", LAYERS)
def test_a_backward_after_another_weight(name):
    kind, words = LAYERS[name]
    old, new = linears(torch.float32)
    layer = kind.from_linear(old, **words)
    y = layer(torch.randn(3, 192, requires_grad=True))
    layer.refit_(new.weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", LAYERS)
def test_the_bits_of_a_new_layer_in_the_old_place(name, dtype):
    kind, words = LAYERS[name]
    old, new = linears(dtype)
    layer, expected = kind.from_linear(old, **words), kind.from_linear(new, **words)
    before, x = places(layer), torch.randn(5, 192, dtype=dtype)
    with torch.inference_mode():
        assert layer.refit_(new.weight, new.bias) is layer
    assert places(layer) == before
    assert all(torch.equal(t, expected.get_buffer(n)) for n, t in layer.named_buffers())
    assert torch.equal(layer(x), expected(x))
    if dtype is not torch.float64 and name != "W8A8, per tensor":  # packed, it equals per channel
        layer = kind.from_linear(old, **words).pack_()
        x = x.requires_grad_()
        layer(x).sum().backward()  # unpacks the weight, and keeps it unpacked
        before, x.grad = places(layer), None
        layer.refit_(new.weight, new.bias)
        assert places(layer) == before and torch.equal(layer.packed_weight, expected.pack_().packed_weight)
        layer(x).sum().backward()
        gradient, x.grad = x.grad, None
        expected(x).sum().backward()
        assert torch.equal(gradient, x.grad)


@pytest.mark.parametrize("shape", [(192, 48), (75, 33), (1, 1), (0, 8)])
def test_shapes(shape):
    for per_channel in (True, False):
        old, new = linears(torch.float32, shape)
        layer = octile.W8A8Linear.from_linear(old, per_channel=per_channel)
        expected = octile.W8A8Linear.from_linear(new, per_channel=per_channel)
        layer.refit_(new.weight.detach().t().contiguous().t())  # of any strides
        for name in ("quantized_weight", "weight_scale"):
            assert torch.equal(layer.get_buffer(name), expected.get_buffer(name))


def test_smoothed_and_with_zero_points():
    old, new = linears(torch.float32)
    multiplier = torch.rand(192) + 0.5
    layers = []
    for linear in (old, new):
        weight = linear.weight.detach() / multiplier
        layers.append(octile.W8A8StaticLinear.from_linear(linear, 0.02, input_multiplier=multiplier, weight=weight))
    layers[0].refit_(new.weight, new.bias)
    assert all(torch.equal(t, layers[1].get_buffer(n)) for n, t in layers[0].named_buffers())
    points = octile.W4A16Linear(192, 48, group=32, zero_point=True)
    points.weight_zero_point.fill_(3)
    points.refit_(new.weight, new.bias)
    expected = octile.W4A16Linear.from_linear(new, group=32)
    assert not points.weight_zero_point.any()
    assert torch.equal(points.quantized_weight, expected.quantized_weight)
    assert torch.equal(points.weight_scale, expected.weight_scale)


def test_compiled_code_reads_the_new_weight():
    old, new = linears(torch.float32)
    layer = octile.W8A8Linear.from_linear(old)
    model, x = torch.compile(layer, backend="eager", fullgraph=True), torch.randn(3, 192)
    assert torch.equal(model(x), layer(x))
    layer.refit_(new.weight, new.bias)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(model(x), octile.W8A8Linear.from_linear(new)(x))


class Storages(TorchDispatchMode):
    """Those that ops return."""

    def __torch_dispatch__(self, function, types, arguments=(), words=None):
        result = function(*arguments, **words or {})
        self.seen = getattr(self, "seen", set()) | {result.untyped_storage().data_ptr()}
        return result


def test_nothing_is_allocated():
    old, new = linears(torch.bfloat16)
    layer = octile.W8A8Linear.from_linear(old)
    known = {t.untyped_storage().data_ptr() for t in (*layer.buffers(), *new.parameters())}
    with Storages() as storages:
        layer.refit_(new.weight, new.bias)
        assert storages.seen <= known
        layer.refit_(new.weight.double())  # in another type: converted before
        assert not storages.seen <= known


def test_what_is_refused():
    layer = octile.W8A8Linear.from_linear(torch.nn.Linear(64, 32, bias=False))
    for weight in (torch.ones(64, 32), torch.ones(32, 64, dtype=torch.int8), torch.ones(32, 64, device="meta")):
        with pytest.raises(ValueError, match=r"octile: weight is .*; expected \(32, 64\), floats, on cpu"):
            layer.refit_(weight)
    with pytest.raises(ValueError, match=r"octile: bias is \(32,\), .*; the layer has none"):
        layer.refit_(torch.ones(32, 64), torch.ones(32))
