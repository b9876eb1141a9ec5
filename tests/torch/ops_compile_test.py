"""The ops as torch's compiler and checkers see them: schemas, fake kernels, strides, dynamic shapes."""

import octile
import pytest
import torch
from octile import _c, _ops, _plans, one_query
from torch._subclasses.fake_tensor import FakeTensorMode

ops = torch.ops.octile

TOKEN, TENSOR, STATIC = _c.DYNAMIC_PER_TOKEN, _c.DYNAMIC_PER_TENSOR, _c.STATIC_PER_TENSOR
OUT_IN, IN_OUT = _c.OUT_IN, _c.IN_OUT


def arguments(m, n, k, dtype=torch.bfloat16, device="cpu"):
    """op -> tuples of its arguments, k a multiple of 64."""
    g = torch.Generator().manual_seed(5)
    x, w = torch.randn(m, k, generator=g).to(device, dtype), torch.randn(n, k, generator=g).to(device, dtype)
    dy, bias = torch.randn(m, n, generator=g).to(device, dtype), torch.randn(n, generator=g).to(device, dtype)
    wq, turned_wq, w_scale = ops.quantize(w, _c.PER_ROW, _c.BOTH)
    xq, turned_xq, x_scale = ops.quantize(x, _c.PER_ROW, _c.BOTH)
    one_scale = w_scale[:1].clone()
    leading = x.view(m, 1, k).transpose(0, 1)
    s4 = torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8).to(device)
    s4_scale = torch.rand(n, k // 64, generator=g).to(device)
    zeros = torch.zeros(n, k // 64, dtype=torch.int32, device=device)
    multiplier = (torch.rand(k, generator=g) + 0.5).to(device)
    fields = {"x": _c.F32, "y": _c.F32, "activation": TOKEN, "weight": _c.S8_PER_CHANNEL}
    packed = _plans.pack(wq, w_scale, None, k, **fields).to(device)
    back = (dy, wq, w_scale, xq, x_scale)
    turned = (dy, turned_wq, w_scale, turned_xq, x_scale)
    f32 = torch.float32
    offsets = torch.tensor([0, len(dy)], dtype=torch.int32, device=dy.device)
    return {
        "quantize": [
            (x, granularity, orientation)
            for granularity in (_c.PER_TENSOR, _c.PER_ROW, _c.PER_COLUMN)
            for orientation in (_c.ROW_MAJOR, _c.TRANSPOSED, _c.BOTH)
        ]
        + [(x.t(), _c.PER_ROW, _c.BOTH), (x, _c.PER_ROW, _c.BOTH, x_scale)],
        "norm_quantize": [
            (x, multiplier, None, None, _c.RMS_NORM, _c.ROW_MAJOR, 1e-5),
            (x, multiplier, multiplier, x, _c.LAYER_NORM, _c.BOTH, 1e-5),
        ],
        "dequantize": [
            (wq, w_scale, None, k, dtype),
            (turned_wq.t(), one_scale, None, k, f32),
            (s4, s4_scale, zeros, k, dtype),
            (s4, s4_scale, None, k, f32),
        ],
        "linear": [
            (x, wq, w_scale, bias, TOKEN, OUT_IN),
            (x, wq, one_scale, None, TENSOR, OUT_IN),
            (leading, turned_wq, w_scale, bias, TOKEN, IN_OUT),
            (x.t().contiguous().t(), turned_wq.contiguous(), w_scale, None, TOKEN, IN_OUT),
            (leading, wq, w_scale, bias, STATIC, OUT_IN, multiplier, 0.02),
            (x, wq, one_scale, None, STATIC, OUT_IN, None, 0.02),
        ],
        "linear_int8": [
            (xq, x_scale, wq, w_scale, bias, OUT_IN, dtype),
            (xq, x_scale[:1].clone(), turned_wq, one_scale, None, IN_OUT, f32),
        ],
        "linear_s4": [(x, s4, s4_scale, None, None), (leading, s4, s4_scale, zeros, bias, 1)],
        "linear_packed": [
            (x, packed, bias, n, TOKEN, _c.S8_PER_CHANNEL, 0, False, None, 0.0),
            (leading, packed, None, n, STATIC, _c.S8_PER_CHANNEL, 0, False, multiplier, 0.02),
        ],
        "linear_backward": [
            (*back, 1, 1, True, OUT_IN, False, dtype, OUT_IN),
            (*back, 2, 1, False, OUT_IN, False, f32, IN_OUT),
            (*turned, 2, 2, True, IN_OUT, True, f32, OUT_IN),
            (*turned, 2, 2, True, IN_OUT, True, f32, OUT_IN, _c.STOCHASTIC, 2**40 + 1),
            (*turned, 2, 2, True, IN_OUT, True, f32, OUT_IN, _c.NEAREST, 0, 128),
            (dy, None, None, None, None, 0, 0, True, OUT_IN, False, dtype, OUT_IN),
            (dy, None, None, xq, x_scale, 0, 2, False, OUT_IN, False, dtype, OUT_IN),
            (dy, wq, w_scale, None, None, 2, 0, False, OUT_IN, False, dtype, OUT_IN),
            (dy.t().contiguous().t(), wq, w_scale, None, None, 2, 0, False, OUT_IN, False, dtype, OUT_IN),
        ],
        "grouped_linear": grouped(x, xq, x_scale, wq, w_scale, s4, s4_scale, zeros),
        "grouped_linear_backward": [
            (dy, offsets, wq, w_scale, xq, x_scale, 1, 1, True, f32),
            (dy, offsets, wq, w_scale, xq, x_scale, 2, 2, False, dtype, _c.STOCHASTIC, 2**40 + 1, 128),
            (dy, offsets, wq, w_scale, None, None, 2, 0, False, dtype, _c.NEAREST, 0, 256),
            (dy, offsets, None, None, xq, x_scale, 0, 1, True, dtype),
        ],
        "attend_one_query": attention(min(m, 2), device),
    }


def attention(batch, device):
    random = lambda *shape: torch.randn(shape, device=device).bfloat16()  # noqa: E731
    query, key = random(batch, 1, 6, 16).transpose(1, 2), random(batch, 2, 300, 16)
    visible = torch.rand(batch, 1, 1, 300, device=device) < 0.5
    return [(query, key, key + 1, None, None), (query, key, key + 1, visible, 0.3)]


def grouped(x, xq, x_scale, wq, w_scale, s4, s4_scale, zeros):
    """For one expert: sorted rows, two rows per token that are summed, and 4 bits."""
    (m, k), n, device = x.shape, wq.shape[0], x.device
    offsets = torch.tensor([0, m], dtype=torch.int32, device=device)
    token = torch.arange(2 * m, dtype=torch.int32, device=device) % max(m, 1)
    place = torch.arange(2 * m, dtype=torch.int32, device=device).view(m, 2)
    router = torch.rand(m, 2, device=device)
    channels, words = (_c.S8_PER_CHANNEL, 0, False), (n, TOKEN)
    return [
        (x, None, offsets, None, wq, w_scale, None, None, None, None, *words, *channels, x.dtype),
        (xq, x_scale, offsets * 2, token, wq, w_scale, None, None, place, router, *words, *channels, torch.float32),
        (
            x,
            None,
            offsets,
            None,
            s4,
            s4_scale,
            zeros,
            x.new_zeros(1, n),
            None,
            None,
            n,
            0,
            _c.S4_GROUP,
            k // zeros.shape[1],
            True,
            x.dtype,
        ),
    ]


def every_call(*shape, **more):
    return [(name, call) for name, calls in arguments(*shape, **more).items() for call in calls]


def runs(name, device):
    """Whether there is a kernel for the op: on a GPU none reads packed int8."""
    if name == "attend_one_query":
        return one_query.runs_on(torch.device(device))
    return name != "linear_packed" or torch.device(device).type == "cpu"


def flat(results):
    return results if isinstance(results, (tuple, list)) else (results,)


@pytest.mark.parametrize("name", list(_ops._SCHEMAS))
def test_opcheck(name, device):
    if not hasattr(torch.library, "opcheck"):
        pytest.skip("this torch has no opcheck")
    if not runs(name, device):
        pytest.skip(f"no kernel for {name} on {device}")
    for call in arguments(6, 10, 64, device=device)[name]:
        torch.library.opcheck(getattr(ops, name).default, call)


@pytest.mark.parametrize("shape", [(1, 1, 64), (6, 10, 64), (33, 17, 128), (0, 10, 64)])
def test_fakes_have_the_real_strides(shape, device):
    for name, call in every_call(*shape, device=device):
        if not runs(name, device):
            continue
        real = flat(getattr(ops, name)(*call))
        with FakeTensorMode() as mode:
            given = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in call]
            fake = flat(getattr(ops, name)(*given))
        assert len(real) == len(fake)
        for r, f in zip(real, fake):
            assert (r.shape, r.stride(), r.dtype, r.device) == (f.shape, f.stride(), f.dtype, f.device), name
            assert r.storage_offset() == f.storage_offset() == 0


def test_meta_tensors():
    for name, call in every_call(6, 10, 64):
        real = flat(getattr(ops, name)(*call))
        meta = flat(getattr(ops, name)(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in call)))
        for r, m in zip(real, meta):
            assert (r.shape, r.stride(), r.dtype) == (m.shape, m.stride(), m.dtype)
            assert m.device.type == "meta"


def test_a_tensor_on_meta_among_others_is_refused():
    """Torch then calls the fake kernel, which returns real, uninitialized memory."""
    for name, call in every_call(6, 10, 64):
        tensors = [i for i, a in enumerate(call) if isinstance(a, torch.Tensor)]
        if len(tensors) == 1:
            continue
        for i in tensors:
            mixed = [a.to("meta") if j == i else a for j, a in enumerate(call)]
            with pytest.raises(RuntimeError, match=f"octile::{name}: all tensors must be on one device; .*meta"):
                getattr(ops, name)(*mixed)


def training_step(x, w, bias, dy):
    """A layer's forward and backward, written with the ops alone."""
    wq, turned_wq, w_scale = ops.quantize(w, _c.PER_ROW, _c.BOTH)
    xq, turned_xq, x_scale = ops.quantize(x * 2, _c.PER_ROW, _c.BOTH)
    y = ops.linear_int8(xq, x_scale, wq, w_scale, bias, OUT_IN, x.dtype)
    served = ops.linear(x, wq, w_scale, bias, TOKEN, OUT_IN) + 1
    back = (dy + y, turned_wq, w_scale, turned_xq, x_scale, 2, 2, True, IN_OUT, True, torch.float32, OUT_IN)
    return (y, served, *ops.linear_backward(*back), *ops.linear_backward(*back, gradient_block=128))


def step_arguments(m, device):
    g = torch.Generator().manual_seed(m)
    shapes = ((m, 64), (40, 64), (40,), (m, 40))
    return [torch.randn(shape, generator=g).to(device, torch.bfloat16) for shape in shapes]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_without_breaks_or_recompiles(backend, device):
    torch._dynamo.reset()
    compiled = torch.compile(training_step, fullgraph=True, dynamic=True, backend=backend)
    compiled(*step_arguments(5, device))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for m in (6, 17, 48, 1000):
            given = step_arguments(m, device)
            for got, expected in zip(compiled(*given), training_step(*given)):
                assert torch.equal(got, expected)
                assert got.stride() == expected.stride()


def test_layers_compiled_by_inductor(device):
    """Here, because its first use would take half of the compiled layers' test time."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    last = octile.Linear(96, 32, False, backward="int8", device=device)
    model = torch.nn.Sequential(octile.Linear(48, 96, backward="int8", device=device), torch.nn.ReLU(), last)
    x, dy = (torch.randn(32, n, generator=torch.Generator().manual_seed(n)).to(device) for n in (48, 32))
    x.requires_grad_()
    both = []
    for f in (torch.compile(model, fullgraph=True), model):
        y = f(x)
        both.append((y, *torch.autograd.grad(y, (x, *model.parameters()), dy)))
    assert all(torch.equal(got, expected) for got, expected in zip(*both, strict=True))


def test_compiled_of_an_inner_batch_that_is_marked_dynamic(device):
    """dynamic is not requested: the second batch size makes it dynamic, and there is no third graph."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(training_step, fullgraph=True, backend=backend)
    for m in (5, 6, 7, 20, 33):
        given = step_arguments(m, device)
        for got, expected in zip(compiled(*given), training_step(*given)):
            assert torch.equal(got, expected)
    assert len(graphs) <= 2


def test_a_seed_that_changes_is_not_compiled_again(device):
    torch._dynamo.reset()
    _, w, _, dy = step_arguments(9, device)
    wq, _, w_scale = ops.quantize(w, _c.PER_ROW, _c.ROW_MAJOR)

    def gradient(dy, seed):
        back = (dy, wq, w_scale, None, None, 2, 0, False, OUT_IN, False, dy.dtype, OUT_IN)
        return ops.linear_backward(*back, _c.STOCHASTIC, seed)[0]

    compiled = torch.compile(gradient, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(dy, 2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in (3, 77, 2**40):
            assert torch.equal(compiled(dy, seed), gradient(dy, seed))


def test_exported(device):
    class Layer(torch.nn.Module):
        def forward(self, x, w, bias, dy):
            return training_step(x, w, bias, dy)

    rows = torch.export.Dim("rows", min=2, max=4096)
    dynamic = ({0: rows}, None, None, {0: rows})
    program = torch.export.export(Layer(), tuple(step_arguments(5, device)), dynamic_shapes=dynamic)
    given = step_arguments(19, device)
    for got, expected in zip(program.module()(*given), training_step(*given)):
        assert torch.equal(got, expected)


def test_no_gradient_is_made_up():
    """The ops have no autograd: differentiating through one warns and gives no gradient."""
    x = torch.randn(4, 64, requires_grad=True)
    wq, _, w_scale = ops.quantize(torch.randn(8, 64), _c.PER_ROW, _c.ROW_MAJOR)
    y = ops.linear(x, wq, w_scale, None, TOKEN, OUT_IN)
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        y.sum().backward()
    assert x.grad is None


def test_functionalize_leaves_bits_alone():
    given = step_arguments(7, "cpu")
    functional = torch.func.functionalize(training_step)(*given)
    assert all(torch.equal(a, b) for a, b in zip(training_step(*given), functional, strict=True))
