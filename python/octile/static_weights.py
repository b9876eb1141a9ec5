"""cache_weights_(): quantized weights in buffers that stay where they are, for torch.compile and CUDA graphs.

A graph cannot look at a version counter, so it quantizes the weight in every forward. With these buffers it reads
them instead, and they are brought up to date in place: after every step of an optimizer that holds the weight, after
load_state_dict(), and in eager code whenever the version counter has moved.
"""

import functools
import threading
import warnings
import weakref

import torch
from torch.nn.parameter import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import _c
from .weight_cache import WeightCache, quantized

BUFFERS = ("weight_int8", "weight_int8_transposed", "weight_int8_scale")


class StaticWeight:
    """In place of a layer's WeightCache: its quantized weight, in the layer's buffers."""

    __slots__ = ("__weakref__", "_doubted", "_layer", "_marked", "fills", "name")

    def __init__(self, layer, name):
        self._layer, self.name = weakref.ref(layer), name
        self.fills = 0
        self.build(layer)
        with _lock:
            _alive.add(self)

    def build(self, layer):
        """Makes the buffers anew."""
        w, o = layer.weight, layer._options
        for name, value in zip(BUFFERS, quantized(w, o, o.dx == _c.INT8), strict=True):
            layer.register_buffer(name, value, persistent=False)
        self._mark(w, o)

    def _mark(self, w, o):
        self._marked, self._doubted = (weakref.ref(w), _state(w, o)), False
        self.fills += 1

    def clear(self):
        """The next eager forward quantizes anew."""
        self._doubted = True

    def forget(self):
        """Lets go of the parameter."""
        self._marked = None

    def weight(self):
        layer = self._layer()
        return None if layer is None else layer.weight

    def is_current(self):
        layer = self._layer()
        if layer is None:
            return True
        w, o = layer.weight, layer._options
        return self._marked is not None and self._marked[0]() is w and self._marked[1] == _state(w, o)

    def remove(self):
        """Gives the layer back its WeightCache."""
        layer = self._layer()
        with _lock:
            _alive.discard(self)
        if layer is not None and layer._weight_cache is self:
            for name in BUFFERS:
                layer._buffers.pop(name, None)
                layer._non_persistent_buffers_set.discard(name)
            layer._weight_cache = WeightCache()

    def get(self, w, o, both, training):
        """(wq, wt or None, scale), brought up to date first if the version counter has moved."""
        layer = self._layer()
        if type(w) is not Parameter or torch._C._len_torch_dispatch_stack():
            return quantized(w, o, both)
        marked = self._marked and self._marked[0]()
        if marked is not None and marked is not w and not self._doubted:
            return quantized(w, o, both)  # a guest, of torch.func.functional_call: not for the buffers
        if self._doubted or not self.is_current():
            self.refresh()
        return tuple(layer._buffers[name] for name in BUFFERS)

    def refresh(self):
        """Quantizes the weight into the buffers."""
        layer = self._layer()
        if layer is None:
            return
        w, o = layer.weight, layer._options
        held = [layer._buffers[name] for name in BUFFERS]
        fresh = quantized(w, o, o.dx == _c.INT8)
        with torch.no_grad():
            for name, old, new in zip(BUFFERS, held, fresh, strict=True):
                if old is not None and new is not None and _kind(old) == _kind(new):
                    old.copy_(new)
                else:  # the options or the shape have changed: what was compiled for the old ones is compiled anew
                    layer._buffers[name] = new
        self._mark(w, o)

    def backward_ran(self):
        pass


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
    stale = sorted(static.name for static in _held_by(optimizer) if not static.is_current())
    if stale:
        warnings.warn(
            f"octile: the weights of {', '.join(stale)} have changed since they were quantized, outside the "
            "optimizer; compiled forwards since then have used the old ones. Call refresh() after such changes",
            stacklevel=3,
        )


def _after_step(optimizer, *_):
    for static in _held_by(optimizer):
        static.refresh()


@functools.cache
def _watch_optimizers():
    """Once, for all optimizers: one may be made anew. A compiled step() breaks its graph here."""
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
        _watch_optimizers()

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
    if isinstance(layer._weight_cache, StaticWeight):
        layer._weight_cache.refresh()


def cache_weights_(model, *optimizers):
    """Lets compiled and captured graphs read quantized weights from buffers, instead of quantizing in every forward.

    Every octile.Linear and octile.QuantizedLinear in `model` gets non-persistent buffers with its int8 weight, in the
    orientations that its forward and backward read. They are refreshed in place after each step() of any optimizer of
    torch's that holds the weight, and after load_state_dict(). (`optimizers` are only checked: some wrappers run no
    hooks.) Returns an object with refresh(), stale() and remove().

    **A compiled or captured graph cannot see that a weight has changed in any other way** (assigned under no_grad(), an
    average copied in, a step by hand, a pruned value): it goes on with the old int8 weight until refresh() is called.
    Such a change is warned of at the next step, if the version counter saw it. Eager forwards see what the version
    counter shows, and no more.

    A compiled step() of whichever optimizer breaks its graph at the hooks, from then on. torch.func.functional_call with
    another weight does not reach a compiled forward. Copies of the model come without the buffers, so torch.optim.swa_utils.AveragedModel, which pairs the buffers of the
    model and its copy, cannot be used on such a model.

    Raises ValueError if there is no such layer or a weight is not a plain parameter (a sharded one), TypeError for an
    optimizer that is none of torch's, or only wraps one.
    """
    from .training import _Trainable

    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"octile: {type(optimizer).__name__} is not a torch.optim.Optimizer")
        if not getattr(type(optimizer).step, "hooked", False):  # set by torch's Optimizer.__init__
            raise TypeError(
                f"octile: step() of {type(optimizer).__name__} runs no hooks; hand over the optimizer inside"
            )
    layers = {name or "the layer": m for name, m in model.named_modules() if isinstance(m, _Trainable)}
    if not layers:
        raise ValueError("octile: the model has no octile.Linear and no octile.QuantizedLinear")
    for name, layer in layers.items():
        if type(layer._parameters.get("weight")) is not Parameter:
            raise ValueError(f"octile: the weight of {name} is a {type(layer.weight).__name__}, not a plain parameter")
        if BUFFERS[0] in layer._buffers:
            raise ValueError(f"octile: the weight of {name} is cached already")
    return CachedWeights(layers)
