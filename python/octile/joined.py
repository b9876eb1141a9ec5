"""Layers for inference that read the same input, multiplied as one.

join_(model)   queries, keys and values; gate and up

Each layer remains a separate module: its buffers are parts of the joined ones, so state_dicts and checkpoints are as before.
The first layer that is called with an x multiplies for all of them, and those after it take their parts. If x or the bias
needs a gradient, each layer multiplies separately. pack_() packs joined layers as one: the first then has the packed weight
of all of them, and the others an empty one.
"""

import copy
from typing import NamedTuple

import torch

from .functional import QuantizedInput, _any_autocast, autocast_dtype, check_input, run_frozen
from .inference import W4A8Linear, W4A16Linear, W8A8Linear, W8A16Linear, _Inference

NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_KINDS = (W8A8Linear, W8A16Linear, W4A8Linear, W4A16Linear)


class Joined:
    """What the layers `parts` share: `layer`, which has all their channels, or None while they are on several devices."""

    def __init__(self, parts):
        self.parts, self.layer, self.held, self.unshared = parts, None, None, False
        self.built = []  # _tensors() of each part
        self.sizes = [part.out_features for part in parts]
        self.build()
        for index, part in enumerate(parts):
            part._joined = (self, index)

    def __getstate__(self):
        return self.__dict__ | {"held": None, "built": []}

    def __setstate__(self, state):
        self.__dict__ |= state | {"unshared": True}  # pickles hold each tensor's memory by itself

    def build(self):
        """Joins the buffers, which the parts then see parts of; a packed weight is that of all already."""
        first = self.parts[0]
        layer = copy.copy(first)
        layer._joined, layer.out_features = None, sum(self.sizes)
        layer._parameters = {}
        layer._buffers = dict.fromkeys((*first._buffers, "bias")) | {"packed_weight": first._buffers["packed_weight"]}
        names = _Inference._KEPT if self._own_biases() else (*_Inference._KEPT, "bias")
        with torch.inference_mode(False), torch.no_grad():
            for name in names:
                if first._buffers.get(name) is not None:
                    layer._buffers[name] = torch.cat([part._buffers[name] for part in self.parts])
            layer._align()
        for part, begin in zip(self.parts, self._begins(), strict=True):
            for name in names:
                if (joined := layer._buffers[name]) is not None:
                    part._buffers[name] = joined.narrow(0, begin, part.out_features)
            part._unpacked = None
        self.layer, self.unshared = layer, False
        # As the parts have them: one that is replaced is another tensor.
        self.biases = self._biases()
        self._watch()

    def _watch(self):
        """Finds the tensors of the weight that count their changes, and those that the parts have now."""
        self.built = [_tensors(part) for part in self.parts]
        buffers = (self.layer._buffers[name] for name in ("packed_weight", *_Inference._KEPT))
        self.watched = [t for t in buffers if t is not None and not t.is_inference()]

    def pack_(self):
        """Packs the weights of all parts as one."""
        layer = self.whole_layer()
        layer.pack_()
        for part in self.parts:
            part._buffers |= dict.fromkeys(_Inference._KEPT)
            part._buffers["packed_weight"] = layer._buffers["packed_weight"].new_empty(0)
            part._absent_last()
        self.parts[0]._buffers["packed_weight"] = layer._buffers["packed_weight"]
        self.held = None
        self._watch()

    def whole_layer(self):
        """The layer of all parts. Raises RuntimeError while they are on several devices."""
        if self.unshared:
            self.follow()
        if self.layer is None:
            devices = ", ".join(sorted({str(part._device()) for part in self.parts}))
            raise RuntimeError(
                f"octile: joined layers that are packed belong on one device, and these are on {devices}"
            )
        return self.layer

    def plain_weight(self, index):
        """plain_weight() of this part of a packed layer."""
        begin, size = self._begins()[index], self.sizes[index]
        return tuple(None if t is None else t.narrow(0, begin, size) for t in self.whole_layer().plain_weight())

    def repack(self, index, plain):
        """Writes the plain weight of a part into the packed one, in place."""
        layer, begin = self.whole_layer(), self._begins()[index]
        whole = [None if t is None else t.clone() for t in layer.plain_weight()]
        for held, new in zip(whole, plain, strict=True):
            if new is not None:
                held.narrow(0, begin, self.sizes[index]).copy_(new)
        layer._buffers["packed_weight"].copy_(layer._pack(*whole))
        self.held = layer._unpacked = None

    def _begins(self):
        return [sum(self.sizes[:index]) for index in range(len(self.sizes))]

    def _biases(self):
        return [part._bias() for part in self.parts]

    def _own_biases(self):
        """Whether the biases cannot be parts of one buffer: some are parameters, missing or of another type."""
        biases = [part._buffers.get("bias") for part in self.parts]
        if all(bias is None for bias in biases):
            return any(part._bias() is not None for part in self.parts)
        return any(bias is None or bias.dtype is not biases[0].dtype for bias in biases)

    def _whole(self):
        """Whether each part's buffers are parts of the layer's, where they belong."""
        if self.parts[0]._buffers["packed_weight"] is not self.layer._buffers["packed_weight"]:
            return False
        names = _Inference._KEPT
        if not self._own_biases():
            names = (*names, "bias")
            if (self.layer._buffers["bias"] is None) != (self.parts[0]._buffers.get("bias") is None):
                return False
        return all(
            (joined := self.layer._buffers[name]) is None or part._buffers[name].data_ptr() == joined[begin].data_ptr()
            for part, begin in zip(self.parts, self._begins(), strict=True)
            for name in names
        )

    def follow(self):
        """Adapts to buffers of a part that were replaced."""
        self.held, self.unshared = None, False
        if self.layer is not None and self._whole():
            if not self._own_biases():
                self.biases = self._biases()
            self._watch()
            return
        self.layer, self.built = None, []
        scales = [part._buffers["weight_scale"] for part in self.parts]
        kinds = {(str(part._device()), s is not None and s.dtype) for part, s in zip(self.parts, scales, strict=True)}
        if len(kinds) == 1:  # else some parts have not been moved yet
            self.build()

    def _replaced(self, index):
        """Whether a part has other tensors than follow() has seen: torch.func.functional_call() and assignments do that."""
        if not self.built or torch.compiler.is_compiling():  # torch.export puts fake tensors there
            return False
        weight, scale, zero_point, packed = _tensors(self.parts[index])
        built = self.built[index]
        return weight is not built[0] or scale is not built[1] or zero_point is not built[2] or packed is not built[3]

    def output(self, index, x):
        """Part `index`'s output for x: its columns of one product for all parts, which the first caller runs."""
        part, like = self.parts[index], x.like if type(x) is QuantizedInput else x
        if not isinstance(like, torch.Tensor):
            check_input(x, part.in_features)  # raises
        if self.unshared or self._replaced(index):
            self.follow()
        bias = part._bias()
        if self.layer is None:
            if part._buffers["packed_weight"] is not None:
                self.whole_layer()  # raises: a part has no packed weight of its own
            return part._run(x, bias)
        if torch.is_grad_enabled() and (like.requires_grad or (bias is not None and bias.requires_grad)):
            return self._alone(index, x, bias)
        held, state, y = self.held, self._state(like), None
        if held is not None and held.like is like and held.state == state and held.has_bias(index, bias):
            y = held.outputs.pop(index, None)  # each is handed out once, to one thread
        if y is None:
            biases = self._biases()
            # Of outputs that are changed in place, autograd asks none of the others.
            outputs = torch.unsafe_split_with_sizes(self.layer._run(x, self._all_biases(biases)), self.sizes, -1)
            self.held = held = _Held(like, state, dict(enumerate(outputs)), biases, [_version(bias) for bias in biases])
            y = held.outputs.pop(index)
        if index == len(self.sizes) - 1:
            self.held = None
        return y

    def _alone(self, index, x, bias):
        """A part's own node of autograd, so that outputs may be changed in place and differentiated one by one."""
        part, begin = self.parts[index], self._begins()[index]
        if self.layer._buffers["packed_weight"] is None:
            return part._run(x, bias)
        plain = (None if t is None else t.narrow(0, begin, part.out_features) for t in self.layer._unpacked_weight())
        return run_frozen(x, *plain, bias, part.in_features, part._ACTIVATION, part._product)

    def _all_biases(self, biases):
        joined = self.layer._buffers["bias"]
        if all(bias is None for bias in biases):
            return None
        if joined is not None and all(bias is built for bias, built in zip(biases, self.biases, strict=True)):
            return joined
        some = next(bias for bias in biases if bias is not None)
        return torch.cat([
            some.new_zeros(size) if bias is None else bias.detach()
            for bias, size in zip(biases, self.sizes, strict=True)
        ])  # fmt: skip

    def _state(self, like):
        """What else an output depends on: modes, and how often x and the weight were changed in place."""
        if torch.compiler.is_compiling():
            return torch.is_grad_enabled(), autocast_dtype(like)
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _any_autocast() and autocast_dtype(like)
        return *modes, 0 if like.is_inference() else like._version, *[t._version for t in self.watched]


def _tensors(part):
    """The tensors of its weight."""
    b = part._buffers
    return b["quantized_weight"], b["weight_scale"], b["weight_zero_point"], b["packed_weight"]


class _Held(NamedTuple):
    """What a product for all has left for the parts that ask later."""

    like: torch.Tensor
    state: tuple
    outputs: dict[int, torch.Tensor]
    biases: list
    versions: list

    def has_bias(self, index, bias):
        return self.biases[index] is bias and self.versions[index] == _version(bias)


def _version(tensor):
    if tensor is None or torch.compiler.is_compiling() or tensor.is_inference():
        return 0
    return tensor._version


def _refusal(layers):
    """Why these cannot be joined, or None."""
    first = layers[0]
    if any(type(layer) not in _KINDS for layer in layers):
        return "not all are W8A8Linear, W8A16Linear, W4A8Linear or W4A16Linear"
    alike = {(type(layer), layer.in_features, layer.weight_dtype, layer._product) for layer in layers}
    if len(alike) > 1 or any(layer.format != first.format for layer in layers):
        return "their formats, types or in_features differ"
    for layer in layers:
        if layer._buffers["packed_weight"] is not None:
            return "they are packed: join them first"
        if layer._parallel is not None or layer.experts > 1 or layer._joined is not None or layer.in_out:
            return "one is split, joined already, of experts or a Conv1D"
        if "bias" in layer._parameters or (layer._buffers["bias"] is None) != (first._buffers["bias"] is None):
            return "some have a bias and some have none, or a bias is a parameter"
        if layer.weight_scale.dim() == 1 and layer.weight_scale.numel() != layer.out_features:
            return "a scale is for a whole weight"
    if len({str(layer._device()) for layer in layers}) > 1:
        return "they are on several devices"
    return None


def join_(model, names=NAMES):
    """Joins layers for inference that read the same input, in place; returns the names of the joined layers.

    names: tuples of names of children of one module, in the order in which it calls them. The buffers of each layer become
    views of the joined buffers, which takes no additional memory, and its output is a part of the joined output. W8A8 and
    W4A8 keep the same bits; layers that do not quantize x sum in another order. With gradients, each layer multiplies
    separately. Forward hooks run as before. Between the calls of a group x must not change: under torch.inference_mode and
    torch.compile an in-place change goes undetected. Compiled code uses the model's own weights, also under
    torch.func.functional_call(). pack_() afterwards packs each group as one; its state_dict then loads
    into a model that is joined and packed in the same way. Raises ValueError for a name that is not one of a tuple of strings.
    """
    for group in names:
        if isinstance(group, str) or not all(isinstance(name, str) for name in group):
            raise ValueError(f"octile: names has {group!r}, expected tuples of names of layers")
    done = []
    for prefix, module in model.named_modules():
        for group in names:
            layers = [module._modules.get(name) for name in group]
            if len(layers) < 2 or not all(isinstance(layer, _Inference) for layer in layers):
                continue
            if _refusal(layers) is None:
                Joined(layers)
                done += [f"{prefix}.{name}" if prefix else name for name in group]
    return done
