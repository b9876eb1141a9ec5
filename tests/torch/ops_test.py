"""The ops torch.ops.octile.* against the number contract: its bits where it fixes them, its bounds elsewhere."""

import ctypes
import gc
import math
import os
import subprocess
import sys
import threading

import numpy as np
import op_reference as reference
import pytest
import torch
from octile import _c, _ops

ops = torch.ops.octile

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [  # M, N, K
    (1, 1, 1),
    (1, 64, 64),
    (2, 3, 5),
    (3, 33, 70),
    (8, 65, 129),
    (33, 48, 32),
    (64, 100, 257),
    (129, 31, 96),
]
EMPTY = [(0, 5, 7), (4, 0, 7), (4, 5, 0), (0, 0, 0)]
OUT_IN, IN_OUT = _c.OUT_IN, _c.IN_OUT
TOKEN, TENSOR = _c.DYNAMIC_PER_TOKEN, _c.DYNAMIC_PER_TENSOR
NONE, FLOAT, INT8 = _c.NO_PRODUCT, _c.DEQUANTIZED, _c.INT8


def scale_type(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


class Layer:
    """X, W and dY of a layer, quantized by the reference, on a device."""

    def __init__(self, shape, dtype, device, generator, per_channel=True, per_token=True):
        self.m, self.n, self.k = m, n, k = shape
        self.dtype, self.device = dtype, device

        def draw(*size):
            return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)

        x, w, bias, dy = draw(m, k), draw(n, k), draw(n), draw(m, n)
        xq, x_scale = reference.quantize(reference.wide(x), 1 if per_token else None)
        wq, w_scale = reference.quantize(reference.wide(w), 1 if per_channel else None)
        wq.reshape(-1)[::7] = -128  # as other tools produce it
        self.host = {"xq": xq, "x_scale": x_scale, "wq": wq, "w_scale": w_scale}
        self.host |= {"bias": reference.wide(bias), "dy": reference.wide(dy)}
        on = {name: torch.from_numpy(self.host[name]).to(device) for name in ("xq", "x_scale", "wq", "w_scale")}
        self.x, self.bias, self.dy = x.to(device), bias.to(device), dy.to(device)
        self.xq, self.x_scale, self.wq, self.w_scale = on["xq"], on["x_scale"], on["wq"], on["w_scale"]

    def weight(self, layout):
        return self.wq if layout == OUT_IN else self.wq.t().contiguous()

    def y(self, bias=True):
        host = self.host
        exact = reference.linear(
            host["xq"], host["x_scale"], host["wq"], host["w_scale"], host["bias"] if bias else None
        )
        return reference.narrow(exact, self.dtype)


def padded(t, extra=5):
    """t with padding between its rows."""
    wide = torch.zeros(t.shape[0], t.shape[1] + extra, dtype=t.dtype, device=t.device)
    wide[:, : t.shape[1]] = t
    return wide[:, : t.shape[1]]


def awkward(t):
    """t (R, C) with various strides: dense, padded, transposed, with gaps in both dimensions."""
    yield t
    yield padded(t)
    yield t.t().contiguous().t()
    spread = torch.zeros(2 * t.shape[0], 3 * t.shape[1], dtype=t.dtype, device=t.device)
    spread[::2, ::3] = t
    yield spread[::2, ::3]


def test_binding_is_the_one_that_was_asked_for():
    wanted = os.environ.get("OCTILE_TORCH_BINDING")
    assert _ops.BINDING == (wanted or _ops.BINDING)
    assert bool(_ops.BINDING_REASON) == (_ops.BINDING == "ctypes")


# ---- quantize ----


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (16, 16), (33, 70), (129, 257), (0, 5), (5, 0), (0, 0)])
def test_quantize(shape, dtype, device, generator):
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)
    axes = {_c.PER_TENSOR: None, _c.PER_ROW: 1, _c.PER_COLUMN: 0}
    for granularity, axis in axes.items():
        q, scale = reference.quantize(reference.wide(x), axis)
        for orientation in (_c.ROW_MAJOR, _c.TRANSPOSED, _c.BOTH):
            given, turned, s = ops.quantize(x, granularity, orientation)
            assert torch.equal(s.cpu(), torch.from_numpy(scale))
            assert s.dtype == scale_type(dtype)
            if orientation == _c.TRANSPOSED:
                assert given.shape == (0, 0)
            else:
                assert torch.equal(given.cpu(), torch.from_numpy(q))
                assert given.stride() == (math.ceil(shape[1] / 16) * 16, 1)
            if orientation == _c.ROW_MAJOR:
                assert turned.shape == (0, 0)
            else:
                assert torch.equal(turned.cpu(), torch.from_numpy(q.T.copy()))
                assert turned.stride() == (math.ceil(shape[0] / 16) * 16 + 128, 1)
            assert given.dtype == turned.dtype == torch.int8
            assert given.device == turned.device == s.device == x.device


def test_quantize_of_any_strides(device, generator):
    x = torch.randn(19, 37, generator=generator).to(torch.bfloat16).to(device)
    for granularity in (_c.PER_TENSOR, _c.PER_ROW, _c.PER_COLUMN):
        expected = ops.quantize(x, granularity, _c.BOTH)
        for view in awkward(x):
            assert torch.equal(view, x)
            for got, wanted in zip(ops.quantize(view, granularity, _c.BOTH), expected):
                assert torch.equal(got, wanted)
        for view in (x[:1].expand(19, 37), x[:, :1].expand(19, 37)):
            for got, wanted in zip(
                ops.quantize(view, granularity, _c.BOTH), ops.quantize(view.contiguous(), granularity, _c.BOTH)
            ):
                assert torch.equal(got, wanted)


def test_rows_that_overlap(device, generator):
    line = torch.randn(30, generator=generator).to(device)
    x = line.as_strided((11, 20), (1, 1))
    assert all(torch.equal(a, b) for a, b in zip(ops.quantize(x, 1, 2), ops.quantize(x.contiguous(), 1, 2)))
    layer = Layer((11, 9, 20), torch.float32, device, generator)
    rest = (layer.wq, layer.w_scale, layer.bias, TOKEN, OUT_IN)
    assert torch.equal(ops.linear(x, *rest), ops.linear(x.contiguous(), *rest))


@pytest.mark.parametrize("dtype", FLOATS)
def test_quantize_with_a_given_scale(dtype, device, generator):
    """Parts of rows, given the scales of whole rows, have the levels of whole rows."""
    x = torch.randn(19, 40, generator=generator, dtype=torch.float64).to(dtype).to(device)
    for granularity in (_c.PER_TENSOR, _c.PER_ROW):
        q, turned, scale = ops.quantize(x, granularity, _c.BOTH)
        for part in (slice(0, 17), slice(17, 40)):
            for given in (scale, scale.reshape(-1, 1).expand(-1, 2).t()[0]):
                got, got_turned, same = ops.quantize(x[:, part], granularity, _c.BOTH, given)
                assert torch.equal(got, q[:, part]) and torch.equal(got_turned, turned[part])
                assert torch.equal(same, scale)
    x[3, 2] = math.inf
    q, _, told = ops.quantize(x, _c.PER_ROW, _c.ROW_MAJOR, torch.ones(19, dtype=scale_type(dtype), device=device))
    assert not q[3].any() and told.isnan().nonzero().tolist() == [[3]]
    with pytest.raises(RuntimeError, match="given_scale is .*, expected"):
        ops.quantize(x, _c.PER_ROW, _c.ROW_MAJOR, torch.ones(18, dtype=scale_type(dtype), device=device))


def test_quantize_of_what_is_not_finite(device):
    x = torch.ones(4, 8, device=device)
    x[1, 3], x[2, 5] = math.nan, math.inf
    q, _, scale = ops.quantize(x, _c.PER_ROW, _c.ROW_MAJOR)
    assert scale.isnan().tolist() == [False, True, True, False]
    assert (q == torch.tensor([127, 0, 0, 127], device=device)[:, None]).all()


# ---- linear, linear_int8 ----


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES + EMPTY)
def test_linear(shape, dtype, device, generator):
    for per_channel in (True, False):
        for activation in (TOKEN, TENSOR):
            layer = Layer(shape, dtype, device, generator, per_channel, activation == TOKEN)
            for layout in (OUT_IN, IN_OUT):
                for bias in (layer.bias, None):
                    y = ops.linear(layer.x, layer.weight(layout), layer.w_scale, bias, activation, layout)
                    assert y.dtype == dtype and y.is_contiguous()
                    assert torch.equal(y.cpu(), layer.y(bias is not None))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES + EMPTY)
def test_linear_int8(shape, dtype, device, generator):
    for per_channel in (True, False):
        for per_token in (True, False):
            layer = Layer(shape, dtype, device, generator, per_channel, per_token)
            for layout in (OUT_IN, IN_OUT):
                for bias in (layer.bias, None):
                    weight = layer.weight(layout)
                    y = ops.linear_int8(layer.xq, layer.x_scale, weight, layer.w_scale, bias, layout, dtype)
                    assert y.dtype == dtype and y.is_contiguous()
                    assert torch.equal(y.cpu(), layer.y(bias is not None))


def test_linear_of_any_strides(device, generator):
    layer = Layer((24, 18, 40), torch.float32, device, generator)
    expected = layer.y()
    twice = torch.stack([layer.bias, layer.bias], 1)
    biases = [layer.bias, twice[:, 0]]
    scales = [layer.w_scale, torch.stack([layer.w_scale, layer.w_scale], 1)[:, 1]]
    for x in awkward(layer.x):
        for layout in (OUT_IN, IN_OUT):
            for weight in awkward(layer.weight(layout)):
                for bias, scale in zip(biases, scales):
                    assert torch.equal(ops.linear(x, weight, scale, bias, TOKEN, layout).cpu(), expected)
    for x in awkward(layer.xq):
        for x_scale in (layer.x_scale, torch.stack([layer.x_scale, layer.x_scale], 1)[:, 0]):
            y = ops.linear_int8(x, x_scale, layer.wq, layer.w_scale, layer.bias, OUT_IN, torch.float32)
            assert torch.equal(y.cpu(), expected)


def test_linear_of_expanded_tensors(device, generator):
    layer = Layer((6, 10, 20), torch.float16, device, generator)
    same = [(layer.x[:1].expand(6, 20), layer.wq, layer.w_scale, layer.bias)]
    same.append((layer.x, layer.wq[:1].expand(10, 20), layer.w_scale[:1].expand(10), layer.bias[:1].expand(10)))
    for tensors in same:
        expected = ops.linear(*(t.contiguous() for t in tensors), TOKEN, OUT_IN)
        assert torch.equal(ops.linear(*tensors, TOKEN, OUT_IN), expected)


def test_linear_of_many_dimensions(device, generator):
    layer = Layer((4, 6, 8), torch.float32, device, generator)
    many = layer.x.view([1] * 30 + [2] + [1] * 31 + [2, 8])
    y = ops.linear(many, layer.wq, layer.w_scale, layer.bias, TOKEN, OUT_IN)
    assert y.shape == (*many.shape[:-1], 6)
    assert torch.equal(y.reshape(4, 6).cpu(), layer.y())


def test_linear_of_leading_dimensions(device, generator):
    layer = Layer((24, 9, 20), torch.bfloat16, device, generator)
    rest = (layer.wq, layer.w_scale, layer.bias, TOKEN, OUT_IN)
    expected = layer.y()
    views = [layer.x.view(2, 3, 4, 20), layer.x.view(24, 1, 20), layer.x.view(1, 24, 20)]
    views.append(padded(layer.x).unflatten(0, (4, 6)))  # padded, but evenly spaced rows
    views.append(layer.x.view(4, 6, 20).transpose(0, 1).contiguous().transpose(0, 1))  # not evenly
    views.append(layer.x.view(2, 12, 20)[:, :, None, :])
    for x in views:
        y = ops.linear(x, *rest)
        assert y.shape == (*x.shape[:-1], 9)
        assert y.is_contiguous()
        assert torch.equal(y.reshape(24, 9).cpu(), expected)
    assert torch.equal(ops.linear(layer.x[5], *rest).cpu(), expected[5])
    for shape in ((2, 0, 20), (0, 3, 20)):
        assert ops.linear(layer.x.new_empty(shape), *rest).shape == (*shape[:-1], 9)
    everywhere = layer.x[:1].view(1, 1, 20).expand(3, 5, 20)
    assert torch.equal(ops.linear(everywhere, *rest).cpu(), expected[:1].expand(3, 5, 9))


def test_a_scale_that_is_a_number(device, generator):
    layer = Layer((5, 6, 7), torch.float32, device, generator, per_channel=False, per_token=False)
    scale, x_scale = layer.w_scale.reshape(()), layer.x_scale.reshape(())
    expected = layer.y()
    assert torch.equal(ops.linear(layer.x, layer.wq, scale, layer.bias, TENSOR, OUT_IN).cpu(), expected)
    y = ops.linear_int8(layer.xq, x_scale, layer.wq, scale, layer.bias, OUT_IN, torch.float32)
    assert torch.equal(y.cpu(), expected)


def test_a_row_does_not_depend_on_its_neighbours(device, generator):
    layer = Layer((70, 40, 64), torch.float16, device, generator)
    rest = (layer.wq, layer.w_scale, layer.bias, TOKEN, OUT_IN)
    whole = ops.linear(layer.x, *rest)
    for rows in (1, 2, 17, 69):
        assert torch.equal(ops.linear(layer.x[:rows], *rest), whole[:rows])


# ---- linear_s4 ----


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "shape", [(1, 8, 64), (5, 33, 128), (33, 7, 256), (3, 5, 50), (2, 3, 7), (0, 5, 64), (2, 0, 64)]
)
def test_linear_s4(shape, dtype, device, generator):
    m, n, k = shape
    x = torch.randn(m, k, generator=generator, dtype=torch.float64).to(dtype).to(device)
    bias = torch.randn(n, generator=generator, dtype=torch.float64).to(dtype).to(device)
    weight = torch.randint(0, 256, (n, (k + 1) // 2), generator=generator, dtype=torch.uint8).to(device)
    for group in (k, 32, 64, 128):
        if k % group:
            continue
        scale = (torch.rand(n, k // group, generator=generator) + 0.5).to(scale_type(dtype)).to(device)
        zeros = torch.randint(-8, 8, (n, k // group), generator=generator, dtype=torch.int32).to(device)
        for zero_point in (None, zeros):
            for b in (None, bias):
                y = ops.linear_s4(x, weight, scale, zero_point, b)
                assert y.shape == (m, n) and y.dtype == dtype and y.is_contiguous()
                z = None if zero_point is None else zero_point.cpu().numpy()
                w = reference.dequantize_s4(weight.cpu().numpy(), k, scale.cpu().numpy(), z)
                wide = x.cpu().double().numpy()
                added = 0 if b is None else b.cpu().double().numpy()
                exact, magnitudes = wide @ w.T + added, np.abs(wide) @ np.abs(w).T + np.abs(added)
                reference.assert_sum(y, exact, magnitudes, k, dtype, device)
                levels = reference.dequantize_s4(weight.cpu().numpy(), k, np.ones(scale.shape), z).astype(np.int8)
                q = reference.quantize(reference.wide(x), 1)
                y = reference.linear_groups(*q, levels, scale.cpu().numpy(), None if b is None else reference.wide(b))
                got = ops.linear_s4(x, weight, scale, zero_point, b, TOKEN)
                assert torch.equal(got.cpu(), reference.narrow(y, dtype))


def test_linear_s4_of_any_strides(device, generator):
    x = torch.randn(3, 4, 64, generator=generator).to(device)
    weight = torch.randint(0, 256, (10, 32), generator=generator, dtype=torch.uint8).to(device)
    scale = torch.rand(10, 2, generator=generator).to(device)
    zeros = torch.randint(-8, 8, (10, 2), generator=generator, dtype=torch.int32).to(device)
    expected = ops.linear_s4(x, weight, scale, zeros, None)
    assert expected.shape == (3, 4, 10)
    for w in awkward(weight):
        for s in awkward(scale):
            for z in awkward(zeros):
                assert torch.equal(ops.linear_s4(x, w, s, z, None), expected)
    turned = x.transpose(0, 1)
    assert torch.equal(ops.linear_s4(turned, weight, scale, zeros, None), expected.transpose(0, 1))


# ---- dequantize ----


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 64), (5, 128), (33, 256), (3, 50), (2, 7), (0, 64), (4, 0)])
def test_dequantize(shape, dtype, device, generator):
    n, k = shape
    real = reference.working(dtype)[0]
    q8 = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8)
    q4 = torch.randint(0, 256, (n, (k + 1) // 2), generator=generator, dtype=torch.uint8)
    for group in (k, 32, 64, 128):
        if group and k % group:
            continue
        groups = k // group if group else 1
        scale = (torch.rand(n, groups, generator=generator) + 0.5).to(scale_type(dtype))
        zeros = torch.randint(-8, 8, (n, groups), generator=generator, dtype=torch.int32)
        for weight in (q8, q4):
            for points in (None, zeros):
                ones = np.ones((n, groups), real)
                z = None if points is None else points.numpy()
                if weight is q4:
                    levels = reference.dequantize_s4(weight.numpy(), k, ones, z) if k else np.zeros((n, 0))
                else:
                    levels = weight.numpy() - (0 if z is None else np.repeat(z, group or 1, 1)[:, :k])
                exact = levels.astype(real) * np.repeat(scale.numpy(), group or 1, 1)[:, :k]
                given = weight.to(device), scale.to(device), None if points is None else points.to(device)
                w = ops.dequantize(*given, k, dtype)
                assert w.shape == (n, k) and w.dtype == dtype and w.is_contiguous()
                assert torch.equal(w.cpu(), reference.narrow(exact, dtype))
                if group == k and weight is q8:
                    flat = [None if t is None else t.flatten() for t in given[1:]]
                    assert torch.equal(ops.dequantize(given[0], *flat, k, dtype), w)
    one = torch.full((1,), 0.3, dtype=scale_type(dtype))
    w = ops.dequantize(q8.to(device), one.to(device), None, k, dtype)
    assert torch.equal(w.cpu(), reference.narrow(q8.numpy().astype(real) * one.numpy(), dtype))


def test_dequantize_of_any_strides(device, generator):
    weight = torch.randint(0, 256, (10, 32), generator=generator, dtype=torch.uint8).to(device)
    scale = torch.rand(10, 2, generator=generator).to(device)
    zeros = torch.randint(-8, 8, (10, 2), generator=generator, dtype=torch.int32).to(device)
    for q, k in ((weight, 64), (weight.view(torch.int8), 32)):
        expected = ops.dequantize(q, scale, zeros, k, torch.float16)
        for w in awkward(q):
            for s in awkward(scale):
                for z in awkward(zeros):
                    assert torch.equal(ops.dequantize(w, s, z, k, torch.float16), expected)


# ---- linear_backward ----


def backward(layer, dx, dw, db=True, weight_layout=OUT_IN, x_transposed=False, dw_dtype=None, dw_layout=OUT_IN):
    weight = (layer.weight(weight_layout), layer.w_scale) if dx else (None, None)
    x = (layer.xq.t().contiguous() if x_transposed else layer.xq, layer.x_scale) if dw else (None, None)
    rest = (db, weight_layout, x_transposed, dw_dtype or layer.dtype, dw_layout)
    return ops.linear_backward(layer.dy, *weight, *x, dx, dw, *rest)


def test_backward_int8_of_tiny_gradients(device, generator):
    """The gradients of a mean over many tokens: far below the scales that quantize() stops at."""
    layer = Layer((33, 48, 70), torch.bfloat16, device, generator)
    layer.dy = layer.dy * 2.0**-40
    layer.host["dy"] = reference.wide(layer.dy)
    host = layer.host
    exact = reference.backward_int8(host["dy"], host["wq"], host["w_scale"], host["xq"], host["x_scale"])
    dx, dw, _ = backward(layer, INT8, INT8)
    assert dx.count_nonzero() > dx.numel() * 0.9
    assert torch.equal(dx.cpu(), reference.narrow(exact[0], layer.dtype))
    assert torch.equal(dw.cpu(), reference.narrow(exact[1], layer.dtype))


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 3, -1])
def test_backward_int8_with_stochastic_rounding(seed, device, generator):
    layer = Layer((33, 48, 70), torch.float32, device, generator)
    host = layer.host
    exact = reference.backward_int8(host["dy"], host["wq"], host["w_scale"], host["xq"], host["x_scale"], seed % 2**64)
    back = (layer.dy, layer.wq, layer.w_scale, layer.xq, layer.x_scale, INT8, INT8, True, OUT_IN, False)
    dx, dw, _ = ops.linear_backward(*back, torch.float32, OUT_IN, _c.STOCHASTIC, seed)
    assert torch.equal(dx.cpu(), torch.from_numpy(exact[0]))
    assert torch.equal(dw.cpu(), torch.from_numpy(exact[1]))
    nearest = ops.linear_backward(*back, torch.float32, OUT_IN, _c.NEAREST, seed)
    assert not torch.equal(dx, nearest[0]) and torch.equal(nearest[0], backward(layer, INT8, INT8)[0])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("block", [128, 256, 512, 1024])
def test_backward_int8_in_blocks(block, dtype, device, generator):
    """Contractions of several blocks, the last one short; of one; of none."""
    if dtype == torch.float64 and device.type == "cuda":
        pytest.skip("blocks of float64 are for a CPU")
    for shape in ((2 * block + 7, 130, 9), (30, 2 * block, 5), *EMPTY[:3]):
        layer = Layer(shape, dtype, device, generator)
        host = layer.host
        operands = (host["dy"], host["wq"], host["w_scale"], host["xq"], host["x_scale"])
        for rounding, seed in ((_c.NEAREST, None), (_c.STOCHASTIC, 2**40 + 3)):
            exact = reference.backward_int8(*operands, seed, block)
            back = (layer.dy, layer.wq, layer.w_scale, layer.xq, layer.x_scale)
            rest = (OUT_IN, False, scale_type(dtype), OUT_IN, rounding, seed or 0, block)
            dx, dw, db = ops.linear_backward(*back, INT8, INT8, True, *rest)
            assert torch.equal(dx.cpu(), reference.narrow(exact[0], dtype))
            assert torch.equal(dw.cpu(), reference.narrow(exact[1], scale_type(dtype)))
            check_db(layer, db)
            again = ops.linear_backward(*back, INT8, INT8, True, *rest)
            assert all(torch.equal(a, b) for a, b in zip((dx, dw, db), again))
        # Blocks in one product do not change the other one's bits.
        whole = backward(layer, FLOAT, FLOAT)
        rest = (True, OUT_IN, False, dtype, OUT_IN, _c.NEAREST, 0)
        exact = reference.backward_int8(*operands, block=block)
        mixed = ops.linear_backward(*back, INT8, FLOAT, *rest, gradient_block=block)
        assert torch.equal(mixed[1], whole[1]) and torch.equal(mixed[0].cpu(), reference.narrow(exact[0], dtype))
        mixed = ops.linear_backward(*back, FLOAT, INT8, *rest, gradient_block=block)
        assert torch.equal(mixed[0], whole[0]) and torch.equal(mixed[1].cpu(), reference.narrow(exact[1], dtype))


def test_blocks_have_plans_of_their_own(device, generator):
    """The same problem with and without blocks, alternating."""
    layer = Layer((300, 24, 20), torch.float32, device, generator)
    back = (layer.dy, layer.wq, layer.w_scale, layer.xq, layer.x_scale, NONE, INT8, False, OUT_IN, False)
    back += (torch.float32, OUT_IN, _c.NEAREST, 0)
    first = [ops.linear_backward(*back, block)[1] for block in (0, 128, 256)]
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])
    assert torch.equal(first[0], ops.linear_backward(*back)[1])
    for block, expected in zip((0, 128, 256), first):
        assert torch.equal(ops.linear_backward(*back, block)[1], expected)


def check_db(layer, db):
    dy = layer.dy.cpu().double().numpy()
    reference.assert_sum(db, dy.sum(0), np.abs(dy).sum(0), layer.m, layer.dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES + EMPTY)
def test_backward_int8(shape, dtype, device, generator):
    for per_channel, per_token in ((True, True), (True, False), (False, True)):
        layer = Layer(shape, dtype, device, generator, per_channel, per_token)
        host = layer.host
        exact = reference.backward_int8(host["dy"], host["wq"], host["w_scale"], host["xq"], host["x_scale"])
        for weight_layout in (OUT_IN, IN_OUT):
            for x_transposed in (False, True):
                for dw_layout in (OUT_IN, IN_OUT):
                    for dw_dtype in {dtype, torch.float64 if dtype == torch.float64 else torch.float32}:
                        fields = (weight_layout, x_transposed, dw_dtype, dw_layout)
                        dx, dw, db = backward(layer, INT8, INT8, True, *fields)
                        assert dx.dtype == db.dtype == dtype and dw.dtype == dw_dtype
                        assert dx.is_contiguous() and dw.is_contiguous()
                        assert torch.equal(dx.cpu(), reference.narrow(exact[0], dtype))
                        dw = dw if dw_layout == OUT_IN else dw.t()
                        assert torch.equal(dw.cpu(), reference.narrow(exact[1], dw_dtype))
                        check_db(layer, db)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES + EMPTY)
def test_backward_16bit(shape, dtype, device, generator):
    for per_channel, per_token in ((True, True), (False, False)):
        layer = Layer(shape, dtype, device, generator, per_channel, per_token)
        dy = layer.dy.cpu().double().numpy()
        w = layer.host["wq"] * layer.host["w_scale"].astype(np.float64).reshape(-1, 1)
        x = layer.host["xq"] * layer.host["x_scale"].astype(np.float64).reshape(-1, 1)
        for layout in (OUT_IN, IN_OUT):
            for x_transposed in (False, True):
                dx, dw, db = backward(layer, FLOAT, FLOAT, True, layout, x_transposed, None, layout)
                reference.assert_sum(dx, dy @ w, np.abs(dy) @ np.abs(w), layer.n, dtype, device)
                dw = dw if layout == OUT_IN else dw.t()
                reference.assert_sum(dw, dy.T @ x, np.abs(dy).T @ np.abs(x), layer.m, dtype, device)
                check_db(layer, db)


@pytest.mark.parametrize("dx", [NONE, FLOAT, INT8])
@pytest.mark.parametrize("dw", [NONE, FLOAT, INT8])
@pytest.mark.parametrize("db", [False, True])
def test_backward_of_any_subset(dx, dw, db, device, generator):
    layer = Layer((20, 24, 28), torch.float16, device, generator)
    got = backward(layer, dx, dw, db)
    alone = (backward(layer, dx, NONE, False)[0], backward(layer, NONE, dw, False)[1], backward(layer, NONE, NONE)[2])
    shapes = ((20, 28) if dx else (0,), (24, 28) if dw else (0,), (24,) if db else (0,))
    for g, a, shape, asked in zip(got, alone, shapes, (dx, dw, db)):
        assert g.shape == shape
        if asked and g is not got[2]:
            assert torch.equal(g, a)
    if db:
        check_db(layer, got[2])


def test_backward_of_any_strides(device, generator):
    layer = Layer((20, 24, 28), torch.float32, device, generator)
    expected = backward(layer, INT8, INT8)
    tail = (INT8, INT8, True, OUT_IN, False, torch.float32, OUT_IN)
    for dy in awkward(layer.dy):
        got = ops.linear_backward(dy, layer.wq, layer.w_scale, layer.xq, layer.x_scale, *tail)
        assert all(torch.equal(a, b) for a, b in zip(got, expected))
    for weight in awkward(layer.wq):
        for x in awkward(layer.xq):
            got = ops.linear_backward(layer.dy, weight, layer.w_scale, x, layer.x_scale, *tail)
            assert all(torch.equal(a, b) for a, b in zip(got, expected))


@pytest.mark.parametrize("product", [FLOAT, INT8])
def test_backward_of_an_expanded_gradient(product, device, generator):
    """As from y.sum().backward(): every stride is 0."""
    layer = Layer((20, 24, 28), torch.float16, device, generator)
    one = torch.tensor(0.5, dtype=torch.float16, device=device)
    rest = (layer.wq, layer.w_scale, layer.xq, layer.x_scale, product, product, True, OUT_IN, False)
    rest += (torch.float16, OUT_IN)
    for dy in (one.expand(20, 24), layer.dy[:1].expand(20, 24), layer.dy[:, :1].expand(20, 24)):
        expected = ops.linear_backward(dy.contiguous(), *rest)
        got = ops.linear_backward(dy, *rest)
        assert all(torch.equal(a, b) for a, b in zip(got, expected))


# ---- Errors ----


def test_errors(device):
    x = torch.randn(4, 8, device=device)
    w, scale = torch.zeros(6, 8, dtype=torch.int8, device=device), torch.ones(6, device=device)
    xq, x_scale = torch.zeros(4, 8, dtype=torch.int8, device=device), torch.ones(4, device=device)
    bias, dy = torch.zeros(6, device=device), torch.zeros(4, 6, device=device)
    s4 = torch.zeros(6, 4, dtype=torch.uint8, device=device)
    f32 = torch.float32
    calls = [
        (r"quantize: x has 3 dimensions", lambda: ops.quantize(x[None], 1, 0)),
        (r"quantize: granularity is 3", lambda: ops.quantize(x, 3, 0)),
        (r"quantize: orientation is -1", lambda: ops.quantize(x, 1, -1)),
        (r"quantize: .*x", lambda: ops.quantize(x.long(), 1, 0)),
        (r"quantize: .*x", lambda: ops.quantize(xq, 1, 0)),
        (r"linear: .*x has no dimensions", lambda: ops.linear(x[0, 0], w, scale, None, TOKEN, OUT_IN)),
        (r"linear: LinearPlan::run: weight is s8 \(6, 8\)", lambda: ops.linear(x[:, :5], w, scale, None, 1, OUT_IN)),
        (r"linear: .*weight has 1 dimension", lambda: ops.linear(x, w[0], scale, None, TOKEN, OUT_IN)),
        (r"linear: .*weight_scale", lambda: ops.linear(x, w, scale[:5], None, TOKEN, OUT_IN)),
        (r"linear: .*weight_scale", lambda: ops.linear(x, w, scale.double(), None, TOKEN, OUT_IN)),
        (r"linear: weight_scale has 3 dim", lambda: ops.linear(x, w, scale[:, None, None], None, TOKEN, OUT_IN)),
        (r"linear: .*weight is f32", lambda: ops.linear(x, w.float(), scale, None, TOKEN, OUT_IN)),
        (r"linear: .*bias", lambda: ops.linear(x, w, scale, bias[:5], TOKEN, OUT_IN)),
        (r"linear: .*bias", lambda: ops.linear(x, w, scale, bias.half(), TOKEN, OUT_IN)),
        (r"linear: .*activation", lambda: ops.linear(x, w, scale, None, 17, OUT_IN)),
        (r"linear: .*activation", lambda: ops.linear(x, w, scale, None, TOKEN + 2**32, OUT_IN)),
        (r"linear: .*weight_layout", lambda: ops.linear(x, w, scale, None, TOKEN, -(2**32))),
        (r"linear: x has 70 dimensions, 64", lambda: ops.linear(x.view([1] * 68 + [4, 8]), w, scale, None, 1, OUT_IN)),
        (r"linear: .*static", lambda: ops.linear(x, w, scale, None, _c.STATIC_PER_TENSOR, OUT_IN)),
        (r"linear: .*weight_layout", lambda: ops.linear(x, w, scale, None, TOKEN, 2)),
        (r"linear: ", lambda: ops.linear(x.int(), w, scale, None, TOKEN, OUT_IN)),
        (r"linear_int8: .*x is", lambda: ops.linear_int8(x, x_scale, w, scale, None, OUT_IN, f32)),
        (r"linear_int8: .*x_scale", lambda: ops.linear_int8(xq, x_scale[:2], w, scale, None, OUT_IN, f32)),
        (r"linear_int8: .*dtype", lambda: ops.linear_int8(xq, x_scale, w, scale, None, OUT_IN, torch.int64)),
        (r"linear_int8: .*y", lambda: ops.linear_int8(xq, x_scale, w, scale, None, OUT_IN, torch.int8)),
        (r"linear_s4: weight has 4 columns", lambda: ops.linear_s4(x[:, :5], s4, scale[:, None], None, None)),
        (r"linear_s4: weight has 4 columns of", lambda: ops.linear_s4(x, s4.char(), scale[:, None], None, None)),
        (r"linear_s4: weight_scale has 3 columns", lambda: ops.linear_s4(x, s4, torch.ones(6, 3), None, None)),
        (r"linear_s4: .*group", lambda: ops.linear_s4(x, s4, scale[:, None].expand(6, 2), None, None)),
        (r"linear_s4: .*activation = 9", lambda: ops.linear_s4(x, s4, scale[:, None], None, None, 9)),
        (r"linear_s4: weight_scale has 1 dim", lambda: ops.linear_s4(x, s4, scale, None, None)),
        (r"dequantize: weight has 8 columns of .*int8, expected 9", lambda: ops.dequantize(w, scale, None, 9, f32)),
        (r"dequantize: weight has 4 columns of .*uint8, exp", lambda: ops.dequantize(s4, scale, None, 6, f32)),
        (r"dequantize: weight has 8 columns of .*float32", lambda: ops.dequantize(w.float(), scale, None, 8, f32)),
        (r"dequantize: weight has 8 .* expected -8", lambda: ops.dequantize(w, scale, None, -8, f32)),
        (r"dequantize: weight has 1 dim", lambda: ops.dequantize(w[0], scale, None, 8, f32)),
        (r"dequantize: .*scale is", lambda: ops.dequantize(w, scale[:5], None, 8, f32)),
        (r"dequantize: .*scale is", lambda: ops.dequantize(w, scale, None, 8, torch.float64)),
        (r"dequantize: weight_scale has 3 columns", lambda: ops.dequantize(w, torch.ones(6, 3), None, 8, f32)),
        (r"dequantize: weight_zero_point has 1 dim", lambda: ops.dequantize(w, scale[:, None], scale.int(), 8, f32)),
        (r"dequantize: .*zero_point", lambda: ops.dequantize(w, scale, scale, 8, f32)),
        (r"dequantize: dtype is", lambda: ops.dequantize(w, scale, None, 8, torch.int64)),
        (
            r"linear_backward: dx needs weight",
            lambda: ops.linear_backward(dy, None, scale, xq, x_scale, 1, 1, True, 0, False, f32, 0),
        ),
        (
            r"linear_backward: dw needs x",
            lambda: ops.linear_backward(dy, w, scale, xq, None, 1, 1, True, 0, False, f32, 0),
        ),
        (
            r"linear_backward: .*dx",
            lambda: ops.linear_backward(dy, w, scale, xq, x_scale, 3, 1, True, 0, False, f32, 0),
        ),
        (
            r"linear_backward: dw_layout is -1",
            lambda: ops.linear_backward(dy, w, scale, xq, x_scale, 2, 2, True, 1, False, f32, -1),
        ),
        (
            r"linear_backward: dw_layout is 2",
            lambda: ops.linear_backward(dy, w, scale, xq, x_scale, 2, 2, True, 1, False, f32, 2),
        ),
        (
            r"linear_backward: .*rounding",
            lambda: ops.linear_backward(dy, w, scale, xq, x_scale, 2, 2, True, 0, False, f32, 0, 2),
        ),
        (
            r"linear_backward: .*gradient_block = 64, expected 0, 128, 256, 512 or 1024",
            lambda: ops.linear_backward(dy, w, scale, xq, x_scale, 2, 2, True, 0, False, f32, 0, 0, 0, 64),
        ),
        (
            r"linear_backward: .*gradient_block = 2147483647, expected 0",
            lambda: ops.linear_backward(dy, w, scale, xq, x_scale, 2, 2, True, 0, False, f32, 0, 0, 0, 2**32 + 128),
        ),
        (
            r"linear_backward: .*gradient_block = 128 .*expected an int8 product",
            lambda: ops.linear_backward(dy, w, scale, xq, x_scale, 1, 1, True, 0, False, f32, 0, 0, 0, 128),
        ),
        (
            r"linear_backward: .*dw_dtype",
            lambda: ops.linear_backward(dy, w, scale, xq, x_scale, 1, 1, True, 0, False, torch.int64, 0),
        ),
        (
            r"linear_backward: .*dw_dtype",
            lambda: ops.linear_backward(dy, w, scale, xq, x_scale, 1, 1, True, 0, False, torch.float16, 0),
        ),
        (
            r"linear_backward: .*weight is",
            lambda: ops.linear_backward(dy, w[:, :7], scale, xq, x_scale, 1, 1, True, 0, False, f32, 0),
        ),
        (
            r"linear_backward: dy has 3 dim",
            lambda: ops.linear_backward(dy[None], w, scale, xq, x_scale, 1, 1, True, 0, False, f32, 0),
        ),
    ]
    for pattern, call in calls:
        with pytest.raises((RuntimeError, ValueError), match="octile::" + pattern):
            call()
    # The same thread still works.
    assert ops.linear(x, w, scale, bias, TOKEN, OUT_IN).shape == (4, 6)


def test_no_kernel_for_other_devices():
    with pytest.raises(NotImplementedError):
        ops.quantize(torch.randn(3, 4).to_sparse(), 1, 0)


# ---- Ownership ----


def count_uses(call, tensors):
    before = [t._use_count() for t in tensors]
    for _ in range(5):
        call()
    return [t._use_count() - b for t, b in zip(tensors, before)]


def test_nothing_is_kept(device, generator):
    layer = Layer((8, 12, 16), torch.float32, device, generator)
    odd = [layer.x.t().contiguous().t(), layer.wq.t().contiguous().t(), layer.bias[:1].expand(12)]
    tensors = [layer.x, layer.xq, layer.x_scale, layer.wq, layer.w_scale, layer.bias, layer.dy, *odd]

    def works():
        ops.quantize(layer.x, 1, 2)
        ops.linear(layer.x, layer.wq, layer.w_scale, layer.bias, TOKEN, OUT_IN)
        ops.linear(odd[0], odd[1], layer.w_scale, odd[2], TOKEN, OUT_IN)
        ops.linear_int8(layer.xq, layer.x_scale, layer.wq, layer.w_scale, layer.bias, OUT_IN, torch.float32)
        ops.dequantize(odd[1], layer.w_scale, None, 16, torch.float16)
        backward(layer, INT8, FLOAT)
        backward(layer, NONE, NONE)

    def fails():
        bad = layer.bias[:3]
        calls = [
            lambda: ops.quantize(layer.x, 9, 2),
            lambda: ops.linear(layer.x, layer.wq, layer.w_scale, bad, TOKEN, OUT_IN),
            lambda: ops.linear(odd[0], layer.wq, bad, odd[2], TOKEN, OUT_IN),
            lambda: ops.linear_int8(layer.x, layer.x_scale, layer.wq, layer.w_scale, layer.bias, 0, torch.float32),
            lambda: ops.linear_s4(layer.x, layer.wq, layer.w_scale, layer.bias, bad),
            lambda: ops.dequantize(layer.wq, bad, None, 16, torch.float32),
            lambda: ops.dequantize(layer.wq, layer.w_scale, bad, 16, torch.float32),
            lambda: ops.linear_backward(
                layer.dy, layer.wq, bad, layer.xq, layer.x_scale, 1, 1, True, 0, False, torch.float32, 0
            ),
        ]
        for call in calls:
            with pytest.raises(RuntimeError):
                call()

    assert count_uses(works, tensors) == [0] * len(tensors)
    assert count_uses(fails, tensors) == [0] * len(tensors)
    for y in (*ops.quantize(layer.x, 1, 2), ops.linear(layer.x, layer.wq, layer.w_scale, None, TOKEN, OUT_IN)):
        assert y._use_count() == 1


class Heap(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ["arena", "blocks", "small", "maps", "mapped", "unused", "free", "used", "top", "keep"]
    ]


def allocated():
    """Bytes allocated by malloc."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Heap
    return libc.mallinfo2().used


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="asks glibc 2.33 or newer")
def test_not_a_byte_is_kept(generator):
    layer = Layer((4, 6, 8), torch.float32, torch.device("cpu"), generator)

    def step():
        ops.linear(layer.x, layer.wq, layer.w_scale, layer.bias, TOKEN, OUT_IN)
        backward(layer, INT8, FLOAT)
        ops.quantize(layer.x, 1, 2)
        ops.dequantize(layer.wq, layer.w_scale, None, 8, torch.float32)
        with pytest.raises(RuntimeError):
            ops.linear(layer.x, layer.wq, layer.w_scale, layer.bias[:2], TOKEN, OUT_IN)

    for _ in range(300):
        step()
    gc.collect()
    before = allocated()
    for _ in range(500):
        step()
    gc.collect()
    assert allocated() - before < 500 * 16  # the smallest block is 24 bytes


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc/self/statm")
@pytest.mark.slow
def test_memory_is_given_back(generator):
    cpu = torch.device("cpu")
    layer = Layer((256, 512, 1024), torch.float32, cpu, generator)
    odd = layer.x.t().contiguous().t()

    def step():
        ops.linear(odd, layer.wq, layer.w_scale, layer.bias, TOKEN, OUT_IN)
        ops.quantize(odd, 0, 2)
        backward(layer, INT8, INT8)
        with pytest.raises(RuntimeError):
            ops.linear(odd, layer.wq, layer.w_scale, layer.bias[:3], TOKEN, OUT_IN)

    for _ in range(5):
        step()
    before = resident()
    for _ in range(40):
        step()
    # One copy of x kept in each step would be 40 MiB, a y 20 MiB.
    assert resident() - before < 12 << 20


def test_outputs_never_alias(device, generator):
    layer = Layer((8, 12, 16), torch.float32, device, generator)
    inputs = {t.data_ptr() for t in (layer.x, layer.wq, layer.dy, layer.xq)}
    for outputs in (ops.quantize(layer.x, 1, 2), backward(layer, INT8, INT8)):
        places = [t.data_ptr() for t in outputs]
        assert len(set(places)) == 3 and not inputs & set(places)
    q, q_transposed, _ = ops.quantize(layer.x, 1, 0)
    q_transposed.resize_(1).fill_(5)
    assert torch.equal(q, ops.quantize(layer.x, 1, 0)[0])


# ---- Threads and plans ----


def test_threads_share_the_plans(device, generator):
    layers = [Layer((m, 40, 64), torch.float32, device, generator) for m in range(1, 25)]
    expected = [layer.y() for layer in layers]
    failures = []

    def work(seed):
        try:
            for i in range(60):
                at = (i * 7 + seed) % len(layers)
                layer = layers[at]
                y = ops.linear(layer.x, layer.wq, layer.w_scale, layer.bias, TOKEN, OUT_IN)
                if not torch.equal(y.cpu(), expected[at]):
                    failures.append(at)
        except RuntimeError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_of_one_query(dtype):
    """More is in decoding_test.py and tests/plan/attention_test.cpp."""
    query, key, value = (
        torch.randn(2, heads, positions, 20).to(dtype) for heads, positions in ((6, 1), (2, 9), (2, 9))
    )
    visible = torch.rand(2, 1, 1, 9) < 0.7
    visible[..., 0] = True
    for mask, scale in ((None, None), (visible, 0.3), (visible[:1], 0.5)):
        wide = (t.double().repeat_interleave(6 // t.shape[1], 1) for t in (query, key, value))
        want = torch.nn.functional.scaled_dot_product_attention(*wide, mask, scale=scale).transpose(1, 2)
        y = ops.attend_one_query(query, key, value, mask, scale)
        assert torch.allclose(y.double(), want, rtol=2**-8, atol=2**-8 if dtype is torch.bfloat16 else 1e-6)
    nothing = torch.empty(0).to(dtype)
    for batch, positions in (2, 0), (0, 9):  # whatever the strides of what is empty
        queries, cache = (nothing.as_strided(shape, (0,) * 4) for shape in ((0, 6, 1, 20), (batch, 2, positions, 20)))
        y = ops.attend_one_query(query if batch else queries, cache, cache, None, None)
        assert torch.equal(y, torch.zeros(batch, 1, 6, 20, dtype=dtype))
    for mask, why in [
        (visible[..., :7], r"mask is u8 \(2, 7\)"),
        (visible.expand(2, 1, 3, 9), r"mask is \(2, 1, 3, 9\), expected \(batch or 1, 1, 1, positions\)"),
        (visible.byte(), "mask is of uint8, expected bool"),
    ]:
        with pytest.raises(RuntimeError, match=f"octile::attend_one_query: .*{why}"):
            ops.attend_one_query(query, key, value, mask, None)


def test_bits_do_not_depend_on_the_threads(generator):
    layer = Layer((130, 200, 300), torch.bfloat16, torch.device("cpu"), generator)
    many = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = ops.linear(layer.x, layer.wq, layer.w_scale, layer.bias, TOKEN, OUT_IN)
            assert torch.equal(y, layer.y())
    finally:
        torch.set_num_threads(many)


@pytest.mark.skipif(_ops.BINDING != "stable", reason="the ctypes binding has threads of its own")
def test_the_threads_are_those_of_torch():
    """In a separate process, where no threads exist yet."""
    program = """
import os, torch, octile
torch.set_num_threads(3)
x = torch.randn(1024, 1024)
(x @ x).sum(), x.exp()
threads = len(os.listdir("/proc/self/task"))
for _ in range(5):
    torch.ops.octile.quantize(x, 1, 0)
print(threads, len(os.listdir("/proc/self/task")))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, after = ran.stdout.split()
    assert before == after


def test_plans_are_kept_and_few(generator):
    scale, weight = torch.ones(4), torch.zeros(4, 8, dtype=torch.int8)

    def call(m):
        ops.linear(torch.ones(m, 8), weight, scale, None, TOKEN, OUT_IN)

    call(3)
    _, made = _ops.plan_counts()
    for _ in range(10):
        call(3)
    assert _ops.plan_counts()[1] == made
    for m in range(1, 1200):
        call(m)
    held, now = _ops.plan_counts()
    assert held <= 1024 and now >= made + 1100
    call(3)
    assert _ops.plan_counts()[1] == now + 1  # long evicted, and created again


def test_plans_follow_the_number_of_threads():
    x = torch.ones(2, 7)
    ops.quantize(x, 1, 0)
    many, (_, made) = torch.get_num_threads(), _ops.plan_counts()
    try:
        torch.set_num_threads(many + 1)
        ops.quantize(x, 1, 0)
    finally:
        torch.set_num_threads(many)
    assert _ops.plan_counts()[1] == made + 1
