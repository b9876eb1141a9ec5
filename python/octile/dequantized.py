"""The float weight of a layer that holds a quantized one, for models that read `layer.weight` themselves."""

import torch


class DequantizedWeight(torch.Tensor):
    """A read-only view of a layer's weight as floats, (OUT, IN), of a Conv1D (IN, OUT): dequantized by each operation that reads its values.

    Its shape, dtype and device cost nothing: T5 asks for them in every forward. Writes raise RuntimeError. A part of
    it (weight[0], weight.T) is a plain tensor of its own: what is written there is lost.
    """

    _is_hf_initialized = True  # Transformers, which initializes what it has not loaded, leaves it alone

    @staticmethod
    def __new__(cls, layer):
        shape = (layer.in_features, layer.out_features) if layer.in_out else (layer.out_features, layer.in_features)
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=layer.weight_dtype, device=layer._device())
        self._layer = layer
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        for one in written(cls, function, arguments, keywords):
            one._refuse()
        if function is torch.ops.aten.detach.default:  # no way around the refusal
            return cls(arguments[0]._layer)
        arguments, keywords = torch.utils._pytree.tree_map_only(cls, cls.dense, (arguments, keywords))
        return function(*arguments, **keywords)

    def dense(self):
        """A plain tensor with the values."""
        return self._layer._readable().to(self.device, self.dtype)

    def _refuse(self):
        raise RuntimeError(f"octile: {read_only(self._layer)}")

    def __setitem__(self, index, value):
        self._refuse()

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, value):
        self._refuse()

    # What torch does not hand to subclasses, and would answer with a null pointer.

    def data_ptr(self):
        raise RuntimeError("octile: a dequantized weight has no memory of its own; clone() it")

    def __deepcopy__(self, memo):
        return self.dense()

    def __reduce_ex__(self, protocol):
        return self.dense().__reduce_ex__(protocol)


def _of_dense(name):
    def method(self, *arguments, **keywords):
        return getattr(self.dense(), name)(*arguments, **keywords)

    return method


for _name in ("numpy", "tolist", "__dlpack__", "untyped_storage"):
    setattr(DequantizedWeight, _name, _of_dense(_name))


def written(cls, function, arguments, keywords):
    """Those of a subclass of torch.Tensor that an operation writes to."""
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = arguments[place] if place < len(arguments) else keywords.get(argument.name)
            yield from (one for one in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(one, cls))


def read_only(layer):
    return (
        f"the weight of a {type(layer).__name__} is read-only: it is dequantized from integers. Convert the layer with "
        "to_linear(), change that, and quantize it again; see docs/how-to/errors.md#layers"
    )
