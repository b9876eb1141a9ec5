"""FSDP2 that gathers weights as int8: prepare_(model), then torch's fully_shard.

A rank holds the float values of its output channels. It quantizes them, once after each change, and FSDP2 gathers the
int8 values and their scales. A scale belongs to one output channel, so these are the bits that one process computes from
the whole weight, and no collective for a maximum is needed.
"""

import inspect
from typing import NamedTuple

import torch
from torch import nn

from . import _c, _ops  # noqa: F401  (_ops registers torch.ops.octile)
from .dequantized import written

# Imported later: `parallel`, `agreement` and DTensor, which need torch.distributed.

ONE_SCALE = "it has one scale for its whole weight (per_channel=False), which no rank knows by itself"
CACHED = "its weight is cached by cache_weights_(): call remove() first"

_aten = torch.ops.aten
_quantize = torch.ops.octile.quantize.default


class _State:
    """Shared by all views of one weight: how often it was written, the plain tensor that state_dict() returns, and the
    int8 values made from it."""

    key = tensors = stream = given = None
    writes = 0
    captured = False  # a CUDA graph writes the weight, or makes int8 of it: replays are not seen here

    def __init__(self, likeness=None):
        self.likeness = likeness  # shared by all weights of the model

    def __reduce__(self):  # copies and pickles start afresh
        return _State, ()


class _Likeness:
    """Checks once that the ranks that gather a model have the same one."""

    def __init__(self, facts):
        self.facts, self.groups, self.mesh = facts, set(), None

    def check(self, mesh, device):
        if mesh is self.mesh:
            return
        group = mesh.get_group()
        if group.group_name not in self.groups:
            from . import agreement

            agreement.check(self.facts, group, device)
            self.groups.add(group.group_name)
        self.mesh = mesh


class _Whole(NamedTuple):
    """The weight that all shards make up; with tensor parallelism, this rank's part of the layer's."""

    channels: int
    in_features: int
    group: str | None = None  # of the ranks that have other parts of the same channels and share their scales


class ShardedWeight(torch.Tensor):
    """A float weight, or the rows of it that one rank holds, which FSDP2 gathers as int8. Operations work as on the plain
    tensor inside, and writes are counted."""

    _COPIES = (
        _aten._pin_memory.default,
        _aten._to_copy.default,
        _aten.clone.default,
        _aten.empty_like.default,
        _aten.new_zeros.default,
    )

    @staticmethod
    def __new__(cls, values, whole, state=None):
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
        )
        self._values, self._whole, self._state = values, whole, state or _State()
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, values):
        # Torch by itself would take over the sizes and the type, but not the values.
        new = ShardedWeight(_plain(values).detach(), self._whole, _State(self._state.likeness))
        torch.Tensor.data.__set__(self, new)
        self._values, self._state = new._values, new._state

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        out = function(*[_plain(a) for a in arguments], **{name: _plain(a) for name, a in keywords.items()})
        if function._schema.is_mutable:
            for one in written(cls, function, arguments, keywords):
                one._state.writes += 1
                one._state.captured |= _capturing(one)
                if out is one._values:
                    out = one
            return out
        is_view = any(returned.alias_info is not None for returned in function._schema.returns)
        if is_view or function in cls._COPIES:
            whole, state = arguments[0]._whole, arguments[0]._state
            state = state if is_view else _State(state.likeness)
            return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: cls(t, whole, state), out)
        return out

    def __tensor_flatten__(self):
        return ["_values"], self._whole

    @classmethod
    def __tensor_unflatten__(cls, inner, whole, size, stride):
        return cls(inner["_values"], whole)

    def __repr__(self, *, tensor_contents=None):
        return f"ShardedWeight({self._values!r})"

    @property
    def fsdp_pre_all_gather(self):
        return _Gather(self)

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        # FSDP2 fills the same tensors each time, and those of `out` are views of them. On one rank it has the first.
        alone = len(all_gather_outputs) == 1
        if out is not None:
            if alone:
                _local(out)._scale = metadata
            return None
        channels = self._whole.channels
        q, scale = (*all_gather_outputs, metadata) if alone else all_gather_outputs
        return GatheredWeight(q[:channels], scale[:channels], param_dtype), ()


def _capturing(tensor):
    return tensor.is_cuda and torch._C._cuda_isCurrentStreamCapturing()


def _plain(argument):
    """An operation's argument, with each ShardedWeight replaced by the tensor inside."""
    if type(argument) is ShardedWeight:
        return argument._values
    if isinstance(argument, (list, tuple)):
        return [_plain(one) for one in argument]
    return argument


class _Gather(NamedTuple):
    """Makes what FSDP2 gathers of a ShardedWeight. FSDP2 reads the signature before each call; for a method, that takes
    longer than the call."""

    weight: ShardedWeight

    # With this signature, the older of two, FSDP2 does not require scales of the weight's size when shards are uneven.
    __signature__ = inspect.Signature([inspect.Parameter("mesh", inspect.Parameter.POSITIONAL_ONLY)])

    def __call__(self, mesh):
        values, state = self.weight._values, self.weight._state
        channels, in_features, group = self.weight._whole
        if state.likeness is not None:
            state.likeness.check(mesh, values.device)
        if values.dim() != 2 or values.shape[1] != in_features:
            raise RuntimeError(
                f"octile: a weight {(channels, in_features)} is sharded as {tuple(values.shape)}; weights gathered as int8 must be "
                "sharded along their output channels, fully_shard's default"
            )
        stream = torch._C._cuda_getCurrentStream(values.get_device()) if values.is_cuda else None
        state.captured |= _capturing(values)
        if group is None and not state.captured:
            versions = [t._version for t in (values, state.given, _local(state.given)) if t is not None]
            key = state.writes, versions, values.data_ptr(), values.shape
            changed = state.key != key
        else:
            # The maximum over ranks is a collective, and no rank knows whether another's values have changed; nobody
            # sees what a replayed CUDA graph writes. So each forward quantizes, and a backward, a graph task of
            # autograd, gathers what its forward made.
            key = None
            changed = state.tensors is None or torch._C._current_graph_task_id() == -1
        if changed:
            if group is None:
                q, _, scale = _quantize(values, _c.PER_ROW, _c.ROW_MAJOR)
            else:
                from .parallel import quantize_shared

                q, _, scale = quantize_shared(values, group)
            missing = -(-channels // mesh.size()) - len(values)  # rows that the last ranks lack
            if missing > 0:
                q, scale = nn.functional.pad(q, (0, 0, 0, missing)), nn.functional.pad(scale, (0, missing))
            state.key, state.tensors, state.stream = key, (q.contiguous(), scale), stream
        elif stream != state.stream:
            names = ("stream_id", "device_index", "device_type")
            stream, before = (torch.cuda.Stream(**dict(zip(names, one, strict=True))) for one in (stream, state.stream))
            stream.wait_stream(before)
            for tensor in state.tensors:
                tensor.record_stream(stream)
        return state.tensors, state.tensors[1]


class GatheredWeight(torch.Tensor):
    """A whole weight as FSDP2 has gathered it: int8 and scales. It has the float weight's shape and its gradient's
    type, but no float values: any operation that would read them raises NotImplementedError."""

    @staticmethod
    def __new__(cls, q, scale, dtype):
        self = torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=dtype, device=q.device)
        self._q, self._scale = q, scale
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        w = arguments[0]
        if function in (_aten.detach.default, _aten.alias.default) or (
            function in (_aten.as_strided.default, _aten.view.default) and list(arguments[1]) == list(w.shape)
        ):
            return cls(w._q, w._scale, w.dtype)
        if function is _aten.zeros_like.default:
            return torch.zeros(w.shape, dtype=w.dtype, device=w.device)
        raise NotImplementedError(
            f"octile: {function} would read a weight that FSDP2 has gathered as int8; in forward and backward only the "
            "layer itself can use it"
        )

    def __tensor_flatten__(self):
        return ["_q", "_scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner, dtype, size, stride):
        return cls(inner["_q"], inner["_scale"], dtype)

    def __repr__(self, *, tensor_contents=None):
        return f"GatheredWeight(shape={tuple(self.shape)}, dtype={self.dtype})"

    def quantized(self, o):
        """int8 (N, K) and its scales, for a layer with these options."""
        if o.layout != _c.OUT_IN or not o.per_channel:
            raise ValueError(
                "octile: a weight that FSDP2 gathers as int8 is (OUT, IN) with one scale per output channel"
            )
        return self._q, self._scale


def _local(weight):
    """The part of a parameter that this rank holds."""
    return getattr(weight, "_local_tensor", weight)


def gathers_int8(weight):
    """Whether this parameter is one that prepare_() made."""
    return isinstance(_local(weight), (ShardedWeight, GatheredWeight))


def _like(weight, values):
    """`values` distributed as the parameter `weight`, if it is."""
    if _local(weight) is weight:
        return values
    from torch.distributed.tensor import DTensor

    words = {"run_check": False, "shape": weight.shape, "stride": weight.stride()}
    return DTensor.from_local(values, weight.device_mesh, weight.placements, **words)


def _save(layer, state_dict, prefix, _):
    """state_dict() gets the plain values: the same memory, and always the same tensor, so that its version counter and
    that of its local tensor show writes."""
    name, weight = f"{prefix}weight", layer._parameters["weight"]
    if name in state_dict and state_dict[name] is not weight and gathers_int8(weight):
        local = _local(weight)
        if local._state.given is None:
            local._state.given = _like(weight.detach(), local._values.detach())
        state_dict[name] = local._state.given


def _assign(layer, state_dict, prefix, metadata, *_):
    """load_state_dict(assign=True) puts a plain tensor in the parameter's place."""
    name, weight = f"{prefix}weight", layer._parameters["weight"]
    if metadata.get("assign_to_params_buffers") and name in state_dict and gathers_int8(weight):
        given = state_dict[name].detach()
        if gathers_int8(given):
            return
        state_dict[name] = _like(given, ShardedWeight(_local(given), _local(weight)._whole))


def _refusal(layer):
    from .training import Linear

    weight = layer._parameters.get("weight")
    if not isinstance(layer, Linear):
        return "its weight is (IN, OUT), and shards along IN have no scale per output channel; use octile.Linear"
    split = layer._parallel is not None and weight.device_mesh == layer._parallel.mesh and not gathers_int8(weight)
    if type(weight) is not nn.Parameter and not split:
        kind = type(_local(weight) if gathers_int8(weight) else weight).__name__
        return f"its weight is a {kind}, not a plain parameter: prepare_() comes before fully_shard()"
    if not layer.per_channel:
        return ONE_SCALE
    return CACHED if layer._weight_cache is not None else ""


def prepare_(model):
    """Makes torch's FSDP2 gather the weights of `model`'s octile.Linear layers as int8; returns the layers' names.

        octile.quantize_(model, octile.Int8Training(backward="int8"))
        octile.fsdp.prepare_(model)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())

    Call it after quantize_() and before fully_shard() and the optimizer: each weight becomes a new parameter over
    the same values. Sharded parameters stay float, and state_dict() holds plain tensors. docs/reference/many-gpus.md has
    the rest.

    Raises ValueError, and changes nothing, if there is no octile.Linear, if one of octile's training layers cannot be
    gathered as int8, or if another module uses its weight too.
    """
    from .training import _Trainable

    layers = {name or "the model": m for name, m in model.named_modules() if isinstance(m, _Trainable)}
    if not layers:
        raise ValueError("octile: the model has no octile.Linear; quantize_(model, Int8Training()) comes first")
    for name, layer in layers.items():
        if reason := _refusal(layer):
            raise ValueError(f"octile: {name} cannot gather int8: {reason}")
    ours = {id(layer.weight) for layer in layers.values()}
    for name, module in model.named_modules():
        if not isinstance(module, _Trainable) and any(id(p) in ours for p in module._parameters.values()):
            raise ValueError(f"octile: {name or 'the model'} uses the weight of an octile.Linear, and would read int8")
    likeness = None
    if torch.distributed.is_available():
        from . import agreement

        likeness = _Likeness({name: agreement.described(layer) for name, layer in layers.items()})
    made = {}
    for layer in layers.values():
        old, shards = layer.weight, layer._parallel
        if id(old) not in made:
            local = _local(old).detach()
            group = shards.group if shards is not None and shards.row and shards.exact else None
            sharded = _like(old, ShardedWeight(local, _Whole(*local.shape, group), _State(likeness)))
            made[id(old)] = nn.Parameter(sharded, requires_grad=old.requires_grad)
        layer.weight = made[id(old)]
        layer.register_state_dict_post_hook(_save)
        layer.register_load_state_dict_pre_hook(_assign)
    return list(layers)
