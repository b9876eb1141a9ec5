"""What quantize_() says of a model: every matrix of it, and which of them are quantized."""

import collections
import dataclasses
import math

from torch import nn

from . import inference, training
from .experts import Experts, TrainedExperts


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix of a model: a parameter of two or more dimensions, or the weight of a quantized layer."""

    name: str  # as in "block.0.weight"; a parameter that several modules share has the first of its names
    layer: str  # the class of the module that holds it
    shape: tuple[int, ...]  # of a quantized layer (OUT, IN)
    share: float  # of all parameters of the model
    quantized: bool  # whether a layer multiplies with it in quantized form
    reason: str  # why not; "" if it is

    @property
    def module(self):
        """The name of the module that holds it."""
        return self.name.rpartition(".")[0]

    def __str__(self):
        return f"{self.layer} {'x'.join(map(str, self.shape))}, {100 * self.share:.1f} % of the parameters"


class Report:
    """What quantize_() did and what it left. str() is a text for people.

    converted: names of layers. skipped: the other linear layers, including those quantized before: reasons by name.
    matrices: every matrix of the converted model. parameters: their number in the model; share: the share of them that are
    weights of quantized layers. multipliers: names of the layers that multiply their inputs. unsmoothed: layers that
    W8A8Static was asked to smooth but did not: reasons by name.
    """

    def __init__(self, config):
        self.config = config
        self.converted: list[str] = []
        self.skipped: dict[str, str] = {}
        self.matrices: list[Matrix] = []
        self.multipliers: list[str] = []
        self.unsmoothed: dict[str, str] = {}
        self.parameters = self.bytes_before = self.bytes_after = 0

    @property
    def share(self):
        return sum(matrix.share for matrix in self.matrices if matrix.quantized)

    def __str__(self):
        layers = "layer" if len(self.converted) == 1 else "layers"
        lines = [f"{self.config}: {len(self.converted)} {layers} converted, {len(self.skipped)} left as they were"]
        if self.bytes_before != self.bytes_after:
            divisor, unit = (1e6, "MB") if self.bytes_before >= 1e6 else (1e3, "kB")
            lines.append(
                f"  weights: {self.bytes_before / divisor:.1f} {unit} to {self.bytes_after / divisor:.1f} {unit}"
            )
        lines.append(
            f"  {100 * self.share:.1f} % of the model's {self.parameters:,} parameters are weights of quantized layers"
        )
        if self.multipliers:
            layers = (
                "1 layer multiplies its"
                if len(self.multipliers) == 1
                else f"{len(self.multipliers)} layers multiply their"
            )
            lines.append(f"  {layers} inputs: {', '.join(self.multipliers)}")
            lines.append("    only Octile loads a checkpoint of them; multipliers=False smooths only where it folds")
        lines += [f"  not smoothed: {name}: {reason}" for name, reason in self.unsmoothed.items()]
        lines += [f"  {name or 'the model itself'}" for name in self.converted]
        matrices = {matrix.module: matrix for matrix in self.matrices}
        for name, reason in self.skipped.items():
            known = f" ({matrices[name]})" if name in matrices else ""
            lines.append(f"  not {name or 'the model itself'}: {reason}{known}")
        for matrix in self.matrices:
            if not matrix.quantized and matrix.module not in self.skipped:
                lines.append(f"  not {matrix.name}: {matrix.reason} ({matrix})")
        return "\n".join(lines)

    __repr__ = __str__

    def count(self, model):
        """Fills matrices and parameters, of the model as it now is."""
        held: dict[int, tuple] = {}
        quantized, total = [], 0
        for name, module in model.named_modules():
            prefix = f"{name}." if name else ""
            if isinstance(module, inference._Inference):
                shape = module.out_features, module.in_features
                quantized.append((prefix + "weight", module, shape))
                total += shape[0] * shape[1] + (0 if module.bias is None else module.bias.numel())
            for own, parameter in module._parameters.items():
                if parameter is None or nn.parameter.is_lazy(parameter):
                    continue
                if id(parameter) not in held:
                    total += parameter.numel()
                    held[id(parameter)] = parameter, prefix + own, []
                held[id(parameter)][2].append(module)
        self.parameters = total

        def add(name, module, shape, reason):
            share = math.prod(shape) / total if total else 0.0
            self.matrices.append(Matrix(name, type(module).__name__, tuple(shape), share, not reason, reason))

        for name, module, shape in quantized:
            add(name, module, shape, "")
        for parameter, name, modules in held.values():
            if parameter.dim() < 2:
                continue
            ours = any(isinstance(module, training._Trainable) for module in modules) or (
                isinstance(modules[0], TrainedExperts) and name.rpartition(".")[2] in modules[0]._names
            )
            reason = "" if ours else self.skipped.get(name.rpartition(".")[0]) or _no_layer(modules[0], name)
            add(name, modules[0], parameter.shape, reason)

    def why_nothing(self):
        """Of a model in which nothing was converted."""
        if not self.skipped:
            others = collections.Counter(matrix.layer for matrix in self.matrices)
            found = ", ".join(f"{count} in {layer}" for layer, count in others.most_common(4))
            return "the model has no torch.nn.Linear and no Conv1D" + (f"; its matrices: {found}" if found else "")
        reasons = collections.Counter(self.skipped.values())
        found = [f"{reason} ({count} layers)" for reason, count in reasons.most_common(3)]
        return "; ".join(found) + ("; more in the report" if len(reasons) > 3 else "")


def _no_layer(module, name):
    """Why a matrix that belongs to no linear layer was left."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "its rows are looked up, not multiplied"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "a convolution"
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return "a recurrent layer"
    if isinstance(module, (Experts, TrainedExperts)):
        return "a bias of experts, which is added in float"
    if "expert" in f"{type(module).__name__}.{name}".lower():
        return f"experts in one tensor, which {type(module).__name__} multiplies itself: no layer to convert"
    return f"{type(module).__name__}, which is not a linear layer, uses it itself"
