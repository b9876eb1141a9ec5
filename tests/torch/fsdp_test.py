"""FSDP2 with int8 all-gather: octile.fsdp. Four processes over gloo, as four ranks, two pairs, or four times one."""

import collections
import copy
import datetime
import os
import pathlib
import sys
import tempfile
import time

import octile
import parallel_checks
import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from octile import fsdp
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

RANKS, ROWS, WIDTH, HIDDEN, OUT = 4, 1024, 40, 33, 2  # 33 and 2 rows in four shards: one is short, two are empty
BACKWARDS = ["16bit", "int8", "int8-whole", "int8-128", ("int8", "16bit"), ("16bit", "int8")]


class Net(nn.Module):
    """Two layers, the first with a bias; a LoRA beside the first, if that is frozen."""

    def __init__(self, backward="int8", lora=False, dtype=None, device=None):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(WIDTH, HIDDEN, dtype=dtype, device=device)
        self.down = nn.Linear(HIDDEN, OUT, bias=False, dtype=dtype, device=device)
        self.lora = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, HIDDEN)) if lora else None
        if lora:
            self.up.requires_grad_(False)
        octile.quantize_(self, octile.Int8Training(backward=backward), filter=lambda _, name: "lora" not in name)
        self.checkpointed = False
        if device is None:
            self.to(ranks.device)

    def hidden(self, x):
        y = self.up(x)
        return F.gelu(y if self.lora is None else y + self.lora(x))

    def forward(self, x):
        return self.down(checkpoint(self.hidden, x, use_reentrant=False) if self.checkpointed else self.hidden(x))


def inputs(dtype=torch.float32):
    """x and dY of all ranks' rows."""
    generator = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(ROWS, columns, generator=generator) for columns in (WIDTH, OUT))
    return x.to(ranks.device, dtype), dy.to(ranks.device, dtype)


def shard(model, mesh, **words):
    from torch.distributed.fsdp import fully_shard

    for layer in (model.up, model.down, model):
        fully_shard(layer, mesh=mesh, **words)
    return model


def prepared(model, mesh, **words):
    assert fsdp.prepare_(model) == ["up", "down"]
    return shard(model, mesh, **words)


def full(model):
    return {name: p.to(ranks.device).full_tensor().detach() for name, p in model.named_parameters()}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


# ---- What each of the processes checks. meshes: ranks.meshes(). ----


def bits(meshes, rank, dtype=torch.float32, backwards=BACKWARDS):
    """Forward and dX of n ranks equal those of one process with all rows; dW differs by the rounding of a sum."""
    x, dy = inputs(dtype)
    unit = torch.finfo(dtype).eps / 2
    for backward in backwards:
        dx_of_floats = "16bit" in (backward, backward[0])
        whole = Net(backward, dtype=dtype)
        given = x.clone().requires_grad_()
        y = whole(given)
        y.backward(dy)
        for n in ranks.counts(meshes):
            parts = []  # one process, on each rank's rows
            for mine, theirs in zip(x.chunk(n), dy.chunk(n), strict=True):
                part = Net(backward, dtype=dtype)
                part(mine.clone().requires_grad_()).backward(theirs)  # without dX, dB is summed elsewhere
                parts.append({name: p.grad for name, p in part.named_parameters()})
            for reshard in (True, False)[: 1 if isinstance(backward, tuple) else 2]:
                model = prepared(Net(backward, dtype=dtype), meshes[n], reshard_after_forward=reshard)
                mine = x.chunk(n)[rank % n].clone().requires_grad_()
                out = model(mine)
                assert torch.equal(out, y.chunk(n)[rank % n])
                out.backward(dy.chunk(n)[rank % n])
                dx = given.grad.chunk(n)[rank % n]
                if dx_of_floats:
                    ranks.assert_sums(mine.grad, dx, (backward, n))
                else:
                    assert torch.equal(mine.grad, dx), (backward, n)
                for name, p in model.named_parameters():
                    terms = torch.stack([part[name] for part in parts]).double()
                    got = p.grad.full_tensor().double() * n  # FSDP2 averages
                    error, sizes = (got - terms.sum(0)).abs(), terms.abs().sum(0)
                    assert (error <= (n - 1) * unit * sizes).all(), (backward, n, name)
                    if backward in ("int8", "int8-128") and dtype is torch.float32:
                        # Ranks have whole blocks of tokens, so the batch's dW has the same products in another order:
                        # at most 8 blocks. A bias sums 1,024 terms.
                        count = 1024 if name == "up.bias" else 16
                        whole_grad = dict(whole.named_parameters())[name].grad
                        blocks = torch.stack([t.abs() for t in terms]).sum(0) + whole_grad.abs()
                        assert ((got - whole_grad).abs() <= count * 2.0**-23 * blocks.amax()).all(), (backward, n, name)


def train(model, rank, n, optimizer, steps=2, sync_each=True):
    """Micro-batches with different values; returns the losses."""
    x, _ = inputs()
    losses = []
    for step in range(steps):
        for micro in range(2):
            if not sync_each:
                model.set_requires_gradient_sync(micro == 1)
            part = x.roll(7 * (2 * step + micro), 0)[: 64 * n].chunk(n)[rank % n]
            loss = model(part).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def training(meshes, rank):
    """With every option of FSDP2, int8 communication trains with the same bits as float."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    offload, every = CPUOffloadPolicy(pin_memory=False), max(ranks.counts(meshes))
    cases = [
        (2, {}, {}, {"foreach": True}),
        (every, {"reshard_after_forward": False}, {"sync_each": False}, {"fused": True}),
        (every, {"offload_policy": offload}, {}, {"foreach": False}),
        ("2d", {}, {}, {"fused": True}),
    ]
    for place, (n, words, how, kind) in enumerate(cases):
        mesh, n = meshes[n], every if n == "2d" else n
        results = []
        for wrap in (shard, prepared):
            model = wrap(Net(lora=place == 1), mesh, **words)
            model.checkpointed = place == 2
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **kind)
            results.append((train(model, rank, n, optimizer, **how), full(model)))
            assert all(type(v._local_tensor) is torch.Tensor for s in optimizer.state.values() for v in [s["exp_avg"]])
        (losses, weights), (losses_int8, weights_int8) = results
        assert torch.equal(losses, losses_int8), place
        assert_same(weights, weights_int8)
        start = dict(Net(lora=place == 1).named_parameters())
        assert torch.equal(weights["up.weight"], start["up.weight"]) == (place == 1)  # frozen
        assert not torch.equal(weights["down.weight"], start["down.weight"])


def mixed_precision(meshes, rank):
    """int8 is made from the optimizer's f32, whatever type the others are gathered in; dW is reduced as requested."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    x, dy = inputs()
    whole = Net()
    whole.up.bias.data = whole.up.bias.data.bfloat16()  # as FSDP2 gathers it
    expected = whole(x.bfloat16())
    for reduced in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced)
        model = prepared(Net(), meshes[2], mp_policy=policy)
        y = model(x.chunk(2)[rank % 2])
        assert y.dtype is torch.bfloat16 and torch.equal(y, expected.chunk(2)[rank % 2])
        y.backward(dy.bfloat16().chunk(2)[rank % 2])
        parts = []
        for mine, theirs in zip(x.bfloat16().chunk(2), dy.bfloat16().chunk(2), strict=True):
            whole.zero_grad()
            whole(mine).backward(theirs)
            parts.append(whole.up.weight.grad.bfloat16().double())
        got = model.up.weight.grad.full_tensor()
        assert got.dtype is torch.float32  # the optimizer's
        bound = (2.0**-24 if reduced is torch.float32 else 2.0**-8) * sum(p.abs() for p in parts)
        assert ((got.double() * 2 - sum(parts)).abs() <= bound).all()
    model = prepared(Net(dtype=torch.bfloat16), meshes[2])  # no f32 anywhere
    assert torch.equal(
        model(x.bfloat16().chunk(2)[rank % 2]), Net(dtype=torch.bfloat16)(x.bfloat16()).chunk(2)[rank % 2]
    )


class Gathered(TorchDispatchMode):
    """Counts the bytes that all-gathers, or all collectives, write, by op, and the float weights that are quantized."""

    def __init__(self, every=False):
        super().__init__()
        self.bytes, self.quantized, self.every = collections.Counter(), 0, every

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.name()
        out = function(*arguments, **(keywords or {}))
        if name.startswith("c10d::") and ("allgather" in name or self.every):
            self.bytes[name] += sum(t.nbytes for t in torch.utils._pytree.tree_leaves(arguments[0]))
        elif name.startswith("_c10d_functional::") and self.every and "wait" not in name:
            self.bytes[name] += out.nbytes
        self.quantized += name == "octile::quantize" and arguments[0].shape[0] != 24  # x has 24 rows
        return out


def wire(meshes, rank):
    """The bytes that all ranks together receive, and how often a shard is quantized."""
    n, size = max(ranks.counts(meshes)), 64
    x = torch.randn(24, size, device=ranks.device)
    totals = {}
    for kind in ("bf16", "int8"):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False))
        if kind == "int8":
            octile.quantize_(model, octile.Int8Training(backward="int8"))
            fsdp.prepare_(model)
        for layer in (*model.to(ranks.device), model):
            fully_shard(layer, mesh=meshes[n], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).sum().backward()
        if kind == "int8":
            sent, _ = next(model.parameters())._local_tensor.fsdp_pre_all_gather(meshes[n])
            # Not as bfloat16, which torch's _foreach_copy_ converts to float and back on a GPU: NaNs lose bits.
            assert [t.dtype for t in sent] == [torch.int8, torch.float32]
        with Gathered() as seen:
            for step in range(2):
                for _ in range(3):
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if kind == "int8":
                    # The very first came before this; afterwards once per step.
                    assert seen.quantized == 2 * step, seen.quantized
        (totals[kind],) = seen.bytes.values()
    gathers = 2 * 3 * 2 * 2  # steps, micro-batches, forward and backward, layers
    assert totals == {"bf16": gathers * 2 * size * size, "int8": gathers * size * (size + 4)}, (totals, gathers)


def writes(meshes, rank):
    """The next forward sees the change, however a weight was changed."""
    x, _ = inputs()
    model = prepared(Net(), meshes[2])

    def assert_current():
        whole = Net()
        whole.load_state_dict(full(model))
        assert torch.equal(model(x), whole(x))

    assert_current()
    with torch.no_grad():
        model.up.weight.mul_(2)
    assert_current()
    model.up.weight.data.mul_(2)
    assert_current()
    for row in model.up.weight.to_local().detach().t().unbind(1):
        row.mul_(2)
    assert_current()
    first, second = model.state_dict()["up.weight"], model.state_dict()["up.weight"]
    for given in (first, second):
        given.mul_(2)
        assert_current()
        given.to_local()[:5].mul_(2)  # as DCP loads in place
        assert_current()
    nn.init.ones_(model.down.weight)
    assert_current()
    other = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(other)
    assert_current()
    assert_same({n: v.full_tensor() for n, v in other.items()}, full(model))
    other = {name: 2 * value for name, value in other.items()}
    model.load_state_dict(other, assign=True)
    assert_current()
    assert fsdp.gathers_int8(model.up.weight)
    # On the meta device at first.
    model = prepared(Net(device="meta"), meshes[2])
    model.to_empty(device=ranks.device)
    model.load_state_dict(other)
    assert_current()
    for name, value in model.state_dict().items():
        assert type(value._local_tensor) is torch.Tensor, name


def checkpoints(meshes, rank):
    """Weights and the optimizer's state are plain float tensors, which any number of ranks can load."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
    from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_state_dict

    def build(n, wrap=prepared):
        model = wrap(Net(), meshes[n])
        return model, torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)

    def document(model, optimizer):
        weights, state = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": state}

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    counts = ranks.counts(meshes)
    fewer, every = counts[-2:]
    groups = {n: {"process_group": meshes[n].get_group()} if n > 1 else {"no_dist": True} for n in counts}
    saved = {}
    for n in counts:
        model, optimizer = build(n)
        train(model, rank, n, optimizer, steps=1)
        saved[n] = full(model)
        if rank < n:
            dcp.save(document(model, optimizer), checkpoint_id=f"{folder[0]}/{n}", **groups[n])
    dist.barrier()
    x, _ = inputs()
    for n, wrap in (*((n, prepared) for n in counts), (2, shard)):
        for source, weights in saved.items():
            model, optimizer = build(n, wrap)
            if rank < n:
                fresh = document(model, optimizer)
                dcp.load(fresh, checkpoint_id=f"{folder[0]}/{source}", **groups[n])
                set_state_dict(model, optimizer, model_state_dict=fresh["model"], optim_state_dict=fresh["optimizer"])
                assert_same(full(model), weights)
                (moment, *_) = (s["exp_avg"].full_tensor() for s in optimizer.state.values())
                assert moment.abs().sum() > 0
                whole = Net()
                whole.load_state_dict(weights)
                assert torch.equal(model(x), whole(x))
    # In place, without load_state_dict().
    for read in (nn.Module.state_dict, get_model_state_dict):
        model, _ = build(every)
        model(x)
        dcp.load({"model": read(model)}, checkpoint_id=f"{folder[0]}/{fewer}")
        assert_same(full(model), saved[fewer])
        whole = Net()
        whole.load_state_dict(saved[fewer])
        assert torch.equal(model(x), whole(x))
    # Everything on one rank, in torch's own file format.
    model, _ = build(every)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(saved[fewer]) if rank == 0 else {}, options=options)
    plain = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(plain, f"{folder[0]}/plain.pt")
        held = {name: value.cpu() for name, value in saved[fewer].items()}
        assert_same(torch.load(f"{folder[0]}/plain.pt", weights_only=True), held)
        nn.Sequential(
            collections.OrderedDict(up=nn.Linear(WIDTH, HIDDEN), down=nn.Linear(HIDDEN, OUT, False))
        ).load_state_dict(plain)


def refusals(meshes, rank):
    from torch.distributed.tensor import Shard

    x, _ = inputs()
    model = Net()
    fsdp.prepare_(model)
    shard(model, meshes[2], shard_placement_fn=lambda p: Shard(p.dim() - 1) if p.shape[-1] % 2 == 0 else None)
    with pytest.raises(
        RuntimeError, match=r"a weight \(33, 40\) is sharded as \(33, 20\); .* along their output channels"
    ):
        model(x)
    model = shard(Net(), meshes[2])
    with pytest.raises(
        ValueError, match=r"up cannot gather int8: its weight is a DTensor, .* comes before fully_shard"
    ):
        fsdp.prepare_(model)
    model = prepared(Net(), meshes[2])
    with pytest.raises(ValueError, match="the weight of up is a DTensor, not a plain parameter"):
        octile.cache_weights_(model)
    gathered = shard(Net(), meshes[2], reshard_after_forward=False)
    gathered(x)
    with pytest.raises(ValueError, match="is sharded by FSDP2, whose weights cannot be cached"):
        octile.cache_weights_(gathered)
    model.up.per_channel = False
    with pytest.raises(ValueError, match="gathers as int8 is .* one scale per output channel"):
        model(x)
    model = prepared(Net(), meshes[2])
    model.up.forward = lambda x: F.linear(x, model.up.weight)
    with pytest.raises(NotImplementedError, match="would read a weight that FSDP2 has gathered as int8"):
        model(x)


def example(meshes, rank):
    """train_gpt.py --parallel fsdp has the loss curve of one process."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
    from gpt import training as gpt

    text = torch.randint(97, 105, (5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    shape = {"width": 32, "layers": 1, "heads": 2, "length": 16, "batch": 8, "steps": 3, "accumulate": 2}
    shape |= {"mode": "octile-int8", "precision": "f32", "compile": "off", "validation_windows": 8}
    shape["device"] = ranks.device
    text = text.to(ranks.device)
    curves = []
    for parallel in ("none", "fsdp"):
        trainer = gpt.Trainer(gpt.Settings(**shape, parallel=parallel), text, text)
        curves.append([])
        for seed in (1, 2):
            starts = trainer.begin(seed)
            curves[-1] += [trainer.step(i, starts[i]).item() for i in range(3)] + [trainer.validate()]
    torch.testing.assert_close(*map(torch.tensor, curves), rtol=1e-4, atol=0)


CHECKS = [bits, training, mixed_precision, wire, writes, checkpoints, refusals, example, *parallel_checks.CHECKS]


def work(rank, port, checks):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    meshes = ranks.meshes()
    for check in CHECKS:
        if check.__name__ not in checks:
            continue
        begun = time.process_time()
        check(meshes, rank)
        if rank == 0:
            print(f"{check.__name__}: {time.process_time() - begun:.2f} s of rank 0's CPU time", flush=True)
        dist.barrier()
    os._exit(0)  # as in distributed_test.py


def test_four_processes(start_processes):
    """One group for all checks."""
    checks = os.environ.get("OCTILE_FSDP_CHECKS", "").split() or [check.__name__ for check in CHECKS]  # fewer by hand
    start_processes(work, (checks,), RANKS)


def lose_a_rank(rank, port):
    """The others learn of it from the collective that they are in, not from the group's timeout."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    from octile.parallel import RowParallel
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    layer = parallelize_module(octile.Linear(8, 8), init_device_mesh("cpu", (2,)), RowParallel(exact=True))
    x = torch.randn(4, 4)
    layer(x)
    if rank == 1:
        os._exit(0)
    begun = time.monotonic()
    with pytest.raises(RuntimeError):
        for _ in range(2):
            layer(x)
    assert time.monotonic() - begun < 50
    os._exit(0)


def test_a_rank_dies(start_processes):
    start_processes(lose_a_rank, (), 2)


def test_sixty_four_ranks():
    """Shapes and bytes of one rank of 64, 8 of FSDP2 by 8 of tensor parallelism; the other ranks do not exist."""
    from octile.parallel import ColumnParallel, RowParallel
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore

    width, hidden, tokens, parts = 64, 256, 16, 8
    dist.init_process_group("fake", store=FakeStore(), rank=11, world_size=64)
    try:
        mesh = init_device_mesh("cpu", (8, parts), mesh_dim_names=("replicas", "split"))
        model = nn.Sequential(nn.Linear(width, hidden, False), nn.ReLU(), nn.Linear(hidden, width, False))
        octile.quantize_(model, octile.Int8Training(backward="int8-whole"))
        plan = {"0": ColumnParallel(input_layouts=Shard(0)), "2": RowParallel(output_layouts=Shard(0))}
        parallelize_module(model, mesh["split"], plan)
        fsdp.prepare_(model)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh["replicas"])
        assert [p.to_local().shape for p in model.parameters()] == [(hidden // 64, width), (width // 8, hidden // 8)]
        x = torch.randn(tokens // parts, width, requires_grad=True)
        with Gathered(True) as seen:
            y = model(x)
            y.sum().backward()
    finally:
        dist.destroy_process_group()
    assert y.shape == x.shape and model[0].weight.grad.to_local().shape == (hidden // 64, width)
    of_weights = 2 * 2 * width * hidden // parts + 2 * 4 * (hidden // parts + width)  # forward and backward
    assert seen.bytes == {
        "c10d::_allgather_base_": of_weights,
        "c10d::_reduce_scatter_base_": 4 * 2 * width * hidden // parts // 8,  # dW in f32, the part that one rank keeps
        "_c10d_functional::all_gather_into_tensor": tokens * (width + 4) + 4 * tokens * width,  # x as int8, dY
        "_c10d_functional::reduce_scatter_tensor": 2 * 4 * tokens // parts * width,  # y and dX
    }, seen.bytes


def alone(device, backend):
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh(device, (1,))
    dist.destroy_process_group()


@pytest.fixture
def mesh():
    yield from alone("cpu", "gloo")
    torch._dynamo.reset()  # otherwise the next is compiled for dynamic sizes


@pytest.fixture
def gpu_mesh():
    if not torch.cuda.is_available():
        pytest.skip("graphs are CUDA's")
    with torch.cuda.stream(torch.cuda.Stream()):  # eager steps use the stream of the capture
        yield from alone("cuda", "nccl")


def test_compiled_blocks(mesh):
    x, dy = inputs()
    whole, model = Net(), Net()
    fsdp.prepare_(model)
    for layer in (model.up, model.down):
        layer.compile(fullgraph=True, backend="aot_eager")
    shard(model, mesh)
    given, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
    for _ in range(2):
        expected, y = whole(given), model(mine)
        expected.backward(dy)
        y.backward(dy)
        assert torch.equal(y, expected) and torch.equal(mine.grad, given.grad)
    assert torch.equal(model.up.weight.grad.full_tensor(), whole.up.weight.grad)
    with torch.no_grad():
        model.up.weight.mul_(2), whole.up.weight.mul_(2)
    assert torch.equal(model(x), whole(x))


def test_compiled_parallel(mesh):
    """torch.compile puts each block in one graph, including the collectives."""
    parallel_checks.compiled(mesh, "inductor")


def capture(step):
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        out = step()
    return graph, out


@pytest.mark.parametrize("backward", BACKWARDS)
def test_graph_of_a_step(backward, gpu_mesh):
    """The bits of eager steps, and evaluation between replays sees their weights."""
    x, dy = (t.cuda() for t in inputs())

    def trained(whole):
        model = Net(backward).cuda()
        if not whole:
            prepared(model, gpu_mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, capturable=True)

        def step():
            y = model(x)
            y.backward(dy)
            optimizer.step()
            optimizer.zero_grad()
            return y.detach()

        return model, step

    (plain, plain_step), (model, step) = trained(True), trained(False)
    for _ in range(3):
        assert torch.equal(step(), plain_step())
    graph, y = capture(step)
    for _ in range(4):
        graph.replay()
        assert torch.equal(y, plain_step())
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
    assert torch.equal(step(), plain_step())
    graph.replay()
    assert torch.equal(y, plain_step())
    assert_same({n: p.full_tensor() for n, p in model.named_parameters()}, dict(plain.named_parameters()))


@pytest.mark.parametrize("what", ["writes", "gathers"])
def test_after_a_capture_each_forward_quantizes(what, mesh, monkeypatch):
    """As on a GPU, where replays write weights and no version counter moves."""
    x, dy = inputs()
    whole, model = Net(), prepared(Net(), mesh)
    model(x)
    with monkeypatch.context() as capture:
        capture.setattr(fsdp, "_capturing", lambda tensor: True)
        if what == "gathers":
            model(x).backward(dy)
        else:
            with torch.no_grad():
                model.up.weight.mul_(1), model.down.weight.mul_(1)
    model.zero_grad()
    for _ in range(2):
        for name in ("up", "down"):
            getattr(model, name).weight.to_local()._values.numpy()[:] *= -1.5
            getattr(whole, name).weight.data.mul_(-1.5)
        y, expected = model(x), whole(x)
        assert torch.equal(y, expected)
        y.backward(dy)
        expected.backward(dy)
    assert torch.equal(model.up.weight.grad.full_tensor(), whole.up.weight.grad)


def test_graph_that_only_writes(gpu_mesh):
    x, _ = (t.cuda() for t in inputs())
    plain, model = Net().cuda(), prepared(Net().cuda(), gpu_mesh)

    def write(one):
        with torch.no_grad():
            torch._foreach_mul_(list(one.parameters()), -1.5)

    model(x)
    graph, _ = capture(lambda: write(model))
    for _ in range(3):
        graph.replay()
        write(plain)
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))


def test_cached_before_it_is_sharded(mesh):
    """The step says so, and writes nothing."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(octile.Linear(8, 8))
    cached = octile.cache_weights_(model)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 8)).sum().backward()
    before = [p.to_local().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"the weight of 0 was sharded after cache_weights_\(\): call remove"):
        optimizer.step()
    assert all(torch.equal(p.to_local(), b) for p, b in zip(model.parameters(), before, strict=True))
    cached.remove()
    optimizer.step()
    assert not torch.equal(model[0].weight.to_local(), before[0])


def test_without_sharding():
    """Prepared but never sharded: the layer is unchanged."""
    x, dy = inputs()
    whole, model = Net(), Net()
    up = model.up.weight
    fsdp.prepare_(model)
    assert isinstance(model.up.weight, nn.Parameter) and model.up.weight is not up
    y = model(x)
    assert torch.equal(y, whole(x))
    y.backward(dy)
    whole(x).backward(dy)
    assert torch.equal(model.up.weight.grad, whole.up.weight.grad)
    for one in (model, copy.deepcopy(model)):
        state = one.state_dict()
        assert {type(v) for v in state.values()} == {torch.Tensor}
        assert_same(state, whole.state_dict())
    given = model.state_dict()["up.weight"]
    before = given.clone()
    for one in (model, whole):
        one.up.weight.data = before.flip(0)
    assert torch.equal(model(x), whole(x)) and torch.equal(model.state_dict()["up.weight"], before.flip(0))
    assert torch.equal(given, before)  # the memory of before
    model.to(torch.float64)
    assert fsdp.gathers_int8(model.up.weight) and model.up.weight.dtype is torch.float64


def test_tied_layers_stay_tied():
    model = nn.ModuleList(octile.Linear(8, 8) for _ in range(2))
    model[1].weight = model[0].weight
    assert fsdp.prepare_(model) == ["0", "1"]
    assert model[0].weight is model[1].weight


def test_what_cannot_be_prepared():
    def tied():
        model = nn.ModuleDict({"words": nn.Embedding(8, 8), "head": octile.Linear(8, 8)})
        model["head"].weight = model["words"].weight
        return model

    cached = nn.ModuleDict({"up": octile.Linear(8, 8)})
    octile.cache_weights_(cached)
    cases = [
        (nn.Linear(8, 8), "the model has no octile.Linear"),
        (octile.Linear(8, 8, per_channel=False), "the model cannot gather int8: it has one scale for its whole weight"),
        (octile.QuantizedLinear(8, 8, device="cpu"), r"cannot gather int8: its weight is \(IN, OUT\)"),
        (cached, r"up cannot gather int8: its weight is cached by cache_weights_\(\): call remove\(\) first"),
        (tied(), "words uses the weight of an octile.Linear, and would read int8"),
    ]
    for model, reason in cases:
        before = list(model.parameters())
        with pytest.raises(ValueError, match=reason):
            fsdp.prepare_(model)
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    model = octile.Linear(8, 8)
    fsdp.prepare_(model)
    with pytest.raises(ValueError, match="its weight is a ShardedWeight, not a plain parameter"):
        fsdp.prepare_(model)
    with pytest.raises(ValueError, match="the weight of the layer is a ShardedWeight"):
        octile.cache_weights_(model)


def test_explains_what_runs():
    """The transpose of W that int8 dX reads is made in the backward."""
    layer = octile.Linear(64, 64, backward="int8")
    before = layer.explain(64, "backward")
    fsdp.prepare_(layer)
    assert "in_out" in before and "in_out" not in layer.explain(64, "backward").replace("dW", "")
