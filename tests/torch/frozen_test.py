"""Gradients through layers for inference: dX through the frozen weight, by the contract, and what torch expects of them."""

import copy
import gc
import pickle
import weakref

import numpy as np
import octile
import op_reference as reference
import pytest
import torch
from octile import W4A8Linear, W4A16Linear, W8A8Linear, W8A8StaticLinear, W8A16Linear, _c
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("one_thread", "sums_in_float32")

STATIC_SCALE = 0.02  # clamps values above 2.55: one in a hundred of normal data


@pytest.fixture(scope="module")
def sums_in_float32():
    """On a GPU, torch lets cuBLAS add partial sums in 16 bits unless told not to."""
    matmul, names = torch.backends.cuda.matmul, ("fp16", "bf16")
    names = [f"allow_{name}_reduced_precision_reduction" for name in names]
    before = [getattr(matmul, name) for name in names]
    for name in names:
        setattr(matmul, name, False)
    yield
    for name, value in zip(names, before, strict=True):
        setattr(matmul, name, value)


def static(linear, smoothed, **words):
    k, g = linear.in_features, torch.Generator().manual_seed(3)
    multiplier = (torch.rand(k, generator=g) + 0.5).to(linear.weight.device) if smoothed else None
    weight = linear.weight / multiplier if smoothed else None
    return W8A8StaticLinear.from_linear(linear, STATIC_SCALE, input_multiplier=multiplier, weight=weight, **words)


def with_zero_points(linear, kind, group=32, **words):
    words |= {"group": group, "zero_point": True, "dtype": linear.weight.dtype}
    layer = kind(linear.in_features, linear.out_features, **words)
    plain, g = kind.from_linear(linear, group=group), torch.Generator().manual_seed(4)
    points = torch.randint(-8, 8, layer.weight_zero_point.shape, generator=g, dtype=torch.int32)
    layer.load_state_dict(plain.state_dict() | {"weight_zero_point": points})
    return layer.to(linear.weight.device)


LAYERS = {
    "W8A8": W8A8Linear.from_linear,
    "W8A8, one scale": lambda linear: W8A8Linear.from_linear(linear, per_channel=False),
    "W8A8, rows": lambda linear: W8A8Linear.from_linear(linear, group=0),
    "W8A8, groups": lambda linear: W8A8Linear.from_linear(linear, group=32),
    "static": lambda linear: static(linear, smoothed=False),
    "smoothed": lambda linear: static(linear, smoothed=True),
    "W8A16": W8A16Linear.from_linear,
    "W8A16, groups": lambda linear: W8A16Linear.from_linear(linear, group=32),
    "W4A16": lambda linear: W4A16Linear.from_linear(linear, group=32),
    "W4A16, rows": lambda linear: W4A16Linear.from_linear(linear, group=0),
    "W4A16, zero points": lambda linear: with_zero_points(linear, W4A16Linear),
    "W4A8, zero points": lambda linear: with_zero_points(linear, W4A8Linear),
}
INT8 = {
    "W8A8": lambda linear: W8A8Linear.from_linear(linear, backward="int8"),
    "W8A8, one scale": lambda linear: W8A8Linear.from_linear(linear, per_channel=False, backward="int8"),
    "W8A8, rows": lambda linear: W8A8Linear.from_linear(linear, group=0, backward="int8"),
    "smoothed": lambda linear: static(linear, smoothed=True, backward="int8"),
    "W4A8, rows": lambda linear: W4A8Linear.from_linear(linear, group=0, backward="int8"),
    "W4A8, zero points": lambda linear: with_zero_points(linear, W4A8Linear, 0, backward="int8"),
}
SHAPES = [(1, 64, 48), (5, 96, 33), (70, 128, 200)]  # M, K, N
ODD = [(3, 63, 31), (17, 1, 5), (4, 65, 1)]  # without groups
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def odd(name):
    return "groups" not in name and "zero points" not in name and name != "W4A16"


CASES = [(name, shape) for name in LAYERS for shape in SHAPES + (ODD if odd(name) else [])]


def linear(k, n, device, dtype=torch.float32, bias=True):
    torch.manual_seed(7)
    return nn.Linear(k, n, bias, dtype=dtype).to(device)


def draw(generator, device, dtype, *shape):
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def pack(layer):
    """Whether the layer's device has a kernel for it; the weight is then packed."""
    return octile.pack_(layer) != []


def integers_and_scales(layer):
    """(q - z) (N, K) and the scale of each element, float64."""
    weight, scale, points = (None if t is None else t.cpu() for t in layer.plain_weight())
    k = layer.in_features
    q = layer.format.levels(weight, k).double().numpy()
    scale = scale.double().numpy()
    scale = np.repeat(scale, k // scale.shape[1], 1) if scale.ndim == 2 else np.broadcast_to(scale[:, None], q.shape)
    if points is not None:
        q = q - np.repeat(points.double().numpy(), k // points.shape[1], 1)
    return q, scale


def passes(layer, x):
    """Where the contract's straight-through gradient is not 0."""
    if not isinstance(layer, W8A8StaticLinear):
        return np.ones(x.shape, bool)
    wide = reference.wide(x)
    if layer.input_multiplier is not None:
        wide = wide * reference.wide(layer.input_multiplier)
    levels = np.rint(wide / wide.dtype.type(layer.input_scale.item()))
    return (-127 <= levels) & (levels <= 127)


def multiplier(layer):
    m = getattr(layer, "input_multiplier", None)
    return None if m is None else m.detach().cpu().double().numpy()


def assert_dx(layer, x, dy):
    """x.grad, for the rows x (M, K) and dy (M, N)."""
    q, scale = integers_and_scales(layer)
    w, m, mask = q * scale, multiplier(layer), passes(layer, x)
    gradient = dy.detach().cpu().double().numpy()
    exact, magnitudes = gradient @ w, np.abs(gradient) @ np.abs(w)
    if m is not None:
        exact, magnitudes = exact * m, magnitudes * m
    exact, magnitudes = np.where(mask, exact, 0), np.where(mask, magnitudes, 0)
    roundings = 1 if m is None else 2
    reference.assert_sum(x.grad, exact, magnitudes, len(w), dy.dtype, x.device, roundings=roundings)
    assert x.grad.dtype == x.dtype
    assert not x.grad.cpu()[torch.from_numpy(~mask)].any()
    assert mask.all() or isinstance(layer, W8A8StaticLinear)


# ---- Values ----


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_dx(name, shape, dtype, device, generator):
    m, k, n = shape
    layer = LAYERS[name](linear(k, n, device, dtype))
    dy = draw(generator, device, dtype, m, n)
    for packed in (False, True):
        x = draw(generator, device, dtype, m, k).requires_grad_()
        if packed and not pack(layer):
            continue
        with torch.no_grad():
            expected = layer(x)
        with torch.inference_mode():
            assert torch.equal(layer(x), expected)
        y = layer(x)
        assert torch.equal(y, expected) and y.requires_grad
        y.backward(dy)
        assert_dx(layer, x, dy)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", list(INT8))
def test_int8_dx(name, dtype, device, generator):
    if dtype is torch.float64 and device.type == "cuda":
        pytest.skip("blocks of float64 are for a CPU")
    for m, k, n in [*SHAPES, *ODD, (9, 20, 600)]:  # the last one of three blocks
        layer = INT8[name](linear(k, n, device, dtype))
        x, dy = draw(generator, device, dtype, m, k).requires_grad_(), draw(generator, device, dtype, m, n)
        layer(x).backward(dy)
        scale, levels = reference.wide(layer.plain_weight()[1]), integers_and_scales(layer)[0].astype(np.int8)
        no_x = np.zeros((m, k), np.int8), np.ones(m, scale.dtype)
        operands = reference.wide(dy), levels, scale, *no_x
        dx = reference.narrow(reference.backward_int8(*operands, block=256)[0], dtype)
        if layer._buffers.get("input_multiplier") is not None:
            dx = (dx * layer.input_multiplier.cpu()).to(dtype)
        dx[torch.from_numpy(~passes(layer, x))] = 0
        assert torch.equal(x.grad.cpu(), dx)
        if device.type == "cpu" and dtype is not torch.float64:
            before, x.grad = x.grad, None
            layer.pack_()(x).backward(dy)
            assert torch.equal(x.grad, before)


def test_what_a_static_scale_clamps(device):
    """The contract's inclusive mask: what rounds to 127 passes; what rounds to 128 or -128 does not."""
    layer = W8A8StaticLinear.from_linear(linear(8, 4, device), 0.5)
    values = [63.5, 63.74, 63.75, 64.0, -63.5, -63.74, -63.75, 0.0]
    x = torch.tensor([values], device=device, requires_grad=True)
    layer(x).sum().backward()
    assert (x.grad != 0).tolist() == [[True, True, False, False, True, True, False, True]]
    # A non-finite value makes its row NaN, forward and backward.
    bad = torch.tensor([values, values], device=device)
    bad[0, 1], bad[0, 2] = torch.nan, torch.inf
    bad.requires_grad_()
    y = layer(bad)
    y.square().sum().backward()
    assert y[0].isnan().all() and bad.grad[0, :3].isnan().all() and torch.equal(bad.grad[1] != 0, x.grad[0] != 0)


@pytest.mark.parametrize("name", list(LAYERS))
def test_bias(name, device, generator):
    layer = LAYERS[name](linear(64, 24, device))
    x, dy = draw(generator, device, torch.float32, 2, 3, 64), draw(generator, device, torch.float32, 2, 3, 24)
    assert not layer(x).requires_grad
    plain = layer(x)
    bias = layer.bias = nn.Parameter(layer.bias)
    assert dict(layer.named_parameters()) == {"bias": bias} and torch.equal(layer(x), plain)
    with torch.no_grad():
        assert torch.equal(layer(x), plain)
    for needs_x in (False, True):
        for kind in (torch.float32, torch.bfloat16):
            bias.grad, given = None, x.detach().to(kind, copy=True).requires_grad_(needs_x)
            layer(given).backward(dy.to(kind))
            rows = dy.to(kind).flatten(0, 1).cpu().double().numpy()
            reference.assert_sum(bias.grad, rows.sum(0), np.abs(rows).sum(0), 6, kind, torch.device("cpu"))
            assert bias.grad.dtype == torch.float32 and (given.grad is not None) == needs_x
    bias.grad = None
    bias.requires_grad_(False)
    layer(x.requires_grad_()).backward(dy)
    assert bias.grad is None and x.grad is not None
    again = copy.deepcopy(layer).half()
    assert isinstance(again.bias, nn.Parameter) and again.bias.dtype == torch.float16
    assert again(x.half()).dtype == torch.float16


# ---- What is kept ----


def saved_by(call):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = call()
    return y, saved


@pytest.mark.parametrize("name", list(LAYERS))
def test_nothing_of_x_is_kept(name, device, generator):
    layer = LAYERS[name](linear(64, 24, device))
    own = {t.data_ptr() for t in layer.buffers()}
    for packed in (False, True):
        if packed and not pack(layer):
            continue
        leaf = draw(generator, device, torch.float32, 6, 64).requires_grad_()
        x = leaf.clone()
        y, saved = saved_by(lambda x=x: layer(x))
        if packed:
            own |= {t.data_ptr() for t in (*layer.buffers(), *layer._unpacked_weight()) if t is not None}
        others = [t for t in saved if t.data_ptr() not in own]
        clamps = isinstance(layer, W8A8StaticLinear)
        assert [(t.dtype, t.shape) for t in others] == ([(torch.bool, x.shape)] if clamps else [])
        gone = weakref.ref(x.untyped_storage())
        assert gone() is not None
        del x, saved, others
        gc.collect()
        assert gone() is None
        y.sum().backward()
        assert leaf.grad.isfinite().all()
    # A bias alone needs nothing saved.
    layer.bias = nn.Parameter(layer.bias)
    assert saved_by(lambda: layer(leaf.detach()))[1] == []


def test_a_packed_weight_is_unpacked_once(monkeypatch, generator):
    layer, x = W4A16Linear.from_linear(linear(64, 24, "cpu"), group=32).pack_(), torch.ones(2, 64, requires_grad=True)
    calls, plain = [], layer.format.__class__.unpack
    monkeypatch.setattr(layer.format.__class__, "unpack", lambda *a: calls.append(1) or plain(*a))
    with torch.no_grad():
        layer(x)
    layer(x.detach())
    assert layer._unpacked is None and calls == []
    for _ in range(3):
        layer(x).sum().backward()
    assert len(calls) == 1 and layer._unpacked is not None
    assert len(pickle.dumps(layer)) < len(pickle.dumps(layer._unpacked)) + 8192
    assert pickle.loads(pickle.dumps(layer))._unpacked is None and copy.deepcopy(layer)._unpacked is None
    # Every way of repacking the weight is noticed.
    other = W4A16Linear.from_linear(nn.Linear(64, 24), group=32)
    layer.load_state_dict(copy.deepcopy(other).pack_().state_dict())
    grads = []
    for one in (layer, other):
        x.grad = None
        one(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    layer.packed_weight.copy_(layer.packed_weight.clone())
    count = len(calls)
    layer(x).sum().backward()
    assert len(calls) == count + 1


# ---- Tensors of all kinds ----


@pytest.mark.parametrize("name", list(LAYERS))
def test_gradients_and_inputs_of_any_shape(name, device, generator):
    layer = LAYERS[name](linear(64, 24, device))

    def gradient(x, dy):
        x = x.detach().requires_grad_()
        layer(x).backward(dy)
        return x.grad

    x, dy = draw(generator, device, torch.float32, 2, 3, 64), draw(generator, device, torch.float32, 2, 3, 24)
    expected = gradient(x.flatten(0, 1), dy.flatten(0, 1)).view_as(x)
    assert torch.equal(gradient(x, dy), expected)
    far = torch.stack((dy, dy), -1)[..., 0]
    assert not far.is_contiguous() and torch.equal(gradient(x, far), expected)
    turned = dy.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(gradient(x, turned), expected)
    assert torch.equal(gradient(x.transpose(0, 1).contiguous().transpose(0, 1), dy), expected)
    same = dy[:1, :1].expand(2, 3, 24)
    assert torch.equal(gradient(x, same), gradient(x, same.contiguous()))
    one = gradient(x[0, 0], dy[0, 0])
    assert one.shape == (64,) and torch.equal(one, gradient(x[:1, 0], dy[:1, 0])[0])
    for empty in (x[:0], x[:, :0]):
        assert gradient(empty, layer(empty)).shape == empty.shape


@pytest.mark.parametrize("name", list(LAYERS))
def test_twice_in_one_graph(name, device, generator):
    layer = LAYERS[name](linear(32, 32, device))
    x, dy = (draw(generator, device, torch.float32, 5, 32) for _ in range(2))
    first = x.clone().requires_grad_()
    middle = layer(first)
    middle.retain_grad()
    layer(middle).backward(dy, retain_graph=True)
    second = middle.detach().requires_grad_()
    layer(second).backward(dy)
    assert torch.equal(second.grad, middle.grad)
    alone = x.clone().requires_grad_()
    layer(alone).backward(second.grad)
    assert torch.equal(alone.grad, first.grad)
    before = first.grad.clone()
    layer(first).backward(second.grad)  # accumulates
    assert torch.equal(first.grad, before + before)


@pytest.mark.parametrize("name", list(LAYERS))
def test_meta_tensors(name):
    layer = LAYERS[name](linear(64, 24, "cpu")).to("meta")
    x = torch.empty(2, 3, 64, device="meta", requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape


@pytest.mark.parametrize("name", list(LAYERS))
def test_second_derivatives_are_refused(name, device):
    layer = LAYERS[name](linear(64, 24, device))
    x = torch.ones(2, 64, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="octile: a quantized layer can be differentiated once"):
        gradient.sum().backward()
    with pytest.raises(NotImplementedError, match="octile: vmap, grad"):
        torch.func.grad(lambda x: layer(x).sum())(x)


def test_a_weight_that_changes_in_between(device):
    layer = W8A8Linear.from_linear(linear(64, 24, device))
    y = layer(torch.ones(2, 64, device=device, requires_grad=True))
    layer.load_state_dict(layer.state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- What torch puts around a layer ----


@pytest.mark.parametrize("name", list(LAYERS))
def test_autocast(name, device, generator):
    layer = LAYERS[name](linear(64, 24, device))
    values, dy = draw(generator, device, torch.float32, 5, 64), draw(generator, device, torch.bfloat16, 5, 24)
    x = values.clone().requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        y = layer(x)
        with torch.no_grad():
            assert torch.equal(layer(x), y)
    assert y.dtype == torch.bfloat16
    y.backward(dy)
    mine = values.bfloat16().requires_grad_()
    layer(mine).backward(dy)
    # A static scale may clamp values of x before the cast, but the cast comes first, as without gradients.
    assert x.grad.dtype == torch.float32 and torch.equal(x.grad, mine.grad.float())
    # Whether autocast is on when the backward runs does not matter.
    full, wide = values.clone().requires_grad_(), dy.float()
    layer(full).backward(wide)
    expected, full.grad = full.grad, None
    y = layer(full)
    with torch.autocast(device.type, torch.bfloat16):
        y.backward(wide)
    assert torch.equal(full.grad, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", list(LAYERS))
def test_checkpoint(name, reentrant, device, generator):
    model = nn.Sequential(LAYERS[name](linear(64, 64, device)), nn.GELU(), LAYERS[name](linear(64, 32, device)))
    x = draw(generator, device, torch.float32, 5, 64).requires_grad_()
    model(x).square().sum().backward()
    expected, x.grad = x.grad, None
    checkpoint(model, x, use_reentrant=reentrant).square().sum().backward()
    assert torch.equal(x.grad, expected)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", [*LAYERS, "int8"])
def test_compiled(name, packed, device, generator):
    make = INT8["W8A8"] if name == "int8" else LAYERS[name]
    layer = make(linear(64, 24, device))
    if packed and not pack(layer):
        pytest.skip("no kernel reads it packed")
    layer.bias = nn.Parameter(layer.bias)
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(layer, backend=counter, fullgraph=True)

    def gradients(function, x, dy):
        y = function(x)
        return y, *torch.autograd.grad(y, (x, layer.bias), dy)

    got = []
    for m in (5, 16, 33):
        x, dy = draw(generator, device, torch.float32, 2, m, 64).requires_grad_(), None
        dy = draw(generator, device, torch.float32, 2, m, 24)
        torch._dynamo.mark_dynamic(x, 1)
        with torch._dynamo.config.patch(error_on_recompile=True):
            got.append((x, dy, gradients(fast, x, dy)))
    count = counter.frame_count
    assert layer._unpacked is None
    for x, dy, results in got:
        assert all(torch.equal(a, b) for a, b in zip(results, gradients(layer, x, dy), strict=True))
    # If eager code has unpacked a packed layer since, it is compiled once more for the unpacked weight.
    results = gradients(fast, *got[-1][:2])
    assert all(torch.equal(a, b) for a, b in zip(results, got[-1][2], strict=True))
    assert (counter.frame_count > count) == packed


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_backward_dequantizes(device, generator):
    """The 16-bit weight is made in the backward graph, not kept from the forward."""
    graphs = {}

    def keep(which):
        def compiler(module, _):
            graphs[which] = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
            return module.forward

        return compiler

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    backend = aot_autograd(
        fw_compiler=keep("forward"), bw_compiler=keep("backward"), partition_fn=min_cut_rematerialization_partition
    )
    layer = W4A16Linear.from_linear(linear(64, 24, device), group=32)
    for _ in range(2):
        x = draw(generator, device, torch.float32, 5, 64).requires_grad_()
        torch.compile(layer, backend=backend, fullgraph=True)(x).sum().backward()
        assert "octile.dequantize.default" in graphs["backward"]
        assert "octile.dequantize.default" not in graphs["forward"]
        if pack(layer):
            torch._dynamo.reset()


def test_scaled_gradients(device, generator):
    """GradScaler must see an overflow of dY in the layers before this one."""
    model = nn.Sequential(nn.Linear(64, 64), W8A8Linear.from_linear(nn.Linear(64, 8))).to(device)
    x = draw(generator, device, torch.float32, 5, 64)
    (model(x) * torch.inf).sum().backward()
    assert not model[0].weight.grad.isfinite().all()


# ---- The option ----


def test_words_for_the_backward(device):
    plain = linear(64, 24, device)
    layer = W8A8Linear.from_linear(plain)
    assert layer.backward == "16bit" and "backward" not in repr(layer)
    layer.backward = "int8"
    assert layer._product == _c.INT8 and "backward=int8" in repr(layer) and copy.deepcopy(layer).backward == "int8"
    for make in (lambda word: W8A8Linear(64, 24, backward=word), lambda word: octile.W8A8Dynamic(backward=word)):
        assert make("int8").backward == "int8"
        with pytest.raises(ValueError, match="backward is 'fp8', expected '16bit' or 'int8'"):
            make("fp8")
    with pytest.raises(ValueError, match="backward is 'int8' and group is 32"):
        W8A8Linear(64, 24, group=32, backward="int8")
    for config in (octile.W8A8Dynamic, octile.W4A8):
        with pytest.raises(ValueError, match="backward is 'int8' and group is 32"):
            config(group=32, backward="int8")
    grouped = W8A8Linear(64, 24, group=32)
    with pytest.raises(ValueError, match="backward is 'int8' and group is 32"):
        grouped.backward = "int8"
    assert grouped.backward == "16bit"
    for config in (octile.W8A8Dynamic(backward="int8"), octile.W4A8(0, backward="int8")):
        model = nn.Sequential(copy.deepcopy(plain))
        octile.quantize_(model, config)
        assert model[0].backward == "int8"


def test_the_option_of_static_scales(generator):
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(40, 64, generator=generator)
    with torch.no_grad(), octile.calibrate(model) as calibration:
        model(x)
    config = octile.W8A8Static(calibration, smoothing=0.5, backward="int8")
    assert "backward='int8'" in repr(config)
    octile.quantize_(model, config)
    assert [model[0].backward, model[2].backward] == ["int8", "int8"]
    with pytest.raises(ValueError, match="backward is 'none'"):
        octile.W8A8Static(calibration, backward="none")


# ---- LoRA by hand ----


class LoRA(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("name", list(LAYERS))
def test_lora_by_hand(name, generator):
    """Two layers, so that the first one learns through the second."""

    def losses(make):
        torch.manual_seed(0)
        model = nn.Sequential(*(LoRA(make(nn.Linear(32, 32))) for _ in range(2)))
        model[1].up.requires_grad_(False)
        model[1].down.requires_grad_(False)
        trained = [p for part in (model[0].down, model[0].up) for p in part.parameters()]
        optimizer, seen = torch.optim.Adam(trained, lr=0.02), []
        for _ in range(60):
            seen.append((model(x) - target).square().mean())
            seen[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen[0].item(), seen[-1].item()

    x = torch.randn(64, 32, generator=generator)
    target = torch.randn(64, 2, generator=generator) @ torch.randn(2, 32, generator=generator) / 4
    float_loss = losses(lambda linear: linear.requires_grad_(False))
    first, last = losses(LAYERS[name])
    assert last < 0.8 * first
    if "zero points" not in name:  # theirs are random: another weight
        assert last == pytest.approx(float_loss[1], rel=0.03 if name.startswith("W8") else 0.1)


def test_a_gradient_of_one_group_a_row_reaches_a_quantized_input(device):
    linear = nn.Linear(64, 32, device=device)
    layer = W8A8Linear.from_linear(linear, group=0)
    gradients = []
    for run in (lambda x: layer(octile.GELU()(x)), lambda x: layer(nn.functional.gelu(x, approximate="tanh"))):
        x = torch.linspace(-2, 2, 320, device=device).view(5, 64).requires_grad_()
        run(x).square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, atol=0.05, rtol=0.05)
