"""Which modules are linear layers that quantize_() converts: torch.nn.Linear, and transformers' Conv1D (GPT-2).

A Conv1D computes x @ weight + bias, with weight (IN, OUT).
"""

import sys

from torch import nn


def is_conv1d(module):
    """Whether `module` is transformers' Conv1D, or of a class derived from it. Imports nothing."""
    return isinstance(module, getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", ()))


def is_linear(module):
    return isinstance(module, nn.Linear) or is_conv1d(module)


# Subclasses of torch.nn.Linear that compute what it does.
_SAME = {"transformers.models.falcon.modeling_falcon.FalconLinear"}


def is_plain_linear(module):
    """Whether it is a torch.nn.Linear, or of a class that is known to compute the same; not of any other derived one."""
    kind = type(module)
    return kind is nn.Linear or f"{kind.__module__}.{kind.__qualname__}" in _SAME


def as_linear(module):
    """`module`, or for a Conv1D a torch.nn.Linear over its parameters, the weight as a transposed view."""
    if not is_conv1d(module):
        return module
    new = nn.Linear(module.nx, module.nf, bias=False, device="meta")
    new.weight = nn.Parameter(module.weight.detach().t(), requires_grad=False)
    new.bias = module.bias
    return new.train(module.training)
