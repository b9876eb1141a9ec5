"""Packed weights: the same bits as unpacked ones, packing and unpacking, in all layers for inference."""

import copy

import octile
import pytest
import torch
from octile import W4A8Linear, W4A16Linear, W8A8Linear, W8A8StaticLinear, _c
from torch import nn


def layers(inputs, outputs):
    torch.manual_seed(2)
    plain = nn.Linear(inputs, outputs)
    yield W8A8Linear.from_linear(plain)
    yield W8A8Linear.from_linear(plain, per_channel=False)
    multiplier = torch.rand(inputs) + 0.5
    yield W8A8StaticLinear.from_linear(plain, 0.03, input_multiplier=multiplier, weight=plain.weight / multiplier)
    for group in (0, 32):
        for kind in (W4A16Linear, W4A8Linear) if inputs % (group or 1) == 0 else ():
            yield kind.from_linear(plain, group=group)
            shifted = kind(inputs, outputs, group=group, zero_point=True)
            points = torch.randint(-8, 8, shifted.weight_zero_point.shape, dtype=torch.int32)
            four = kind.from_linear(plain, group=group).state_dict()
            shifted.load_state_dict(four | {"weight_zero_point": points})
            yield shifted


@pytest.mark.parametrize("shape", [(64, 24), (96, 16), (33, 5), (160, 49)])
def test_packed_is_the_same(shape, device, generator):
    for layer in layers(*shape):
        layer.to(device)
        packed = copy.deepcopy(layer)
        try:
            assert packed.pack_() is packed and packed.pack_() is packed
        except RuntimeError as error:
            assert device.type == "cuda" and "no kernel" in str(error)
            continue
        dtypes = [torch.float32, torch.bfloat16] if device.type == "cpu" else [torch.float16, torch.bfloat16]
        with torch.no_grad():
            for rows in (1, 3, 40):
                for dtype in dtypes:
                    x = torch.randn(rows, shape[0], generator=generator).to(device, dtype)
                    y, exact = packed(x), layer(x)
                    if type(layer) is not W4A16Linear:
                        assert torch.equal(y, exact)
                    else:  # sums of floats, perhaps in another order
                        assert torch.allclose(y, exact, rtol=1e-2, atol=2e-2 if dtype != torch.float32 else 1e-5)
        for one, other in zip(packed.plain_weight(), layer.plain_weight(), strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                assert torch.equal(one, other.expand_as(one))
        assert torch.equal(packed.to_linear().weight, layer.to_linear().weight)
        assert set(packed.state_dict()) == {"packed_weight", "bias"} | {
            name for name in ("input_scale", "input_multiplier") if hasattr(layer, name)
        }
        other = copy.deepcopy(packed)
        for t in other.state_dict().values():
            t.zero_()
        other.load_state_dict(packed.state_dict())
        x = torch.randn(3, shape[0], generator=generator).to(device, dtypes[0])
        assert torch.equal(other(x), packed(x)) and ", packed" in str(packed)
        assert str(packed).count("kernel=") == 1 and "none (" not in str(packed)
        unaligned = torch.empty(len(packed.packed_weight) + 1, dtype=torch.uint8, device=device)[1:]
        state = packed.state_dict() | {"packed_weight": unaligned.copy_(packed.packed_weight)}
        other.load_state_dict(state, assign=True)
        assert torch.equal(other(x), packed(x))


def test_gradients_of_another_weight(device):
    """A packed weight that is replaced, for good or for one call, takes part in dX at once."""
    one, other = (W8A8Linear.from_linear(torch.nn.Linear(64, 24, device=device)).pack_() for _ in range(2))

    def dx(call):
        x = torch.ones(3, 64, device=device, requires_grad=True)
        call(x).sum().backward()
        return x.grad

    before, expected = dx(one), dx(other)
    assert torch.equal(dx(lambda x: torch.func.functional_call(one, dict(other.named_buffers()), (x,))), expected)
    assert torch.equal(dx(one), before)
    one.packed_weight = other.packed_weight
    assert torch.equal(dx(one), expected)


def test_a_model(device):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).to(device)
    octile.quantize_(model, octile.W8A8Dynamic(), lambda module, name: name == "0")
    assert octile.pack_(model) == (["0"] if device.type == "cpu" else [])
    assert octile.pack_(model) == [] and type(model[2]) is nn.Linear
    if device.type == "cpu":
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
        with torch.no_grad():
            for rows in (2, 5):
                x = torch.ones(rows, 64)
                assert torch.equal(compiled(x), model(x))
    with pytest.raises(RuntimeError, match="no kernel reads packed float64 layers"):
        W8A8Linear(64, 8, device=device, dtype=torch.float64).pack_()


@pytest.mark.parametrize("kind", [W8A8Linear, W4A16Linear])
def test_gradients_of_any_number_of_rows_compiled(kind):
    torch._dynamo.reset()
    model = nn.Sequential(*(kind.from_linear(nn.Linear(128, 128)).pack_() for _ in range(2)))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 3):
        x, gradients = torch.randn(rows, 128), []
        for one in (compiled, model):
            leaf = x.clone().requires_grad_()
            gradients.append(torch.autograd.grad(one(leaf).square().sum(), leaf)[0])
        torch.testing.assert_close(*gradients)
    torch._dynamo.reset()


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [W8A8Linear, W4A16Linear])
def test_one_layer_alone_is_exported(kind, bias, strict):
    layer, x = kind.from_linear(nn.Linear(128, 32, bias=bias)).pack_(), torch.randn(3, 128)
    assert torch.equal(torch.export.export(layer, (x,), strict=strict).module()(x), layer(x))


def test_what_x_is_not():
    layer = W8A8Linear.from_linear(nn.Linear(64, 24)).pack_()
    with pytest.raises(RuntimeError, match="x is torch.float64, the layer torch.float32"):
        layer(torch.ones(2, 64, dtype=torch.float64))
    with pytest.raises(
        TypeError, match="x is a QuantizedInput, expected a tensor; octile.Linear and W8A8Linear that is not"
    ):
        layer(octile.quantize_input(torch.ones(2, 64)))
    for one in (layer, W8A8Linear.from_linear(nn.Linear(64, 24))):
        with pytest.raises(TypeError, match="x is a NoneType, expected a tensor"):
            one(None)


def test_refusals():
    layer = next(layers(64, 24)).pack_()
    with pytest.raises(RuntimeError, match="Missing key.*packed_weight"):
        layer.load_state_dict(next(layers(64, 24)).state_dict())
    arguments = [torch.ones(2, 64), layer.packed_weight[:-64], None, 24, _c.DYNAMIC_PER_TOKEN, 0, 0, False, None, 0.0]
    with pytest.raises(RuntimeError, match="weight"):
        torch.ops.octile.linear_packed(*arguments)
    arguments[1] = layer.packed_weight.view(torch.bool)
    with pytest.raises(RuntimeError, match="weight is of bool"):
        torch.ops.octile.linear_packed(*arguments)
    arguments[1], arguments[3] = layer.packed_weight, -1
    with pytest.raises(RuntimeError, match="n = -1"):
        torch.ops.octile.linear_packed(*arguments)
    arguments[3], arguments[5] = 24, 2**40
    with pytest.raises(RuntimeError, match="weight"):
        torch.ops.octile.linear_packed(*arguments)


def test_the_operator_gives_what_the_layer_gives(generator):
    for layer in layers(64, 24):
        x, layer = torch.randn(5, 64, generator=generator), layer.pack_()
        fields = layer._fields(5)
        arguments = (x, layer.packed_weight, layer.bias, 24, fields["activation"], fields["weight"])
        arguments += (fields.get("group", 0), bool(fields.get("weight_zero_point", 0)))
        arguments += (getattr(layer, "input_multiplier", None), fields.get("static_scale", 0.0))
        assert torch.equal(torch.ops.octile.linear_packed(*arguments), layer(x))


def test_type_leaves_the_packed_weight(device):
    layer = W4A16Linear.from_linear(nn.Linear(64, 32, device=device), group=32).pack_()
    x = torch.randn(3, 64, device=device, dtype=torch.float16)
    expected = copy.deepcopy(layer).half()(x)
    assert torch.equal(layer.type(torch.float16)(x), expected)
