"""Cached weights: quantized once per step, and never used after the parameter has changed."""

import copy
import gc
import threading
import warnings
import weakref

import octile
import pytest
import torch
from octile import Linear, QuantizedLinear
from octile.static_weights import BUFFERS
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1),
    "foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),  # writes past the version counter
    "fused sgd": lambda p: torch.optim.SGD(p, 0.1, fused=True),
}


class Hidden(torch.optim.Optimizer):
    """An optimizer as some are: it writes through .data, which no version counter sees."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=0.1)


def setup(device, backward="int8", kind=Linear):
    torch.manual_seed(0)
    layer = kind(64, 48, device=device, dtype=torch.float32, backward=backward)
    return layer, torch.randn(8, 64, device=device)


def fresh(layer, x):
    """What a layer without any cache gives."""
    with torch.no_grad():
        layout = "out_in" if isinstance(layer, Linear) else "in_out"
        words = {"activation": layer.activation, "per_channel": layer.per_channel, "layout": layout}
        return octile.linear(x, layer.weight, layer.bias, **words)


def assert_current(layer, x):
    assert torch.equal(layer(x), fresh(layer, x))


@pytest.mark.parametrize("kind", [Linear, QuantizedLinear])
@pytest.mark.parametrize("backward", ["16bit", "int8"])
def test_once_per_step(kind, backward, device):
    layer, x = setup(device, backward, kind)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x.requires_grad_()
    for step in range(3):
        for _ in range(4):  # micro-batches
            layer(x).sum().backward()
        # In the first step nobody knows yet that it is an optimizer who steps.
        assert layer._weight_cache.fills == step + 4
        optimizer.step()
        optimizer.zero_grad()
    assert_current(layer, x)


def test_accumulated_gradients_are_those_of_one_batch(device):
    layer, x = setup(device)
    other = copy.deepcopy(layer)
    for _ in range(3):
        layer(x).sum().backward()
        octile.clear_weight_cache(other)
        other(x).sum().backward()
    assert torch.equal(layer.weight.grad, other.weight.grad)


def test_inference_fills_once(device):
    layer, x = setup(device)
    with torch.no_grad():
        for _ in range(3):
            layer(x)
    with torch.inference_mode():
        for _ in range(3):
            layer(x)
    assert layer._weight_cache.fills == 1
    y = layer(x.requires_grad_())  # what inference_mode left behind must be good for a backward
    y.sum().backward()
    layer.weight.grad = None
    octile.clear_weight_cache(layer)
    with torch.inference_mode():
        layer(x)
    layer.train(False)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert layer.weight.grad is not None


@pytest.mark.parametrize("name", [*OPTIMIZERS, "hidden"])
@pytest.mark.parametrize("zero", ["after", "before"])
def test_optimizers(name, zero, device):
    """`before`: zero_grad() between forward and backward, as many loops have it; the gradient is there all the time."""
    layer, x = setup(device)
    optimizer = Hidden(layer.parameters()) if name == "hidden" else OPTIMIZERS[name](layer.parameters())
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


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("clear", ["none", "zero", "grad", "before"])
def test_step_by_hand_through_data(clear, elsewhere, device):
    """`before`: as tutorials have it, so that the gradient is there, new and whole, at every forward.

    elsewhere: while an optimizer steps another model.
    """
    layer, x = setup(device)
    other, _ = setup(device)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for _ in range(3):
        if elsewhere:
            other(x).sum().backward()
            optimizer.step()
        if clear == "grad":
            (gradient,) = torch.autograd.grad(layer(x).square().sum(), layer.weight)
        else:
            loss = layer(x).square().sum()
            if clear == "before":
                layer.zero_grad()
            loss.backward()
            gradient = layer.weight.grad.clone()
        layer.weight.data.sub_(gradient, alpha=0.1)
        if clear == "none":
            layer.weight.grad = None
        elif clear == "zero":
            layer.weight.grad.zero_()
        assert_current(layer, x)


@pytest.mark.parametrize("grad", [True, False])
def test_every_way_to_change_a_weight(grad, device):
    layer, x = setup(device)
    new = torch.randn(48, 64, device=device)

    def in_place():
        with torch.no_grad():
            layer.weight.copy_(new)

    def load():
        layer.load_state_dict({"weight": new * 2, "bias": layer.bias})

    def assign():
        layer.load_state_dict({"weight": new * 3, "bias": layer.bias.detach()}, assign=True)

    def replace():
        layer.weight = nn.Parameter(new * 4)

    def assign_again():  # what FSDP does with a parameter that it has gathered anew
        layer.weight.data.mul_(2)
        layer.weight = layer.weight

    def replace_data():
        layer.weight.data = new * 5

    def swap_dictionary():
        layer._parameters["weight"] = nn.Parameter(new * 6)

    def initialise():
        nn.init.normal_(layer.weight)

    def vector():
        nn.utils.vector_to_parameters(torch.randn(48 * 65, device=device), layer.parameters())

    def average_for_evaluation():  # through .data, as averages of weights often are
        layer.weight.data.copy_(new * 7)
        layer.eval()

    def back_to_training():
        layer.weight.data.copy_(new * 8)
        layer.train()

    def there_and_back():
        layer.half().float()

    def pruned():
        prune.l1_unstructured(layer, "weight", 0.5)

    changes = [in_place, load, assign, replace, assign_again, replace_data, swap_dictionary, initialise, vector]
    changes += [average_for_evaluation, back_to_training, there_and_back, pruned]
    for change in changes:
        with torch.set_grad_enabled(grad):
            layer(x)
        change()
        with torch.set_grad_enabled(grad):
            assert_current(layer, x)


@pytest.mark.parametrize("grad", [True, False])
def test_a_weight_that_is_turned(grad, device):
    """Another matrix at the same address, of the same size and version."""
    layer, x = Linear(64, 64, device=device), torch.randn(8, 64, device=device)
    with torch.set_grad_enabled(grad):
        layer(x)
        layer.weight.data = layer.weight.data.t()
        assert_current(layer, x)


def test_the_first_tutorial(device):
    """pytorch.org's own first loop, against the same in a form that the version counter sees."""
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


def test_reentrant_checkpointing_keeps_the_cache(device):
    layer, x = setup(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    x.requires_grad_()
    fills = 0
    for step in range(3):
        for _ in range(4):
            checkpoint(layer, x, use_reentrant=True).sum().backward()
        if step:
            assert layer._weight_cache.fills == fills + 2
        optimizer.step()
        optimizer.zero_grad()
        fills = layer._weight_cache.fills


def test_swapped_parameters(device, monkeypatch):
    """With torch's flag for it, to() and load_state_dict() swap parameters, which nothing may refer to weakly."""
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


def test_average_restored_before_training_goes_on(device):
    """Evaluation under no_grad with other weights, put there and taken away through .data, without eval()."""
    layer, x = setup(device)
    with torch.no_grad():
        layer(x)
    kept = layer.weight.detach().clone()
    layer.weight.data.mul_(2)
    octile.clear_weight_cache(layer)
    with torch.no_grad():
        assert_current(layer, x)
    layer.weight.data.copy_(kept)
    assert_current(layer, x)


def test_reused_address(device):
    """Parameters that come and go, at one address and all of version 0."""
    layer, x = setup(device)
    for factor in range(1, 20):
        p = nn.Parameter(torch.full((48, 64), float(factor), device=device))
        got = torch.func.functional_call(layer, {"weight": p}, (x,))
        assert torch.equal(got, octile.linear(x, p, layer.bias))
        del p, got


def test_tensors_saved_by_an_older_graph_stay_valid(device):
    layer, x = setup(device)
    x.requires_grad_()
    old = layer(x)
    expected = torch.autograd.grad(layer(x).sum(), x)[0]
    with torch.no_grad():
        layer.weight.mul_(3)
    assert_current(layer, x)
    old.sum().backward()
    assert torch.equal(x.grad, expected)


def test_not_cached(device):
    """Where nothing would tell of a change."""
    layer, x = setup(device)
    with torch.inference_mode():
        frozen = Linear(64, 48, device=device)
        frozen(x)
        before = frozen(x)
        frozen.weight.mul_(2)
        assert not torch.equal(frozen(x), before)
    assert frozen._weight_cache.fills == 0
    if device.type == "cpu":
        layer.share_memory()
        layer(x)
        assert layer._weight_cache.fills == 0
    octile.clear_weight_cache(layer)
    with FlopCounterMode(display=False):  # a mode may count calls, or replace tensors
        fills = layer._weight_cache.fills
        layer(x)
        assert layer._weight_cache.fills == fills


def test_fake_tensors_do_not_stay(device):
    from torch._subclasses import FakeTensorMode

    layer, x = setup(device)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x)).shape == (8, 48)
    assert_current(layer, x)


def test_does_not_show_and_does_not_leak(device):
    layer, x = setup(device)
    layer(x)
    assert list(layer.state_dict()) == ["weight", "bias"] and list(layer.buffers()) == []
    other = copy.deepcopy(layer)
    assert other._weight_cache is not layer._weight_cache and other._weight_cache.fills == 0
    quantized = weakref.ref(layer._weight_cache._entries[1].tensors[0])
    parameter = weakref.ref(layer.weight)
    with torch.no_grad():
        layer.weight.mul_(2)
    layer(x)
    gc.collect()
    assert quantized() is None  # the old one goes when the new one comes
    quantized = weakref.ref(layer._weight_cache._entries[1].tensors[0])
    del layer
    gc.collect()
    assert quantized() is None and parameter() is None


def test_threads(device):
    layer, x = setup(device)
    expected = fresh(layer, x)
    wrong = []

    def work():
        for i in range(50):
            if i % 10 == 0:
                octile.clear_weight_cache(layer)
            with torch.no_grad():
                if not torch.equal(layer(x), expected):
                    wrong.append(i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def test_streams(device):
    if device.type != "cuda":
        pytest.skip("streams are CUDA's")
    layer, x = setup(device)
    expected = fresh(layer, x)
    side = torch.cuda.Stream()
    for _ in range(20):
        octile.clear_weight_cache(layer)
        with torch.no_grad():
            layer(x)
            with torch.cuda.stream(side):
                y = layer(x)
        side.synchronize()
        assert torch.equal(y, expected)


# ---- cache_weights_ ----


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
    assert_current(layer, x)  # eager code looks
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
    assert type(layer._weight_cache) is octile.weight_cache.WeightCache
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
    optimizer = Hidden(layer.parameters()) if name == "hidden" else OPTIMIZERS[name](layer.parameters())
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
    """Made anew after cache_weights_(), and never handed over."""
    layer, x = setup(device)
    octile.cache_weights_(layer, OPTIMIZERS[name](layer.parameters()))
    optimizer = OPTIMIZERS[name](layer.parameters())
    for _ in range(3):
        layer(x).square().sum().backward()
        optimizer.step()
        assert_current(layer, x)
        buffers = [getattr(layer, name).clone() for name in BUFFERS]
        octile.clear_weight_cache(layer)
        assert all(torch.equal(a, getattr(layer, name)) for a, name in zip(buffers, BUFFERS, strict=True))
    layer.weight.data.mul_(2)
    octile.clear_weight_cache(layer)
    assert not torch.equal(layer.weight_int8_scale, buffers[2])
    assert_current(layer, x)


def test_an_optimizer_that_is_gone(device):
    layer, x = setup(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(x).sum().backward()
    optimizer.step()
    del optimizer
    gc.collect()
    for _ in range(2):
        loss = layer(x).square().sum()
        layer.zero_grad()
        loss.backward()
        layer.weight.data.sub_(layer.weight.grad, alpha=0.1)
        assert_current(layer, x)


def test_nothing_out_of_date_is_kept(device):
    layer, x = setup(device)
    with torch.no_grad():
        layer(x)
        layer.weight.mul_(2)
    old = weakref.ref(layer._weight_cache._entries[0].tensors[0])
    layer(x)
    gc.collect()
    assert old() is None


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
    layer, _ = setup(device)
    nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
    with pytest.raises(ValueError, match="not a plain parameter"):
        octile.cache_weights_(layer)
