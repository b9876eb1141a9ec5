"""Octile for PyTorch: linear layers with int8 products, forward and backward, on the CPU and on NVIDIA GPUs.

Layers for training     Linear (a torch.nn.Linear), QuantizedLinear and CustomLinearFunction (the homework's)
Layers for inference    W8A8Linear, W4A16Linear
Whole models            quantize_(model, Int8Training() or W8A8Dynamic() or W4A16())
A function              linear(x, w, b)
Weights                 cache_weights_(model, optimizer) for compiled training, clear_weight_cache(model)
The homework's kernels  octile.homework
"""

from . import _fallback, homework
from ._ops import BINDING
from .convert import W4A16, Int8Training, Report, W8A8Dynamic, quantize_
from .functional import linear
from .homework import CustomLinearFunction
from .inference import W4A16Linear, W8A8Linear
from .static_weights import cache_weights_
from .training import Linear, QuantizedLinear, clear_weight_cache

__version__ = _fallback.library().version()

__all__ = [
    "BINDING",
    "W4A16",
    "CustomLinearFunction",
    "Int8Training",
    "Linear",
    "QuantizedLinear",
    "Report",
    "W4A16Linear",
    "W8A8Dynamic",
    "W8A8Linear",
    "__version__",
    "cache_weights_",
    "clear_weight_cache",
    "homework",
    "linear",
    "quantize_",
]
