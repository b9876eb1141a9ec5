"""cache_weights_(): quantized weights in buffers with fixed addresses.

Layers quantize their weight in every forward. With these buffers they read it instead, in eager code, in compiled and
in captured graphs. The buffers are refreshed in place: after every step of an optimizer that holds the weight,
after load_state_dict(), and in eager code whenever the version counter has moved.
"""

import functools
import threading
import warnings
import weakref

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import _c
from .functional import quantize_weight

BUFFERS = ("weight_int8", "weight_int8_transposed", "weight_int8_scale")


def _quantized(w, o):
    """quantize_weight, as tensors that any later backward can save."""
    with torch.inference_mode(False), torch.no_grad():
        return quantize_weight(w, o, o.dx == _c.INT8)


class StaticWeight:
    """The quantized weight of a layer, in the layer's buffers."""

    __slots__ = ("__weakref__", "_doubted", "_layer", "_state", "_weight", "name")

    def __init__(self, layer, name):
        self._layer, self.name = weakref.ref(layer), name
        self.build(layer)
        with _lock:
            _alive.add(self)

    def build(self, layer):
        """Fills the buffers again."""
        w, o = layer.weight, layer._options
        for name, value in zip(BUFFERS, _quantized(w, o), strict=True):
            layer.register_buffer(name, value, persistent=False)
        self._mark(w, o)

    def _mark(self, w, o):
        # The parameter itself: torch.utils.swap_tensors() refuses one that something refers to weakly.
        self._weight, self._state, self._doubted = w, _state(w, o), False

    def doubt(self, w=None):
        """The next eager forward quantizes again. w: the weight that the layer was given, if any."""
        self._weight, self._doubted = self._weight if w is None else w, True

    def weight(self):
        layer = self._layer()
        return None if layer is None else layer.weight

    def is_current(self):
        layer = self._layer()
        if layer is None:
            return True
        w, o = layer.weight, layer._options
        return self._weight is w and self._state == _state(w, o)

    def remove(self):
        """The layer is as it was before."""
        layer = self._layer()
        with _lock:
            _alive.discard(self)
        if layer is not None and layer._weight_cache is self:
            for name in BUFFERS:
                layer._buffers.pop(name, None)
                layer._non_persistent_buffers_set.discard(name)
            del layer._weight_cache

    def get(self, w, o, both):
        """(wq, wt or None, scale), brought up to date first if the version counter has moved."""
        guest = w is not self._weight  # of torch.func.functional_call: not for the buffers
        if guest or type(w) is not Parameter or torch._C._len_torch_dispatch_stack():
            return quantize_weight(w.detach(), o, both)
        if self._doubted or self._state != _state(w, o):
            self.refresh()
        buffers = self._layer()._buffers
        return tuple([buffers[name] for name in BUFFERS])

    def refresh(self):
        """Quantizes the weight into the buffers."""
        layer = self._layer()
        if layer is None:
            return
        w, o = layer.weight, layer._options
        held = [layer._buffers[name] for name in BUFFERS]
        fresh = _quantized(w, o)
        with torch.no_grad():
            for name, old, new in zip(BUFFERS, held, fresh, strict=True):
                if old is not None and new is not None and _kind(old) == _kind(new):
                    old.copy_(new)
                else:  # the options or the shape have changed: what was compiled for the old ones is recompiled
                    layer._buffers[name] = new
        self._mark(w, o)


def _kind(t):
    return t.shape, t.dtype, t.device


def _state(w, o):
    return w._version, w.data_ptr(), w.shape, w.stride(), w.dtype, o


_alive = weakref.WeakSet()
_lock = threading.Lock()


def _held_by(optimizer):
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    with _lock:
        statics = list(_alive)
    return [static for static in statics if id(static.weight()) in held]


def _before_step(optimizer, *_):
    held = _held_by(optimizer)
    for static in held:
        if hasattr(static.weight(), "_local_tensor"):  # a DTensor
            raise RuntimeError(
                f"octile: the weight of {static.name} was sharded after cache_weights_(): call remove() before that"
            )
    stale = sorted(static.name for static in held if not static.is_current())
    if stale:
        warnings.warn(
            f"octile: the weights of {', '.join(stale)} have changed since they were quantized, outside the "
            "optimizer; compiled forwards since then have used the old ones. Call refresh() after such changes",
            stacklevel=3,
        )


def _after_step(optimizer, *_):
    for static in _held_by(optimizer):
        static.refresh()


def _new_parameter(module, name, parameter):
    # From the dictionary: a wrapper's __getattr__ may look into the module that it wraps.
    if name == "weight" and (cache := module.__dict__.get("_weight_cache")) is not None:
        cache.doubt(parameter)


@functools.cache
def _watch():
    """Once, for all optimizers: one may be made anew. A compiled step() breaks its graph here. And once for all layers:
    FSDP2 sets parameters faster on modules without a __setattr__ of their own."""
    register_module_parameter_registration_hook(_new_parameter)
    register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))
    register_optimizer_step_post_hook(torch.compiler.disable(_after_step))


class CachedWeights:
    """What cache_weights_() returns. Does not keep the model alive."""

    def __init__(self, layers):
        self._hooks = []
        for name, layer in layers.items():
            layer._weight_cache = StaticWeight(layer, name)
            self._hooks.append(layer.register_load_state_dict_post_hook(_refresh_layer))
        self._statics = weakref.WeakSet(layer._weight_cache for layer in layers.values())
        _watch()

    def refresh(self):
        """Quantizes every weight again. To be called after any change that is neither a step nor load_state_dict()."""
        for static in self._statics:
            static.refresh()

    def stale(self):
        """Names of the layers whose weight has changed since it was quantized, as its version counter tells."""
        return sorted(static.name for static in self._statics if not static.is_current())

    def remove(self):
        """Takes buffers and hooks away: the layers are as they were before cache_weights_()."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for static in list(self._statics):
            static.remove()
        self._statics.clear()


def _refresh_layer(layer, _):
    if layer._weight_cache is not None:
        layer._weight_cache.refresh()


def cache_weights_(model, *optimizers):
    """Quantizes the weights of `model` once per optimizer step instead of in every forward.

    Every octile.Linear and octile.QuantizedLinear in `model` gets non-persistent buffers with its int8 weight, in the
    orientations that its forward and backward read. Eager code, compiled graphs and captured graphs read them. This
    pays off with several forwards per step (gradient accumulation, checkpointing) and in evaluation with few rows.

    The buffers are refreshed in place after each step() of any torch optimizer that holds the weight, and after
    load_state_dict(). (`optimizers` are only checked: some wrappers run no hooks.) Eager forwards also refresh them
    when the parameter's version counter has moved (any in-place operation that autograd sees), when the parameter was
    replaced, swapped or its storage moved, and after train() or eval() has changed the mode.

    **Every other change of a weight goes undetected: call refresh() on the returned object after it**, or the layer keeps
    using the old weight. In eager code these are writes through `.data`, `.detach()` or a raw pointer that keep the
    storage: averages (EMA) copied in, PEFT's merge and unmerge, optimizers without torch's hooks. A
    compiled or captured graph notices only steps and load_state_dict(): it also misses assignments under no_grad(), pruning
    and manual steps. The next step warns of changes that moved the version counter.

    Returns an object with refresh(), stale() (the layers whose version counter has moved) and remove().

    Limits: a compiled step() of any optimizer breaks its graph at the hooks. torch.func.functional_call with another
    weight does not reach a compiled forward. A step between a forward and its backward is an error. Copies of the model
    do not have the buffers, so torch.optim.swa_utils.AveragedModel, which pairs the buffers of the model and its copy,
    cannot be used on such a model.

    Raises ValueError if there is no such layer, if FSDP2 shards one, or if a weight is not a plain parameter or was made
    in inference mode; TypeError for an optimizer that is not torch's, or only wraps one.
    """
    from .training import _Trainable

    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"octile: {type(optimizer).__name__} is not a torch.optim.Optimizer")
        if not getattr(type(optimizer).step, "hooked", False):  # set by torch's Optimizer.__init__
            raise TypeError(f"octile: step() of {type(optimizer).__name__} runs no hooks; pass the optimizer inside it")
    layers = {name or "the layer": m for name, m in model.named_modules() if isinstance(m, _Trainable)}
    if not layers:
        raise ValueError("octile: the model has no octile.Linear and no octile.QuantizedLinear")
    for name, layer in layers.items():
        if type(layer._parameters.get("weight")) is not Parameter:
            raise ValueError(f"octile: the weight of {name} is a {type(layer.weight).__name__}, not a plain parameter")
        if layer.weight.is_inference():
            raise ValueError(
                f"octile: the weight of {name} was made in inference mode, where torch does not count changes"
            )
        if BUFFERS[0] in layer._buffers:
            raise ValueError(f"octile: the weight of {name} is cached already")
    # Between a forward and a backward its parameters are plain ones.
    for name, module in model.named_modules():
        if hasattr(type(module), "set_requires_gradient_sync"):  # of torch's FSDPModule
            raise ValueError(f"octile: {name or 'the model'} is sharded by FSDP2, whose weights cannot be cached")
    return CachedWeights(layers)
