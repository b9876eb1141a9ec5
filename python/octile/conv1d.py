"""Conv1D: what Int8Training makes of transformers' Conv1D. Only where transformers is loaded."""

from torch import nn
from transformers.pytorch_utils import Conv1D as _Conv1D

from .training import _Trainable


class Conv1D(_Trainable, _Conv1D):
    """transformers' Conv1D whose products are of int8, as those of octile.Linear: weight (IN, OUT), bias (OUT)."""

    _layout = "in_out"
    __repr__ = nn.Module.__repr__

    @classmethod
    def from_conv1d(cls, conv, **options):
        """A layer with the parameters of `conv`, shared; options: as octile.Linear's."""
        new = cls.__new__(cls)
        nn.Module.__init__(new)
        new._configure(**options)
        new.nf, new.nx, new.in_features, new.out_features = conv.nf, conv.nx, conv.nx, conv.nf
        new.weight, new.bias = conv.weight, conv.bias
        return new.train(conv.training)
