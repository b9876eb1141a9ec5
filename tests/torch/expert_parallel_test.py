"""Expert parallelism: octile.ExpertParallel. Four processes over gloo, as four ranks or as two pairs."""

import copy
import functools
import os
import sys
import tempfile

import octile
import pytest
import ranks
import torch
import torch.distributed as dist
from octile import expert_parallel
from octile import experts as module_of
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

E, K, I, SLOTS = 8, 32, 64, 3
LAYERS = {
    "w8a8": (octile.W8A8Linear, {}),
    "w8a8, one scale": (octile.W8A8Linear, {"per_channel": False}),
    "w8a16": (octile.W8A16Linear, {}),
    "w4a8": (octile.W4A8Linear, {"group": 32}),
    "w4a16": (octile.W4A16Linear, {"group": 32}),
}
# The number of tokens on each of one, two or four ranks, and the experts that get none.
TOKENS = {1: (11,), 2: (7, 4), 4: (5, 0, 9, 3)}
UNUSED = {1: (1,), 2: (1,), 4: (2, 3)}  # with four ranks, all experts of one rank
# These sum integers, so y's bits are the contract's. The gradients of frozen layers are sums of floats.
OF_INTEGERS = ("w8a8", "w8a8, one scale", "w4a8")


class Fused(nn.Module):
    """Experts laid out as Transformers' are."""

    has_gate, is_transposed = True, False

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        shapes = {"gate_up_proj": (E, 2 * I, K), "down_proj": (E, K, I)}
        shapes |= {"gate_up_proj_bias": (E, 2 * I), "down_proj_bias": (E, K)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator) * 0.2))

    def _apply_gate(self, up):
        gate, up = up.chunk(2, -1)
        return gate.sigmoid() * up


def trained(backward="int8", **words):
    words = {"per_channel": True, "rounding": "nearest"} | words
    options = octile.functional.options("out_in", activation="per_token", backward=backward, **words)
    return module_of.TrainedExperts.from_module(Fused().to(ranks.device), options)


def frozen(name, biases=True, experts=E):
    torch.manual_seed(1)
    kind, words = LAYERS[name]
    up, down = (kind.from_linear(nn.Linear(k, experts * n, bias=False), **words) for k, n in ((K, 2 * I), (I, K)))
    made = [nn.Parameter(torch.randn(experts, n)) if biases else None for n in (2 * I, K)]
    return octile.Experts(experts, up, down, up_bias=made[0], down_bias=made[1]).to(ranks.device)


def inputs(n, dtype=torch.float32):
    """x, index, weights and dY of all ranks' tokens, and the slice of each rank."""
    generator = torch.Generator().manual_seed(3)
    tokens = sum(TOKENS[n])
    index = torch.stack([torch.randperm(E, generator=generator)[:SLOTS] for _ in range(tokens)])
    for unused in UNUSED[n]:
        index[index == unused] = 7
    index[0, 1], index[4, 0] = E, -1  # belongs to no expert
    index[2, :2] = index[2, 2]  # the same expert twice
    x, dy = (torch.randn(tokens, K, generator=generator).to(dtype) for _ in range(2))
    given = x, index, torch.rand(tokens, SLOTS, generator=generator), dy
    ends = torch.tensor(TOKENS[n]).cumsum(0).tolist()
    rows = [slice(end - count, end) for count, end in zip(TOKENS[n], ends, strict=True)]
    return [t.to(ranks.device) for t in given], rows


def split(module, mesh, exact=True):
    return parallelize_module(module, mesh, octile.ExpertParallel(exact=exact))


def step(module, x, index, weights, dy, call=None):
    module.zero_grad()
    x, weights = (t.clone().requires_grad_() for t in (x, weights))
    y = (module if call is None else call)(x, index, weights)
    y.backward(dy)
    return [y.detach(), x.grad, weights.grad], {n: p.grad for n, p in module.named_parameters()}


def assert_bits(got, expected, what, integers, dtype):
    assert got.dtype is expected.dtype
    if integers:
        assert torch.equal(got, expected), what
    else:
        ranks.assert_sums(got, expected, what, dtype)


def assert_same(mine, whole, rows, what, integers):
    """y and the gradients of tokens, this rank's; gradients of parameters, of all tokens. integers: whether products are of
    them; the gradients of the router's weights and of biases are sums of floats with any."""
    dtype = mine[0][0].dtype
    for name, got, expected in zip(("y", "dX", "router")[-len(mine[0]) :], mine[0], whole[0], strict=True):
        assert_bits(got, expected[rows], (what, name), name in integers, dtype)
    for name, expected in whole[1].items():
        of_integers = "dW" in integers and "bias" not in name
        assert_bits(mine[1][name].full_tensor(), expected, (what, name), of_integers, dtype)


# ---- What each of the processes checks. meshes: ranks.meshes(). ----


def bits(meshes, rank, dtypes=(torch.float32, torch.bfloat16)):
    """y and the gradients are those of one process that has all tokens."""
    for n, name, dtype in ((n, name, dtype) for n in ranks.counts(meshes)[1:] for name in LAYERS for dtype in dtypes):
        mesh, (arguments, rows) = meshes[n], inputs(n, dtype)
        mine = rows[mesh.get_local_rank()]
        own = [t[mine] for t in arguments]
        whole, integers = frozen(name), ("y",) if name in OF_INTEGERS else ()
        expected = step(whole, *arguments)
        module = split(frozen(name), mesh)
        assert module.gate_up_proj.experts == E // n and module.num_experts == E
        assert_same(step(module, *own), expected, mine, (n, name, dtype), integers)
        with torch.no_grad():
            assert_bits(module(*own[:3]), expected[0][0][mine], name, "y" in integers, dtype)
            if ranks.device == "cpu" or ("w4" in name and dtype is torch.bfloat16):
                assert octile.pack_(module) == ["gate_up_proj", "down_proj"]
            assert_bits(module(*own[:3]), expected[0][0][mine], ("packed", name), "y" in integers, dtype)
        assert_same(step(module, *own), expected, mine, ("packed", n, name, dtype), integers)
        # Rows in x's type: y is rounded otherwise, and the gradients are the same.
        got = step(split(frozen(name), mesh, exact=False), *own)
        bound = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
        ranks.assert_near(got[0][0], expected[0][0][mine], bound, (n, name, dtype))
        assert_same((got[0][1:], got[1]), (expected[0][1:], expected[1]), mine, "not exact", integers)


def training(meshes, rank, dtype=torch.float32):
    """Losses, gradients and weights after some steps equal those of one process."""
    every = dist.get_world_size()
    cases = [(2, "int8"), (every, "16bit"), (every, ("int8-128", "16bit")), (every, "int8-whole")]
    if ranks.device == "cuda":  # which has no "int8-whole" for experts; otherwise float sums would affect training
        cases = [(2, "int8"), (every, "int8-128")]
    for n, backward in cases:
        mesh, (arguments, rows) = meshes[n], inputs(n, dtype)
        mine, integers = rows[mesh.get_local_rank()], ("y", "dX", "dW")
        own = [t[mine] for t in arguments]
        whole, module = trained(backward), split(trained(backward), mesh)
        # Biases, whose gradients are float sums, would make the two diverge on a GPU.
        learned = [
            [p for name, p in m.named_parameters() if ranks.device == "cpu" or "bias" not in name]
            for m in (whole, module)
        ]
        optimizers = [torch.optim.AdamW(parameters, lr=0.05) for parameters in learned]
        for _ in range(3):
            expected, got = step(whole, *arguments), step(module, *own)
            assert_same(got, expected, mine, (n, backward), integers)
            for optimizer in optimizers:
                optimizer.step()
        for name, p in whole.named_parameters():
            assert torch.equal(module.get_parameter(name).full_tensor(), p)
        expected = step(whole, *arguments)
        if ranks.device == "cpu":
            compiled = torch.compile(module, backend="eager")
            assert_same(step(module, *own, compiled), expected, mine, "compiled", integers)
        recomputed = functools.partial(checkpoint, module, use_reentrant=False)
        assert_same(step(module, *own, recomputed), expected, mine, "recomputed", integers)
        # In 16 bits, if rows come back in 16 bits.
        got, expected = (
            step(m, a[0].bfloat16(), *a[1:3], a[3].bfloat16())
            for m, a in ((split(trained(backward), mesh, exact=False), own), (trained(backward), arguments))
        )
        for g, e in zip(got[0], expected[0], strict=True):
            ranks.assert_near(g, e[mine], 0.05, (n, backward))
    # Each expert rounds with its own random numbers, on whatever rank.
    module = split(trained(rounding="stochastic"), mesh)
    x = own[0].clone().requires_grad_()
    module(x, *own[1:3]).backward(own[3])
    assert x.grad.isfinite().all()


def one_slot(meshes, rank):
    """Tokens of one slot each, all of them one rank's: what the others send has one column and no rows."""
    every = dist.get_world_size()
    x, index, weights, dy = inputs(every)[0]
    arguments = x, index[:, :1], weights[:, :1], dy
    mine = slice(None) if rank == 0 else slice(0)
    makers = {trained: ("y", "dX", "dW")} | {functools.partial(frozen, name): ("y",) for name in ("w8a8", "w4a8")}
    for make, integers in makers.items():
        got = step(split(make(), meshes[every]), *(t[mine] for t in arguments))
        assert_same(got, step(make(), *arguments), mine, "one slot", integers)


def two_dimensions(meshes, rank):
    """FSDP2 over replicas of two ranks each, two if there are four: the mean of the replicas' gradients."""
    from torch.distributed.fsdp import fully_shard

    both, (arguments, rows) = meshes["2d"], inputs(dist.get_world_size())
    replicas = [slice(rows[first].start, rows[first + 1].stop) for first in range(0, len(rows), 2)]
    alone = [step(trained(), *(t[replica] for t in arguments)) for replica in replicas]
    module = split(trained(), both["s"])
    fully_shard(module, mesh=both["r"])
    values, gradients = step(module, *(t[rows[rank]] for t in arguments))
    begin, mine = replicas[rank // 2].start, rows[rank]
    own = slice(mine.start - begin, mine.stop - begin)
    mean = {name: sum(of[1][name] for of in alone) / len(alone) for name in gradients}
    assert_same((values, gradients), (alone[rank // 2][0], mean), own, rank, ("y", "dX", "dW"))


def wire(meshes, rank):
    """A token travels in int8, once to each rank that has one of its experts."""
    every = dist.get_world_size()
    mesh, (arguments, rows) = meshes[every], inputs(every)
    x, index, weights = (t[rows[rank]] for t in arguments[:3])
    sent, collective = [], dist.all_to_all_single

    def recorded(output, given, *more, **words):
        sent.append(given.numel() * given.element_size())
        return collective(output, given, *more, **words)

    valid = [{e // (E // every) for e in one if 0 <= e < E} for one in index.tolist()]
    slots = sum(0 <= e < E for e in index.flatten().tolist())
    dist.all_to_all_single = recorded
    try:
        for name, of_token in (("w8a8", K + 4), ("w4a8", K + 4), ("w4a16", 2 * K)):
            for exact in (True, False):
                module = split(frozen(name, biases=False), mesh, exact)
                sent.clear()
                with torch.no_grad():
                    module(x.bfloat16(), index, weights)
                assert sent[1] == sum(map(len, valid)) * (of_token + 4 * SLOTS)
                back = torch.tensor(sent[2], device=ranks.device)
                dist.all_reduce(back)
                total = torch.tensor(slots, device=ranks.device)
                dist.all_reduce(total)
                assert len(sent) == 3 and back == total * K * (4 if exact else 2)
    finally:
        dist.all_to_all_single = collective


def checkpoints(meshes, rank):
    """DTensors: what all ranks save, fewer can load, and vice versa; frozen layers also load whole tensors."""
    import torch.distributed.checkpoint as dcp

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    fewer, every = ranks.counts(meshes)[-2:]
    for source, target in ((every, fewer), (fewer, every)):
        for name, make in (("w4a8", lambda: frozen("w4a8")), ("trained", trained)):
            given, of_given = inputs(target), meshes[target].get_local_rank()
            own = [t[given[1][of_given]] for t in given[0][:3]]
            where = f"{folder[0]}/{name}-{source}-{meshes[source].get_group().group_name if source == fewer else 'all'}"
            module = split(make(), meshes[source])
            for key, value in module.state_dict().items():
                assert torch.equal(value.full_tensor(), make().state_dict()[key]), key
            if source == every or rank < fewer:
                dcp.save(module.state_dict(), checkpoint_id=where, process_group=meshes[source].get_group())
            dist.barrier()
            files = [where]
            dist.broadcast_object_list(files, 0)
            other = split(make(), meshes[target])
            with torch.no_grad():
                expected = other(*own)
                for t in (*other.parameters(), *other.buffers()):
                    t.zero_()
            state = other.state_dict()
            dcp.load(state, checkpoint_id=files[0], process_group=meshes[target].get_group())
            other.load_state_dict(state)
            with torch.no_grad():
                assert torch.equal(other(*own), expected)
    module, whole = split(frozen("w4a8", biases=False), meshes[every]), frozen("w4a8", biases=False)
    with torch.no_grad():
        for t in module.buffers():
            t.zero_()
    module.load_state_dict(whole.state_dict())
    (arguments, rows) = inputs(every)
    with torch.no_grad():
        assert torch.equal(module(*(t[rows[rank]] for t in arguments[:3])), whole(*arguments[:3])[rows[rank]])
    with pytest.raises(TypeError, match="split over ranks cannot be pickled"):
        copy.copy(module._parallel).__reduce__()
    with pytest.raises(ValueError, match=r"split over ranks, and this rank has only a part: save their state_dict\(\)"):
        module_of.split(module, {})
    for name, t in module.named_buffers():  # and nothing keeps the whole in memory
        assert t.untyped_storage().nbytes() == whole.get_buffer(name).nbytes // every, name
    assert octile.pack_(module)
    with pytest.raises(RuntimeError, match="no state_dict once it is packed"):
        module.state_dict()


def refused(meshes, rank):
    mesh = meshes[4]
    packed = frozen("w8a8")
    octile.pack_(packed)
    done = split(frozen("w8a8"), mesh)
    for module, of, reason in (
        (packed, mesh, r"gate_up_proj is packed: pack_\(\) comes after parallelize_module\(\)"),
        (done, mesh, "split over 4 ranks: they are split already"),
        (frozen("w8a8", experts=6), mesh, "there are 6, which 4 ranks cannot share evenly"),
        (trained(per_channel=False), mesh, "one scale for its whole weight"),
        (nn.Linear(8, 8), mesh, "ExpertParallel is for octile.Experts and for experts .*, not for Linear"),
        (frozen("w8a8", experts=4 + 4 * (rank == 2)), mesh, "is 4 of Experts.* on rank 0 and 8 of Experts.* on rank 2"),
        (frozen("w8a8" if rank == 1 else "w8a16"), mesh, "gate_up_proj is W8A16.* on rank 0 and W8A8.* on rank 1"),
    ):
        with pytest.raises(ValueError, match=reason):
            split(module, of)
    with pytest.raises(ValueError, match="exact=True on rank 0 and .*exact=False on rank 1"):
        split(frozen("w8a8"), mesh, exact=rank == 0)
    with pytest.raises(ValueError, match=r"is 8 of Experts.* on rank 0 and none of .*Fused.* on rank 1"):
        split(Fused() if rank == 1 else frozen("w8a8"), mesh)
    with pytest.raises(ValueError, match="split over a mesh with one dimension"):
        octile.ExpertParallel()._apply(frozen("w8a8"), meshes["2d"])
    (arguments, rows) = inputs(4)
    x, index, weights = (t[rows[rank]] for t in arguments[:3])
    with pytest.raises(RuntimeError, match="x is torch.float64, the layer torch.float32"):
        done(x.double(), index, weights)
    with pytest.raises(RuntimeError, match="exact=True does not support float64"):
        split(frozen("w8a8").double(), mesh)(x.double(), index, weights)
    wide = split(frozen("w8a8").double(), mesh, exact=False)
    assert wide(x.double(), index, weights).dtype is torch.float64
    slots = SLOTS - (rank == 2)
    reason = "with 3 slots.* rank 2 with 2 slots" if rank != 2 else "rank 2 calls .* 2 slots.* rank 0 with 3 slots"
    with pytest.raises(ValueError, match=reason):
        done(x, index[:, :slots], weights[:, :slots])
    with pytest.raises(
        ValueError, match="x of torch.float32, .* x of torch.float16|x of torch.float16, .* x of torch.flo"
    ):
        done(x.half() if rank == 3 else x, index, weights)
    with pytest.raises(RuntimeError, match="octile.Experts calls them"):
        done.gate_up_proj(x)
    with pytest.raises(ValueError, match="cannot take a new weight"):
        done.gate_up_proj.refit_(torch.ones(2 * 2 * I, K))
    assert "8, 2 of them on this rank" in repr(done)


CHECKS = [bits, training, one_slot, two_dimensions, wire, checkpoints, refused]


def join(rank, port, size):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    return ranks.meshes()


def work(rank, port, checks):
    meshes = join(rank, port, 4)
    expert_parallel.IN_CACHE = 2 * K  # two tokens at once
    for check in CHECKS:
        if check.__name__ in checks:
            check(meshes, rank)
            dist.barrier()
    os._exit(0)  # as in distributed_test.py


@pytest.mark.slow
def test_four_processes(start_processes):
    """One group for all checks."""
    checks = os.environ.get("OCTILE_EXPERT_CHECKS", "").split() or [check.__name__ for check in CHECKS]  # fewer by hand
    start_processes(work, (checks,), 4)


def of_transformers(rank, port):
    """Mixtral and gpt-oss, converted and split: logits, loss and the experts' gradients equal one process's."""
    mesh = join(rank, port, 2)[2]
    import transformers_zoo as zoo

    plan = {"model.layers.*.mlp.experts": octile.ExpertParallel(exact=True)}
    generator = torch.Generator().manual_seed(4)
    ids = [torch.randint(0, 90, (2, length), generator=generator) for length in (9, 5)]
    for name in ("mixtral", "gpt_oss"):
        for config in (octile.W8A8Dynamic(), octile.W4A16(group=32)):
            whole = zoo.make(name).eval()
            octile.quantize_(whole, config)
            model = parallelize_module(copy.deepcopy(whole), mesh, plan)
            octile.pack_(model)
            with torch.no_grad():
                assert torch.equal(model(ids[rank]).logits, whole(ids[rank]).logits), (name, config)
        whole = zoo.make(name).train()
        octile.quantize_(whole, octile.Int8Training(backward="int8"))
        model = parallelize_module(copy.deepcopy(whole), mesh, plan)
        loss = model(ids[rank], labels=ids[rank]).loss
        loss.backward()
        # Gradients of two calls are summed in another order than those of one.
        alone = [whole(one, labels=one).loss for one in ids]
        assert torch.equal(loss, alone[rank])
        sum(alone).backward()
        for path, p in model.named_parameters():
            if ".experts." in path:
                assert p.grad.shape == p.shape
                got, expected = (
                    p.grad.full_tensor().flatten().double(),
                    whole.get_parameter(path).grad.flatten().double(),
                )
                assert torch.nn.functional.cosine_similarity(got, expected, dim=0) > 0.9999, path
        with pytest.warns(UserWarning, match="its experts are split among processes"):
            octile.quantize_(model, octile.W8A8Dynamic(), lambda module, _: module_of.is_experts(module))
    os._exit(0)


@pytest.mark.slow
def test_models_of_transformers(start_processes):
    pytest.importorskip("transformers.integrations.moe")
    sys.path.insert(0, os.path.dirname(__file__))
    start_processes(of_transformers, (), 2)
