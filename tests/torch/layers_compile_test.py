"""Layers under torch.compile and in CUDA graphs: one graph, for every batch size, with the bits of eager code."""

import copy

import octile
import pytest
import torch
from octile import Linear, QuantizedLinear, W4A8Linear, W4A16Linear, W8A8Linear
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

pytestmark = pytest.mark.usefixtures("one_thread")

BRAIN, FULL = torch.bfloat16, torch.float32
BACKWARDS = ["16bit", "int8", "int8-whole", ("int8", "16bit")]


@pytest.fixture(autouse=True)
def reset():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model(device, kind=Linear, backward="int8", dtype=FULL):
    torch.manual_seed(0)
    first, last = (
        kind(48, 96, backward=backward, device=device, dtype=dtype),
        kind(96, 32, False, device=device, dtype=dtype),
    )
    last.backward = backward
    return nn.Sequential(first, nn.ReLU(), last)


def gradients(model, x, dy):
    x = x.detach().requires_grad_()
    y = model(x)
    return y, *torch.autograd.grad(y, (x, *model.parameters()), dy)


def compiled(model, backend="aot_eager"):
    counter = CompileCounterWithBackend(backend)
    return counter, torch.compile(model, backend=counter, fullgraph=True)


@pytest.mark.parametrize("cached", [False, True])
def test_one_graph_for_all_layers(cached, device, generator):
    """A model that is compiled block by block: what differs between layers must not be part of the graph."""
    blocks = nn.ModuleList(model(device)[:2] for _ in range(12))
    if cached:
        octile.cache_weights_(blocks)
    counter = CompileCounterWithBackend("aot_eager")
    x = torch.randn(16, 48, generator=generator).to(device)
    for block in blocks:
        block.compile(backend=counter, fullgraph=True)
        with torch._dynamo.config.patch(error_on_recompile=True):
            block(x)
    assert counter.frame_count == 1


# Each layer with each backward, and every number of dimensions with both.
@pytest.mark.parametrize(
    ("kind", "backward", "leading"),
    [
        *((Linear, backward, ()) for backward in BACKWARDS),
        *((QuantizedLinear, backward, (3,)) for backward in BACKWARDS),
        (QuantizedLinear, "int8", ()),
        (Linear, "int8", (3,)),
    ],
)
def test_one_graph_for_all_batches(kind, backward, leading, device, generator):
    plain = model(device, kind, backward)
    counter, fast = compiled(plain)
    for m in (5, 16, 33, 64, 7, 128):  # multiples of 16, whose transposes need no padding, and others
        x = torch.randn(*leading, m, 48, generator=generator).to(device).requires_grad_()
        dy = torch.randn(*leading, m, 32, generator=generator).to(device)
        torch._dynamo.mark_dynamic(x, len(leading))
        with torch._dynamo.config.patch(error_on_recompile=True):
            y = fast(x)
        got = y, *torch.autograd.grad(y, (x, *plain.parameters()), dy)
        expected = gradients(plain, x, dy)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", [Linear, W8A8Linear, W4A16Linear, W4A8Linear])
def test_one_graph_without_gradients(kind, device, generator):
    torch.manual_seed(0)
    plain = kind.from_linear(nn.Linear(128, 96, device=device))
    counter, fast = compiled(plain)
    with torch.no_grad():
        for m in (5, 16, 33):
            x = torch.randn(2, m, 128, generator=generator).to(device)
            torch._dynamo.mark_dynamic(x, 1)
            with torch._dynamo.config.patch(error_on_recompile=True):
                assert torch.equal(fast(x), plain(x))
    assert counter.frame_count == 1


def test_frozen_int8_layer_passes_gradients(device, generator):
    layer = W8A8Linear.from_linear(nn.Linear(48, 32, device=device))
    _, fast = compiled(layer)
    x = torch.randn(5, 48, generator=generator).to(device).requires_grad_()
    got, expected = (torch.autograd.grad(f(x).square().sum(), x)[0] for f in (fast, layer))
    assert torch.equal(got, expected)


def test_outputs_changed_in_place(device, generator):
    layer = Linear(48, 32, device=device)
    _, fast = compiled(nn.Sequential(layer, nn.ReLU(inplace=True)))
    x = torch.randn(2, 5, 48, generator=generator).to(device).requires_grad_()
    got, expected = (torch.autograd.grad(f(x).sum(), layer.weight)[0] for f in (fast, lambda x: layer(x).relu()))
    assert torch.equal(got, expected)


def test_automatic_dynamic_batches(device, generator):
    """Without mark_dynamic: the second size compiles the graph for all others."""
    plain = model(device)
    counter, fast = compiled(plain)
    for m in (40, 24, 17, 64, 3):
        x = torch.randn(m, 48, generator=generator).to(device)
        assert torch.equal(fast(x), plain(x))
    assert counter.frame_count == 2


@pytest.mark.parametrize("backward", ["16bit", "int8"])
def test_autocast(backward, device, generator):
    """x is cast to autocast's type first, the weight quantized from float32; its gradient leaves in float32."""
    plain = model(device, backward=backward)
    counter, fast = compiled(plain)
    for m in (16, 33):
        x = torch.randn(m, 48, generator=generator).to(device).requires_grad_()
        dy = torch.randn(m, 32, generator=generator).to(device, BRAIN)
        torch._dynamo.mark_dynamic(x, 0)
        with torch.autocast(device.type, BRAIN):
            y = fast(x)
            eager = plain(x.to(BRAIN))
        assert y.dtype == BRAIN and torch.equal(y, eager)
        got, expected = (torch.autograd.grad(t, (x, *plain.parameters()), dy) for t in (y, eager))
        assert all(a.dtype == FULL and torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert counter.frame_count == 1


def test_graph_holds_what_it_should(device, generator):
    """One quantize each for X and W, only int8 and scales saved, and no 16-bit copy of the weight."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph)

    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    layer = Linear(64, 48, device=device, backward="int8")
    fast = torch.compile(layer, backend=backend, fullgraph=True)
    x = torch.randn(32, 64, generator=generator).to(device).requires_grad_()
    with torch.autocast(device.type, BRAIN):
        fast(x).sum().backward()
    forward, backward = graphs
    calls = [str(n.target) for n in forward.graph.nodes if n.op == "call_function"]
    assert calls.count("octile.quantize.default") == 2 and calls.count("octile.linear_int8.default") == 1
    saved = [n.meta["val"] for n in forward.graph.nodes if n.op == "output" for n in n.args[0][1:]]
    dtypes = sorted(str(v.dtype) for v in saved if isinstance(v, torch.Tensor))
    assert dtypes == ["torch.float32", "torch.float32", "torch.int8", "torch.int8"]
    calls = [str(n.target) for n in backward.graph.nodes if n.op == "call_function"]
    assert calls.count("octile.linear_backward.default") == 1 and "octile.quantize.default" not in calls


@pytest.mark.parametrize("keywords", [{}, {"per_channel": False}])
def test_homework_function(keywords, device, generator):
    """With the keyword there is a graph break, which must do no harm."""

    def f(x, w, b):
        return octile.CustomLinearFunction.apply(x * 2, w, b, **keywords).relu()

    fast = torch.compile(f, backend="aot_eager", fullgraph=not keywords)
    leaves = [torch.randn(s, generator=generator).to(device).requires_grad_() for s in ((5, 48), (48, 32), (32,))]
    got, expected = (torch.autograd.grad(g(*leaves).sum(), leaves) for g in (fast, f))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_stochastic_rounding(device, generator):
    """Compiled once; in a graph the random numbers are the same in every run."""
    torch.manual_seed(0)
    layer = Linear(48, 32, device=device, backward="int8", rounding="stochastic")
    nearest = Linear.from_linear(layer, backward="int8")
    counter, fast = compiled(layer)
    x = torch.randn(16, 48, generator=generator).to(device).requires_grad_()
    dy = torch.randn(16, 32, generator=generator).to(device)
    first, second, third = (torch.autograd.grad(f(x), x, dy)[0] for f in (fast, fast, nearest))
    assert torch.equal(first, second) and not torch.equal(first, third)
    assert (first - third).norm() / third.norm() < 0.03
    assert counter.frame_count == 1


def test_function(device, generator):
    def f(x, w, b):
        return octile.linear(x, w, b, layout="in_out", activation="per_tensor", backward="int8")

    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(f, backend=counter, fullgraph=True)
    x, w, b = (torch.randn(s, generator=generator).to(device).requires_grad_() for s in ((5, 48), (48, 32), (32,)))
    got, expected = (torch.autograd.grad(g(x, w, b).sum(), (x, w, b)) for g in (fast, f))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_training_follows_the_weight(device, generator):
    """A compiled step sees every change of the weight: it is quantized in the graph."""
    plain = model(device)
    other = copy.deepcopy(plain)
    counter, fast = compiled(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (plain, other)]
    x = torch.randn(16, 48, generator=generator).to(device)
    for _ in range(4):
        for forward, optimizer in zip((fast, other), optimizers, strict=True):
            forward(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), other.parameters(), strict=True))
    with torch.no_grad():
        plain[0].weight.data.mul_(2)
    assert torch.equal(fast(x), plain(x))
    assert counter.frame_count == 1


def quantizes_in_graph(model, x):
    seen = []

    def look(graph, _):
        seen.append(sum("octile.quantize" in str(n.target) for n in graph.graph.nodes))
        return make_boxed_func(graph)

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    torch.compile(model, backend=aot_autograd(fw_compiler=look), fullgraph=True)(x)
    return seen[0]


@pytest.mark.parametrize("backward", ["16bit", "int8"])
def test_cached_weights(backward, device, generator):
    """cache_weights_(): the same training, without a quantized weight in the graph."""
    plain = model(device, backward=backward)
    other = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05, fused=True) for m in (plain, other)]
    cache = octile.cache_weights_(plain, optimizers[0])
    x = torch.randn(16, 48, generator=generator).to(device)
    assert quantizes_in_graph(plain, x) == 2 and quantizes_in_graph(other, x) == 4
    torch._dynamo.reset()
    counter, fast = compiled(plain)
    for _ in range(4):
        for forward, optimizer in zip((fast, other), optimizers, strict=True):
            forward(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert counter.frame_count == 1
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), other.parameters(), strict=True))

    # As documented, a compiled forward does not see other changes until refresh().
    before = fast(x)
    with torch.no_grad():
        plain[0].weight.mul_(2)
    assert torch.equal(fast(x), before) and cache.stale() == ["0"]
    cache.refresh()
    assert torch.equal(fast(x), plain(x)) and not torch.equal(fast(x), before)

    plain.load_state_dict(other.state_dict())
    assert torch.equal(fast(x), other(x))

    # A backward that comes after a step would read the new weight: an error, not a wrong gradient.
    y = fast(x)
    cache.refresh()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()

    cache.remove()  # the graph quantizes again
    with torch.no_grad():
        plain[0].weight.mul_(2)
    assert torch.equal(fast(x), plain(x))


def test_an_option_changed_under_cached_weights(device, generator):
    plain = model(device, backward="16bit")
    octile.cache_weights_(plain)
    _, fast = compiled(plain)
    x = torch.randn(16, 48, generator=generator).to(device)
    fast(x).sum().backward()
    plain[0].per_channel = plain[2].per_channel = False
    plain[0].backward = plain[2].backward = "int8"
    y = fast(x)
    y.sum().backward()
    assert torch.equal(y, copy.deepcopy(plain)(x))


def test_an_eager_guest_leaves_a_compiled_forward_alone(device, generator):
    layer = Linear(48, 32, device=device)
    octile.cache_weights_(layer)
    _, fast = compiled(layer)
    x = torch.randn(16, 48, generator=generator).to(device)
    y = fast(x)
    guest = nn.Parameter(torch.randn(32, 48, generator=generator).to(device))
    torch.func.functional_call(layer, {"weight": guest}, (x,))
    assert torch.equal(fast(x), y)


def test_cached_after_it_was_compiled(device, generator):
    plain = model(device)
    x = torch.randn(16, 48, generator=generator).to(device)
    _, fast = compiled(plain)
    y = fast(x)
    octile.cache_weights_(plain)
    plain[0].weight_int8.zero_()
    plain[2].weight_int8.zero_()
    assert not fast(x).any() and y.any()  # the buffers are what it reads


def test_conversion_after_it_was_compiled(device, generator):
    plain = nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 32)).to(device)
    x = torch.randn(16, 48, generator=generator).to(device)
    with torch.no_grad():
        _, fast = compiled(plain)
        before = fast(x)
        octile.quantize_(plain, octile.W8A8Dynamic())
        assert torch.equal(fast(x), plain(x)) and not torch.equal(fast(x), before)


@pytest.mark.parametrize("cached", [False, True])
def test_compiled_optimizer(cached, device, generator):
    plain = model(device)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    cache = octile.cache_weights_(plain, optimizer) if cached else None
    step = torch.compile(optimizer.step, backend="aot_eager")
    x = torch.randn(16, 48, generator=generator).to(device)
    for _ in range(3):
        before = plain(x)
        before.square().mean().backward()
        step()
        optimizer.zero_grad()
        assert not torch.equal(plain(x), before)
        assert cache is None or cache.stale() == []
        assert torch.equal(plain(x), copy.deepcopy(plain)(x))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", [Linear, W8A8Linear])
def test_export(kind, strict, device, generator):
    if kind is Linear and strict and torch.__version__.startswith("2.6"):
        pytest.skip("torch 2.6 cannot export an autograd.Function of dynamic shape")
    layer = kind.from_linear(nn.Linear(48, 32, device=device))
    x = torch.randn(5, 48, generator=generator).to(device)
    shapes = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(layer, (x,), dynamic_shapes=shapes, strict=strict).module()
    for m in (5, 16, 33):
        x = torch.randn(m, 48, generator=generator).to(device)
        assert torch.equal(exported(x), layer(x))


# ---- CUDA graphs ----


def capture(f):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            f()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = f()
    return graph, out


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("graphs are CUDA's")
    return torch.device("cuda")


@pytest.mark.parametrize("cached", [False, True])
def test_cuda_graph_follows_the_weight(cached, gpu):
    layer = Linear(256, 128, device=gpu, dtype=torch.float16)
    cache = octile.cache_weights_(layer) if cached else None
    x = torch.randn(16, 256, device=gpu, dtype=torch.float16)
    with torch.no_grad():
        layer(x)
        graph, y = capture(lambda: layer(x))
        for _ in range(3):
            layer.weight.mul_(-1.5)
            if cached:
                cache.refresh()
            x.normal_()
            graph.replay()
            assert torch.equal(y, octile.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("backward", BACKWARDS)
def test_cuda_graph_of_a_training_step(backward, gpu):
    layer = Linear(256, 128, device=gpu, backward=backward)
    x = torch.randn(64, 256, device=gpu, requires_grad=True)
    dy = torch.randn(64, 128, device=gpu, dtype=BRAIN)

    def step():
        with torch.autocast("cuda", BRAIN):
            y = layer(x)
        return torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)

    graph, out = capture(step)
    for _ in range(3):
        with torch.no_grad():
            layer.weight.mul_(1.1)
            x.normal_()
            dy.normal_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(out, step(), strict=True))


@pytest.mark.parametrize("cached", [False, True])
def test_reduce_overhead(cached, gpu):
    plain = model(gpu)
    other = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (plain, other)]
    if cached:
        octile.cache_weights_(plain, optimizers[0])
    fast = torch.compile(plain, mode="reduce-overhead", fullgraph=True)
    for _ in range(6):
        x = torch.randn(32, 48, device=gpu)
        for forward, optimizer in zip((fast, other), optimizers, strict=True):
            forward(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    # Float sums outside our ops may differ, and with them an int8 step: losses are compared, not bits.
    with torch.no_grad():
        assert torch.allclose(plain(x).square().mean(), other(x).square().mean(), rtol=1e-2)
