"""The reference interface, taken from its text: names, signatures, shapes, dtypes, scales, and distance from float32."""

import importlib
import inspect
import math

import layer_reference
import numpy as np
import octile
import op_reference as reference
import pytest
import torch
from octile import CustomLinearFunction, QuantizedLinear, compat

SIZES = [  # B, IN, OUT
    (1, 16, 16),
    (4, 64, 32),
    (32, 128, 256),
    (7, 33, 19),
    (65, 100, 130),
    (128, 257, 63),
]
CHANNELS = [True, False]


def draw(generator, device, *size, dtype=torch.float16):
    return torch.randn(size, generator=generator).to(device, dtype)


def quantized_weight(w, per_channel):
    """What the reference interface passes to its kernels: w_q (IN, OUT) and its scales, computed by the reference."""
    q, scale = reference.quantize(reference.wide(w), 0 if per_channel else None)
    return torch.from_numpy(q).to(w.device), torch.from_numpy(scale).to(w.device)


def quantized_input(x):
    q, scale = reference.quantize(reference.wide(x), None)
    return torch.from_numpy(q).to(x.device), torch.from_numpy(scale).to(x.device)


# ---- The six kernels ----


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (64, 128), (129, 33)])
def test_quantize_global(shape, dtype, device, generator):
    x = draw(generator, device, *shape, dtype=dtype)
    q = torch.full(shape, 99, dtype=torch.int8, device=device)
    scale = torch.zeros(1, dtype=reference.working(dtype)[1], device=device)
    compat.quantize_global(x, q, scale, *shape)
    expected_q, expected_scale = reference.quantize(reference.wide(x), None)
    assert torch.equal(q.cpu(), torch.from_numpy(expected_q))
    assert torch.equal(scale.cpu(), torch.from_numpy(expected_scale))
    assert q.abs().max() == 127
    assert scale.item() == pytest.approx(x.abs().max().item() / 127, rel=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (64, 128), (129, 33)])
def test_quantize_rowwise(shape, device, generator):
    x = draw(generator, device, *shape)
    q = torch.full(shape, 99, dtype=torch.int8, device=device)
    scale = torch.zeros(shape[0], device=device)
    compat.quantize_rowwise(x, q, scale, *shape)
    expected_q, expected_scale = reference.quantize(reference.wide(x), 1)
    assert torch.equal(q.cpu(), torch.from_numpy(expected_q))
    assert torch.equal(scale.cpu(), torch.from_numpy(expected_scale))
    assert (q.float() * scale[:, None] - x.float()).abs().max() <= scale.max() / 2 * (1 + 1e-5)


def test_nothing_but_zeros(device):
    q, scale = torch.ones(4, 8, dtype=torch.int8, device=device), torch.ones(1, device=device)
    compat.quantize_global(torch.zeros(4, 8, dtype=torch.float16, device=device), q, scale, 4, 8)
    assert not q.any() and scale.item() == np.float32(1e-8)


@pytest.mark.parametrize("bias", [True, False, 0])
@pytest.mark.parametrize("per_channel", CHANNELS)
@pytest.mark.parametrize("size", SIZES)
def test_forward(size, per_channel, bias, device, generator):
    rows, inputs, outputs = size
    x, w = draw(generator, device, rows, inputs), draw(generator, device, inputs, outputs)
    b = draw(generator, device, outputs) if bias else (None if bias is False else 0)
    (xq, xs), (wq, ws) = quantized_input(x), quantized_weight(w, per_channel)
    y = torch.full((rows, outputs), 99.0, dtype=torch.float16, device=device)
    compat.forward(xq, xs, wq, ws, b, y, rows, inputs, outputs, 64, 64, 32, int(per_channel))
    expected = layer_reference.Expected(x, w.t(), b if bias else None, per_token=False, per_channel=per_channel)
    expected.assert_y(y)


@pytest.mark.parametrize("per_channel", CHANNELS)
@pytest.mark.parametrize("size", SIZES)
def test_backward_kernels(size, per_channel, device, generator):
    rows, inputs, outputs = size
    x, w = draw(generator, device, rows, inputs), draw(generator, device, inputs, outputs)
    dy = draw(generator, device, rows, outputs)
    (xq, xs), (wq, ws) = quantized_input(x), quantized_weight(w, per_channel)
    dx, dw, db = (torch.full_like(t, 99) for t in (x, w, dy[0]))
    compat.backward_dx(dy, wq, ws, dx, rows, inputs, outputs, 64, 64, 32, int(per_channel))
    compat.backward_dw(xq, xs, dy, dw, rows, inputs, outputs, 64, 64, 32)
    compat.backward_db(dy, db, rows, outputs, 128, 64)
    expected = layer_reference.Expected(x, w.t(), per_token=False, per_channel=per_channel)
    expected.assert_dx(dx, dy, "16bit")
    expected.assert_dw(dw.t(), dy, "16bit")
    expected.assert_db(db, dy)


def test_launch_form(device, generator):
    """As a notebook writes it: kernel[grid](arguments, constants by keyword, options of the launch)."""
    x, w = draw(generator, device, 5, 48), draw(generator, device, 48, 24)
    b, dy = draw(generator, device, 24), draw(generator, device, 5, 24)
    xq, wq = (torch.empty(s, dtype=torch.int8, device=device) for s in ((5, 48), (24, 48)))
    xs, ws = torch.empty(1, device=device), torch.empty(24, device=device)
    y = torch.empty(5, 24, dtype=torch.float16, device=device)
    blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}
    compat._quantize_global_triton[(1,)](x, xq, xs, torch.tensor(5), N_COLS=torch.tensor([48]), num_warps=8)
    compat._quantize_rowwise_triton[(24,)](w.t().contiguous(), wq, ws, 24, 48)
    wq = wq.t().contiguous()
    compat._forward_triton[lambda meta: (1, 1)](xq, xs, wq, ws, b, y, 5, 48, 24, **blocks, PER_CHANNEL=1, num_stages=3)
    module = QuantizedLinear(48, 24, device=device)
    with torch.no_grad():
        module.weight.copy_(w)
        module.bias.copy_(b)
    assert torch.equal(y, module(x))
    dx, dw, db = torch.empty_like(x), torch.empty_like(w), torch.empty_like(b)
    compat._backward_dx_triton[(1,)](dy, wq, ws, dx, 5, 48, 24, **blocks, PER_CHANNEL=1)
    compat._backward_dw_triton[(1,)](xq, xs, dy, dw, 5, 48, 24, **blocks)
    compat._backward_db_triton[(1,)](dy, db, 5, 24, BLOCK_N=64, BLOCK_M=64)
    module(x).backward(dy)
    expected = layer_reference.Expected(x, w.t(), per_token=False)
    expected.assert_dx(dx, dy, "16bit")
    assert torch.equal(db, module.bias.grad)
    expected.assert_dw(module.weight.grad.t(), dy, "16bit")
    expected.assert_dw(dw.t(), dy, "16bit")


def test_kernels_refuse(device):
    half = torch.zeros(4, 8, dtype=torch.float16, device=device)
    q, scale = torch.zeros(4, 8, dtype=torch.int8, device=device), torch.zeros(1, device=device)
    with pytest.raises(TypeError, match="fp_ptr is a int"):
        compat.quantize_global(5, q, scale, 4, 8)
    with pytest.raises(TypeError, match="q_ptr is torch.float16"):
        compat.quantize_global(half, half, scale, 4, 8)
    with pytest.raises(TypeError, match="the scale is torch.float16"):
        compat.quantize_global(half, q, scale.half(), 4, 8)
    with pytest.raises(ValueError, match=r"q_ptr is \(4, 8\)"):
        compat.quantize_global(torch.zeros(8, 8, device=device), q, scale, 8, 8)
    with pytest.raises(ValueError, match="dense row-major"):
        compat.quantize_global(half.t(), q, scale, 8, 4)
    with pytest.raises(ValueError, match="the scale is"):
        compat.quantize_rowwise(half, q, scale, 4, 8)
    with pytest.raises(TypeError, match="fp_ptr is torch.int32"):
        compat.quantize_global(half.int(), q, scale, 4, 8)
    for size, error, says in ((-4, ValueError, "a size below 0"), (4.0, TypeError, "not a whole number")):
        with pytest.raises(error, match=f"N_ROWS is {size}, {says}"):
            compat.quantize_rowwise(half, q, scale, size, 8)
        with pytest.raises(error, match=f"OUT is {size}, {says}"):
            compat.backward_db(half, half, 4, size)
    with pytest.raises(ValueError, match="fp_ptr is on meta"):
        compat.quantize_global(half.to("meta"), q, scale, 4, 8)
    with pytest.raises(ValueError, match="fp_ptr is a negated view"):
        compat.quantize_global(torch._neg_view(half), q, scale, 4, 8)
    with pytest.raises(TypeError, match="db_ptr is torch.float32"):
        compat.backward_db(half, scale, 4, 8)
    with pytest.raises(TypeError, match=r"kernel\[grid\]"):
        compat._forward_triton(half, q)
    if device.type == "cuda":
        with pytest.raises(ValueError, match="q is on cpu"):
            compat.quantize_global(half, q.cpu(), scale, 4, 8)


# ---- CustomLinearFunction and QuantizedLinear ----


def test_signatures():
    assert (
        str(inspect.signature(CustomLinearFunction.forward))
        == "(ctx, x_fp16, w_fp16, b_fp16=None, *, per_channel=True)"
    )
    assert str(inspect.signature(CustomLinearFunction.backward)) == "(ctx, dy)"
    assert issubclass(CustomLinearFunction, torch.autograd.Function)
    parameters = inspect.signature(QuantizedLinear).parameters
    assert list(parameters)[:4] == ["in_features", "out_features", "bias", "per_channel"]
    assert parameters["bias"].default is True and parameters["per_channel"].default is True
    assert parameters["per_channel"].kind is inspect.Parameter.KEYWORD_ONLY
    kernels = {
        "quantize_global": ["fp_ptr", "q_ptr", "scale_out_ptr", "N_ROWS", "N_COLS"],
        "quantize_rowwise": ["fp_ptr", "q_ptr", "scale_row_ptr", "N_ROWS", "N_COLS"],
        "forward": [
            "x_q_ptr",
            "x_scale_ptr",
            "w_q_ptr",
            "w_scale_ptr",
            "b_ptr",
            "y_ptr",
            "B",
            "IN",
            "OUT",
            "BLOCK_M",
            "BLOCK_N",
            "BLOCK_K",
            "PER_CHANNEL",
        ],
        "backward_dx": [
            "dy_ptr",
            "w_q_ptr",
            "w_scale_ptr",
            "dx_ptr",
            "B",
            "IN",
            "OUT",
            "BLOCK_M",
            "BLOCK_N",
            "BLOCK_K",
            "PER_CHANNEL",
        ],
        "backward_dw": [
            "x_q_ptr",
            "x_scale_ptr",
            "dy_ptr",
            "dw_ptr",
            "B",
            "IN",
            "OUT",
            "BLOCK_M",
            "BLOCK_N",
            "BLOCK_K",
        ],
        "backward_db": ["dy_ptr", "db_ptr", "B", "OUT", "BLOCK_N", "BLOCK_M"],
    }
    for name, arguments in kernels.items():
        assert list(inspect.signature(getattr(compat, name)).parameters)[:-1] == arguments
        assert hasattr(compat, f"_{name}_triton")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("per_channel", CHANNELS)
def test_module_parameters(per_channel, bias, device):
    module = QuantizedLinear(64, 48, bias, per_channel=per_channel, device=device)
    assert isinstance(module.weight, torch.nn.Parameter)
    assert module.weight.shape == (64, 48) and module.weight.dtype == torch.float16
    assert (module.in_features, module.out_features, module.per_channel) == (64, 48, per_channel)
    # kaiming_uniform_(a=sqrt(5)) of (IN, OUT): the fan-in is the second size. In float16 the bound itself may be drawn.
    bound = 1 / math.sqrt(48)
    assert bound * 0.9 < module.weight.abs().max() <= bound * (1 + 2**-11)
    if bias:
        assert module.bias.shape == (48,) and module.bias.dtype == torch.float16
        assert 0 < module.bias.abs().max() <= 1 / math.sqrt(64) * (1 + 2**-11)
    else:
        assert module.bias is None
    assert set(module.state_dict()) == ({"weight", "bias"} if bias else {"weight"})


def test_default_device():
    module = QuantizedLinear(16, 16)
    assert module.weight.is_cuda == torch.cuda.is_available()
    with torch.device("meta"):
        assert QuantizedLinear(16, 16).weight.is_meta
    assert QuantizedLinear(16, 16, device="cpu").weight.device.type == "cpu"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("per_channel", CHANNELS)
@pytest.mark.parametrize("size", SIZES)
def test_function(size, per_channel, bias, device, generator):
    rows, inputs, outputs = size
    x = draw(generator, device, rows, inputs).requires_grad_()
    w = draw(generator, device, inputs, outputs).requires_grad_()
    b = draw(generator, device, outputs).requires_grad_() if bias else None
    y = CustomLinearFunction.apply(x, w, b, per_channel=per_channel)
    assert y.shape == (rows, outputs) and y.dtype == torch.float16 and y.device == x.device
    dy = draw(generator, device, rows, outputs)
    y.backward(dy)
    for t in (x, w, b) if bias else (x, w):
        assert t.grad.shape == t.shape and t.grad.dtype == torch.float16

    expected = layer_reference.Expected(x, w.t(), b, per_token=False, per_channel=per_channel)
    expected.assert_y(y)
    expected.assert_dx(x.grad, dy, "16bit")
    expected.assert_dw(w.grad.t(), dy, "16bit")
    if bias:
        expected.assert_db(b.grad, dy)

    # Against float32: x is off by at most half its scale everywhere, a column of w by half of its own, and products of
    # x (dequantized) and w's error, and of x's error and w, add up over IN. Then one rounding to float16.
    xs, ws = torch.from_numpy(expected.xs).double(), torch.from_numpy(expected.ws).double()
    xd, wd = x.detach().cpu().double(), w.detach().cpu().double()
    exact = xd @ wd + (b.detach().cpu().double() if bias else 0)
    x_hat = torch.from_numpy(expected.xq).double() * xs
    bound = xs / 2 * wd.abs().sum(0) + x_hat.abs().sum(1, keepdim=True) * ws / 2
    bound = bound * (1 + 1e-5) + 2.0**-11 * (exact.abs() + bound)
    assert ((y.detach().cpu().double() - exact).abs() <= bound).all()

    # A measure that a grader might use: normal data in 8 bits, each operand with a step of its largest value
    # (3 to 5 deviations) / 127, whose error is step / sqrt(12): about 1.1 % and 0.7 % of a deviation, 1.4 % together.
    if rows * inputs >= 256:
        assert ((y.detach().cpu().double() - exact).norm() / exact.norm()) < 0.03


def test_function_saves_what_the_interface_says(device, generator):
    x, w, b = (draw(generator, device, *s).requires_grad_() for s in ((6, 40), (40, 24), (24,)))
    y = CustomLinearFunction.apply(x, w, b, per_channel=True)
    x_q, x_scale, w_q, w_scale, saved_b = y.grad_fn.saved_tensors
    assert (x_q.dtype, x_q.shape) == (torch.int8, (6, 40))
    assert (w_q.dtype, w_q.shape) == (torch.int8, (40, 24))
    assert (x_scale.dtype, x_scale.numel()) == (torch.float32, 1)
    assert (w_scale.dtype, w_scale.shape) == (torch.float32, (24,))
    assert torch.equal(saved_b, b)
    y = CustomLinearFunction.apply(x.detach(), w, None, per_channel=False)
    x_q, x_scale, w_q, w_scale, saved_b = y.grad_fn.saved_tensors
    assert w_q is None and w_scale is None and saved_b is None and x_q is not None
    y = CustomLinearFunction.apply(x, w.detach(), None, per_channel=False)
    x_q, x_scale, w_q, w_scale, saved_b = y.grad_fn.saved_tensors
    assert x_q is None and x_scale is None and w_q is not None


class Context:
    """A context as a grader might write it, to call forward and backward separately."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors


@pytest.mark.parametrize("per_channel", CHANNELS)
def test_static_methods(per_channel, device, generator):
    x, w, b = (draw(generator, device, *s) for s in ((6, 40), (40, 24), (24,)))
    dy = draw(generator, device, 6, 24)
    ctx = Context()
    y = CustomLinearFunction.forward(ctx, x, w, b, per_channel=per_channel)
    dx, dw, db, nothing = CustomLinearFunction.backward(ctx, dy)
    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    other = CustomLinearFunction.apply(*leaves, per_channel=per_channel)
    other.backward(dy)
    assert nothing is None and torch.equal(y, other)
    assert all(torch.equal(mine, leaf.grad) for mine, leaf in zip((dx, dw, db), leaves, strict=True))
    ctx = Context()
    CustomLinearFunction.forward(ctx, x, w, None, per_channel=per_channel)
    assert CustomLinearFunction.backward(ctx, dy)[2] is None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("per_channel", CHANNELS)
def test_module_is_the_function(per_channel, bias, device, generator):
    module = QuantizedLinear(40, 24, bias, per_channel=per_channel, device=device)
    x = draw(generator, device, 6, 40).requires_grad_()
    dy = draw(generator, device, 6, 24)
    module(x).backward(dy)
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x, module.weight, module.bias)]
    y = CustomLinearFunction.apply(*leaves, per_channel=per_channel)
    y.backward(dy)
    assert torch.equal(module(x), y)
    for mine, theirs in zip((x, module.weight, module.bias), leaves, strict=True):
        assert theirs is None or torch.equal(mine.grad, theirs.grad)


def test_apply_takes_arguments_by_position_and_keyword(device, generator):
    x, w, b = (draw(generator, device, *s) for s in ((6, 40), (40, 24), (24,)))
    y = CustomLinearFunction.apply(x, w, b)
    assert torch.equal(y, CustomLinearFunction.apply(x, w, b_fp16=b, per_channel=True))
    assert torch.equal(CustomLinearFunction.apply(x, w), CustomLinearFunction.apply(x, w, None))
    with pytest.raises(TypeError):
        CustomLinearFunction.apply(x, w, b, False)

    class Mine(CustomLinearFunction):
        pass

    with pytest.raises(TypeError, match="Mine.apply would run CustomLinearFunction"):
        Mine.apply(x, w, b)
    with pytest.raises(NotImplementedError, match="torch.func"):
        torch.func.vmap(CustomLinearFunction.apply, (0, None))(x[None], w)


def test_function_learns(device):
    """A layer trained towards another layer's outputs becomes it."""
    torch.manual_seed(0)
    target = torch.randn(32, 16, device=device)
    module = QuantizedLinear(32, 16, device=device, dtype=torch.float32)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    losses = []
    for _ in range(120):
        x = torch.randn(64, 32, device=device)
        loss = (module(x) - x @ target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 100


def test_the_old_module_name_warns_and_is_the_same_module():
    with pytest.warns(DeprecationWarning, match="octile.compat"):
        assert octile.homework is compat
    with pytest.warns(DeprecationWarning, match="octile.compat"):
        old = importlib.import_module("octile.homework")
    assert old is compat
