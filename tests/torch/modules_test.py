"""Layers: values and gradients by the contract, and what users of torch expect of a layer."""

import copy
import io
import pickle
import re
import subprocess
import sys

import layer_reference
import octile
import op_reference as reference
import pytest
import safetensors.torch
import torch
from octile import Linear, QuantizedLinear, W4A8Linear, W4A16Linear, W8A8Linear, W8A8StaticLinear
from torch import nn
from torch.utils.checkpoint import checkpoint

HALF, BRAIN, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
BACKWARDS = ["16bit", "int8", "int8-128", "int8-whole", ("int8", "16bit"), ("16bit", "int8"), ("16bit", "int8-whole")]


def pair(backward):
    return backward if isinstance(backward, tuple) else (backward, backward)


def draw(generator, device, *size, dtype=FULL):
    return torch.randn(size, generator=generator).to(device, dtype)


def make(kind, inputs, outputs, device, dtype, bias=True, **options):
    torch.manual_seed(1)
    layer = kind(inputs, outputs, bias, device=device, dtype=dtype if dtype != DOUBLE else FULL, **options)
    return layer.to(dtype)


def out_in(layer, t):
    return t if isinstance(layer, Linear) else t.t()


# ---- Values and gradients ----


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("dtype", [HALF, BRAIN, FULL, DOUBLE])
@pytest.mark.parametrize("kind", [Linear, QuantizedLinear])
def test_gradients(kind, dtype, backward, device, generator):
    if dtype == DOUBLE and device.type == "cuda" and {"int8", "int8-128"} & set(pair(backward)):
        pytest.skip("blocks of float64 are for a CPU")
    for m, k, n, per_token, per_channel in (
        (33, 70, 50, True, True),
        (64, 32, 48, False, True),
        (5, 129, 3, True, False),
        (300, 20, 140, True, True),  # several blocks of either contraction
    ):
        activation = "per_token" if per_token else "per_tensor"
        layer = make(kind, k, n, device, dtype, per_channel=per_channel, activation=activation, backward=backward)
        x = draw(generator, device, m, k, dtype=dtype).requires_grad_()
        dy = draw(generator, device, m, n, dtype=dtype)
        y = layer(x)
        y.backward(dy)
        w = out_in(layer, layer.weight)
        expected = layer_reference.Expected(x, w, layer.bias, per_token, per_channel)
        expected.assert_y(y)
        dx_product, dw_product = pair(backward)
        expected.assert_dx(x.grad, dy, dx_product)
        expected.assert_dw(out_in(layer, layer.weight.grad), dy, dw_product)
        expected.assert_db(layer.bias.grad, dy)
        assert (x.grad.dtype, layer.weight.grad.dtype, layer.bias.grad.dtype) == (dtype,) * 3
        with torch.no_grad():
            assert torch.equal(layer(x), y)


@pytest.mark.parametrize("backward", ["16bit", "int8"])
def test_function(backward, device, generator):
    x, w, b = (draw(generator, device, *s).requires_grad_() for s in ((4, 6, 40), (24, 40), (24,)))
    dy = draw(generator, device, 4, 6, 24)
    y = octile.linear(x, w, b, backward=backward)
    gradients = torch.autograd.grad(y, (x, w, b), dy)
    expected = layer_reference.Expected(x.flatten(0, 1), w, b)
    expected.assert_y(y.flatten(0, 1))
    expected.assert_dx(gradients[0].flatten(0, 1), dy.flatten(0, 1), backward)
    expected.assert_dw(gradients[1], dy.flatten(0, 1), backward)
    expected.assert_db(gradients[2], dy.flatten(0, 1))
    turned = octile.linear(x, w.t().contiguous(), b, layout="in_out", backward=[backward, backward])
    assert torch.equal(turned, y)
    assert torch.equal(octile.linear(x, w.t().contiguous().t(), b), y)  # any strides
    assert not octile.linear(x.detach(), w.detach(), b.detach()).requires_grad


def test_what_the_words_of_a_backward_mean(device):
    """The options are set by strings, and read back as the same strings."""
    for backward in BACKWARDS:
        layer = Linear(8, 4, device=device, backward=backward)
        assert layer.backward == backward and f"backward={backward}" in str(layer)
        layer.rounding = "stochastic"
        assert layer.backward == backward
        plan = layer.explain(300, of="backward").splitlines()[0]
        for word, block in (("int8", 256), ("int8-128", 128)):
            assert (f"blocks of {block}" in plan) == (word in pair(backward))
    layer.backward = "int8-whole"
    assert layer.backward == "int8-whole" and "blocks of" not in layer.explain(300, of="backward").splitlines()[0]
    layer.backward = ("int8", "int8")
    assert layer.backward == "int8"
    layer.backward = "int8-256"
    assert layer.backward == "int8"
    layer.backward = ("16bit", "int8-1024")
    assert layer.backward == ("16bit", "int8-1024") and "blocks of 1024" in layer.explain(300, of="backward")
    for wrong in (("int8", "int8-whole"), ["int8-whole", "int8"], ("int8-128", "int8-512")):
        with pytest.raises(ValueError, match=r"octile: backward is \('int8.*same blocks"):
            layer.backward = wrong
    with pytest.raises(
        ValueError, match="backward is 'int9', expected '16bit' or 'int8' or 'int8-whole' or 'int8-128'"
    ):
        Linear(8, 4, backward="int9")


def test_blocks_keep_the_gradient_of_small_tokens(device, generator):
    """One token is a hundred times as large as the others: one scale for the whole contraction would round theirs away."""
    plain = nn.Linear(32, 24, device=device)
    x = draw(generator, device, 1024, 32).requires_grad_()
    dy = draw(generator, device, 1024, 24)
    dy[700] *= 1000

    def dw(backward):
        layer = Linear.from_linear(plain, backward=backward)
        return torch.autograd.grad(layer(x), layer.weight, dy)[0]

    exact = dw("16bit")
    error = {word: ((dw(word) - exact).norm() / exact.norm()).item() for word in ("int8-128", "int8", "int8-whole")}
    assert error["int8-128"] < 0.45 * error["int8-whole"] and error["int8"] < 0.6 * error["int8-whole"]


def test_gradients_accumulate_over_micro_batches(device, generator):
    """With the weight quantized once; each micro-batch has its own blocks. Repeated, it gives the same bits."""
    layer = make(Linear, 64, 48, device, FULL, backward="int8")
    octile.cache_weights_(layer)
    parts = [(draw(generator, device, 200, 64), draw(generator, device, 200, 48)) for _ in range(3)]

    def accumulated():
        layer.weight.grad = None
        for x, dy in parts:
            layer(x).backward(dy)
        return layer.weight.grad.clone()

    total = None
    for x, dy in parts:
        (one,) = torch.autograd.grad(layer(x), layer.weight, dy)
        total = one if total is None else total + one
    assert torch.equal(accumulated(), total) and torch.equal(accumulated(), total)


def test_small_gradients_are_not_lost(device, generator):
    """dY of a mean over many tokens, times a weight's scale, is far below an activation scale's lower limit."""
    layer = make(Linear, 128, 64, device, FULL, backward="int8")
    x = draw(generator, device, 32, 128).requires_grad_()
    dy = draw(generator, device, 32, 64)
    large = torch.autograd.grad(layer(x), (x, layer.weight), dy)
    small = torch.autograd.grad(layer(x), (x, layer.weight), dy * 2.0**-40)
    assert all(torch.equal(a * 2.0**-40, b) for a, b in zip(large, small, strict=True))


@pytest.mark.parametrize("kind", [Linear, QuantizedLinear])
def test_stochastic_rounding(kind, device, generator):
    """Without bias: the mean of 64 draws is about 8 times closer than one draw, unlike nearest rounding's error."""
    plain = nn.Linear(128, 64, device=device)
    layer = kind.from_linear(plain, backward="int8", rounding="stochastic")
    exact = kind.from_linear(plain, backward="16bit")
    x = draw(generator, device, 32, 128).requires_grad_()
    dy = draw(generator, device, 32, 64)

    def gradients(layer):
        return torch.autograd.grad(layer(x), (x, layer.weight), dy)

    draws = [gradients(layer) for _ in range(64)]
    for which, target in enumerate(gradients(exact)):
        one = ((draws[0][which] - target).norm() / target.norm()).item()
        mean = ((sum(d[which] for d in draws) / 64 - target).norm() / target.norm()).item()
        assert not torch.equal(draws[0][which], draws[1][which])
        assert 0.005 < one < 0.03 and mean < one / 5
    layer.rounding = "nearest"
    assert layer.rounding == "nearest"
    assert all(torch.equal(a, b) for a, b in zip(gradients(layer), gradients(layer), strict=True))
    y = octile.linear(x, plain.weight, backward="int8", rounding="stochastic")
    assert torch.autograd.grad(y, x, dy)[0].shape == x.shape


@pytest.mark.parametrize("make_dy", ["expanded", "transposed", "sliced", "scalar"])
@pytest.mark.parametrize("backward", ["16bit", "int8"])
def test_gradients_that_are_not_dense(backward, make_dy, device, generator):
    layer = make(Linear, 48, 20, device, FULL, backward=backward)
    x = draw(generator, device, 10, 48).requires_grad_()
    dy = {
        "expanded": draw(generator, device, 1, 20).expand(10, 20),
        "transposed": draw(generator, device, 20, 10).t(),
        "sliced": draw(generator, device, 10, 40)[:, ::2],
        "scalar": torch.ones((), device=device).expand(10, 20),
    }[make_dy]
    got = torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), dy)
    dense = torch.autograd.grad(layer(x), (x, layer.weight, layer.bias), dy.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, dense, strict=True))


@pytest.mark.parametrize("kind", [Linear, QuantizedLinear, W8A8Linear, W4A16Linear])
def test_leading_dimensions(kind, device, generator):
    plain = nn.Linear(64, 24, device=device)
    layer = kind.from_linear(plain) if kind is not W4A16Linear else kind.from_linear(plain, group=32)
    options = {"activation": "per_token"} if kind is QuantizedLinear else {}
    layer = kind.from_linear(plain, **options) if options else layer
    flat = draw(generator, device, 30, 64)
    with torch.no_grad():
        y = layer(flat)
        assert torch.equal(layer(flat.view(5, 6, 64)), y.view(5, 6, 24))
        assert torch.equal(layer(flat.view(5, 1, 2, 3, 64)), y.view(5, 1, 2, 3, 24))
        assert torch.equal(layer(flat[0]), y[0])
        assert torch.equal(layer(flat.view(5, 6, 64).transpose(0, 1)), y.view(5, 6, 24).transpose(0, 1))
        assert layer(flat[:0]).shape == (0, 24)
        assert layer(flat.view(5, 6, 64)[:, :0]).shape == (5, 0, 24)
    if kind in (Linear, QuantizedLinear):
        for shape in ((5, 6), (30,), (1, 30, 1)):
            x = flat.clone().view(*shape, 64).requires_grad_()
            layer(x).sum().backward()
            assert x.grad.shape == x.shape
        x = flat[0].clone().requires_grad_()
        layer(x).sum().backward()
        assert x.grad.shape == (64,)


@pytest.mark.parametrize("backward", ["16bit", "int8"])
def test_empty_batch(backward, device):
    layer = make(Linear, 32, 16, device, FULL, backward=backward)
    x = torch.zeros(0, 32, device=device, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.shape == (0, 16) and x.grad.shape == (0, 32)
    assert not layer.weight.grad.any() and not layer.bias.grad.any()
    x = torch.zeros(3, 0, 32, device=device, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == (3, 0, 32)


@pytest.mark.parametrize("shape", [(10, 48), (2, 5, 48), (48,)])
@pytest.mark.parametrize("kind", [Linear, QuantizedLinear, octile.CustomLinearFunction])
def test_outputs_can_be_changed_in_place(kind, shape, device, generator):
    """As with torch.nn.Linear: by ReLU(inplace=True), by a residual."""
    torch.manual_seed(0)
    layer = QuantizedLinear(48, 20, device=device, dtype=FULL)
    if kind is Linear:
        layer = Linear(48, 20, device=device)
    forward = layer
    if kind is octile.CustomLinearFunction:

        def forward(x):
            return octile.CustomLinearFunction.apply(x, layer.weight, layer.bias, per_channel=True)

    x = draw(generator, device, *shape).requires_grad_()
    y = forward(x)
    y += 1
    y.relu_()
    got = torch.autograd.grad(y.square().sum(), (x, layer.weight))
    expected = torch.autograd.grad((forward(x) + 1).relu().square().sum(), (x, layer.weight))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


# ---- What is computed, and what is kept ----


def saved(y):
    return [t for t in y.grad_fn.saved_tensors if t is not None]


@pytest.mark.parametrize("backward", BACKWARDS)
def test_saves_int8_alone(backward, device, generator):
    layer = make(Linear, 64, 48, device, HALF, backward=backward)
    x = draw(generator, device, 32, 64, dtype=HALF).requires_grad_()
    y = layer(x)  # its graph holds them
    x_saved, xs, w_saved, ws = y.grad_fn.saved_tensors
    dx_product, dw_product = pair(backward)
    assert x_saved.dtype == w_saved.dtype == torch.int8 and xs.dtype == ws.dtype == FULL
    assert x_saved.shape == ((64, 32) if dw_product != "16bit" else (32, 64))
    assert w_saved.shape == ((64, 48) if dx_product != "16bit" else (48, 64))


def test_nothing_that_nobody_asked_for(device, generator):
    layer = make(Linear, 64, 48, device, FULL)
    x = draw(generator, device, 32, 64)
    assert len(saved(layer(x))) == 2  # x and its scale
    layer.weight.requires_grad_(False)
    assert saved(layer(x)) == []  # dB alone
    assert len(saved(layer(x.requires_grad_()))) == 2  # the weight and its scale
    layer.bias.requires_grad_(False)
    assert layer(x.detach()).grad_fn is None
    y = layer(x)
    y.sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is None and x.grad is not None
    layer.requires_grad_(True)
    x.grad = None
    y = layer(x)
    y.sum().backward(inputs=[layer.bias])
    assert layer.weight.grad is None and x.grad is None and layer.bias.grad is not None


def test_backward_computes_what_is_asked(device, generator, monkeypatch):
    from octile import functional

    asked = []
    original = functional._linear_backward

    def watch(*arguments):
        asked.append((arguments[5], arguments[6], arguments[7]))
        return original(*arguments)

    monkeypatch.setattr(functional, "_linear_backward", watch)
    layer = make(Linear, 64, 48, device, FULL)
    x = draw(generator, device, 32, 64)
    wanted = [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 1, 1)]
    for dx, dw, db in wanted:
        x.requires_grad_(bool(dx)), layer.weight.requires_grad_(bool(dw)), layer.bias.requires_grad_(bool(db))
        layer(x).sum().backward()
    assert asked == wanted


# ---- Mixed types ----


@pytest.mark.parametrize("backward", ["16bit", "int8", "int8-whole"])
@pytest.mark.parametrize("x_dtype", [FULL, BRAIN])
def test_autocast(x_dtype, backward, device, generator):
    layer = make(Linear, 64, 48, device, FULL, backward=backward)
    x = draw(generator, device, 160, 64, dtype=x_dtype).requires_grad_()
    with torch.autocast(device.type, BRAIN):
        y = layer(x)
        with torch.no_grad():
            assert torch.equal(layer(x), y)
    dy = draw(generator, device, 160, 48, dtype=BRAIN)
    y.backward(dy)
    # From float32 weights and x directly: no rounding to bfloat16 before they are quantized.
    expected = layer_reference.Expected(x, layer.weight, layer.bias, dtype=BRAIN)
    expected.assert_y(y)
    expected.assert_dx(x.grad.to(BRAIN), dy, backward)
    expected.assert_dw(layer.weight.grad, dy, backward)
    assert x.grad.dtype == x_dtype and layer.weight.grad.dtype == FULL and layer.bias.grad.dtype == FULL
    # float32 directly from the kernel, not widened bfloat16.
    assert not torch.equal(layer.weight.grad, layer.weight.grad.to(BRAIN).float())


@pytest.mark.parametrize("kind", [QuantizedLinear, W8A8Linear, W4A16Linear, W4A8Linear])
def test_autocast_elsewhere(kind, device, generator):
    layer = kind.from_linear(nn.Linear(128, 48, device=device))
    x = draw(generator, device, 32, 128)
    with torch.no_grad(), torch.autocast(device.type, BRAIN):
        assert layer(x).dtype == BRAIN and layer(x.to(BRAIN)).dtype == BRAIN
    if kind is not W4A16Linear:
        with torch.autocast(device.type, BRAIN):
            y = layer(x.requires_grad_())
        assert y.dtype == BRAIN
        y.sum().backward()
        assert x.grad.dtype == FULL


def test_mixed_types_without_autocast(device, generator):
    layer = make(Linear, 64, 48, device, FULL)
    x = draw(generator, device, 32, 64, dtype=BRAIN).requires_grad_()
    y = layer(x)
    assert y.dtype == BRAIN
    y.sum().backward()
    assert x.grad.dtype == BRAIN and layer.weight.grad.dtype == FULL and layer.bias.grad.dtype == FULL
    layer = make(Linear, 64, 48, device, HALF)
    layer(x).sum().backward()
    assert layer.weight.grad.dtype == HALF
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            with pytest.raises(RuntimeError, match="octile.*float64 only goes with float64"):
                layer(x.double())
            with pytest.raises(RuntimeError, match="octile.*f64"):
                octile.linear(x, layer.weight.double())


def test_grad_scaler(device, generator):
    layer = make(Linear, 64, 48, device, FULL, backward="int8")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    x = draw(generator, device, 32, 64)
    for _ in range(2):
        before = layer.weight.detach().clone()
        with torch.autocast(device.type, HALF if device.type == "cuda" else BRAIN):
            loss = layer(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert not torch.equal(before, layer.weight) and layer.weight.isfinite().all()
    # An overflow makes a gradient non-finite, which the scaler must see.
    before = layer.weight.detach().clone()
    scaler.scale(layer(x * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(before, layer.weight)
    assert scaler.get_scale() < 2.0**10


# ---- The rest of autograd ----


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backward", ["16bit", "int8"])
def test_checkpointing(backward, reentrant, device, generator):
    def block(x):
        return model(x).relu()

    model = nn.Sequential(
        make(Linear, 64, 96, device, FULL, backward=backward), nn.GELU(), make(Linear, 96, 64, device, FULL)
    )
    x = draw(generator, device, 8, 64).requires_grad_()
    plain = torch.autograd.grad(block(x).sum(), (x, *model.parameters()))
    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    got = (x.grad, *(p.grad for p in model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain, got, strict=True))


def test_saved_tensor_hooks(device, generator):
    layer = make(Linear, 64, 48, device, FULL)
    x = draw(generator, device, 8, 64).requires_grad_()
    plain = torch.autograd.grad(layer(x).sum(), (x, layer.weight))
    with torch.autograd.graph.save_on_cpu():
        y = layer(x)
    got = torch.autograd.grad(y.sum(), (x, layer.weight))
    assert all(torch.equal(a, b) for a, b in zip(plain, got, strict=True))


def test_differentiable_once(device, generator):
    layer = make(Linear, 16, 8, device, FULL)
    for power in (1, 2):  # dY without and with its own gradient
        x = draw(generator, device, 4, 16).requires_grad_()
        y = layer(x).pow(power).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        with pytest.raises(RuntimeError, match="octile.*differentiated once"):
            (gradient.square().sum() + layer(x).sum()).backward()
        function = octile.CustomLinearFunction.apply(x, layer.weight.t()).pow(power).sum()
        (gradient,) = torch.autograd.grad(function, x, create_graph=True)
        with pytest.raises(RuntimeError, match="octile.*differentiated once"):
            gradient.sum().backward()

    def loss(x):
        return layer(x).square().sum()

    for second in (torch.autograd.functional.hessian, lambda f, x: torch.autograd.functional.hvp(f, x, x)):
        with pytest.raises(RuntimeError, match="octile.*differentiated once"):
            second(loss, x.detach())


def test_refuses_transforms(device, generator):
    x = draw(generator, device, 3, 4, 64)
    for layer in (
        Linear(64, 8, device=device),
        W8A8Linear(64, 8, device=device),
        W4A16Linear(64, 8, device=device, group=64),
    ):
        with torch.no_grad(), pytest.raises(NotImplementedError, match="octile: vmap"):
            torch.func.vmap(layer)(x)
    layer = Linear(64, 8, device=device)
    with pytest.raises(NotImplementedError, match="octile: vmap, grad"):
        torch.func.grad(lambda x: layer(x).sum())(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(NotImplementedError, match="no forward-mode"):
                layer(dual)
        with torch.no_grad(), pytest.raises(NotImplementedError, match="no forward-mode"):
            W8A8Linear(64, 8, device=device)(dual)
        assert layer(x).shape == (3, 4, 8)  # not a dual tensor


def test_frozen_int8_layer_passes_gradients(device, generator):
    plain = nn.Linear(64, 48, device=device)
    layer = W8A8Linear.from_linear(plain)
    x = draw(generator, device, 8, 64).requires_grad_()
    dy = draw(generator, device, 8, 48)
    y = layer(x)
    y.backward(dy)
    expected = layer_reference.Expected(x, plain.weight, plain.bias)
    expected.assert_y(y)
    expected.assert_dx(x.grad, dy, "16bit")


# ---- A module among modules ----


def test_state_dict(device, tmp_path):
    for kind in (Linear, QuantizedLinear):
        a, b = (kind(48, 33, device=device, dtype=BRAIN) for _ in range(2))
        a(torch.ones(1, 48, device=device, dtype=BRAIN))  # fills the cache, which must have no effect
        assert list(a.state_dict()) == ["weight", "bias"]
        torch.save(a.state_dict(), tmp_path / "a.pt")
        b.load_state_dict(torch.load(tmp_path / "a.pt", weights_only=True))
        assert torch.equal(a.weight, b.weight) and torch.equal(a.bias, b.bias)
    plain = nn.Linear(48, 33, device=device, dtype=BRAIN)
    Linear(48, 33, device=device, dtype=BRAIN).load_state_dict(plain.state_dict())
    plain.load_state_dict(Linear(48, 33, device=device, dtype=BRAIN).state_dict())


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("inputs", [64, 33])
@pytest.mark.parametrize("kind", [W8A8Linear, W4A16Linear, W4A8Linear])
def test_state_dict_of_inference(kind, inputs, assign, device, generator, tmp_path):
    options = {} if kind is W8A8Linear else {"group": 0}
    a = kind.from_linear(nn.Linear(inputs, 24, device=device), **options)
    b = kind(inputs, 24, device=device, **options)
    assert list(a.parameters()) == [] and set(a.state_dict()) == {"quantized_weight", "weight_scale", "bias"}
    safetensors.torch.save_file(a.state_dict(), tmp_path / "a.safetensors")
    torch.save(a.state_dict(), tmp_path / "a.pt")
    loaded = safetensors.torch.load_file(tmp_path / "a.safetensors", device=str(device))
    x = draw(generator, device, 5, inputs)
    for state in (loaded, torch.load(tmp_path / "a.pt", weights_only=True)):
        b.load_state_dict(state, assign=assign)
        assert b.quantized_weight.stride() == a.quantized_weight.stride()
        assert torch.equal(a(x), b(x))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", [W8A8Linear, W4A16Linear])
def test_a_float_checkpoint_is_refused(kind, strict, device):
    layer = kind.from_linear(nn.Linear(128, 24, device=device))
    before = layer.quantized_weight.clone()
    with pytest.raises(RuntimeError, match="weight is torch.float32, expected torch.*load a float model first"):
        layer.load_state_dict(nn.Linear(128, 24).state_dict(), strict=strict)
    assert torch.equal(layer.quantized_weight, before)


def test_made_in_inference_mode(device, generator):
    plain = nn.Linear(128, 24, device=device)
    with torch.inference_mode():
        layer = W8A8Linear.from_linear(plain)
        four = W4A16Linear.from_linear(plain)
    layer(draw(generator, device, 3, 128).requires_grad_()).sum().backward()
    for made in (layer, four):
        made.load_state_dict(made.state_dict())


@pytest.mark.parametrize("kind", [Linear, QuantizedLinear, W8A8Linear, W4A16Linear, W4A8Linear])
def test_copies(kind, device, generator):
    layer = kind.from_linear(nn.Linear(128, 24, device=device))
    x = draw(generator, device, 5, 128)
    with torch.no_grad():
        y = layer(x)
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)]
        for other in copies:
            assert torch.equal(other(x), y) and str(other) == str(layer)
            if kind in (Linear, QuantizedLinear):
                other.weight.mul_(2)
                assert not torch.equal(other(x), y)
            assert torch.equal(layer(x), y)


@pytest.mark.parametrize("kind", [Linear, QuantizedLinear])
def test_meta_device(kind, device):
    layer = kind(64, 32, device="meta")
    assert layer.weight.is_meta and "kernel" not in str(layer)
    y = layer(torch.empty(3, 64, device="meta", dtype=layer.weight.dtype))
    assert y.shape == (3, 32) and y.is_meta
    with torch.autocast("cpu", BRAIN):
        assert layer(torch.empty(3, 64, device="meta")).shape == (3, 32)
    layer.to_empty(device=device)
    layer.reset_parameters()
    assert layer(torch.ones(3, 64, device=device, dtype=layer.weight.dtype)).isfinite().all()


@pytest.mark.parametrize("kind", [W8A8Linear, W4A16Linear])
def test_meta_device_of_inference(kind, device, generator):
    full = kind.from_linear(nn.Linear(128, 24, device=device))
    layer = kind(128, 24, device="meta")
    assert layer(torch.empty(3, 128, device="meta")).shape == (3, 24)
    layer.to_empty(device=device).load_state_dict(full.state_dict())
    x = draw(generator, device, 5, 128)
    assert torch.equal(layer(x), full(x))


def test_conversions_of_type(device, generator):
    layer = make(Linear, 64, 48, device, FULL)
    x = draw(generator, device, 5, 64)
    y = layer(x)
    for dtype in (HALF, BRAIN, DOUBLE):
        other = copy.deepcopy(layer).to(dtype)
        assert other(x.to(dtype)).dtype == dtype
        layer_reference.Expected(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype)).assert_y(other(x.to(dtype)))
    layer.half()
    assert layer.weight.dtype == HALF and layer(x.half()).dtype == HALF
    layer.float()
    assert not torch.equal(layer(x), y)  # the weight was rounded


@pytest.mark.parametrize("kind", [W8A8Linear, W4A16Linear])
def test_scales_keep_their_type(kind, device, generator):
    layer = kind.from_linear(nn.Linear(128, 33, device=device))
    scale, weight = layer.weight_scale.clone(), layer.quantized_weight.clone()
    for convert in (nn.Module.half, lambda m: m.to(BRAIN), lambda m: m.to("cpu"), lambda m: m.to(device)):
        convert(layer)
        assert torch.equal(layer.weight_scale.to(device), scale) and layer.weight_scale.dtype == FULL
        assert torch.equal(layer.quantized_weight.to(device), weight)
    assert layer.bias.dtype == BRAIN
    assert layer(draw(generator, device, 5, 128, dtype=BRAIN)).dtype == BRAIN
    assert layer(draw(generator, device, 5, 128)).dtype == FULL


def test_double_and_back(device, generator):
    layer = W8A8Linear.from_linear(nn.Linear(64, 33, device=device))
    x = draw(generator, device, 5, 64)
    y = layer(x)
    layer.double()
    assert layer.weight_scale.dtype == DOUBLE and layer(x.double()).dtype == DOUBLE
    layer.half().float()
    assert layer.weight_scale.dtype == FULL
    layer.bias.copy_(layer.bias)
    assert torch.allclose(layer(x), y, atol=1e-3)
    layer = W8A8Linear.from_linear(nn.Linear(64, 33, device=device, dtype=DOUBLE)).half()
    assert layer.weight_scale.dtype == FULL and layer(x.half()).dtype == HALF


def test_int8_rows_stay_aligned(device):
    layer = W8A8Linear.from_linear(nn.Linear(33, 20, device=device))
    for _ in range(2):
        assert layer.quantized_weight.stride() == (48, 1)
        assert layer.state_dict()["quantized_weight"].is_contiguous()
        layer = copy.deepcopy(layer).to("meta").to_empty(device=device)


def test_functional_call_and_parametrization(device, generator):
    layer = make(Linear, 64, 48, device, FULL)
    x = draw(generator, device, 5, 64)
    y = layer(x)
    other = {"weight": (layer.weight.detach() * 3).requires_grad_(), "bias": layer.bias.detach() * 3}
    got = torch.func.functional_call(layer, other, (x,))
    assert torch.allclose(got, 3 * y, rtol=1e-5, atol=1e-5)
    got.sum().backward()
    assert other["weight"].grad is not None and layer.weight.grad is None
    assert torch.equal(layer(x), y)
    for scale in (2.0, 5.0):  # every call has a new tensor as weight, often at the same address

        class Times(nn.Module):
            def forward(self, w):
                return w * scale  # noqa: B023

        nn.utils.parametrize.register_parametrization(layer, "weight", Times())
        assert torch.allclose(layer(x) - layer.bias, scale * (y - layer.bias), rtol=1e-4, atol=1e-4)
        layer(x).sum().backward()
        assert layer.parametrizations.weight.original.grad is not None
        nn.utils.parametrize.remove_parametrizations(layer, "weight", leave_parametrized=False)
    assert torch.equal(layer(x), y)


def test_a_parametrized_bias_of_inference(device):
    class Doubled(nn.Module):
        def forward(self, bias):
            return 2 * bias

    layer = W8A8Linear.from_linear(nn.Linear(64, 24, device=device))
    x = torch.zeros(1, 64, device=device)
    expected = 2 * layer(x)
    nn.utils.parametrize.register_parametrization(layer, "bias", Doubled())
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer.pack_()(x), expected)


def test_from_and_to_linear(device, generator):
    plain = nn.Linear(128, 33, device=device).eval()
    x = draw(generator, device, 7, 128)
    layer = Linear.from_linear(plain, backward="int8", activation="per_tensor")
    assert layer.weight is plain.weight and layer.bias is plain.bias and not layer.training
    assert isinstance(layer, nn.Linear) and (layer.backward, layer.activation) == ("int8", "per_tensor")
    assert layer.to_linear().weight is plain.weight and type(layer.to_linear()) is nn.Linear
    square = QuantizedLinear.from_linear(plain)
    assert square.weight.shape == (128, 33) and square.weight.dtype == FULL
    assert torch.equal(square.to_linear().weight, plain.weight) and torch.equal(square.to_linear().bias, plain.bias)
    # The distance from the plain layer follows from the step: W8A8 1.5 % of the output, 4 bits with 15 steps about 10 %.
    exact = plain(x)
    for layer, limit in (
        (W8A8Linear.from_linear(plain), 0.02),
        (W4A16Linear.from_linear(plain), 0.15),
        (W4A8Linear.from_linear(plain), 0.15),
    ):
        assert (layer(x) - exact).norm() / exact.norm() < limit
        assert (layer.to_linear()(x) - exact).norm() / exact.norm() < limit
        assert layer.to_linear(BRAIN).weight.dtype == BRAIN and not layer.training
    whole = W8A8Linear.from_linear(plain, per_channel=False)
    other = W8A8Linear(128, 33, device=device, per_channel=False)
    other.load_state_dict(whole.state_dict())
    assert whole.weight_scale.shape == (1,) and torch.equal(other(x), whole(x))
    no_bias = nn.Linear(128, 33, bias=False, device=device, dtype=BRAIN)
    for kind in (Linear, QuantizedLinear, W8A8Linear, W4A16Linear):
        layer = kind.from_linear(no_bias)
        assert layer.bias is None
        assert layer(x.to(BRAIN)).dtype == BRAIN
        assert layer.to_linear().bias is None


@pytest.mark.parametrize("group", [0, 32, 64, 128])
def test_four_bits(group, device, generator):
    """Bytes and scales against the library's quantizer of weights; y against the dequantized weight, or the contract."""
    from octile import quantizer
    from octile.weight_format import WeightFormat

    plain = nn.Linear(128, 12, device=device)
    with torch.no_grad():
        plain.weight[0] = 0
        plain.weight[1, 5] = float("nan")
    layer = W4A16Linear.from_linear(plain, group=group)
    packed, scale = quantizer.by_the_library(
        plain.weight.detach().cpu().nan_to_num(0), WeightFormat(4, group), "nearest", None
    )
    packed[1, : (group or 128) // 2], scale[1, 0] = 0, torch.nan  # the group of the NaN
    assert torch.equal(layer.quantized_weight.cpu(), packed)
    assert torch.equal(layer.weight_scale.cpu().nan_to_num(-1), scale.nan_to_num(-1))
    x = draw(generator, device, 5, 128)
    w_hat = layer.to_linear().weight.detach().double()
    assert torch.equal(layer(x).isnan(), (x.double() @ w_hat.t()).isnan())
    good = [row for row in range(12) if row != 1]
    exact = (x.double() @ w_hat.t())[:, good] + plain.bias.detach().double()[good]
    magnitudes = (x.double().abs() @ w_hat.abs().t())[:, good] + plain.bias.detach().double().abs()[good]
    reference.assert_sum(layer(x)[:, good], exact.cpu().numpy(), magnitudes.cpu().numpy(), 129, FULL, device)
    integer = W4A8Linear.from_linear(plain, group=group)
    assert torch.equal(integer.quantized_weight, layer.quantized_weight)
    levels, scale = (t[good].cpu() for t in (layer.format.levels(layer.quantized_weight, 128), layer.weight_scale))
    q, bias = reference.quantize(reference.wide(x), 1), reference.wide(plain.bias)[good]
    y = reference.linear_groups(*q, levels.numpy(), scale.numpy(), bias)
    assert torch.equal(integer(x)[:, good].cpu(), reference.narrow(y, FULL))


# ---- What a layer says of itself ----


def test_repr(device):
    text = str(Linear(64, 32, device=device, backward=("int8", "16bit")))
    assert "in_features=64, out_features=32, bias=True" in text and "backward=('int8', '16bit')" in text
    arch = "sm" if device.type == "cuda" else "portable"
    for layer in (QuantizedLinear(64, 32, device=device), W8A8Linear(64, 32, device=device)):
        assert "kernel=" in str(layer) and arch in str(layer)
    assert "rounding=stochastic" in str(Linear(64, 32, device=device, rounding="stochastic"))
    assert "group=64" in str(W4A16Linear(64, 32, device="cpu", group=64))
    layer = Linear(64, 32, device=device)
    assert layer.explain(16).startswith("linear 16 x 64 x 32")
    assert "backward 4096 x 64 x 32" in layer.explain(4096, of="backward")
    assert "linear 2 x 64 x 32" in W8A8Linear(64, 32, device=device).explain(2)


def test_options_can_be_changed(device, generator):
    layer = Linear(64, 32, device=device)
    x = draw(generator, device, 5, 64)
    y = layer(x)
    layer.per_channel = False
    layer.activation = "per_tensor"
    layer.backward = "int8"
    assert (layer.per_channel, layer.activation, layer.backward) == (False, "per_tensor", "int8")
    expected = layer_reference.Expected(x, layer.weight, layer.bias, per_token=False, per_channel=False)
    expected.assert_y(layer(x))
    assert not torch.equal(layer(x), y)


def test_refusals(device, generator):
    x = draw(generator, device, 5, 64)
    layer = Linear(64, 32, device=device)
    words = [("backward", "fp8"), ("activation", "per_row"), ("backward", ("int8", 5)), ("rounding", "up")]
    words += [("backward", ["16bit", ["int8"]]), ("activation", ["per_token"]), ("rounding", {})]  # no hash
    for word, value in words:
        with pytest.raises(ValueError, match=f"octile: {word} is"):
            Linear(64, 32, **{word: value})
        with pytest.raises(ValueError, match=f"octile: {word} is"):
            setattr(layer, word, value)
        with pytest.raises(ValueError, match=f"octile: {word} is"):
            octile.linear(x, layer.weight, **{word: value})
    with pytest.raises(ValueError, match="a pair is for"):
        Linear(64, 32, backward=("int8", "int8", "int8"))
    with pytest.raises(ValueError, match="layout is 'nk'"):
        octile.linear(x, layer.weight, layout="nk")
    with pytest.raises(ValueError, match="dtype is torch.int8"):
        QuantizedLinear(64, 32, dtype=torch.int8)
    with pytest.raises(ValueError, match="group is 48"):
        W4A16Linear(96, 32, group=48)
    with pytest.raises(ValueError, match="does not divide"):
        W4A16Linear(100, 32, group=32)
    with pytest.raises(ValueError, match="an int8 dW sums at most 131071"):
        Linear(2, 1, device=device, backward="int8")(torch.ones(131_072, 2, device=device))
    with pytest.raises(ValueError, match="of is 'loss', expected 'forward' or 'backward'"):
        layer.explain(5, of="loss")
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="octile"):
            layer(x[:, :63])
    with pytest.raises(RuntimeError, match="octile"):
        layer(x.int())
    with pytest.raises(RuntimeError, match="octile"):
        W8A8Linear(64, 32, device=device)(x[:, :63])


@pytest.mark.parametrize("shape", [(5, 63), (2, 3, 65), (5, 32), (63,), ()])
@pytest.mark.parametrize("kind", [Linear, QuantizedLinear, W8A8Linear, W8A8StaticLinear, W4A16Linear, W4A8Linear])
def test_a_wrong_input_is_named(kind, shape, device):
    """The weight is not included: it is the layer's own. A packed weight may have one size for several values of IN."""
    plain = nn.Linear(64, 32, device=device)
    groups = [{"group": 32}, {"group": 0}]
    options = {W8A8StaticLinear: [{"input_scale": 0.1}], W4A16Linear: groups, W4A8Linear: groups}
    layers = [kind.from_linear(plain, **one) for one in options.get(kind, [{}])]
    if device.type == "cpu" and kind not in (Linear, QuantizedLinear):
        layers += [copy.deepcopy(layer).pack_() for layer in layers]
    if kind is Linear:
        layers.append(Linear.from_linear(plain))
        octile.cache_weights_(layers[-1])
    text = f"octile: x is {tuple(shape)}; the layer's in_features, its last size, is 64"
    for layer in layers:
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=re.escape(text)):
                layer(torch.ones(shape, device=device))


@pytest.mark.parametrize("kind", [Linear, QuantizedLinear, W8A8Linear])
def test_a_tensor_that_is_not_dense_is_named(kind):
    layer, x = kind(64, 32, device="cpu", dtype=torch.float32), torch.ones(4, 64)
    for given, text in (
        (x.to_sparse(), "of torch.sparse_coo"),
        (torch.nested.nested_tensor([x, x[:2]]), "nested"),
        (torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged), "nested"),
        (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), "quantized by torch"),
    ):
        with pytest.raises(RuntimeError, match=f"octile: x is {text}; layers take dense tensors of floats"):
            layer(given)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64])
def test_types_that_layers_do_not_take(dtype):
    plain, x = nn.Linear(128, 24), torch.ones(2, 128).to(dtype)
    layers = [Linear.from_linear(plain), W8A8StaticLinear.from_linear(plain, 0.1)]
    layers += [kind.from_linear(plain) for kind in (W8A8Linear, W4A16Linear)]
    for layer in (*layers, *(copy.deepcopy(layer).pack_() for layer in layers[1:])):
        with pytest.raises(
            RuntimeError, match=f"octile: x is {dtype}; layers take float16, bfloat16, float32 or float64"
        ):
            layer(x)


def test_a_wrong_input_of_the_function(device):
    w, x = torch.ones(32, 64, device=device), torch.ones(2, 5, 63, device=device)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            text = "octile: x is (2, 5, 63); w (32, 64) multiplies (..., 64)"
            with pytest.raises(RuntimeError, match=re.escape(text)):
                octile.linear(x, w.requires_grad_())
            with pytest.raises(RuntimeError, match=re.escape("w (64, 32) multiplies (..., 64)")):
                octile.linear(x, w.detach().t(), layout="in_out")
            for given, layout, shape in (
                (w[0], "out_in", "(64,), torch.float32; expected (OUT, IN), floats"),
                (w[None], "in_out", "(1, 32, 64), torch.float32; expected (IN, OUT), floats"),
                (w.detach().int(), "out_in", "(32, 64), torch.int32; expected (OUT, IN), floats"),
            ):
                with pytest.raises(RuntimeError, match=re.escape(f"octile: w is {shape}")):
                    octile.linear(x, given, layout=layout)
            for b in (1, [0.0]):
                with pytest.raises(TypeError, match=f"octile: b is a {type(b).__name__}, expected a tensor"):
                    octile.linear(x, w[:, :63], b)
            for b in (
                torch.ones(32, dtype=torch.float64, device=device),
                torch.ones(32, dtype=torch.int32, device=device),
            ):
                text = f"octile: b is {b.dtype}, expected float16, bfloat16 or float32 for a y of torch.float32"
                with pytest.raises(RuntimeError, match=text):
                    octile.linear(x, w[:, :63], b)
            with pytest.raises(RuntimeError, match="b is torch.float32, expected float64 for a y of torch.float64"):
                octile.linear(x.double(), w[:, :63].double(), w[:, 0])
    for kind in (Linear, W8A8Linear):
        layer = kind(64, 32, device="meta")
        with pytest.raises(RuntimeError, match="in_features"):
            layer(x.to("meta"))
    compiled = torch.compile(Linear(64, 32, device=device), backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"octile: x is \(10, 63\); weight \(32, 64\) multiplies \(..., 64\)"):
        compiled(x)


@pytest.mark.slow
def test_import_is_light():
    """Apart from torch itself, importing loads nothing large."""
    code = "import torch, sys; before = set(sys.modules); import octile; print(*sorted(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {m for m in out if m.split(".")[0] in ("triton", "numpy", "torch._dynamo", "torch._inductor")}
