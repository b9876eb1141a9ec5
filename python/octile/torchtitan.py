"""torchtitan: a converter that trains the linear layers in int8. Written for its release 0.3.

    from octile.torchtitan import Int8LinearConverter

    model_registry("8B", converters=[Int8LinearConverter.Config(backward="int8", filter_fqns=["lm_head"])])

FSDP2 and HSDP gather the weights as int8, with parallelism.spmd_backend = "partial_dtensor". torchtitan's other backends
and its tensor parallelism multiply DTensors, which these layers do not take: refused. docs/reference/many-gpus.md has the rest.
"""

from dataclasses import dataclass, field

from torchtitan.components.quantization import QuantizationConverter
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.protocols.module import Module

from . import fsdp, training


class Int8Linear(training.Linear, Module):
    """octile.Linear, as torchtitan builds, shards and initializes modules."""

    @dataclass(kw_only=True, slots=True)
    class Config(TitanLinear.Config):
        options: dict = field(default_factory=dict)
        gather_int8: bool = True

    def __init__(self, config):
        super().__init__(config.in_features, config.out_features, config.bias, **config.options)
        if config.gather_int8:
            fsdp.prepare_(self)

    def parallelize(self, parallel_dims):
        raise ValueError(
            "octile: Int8Linear takes no DTensors, which torchtitan's tensor parallelism and its backends full_dtensor and "
            'spmd_types multiply; set parallelism.spmd_backend = "partial_dtensor" and tensor_parallel_degree = 1'
        )


class Int8LinearConverter(QuantizationConverter):
    """Replaces each Linear.Config with Int8Linear.Config, but those whose name contains one of filter_fqns."""

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        backward: str = "int8"
        """How gradients are multiplied: a word of octile.Linear."""
        rounding: str = "nearest"
        """Of dY in the int8 products: "nearest" or "stochastic"."""
        gather_int8: bool = True
        """Whether FSDP2 gathers the weights as int8; else in the type of param_dtype."""
        filter_fqns: list[str] = field(default_factory=lambda: ["lm_head"])
        """Parts of the names of layers that stay as they are."""

    def __init__(self, config):
        self.config = config

    def convert(self, model_config):
        c = self.config
        for name, old, parent, attribute in list(model_config.traverse(TitanLinear.Config)):
            if type(old) is not TitanLinear.Config or any(part in name for part in c.filter_fqns):
                continue
            new = Int8Linear.Config(
                in_features=old.in_features,
                out_features=old.out_features,
                bias=old.bias,
                param_init=old.param_init,
                sharding_config=old.sharding_config,
                options={"backward": c.backward, "rounding": c.rounding},
                gather_int8=c.gather_int8,
            )
            if parent is None:
                return new
            if isinstance(parent, list):
                parent[attribute] = new
            else:
                setattr(parent, attribute, new)
        return model_config
