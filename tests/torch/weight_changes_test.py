"""A layer never uses an old weight, however the weight was changed."""

import contextlib
import copy
import gc
import threading
import weakref

import octile
import pytest
import torch
from octile import Linear, QuantizedLinear
from torch import nn
from torch.nn.utils import prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1),
    "foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),  # writes past the version counter
    "hidden": lambda p: Hidden(p),
}


class Hidden(torch.optim.Optimizer):
    """An optimizer that writes through .data, as some do, which no version counter sees."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=0.1)


def setup(device, kind=Linear, size=(64, 48), backward="int8"):
    torch.manual_seed(0)
    return kind(*size, device=device, dtype=torch.float32, backward=backward), torch.randn(8, size[0], device=device)


def fresh(layer, x):
    """The result of the function, which caches nothing."""
    layout = "out_in" if isinstance(layer, Linear) else "in_out"
    words = {"activation": layer.activation, "per_channel": layer.per_channel, "layout": layout}
    return octile.linear(x, layer.weight, layer.bias, **words)


def assert_current(layer, x):
    assert torch.equal(layer(x), fresh(layer, x))


def through_data(layer, new):
    layer.weight.data += 1
    yield
    layer.weight.data.copy_(new)
    yield
    layer.weight.data = new * 2
    yield
    layer.weight.detach().mul_(-1)
    yield
    layer.weight.untyped_storage().copy_((new * 3).untyped_storage())


def through_a_pointer(layer, new):
    if not layer.weight.is_cuda:
        layer.weight.detach().numpy()[3] = 2.5
        yield
    torch.from_dlpack(layer.weight.detach()).mul_(2)


def swapped(layer, new):
    torch.utils.swap_tensors(layer.weight, nn.Parameter(new))
    yield
    layer.weight.data.mul_(2)
    yield
    layer.weight.data, other = new * 5, layer.weight.data
    yield
    layer.weight.data = other


def seen_by_torch(layer, new):
    with torch.no_grad():
        layer.weight.copy_(new)
    yield
    layer.load_state_dict({"weight": new * 2, "bias": layer.bias})
    yield
    layer.load_state_dict({"weight": new * 3, "bias": layer.bias.detach()}, assign=True)
    yield
    layer.weight = nn.Parameter(new * 4)
    yield
    layer._parameters["weight"] = nn.Parameter(new * 6)
    yield
    nn.init.normal_(layer.weight)
    yield
    n = sum(p.numel() for p in layer.parameters())
    nn.utils.vector_to_parameters(torch.randn(n, device=new.device), layer.parameters())
    yield
    layer.half().float()
    yield
    prune.l1_unstructured(layer, "weight", 0.5)


MODES = {
    "training": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cuda" if torch.cuda.is_available() else "cpu", torch.bfloat16),
}


@pytest.mark.parametrize("evaluation", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("changes", [through_data, through_a_pointer, swapped, seen_by_torch])
@pytest.mark.parametrize("kind", [Linear, QuantizedLinear])
def test_every_way_to_change_a_weight(kind, changes, mode, evaluation, device):
    layer, x = setup(device, kind)
    layer.train(not evaluation)
    new = torch.randn_like(layer.weight.detach())

    def look():
        with MODES[mode]():
            y = layer(x).detach()
            assert torch.equal(y, fresh(layer, x))
        return y

    before = look()
    for _ in changes(layer, new):
        y = look()
        assert not torch.equal(y, before)
        before = y
    assert not torch.equal(look(), before)


@pytest.mark.parametrize("grad", [True, False])
def test_a_weight_that_is_turned(grad, device):
    """Another matrix at the same address, of the same size and version."""
    layer, x = setup(device, size=(64, 64))
    with torch.set_grad_enabled(grad):
        layer(x)
        layer.weight.data = layer.weight.data.t()
        assert_current(layer, x)


def test_a_shared_weight(device):
    """Two layers hold one parameter; a write through either reaches both."""
    layer, x = setup(device, size=(64, 64))
    other, _ = setup(device, size=(64, 64))
    other.weight = layer.weight
    for one in (layer, other):
        with torch.no_grad():
            layer(x), other(x)
            one.weight.data.mul_(2)
            assert_current(layer, x)
            assert_current(other, x)


def test_averages(device):
    """AveragedModel, and averages that replace the weights and are taken back."""
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8)).to(device)
    octile.quantize_(model, octile.Int8Training())
    x = torch.randn(16, 64, device=device)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        plain = copy.deepcopy(average.module)
        with torch.no_grad():
            assert torch.equal(average(x), plain(x))
            y = model(x)
            for p, a in zip(model.parameters(), average.module.parameters(), strict=True):
                p.data, a.data = a.data, p.data
            assert torch.equal(model(x), plain(x)) and torch.equal(average(x), y)
            for p, a in zip(model.parameters(), average.module.parameters(), strict=True):
                kept = p.data.clone()
                p.data.copy_(a.data)
                a.data.copy_(kept)
            assert torch.equal(model(x), y) and torch.equal(average(x), plain(x))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("zero", ["after", "before"])
def test_optimizers(name, zero, device):
    """`before`: zero_grad() between forward and backward, as in many loops; the gradient exists all the time."""
    layer, x = setup(device)
    optimizer = OPTIMIZERS[name](layer.parameters())
    for _ in range(3):
        before = layer.weight.detach().clone()
        y = layer(x)
        if zero == "before":
            optimizer.zero_grad()
        y.square().sum().backward()
        optimizer.step()
        if zero == "after":
            optimizer.zero_grad()
        assert not torch.equal(before, layer.weight)
        assert_current(layer, x)


def test_a_step_in_the_middle_of_an_evaluation(device):
    """An optimizer that writes past the version counter, with a gradient from elsewhere."""
    layer, x = setup(device)
    optimizer = Hidden(layer.parameters())
    with torch.no_grad():
        for p in layer.parameters():
            p.grad = torch.ones_like(p)
        for _ in range(3):
            layer(x)
            optimizer.step()
            assert_current(layer, x)


def test_the_first_tutorial(device):
    """pytorch.org's first training loop, against an equivalent that the version counter sees."""
    nets = [nn.Sequential(Linear(32, 64), nn.ReLU(), Linear(64, 8)).to(device) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    x, target = torch.randn(16, 32, device=device), torch.randn(16, 8, device=device)
    for _ in range(5):
        for net in nets:
            loss = (net(x) - target).square().mean()
            net.zero_grad()
            loss.backward()
            for f in net.parameters():
                if net is nets[0]:
                    f.data.sub_(f.grad.data * 0.1)
                else:
                    with torch.no_grad():
                        f -= f.grad * 0.1
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_accumulated_gradients(reentrant, device):
    """Micro-batches, with and without checkpointing, give the sum of their gradients."""
    layer, x = setup(device)
    other = copy.deepcopy(layer)
    x.requires_grad_()
    for part in x.split(2):
        checkpoint(layer, part, use_reentrant=reentrant).sum().backward()
        other(part).sum().backward()
    assert torch.equal(layer.weight.grad, other.weight.grad)


def test_tensors_saved_by_an_older_graph_stay_valid(device):
    layer, x = setup(device)
    x.requires_grad_()
    old = layer(x)
    expected = torch.autograd.grad(layer(x).sum(), x)[0]
    layer.weight.data.mul_(3)
    assert_current(layer, x)
    old.sum().backward()
    assert torch.equal(x.grad, expected)


def test_swapped_parameters(device, monkeypatch):
    """With torch's flag, to() and load_state_dict() swap parameters, which must not have weak references."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    for cached in (False, True):
        layer, x = setup(device)
        if cached:
            octile.cache_weights_(layer)
        layer(x)
        layer.to(torch.bfloat16)
        assert layer(x.bfloat16()).dtype == torch.bfloat16
        layer.load_state_dict({"weight": torch.randn(48, 64), "bias": torch.zeros(48)})
        layer.float()
        assert_current(layer, x)


def test_a_weight_of_inference_mode(device):
    with torch.inference_mode():
        layer, x = setup(device)
        before = layer(x)
        layer.weight.mul_(2)
        assert not torch.equal(layer(x), before)


def test_fake_tensors(device):
    from torch._subclasses import FakeTensorMode

    layer, x = setup(device)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x)).shape == (8, 48)
    assert_current(layer, x)


def test_does_not_show_and_does_not_leak(device):
    layer, x = setup(device)
    layer(x)
    assert list(layer.state_dict()) == ["weight", "bias"] and list(layer.buffers()) == []
    assert not weakref.getweakrefs(layer.weight)
    parameter = weakref.ref(layer.weight)
    del layer
    gc.collect()
    assert parameter() is None


def test_threads(device):
    layer, x = setup(device)
    with torch.no_grad():
        expected = fresh(layer, x)
    wrong = []

    def work():
        for i in range(50):
            with torch.no_grad():
                if not torch.equal(layer(x), expected):
                    wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong
