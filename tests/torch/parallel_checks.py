"""Tensor parallelism, alone and with FSDP2: the checks that the processes of fsdp_test.py and many_gpus_check.py run."""

import copy
import itertools
import math
import pathlib
import sys
import tempfile

import octile
import pytest
import ranks
import torch
import torch.distributed as dist
from octile import _c, fsdp
from octile.parallel import ColumnParallel, RowParallel
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

BATCH, TOKENS, WIDTH, HIDDEN = 2, 64, 48, 64


class Mlp(nn.Module):
    """Both layers with biases. If asked for, K of `down` has more terms than one exact sum."""

    def __init__(self, backward="int8", hidden=None, dtype=None):
        super().__init__()
        torch.manual_seed(0)
        hidden = hidden or HIDDEN
        self.up, self.down = nn.Linear(WIDTH, hidden, dtype=dtype), nn.Linear(hidden, WIDTH, dtype=dtype)
        octile.quantize_(self, octile.Int8Training(backward=backward))
        self.to(ranks.device)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(BATCH, TOKENS, WIDTH, generator=generator).to(ranks.device, dtype) for _ in range(2))
    return x, dy


def linear_of(inputs, outputs, dtype=None):
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, dtype=dtype).to(ranks.device)


def part(t, mesh, dim):
    return t.chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()


def split(model, mesh, tokens=None, column=False, row=True):
    """Column-parallel `up`, row-parallel `down`; tokens: the dimension that is split between ranks."""
    layout = Replicate() if tokens is None else Shard(tokens)
    plan = {
        "up": ColumnParallel(exact=column, input_layouts=layout),
        "down": RowParallel(exact=row, output_layouts=layout),
    }
    return parallelize_module(model, mesh, plan)


def step(model, x, dy):
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(dy)
    return y.detach(), x.grad, {n: p.grad for n, p in model.named_parameters()}


def whole_of(gradients):
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}


def assert_gradients(got, expected, what=None, dtype=None):
    """Weights' gradients are sums of integers, biases' sums of floats. dtype: dY's, if not the parameters'."""
    for name, gradient in whole_of(got).items():
        if "bias" in name:
            ranks.assert_sums(gradient, expected[name], (what, name), dtype)
        else:
            assert torch.equal(gradient, expected[name]), (what, name)


CASES = [("int8-whole", torch.float32, None), ("int8", torch.float32, None), ("16bit", torch.float32, None)]
CASES += [("int8-whole", torch.bfloat16, 4608), (("int8-128", "16bit"), torch.float16, None)]


def exact_bits(meshes, rank, cases=CASES):
    """y and integer gradients of 1, 2 and 4 ranks equal those of one process, whether ranks have all tokens or a part."""
    for backward, dtype, hidden in cases:
        x, dy = inputs(dtype)
        y, dx, gradients = step(Mlp(backward, hidden, dtype), x, dy)
        column = backward == "int8-whole"
        for n, tokens in ((1, None), (2, None), (2, 0), (2, 1), (4, None), (4, 1)):
            if n not in meshes:
                continue
            mesh = meshes[n]
            model = split(Mlp(backward, hidden, dtype), mesh, tokens, column)
            mine, theirs = (t if tokens is None else part(t, mesh, tokens) for t in (x, dy))
            got_y, got_dx, got = step(model, mine, theirs)
            assert torch.equal(got_y, y if tokens is None else part(y, mesh, tokens)), (backward, n, tokens)
            expected_dx = dx if tokens is None else part(dx, mesh, tokens)
            if column:
                assert torch.equal(got_dx, expected_dx), (backward, n, tokens)
            else:  # a float sum over ranks, and blocks of fewer channels
                error = (got_dx - expected_dx).float().norm() / expected_dx.float().norm()
                assert error < 0.01, (backward, n, error)
            got = whole_of(got)
            of_floats = [name for name in got if backward == "16bit" or backward[1] == "16bit" and "weight" in name]
            bound = 1e-4 if ranks.device == "cpu" or dtype is torch.float32 else 4 * torch.finfo(dtype).eps
            for name in of_floats:
                ranks.assert_near(got.pop(name), gradients[name], bound, (backward, n, tokens, name))
            assert_gradients(got, gradients, (backward, n, tokens))


def inexact_sums(meshes, rank):
    """What is not exact: float sums over ranks of what one process computes for each part."""
    mesh, n = meshes[2], 2
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(24, columns, generator=generator).to(ranks.device) for columns in (96, 512))
    linear = linear_of(96, 512)

    def layer(weight, bias):
        new = octile.Linear(weight.shape[1], weight.shape[0], bias is not None, backward="int8").to(ranks.device)
        new.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias}))
        return new

    w, b = linear.weight.detach(), linear.bias.detach()
    terms = [step(layer(w.chunk(n, 1)[i], None if i else b), x.chunk(n, 1)[i].contiguous(), dy)[0] for i in range(n)]
    row = parallelize_module(octile.Linear.from_linear(linear, backward="int8"), mesh, RowParallel())
    assert torch.equal(row(part(x, mesh, 1)), terms[0] + terms[1])
    # dX by blocks of 256 channels: each rank has whole blocks, so the terms equal one process's.
    whole_dx = step(layer(w, b), x, dy)[1]
    terms = [step(layer(w.chunk(n)[i], None), x, dy.chunk(n, 1)[i].contiguous())[1] for i in range(n)]
    column = parallelize_module(octile.Linear.from_linear(linear, backward="int8"), mesh, ColumnParallel())
    _, dx, _ = step(column, x, part(dy, mesh, 1))
    assert torch.equal(dx, terms[0] + terms[1])
    assert ((dx - whole_dx).abs() <= 2 * 2.0**-24 * (terms[0].abs() + terms[1].abs())).all()
    # A row-parallel layer takes its part of what every rank has; with a DTensor x, dX must be summed with the others'.
    row = parallelize_module(
        octile.Linear.from_linear(linear, backward="int8"), mesh, RowParallel(exact=True, input_layouts=Replicate())
    )
    assert torch.equal(row(x), layer(w, b)(x))
    pair = nn.ModuleDict({"up": octile.Linear.from_linear(linear, backward="int8")})
    pair["gate"] = octile.Linear.from_linear(linear, backward="int8")
    pair.forward = lambda x: pair["up"](x) + pair["gate"](x)
    parallelize_module(
        pair,
        mesh,
        {
            "": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
            "up": ColumnParallel(),
            "gate": ColumnParallel(output_layouts=Shard(-1)),
        },
    )
    mine = part(x, mesh, 0).clone().requires_grad_()
    y = pair(mine)
    y.backward(part(dy, mesh, 1))
    assert torch.equal(y, 2 * part(layer(w, b)(x), mesh, 1))
    assert torch.equal(mine.grad, 2 * part(terms[0] + terms[1], mesh, 0))
    head = parallelize_module(
        octile.Linear.from_linear(linear, backward="int8"), mesh, ColumnParallel(output_layouts=Replicate())
    )
    assert torch.equal(head(x), layer(w, b)(x))


def layouts(meshes, rank):
    """For every type of x and of the wanted y, both equal one process's; also in mixed types and without gradients."""
    mesh = meshes[2]
    x, dy = (t[0] for t in inputs())
    linear = linear_of(WIDTH, WIDTH)

    def make(style=None):
        layer = octile.Linear.from_linear(copy.deepcopy(linear), backward="int8-whole")
        return layer if style is None else parallelize_module(layer, mesh, style)

    y, dx, gradients = step(make(), x, dy)
    pairs = [(Replicate(), Shard(-1)), (Shard(0), Shard(0)), (Shard(-1), Replicate()), (Shard(1), Shard(0))]
    for (given, wanted), kind, distributed in itertools.product(pairs, (ColumnParallel, RowParallel), (False, True)):
        words = {"exact": True, "input_layouts": given, "output_layouts": wanted}
        layer = make(kind(**words, use_local_output=not distributed))
        mine, theirs = (DTensor.from_local(t, mesh, (Replicate(),)) for t in (x, dy))
        mine, theirs = mine.redistribute(mesh, (given,)), theirs.redistribute(mesh, (wanted,))
        if not distributed:
            mine, theirs = mine.to_local(), theirs.to_local()
        got_y, got_dx, got = step(layer, mine, theirs)
        if not distributed:
            got_y, got_dx = (DTensor.from_local(t, mesh, (l,)) for t, l in ((got_y, wanted), (got_dx, given)))
        assert torch.equal(got_y.full_tensor(), y), (kind, words)
        assert torch.equal(got_dx.full_tensor(), dx), (kind, words)
        assert_gradients(got, gradients, (kind, words))
    # f32 under autocast is quantized directly; y, dY and dX's product are in 16 bits.
    column, row = make(ColumnParallel(exact=True)), make(RowParallel(exact=True))
    with torch.autocast(ranks.device, torch.bfloat16):
        y, dx, gradients = step(make(), x, dy.bfloat16())
        for layer, dim in ((column, 1), (row, None)):
            got_y, got_dx, got = step(
                layer, x if dim else part(x, mesh, 1), part(dy.bfloat16(), mesh, 1) if dim else dy.bfloat16()
            )
            assert got_y.dtype is torch.bfloat16 and got_dx.dtype is torch.float32
            assert torch.equal(got_y, part(y, mesh, 1) if dim else y)
            assert torch.equal(got_dx, dx if dim else part(dx, mesh, 1))
            assert_gradients(got, gradients, "autocast", torch.bfloat16)
    for shape in ((0,), (2, 0, 3), ()):  # no tokens, or one
        for exact in (True, False):
            column, row = make(ColumnParallel(exact=exact)), make(RowParallel(exact=exact))
            given = torch.zeros(*shape, WIDTH, device=ranks.device, requires_grad=True)
            made = row(column(given))
            made.sum().backward()
            assert made.shape == given.grad.shape == given.shape
    column, row = make(ColumnParallel(exact=True)), make(RowParallel(exact=True))
    # Nothing is computed that only dW would need.
    with torch.no_grad(), Orientations() as seen:
        column(x), row(part(x, mesh, 1))
    assert set(seen.of) == {_c.ROW_MAJOR}
    with pytest.raises(RuntimeError, match=r"x is \(4, 48\); the layer's in_features, its last size, is 24"):
        row(torch.ones(4, WIDTH, device=ranks.device))
    with pytest.raises(RuntimeError, match="x is torch.float64, the layer torch.float32"):
        row(part(x.double(), mesh, 1))
    with pytest.raises(RuntimeError, match="exact=True does not support float64"):
        row.double()(part(x.double(), mesh, 1))
    some = torch.ones(2 - mesh.get_local_rank(), WIDTH, device=ranks.device)
    uneven = DTensor.from_local(some, mesh, (Shard(0),), shape=(3, WIDTH), stride=(WIDTH, 1))
    with pytest.raises(ValueError, match=r"x is \(3, 48\), and 2 ranks cannot share dimension 0 evenly"):
        make(ColumnParallel(input_layouts=Shard(0)))(uneven)


class Orientations(TorchDispatchMode):
    """Of what is quantized."""

    def __init__(self):
        super().__init__()
        self.of = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function is torch.ops.octile.quantize.default:
            self.of.append(arguments[2])
        return function(*arguments, **(keywords or {}))


def written_by_one_rank(meshes, rank):
    """A weight that only one rank writes is quantized again by all, since the ranks' scales are shared; a backward has the
    weight of its forward."""
    from torch.distributed.fsdp import fully_shard

    both = meshes["2d"]
    x, dy = (t[0] for t in inputs())
    layer, whole = (octile.Linear(WIDTH, 33, backward="int8-whole").to(ranks.device) for _ in range(2))
    parallelize_module(layer, both["s"], RowParallel(exact=True))
    fsdp.prepare_(layer)
    fully_shard(layer, mesh=both["r"])
    mine = part(x, both["s"], 1).requires_grad_()
    for writer in (None, 1, 2):
        with torch.no_grad():
            if rank == writer:
                layer.weight.to_local()[3, 5] = 10 * rank
        whole.load_state_dict({name: p.full_tensor() for name, p in layer.state_dict().items()})
        for _ in range(2):
            with Orientations() as seen:
                y = layer(mine)
                expected, dx, _ = step(whole, x, dy[:, :33])
                assert torch.equal(y, expected)
                seen.of.clear()
                mine.grad = None
                y.backward(dy[:, :33])
            assert not seen.of
            assert torch.equal(mine.grad, part(dx, both["s"], 1))


def frozen_layers(meshes, rank, dtype=torch.float32, rows=5, sizes=(128, 64)):
    """Layers for inference: column-parallel ones are exact; row-parallel ones are sums of floats, or of integers."""
    makers = {
        "w8a8": (octile.W8A8Linear.from_linear, {}),
        "w8a8_groups": (octile.W8A8Linear.from_linear, {"group": 32}),
        "static": (
            octile.W8A8StaticLinear.from_linear,
            {"input_scale": 0.02, "input_multiplier": torch.rand(sizes[0]) + 0.5},
        ),
        "w8a16": (octile.W8A16Linear.from_linear, {}),
        "w4a16": (octile.W4A16Linear.from_linear, {"group": 32}),
        "w4a8": (octile.W4A8Linear.from_linear, {"group": 0}),
    }
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(rows, columns, generator=generator).to(ranks.device, dtype) for columns in sizes)
    linear = linear_of(*sizes).cpu()
    small, rounded = (1e-5, 1e-4) if dtype is torch.float32 else (0.01, 0.02)
    for n in ranks.counts(meshes)[1:]:
        mesh = meshes[n]
        for name, (make, words) in makers.items():
            whole = make(linear, **words).to(ranks.device)
            state = {key: value.clone() for key, value in whole.state_dict().items()}
            y, dx, _ = step(whole, x, dy)
            is_float = name in ("w8a16", "w4a16")
            for style in (ColumnParallel(), RowParallel(), RowParallel(exact=True)):
                row = isinstance(style, RowParallel)
                if style.exact and name != "w8a8":
                    continue
                layer = parallelize_module(make(linear, **words).to(ranks.device), mesh, style)
                for key in layer._parallel.placements:  # and nothing keeps the whole in memory
                    assert layer._buffers[key].untyped_storage().nbytes() == state[key].nbytes // n, (name, style, key)
                got, got_dx, _ = step(layer, part(x, mesh, 1) if row else x, dy if row else part(dy, mesh, 1))
                expected = y if row else part(y, mesh, 1)
                expected_dx = part(dx, mesh, 1) if row else dx
                if style.exact or (not row and not is_float):
                    assert torch.equal(got, expected), (name, style)
                else:
                    error = (got - expected).float().norm() / expected.float().norm()
                    assert error < (small if is_float or name == "static" else 0.02), (name, style, error)
                ranks.assert_near(got_dx, expected_dx, rounded, (name, style))
                saved = {key: value.clone() for key, value in layer.state_dict().items()}
                for key, value in state.items():
                    held = saved[key].full_tensor() if isinstance(saved[key], DTensor) else saved[key]
                    assert torch.equal(held, value), (name, style, key)
                for given in (saved, state):
                    with torch.no_grad():
                        layer.quantized_weight.zero_()
                        layer.bias.zero_()
                    layer.load_state_dict(given)
                    assert torch.equal(layer(part(x, mesh, 1) if row else x), got)
                layer.load_state_dict(layer.state_dict())
                layer.load_state_dict(state, assign=True)
                for key in layer._parallel.placements:
                    assert layer._buffers[key].untyped_storage().nbytes() == state[key].nbytes // n, (name, style, key)
                if name == "w4a16" and (ranks.device == "cpu" or dtype is not torch.float32):
                    layer.pack_()
                    ranks.assert_near(layer(part(x, mesh, 1) if row else x), got, rounded, style)
                    with pytest.raises(RuntimeError, match="no state_dict once it is packed"):
                        layer.state_dict()
                    with pytest.raises(RuntimeError, match="Unexpected key.*quantized_weight"):
                        layer.load_state_dict(state)
        layer = parallelize_module(octile.W8A8Linear(64, 1, device=ranks.device), mesh, RowParallel())
        layer.load_state_dict(layer.state_dict())  # a part of one row is contiguous in the whole


def two_dimensions(meshes, rank):
    """FSDP2 over two ranks, tensor parallelism over two: y has one process's bits, and int8 on the wire trains as float
    on the wire does. Checkpoints are plain floats, for any other mesh."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    both, alone, all_ranks = meshes["2d"], meshes[1], meshes[dist.get_world_size()]
    x, dy = inputs()

    def build(replicas, parts, prepared=True, row=True):
        """Over this many FSDP2 replicas and tensor-parallel ranks. None: not used."""
        model = Mlp("int8-whole")
        if parts is not None:
            split(model, parts, column=row, row=row)
        if prepared and replicas is not None:
            assert fsdp.prepare_(model) == ["up", "down"]
        if replicas is not None:
            for layer in (model.up, model.down, model):
                fully_shard(layer, mesh=replicas)
        return model, torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)

    def run(model, optimizer, steps=2):
        losses = []
        for i in range(steps):
            loss = model(x.roll(i, 0)[both["r"].get_local_rank()]).square().mean()
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack(losses)

    def document(model, optimizer):
        weights, state = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": state}

    whole = Mlp("int8-whole")
    expected = whole(x)
    results = []
    for prepared in (False, True):
        model, optimizer = build(both["r"], both["s"], prepared)
        mine = x[both["r"].get_local_rank()].clone().requires_grad_()
        assert torch.equal(model(mine), expected[both["r"].get_local_rank()])
        results.append((run(model, optimizer), whole_of(dict(model.named_parameters()))))
    assert torch.equal(results[0][0], results[1][0])
    for name, value in results[0][1].items():
        assert torch.equal(value, results[1][1][name]), name
    model_fast = build(both["r"], both["s"], row=False)
    torch.testing.assert_close(run(*model_fast), results[0][0], rtol=0.02, atol=0)
    for name, value in model.state_dict().items():
        assert type(value._local_tensor) is torch.Tensor, name
    # Saved with this mesh and loaded with others, and vice versa.
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    everywhere = {
        "2d": (both["r"], both["s"]),
        "tp": (None, all_ranks),
        "fsdp": (all_ranks, None),
        "one": (None, None),
    }
    for source in ("2d", "tp"):
        model, optimizer = (model, optimizer) if source == "2d" else build(*everywhere[source])
        run(model, optimizer, steps=1)
        held = {name: value.detach() for name, value in whole_of(dict(model.named_parameters())).items()}
        dcp.save(document(model, optimizer), checkpoint_id=f"{folder[0]}/{source}")
        for place in everywhere if source == "2d" else ("2d", "one"):
            other, of_other = build(*everywhere[place])
            fresh = document(other, of_other)
            dcp.load(fresh, checkpoint_id=f"{folder[0]}/{source}")
            set_state_dict(other, of_other, model_state_dict=fresh["model"], optim_state_dict=fresh["optimizer"])
            for name, value in whole_of(dict(other.named_parameters())).items():
                assert torch.equal(value, held[name]), (source, place, name)
            moments = [s["exp_avg"] for s in of_other.state.values()]
            assert all(m.full_tensor().any() if isinstance(m, DTensor) else m.any() for m in moments)
            whole.load_state_dict(held)
            assert torch.equal(other(x), whole(x)), (source, place)
    assert alone.size() == 1


def values_that_are_not_finite(meshes, rank):
    """A NaN in a token on one rank is in this token's y on all ranks, and in no other token's."""
    mesh = meshes[dist.get_world_size()]
    one, held = mesh.size() // 2, 32 // mesh.size()  # the rank that has it, and each rank's number of channels
    x, dy = inputs()
    x, dy = x.flatten(0, 1), dy.flatten(0, 1)

    def layer_of(backward):
        return octile.Linear(WIDTH, 32, backward=backward).to(ranks.device)

    for bad in (math.nan, -math.inf):
        for exact in (True, False):
            layer = parallelize_module(layer_of("int8"), mesh, RowParallel(exact=exact))
            good = layer(part(x, mesh, 1))
            mine = part(x, mesh, 1)
            mine[7, 3] = bad if rank == one else mine[7, 3]
            mine.requires_grad_()
            y = layer(mine)
            assert y[7].isnan().all()
            y, good = (torch.cat([t[:7], t[8:]]) for t in (y, good))
            assert torch.equal(y, good)
            y.sum().backward()
            assert mine.grad.isfinite().all()
        # In dY of one rank: dX is NaN where one process's would be.
        layer = parallelize_module(layer_of("int8-whole"), mesh, ColumnParallel(exact=True))
        mine = x.clone().requires_grad_()
        given = part(dy[:, :32], mesh, 1)
        given[5, 0] = bad if rank == one else given[5, 0]
        layer(mine).backward(given)
        assert mine.grad[5].isnan().all() and mine.grad[:5].isfinite().all() and mine.grad[6:].isfinite().all()
        # In W of one FSDP2 rank: in one channel of y, on all.
        from torch.distributed.fsdp import fully_shard

        layer = layer_of("16bit")
        fsdp.prepare_(layer)
        fully_shard(layer, mesh=mesh)
        with torch.no_grad():
            layer.weight.to_local()[3, 1] = bad if rank == one else 0
        assert layer(x).isnan().any(0).nonzero().flatten().tolist() == [one * held + 3]


def refused_parallel(meshes, rank):
    mesh = meshes[2]
    cached = octile.Linear(8, 8)
    octile.cache_weights_(cached)
    prepared = octile.Linear(8, 8)
    fsdp.prepare_(prepared)
    linear = nn.Linear(128, 8)
    packed = octile.W4A16Linear.from_linear(linear, group=32)
    packed.pack_()
    tuned = octile.W8A8Linear.from_linear(linear)
    tuned.bias = nn.Parameter(tuned.bias)
    mixture = [octile.W8A8Linear.from_linear(nn.Linear(32, 128, bias=False)) for _ in range(2)]
    octile.Experts(2, *mixture)
    cases = [
        (octile.Linear(8, 7), ColumnParallel(), "out_features is 7, which 2 ranks cannot share evenly"),
        (octile.Linear(7, 8), RowParallel(), "in_features is 7, which 2 ranks cannot share evenly"),
        (cached, RowParallel(), r"cached by cache_weights_\(\): call remove\(\) first"),
        (prepared, RowParallel(), r"comes before octile.fsdp.prepare_\(\) and fully_shard\(\)"),
        (octile.Linear(8, 8, per_channel=False), ColumnParallel(), "one scale for its whole weight"),
        (octile.Linear(8, 8, activation="per_tensor"), RowParallel(exact=True), "one scale for all tokens"),
        (octile.Linear(8, 8, activation="per_tensor"), ColumnParallel(input_layouts=Shard(1)), "one scale for all tok"),
        (octile.Linear(8, 8, backward="int8"), ColumnParallel(exact=True), "exact only with backward='int8-whole'"),
        (octile.Linear(8, 8, backward="16bit"), ColumnParallel(exact=True), "exact only with backward='int8-whole'"),
        (octile.Linear(8, 8, rounding="stochastic"), RowParallel(exact=True), "does not support stochastic rounding"),
        (octile.Linear(8, 8, dtype=torch.float64), RowParallel(exact=True), "exact=True does not support float64"),
        (octile.Linear(131_072, 2, device="meta"), RowParallel(exact=True), "131072 int8 products does not fit"),
        (octile.QuantizedLinear(8, 8, device="cpu"), ColumnParallel(), "QuantizedLinear cannot be split over ranks"),
        (nn.Linear(8, 8), RowParallel(exact=True), "exact=True requires one of octile's layers, not Linear"),
        (packed, ColumnParallel(), r"it is packed: pack_\(\) comes after parallelize_module\(\)"),
        (
            octile.W4A16Linear.from_linear(linear),
            RowParallel(),
            "64 of its inputs, which is not a multiple of its group",
        ),
        (octile.W4A16Linear.from_linear(linear, group=32), RowParallel(exact=True), "it sums floats"),
        (tuned, RowParallel(), "its bias is a parameter"),
        (mixture[0], ColumnParallel(), "its outputs are the channels of several experts"),
    ]
    cases += [
        (octile.W8A8Linear.from_linear(linear), ColumnParallel(exact=True), "its dX is a sum of floats"),
        (tuned, ColumnParallel(), "its bias is a parameter"),
        (octile.Linear(8, 8), RowParallel(output_layouts=Partial()), r"output_layouts is .*, expected Replicate"),
    ]
    for layer, style, reason in cases:
        with pytest.raises(ValueError, match=reason):
            parallelize_module(layer, mesh, style)
        assert layer._parallel is None if hasattr(layer, "_parallel") else True
    # Changes after which it would no longer fit.
    column = parallelize_module(octile.Linear(8, 8, backward="int8-whole"), mesh, ColumnParallel(exact=True))
    for name, value in {
        "backward": "int8",
        "per_channel": False,
        "activation": "per_tensor",
        "rounding": "stochastic",
    }.items():
        held = getattr(column, name)
        with pytest.raises(ValueError, match="the layer is split over 2 ranks: "):
            setattr(column, name, value)
        assert getattr(column, name) == held
    fsdp.prepare_(column)
    with pytest.raises(ValueError, match="its weight is a ShardedWeight, not a plain parameter"):
        fsdp.prepare_(column)
    frozen = parallelize_module(octile.W8A8Linear.from_linear(linear), mesh, RowParallel(exact=True))
    with pytest.raises(ValueError, match="it is split already"):
        parallelize_module(frozen, mesh, RowParallel())
    with pytest.raises(RuntimeError, match="a packed layer has no integer sums"):
        frozen.pack_()
    both = nn.Sequential(octile.W8A8Linear(64, 8), frozen)
    assert octile.pack_(both) == ["0"] and frozen.packed_weight is None
    with pytest.raises(ValueError, match="a layer that is split over ranks cannot take a new weight"):
        frozen.refit_(torch.ones(8, 64))
    frozen.bias = nn.Parameter(frozen.bias)
    with pytest.raises(RuntimeError, match="the bias of a layer for inference that is split over ranks is not a param"):
        frozen(torch.ones(4, 64))
    for layer in (octile.Linear(8, 8), octile.W8A8Linear(8, 8)):
        parallelize_module(layer, mesh, RowParallel())
        for x, error, reason in (
            (octile.quantize_input(torch.ones(2, 4)), NotImplementedError, "takes tensors, not a QuantizedInput"),
            (torch.tensor(1.0), RuntimeError, r"x is \(\)"),
            ([1.0], TypeError, "x is a list, expected a tensor"),
            (torch.ones(2, 4, dtype=torch.float64), RuntimeError, "float64 only goes with float64"),
        ):
            with pytest.raises(error, match=reason):
                layer(x)
    # Others are left to torch.
    plain = parallelize_module(nn.Linear(WIDTH, 8), mesh, RowParallel())
    assert plain(part(inputs()[0], mesh, -1)).shape[-1] == 8
    # A number of tokens that does not divide evenly among ranks.
    layer = parallelize_module(octile.Linear(8, 8), mesh, RowParallel(output_layouts=Shard(0)))
    with pytest.raises(ValueError, match="5 tokens do not divide into 2 ranks"):
        layer(torch.randn(5, 4))


def unlike_ranks(meshes, rank):
    """If a rank has another option, layer or version, all ranks name it, before anything is computed."""
    last = dist.get_world_size() - 1
    mesh, backward = meshes[last + 1], "int8-128" if rank == last else "int8"
    with pytest.raises(ValueError, match=f"the layer to be split is .* on rank 0 and .* on rank {last}"):
        parallelize_module(octile.Linear(8, 8, backward=backward), mesh, ColumnParallel())
    with pytest.raises(ValueError, match="the layer to be split is .*exact=True on rank 0 and .*exact=False on rank 1"):
        parallelize_module(octile.Linear(8, 8), mesh, RowParallel(exact=rank == 0))
    for style in (ColumnParallel(), RowParallel()):
        left = nn.Linear(8, 8) if rank == last else octile.Linear(8, 8)
        with pytest.raises(ValueError, match=rf" is Linear.* on rank 0 and torch\..*\.Linear.* on rank {last}"):
            parallelize_module(left, mesh, style)
    from torch.distributed.fsdp import fully_shard

    def first_gather(**words):
        model = nn.Sequential(octile.Linear(8, 8, **words), nn.ReLU()).to(ranks.device)
        fsdp.prepare_(model)
        fully_shard(model, mesh=mesh)
        return model(torch.randn(4, 8, device=ranks.device))

    with pytest.raises(ValueError, match=rf"octile: 0 is Linear.* on rank 0 and .* on rank {last}"):
        first_gather(backward=backward)
    held = octile.__version__
    octile.__version__ = "0.0.9" if rank == last else held
    with pytest.raises(ValueError, match=f"octile: octile is {held} on rank 0 and 0.0.9 on rank {last}"):
        first_gather()
    octile.__version__ = held
    assert first_gather().shape == (4, 8)


def example_parallel(meshes, rank):
    """train_gpt.py --parallel tp and 2d have the loss curve of one process."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
    from gpt import training as gpt

    text = torch.randint(97, 105, (5000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    shape = {"width": 32, "layers": 1, "heads": 4, "length": 16, "batch": 8, "steps": 2, "accumulate": 1}
    shape |= {"mode": "octile-int8-whole", "precision": "f32", "compile": "off", "split_qkv": True}
    shape |= {"exact": True, "device": ranks.device}
    text = text.to(ranks.device)
    curves = []
    for parallel in ("none", "tp", "2d"):
        trainer = gpt.Trainer(gpt.Settings(**shape, validation_windows=8, parallel=parallel), text, text)
        starts = trainer.begin(1)
        curves.append([trainer.step(i, starts[i]).item() for i in range(2)] + [trainer.validate()])
    for curve in curves[1:]:
        torch.testing.assert_close(torch.tensor(curves[0]), torch.tensor(curve), rtol=1e-4, atol=0)


def compiled(mesh, backend):
    """A block in one graph, including the collectives."""
    x, dy = inputs()
    expected, model = (split(Mlp("int8-whole"), mesh, 1, column=True) for _ in range(2))
    model.compile(fullgraph=True, backend=backend)
    x, dy = (part(t, mesh, 1) for t in (x, dy))
    y, dx, gradients = step(expected, x, dy)
    got_y, got_dx, got = step(model, x, dy)
    assert torch.equal(got_y, y)
    assert torch.equal(got_dx, dx)
    assert_gradients(got, whole_of(gradients))


def interrupted_checkpoint(meshes, rank):
    """A rank fails while writing: no rank accepts the checkpoint, and the previous one is intact."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.api import CheckpointException

    class Failing(FileSystemWriter):
        def write_data(self, plan, planner):
            if rank == 1:
                raise OSError("the disk is full")
            return super().write_data(plan, planner)

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    model = split(Mlp(), meshes[4])
    state = model.state_dict()
    dcp.save(state, checkpoint_id=f"{folder[0]}/first")
    with pytest.raises(CheckpointException, match="the disk is full"):
        dcp.save(state, storage_writer=Failing(f"{folder[0]}/second"))
    assert (pathlib.Path(folder[0]) / "first/.metadata").exists()
    assert not (pathlib.Path(folder[0]) / "second/.metadata").exists()
    held = {name: value.full_tensor() for name, value in state.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    with pytest.raises(CheckpointException):
        dcp.load(state, storage_reader=FileSystemReader(f"{folder[0]}/second"))
    dcp.load(state, checkpoint_id=f"{folder[0]}/first")
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), held[name])


CHECKS = [
    exact_bits,
    inexact_sums,
    layouts,
    written_by_one_rank,
    frozen_layers,
    two_dimensions,
    values_that_are_not_finite,
    refused_parallel,
    unlike_ranks,
    example_parallel,
    interrupted_checkpoint,
]
