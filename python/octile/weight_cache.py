"""Quantized weights that outlive a forward: quantized once per optimizer step, however many forwards there are.

A cached weight is used only while nothing says that the parameter may have changed. What is looked at, and why:

    the parameter itself, its address, shape and type    it was replaced, or its .data was
    its version counter                                   every in-place operation of torch
    steps of any torch.optim.Optimizer                    those that write past the version counter (fused, .data, kernels)
    after a backward: whether an Optimizer steps it       if none is known to, somebody may have stepped by hand
    after a backward: its .grad                           gone, zeroed or replaced: the same
    grad mode; train() and eval(); assigning the weight   the usual places where weights are swapped (averages, FSDP)
    the current CUDA stream                               the int8 tensor is ready on the stream that made it only

What none of these show is a write through `.data`, a raw pointer or a replayed CUDA graph between two forwards without
a gradient (also a .data of other values that came to lie at the old address), or by hand to a weight that an Optimizer steps as well: then call octile.clear_weight_cache(model). Nothing
is cached for weights in shared memory, inference tensors, tensors that are not parameters, and while a CUDA graph is
captured or a dispatch mode is active.
"""

import threading
import weakref

import torch
from torch.nn.parameter import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

from .functional import quantize_weight

_modes = torch._C._len_torch_dispatch_stack
_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class _Optimizers:
    """What optimizers have done since the first weight was cached."""

    def __init__(self):
        self.steps = 0
        self.hook = None
        self.lock = threading.Lock()
        self.sizes = weakref.WeakKeyDictionary()  # how many parameters of an optimizer are known
        self.parameters = {}  # weak references to it and its optimizer, by id


_optimizers = _Optimizers()


def _stepped(optimizer, *_):
    # A compiled step counts versions, and tracing this would compile it anew each time.
    if torch.compiler.is_compiling():
        return
    _optimizers.steps += 1
    size = sum(len(group["params"]) for group in optimizer.param_groups)
    if _optimizers.sizes.get(optimizer) != size:
        with _optimizers.lock:
            alive = {number: r for number, r in _optimizers.parameters.items() if r[0]() is not None}
            owner = weakref.ref(optimizer)
            alive |= {id(p): (weakref.ref(p), owner) for group in optimizer.param_groups for p in group["params"]}
            _optimizers.parameters, _optimizers.sizes[optimizer] = alive, size


def _is_stepped(w):
    references = _optimizers.parameters.get(id(w))
    return references is not None and references[0]() is w and references[1]() is not None


def _watch_optimizers():
    with _optimizers.lock:
        if _optimizers.hook is None:
            _optimizers.hook = register_optimizer_step_post_hook(_stepped)


class _Entry:
    __slots__ = ("expected", "key", "reference", "tensors")

    def __init__(self, reference, key, tensors):
        self.reference, self.key, self.tensors = reference, key, tensors
        # The version of .grad when all backwards since the quantization have added to it; None before the first.
        self.expected = None


class WeightCache:
    """The quantized weight of one layer. Threads may share it: what is kept is one object, replaced as a whole.

    Layers leave it out of their copies and pickles.
    """

    __slots__ = ("__weakref__", "_entries", "fills")

    def __init__(self):
        self.clear()
        self.fills = 0  # how many times a weight was quantized into the cache

    def clear(self):
        # Without gradients and with them: reentrant checkpointing alternates, and an average of weights that was put
        # there for an evaluation has to be gone in training.
        self._entries = [None, None]

    def get(self, w, o, both, training):
        """(wq (N, K), wt (K, N) or None, scale) of w, from the cache where it is still good. `both`: wt is needed."""
        if type(w) is not Parameter or _modes():
            return quantized(w, o, both)
        stream = 0
        if w.is_cuda:
            stream = _raw_stream(w.get_device())
            if stream and _capturing():  # the stream 0 is never captured
                return quantized(w, o, both)
        try:
            key = (w._version, w.data_ptr(), w.shape, w.stride(), w.dtype, o, stream, _optimizers.steps)
        except RuntimeError:  # an inference tensor counts no versions
            return quantized(w, o, both)
        entry = self._entries[training]
        if entry is not None and entry.reference() is w and entry.key == key:
            tensors = entry.tensors
            if (tensors[1] is not None or not both) and (entry.expected is None or _as_expected(w, entry)):
                return tensors
        tensors = quantized(w, o, both)
        if _storable(w, tensors):
            _watch_optimizers()
            entries, other = self._entries, self._entries[not training]
            entries[training] = _Entry(weakref.ref(w), key, tensors)
            if other is not None and other.key != key:
                entries[not training] = None  # out of date
            self.fills += 1
        return tensors

    def backward_ran(self):
        """A backward has made a gradient of the weight, and is about to add it to .grad."""
        for entry in self._entries:
            w = None if entry is None else entry.reference()
            if w is not None:
                entry.expected = 0 if w.grad is None else w.grad._version + 1


def _as_expected(w, entry):
    gradient = w.grad
    return gradient is not None and gradient._version == entry.expected and _is_stepped(w)


def quantized(w, o, both):
    """quantize_weight, as a tensor that any later backward can save."""
    if torch.is_inference_mode_enabled() and not w.is_inference():
        with torch.inference_mode(False), torch.no_grad():  # else a backward could not save the result
            return quantize_weight(w, o, both)
    with torch.no_grad():
        return quantize_weight(w, o, both)


def _storable(w, tensors):
    return type(tensors[0]) is torch.Tensor and not w.is_meta and (w.is_cuda or not w.is_shared())
