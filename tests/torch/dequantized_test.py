"""layer.weight of layers for inference: floats that can be read but not written."""

import copy
import io
import pickle

import pytest
import torch
from octile import W4A16Linear, W8A8Linear, W8A8StaticLinear
from torch import nn

BRAIN = torch.bfloat16
NAMES = ["int8", "one scale", "static", "multiplied", "4 bits", "zero points"]


def plain(dtype=torch.float32, bias=True):
    torch.manual_seed(3)
    return nn.Linear(64, 24, bias, dtype=dtype)


def make(name, dtype=torch.float32, bias=True, pack=False):
    linear = plain(dtype, bias)
    multiplier = torch.rand(64) + 0.5
    if name == "zero points":
        layer = W4A16Linear(64, 24, bias, dtype=dtype, group=32, zero_point=True)
        state = W4A16Linear.from_linear(linear, group=32).state_dict()
        layer.load_state_dict(state | {"weight_zero_point": torch.randint(-8, 8, (24, 2), dtype=torch.int32)})
    else:
        layer = {
            "int8": lambda: W8A8Linear.from_linear(linear),
            "one scale": lambda: W8A8Linear.from_linear(linear, per_channel=False),
            "static": lambda: W8A8StaticLinear.from_linear(linear, 0.03),
            "multiplied": lambda: W8A8StaticLinear.from_linear(
                linear, 0.03, input_multiplier=multiplier, weight=linear.weight.float() / multiplier
            ),
            "4 bits": lambda: W4A16Linear.from_linear(linear, group=32),
        }[name]()
    return layer.pack_() if pack else layer


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, BRAIN])
@pytest.mark.parametrize("name", NAMES)
def test_what_models_do_with_a_weight(name, dtype, pack):
    layer = make(name, dtype, bias=False, pack=pack)
    w, dense = layer.weight, layer.to_linear().weight.detach()
    assert isinstance(w, torch.Tensor) and not isinstance(layer, nn.Linear)
    assert (w.dtype, w.shape, w.device) == (dtype, (24, 64), torch.device("cpu")) and w.is_floating_point()
    assert torch.equal(w, dense) and torch.equal(w.clone(), dense) and type(w.clone()) is torch.Tensor
    if name != "zero points":
        assert (w - plain(dtype, False).weight).norm() < 0.15 * w.norm()
    x = torch.randn(5, 64, dtype=dtype)
    assert torch.equal(w @ x.t(), dense @ x.t())  # Mamba
    assert torch.equal(torch.einsum("oi,bi->bo", w, x), torch.einsum("oi,bi->bo", dense, x))
    assert torch.equal(nn.functional.linear(x, w), nn.functional.linear(x, dense))
    assert torch.equal(w.view(2, 12, 64)[1], dense[12:]) and torch.equal(w.T[3], dense.T[3])
    assert torch.equal(w.float().sum(), dense.float().sum()) and w.tolist() == dense.tolist()
    assert torch.equal(torch.cat([w, w.detach()]), torch.cat([dense, dense]))
    assert torch.equal(torch.from_dlpack(w), dense) and w.untyped_storage().nbytes() == dense.nbytes
    with pytest.raises(RuntimeError, match="a dequantized weight has no memory of its own"):
        w.data_ptr()
    if dtype is torch.float32:
        assert (w.numpy() == dense.numpy()).all()
    one, other = (x.clone().requires_grad_() for _ in range(2))
    nn.functional.linear(one, w).square().sum().backward()
    nn.functional.linear(other, dense).square().sum().backward()
    assert torch.equal(one.grad, other.grad)
    file = io.BytesIO()
    torch.save(w, file)
    file.seek(0)
    for again in (copy.deepcopy(w), pickle.loads(pickle.dumps(w)), torch.load(file)):
        assert torch.equal(again, dense) and type(again) is torch.Tensor
    with torch.inference_mode():
        assert torch.equal(layer.weight @ x.t(), dense @ x.t())


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_type_follows_the_layer(name, pack):
    """The original weight's type, also without a bias, as to() and half() convert it."""
    for bias in (False, True):
        layer = make(name, BRAIN, bias, pack)
        assert layer.weight.dtype == layer.to_linear().weight.dtype == BRAIN
        assert copy.deepcopy(layer).weight.dtype == BRAIN
        layer.to("cpu")
        assert layer.weight.dtype == BRAIN
        layer.half()
        assert layer.weight.dtype == torch.float16
        layer.to(torch.float32).share_memory()
        assert layer.weight.dtype == torch.float32
        layer.to("meta")
        assert layer.weight.is_meta and (layer.weight @ torch.empty(64, 3, device="meta")).shape == (24, 3)
        assert layer.to_empty(device="cpu").weight.shape == (24, 64)


@pytest.mark.parametrize("name", NAMES)
def test_writes_are_refused(name):
    layer = make(name)
    before = layer.to_linear().weight
    writes = [
        lambda w: w.mul_(2),
        lambda w: w.data.add_(1),
        lambda w: setattr(w, "data", torch.zeros(24, 64)),
        lambda w: setattr(w, "data", w.data.mul_(2)),
        lambda w: w.detach().copy_(torch.zeros(24, 64)),
        lambda w: w.__setitem__(0, 0.0),
        lambda w: nn.init.normal_(w),
        lambda w: torch.add(w, 1, out=w),
        lambda w: torch._foreach_add_([torch.zeros(24, 64), w], 1),
    ]
    for write in writes:
        with pytest.raises(RuntimeError, match="the weight of a W.* is read-only: .* to_linear"), torch.no_grad():
            write(layer.weight)
    layer.weight = layer.weight  # changes nothing
    for value in (torch.zeros(24, 64), nn.Parameter(torch.zeros(24, 64)), None):
        with pytest.raises(AttributeError, match="the weight of a W.* is read-only"):
            layer.weight = value
    assert torch.equal(layer.to_linear().weight, before)


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_of_the_old_name(name):
    layer = make(name)
    state = {("weight" if n == "quantized_weight" else n): t for n, t in layer.state_dict().items()}
    other = nn.Sequential(make(name))
    other[0].quantized_weight.zero_()
    other.load_state_dict({f"0.{n}": t for n, t in state.items()})
    assert torch.equal(other[0].weight, layer.weight)
    other[0].quantized_weight.zero_()
    other.load_state_dict({f"0.{n}": t for n, t in state.items()}, assign=True)
    assert torch.equal(other[0].weight, layer.weight)
    with pytest.raises(RuntimeError, match=r"0.quantized_weight is torch.float32, expected torch.u?int8: load a float"):
        other.load_state_dict(
            {f"0.{n}": t for n, t in (layer.state_dict() | {"quantized_weight": torch.zeros(1)}).items()}
        )


@pytest.mark.parametrize("pack", [False, True])
def test_a_compiled_model_that_reads_the_weight(pack):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make("4 bits", pack=pack)

        def forward(self, x):
            if x.dtype != self.inner.weight.dtype:  # T5
                x = x.to(self.inner.weight.dtype)
            return self.inner(x) + (self.inner.weight @ x.t()).t()

    model, x = Reader(), torch.randn(5, 64)
    with torch.no_grad():
        expected = model(x)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.allclose(compiled(x), expected, atol=1e-5)
