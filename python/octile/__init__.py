"""Octile for PyTorch: linear layers with int8 products, forward and backward, on the CPU and on NVIDIA GPUs.

Layers for training     Linear (a torch.nn.Linear), QuantizedLinear and CustomLinearFunction (the reference interface)
Layers for inference    W8A8Linear, W8A8StaticLinear, W8A16Linear, W4A16Linear, W4A8Linear
Quantized inputs        GELU, SwiGLU, RMSNorm, LayerNorm, quantize_input(x): inputs of training layers, quantized in
                        the pass that computes them
Whole models            quantize_(model, config): Int8Training, W8A8Dynamic, W8A8Static, W8A16, W4A16 or W4A8
Calibration             with calibrate(model) as calibration: model(x)
Faster small batches    pack_(model), join_(model)
Checkpoints             load_checkpoint_(model, folder), save_checkpoint(model, folder)
A function              linear(x, w, b), for arrays of numpy, JAX and CuPy too; without torch, only it and octile.arrays exist
Weights                 cache_weights_(model, optimizer) quantizes them once per step instead of in every call
Many GPUs               octile.fsdp.prepare_(model): torch's FSDP2 gathers the weights as int8; octile.parallel (a separate import):
                        ColumnParallel and RowParallel; ExpertParallel; octile.torchtitan: a converter
Transformers            octile.transformers (a separate import): OctileConfig for from_pretrained(), from_checkpoint(), Decoding
Measured kernels        use_tuning(file): the choices of `octile tune` that plans follow
The tile language       octile.tile (a separate import): load(file, kernel) compiles a kernel and launches it on tensors
vLLM                    octile.vllm: loaded by vLLM itself; refit_() for weights that change
The reference interface octile.compat: QuantizedLinear's kernels by name
"""

import warnings

from . import _c, arrays

__version__ = _c.library().version()

__all__ = ["__version__", "arrays", "linear"]

_OF_TORCH = [
    "BINDING",
    "W4A8",
    "W4A16",
    "W8A16",
    "Calibration",
    "CustomLinearFunction",
    "Experts",
    "GELU",
    "Int8Training",
    "LayerNorm",
    "Linear",
    "QuantizedLinear",
    "QuantizedInput",
    "RMSNorm",
    "Report",
    "SwiGLU",
    "W4A8Linear",
    "W4A16Linear",
    "W8A8Dynamic",
    "W8A8Linear",
    "W8A8Static",
    "W8A8StaticLinear",
    "W8A16Linear",
    "cache_weights_",
    "calibrate",
    "clear_weight_cache",
    "compat",
    "fsdp",
    "join_",
    "load_checkpoint_",
    "pack_",
    "quantize_",
    "quantize_input",
    "save_checkpoint",
    "use_tuning",
]

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    from .arrays import linear
else:
    from . import compat, fsdp
    from ._ops import BINDING
    from .calibration import Calibration, calibrate
    from .checkpoint import load_checkpoint_
    from .checkpoint_writer import save_checkpoint
    from .compat import CustomLinearFunction
    from .convert import W4A8, W4A16, W8A16, Int8Training, Report, W8A8Dynamic, W8A8Static, quantize_
    from .experts import Experts
    from .functional import QuantizedInput, linear
    from .inference import W4A8Linear, W4A16Linear, W8A8Linear, W8A8StaticLinear, W8A16Linear, pack_
    from .joined import join_
    from .quantized_input import GELU, LayerNorm, RMSNorm, SwiGLU, quantize_input
    from .static_weights import cache_weights_
    from .training import Linear, QuantizedLinear, clear_weight_cache
    from .tuning import use_tuning

    __all__ += _OF_TORCH


def __getattr__(name):
    if name == "ExpertParallel" and "fsdp" in globals():  # torch.distributed.tensor takes long to import
        from .expert_parallel import ExpertParallel

        return ExpertParallel
    if name in _OF_TORCH:
        raise ImportError(
            f"octile.{name} needs PyTorch, which is not installed; octile.linear and octile.arrays do not: "
            "see docs/how-to/numpy.md"
        )
    if name == "homework":  # deprecated, as octile/homework.py
        warnings.warn(
            "octile.homework is now octile.compat; the old name will be removed in 0.2", DeprecationWarning, 2
        )
        return compat
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
