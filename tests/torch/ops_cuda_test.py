"""The ops on a GPU: the CPU's bits, torch's stream, graphs, memory, and no synchronization."""

import copy
import time

import numpy as np
import octile
import op_reference as reference
import pytest
import torch
from octile import _c

ops = torch.ops.octile

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPES = [(1, 4096, 4096), (16, 4096, 4096), (17, 1000, 1031), (200, 1024, 2048), (1024, 2048, 1024), (2049, 515, 771)]
TOKEN, INT8, FLOAT = _c.DYNAMIC_PER_TOKEN, _c.INT8, _c.DEQUANTIZED


class Tensors:
    def __init__(self, shape, dtype=torch.bfloat16, seed=7):
        g = torch.Generator().manual_seed(seed)
        m, n, k = shape
        self.dtype = dtype
        self.x, self.w = torch.randn(m, k, generator=g).to(dtype), torch.randn(n, k, generator=g).to(dtype)
        self.bias, self.dy = torch.randn(n, generator=g).to(dtype), torch.randn(m, n, generator=g).to(dtype)
        self.wq, self.wq_transposed, self.w_scale = ops.quantize(self.w, _c.PER_ROW, _c.BOTH)
        self.xq, self.xq_transposed, self.x_scale = ops.quantize(self.x, _c.PER_ROW, _c.BOTH)

    def to(self, device):
        other = object.__new__(Tensors)
        # q as the op returned it: with padded rows.
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
                value = moved.copy_(value)
            setattr(other, name, value)
        return other

    def calls(self):
        """name -> an op whose results have the same bits on every device."""
        rest = (self.w_scale, self.bias)
        back = (self.dy, self.wq_transposed, self.w_scale, self.xq_transposed, self.x_scale)
        return {
            "quantize rows": lambda: ops.quantize(self.x, _c.PER_ROW, _c.BOTH),
            "quantize tensor": lambda: ops.quantize(self.x, _c.PER_TENSOR, _c.BOTH),
            "quantize columns": lambda: ops.quantize(self.x, _c.PER_COLUMN, _c.BOTH),
            "linear": lambda: ops.linear(self.x, self.wq, *rest, TOKEN, _c.OUT_IN),
            "linear, tensor": lambda: ops.linear(self.x, self.wq, *rest, _c.DYNAMIC_PER_TENSOR, _c.OUT_IN),
            "linear, (K, N)": lambda: ops.linear(self.x, self.wq_transposed, *rest, TOKEN, _c.IN_OUT),
            "linear_int8": lambda: ops.linear_int8(self.xq, self.x_scale, self.wq, *rest, _c.OUT_IN, self.dtype),
            "backward int8": lambda: ops.linear_backward(
                *back, INT8, INT8, False, _c.IN_OUT, True, torch.float32, _c.OUT_IN
            ),
            "backward int8 in blocks": lambda: ops.linear_backward(
                *back, INT8, INT8, False, _c.IN_OUT, True, torch.float32, _c.OUT_IN, gradient_block=128
            ),
        }

    def float_calls(self):
        """The others: float sums, with the same bits on every run on one device."""
        back = (self.dy, self.wq, self.w_scale, self.xq, self.x_scale)
        return {
            "backward 16-bit": lambda: ops.linear_backward(
                *back, FLOAT, FLOAT, True, _c.OUT_IN, False, self.dtype, _c.OUT_IN
            ),
        }


def flat(results):
    return results if isinstance(results, (tuple, list)) else (results,)


def same(results, others):
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(flat(results), flat(others), strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bits_of_the_cpu(shape, dtype):
    host = Tensors(shape, dtype)
    device = host.to("cuda")
    for (name, on_host), on_device in zip(host.calls().items(), device.calls().values()):
        expected, got = on_host(), on_device()
        assert same(got, expected), name
        for a, b in zip(flat(got), flat(expected)):
            assert a.stride() == b.stride() and a.dtype == b.dtype, name


@pytest.mark.parametrize("shape", [(16, 4096, 4096), (17, 1000, 1031), (200, 1024, 2048), (513, 515, 771)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_backward_16bit(shape, dtype):
    m, n, _ = shape
    host = Tensors(shape, dtype)
    device = host.to("cuda")
    dx, dw, db = device.float_calls()["backward 16-bit"]()
    dy = host.dy.double().numpy()
    w = host.wq.double().numpy() * host.w_scale.double().numpy()[:, None]
    x = host.xq.double().numpy() * host.x_scale.double().numpy()[:, None]
    reference.assert_sum(dx, dy @ w, np.abs(dy) @ np.abs(w), n, dtype, dx.device)
    reference.assert_sum(dw, dy.T @ x, np.abs(dy).T @ np.abs(x), m, dtype, dx.device)
    reference.assert_sum(db, dy.sum(0), np.abs(dy).sum(0), m, dtype, torch.device("cpu"))


def every_call(tensors):
    return tensors.calls() | tensors.float_calls()


@pytest.mark.parametrize("shape", [(16, 512, 1024), (300, 512, 1024)])
def test_stream_is_the_current_one(shape):
    tensors, other = Tensors(shape).to("cuda"), Tensors(shape, seed=8).to("cuda")
    side = torch.cuda.Stream()
    for name, call in every_call(tensors).items():
        before = [t.clone() for t in vars(tensors).values() if isinstance(t, torch.Tensor)]
        with torch.no_grad():
            expected = [t.cpu() for t in flat(every_call(other)[name]())]
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                # The inputs get `other`'s values only after a while, on this stream.
                torch.cuda._sleep(20_000_000)
                for key, value in vars(other).items():
                    if isinstance(value, torch.Tensor):
                        getattr(tensors, key).copy_(value)
                got = call()
            side.synchronize()
        assert same(got, expected), name
        held = [t for t in vars(tensors).values() if isinstance(t, torch.Tensor)]
        for t, old in zip(held, before):
            t.copy_(old)


@pytest.mark.parametrize("shape", [(16, 512, 1024), (300, 512, 1024), (21, 333, 640)])
def test_graphs(shape):
    for name in every_call(Tensors((1, 128, 128))):
        tensors, other = Tensors(shape).to("cuda"), Tensors(shape, seed=8).to("cuda")
        expected = every_call(other)[name]()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # the plan may not exist yet
            got = every_call(tensors)[name]()
        for key, value in vars(other).items():
            if isinstance(value, torch.Tensor):
                getattr(tensors, key).copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert same(got, expected), name
        graph.replay()
        torch.cuda.synchronize()
        assert same(got, expected), name


def test_the_second_call_allocates_what_the_first_did():
    tensors = Tensors((300, 512, 1024)).to("cuda")
    for name, call in every_call(tensors).items():
        call()
        before = torch.cuda.memory_stats()
        for _ in range(20):
            call()
        after = torch.cuda.memory_stats()
        for key in ("allocated_bytes.all.current", "reserved_bytes.all.current", "num_alloc_retries"):
            assert after[key] == before[key], (name, key)


def test_nobody_waits():
    tensors = Tensors((300, 512, 1024)).to("cuda")
    calls = every_call(tensors)
    for call in calls.values():
        call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for name, call in calls.items():
            torch.cuda._sleep(400_000_000)  # 0.2 s or more
            start = time.perf_counter()
            call()
            took = time.perf_counter() - start
            assert not torch.cuda.current_stream().query(), name
            assert took < 0.05, name
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()


def test_empty_tensors():
    x = torch.empty(0, 64, device="cuda", dtype=torch.float16)
    assert ops.quantize(x, _c.PER_TENSOR, _c.BOTH)[2].item() == pytest.approx(1e-8)
    assert ops.quantize(x, _c.PER_COLUMN, _c.BOTH)[2].tolist() == pytest.approx([1e-8] * 64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.quantize(x, _c.PER_COLUMN, _c.BOTH)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_tensors_of_two_devices_are_refused():
    t = Tensors((4, 8, 16)).to("cuda")
    with pytest.raises(RuntimeError, match=r"octile::linear: .*weight_scale.*cpu"):
        ops.linear(t.x, t.wq, t.w_scale.cpu(), None, TOKEN, _c.OUT_IN)
    with pytest.raises(RuntimeError, match="octile::linear: .*x.*cpu"):
        ops.linear(t.x.cpu(), t.wq, t.w_scale, None, TOKEN, _c.OUT_IN)


def test_no_memory():
    rows = torch.cuda.get_device_properties(0).total_memory // 4096
    x = torch.zeros(1, 16, dtype=torch.int8, device="cuda").expand(rows, 16)
    scale, weight = torch.ones(1, device="cuda"), torch.zeros(4096, 16, dtype=torch.int8, device="cuda")
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        ops.linear_int8(x, scale, weight, scale, None, _c.OUT_IN, torch.float32)
    assert ops.linear_int8(x[:5], scale, weight, scale, None, _c.OUT_IN, torch.float32).shape == (5, 4096)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu():
    host = Tensors((64, 128, 256))
    device = host.to("cuda:1")
    assert torch.cuda.current_device() == 0
    for (name, on_host), on_device in zip(host.calls().items(), device.calls().values()):
        got = on_device()
        assert all(t.device.index == 1 for t in flat(got)), name
        assert same(got, on_host()), name
    assert torch.cuda.current_device() == 0


# ---- Experts ----

LAYERS = {
    "w8a8": (octile.W8A8Linear, {}),
    "w8a16": (octile.W8A16Linear, {"group": 64}),
    "w4a8": (octile.W4A8Linear, {"group": 64}),
    "w4a16": (octile.W4A16Linear, {"group": 64}),
}
EXPERTS, SLOTS = 6, 3


def experts_of(name, dtype=torch.bfloat16, seed=3):
    kind, words = LAYERS[name]
    torch.manual_seed(seed)
    layers = (torch.nn.Linear(k, EXPERTS * n, bias=False, dtype=dtype) for n, k in ((2 * 192, 128), (128, 192)))
    biases = {"up_bias": (EXPERTS, 2 * 192), "down_bias": (EXPERTS, 128)}
    biases = {key: torch.nn.Parameter(torch.randn(*shape, dtype=dtype)) for key, shape in biases.items()}
    return octile.Experts(EXPERTS, *(kind.from_linear(layer, **words) for layer in layers), **biases)


def routed(tokens, dtype=torch.bfloat16, seed=1):
    g = torch.Generator().manual_seed(seed)
    index = torch.rand(tokens, EXPERTS, generator=g).topk(SLOTS).indices
    index[::5, 1] = -1  # belongs to no expert
    return torch.randn(tokens, 128, generator=g).to(dtype), index, torch.rand(tokens, SLOTS, generator=g)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_experts(name, packed):
    """Equal to the CPU's, with int8 tokens bit for bit; nothing synchronizes; and a graph serves any routing."""
    host = experts_of(name)
    device = copy.deepcopy(host).to("cuda")
    if packed:
        octile.pack_(device)
    x, index, weights = (t.cuda() for t in routed(40))
    with torch.no_grad():
        device(x, index, weights)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            device(x, index, weights)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = device(x, index, weights)
        for seed in range(4):
            routing = routed(40, seed=seed)
            for there, here in zip((x, index, weights), routing, strict=True):
                there.copy_(here)
            graph.replay()
            alone = device(x, index, weights)
            assert torch.equal(y, alone)
            expected = host(*routing)
            # Between the layers torch's silu does not match the CPU's bits.
            assert torch.nn.functional.cosine_similarity(y.cpu().float(), expected.float()).min() > 0.999


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["w8a8", "w4a8"])
def test_grouped_linear(name, dtype):
    """Gathered rows and sums over slots match the CPU bit for bit; rows without an expert are 0."""
    layer = experts_of(name, dtype).gate_up_proj
    x, index, weights = routed(30, dtype)
    sorted_rows = octile.experts.sort_by_expert(EXPERTS, index)
    assert int(sorted_rows[0][-1]) < len(sorted_rows[1])
    rows = torch.randn(30 * SLOTS, 128).to(dtype)
    with torch.no_grad():
        for args, router in (((x, sorted_rows), None), ((rows, sorted_rows), weights)):
            expected = octile.experts.grouped_linear(args[0], layer, args[1], None, router)
            there = copy.deepcopy(layer).to("cuda")
            moved = [t.cuda() for t in sorted_rows]
            got = octile.experts.grouped_linear(
                args[0].cuda(), there, moved, None, None if router is None else router.cuda()
            )
            assert same(got, expected)


# ---- Their gradients ----


def backward_operands(dtype, experts=5, n=200, k=136):
    g = torch.Generator().manual_seed(2)
    offsets = torch.tensor([1, 4, 4, 150, 151, 470], dtype=torch.int32)  # two rows belong to no expert
    dy = torch.randn(int(offsets[-1]) + 1, n, generator=g).to(dtype)
    weight, x = (torch.randint(-127, 128, (rows, k), dtype=torch.int8, generator=g) for rows in (experts * n, len(dy)))
    weight_scale, x_scale = (torch.rand(len(t), generator=g) for t in (weight, x))
    return dy, offsets, weight, weight_scale, x, x_scale


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_grouped_linear_backward(dtype):
    """Matches the CPU bit for bit in int8 and closely in 16 bits; rows without an expert are 0; nothing synchronizes."""
    host = backward_operands(dtype)
    device = [t.cuda() for t in host]
    backward = torch.ops.octile.grouped_linear_backward
    for words in ((2, 2, True), (2, 0, False), (0, 2, True), (1, 1, True), (1, 2, False), (0, 0, True)):
        for dw_dtype, rounding, block in ((dtype, 0, 128), (torch.float32, 1, 256), (torch.float32, 0, 512)):
            more = *words, dw_dtype, rounding, 9, block if 2 in words[:2] else 0
            backward(*device, *more)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                got = backward(*device, *more)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            for product, a, b in zip((*words[:2], 1), got, backward(*host, *more), strict=True):
                if product == 2:
                    assert same(a, b), more
                else:
                    assert a.dtype is b.dtype and torch.allclose(a.cpu().float(), b.float(), rtol=2e-2, atol=2e-2 * 500)
                    assert b.numel() == 0 or cosine(a.cpu(), b) > 0.9999
            if words[0]:
                assert not got[0][[0, -1]].any()
            if words[1]:
                assert not got[1][200:400].any()


def test_grouped_linear_backward_in_a_graph():
    """One graph serves any offsets."""
    host = backward_operands(torch.bfloat16)
    device = [t.cuda() for t in host]
    for words in ((2, 2, True), (1, 1, True)):
        more = *words, torch.float32, 0, 0, 256 if 2 in words else 0
        torch.ops.octile.grouped_linear_backward(*device, *more)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = torch.ops.octile.grouped_linear_backward(*device, *more)
        for offsets in (
            [1, 4, 4, 150, 151, 470],
            [0, 0, 0, 0, 0, 0],
            [0, 471, 471, 471, 471, 471],
            [0, 90, 180, 270, 360, 400],
        ):
            device[1].copy_(torch.tensor(offsets, dtype=torch.int32))
            graph.replay()
            alone = torch.ops.octile.grouped_linear_backward(*device, *more)
            assert all(map(torch.equal, got, alone)), offsets
            if words[0] == 2:
                cpu = torch.ops.octile.grouped_linear_backward(host[0], torch.tensor(offsets).int(), *host[2:], *more)
                assert same(got[0], cpu[0]) and same(got[1], cpu[1]), offsets


def test_grouped_linear_backward_refuses():
    device = [t.cuda() for t in backward_operands(torch.bfloat16)]
    with pytest.raises(RuntimeError, match="gradient_block = 0 with dx = int8"):
        torch.ops.octile.grouped_linear_backward(*device, 2, 2, False, torch.float32)


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_frozen_experts(name):
    host = experts_of(name)
    device = copy.deepcopy(host).to("cuda")
    x, index, weights = routed(40)
    results = []
    for module in (host, device):
        where = module.gate_up_proj_bias.device
        leaves = [t.detach().to(where).requires_grad_() for t in (x, weights)]
        y = module(leaves[0], index.to(where), leaves[1])
        y.float().square().sum().backward()
        results.append([t.grad.cpu() for t in (*leaves, module.gate_up_proj_bias, module.down_proj_bias)])
    for on_host, on_device in zip(*results, strict=True):
        assert on_device.isfinite().all() and cosine(on_host, on_device) > 0.999


class Trained(torch.nn.Module):
    """Two layers of experts whose weights train."""

    def __init__(self, backward, dtype=torch.float32):
        super().__init__()
        g = torch.Generator().manual_seed(4)
        self.up = torch.nn.Parameter(torch.randn(EXPERTS, 256, 128, generator=g).mul(0.05).to(dtype))
        self.down = torch.nn.Parameter(torch.randn(EXPERTS, 128, 256, generator=g).mul(0.05).to(dtype))
        self.bias = torch.nn.Parameter(torch.randn(EXPERTS, 256, generator=g).to(dtype))
        self.options = octile.functional.options("out_in", True, "per_token", backward, "nearest")

    def forward(self, x, index, weights):
        rows = octile.experts.sort_by_expert(EXPERTS, index)
        up = octile.experts.trained_linear(x, self.up, rows, self.options, self.bias)
        return octile.experts.trained_linear(up.relu(), self.down, rows, self.options, None, weights)


@pytest.mark.parametrize("backward", ["int8", "16bit"])
@pytest.mark.parametrize("compiled", [False, True])
def test_experts_train(backward, compiled):
    """Compared with the CPU; nothing synchronizes."""
    host = Trained(backward)
    device = copy.deepcopy(host).cuda()
    x, index, weights = routed(200)
    forward = torch.compile(device, fullgraph=True, backend="aot_eager") if compiled else device

    def step(module, run):
        where = module.up.device
        leaves = [t.detach().to(where).requires_grad_() for t in (x, weights)]
        at, inputs = index.to(where), (*leaves, *module.parameters())
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("default" if compiled else "error")  # compiling may synchronize
        try:
            return torch.autograd.grad(run(leaves[0], at, leaves[1]).float().square().sum(), inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for on_host, on_device in zip(step(host, host), step(device, forward), strict=True):
        assert on_device.dtype is on_host.dtype and on_device.isfinite().all()
        assert cosine(on_host, on_device.cpu()) > 0.999
