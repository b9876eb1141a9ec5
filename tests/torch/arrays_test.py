"""octile.arrays: arrays of other libraries by DLPack, with the same bits as torch's tensors."""

import ctypes as C
import gc
import os
import subprocess
import sys
import types

import numpy as np
import octile
import pytest
import torch
from octile import _c
from octile.weight_format import WeightFormat

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def tensors(generator, dtype, device="cpu", n=40, k=256):
    made = (torch.randn(*shape, generator=generator).to(device, dtype) for shape in ((2, 3, k), (n, k), (n,)))
    return tuple(made)


def same(y, expected):
    y = torch.as_tensor(y)
    assert y.dtype == expected.dtype and y.shape == expected.shape and y.device == expected.device
    assert torch.equal(y, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("words", [{}, {"layout": "in_out"}, {"per_channel": False, "activation": "per_tensor"}])
def test_float_weights(device, generator, dtype, words):
    x, w, b = tensors(generator, dtype, device)
    given = w.t() if words.get("layout") else w  # not compact where it is transposed
    for bias in (b, None):
        expected = octile.linear(x, given, bias, **words)
        # Like a library that offers only DLPack; the memory is Octile's.
        same(octile.arrays.linear(x, given.clone(memory_format=torch.contiguous_format), bias, **words), expected)
        if device.type == "cpu" and dtype is not torch.bfloat16:  # numpy has no bfloat16
            y = octile.linear(x.numpy(), given.numpy(), None if bias is None else bias.numpy(), **words)
            assert type(y) is np.ndarray and y.flags.writeable
            same(y, expected)


@pytest.mark.parametrize("bits, group", [(8, None), (8, 64), (8, 0), (4, None), (4, 32), (4, 0)])
@pytest.mark.parametrize("activation", ["per_token", "none"])
def test_quantized_weights(device, generator, bits, group, activation):
    x, w, b = tensors(generator, torch.float32, device)
    if bits == 4 and device.type == "cuda":
        with pytest.raises(ValueError, match="a CPU quantizes to 4 bits"):
            octile.arrays.quantize(w, bits, group)
    weight = octile.arrays.quantize(w if bits == 8 else w.cpu(), bits, group)
    weight = octile.arrays.Weight(weight.levels.to(device), weight.scale.to(device))
    format = WeightFormat(bits, 128 if bits == 4 and group is None else group)
    levels, scale = format.quantize(w.cpu())
    same(weight.levels.cpu(), levels)
    same(weight.scale.cpu(), scale)
    code = {"per_token": _c.DYNAMIC_PER_TOKEN, "none": _c.NONE}[activation]
    if bits == 4:
        expected = torch.ops.octile.linear_s4(x, weight.levels, weight.scale, None, b, code)
    else:
        expected = torch.ops.octile.linear(x, weight.levels, weight.scale, b, code, _c.OUT_IN)
    same(octile.arrays.linear(x, weight, b, activation=activation), expected)
    if device.type == "cpu":
        arrays = octile.arrays.Weight(weight.levels.numpy(), weight.scale.numpy())
        same(octile.linear(x.numpy(), arrays, b.numpy(), activation=activation), expected)


def test_zero_points(generator):
    x, _, _ = tensors(generator, torch.float32)
    weight = octile.arrays.Weight(
        torch.randint(256, (40, 128), dtype=torch.uint8).numpy(),
        torch.rand(40, 8).numpy(),
        torch.randint(-8, 8, (40, 8), dtype=torch.int32).numpy(),
    )
    expected = torch.ops.octile.linear_s4(x, *map(torch.as_tensor, weight), None, _c.DYNAMIC_PER_TOKEN)
    same(octile.linear(x.numpy(), weight), expected)


def test_shapes_strides_and_types(generator):
    x, w, b = (t.numpy() for t in tensors(generator, torch.float32))
    weight, rows = octile.arrays.quantize(w), x.reshape(6, -1)
    expected = octile.linear(rows, weight, b)
    assert np.array_equal(octile.linear(rows[0], weight, b), expected[0])
    assert np.array_equal(octile.linear(np.asfortranarray(rows), weight, b), expected)
    assert np.array_equal(octile.linear(rows[::2], weight, b), expected[::2])
    assert np.array_equal(octile.linear(rows[::-1], weight, b), expected[::-1])
    half = b.astype("float16")
    assert np.array_equal(octile.linear(rows, weight, half), octile.linear(rows, weight, half.astype("float32")))
    assert octile.linear(rows[:0], weight, b).shape == (0, 40)
    assert np.array_equal(octile.linear(rows, octile.arrays.quantize(np.asfortranarray(w)), b), expected)
    constant = rows.copy()
    constant.flags.writeable = False
    assert np.array_equal(octile.linear(constant, weight, b), expected)


class Old:
    """An array from before DLPack had versions."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream=None):
        return self.array.__dlpack__()


def test_older_dlpack(generator):
    x, w, _ = (t.numpy() for t in tensors(generator, torch.float32))
    old = Old(x[0])
    old.__array_namespace__ = lambda: types.SimpleNamespace(from_dlpack=torch.from_dlpack)
    same(octile.linear(old, w), torch.from_numpy(octile.linear(x[0], w)))


@pytest.mark.parametrize("exported", [False, True])
def test_what_a_library_does_not_take_over_is_freed(generator, monkeypatch, exported):
    x, w, _ = (t.numpy() for t in tensors(generator, torch.float32))
    libc, made, freed = octile.arrays._libc, [], []

    def from_dlpack(new):
        made.append(new.address)
        if exported:
            new.__dlpack__()
        raise RuntimeError("not taken")

    @C.CFUNCTYPE(None, C.c_void_p)
    def free(address):
        freed.append(address)
        libc.free(address)

    monkeypatch.setattr(octile.arrays, "_libc", types.SimpleNamespace(aligned_alloc=libc.aligned_alloc, free=free))
    refusing = Old(x[0])
    refusing.__array_namespace__ = lambda: types.SimpleNamespace(from_dlpack=from_dlpack)
    with pytest.raises(RuntimeError, match="not taken"):
        octile.linear(refusing, octile.arrays.quantize(w))
    gc.collect()
    assert len(made) == 1 and freed.count(made[0]) == 1


def test_empty(generator):
    x, w, b = (t.numpy() for t in tensors(generator, torch.float32))
    for per_channel in (True, False):
        y = octile.linear(x[..., :0], w[:, :0], b, per_channel=per_channel)
        assert np.array_equal(y, np.broadcast_to(b, y.shape)) and y.shape == (2, 3, 40)
        assert octile.linear(x, w[:0], b[:0], per_channel=per_channel).shape == (2, 3, 0)
        assert octile.linear(x, w[:0].T, layout="in_out", per_channel=per_channel).shape == (2, 3, 0)
    assert octile.linear(x[:0], w).shape == (0, 3, 40)


def test_refusals(generator):
    x, w, b = (t.numpy() for t in tensors(generator, torch.float32))
    weight = octile.arrays.quantize(w, 4)
    calls = {
        r"x is a list, which cannot be passed on by DLPack": lambda: octile.linear([1.0], w),
        r"x has no dimensions": lambda: octile.linear(np.float32(1)[...], w),
        r"x is \(2, 3, 256\); w multiplies \(..., 255\)": lambda: octile.linear(x, w[:, :255]),
        r"levels has 128 columns of uint8, expected 100 of uint8": lambda: octile.linear(x[..., :200], weight),
        r"scale has 2 columns, which do not divide 255": lambda: octile.linear(x[..., :255], weight),
        r"w is \(40,\), expected two dimensions": lambda: octile.linear(x, w[:, 0]),
        r"w is \(40, 0\); no scale can be taken": lambda: octile.arrays.quantize(w[:, :0]),
        r"w is of int8, expected a float type": lambda: octile.linear(x, w.astype(np.int8)),
        r"w is of float64 and x of float32; float64 only goes": lambda: octile.linear(x, w.astype(np.float64)),
        r"b is of float64 and x of float32; float64 only goes": lambda: octile.linear(x, w, b.astype(np.float64)),
        r"b is of int32, expected a float type": lambda: octile.linear(x, w, b.astype(np.int32)),
        r"x is of int8, expected a float type": lambda: octile.linear(x.astype(np.int8), w),
        r"x is of int64, which no plan takes": lambda: octile.linear(x.astype(np.int64), w),
        r"layout is 'io', expected 'out_in' or 'in_out'": lambda: octile.linear(x, w, layout="io"),
        r"layout and per_channel apply to a float w": lambda: octile.linear(x, weight, layout="in_out"),
        r"layout and per_channel apply .* w is a Weight": lambda: octile.linear(x, weight, per_channel=False),
        r"activation is None, expected ": lambda: octile.linear(x, w, activation=None),
        r"bits is 5 and group None, expected 8 or 4": lambda: octile.arrays.quantize(w, 5),
        r"group is 64, which does not divide 200": lambda: octile.arrays.quantize(w[:, :200], 4, 64),
        r"b has 3 dimensions, expected 1 or 2": lambda: octile.linear(x, w, b[None, None]),
        r"bias is f32 \(39\)": lambda: octile.linear(x, w, b[:39]),
    }
    for text, call in calls.items():
        with pytest.raises((TypeError, ValueError, RuntimeError), match=text):
            call()


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import numpy as np
import octile
x, w = np.ones((2, 64), "float32"), np.eye(64, dtype="float32")
assert np.array_equal(octile.linear(x, w), x), octile.linear(x, w)
from octile import *
assert not hasattr(octile, "nothing")
try:
    octile.Linear
except ImportError as error:
    print(error)
"""


def test_without_torch():
    library = os.environ.get("OCTILE_LIBRARY", str(_c.find()))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        env={**os.environ, "OCTILE_LIBRARY": library},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "octile.Linear needs PyTorch" in done.stdout


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_another_stream_of_a_gpu(generator):
    x, w, b = tensors(generator, torch.float16, "cuda", n=512, k=2048)
    expected = octile.linear(x, w, b)
    side = torch.cuda.Stream()
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        late.copy_(x)
        y = octile.arrays.linear(late, w, b)
        late.zero_()
        same(y, expected)
    weight = octile.arrays.quantize(w)
    before = torch.cuda.mem_get_info()[0]
    for _ in range(50):
        octile.arrays.linear(torch.ones(8192, 2048, device="cuda", dtype=torch.float16), weight)
    assert before - torch.cuda.mem_get_info()[0] < 2**28  # of 50 * 8 MiB, and torch's own 32 MiB


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_cupy(generator):
    cupy = pytest.importorskip("cupy")
    x, w, b = tensors(generator, torch.float16, "cuda", n=512, k=2048)
    expected = octile.linear(x, w, b)
    torch.cuda.synchronize()
    x, w, b = map(cupy.from_dlpack, (x, w, b))
    with cupy.cuda.Stream(non_blocking=True):
        y = octile.linear(x, w, b)
        assert type(y) is cupy.ndarray
        same(torch.from_dlpack(y), expected)
        same(torch.from_dlpack(octile.linear(x, octile.arrays.quantize(w), b)), expected)
