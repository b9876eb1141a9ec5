"""Expert parallelism for torch's parallelize_module: ExpertParallel for octile.Experts and experts that train.

    parallelize_module(model, mesh, {"model.layers.*.mlp.experts": ExpertParallel(exact=True)})

Each rank has its own tokens and some of the experts. A token is quantized once and sent once to each rank that has one
of its experts. The experts' outputs, one row per slot, return to the token's rank, which adds them up.
docs/reference/experts.md has the rest.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from . import _c, _plans, agreement, fsdp
from .experts import Experts, TrainedExperts
from .parallel import Buffers, _fma

_quantize = torch.ops.octile.quantize.default

IN_CACHE = 2**15  # values per part of an exact sum, which has many steps: an eighth of the time on a CPU


def _travel(parts, sent, received, group):
    """Exchanges rows of several tensors in one collective. sent, received: how many go to and come from each rank.

    Returns the rows received, followed by a row of zeros.
    """
    parts = [t[:, None] if t.dim() == 1 else t for t in parts]
    # As one row of bytes first: torch asks for a last stride of 1, which an empty tensor or a single column need not have.
    rows = [t.reshape(-1).view(torch.uint8).view(len(t), t.shape[1] * t.element_size()) for t in parts]
    given = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
    come = given.new_empty((sum(received) + 1, given.shape[1]))
    come[-1] = 0
    dist.all_to_all_single(come[:-1], given, received, sent, group=group)
    columns = come.split([t.shape[1] for t in rows], 1)
    if len(parts) > 1:
        columns = [t.clone(memory_format=torch.contiguous_format) for t in columns]
    return [t.view(part.dtype) for t, part in zip(columns, parts, strict=True)]


class Exchange:
    """Sends one call's tokens to the ranks of their experts, and the results back.

    A slot's row is among the sorted rows of its expert's rank, and travels in the order of ranks, tokens and slots. x
    (tokens, IN) are the tokens received, x_scale their scales or None, and sorted_rows is sort_by_expert() of the slots of
    this rank's experts, without places.
    """

    def __init__(self, shards, x, index, facts):
        self._shards, self._group = shards, shards.group
        self.first, held, size = shards.rank * shards.held, shards.held, shards.size
        tokens, slots = index.shape
        owner = torch.where((index >= 0) & (index < held * size), index // held, size)
        needed = (owner == torch.arange(size, device=owner.device)[:, None, None]).any(-1)
        to, self._token = needed.nonzero().unbind(1)
        self._count(needed.sum(1), torch.bincount(owner.flatten(), minlength=size + 1)[:size], (slots, *facts))
        # Each slot's row among those that come back; for slots without an expert, the row of zeros.
        rows = sum(self._rows_out)
        leaving = torch.sort(owner.flatten(), stable=True).indices[:rows]
        place = leaving.new_full((tokens * slots,), rows)
        self._place = place.index_copy_(0, leaving, torch.arange(rows, device=place.device)).view(tokens, slots)
        self._held = self._place < rows
        here = owner.index_select(0, self._token) == to[:, None]
        local = torch.where(here, index.index_select(0, self._token) - to[:, None] * held, -1).int()
        parts = [x]
        if shards.quantized:
            q, _, scale = _quantize(x, _c.PER_ROW, _c.ROW_MAJOR)
            parts = [q, scale]
        parts = [t.index_select(0, self._token) for t in parts]
        *parts, local = (t[:-1] for t in self._to_experts(*parts, local))
        self.x, self.x_scale = parts[0], parts[1].flatten() if shards.quantized else None
        flat = local.flatten()
        mine = (flat >= 0).nonzero().flatten()
        experts, order = torch.sort(flat.index_select(0, mine), stable=True)
        self._slot = mine.index_select(0, order)  # of each sorted row
        self._arrived = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        bounds = torch.arange(held + 1, device=experts.device, dtype=experts.dtype)
        offsets = torch.searchsorted(experts, bounds, out_int32=True)
        self.sorted_rows = offsets, (self._slot // slots).int(), None

    def _count(self, tokens, rows, facts):
        """How many tokens and rows travel from and to each rank. Checks that the ranks' calls match."""
        mine = torch.stack([tokens, rows, *(torch.full_like(rows, fact) for fact in facts)], 1)
        others = torch.empty_like(mine)
        dist.all_to_all_single(others, mine, group=self._group)
        (self._tokens_out, self._rows_out), others = zip(*mine[:, :2].tolist(), strict=True), others.tolist()
        self._tokens_in, self._rows_in, *_ = zip(*others, strict=True)
        for rank, (_, _, *theirs) in enumerate(others):
            if theirs != list(facts):
                here, there = (_described(*of) for of in (facts, theirs))
                raise ValueError(
                    f"octile: rank {self._shards.rank} calls its experts with {here}, and rank {rank} with {there}"
                )

    def _to_experts(self, *parts):
        """Sends tokens to the ranks of their experts."""
        return _travel(parts, list(self._tokens_out), list(self._tokens_in), self._group)

    def _home(self, rows):
        """Sends sorted rows to the ranks of their tokens: (rows + 1, columns), the last one zeros."""
        rows = rows.index_select(0, self._arrived)
        return _travel([rows], list(self._rows_in), list(self._rows_out), self._group)[0]

    def returned(self, dtype):
        """The type in which rows come back, for x of type `dtype`."""
        return torch.float32 if self._shards.exact else dtype

    def sum(self, z, router_weight, dtype):
        """(tokens, OUT) of the experts' sorted rows."""
        rows, some = self._home(z), max(len(router_weight), 1)
        if self._shards.exact and rows.is_cpu:
            some = max(IN_CACHE // rows.shape[1], 1)
        parts = (t.split(some) for t in (self._place, self._held, router_weight))
        return torch.cat([self._added(rows, *part) for part in zip(*parts, strict=True)]).to(dtype)

    def _added(self, rows, place, held, router_weight):
        """The sums of some tokens, in the type of their weights."""
        y = router_weight.new_zeros((len(router_weight), rows.shape[1]))
        for slot in range(place.shape[1]):
            of_slot, weight = rows.index_select(0, place[:, slot]).to(y.dtype), router_weight[:, slot, None]
            added = _fma(weight, of_slot, y) if self._shards.exact else torch.addcmul(y, weight, of_slot)
            y = torch.where(held[:, slot, None], added, y)
        return y

    # ---- Backward ----

    def through_sum(self, dy, router_weight, z):
        """As experts._through_sum()."""
        parts = (t.index_select(0, self._token) for t in (dy, router_weight))
        of_tokens, weight = self._to_experts(*parts)
        of_rows, d_router = of_tokens.index_select(0, self.sorted_rows[1]).to(router_weight.dtype), None
        if z is not None:
            d_router = self._home((of_rows * z).sum(1)[:, None])[:, 0][self._place]
        weight_of_rows = weight.flatten().index_select(0, self._slot)
        return (of_rows * weight_of_rows[:, None]).to(dy.dtype), d_router

    def of_tokens(self, dx):
        """dX of tokens: the sum of the rows that a token went to."""
        rows = self._home(dx)
        return rows.index_select(0, self._place.flatten()).view(*self._place.shape, rows.shape[1]).sum(1)


def _described(slots, dtype, asking):
    name = next(str(t) for t, code in _plans.DTYPES.items() if code == dtype)
    asking = [what for bit, what in enumerate(("x", "the router's weights", "parameters")) if asking >> bit & 1]
    return f"{slots} slots, x of {name}, gradients of {', '.join(asking) or 'nothing'}"


# ---- The modules ----


class ExpertShards(Buffers):
    """How experts are split over the ranks of a mesh: rank r has `held` of them, from r * held on."""

    def __init__(self, module, mesh, exact):
        super().__init__(mesh)
        self.group, self.exact = mesh.get_group(), exact
        self.held = module.num_experts // self.size
        up = module._modules.get(module._names[0])
        self.quantized = up is None or up._ACTIVATION != _c.NONE

    @staticmethod
    @torch.compiler.disable  # importing it takes long, so it is here
    def in_eager_code(function, *arguments):
        """The number of rows that travel depends on values, which a graph cannot express."""
        return function(*arguments)

    def exchange(self, module, x, index, weights):
        if self.exact and x.dtype is torch.float64:
            raise RuntimeError("octile: exact=True does not support float64")
        asking = 0
        if torch.is_grad_enabled():
            asked = x.requires_grad, weights.requires_grad, any(p.requires_grad for p in module.parameters())
            asking = sum(asks << bit for bit, asks in enumerate(asked))
        return Exchange(self, x.detach(), index.long(), (_plans.DTYPES[x.dtype], asking))


class _Channels(Buffers):
    """The channels of this rank's experts, of a layer of octile.Experts."""

    def __init__(self, mesh, layer):
        super().__init__(mesh)
        for name in layer._KEPT:
            t = layer._buffers[name]
            if t is not None and t.numel() > 1:  # one scale is for all
                self.cut(layer, name, 0)
        layer.out_features //= self.size
        layer.experts //= self.size
        layer._parallel = self
        layer._align()

    def frozen(self, layer, x):
        raise RuntimeError("octile: these are the weights of several experts: octile.Experts calls them")


def _layers(module):
    return {name: module._modules[name] for name in module._names} if isinstance(module, Experts) else {}


def _refusal(module, size):
    if module._parallel is not None:
        return "they are split already"
    if module.num_experts % size:
        return f"there are {module.num_experts}, which {size} ranks cannot share evenly"
    if any(type(p) is not nn.Parameter for p in module.parameters(recurse=False)):
        return "their parameters are not plain ones: parallelize_module() comes before fully_shard()"
    if isinstance(module, TrainedExperts) and not module._options.per_channel:
        return f"each part of them: {fsdp.ONE_SCALE}"
    for name, layer in _layers(module).items():
        if layer.packed_weight is not None:
            return f"{name} is packed: pack_() comes after parallelize_module()"
    return ""


class ExpertParallel(ParallelStyle):
    """Distributes the experts of octile.Experts, or of those that Int8Training makes, over the ranks of a mesh.

    All ranks call the module together, each with any number of its own tokens. Tokens travel as int8 with their scales (with
    W8A16 and W4A16 in x's type), results and dX in x's type. exact=True: results travel in f32, and y has the bits of one process.
    """

    def __init__(self, *, exact=False):
        super().__init__()
        self.exact = exact

    def _apply(self, module, device_mesh):
        if device_mesh.ndim != 1:
            raise ValueError(
                f"octile: experts are split over a mesh with one dimension, and {device_mesh} has {device_mesh.ndim}"
            )
        layers, count = _layers(module), getattr(module, "num_experts", "none")
        facts = {"the experts to be split": f"{count} of {agreement.described(module)}, exact={self.exact}"}
        facts |= {name: agreement.described(layer) for name, layer in layers.items()}
        # First, so that all ranks refuse together, and also refuse experts that only some have converted.
        agreement.check(facts, device_mesh.get_group(), device_mesh.device_type)
        if not isinstance(module, (Experts, TrainedExperts)):
            raise ValueError(
                f"octile: ExpertParallel is for octile.Experts and for experts that Int8Training has converted, not for "
                f"{type(module).__name__}"
            )
        if reason := _refusal(module, device_mesh.size()):
            raise ValueError(f"octile: the experts cannot be split over {device_mesh.size()} ranks: {reason}")
        module._parallel = shards = ExpertShards(module, device_mesh, self.exact)
        for layer in layers.values():
            _Channels(device_mesh, layer)
        for name, p in module._parameters.items():
            if p is not None:
                part = p.detach().chunk(shards.size)[shards.rank].clone()
                part = DTensor.from_local(part, device_mesh, (Shard(0),), run_check=False)
                module._parameters[name] = nn.Parameter(part, requires_grad=p.requires_grad)
        return module
