"""octile.torchtitan, with the parts of torchtitan 0.3 that it uses: the tests do not install torchtitan."""

import dataclasses
import sys
import types

import octile
import pytest
import torch
from octile import fsdp
from torch import nn


@dataclasses.dataclass(kw_only=True, slots=True)
class ModuleConfig:
    param_init: dict | None = None
    sharding_config: object | None = None


class Module(nn.Module):
    Config = ModuleConfig


class TitanLinear(nn.Linear, Module):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(ModuleConfig):
        in_features: int
        out_features: int
        bias: bool = False


class Converter:
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config:
        model_compile_enabled: bool = False


@dataclasses.dataclass
class ModelConfig:
    wq: TitanLinear.Config
    lm_head: TitanLinear.Config
    layers: list

    def traverse(self, kind):
        for name in ("wq", "lm_head"):
            if isinstance(getattr(self, name), kind):
                yield name, getattr(self, name), self, name
        for i, layer in enumerate(self.layers):
            if isinstance(layer, kind):
                yield f"layers.{i}", layer, self.layers, i


@pytest.fixture
def titan():
    with pytest.MonkeyPatch.context() as patch:
        for name, content in {
            "torchtitan": {},
            "torchtitan.components": {},
            "torchtitan.components.quantization": {"QuantizationConverter": Converter},
            "torchtitan.models": {},
            "torchtitan.models.common": {},
            "torchtitan.models.common.linear": {"Linear": TitanLinear},
            "torchtitan.protocols": {},
            "torchtitan.protocols.module": {"Module": Module},
        }.items():
            module = types.ModuleType(name)
            vars(module).update(content)
            patch.setitem(sys.modules, name, module)
        from octile import torchtitan

        yield torchtitan
        patch.delitem(sys.modules, "octile.torchtitan")
        patch.delattr(octile, "torchtitan")


def test_converts(titan):
    init = {"weight": nn.init.ones_}
    config = ModelConfig(
        TitanLinear.Config(in_features=8, out_features=16, bias=True, param_init=init),
        TitanLinear.Config(in_features=8, out_features=16),
        [TitanLinear.Config(in_features=16, out_features=8)],
    )
    converted = titan.Int8LinearConverter(titan.Int8LinearConverter.Config(backward="int8-128")).convert(config)
    assert type(converted.lm_head) is TitanLinear.Config
    assert converted.wq.param_init is init
    for given in (converted.wq, converted.layers[0]):
        with torch.device("meta"):
            layer = titan.Int8Linear(given)
        layer.to_empty(device="cpu")
        layer.reset_parameters()
        assert layer.backward == "int8-128" and isinstance(layer, Module)
        assert fsdp.gathers_int8(layer.weight) and (layer.bias is None) == (not given.bias)
        plain = octile.Linear(layer.in_features, layer.out_features, given.bias, backward="int8-128")
        plain.load_state_dict(layer.state_dict())
        x = torch.randn(4, layer.in_features)
        assert torch.equal(layer(x), plain(x))
    with pytest.raises(ValueError, match="Int8Linear takes no DTensors"):
        layer.parallelize(None)
    words = titan.Int8LinearConverter.Config(gather_int8=False, filter_fqns=[])
    root = titan.Int8LinearConverter(words).convert(config)
    assert isinstance(root.lm_head, titan.Int8Linear.Config)
    assert type(titan.Int8Linear(root.lm_head).weight) is nn.Parameter
