"""octile.vllm: the kernel classes, in vLLM if it is installed, else in the part of it that vllm_interface.py provides."""

import dataclasses
import importlib
import importlib.util
import inspect
import itertools
import pathlib
import re
import sys
from types import SimpleNamespace

import octile
import pytest
import torch
import vllm_interface
from octile import awq_gptq, quantizer

REAL = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not REAL, reason="vLLM is not installed")

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def vllm():
    """vllm.model_executor.kernels.linear, on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if REAL:
            from vllm import platforms
            from vllm.platforms.cpu import CpuPlatform

            patch.setattr(platforms, "_current_platform", CpuPlatform())
            from vllm.model_executor import parameter

            patch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: 0)
            patch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: 1)
        else:
            for name, module in vllm_interface.modules().items():
                patch.setitem(sys.modules, name, module)
        linear = importlib.import_module("vllm.model_executor.kernels.linear")
        importlib.import_module("octile.vllm").register()
        yield linear
    if not REAL:
        del sys.modules["octile.vllm"], octile.vllm


@pytest.fixture
def types():
    return sys.modules["vllm.scalar_type"].scalar_types


def config_of(vllm, *values, **fields):
    """MPLinearLayerConfig, of a layer that does not reorder its inputs: vLLM 0.25 has a field for that."""
    if any(field.name == "has_g_idx" for field in dataclasses.fields(vllm.MPLinearLayerConfig)):
        fields = {"has_g_idx": False} | fields
    return vllm.MPLinearLayerConfig(*values, **fields)


def parameter(data, output_dim=0):
    p = torch.nn.Parameter(data.clone(), requires_grad=False)
    p.output_dim = output_dim
    return p


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(kernel, layer, module, dtype, rows=(1, 3, 64)):
    for m in rows:
        x = normal(m, module.in_features, seed=m, dtype=dtype)
        y = kernel.apply_weights(layer, x, None if module.bias is None else module.bias.to(dtype))
        assert y.dtype is dtype and torch.equal(y, module(x))
    x = normal(2, 3, module.in_features, dtype=dtype)
    assert torch.equal(kernel.apply_weights(layer, x, module.bias), module(x))


# ---- Selection ----


def names(kernels):
    return [kernel.__name__ for kernel in kernels]


def test_first_last_and_off(vllm, monkeypatch):
    import octile.vllm as plugin

    lists = vllm._POSSIBLE_INT8_KERNELS, vllm._POSSIBLE_KERNELS
    ours = plugin.OctileInt8LinearKernel, plugin.OctileWeightLinearKernel
    plugin.register()  # vLLM may load a plug-in several times
    for possible, kernel in zip(lists, ours, strict=True):
        for platform in (plugin.PlatformEnum.CPU, plugin.PlatformEnum.CUDA):
            assert possible[platform][0] is kernel and possible[platform].count(kernel) == 1
    held = [(p, list(kernels)) for possible in lists for p in possible.values() for kernels in (p,)]
    try:
        for place, index in (("off", None), ("last", -1)):
            for kernels, before in held:
                kernels[:] = [kernel for kernel in before if kernel not in ours]
            monkeypatch.setenv("OCTILE_VLLM", place)
            plugin.register()
            for possible, kernel in zip(lists, ours, strict=True):
                kernels = possible[plugin.PlatformEnum.CPU]
                assert kernel not in kernels if index is None else kernels.index(kernel) == len(kernels) - 1 > 0
        monkeypatch.setenv("OCTILE_VLLM", "perhaps")
        with pytest.raises(ValueError, match="octile: OCTILE_VLLM is 'perhaps', expected one of first, last, off"):
            plugin.register()
    finally:
        for kernels, before in held:
            kernels[:] = before


def test_the_compile_cache_knows_the_kernels(vllm, monkeypatch):
    import octile.vllm as plugin

    ours = plugin.envs.environment_variables.pop("OCTILE_VLLM")
    try:
        factors = [plugin.envs.compile_factors()]
        monkeypatch.setenv("OCTILE_VLLM", "off")
        plugin.register()
        assert plugin.envs.compile_factors() == factors[0]
        for place, isa in (("last", ""), ("first", ""), ("first", "avx2")):
            monkeypatch.setenv("OCTILE_VLLM", place)
            monkeypatch.setenv("OCTILE_ISA", isa)
            plugin.register()
            factors.append(plugin.envs.compile_factors())
        assert all(a != b for a, b in itertools.combinations(factors, 2))
        assert octile.__version__ in factors[-1]["OCTILE_VLLM"]
        monkeypatch.setattr(plugin.envs, "environment_variables", None)
        with pytest.warns(UserWarning, match="octile: .* VLLM_DISABLE_COMPILE_CACHE=1 turns it off"):
            plugin.register()
    finally:
        monkeypatch.undo()
        plugin.envs.environment_variables["OCTILE_VLLM"] = ours


def test_vllm_chooses_ours_and_can_be_told_not_to(vllm, types, monkeypatch):
    arguments = {"is_channelwise": True, "is_static_input_scheme": False, "module_name": "q_proj"}
    config = config_of(vllm, (64, 32), (64, 32), types.uint4b8, torch.bfloat16, 32, False)
    assert type(vllm.init_int8_linear_kernel(input_symmetric=True, **arguments)).__name__ == "OctileInt8LinearKernel"
    assert vllm.choose_mp_linear_kernel(config).__name__ == "OctileWeightLinearKernel"
    other = type(vllm.init_int8_linear_kernel(input_symmetric=False, **arguments))  # refused: a zero point
    assert other.__name__ == "CPUInt8ScaledMMLinearKernel"
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "OctileInt8LinearKernel,OctileWeightLinearKernel")
    assert type(vllm.init_int8_linear_kernel(input_symmetric=True, **arguments)) is other
    assert vllm.choose_mp_linear_kernel(config).__name__ == "CPUWNA16LinearKernel"


REFUSALS = {
    "weights of .*, expected int4, uint4b8, uint4 or uint8b128": {"weight_type": "uint8"},
    "weights of .* must have zero points": {"weight_type": "uint4"},
    "weights of .* must not have zero points": {"zero_points": True},
    "does not support activations of torch.float8_e4m3fn with 4-bit weights": {"act_type": torch.float8_e4m3fn},
    "does not support activations of torch.int8 with 8-bit": {"weight_type": "uint8b128", "act_type": torch.int8},
    "outputs have the type of x, and this layer asks for torch.bfloat16": {"out_type": torch.bfloat16},
    "groups of 16, expected 32, 64, 128 or whole rows": {"group_size": 16},
    "groups of 128 do not divide the 192 inputs of this shard": {"partition_weight_shape": (192, 64)},
    "groups of 128 do not divide the 64 inputs of this shard": {"partition_weight_shape": (64, 64)},
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_refusals(vllm, types, reason):
    from octile.vllm import OctileWeightLinearKernel

    fields = {"full_weight_shape": (256, 64), "partition_weight_shape": (256, 64), "weight_type": "uint4b8"}
    fields |= {"act_type": torch.float16, "group_size": 128, "zero_points": False} | REFUSALS[reason]
    fields["weight_type"] = getattr(types, fields["weight_type"])
    answer, why = OctileWeightLinearKernel.can_implement(config_of(vllm, **fields))
    assert answer is False and re.fullmatch(reason + ".*", why)


def test_reordered_inputs_are_refused(types):
    from octile.vllm import OctileWeightLinearKernel

    fields = {"weight_type": types.uint4b8, "act_type": torch.float16, "out_type": None, "group_size": 32}
    shapes = {"full_weight_shape": (64, 64), "partition_weight_shape": (64, 64)}
    config = SimpleNamespace(**fields, **shapes, zero_points=False, has_g_idx=True)
    answer, why = OctileWeightLinearKernel.can_implement(config)
    assert answer is False and "reorders its inputs (g_idx)" in why


def test_refusals_of_the_platform(vllm, types, monkeypatch):
    import octile.vllm as plugin

    config = config_of(vllm, (64, 32), (64, 32), types.uint4b8, torch.bfloat16, 32, False)
    platform = plugin.current_platform
    monkeypatch.setattr(platform, "_enum", plugin.PlatformEnum.ROCM)
    refused = False, "requires a CPU or an NVIDIA GPU"
    assert plugin.OctileInt8LinearKernel.is_supported() == refused
    assert plugin.OctileWeightLinearKernel.can_implement(config) == refused
    monkeypatch.setattr(platform, "_enum", plugin.PlatformEnum.CUDA)
    refused = False, "requires compute capability 8.0, and this GPU has 7.5"
    assert plugin.OctileInt8LinearKernel.is_supported(75) == refused
    assert plugin.OctileWeightLinearKernel.get_min_capability() == 80


# ---- The layers ----


def int8_layer(vllm, module, static=False, widths=None, channelwise=True):
    """A layer as CompressedTensorsW8A8Int8 has loaded it, with the tensors of an octile layer, and its kernel."""
    kernel = vllm.init_int8_linear_kernel(channelwise, static, True, "layer")
    layer = torch.nn.Module()
    layer.logical_widths = widths or [module.out_features]
    layer.weight = parameter(module.quantized_weight.contiguous())
    layer.weight_scale = parameter(module.weight_scale.reshape(-1, 1) if channelwise else module.weight_scale)
    layer.input_scale = parameter(module.input_scale) if static else None
    layer.input_zero_point = layer.azp_adj = None
    kernel.process_weights_after_loading(layer)
    return kernel, layer


def not_packed(monkeypatch):
    """As on a GPU, where kernels of int8 weights read none that are packed."""
    monkeypatch.setattr(importlib.import_module("octile.vllm"), "_pack", lambda *_: None)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96, 64), (50, 33)])
def test_w8a8(vllm, monkeypatch, dtype, shape, packed):
    if not packed:
        not_packed(monkeypatch)
    for bias, per_channel in itertools.product((True, False), (True, False)):
        linear = torch.nn.Linear(*shape, bias=bias, dtype=dtype)
        module = octile.W8A8Linear.from_linear(linear, per_channel=per_channel)
        same(*int8_layer(vllm, module, channelwise=per_channel), module, dtype)
        module = octile.W8A8StaticLinear.from_linear(linear, 0.02, per_channel=per_channel)
        same(*int8_layer(vllm, module, static=True, channelwise=per_channel), module, dtype)


def test_fused_layers_with_a_scale_each(vllm):
    parts = [octile.W8A8Linear.from_linear(torch.nn.Linear(64, n, bias=False), per_channel=False) for n in (48, 16, 16)]
    fused = octile.W8A8Linear(64, 80, bias=False, per_channel=False)
    fused.quantized_weight = torch.cat([part.quantized_weight for part in parts])
    fused.weight_scale = torch.cat([part.weight_scale for part in parts])
    kernel, layer = int8_layer(vllm, fused, widths=[48, 16, 16], channelwise=False)
    x = normal(5, 64)
    assert torch.equal(kernel.apply_weights(layer, x), torch.cat([part(x) for part in parts], -1))


def weight_layer(vllm, types, module, kind, input_quant=None, act_type=torch.bfloat16):
    """A layer of 4- or 8-bit weights as vLLM's scheme `kind` has loaded it."""
    n, k, bits = module.out_features, module.in_features, module.format.bits
    weight, scale, points = module.plain_weight()
    levels = module.format.levels(weight, k)
    layer, zero = torch.nn.Module(), None
    if kind == "int4":
        layer.weight_packed = layer.weight = parameter(levels)
        layer.weight_scale = parameter(scale)
    elif kind == "compressed-tensors":
        layer.weight_packed = parameter(quantizer.pack_words(levels, bits))
        layer.weight_scale = parameter(scale.reshape(n, -1))
        if points is not None:
            layer.weight_zero_point = parameter(quantizer.pack_words(points.T.contiguous()).T.contiguous())
    else:  # GPTQ's, and AWQ's once vLLM has changed its order
        layer.qweight = parameter(quantizer.pack_words(levels, bits).T.contiguous(), 1)
        layer.scales = parameter(scale.reshape(n, -1).T.contiguous(), 1)
        layer.qzeros = parameter(torch.zeros(scale.numel() // n, n // 8, dtype=torch.int32), 1)
        if points is not None:
            layer.qzeros = parameter(quantizer.pack_words(points.T.contiguous()).T.contiguous())
    if kind == "gptq":
        words = "qweight", "scales", "qzeros"
    else:
        words = "weight_packed", "weight_scale", None if kind == "int4" else "weight_zero_point"
    zero = types.uint4 if points is not None else types.uint4b8 if bits == 4 else types.uint8b128
    stored = types.int4 if kind == "int4" else zero
    group = module.group or (k if kind == "int4" else -1)
    config = config_of(vllm, (k, n), (k, n), stored, act_type, group, points is not None)
    if input_quant is not None:
        layer._humming_input_quant_config = input_quant
    kernel = vllm.choose_mp_linear_kernel(config)(config, *words)
    kernel.process_weights_after_loading(layer)
    return kernel, layer


PER_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True, "group_size": 0}
FOUR_BITS = {
    "W4A16": (octile.W4A16Linear, {}, {"kind": "compressed-tensors"}),
    "W4A16, GPTQ": (octile.W4A16Linear, {}, {"kind": "gptq"}),
    "W4A16, AWQ": (octile.W4A16Linear, {"zero_point": True}, {"kind": "gptq"}),
    "W4A16, zero points": (octile.W4A16Linear, {"zero_point": True}, {"kind": "compressed-tensors"}),
    "W4A8, pack-quantized": (octile.W4A8Linear, {}, {"kind": "compressed-tensors", "input_quant": PER_TOKEN}),
    "W4A8, int-quantized": (octile.W4A8Linear, {}, {"kind": "int4"}),
    "W4A8, GPTQ with VLLM_MARLIN_INPUT_DTYPE=int8": (octile.W4A8Linear, {}, {"kind": "gptq", "act_type": torch.int8}),
}


def four_bit_module(kind, group, n=48, zero_point=False, k=128):
    """With all values of levels and zero points."""
    module = kind(k, n, bias=False, group=group, zero_point=zero_point)
    module.quantized_weight = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    module.weight_scale = (torch.rand_like(module.weight_scale) / 50).bfloat16().float()
    if zero_point:
        module.weight_zero_point = torch.randint(-8, 8, module.weight_scale.shape, dtype=torch.int32)
    return module.pack_()


@pytest.mark.parametrize("group", [32, 128, 0])
@pytest.mark.parametrize("name", FOUR_BITS)
def test_four_bits(vllm, types, monkeypatch, name, group):
    kind, words, how = FOUR_BITS[name]
    module = four_bit_module(kind, group, **words)
    kernel, layer = weight_layer(vllm, types, module, **how)
    same(kernel, layer, module, torch.bfloat16)
    held = {id(p): p for p in layer.parameters()}.values()
    assert sum(p.numel() * p.element_size() for p in held) <= module.packed_weight.numel() + 64  # nothing is kept twice
    not_packed(monkeypatch)
    plain = kind(128, 48, bias=False, group=group, **words)
    plain.quantized_weight, plain.weight_scale, plain.weight_zero_point = module.plain_weight()
    same(*weight_layer(vllm, types, module, **how), plain, torch.bfloat16)


@pytest.mark.parametrize("group", [None, 64])
@pytest.mark.parametrize("kind", ["compressed-tensors", "gptq"])
def test_w8a16(vllm, types, group, kind):
    linear = torch.nn.Linear(128, 48, dtype=torch.float16)
    module = octile.W8A16Linear.from_linear(linear, group=group)
    kernel, layer = weight_layer(vllm, types, module, kind, act_type=torch.float16)
    same(kernel, layer, module.pack_(), torch.float16)


def test_activations_that_are_not_known(vllm, types):
    wanted = PER_TOKEN | {"num_bits": 4}
    with pytest.raises(ValueError, match="octile: activations are to be quantized as .*VLLM_DISABLED_KERNELS"):
        weight_layer(vllm, types, four_bit_module(octile.W4A8Linear, 32), "compressed-tensors", wanted)


def test_compiled(vllm, types):
    """One graph for any number of rows, with the ops in it."""
    module = octile.W8A8Linear.from_linear(torch.nn.Linear(64, 32))
    kernel, layer = int8_layer(vllm, module)
    four = four_bit_module(octile.W4A8Linear, 32)
    four_kernel, four_layer = weight_layer(vllm, types, four, "int4", act_type=torch.float32)

    @torch.compile(fullgraph=True, dynamic=True, backend="eager")
    def model(x, z):
        return kernel.apply_weights(layer, x, module.bias).relu(), four_kernel.apply_weights(
            four_layer, z, four.bias
        ) * 2

    for rows in (3, 17):
        x, z = normal(rows, 64), normal(rows, 128)
        with torch.inference_mode(), torch.compiler.set_stance("default" if rows == 3 else "fail_on_recompile"):
            y, t = model(x, z)
        assert torch.equal(y, module(x).relu()) and torch.equal(t, four(z) * 2)


# ---- The exact pair ----

ROWS = (1, 2, 17, 64, 333, 4096)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trainer_and_server_agree_to_the_bit(vllm, tmp_path, dtype):
    """A training layer's forward, W8A8Linear, a loaded checkpoint and vLLM's kernel agree; whole and in column shards."""
    plain = torch.nn.Sequential(torch.nn.Linear(160, 96, dtype=dtype))
    trained = torch.nn.Sequential(octile.Linear.from_linear(plain[0], backward="int8"))
    served = torch.nn.Sequential(torch.nn.Linear(160, 96, dtype=dtype))
    served.load_state_dict(trained.state_dict())
    octile.quantize_(served, octile.W8A8Dynamic())
    octile.save_checkpoint(served, tmp_path / "w8a8")
    blank = torch.nn.Sequential(torch.nn.Linear(160, 96, dtype=dtype))
    loaded = octile.load_checkpoint_(blank, tmp_path / "w8a8")

    kernel, layer = int8_layer(vllm, loaded[0])
    shards = []
    for start in (0, 48):
        part = octile.W8A8Linear(160, 48, dtype=dtype)
        for name in ("quantized_weight", "weight_scale", "bias"):
            setattr(part, name, getattr(loaded[0], name)[start : start + 48])
        shards.append((*int8_layer(vllm, part), part.bias))
    for m in ROWS:
        x = normal(m, 160, seed=m, dtype=dtype)
        y = trained(x.clone().requires_grad_()).detach()
        with torch.inference_mode():
            assert torch.equal(served(x), y) and torch.equal(loaded(x), y)
            assert torch.equal(kernel.apply_weights(layer, x, loaded[0].bias), y)
            assert torch.equal(torch.cat([k.apply_weights(s, x, bias) for k, s, bias in shards], -1), y)


def test_row_parallel_is_as_exact_as_its_all_reduce(vllm):
    """Each rank quantizes its own part of x, and floats are summed: not the whole layer's bits."""
    module = octile.W8A8Linear.from_linear(torch.nn.Linear(256, 64, bias=False))
    total, x = 0, normal(32, 256)
    for start in (0, 128):
        part = octile.W8A8Linear(128, 64, bias=False)
        part.quantized_weight = module.quantized_weight[:, start : start + 128].contiguous()
        part.weight_scale = module.weight_scale
        kernel, layer = int8_layer(vllm, part)
        y = kernel.apply_weights(layer, x[:, start : start + 128])
        assert torch.equal(y, part(x[:, start : start + 128].contiguous()))
        total = total + y
    whole = module(x)
    assert not torch.equal(total, whole) and (total - whole).norm() < 0.02 * whole.norm()


def test_row_parallel_with_exact_sums():
    """All-reducing the maxima and then the integer sums would give the whole layer's bits."""
    ops, module = torch.ops.octile, octile.W8A8Linear.from_linear(torch.nn.Linear(256, 64, bias=False))
    x, total = normal(32, 256), 0
    xq, _, scale = ops.quantize(x, 1, 0)  # with the maxima over all ranks
    ones = torch.ones(64, dtype=torch.float64)
    for at in (slice(0, 128), slice(128, 256)):
        part = module.quantized_weight[:, at].contiguous()
        total = total + ops.linear_int8(xq[:, at].contiguous(), ones[:1], part, ones, None, 0, torch.float64)
    assert torch.equal(total, total.round())  # integers: their sum is exact in any order
    y = total.float() * (scale[:, None] * module.weight_scale)
    assert torch.equal(y, module(x))


# ---- Other weights in place ----


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_refit(vllm, monkeypatch, dtype, packed):
    from octile.vllm import refit_

    if not packed:
        not_packed(monkeypatch)

    old, new = (torch.nn.Linear(96, 80, dtype=dtype) for _ in range(2))
    expected = octile.W8A8Linear.from_linear(new)
    kernel, layer = int8_layer(vllm, octile.W8A8Linear.from_linear(old))
    held = {name: p.data_ptr() for name, p in layer.named_parameters()}
    refit_(layer, new.weight[:48])
    refit_(layer, new.weight[48:], row=48)
    assert {name: p.data_ptr() for name, p in layer.named_parameters()} == held
    same(kernel, layer, octile.W8A8Linear.from_linear(new), dtype)
    assert torch.equal(layer.weight, expected.pack_().packed_weight if packed else expected.quantized_weight)
    for weight, row in ((new.weight[:, :64], 0), (new.weight, 1), (new.weight, -1), (new.weight.to("meta"), 0)):
        with pytest.raises(ValueError, match="octile: weight is .* for channels from .*; the layer has"):
            refit_(layer, weight, row)
    with pytest.raises(ValueError, match="takes a layer of OctileInt8LinearKernel, not Linear"):
        refit_(new, new.weight)


# ---- vLLM itself ----


def test_entry_point():
    text = (pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text()
    name, target = re.search(r'\[project.entry-points."vllm.general_plugins"\]\n(\w+) = "(.*)"', text).groups()
    module, function = target.split(":")
    assert name == "octile" and callable(getattr(importlib.import_module(module), function))


_AWQ_ORDER = torch.argsort(awq_gptq._PLACE)


def _awq_words(levels):
    return quantizer.pack_words(levels.unflatten(1, (-1, 8))[:, :, _AWQ_ORDER].flatten(1))


def checkpoint_of(module, kind):
    """The tensors of a layer, as in a file."""
    (weight, scale, points), k = module.plain_weight(), module.in_features
    levels = module.format.levels(weight, k)
    if kind in ("gptq", "awq"):
        tensors = {"scales": scale.T.contiguous()}
        if kind == "gptq":
            tensors["qweight"] = quantizer.pack_words(levels).T.contiguous()
            tensors["qzeros"] = torch.full_like(quantizer.pack_words(scale.T.to(torch.int8)), 0x77777777)
            return tensors
        return tensors | {"qweight": _awq_words(levels.T.contiguous()), "qzeros": _awq_words(points.T.contiguous())}
    tensors = {"weight_scale": scale.reshape(len(scale), -1)}
    if points is not None:
        tensors["weight_zero_point"] = quantizer.pack_words(points.T.contiguous()).T.contiguous()
    if kind == "int-quantized":
        return tensors | {"weight": levels, "weight_packed": levels}
    return tensors | {"weight_packed": quantizer.pack_words(levels, module.format.bits)}


def schemes():
    """By name: vLLM's scheme, the octile layer that it should equal, and its layout in files."""
    from compressed_tensors.quantization import QuantizationArgs
    from vllm.model_executor.layers.quantization import auto_awq, auto_gptq
    from vllm.model_executor.layers.quantization.compressed_tensors import schemes as of

    per_token = QuantizationArgs(num_bits=8, type="int", strategy="token", symmetric=True, dynamic=True)
    gptq = auto_gptq.AutoGPTQConfig(4, 64, False, True, False, {}, {})
    awq = auto_awq.AutoAWQConfig(4, 64, True, False)
    four, eight = torch.nn.Linear(256, 64, bias=False), torch.nn.Linear(256, 64, bias=False)
    symmetric, points = (four_bit_module(octile.W4A16Linear, 64, 64, z, 256) for z in (False, True))
    a8 = four_bit_module(octile.W4A8Linear, 64, 64, False, 256)
    int8, int8_weights = octile.W8A8Linear.from_linear(eight), octile.W8A16Linear.from_linear(four)
    int8_weights.weight_scale = int8_weights.weight_scale.bfloat16().float()  # vLLM keeps these in the model's type
    return {
        "W8A8": (lambda: of.CompressedTensorsW8A8Int8("channel", False, True), int8, "int-quantized"),
        "W4A16": (lambda: of.CompressedTensorsWNA16("group", 4, 64), symmetric, "pack-quantized"),
        "W4A16, zero points": (lambda: of.CompressedTensorsWNA16("group", 4, 64, False), points, "pack-quantized"),
        "W8A16": (lambda: of.CompressedTensorsWNA16("channel", 8), int8_weights, "pack-quantized"),
        "W4A8": (lambda: of.CompressedTensorsWNA8Int(4, "group", 64, True, per_token), a8, "pack-quantized"),
        "W4A8, int8": (lambda: of.CompressedTensorsW4A8Int("group", 4, 64), a8, "int-quantized"),
        "GPTQ": (lambda: auto_gptq.AutoGPTQLinearMethod(gptq), symmetric, "gptq"),
        "AWQ": (lambda: auto_awq.AutoAWQMarlinLinearMethod(awq), points, "awq"),
    }


@needs_vllm
@pytest.mark.parametrize("name", ["W8A8", "W4A16", "W4A16, zero points", "W8A16", "W4A8", "W4A8, int8", "GPTQ", "AWQ"])
def test_vllms_schemes_and_shards(monkeypatch, name):
    """Created, loaded and run by vLLM's own classes: whole, in two shards of the outputs, and in two of the inputs."""
    from vllm.model_executor import parameter as parameters

    from vllm.model_executor.layers.quantization.compressed_tensors import schemes as of

    if name == "W4A8" and not hasattr(of, "CompressedTensorsWNA8Int"):
        pytest.skip("vLLM 0.25 has no such scheme")
    made, module, files = schemes()[name]
    tensors, (n, k) = checkpoint_of(module, files), (module.out_features, module.in_features)

    def load(rank, direction, outputs, inputs):
        for dim in ("rank", "world_size"):
            number = rank if dim == "rank" else k * n // (inputs * outputs)
            monkeypatch.setattr(parameters, f"get_tensor_model_parallel_{dim}", lambda number=number: number)
        method, layer = made(), torch.nn.Module()
        layer.bias = None
        sizes = {"input_size": k, "output_size": n, "input_size_per_partition": inputs}
        method.create_weights(
            layer=layer,
            output_partition_sizes=[outputs],
            params_dtype=torch.bfloat16,
            weight_loader=lambda *_: None,
            **sizes,
        )
        for tensor, p in layer.named_parameters():
            if tensor in tensors:
                getattr(p, f"load_{direction}_parallel_weight")(tensors[tensor])
        method.process_weights_after_loading(layer)
        assert type(method.kernel).__module__ == "octile.vllm"
        return lambda x: (method.apply if hasattr(method, "apply") else method.apply_weights)(layer, x, None)

    x = normal(7, k, dtype=torch.bfloat16)
    expected = module(x)
    assert torch.equal(load(0, "column", n, k)(x), expected)
    parts = [load(rank, "column", n // 2, k)(x) for rank in (0, 1)]
    assert torch.equal(torch.cat(parts, -1), expected)
    total = sum(
        load(rank, "row", n, k // 2)(x[:, at]).float() for rank, at in enumerate((slice(0, 128), slice(128, 256)))
    )
    assert (total - expected.float()).norm() < 0.02 * expected.float().norm()


@needs_vllm
def test_vllm_finds_the_entry_point(tmp_path, monkeypatch):
    from vllm import plugins

    folder = tmp_path / "octile-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: octile\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("[vllm.general_plugins]\noctile = octile.vllm:register\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = plugins.load_plugins_by_group(plugins.DEFAULT_PLUGINS_GROUP)
    assert found["octile"] is sys.modules["octile.vllm"].register


def _parameters(of):
    return [name for name in inspect.signature(of).parameters]


@needs_vllm
def test_the_part_is_vllms(vllm, types):
    """vllm_interface.py agrees with vLLM."""
    version = sys.modules["vllm"].__version__
    if re.match(r"0\.([12]?\d|3[0-2])\.", version):
        pytest.skip(f"it is that of 0.33, and this is {version}")
    for kernel in ("Int8ScaledMMLinearKernel", "MPLinearKernel"):
        ours, theirs = getattr(vllm_interface, kernel), getattr(vllm, kernel)
        for name, method in vars(ours).items():
            if inspect.isfunction(method):
                assert _parameters(method) == _parameters(getattr(theirs, name)), (kernel, name)
    for name in ("register_linear_kernel", "init_int8_linear_kernel", "choose_mp_linear_kernel"):
        assert _parameters(getattr(vllm_interface, name)) == _parameters(getattr(vllm, name)), name
    for name in ("Int8ScaledMMLinearLayerConfig", "MPLinearLayerConfig"):
        assert _parameters(getattr(vllm_interface, name)) == _parameters(getattr(vllm, name)), name
    for name in ("int4", "uint4", "uint4b8", "uint8b128", "uint8"):
        ours, theirs = getattr(vllm_interface.scalar_types, name), getattr(types, name)
        for field in ("exponent", "mantissa", "signed", "bias"):
            assert getattr(ours, field) == getattr(theirs, field), name
    replace = sys.modules["vllm.model_executor.utils"].replace_parameter
    for other in (torch.ones(2, 3), torch.ones(3, dtype=torch.uint8)):
        kept = []
        for function in (replace, vllm_interface.replace_parameter):
            layer = torch.nn.Module()
            layer.weight = held = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)
            address = held.data_ptr()
            function(layer, "weight", other)
            assert torch.equal(layer.weight.data, other)
            kept.append((layer.weight is held, layer.weight.data_ptr() == address))
            function(layer, "weight", None)
            assert layer.weight is None
        assert kept[0] == kept[1]
