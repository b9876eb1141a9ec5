"""cache_weights_(): weights quantized once per step, into buffers, and how changes of a weight are noticed."""

import copy
import gc
import warnings
import weakref

import octile
import pytest
import torch
from octile import Linear, functional
from octile.static_weights import BUFFERS
from torch import nn
from torch.utils.checkpoint import checkpoint
from weight_changes_test import OPTIMIZERS, assert_current, setup


@pytest.fixture
def quantizations(monkeypatch):
    """A list that grows by one with each quantized weight."""
    done, original = [], functional.quantize_weight
    for module in (functional, octile.static_weights):
        monkeypatch.setattr(module, "quantize_weight", lambda *arguments: done.append(1) or original(*arguments))
    return done


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("kind", [Linear, octile.QuantizedLinear])
def test_once_per_step(kind, reentrant, quantizations, device):
    """However many micro-batches there are, with and without checkpointing, and evaluations."""
    layer, x = setup(device, kind)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    octile.cache_weights_(layer, optimizer)
    x.requires_grad_()
    for step in range(3):
        for _ in range(4):
            y = layer(x) if reentrant is None else checkpoint(layer, x, use_reentrant=reentrant)
            y.sum().backward()
            with torch.no_grad():
                layer(x)
            with torch.inference_mode():
                layer(x)
        assert len(quantizations) == step + 1
        optimizer.step()
        optimizer.zero_grad()
    assert_current(layer, x)


def test_without_it_every_forward_quantizes(quantizations, device):
    layer, x = setup(device)
    layer(x), layer(x)
    with torch.no_grad():
        layer(x)
    assert len(quantizations) == 3


def test_parameters_can_be_swapped(device):
    """torch.utils.swap_tensors refuses a parameter that has a weak reference."""
    layer, x = setup(device)
    cache = octile.cache_weights_(layer)
    layer(x)
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.randn(48, 64, device=device)))
    assert cache.stale() == ["the layer"]
    assert_current(layer, x)
    assert cache.stale() == []


def test_a_new_parameter_lets_the_old_one_go(device):
    layer, x = setup(device)
    octile.cache_weights_(layer)
    old = weakref.ref(layer.weight)
    layer.weight = nn.Parameter(torch.randn(48, 64, device=device))
    gc.collect()
    assert old() is None
    assert_current(layer, x)
    layer._parameters["weight"] = nn.Parameter(torch.randn(48, 64, device=device))
    assert_current(layer, x)


def test_a_guest_after_a_doubt_does_not_enter_the_buffers(device):
    layer, x = setup(device)
    octile.cache_weights_(layer)
    before = layer.weight_int8.clone()
    layer.eval()
    guest = nn.Parameter(torch.randn(48, 64, device=device))
    torch.func.functional_call(layer, {"weight": guest}, (x,))
    assert torch.equal(layer.weight_int8, before)
    assert_current(layer, x)


def test_writes_that_are_not_seen(device):
    """As documented, only the version counter is checked, until refresh()."""
    layer, x = setup(device)
    cache = octile.cache_weights_(layer)
    before = layer(x)
    layer.weight.data.mul_(2)
    assert torch.equal(layer(x), before) and cache.stale() == []
    cache.refresh()
    assert_current(layer, x)
    cache.remove()
    layer.weight.data.mul_(2)
    assert_current(layer, x)


def test_static_buffers(device):
    layer, x = setup(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    cache = octile.cache_weights_(layer, optimizer)
    buffers = dict(layer.named_buffers())
    assert set(buffers) == set(BUFFERS) and list(layer.state_dict()) == ["weight", "bias"]
    addresses = {name: b.data_ptr() for name, b in buffers.items()}
    x.requires_grad_()
    for _ in range(3):
        layer(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert cache.stale() == []
        assert_current(layer, x)
    assert {name: b.data_ptr() for name, b in layer.named_buffers()} == addresses
    layer.load_state_dict({"weight": torch.randn(48, 64), "bias": torch.zeros(48)})
    assert cache.stale() == []
    assert_current(layer, x)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert cache.stale() == ["the layer"]
    assert_current(layer, x)  # eager code checks
    layer.double().float()
    assert cache.stale() == [] and layer.weight_int8_scale.dtype == torch.float32
    assert_current(layer, x)
    other = copy.deepcopy(layer)
    assert not list(other.buffers())
    assert_current(other, x)
    layer.per_channel = False
    assert layer.weight_int8_scale.shape == (1,)
    cache.remove()
    assert not list(layer.buffers())
    assert_current(layer, x)
    octile.cache_weights_(layer).remove()


def test_static_buffers_made_in_inference_mode(device):
    layer, x = setup(device, backward="16bit")
    octile.cache_weights_(layer)
    layer.backward = "int8"
    with torch.inference_mode():
        layer(x)
    layer(x.requires_grad_()).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("name", ["fused", "hidden"])
def test_static_buffers_with_hidden_writes(name, device):
    layer, x = setup(device)
    optimizer = OPTIMIZERS[name](layer.parameters())
    octile.cache_weights_(layer, optimizer)
    for _ in range(2):
        layer(x).square().sum().backward()
        optimizer.step()
        assert_current(layer, x)


def test_static_buffers_warn_of_other_changes(device):
    layer, x = setup(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    cache = octile.cache_weights_(nn.ModuleDict({"head": layer}), optimizer)
    layer(x).sum().backward()
    with torch.no_grad():
        layer.weight.clamp_(-0.1, 0.1)
    with pytest.warns(UserWarning, match="the weights of head have changed since they were quantized"):
        optimizer.step()
    assert_current(layer, x)
    with torch.no_grad():
        layer.weight.clamp_(-0.1, 0.1)
    cache.refresh()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()


def test_evaluation_is_no_change(device):
    layer, x = setup(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    cache = octile.cache_weights_(layer, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            layer(x).sum().backward()
            layer.eval().train()
            assert cache.stale() == []
            optimizer.step()


@pytest.mark.parametrize("name", ["sgd", "fused"])
def test_another_optimizer(name, device):
    """An optimizer created after cache_weights_(), and not passed to it."""
    layer, x = setup(device)
    cache = octile.cache_weights_(layer, OPTIMIZERS[name](layer.parameters()))
    optimizer = OPTIMIZERS[name](layer.parameters())
    for _ in range(3):
        layer(x).square().sum().backward()
        optimizer.step()
        assert_current(layer, x)
        buffers = [getattr(layer, name).clone() for name in BUFFERS]
        cache.refresh()
        assert all(torch.equal(a, getattr(layer, name)) for a, name in zip(buffers, BUFFERS, strict=True))
    layer.weight.data.mul_(2)
    cache.refresh()
    assert not torch.equal(layer.weight_int8_scale, buffers[2])
    assert_current(layer, x)


def test_a_guest_does_not_enter_the_buffers(device):
    layer, x = setup(device)
    cache = octile.cache_weights_(layer)
    guest = nn.Parameter(torch.randn(48, 64, device=device))
    before = layer.weight_int8.clone()
    got = torch.func.functional_call(layer, {"weight": guest}, (x,))
    assert torch.equal(got, octile.linear(x, guest, layer.bias))
    assert torch.equal(layer.weight_int8, before) and cache.stale() == []
    layer.weight = guest
    assert_current(layer, x)
    assert not torch.equal(layer.weight_int8, before)


@pytest.mark.parametrize("toggle", ["eval", "assign"])
def test_static_buffers_after_a_hidden_write(toggle, device):
    layer, x = setup(device)
    octile.cache_weights_(layer)
    layer.weight.data.mul_(2)
    if toggle == "eval":
        layer.eval()
    else:
        layer.weight = layer.weight
    assert_current(layer, x)


def test_a_parametrized_guest_does_not_enter_the_buffers(device):
    layer, x = setup(device)
    octile.cache_weights_(layer)
    before = layer.weight_int8_scale.clone()

    class Twice(nn.Module):
        def forward(self, w):
            return nn.Parameter(2 * w)

    nn.utils.parametrize.register_parametrization(layer, "weight", Twice())
    layer(x)
    assert torch.equal(layer.weight_int8_scale, before)


def test_meta_weights_that_are_assigned(device):
    layer, x = setup(device)
    empty = Linear(64, 48, device="meta", backward="int8")
    octile.cache_weights_(empty)
    empty.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(empty(x), layer(x)) and empty.weight_int8.device == layer.weight.device


def test_a_move_that_fails(device):
    layer, x = setup(device)
    octile.cache_weights_(layer)

    def fail(_):
        raise MemoryError

    with pytest.raises(MemoryError):
        layer._apply(fail)
    assert_current(layer, x)


def test_a_step_under_a_pending_backward_is_an_error(device):
    layer, x = setup(device)
    cache = octile.cache_weights_(layer)
    y = layer(x.requires_grad_())
    cache.refresh()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_static_buffers_keep_nothing_alive(device):
    layer, _ = setup(device)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    cache = octile.cache_weights_(layer, optimizer)
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None
    cache.refresh()
    optimizer.step()
    assert cache.stale() == []


def test_static_buffers_refuse(device):
    layer, _ = setup(device)

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inside):
            self.inside = inside

        def step(self):
            self.inside.step()

    with pytest.raises(TypeError, match="Wrapper runs no hooks"):
        octile.cache_weights_(layer, Wrapper(torch.optim.SGD(layer.parameters(), lr=0.1)))
    with pytest.raises(TypeError, match="is not a torch.optim.Optimizer"):
        octile.cache_weights_(layer, torch.optim.SGD)
    with pytest.raises(ValueError, match="no octile.Linear"):
        octile.cache_weights_(nn.Linear(3, 4))
    octile.cache_weights_(layer)
    with pytest.raises(ValueError, match="cached already"):
        octile.cache_weights_(layer)
    with torch.inference_mode(), pytest.raises(ValueError, match="made in inference mode"):
        octile.cache_weights_(Linear(3, 4))
    layer, _ = setup(device)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    with pytest.raises(ValueError, match="not a plain parameter"):
        octile.cache_weights_(layer)


def test_refreshed_by_the_model(device):
    """clear_weight_cache(), for callers without a handle."""
    layer, x = setup(device)
    model = nn.Sequential(layer)
    octile.clear_weight_cache(model)  # nothing is cached: nothing to do
    octile.cache_weights_(model)
    before = layer(x)
    layer.weight.data.mul_(2)
    octile.clear_weight_cache(model)
    assert not torch.equal(layer(x), before)
    assert_current(layer, x)
