"""Two processes over gloo, or more in pairs: DistributedDataParallel, and FSDP, where parameters come and go."""

import os

import octile
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, MICRO = 3, 2


def make_model(backward):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    octile.quantize_(model, octile.Int8Training(backward=backward))
    return model.to(ranks.device)


def batches():
    generator = torch.Generator().manual_seed(5)
    return torch.randn(STEPS, MICRO, 2, 8, 32, generator=generator).to(ranks.device)


def train(model, shard, synchronize):
    """Steps of two micro-batches; synchronize(model, last) is entered around each of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        for micro in range(MICRO):
            x = batches()[step, micro]
            with synchronize(model, micro == MICRO - 1):
                parts = [x[rank] for rank in range(2)] if shard is None else [x[shard]]
                sum(model(part).square().mean() for part in parts).div(len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()


class Always:
    def __init__(self, *_):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


def only_last(model, last):
    return Always() if last else model.no_sync()


def reference(backward):
    model = make_model(backward)
    train(model, None, Always)
    return model


def work(rank, port, what, backward):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        globals()[what](ranks.meshes()[2], backward)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    # Everything has been compared. Exiting normally beside threads of gloo's store, whose other process may be gone, has
    # sometimes aborted.
    os._exit(0)


def assert_alike(mine, mesh):
    """The same bits on both."""
    others = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(others, mine.detach(), group=mesh.get_group())
    assert torch.equal(*others)


def ddp(mesh, backward):
    for view in (False, True):
        words = {"process_group": mesh.get_group(), "gradient_as_bucket_view": view}
        model = DistributedDataParallel(make_model(backward), **words)
        train(model, mesh.get_local_rank(), only_last)
        # Scales are per token, so a batch in two halves has the same values as the whole. Gradients differ only by
        # float sums, which AdamW's division can amplify to the third digit where a gradient is about 0.
        for mine, whole in zip(model.parameters(), reference(backward).parameters(), strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-2, atol=2e-3)
            assert_alike(mine, mesh)


def fsdp(mesh, backward):
    """A gathered parameter is rewritten at one address without its version counter: no cached weight may be left."""
    from torch.distributed.fsdp import fully_shard

    rank = mesh.get_local_rank()
    for reshard in (True, False):
        model = make_model(backward)
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        train(model, rank, Always)
        for mine, whole in zip(model.parameters(), reference(backward).parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), whole, rtol=1e-2, atol=2e-3)
    # Without a step, a gradient or a change of mode in between.
    model, x = make_model(backward), batches()[0, 0, rank]
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    with torch.no_grad():
        y = model(x)
        for parameter in model[2].parameters():
            parameter.mul_(2)
        assert torch.equal(model(x), 2 * y)


class Adapted(nn.Module):
    """Frozen layers of all kinds one after another, each with a LoRA beside it."""

    def __init__(self, backward):
        super().__init__()
        torch.manual_seed(0)
        makers = (
            lambda linear: octile.W8A8Linear.from_linear(linear, backward=backward),
            lambda linear: octile.W8A8StaticLinear.from_linear(linear, 0.02, input_multiplier=torch.rand(32) + 0.5),
            octile.W8A16Linear.from_linear,
            lambda linear: octile.W4A16Linear.from_linear(linear, group=32),
        )
        self.frozen = nn.ModuleList(make(nn.Linear(32, 32)) for make in makers)
        self.down = nn.ModuleList(nn.Linear(32, 4) for _ in makers)
        self.up = nn.ModuleList(nn.Linear(4, 32) for _ in makers)

    def forward(self, x):
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = torch.tanh(frozen(x) + up(down(x)))
        return x


def frozen_ddp(mesh, backward):
    """The quantized buffers do not move, whether or not DDP broadcasts them in each forward."""
    whole = Adapted(backward).to(ranks.device)
    train(whole, None, Always)
    for broadcast in (False, True):
        words = {"process_group": mesh.get_group(), "broadcast_buffers": broadcast}
        model = DistributedDataParallel(Adapted(backward).to(ranks.device), **words)
        train(model, mesh.get_local_rank(), only_last)
        for mine, other in zip(model.module.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-2, atol=2e-3)
            assert_alike(mine, mesh)
        for mine, other in zip(model.module.buffers(), whole.buffers(), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("what", ["ddp", "fsdp", "frozen_ddp"])
def test_two_processes(what, start_processes):
    start_processes(work, (what, "int8"), 2)
