"""octile.Experts equals its layers one by one; Transformers' experts converted to it; and what is refused."""

import copy
import json
import os
import subprocess

import numpy as np
import octile
import pytest
import torch
from octile import _c
from octile import experts as module_of
from op_reference import _FMA

pytestmark = pytest.mark.usefixtures("one_thread")

E, K, I, TOKENS, SLOTS = 5, 64, 96, 9, 3


def routed(generator, experts=E, slots=SLOTS):
    index = torch.stack([torch.randperm(experts, generator=generator)[:slots] for _ in range(TOKENS)])
    return index, torch.rand(TOKENS, slots, generator=generator)


def layer(kind, k, n, **words):
    float_layer = torch.nn.Linear(k, E * n, bias=False)
    return kind.from_linear(float_layer, **words)


LAYERS = {
    "w8a8": (octile.W8A8Linear, {}),
    "w8a16": (octile.W8A16Linear, {"group": 32}),
    "w4a8": (octile.W4A8Linear, {"group": 32}),
    "w4a16": (octile.W4A16Linear, {"group": 32}),
}


def part_of(whole, e):
    """The dense layer that expert e is."""
    n = whole.out_features // E
    words = {"group": whole.group} if whole.group is not None else {}
    one_scale = whole.weight_scale is not None and whole.weight_scale.shape == (1,)
    words |= {"per_channel": False} if one_scale else {}
    part = type(whole)(whole.in_features, n, bias=False, **words)
    weight, scale, _ = whole.plain_weight()
    part.quantized_weight = weight[e * n : (e + 1) * n]
    part.weight_scale = scale if one_scale else scale[e * n : (e + 1) * n]
    part._product = whole._product
    part._align()
    return part


def one_by_one(experts, x, index, weights):
    """Each expert as a dense layer; a token's experts are summed by fma in the order of its slots."""
    y = np.zeros((len(x), experts.down_proj.out_features // E), np.float32)
    for t in range(len(x)):
        for s in range(index.shape[1]):
            e = int(index[t, s])
            if 0 <= e < E:
                gate, up = part_of(experts.gate_up_proj, e)(x[t : t + 1]).chunk(2, -1)
                inner = torch.nn.functional.silu(gate) * up
                z = part_of(experts.down_proj, e)(inner.float())
                y[t] = _FMA[np.float32](np.float32(weights[t, s]), z[0].numpy(), y[t])
    return torch.from_numpy(y)


@pytest.mark.parametrize("name", LAYERS)
def test_bits(name, generator):
    kind, words = LAYERS[name]
    experts = octile.Experts(E, layer(kind, K, 2 * I, **words), layer(kind, I, K, **words))
    x, (index, weights) = torch.randn(TOKENS, K, generator=generator), routed(generator)
    index[0, 1], index[4, 0] = E, -1  # belongs to no expert
    with torch.no_grad():
        y = experts(x, index, weights)
        assert torch.equal(y, one_by_one(experts, x, index, weights))
        assert torch.equal(experts(x.view(3, 3, K), index, weights), y.view(3, 3, K))
        plain = {n: [t.clone() for t in m.plain_weight() if t is not None] for n, m in experts.named_children()}
        assert octile.pack_(experts) == ["gate_up_proj", "down_proj"]
        assert torch.equal(experts(x, index, weights), y)
        for n, m in experts.named_children():
            assert all(map(torch.equal, plain[n], [t for t in m.plain_weight() if t is not None]))
        assert torch.equal(copy.deepcopy(experts)(x, index, weights), y)
        assert experts(x[:0], index[:0], weights[:0]).shape == (0, K)
        half = experts(x.bfloat16(), index, weights)
        assert (
            half.dtype is torch.bfloat16 and torch.nn.functional.cosine_similarity(half.float(), y, dim=-1).min() > 0.99
        )
    with pytest.raises(RuntimeError, match="weights of several experts"):
        experts.gate_up_proj(x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_backward_op_is_a_loop_over_experts(dtype, generator):
    n, offsets = 40, torch.tensor([1, 4, 4, 24], dtype=torch.int32)  # two rows belong to no expert
    scale = torch.float64 if dtype is torch.float64 else torch.float32
    dy = torch.randn(25, n, generator=generator).to(dtype)
    weight, x = (
        torch.randint(-127, 128, (rows, K), dtype=torch.int8, generator=generator) for rows in (3 * n, len(dy))
    )
    weight_scale, x_scale = (torch.rand(len(t), generator=generator).to(scale) for t in (weight, x))
    for words in ((1, 1), (2, 2), (2, 1), (1, 0), (0, 2), (0, 0)):
        for more in ((0, 0, 0), (1, 7, 128)):
            block = more[2] if 2 in words else 0
            got = torch.ops.octile.grouped_linear_backward(
                dy, offsets, weight, weight_scale, x, x_scale, *words, True, scale, *more[:2], block
            )
            for e in range(3):
                rows, part = slice(*offsets[e : e + 2]), slice(e * n, (e + 1) * n)
                dx, dw, db = torch.ops.octile.linear_backward(
                    dy[rows], weight[part], weight_scale[part], x[rows], x_scale[rows], *words, True, 0, False, scale, 0,
                    more[0], more[1] + e, block,
                )  # fmt: skip
                if words[0]:
                    assert torch.equal(got[0][rows], dx)
                if words[1]:
                    assert torch.equal(got[1][part], dw) and (e != 1 or not dw.any())
                assert torch.equal(got[2][e], db)
            if words[0]:
                assert not got[0][[0, -1]].any()


GRADIENTS = LAYERS | {
    "w8a8, one scale": (octile.W8A8Linear, {"per_channel": False}),
    "w8a8, int8 dX": (octile.W8A8Linear, {"backward": "int8"}),
    "w8a16 per channel": (octile.W8A16Linear, {}),
}


def gradients(experts, forward, *leaves):
    """y, and the gradients of x, the router's weights and the biases."""
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    parameters = [experts.gate_up_proj_bias, experts.down_proj_bias]
    for p in parameters:
        p.grad = None
    y = forward(*leaves)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(8)).to(y.dtype))
    return [y.detach(), *(t.grad for t in leaves + parameters)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name, dtype, generator):
    """Equal to those of a loop of dense layers, or close where sums are rounded in another order."""
    kind, words = GRADIENTS[name]
    biases = [torch.nn.Parameter(torch.randn(E, n, generator=generator, dtype=dtype)) for n in (2 * I, K)]
    up, down = (layer(kind, k, n, **words).to(dtype) for k, n in ((K, 2 * I), (I, K)))
    dense = [[part_of(whole, e) for e in range(E)] for whole in (up, down)]
    experts = octile.Experts(E, up, down, up_bias=biases[0], down_bias=biases[1])
    x, (index, weights) = torch.randn(TOKENS, K, generator=generator, dtype=dtype), routed(generator)
    index[index == 2] = 3  # it gets no row
    index[0, 1], index[4, 0] = E, -1  # belongs to no expert

    def loop(x, weights):
        y = 0
        for s in range(SLOTS):
            rows = []
            for t in range(TOKENS):
                e = int(index[t, s])
                if not 0 <= e < E:
                    rows.append(x.new_zeros(K))
                    continue
                gate, up = (dense[0][e](x[t : t + 1]) + biases[0][e]).chunk(2, -1)
                z = dense[1][e](torch.nn.functional.silu(gate) * up) + biases[1][e]
                rows.append(z[0] * weights[t, s])
            y = y + torch.stack(rows)
        return y

    got = gradients(experts, lambda x, w: experts(x, index, w), x, weights.to(dtype))
    expected = gradients(experts, loop, x, weights.to(dtype))
    least = 0.9998 if dtype is torch.bfloat16 else 1 - 1e-6
    if name == "w8a8, int8 dX":
        least = 0.9998  # a row's gradients are summed and quantized in another order
    for g, e in zip(got, expected, strict=True):
        assert g.dtype is e.dtype and g.shape == e.shape and g.isfinite().all()
        assert torch.nn.functional.cosine_similarity(g.flatten().double(), e.flatten().double(), dim=0) > least
        assert torch.allclose(g.double().norm(), e.double().norm(), rtol=1e-2 if least < 0.9999 else 1e-5)
    assert not got[3][2].any() and not got[4][2].any()
    with torch.no_grad():
        assert torch.equal(experts(x, index, weights.to(dtype)), got[0])
    if dtype is not torch.float64:
        octile.pack_(experts)
        again = gradients(experts, lambda x, w: experts(x, index, w), x, weights.to(dtype))
        assert all(map(torch.equal, got[1:], again[1:]))


def test_sort_by_expert():
    index = torch.tensor([[2, 0], [0, 3], [-1, 2]])
    offsets, token, place = module_of.sort_by_expert(3, index)
    assert offsets.tolist() == [0, 2, 2, 4] and all(t.dtype is torch.int32 for t in (offsets, token, place))
    assert token.tolist() == [0, 1, 0, 2, 1, 2] and place.tolist() == [[2, 0], [1, 4], [5, 3]]


@pytest.mark.parametrize("name", LAYERS)
def test_compiles(name, generator):
    kind, words = LAYERS[name]
    experts = octile.Experts(E, layer(kind, K, 2 * I, **words), layer(kind, I, K, **words))
    x, (index, weights) = torch.randn(TOKENS, K, generator=generator), routed(generator)
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x, index, weights), experts(x, index, weights))
    got, expected = (
        torch.autograd.grad(module(*leaves).sum(), leaves[::2])
        for module in (compiled, experts)
        for leaves in [(x.clone().requires_grad_(), index, weights.clone().requires_grad_())]
    )
    if name == "w8a8":
        assert all(map(torch.equal, got, expected))
    else:  # grouped weights are multiplied in another way in a graph
        for g, e in zip(got, expected, strict=True):
            assert torch.allclose(g, e, rtol=1e-5, atol=1e-5 * e.abs().max())


def test_rows_of_nobody_are_zero(generator):
    offsets = torch.tensor([1, 3, 4], dtype=torch.int32)
    weight = torch.randint(-127, 128, (2 * 8, 16), dtype=torch.int8, generator=generator)
    x, scale = torch.randn(6, 16, generator=generator), torch.ones(2 * 8)
    words = 8, _c.NONE, _c.S8_PER_CHANNEL, 0, False, torch.float32
    for _ in range(10):
        torch.full((6, 8), torch.nan)  # the next tensor of this size gets this memory
        y = torch.ops.octile.grouped_linear(x, None, offsets, None, weight, scale, None, None, None, None, *words)
        assert not y[[0, 4, 5]].any() and y[1:4].all()


def test_refuses(generator):
    experts = octile.Experts(E, layer(octile.W8A8Linear, K, 2 * I), layer(octile.W8A8Linear, I, K))
    index, weights = routed(generator)
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"x is \(9, 63\); the layer's in_features"):
        experts(torch.randn(TOKENS, K - 1), index, weights)
    with torch.no_grad():
        for bad_index, bad_weights, reason in (
            (index[:5], weights[:5], r"index is \(5, 3\), expected \(9, slots\): x has 9 tokens"),
            (index.repeat(2, 1), weights.repeat(2, 1), r"index is \(18, 3\)"),
            (index[:, 0], weights[:, 0], r"index is \(9,\)"),
            (index[:, :0], weights[:, :0], r"index is \(9, 0\)"),
            (index.float(), weights, "index is torch.float32, expected torch.int32 or torch.int64"),
            (index, weights[:, :1], r"weights is \(9, 1\), expected the shape of index, \(9, 3\)"),
        ):
            with pytest.raises(RuntimeError, match=reason):
                experts(torch.randn(TOKENS, K), bad_index, bad_weights)
        for bad_index, bad_weights, reason in (
            (index.tolist(), weights, "index is a list, expected a tensor"),
            (index, None, "weights is a NoneType, expected a tensor"),
        ):
            with pytest.raises(TypeError, match=reason):
                experts(torch.randn(TOKENS, K), bad_index, bad_weights)
    for module in (experts, copy.deepcopy(experts).double()):
        x = torch.randn(TOKENS, K, dtype=torch.float64 if module is experts else torch.float32)
        with pytest.raises(RuntimeError, match="float64 only goes with float64"):
            module(x, index, weights)
    octile.pack_(experts)
    with pytest.raises(RuntimeError, match="x is torch.float64, the layer torch.float32"):
        experts(torch.randn(TOKENS, K, dtype=torch.float64), index, weights)


def test_refuses_layers():
    up, down = layer(octile.W8A8Linear, K, 2 * I), layer(octile.W8A8Linear, I, K)
    packed = layer(octile.W8A8Linear, K, 2 * I).pack_()
    biased = octile.W8A8Linear.from_linear(torch.nn.Linear(K, E * 2 * I))
    static = octile.W8A8StaticLinear.from_linear(torch.nn.Linear(K, E * 2 * I, bias=False), 0.05)
    bias = torch.nn.Parameter(torch.zeros(E * 2 * I))
    for arguments, words, reason in (
        ((7, up, down), {}, "gate_up_proj: 960 channels do not divide into 7 experts"),
        ((0, up, down), {}, "experts is 0, expected an integer of at least 1"),
        ((E, biased, down), {}, "gate_up_proj: the layer has a bias"),
        ((E, packed, down), {}, "gate_up_proj: the layer is packed, but not for 5 experts"),
        ((E, static, down), {}, "gate_up_proj: a W8A8StaticLinear, expected W8A8Linear"),
        ((E, up, torch.nn.Linear(I, E * K)), {}, "down_proj: a Linear, expected W8A8Linear"),
        ((E, up, layer(octile.W8A8Linear, K, K)), {}, "gives each of 5 experts 192 values, expected twice the 64"),
        ((E, up, down), {"up_bias": bias}, r"gate_up_proj: its bias is \(960,\), expected \(5, 192\)"),
    ):
        with pytest.raises(ValueError, match=reason):
            octile.Experts(*arguments, **words)
    assert up.experts == 1  # unchanged
    octile.pack_(octile.Experts(E, up, down))
    octile.Experts(E, up, down)  # packed the same way as these experts


# ---- Transformers' ----

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.integrations.moe")
import transformers_zoo as zoo  # noqa: E402
from octile.transformers import from_checkpoint  # noqa: E402
from octile.transformers_quantizer import Quantizer  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

CONFIGS = {"w8a8": (octile.W8A8Dynamic(), 0.995), "w4a16": (octile.W4A16(group=32, method="clip"), 0.98)}
MIXTURES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "olmoe"]


@pytest.mark.parametrize("name", MIXTURES)
def test_fused_experts(name, generator, tmp_path):
    """The whole model against the float one, each with its own routing, on tokens like those that it was trained on."""
    model, ids = zoo.trained(name), zoo.sentences(6, generator)
    exact, seen = zoo.routing(model, name, ids)
    found = [n for n, m in model.named_modules() if module_of.is_experts(m)]
    for which, (config, bound) in CONFIGS.items():
        quantized = copy.deepcopy(model)
        report = octile.quantize_(quantized, config)
        assert set(found) <= set(report.converted)
        tables = [m for m in report.matrices if "embed" in m.name or "lm_head" in m.name]
        assert report.share / (1 - sum(m.share for m in tables)) >= 0.95
        assert bound < zoo.cosine(zoo.logits(quantized, name, ids), exact) < 1 - 1e-9
        # Against Transformers' own experts with the same weights: only the rounding of sums, and of W8A8's x, differs.
        same_weights = copy.deepcopy(quantized)
        Quantizer._dequantize(None, same_weights)
        y = zoo.held(same_weights, name, seen, ids)
        assert zoo.cosine(zoo.held(quantized, name, seen, ids), y) > (0.99999 if which == "w4a16" else 0.999)
        tokens = zoo.generated(quantized, name)
        octile.pack_(quantized)
        assert torch.equal(zoo.generated(quantized, name), tokens)
    if name == "gpt_oss":  # interleaved, transposed, with biases
        y = zoo.logits(quantized, name)
        with pytest.warns(UserWarning, match="experts that Transformers does not read one by one"):
            octile.save_checkpoint(quantized, tmp_path)
        assert torch.equal(zoo.logits(octile.load_checkpoint_(model, tmp_path), name), y)


@pytest.mark.parametrize("which", CONFIGS)
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_of_random_models(name, which):
    """Only experts are converted: routers then see the same inputs, except behind experts."""
    config, bound = CONFIGS[which]
    model = zoo.make(name)
    exact = zoo.logits(model, name)
    octile.quantize_(model, config, lambda module, name: module_of.is_experts(module))
    assert max(bound, 0.99) < zoo.cosine(zoo.logits(model, name), exact) < 1 - 1e-9


def test_one_scale_for_all():
    model = zoo.make("qwen3_moe")
    octile.quantize_(model, octile.W8A8Dynamic(per_channel=False))
    y = zoo.logits(model, "qwen3_moe")
    octile.pack_(model)
    assert torch.equal(zoo.logits(model, "qwen3_moe"), y)


def test_left_in_float():
    model = zoo.make("qwen3_moe")
    name = "model.layers.0.mlp.experts"
    report = octile.quantize_(copy.deepcopy(model), octile.Int8Training(activation="per_tensor"))
    assert report.skipped[name].startswith("experts in one tensor: activation is 'per_tensor'")
    report = octile.quantize_(copy.deepcopy(model), octile.W8A16(group=64))
    assert report.skipped[name].startswith("experts in one tensor: down_proj: group is 64, which does not divide")
    report = octile.quantize_(copy.deepcopy(model), octile.W8A8Dynamic(), lambda module, name: "experts" not in name)
    assert report.skipped[name] == "the filter"
    model.model.layers[0].mlp.experts._is_expert_parallel = True
    report = octile.quantize_(model, octile.W8A8Dynamic())
    assert report.skipped[name] == "experts in one tensor: its experts are split among processes"


def test_an_int8_gradient_sums_channels_of_one_expert(monkeypatch):
    model = zoo.make("qwen3_moe")
    experts = model.model.layers[0].mlp.experts
    monkeypatch.setattr(
        octile.functional, "LONGEST_SUM", max(*experts.gate_up_proj.shape[1:], *experts.down_proj.shape[1:])
    )
    for config in (octile.W8A8Dynamic(backward="int8"), octile.W4A8(group=0, backward="int8")):
        report = octile.quantize_(copy.deepcopy(model), config)
        assert "model.layers.0.mlp.experts" in report.converted, report.skipped


@pytest.mark.parametrize("name, config", [("granitemoe", octile.W4A16(32)), ("nemotron_h", octile.W8A8Dynamic())])
def test_experts_that_transformers_leaves_random(name, config, tmp_path):
    """Files with one tensor for all experts (GraniteMoE), and experts with one layer before the last (NemotronH)."""
    if name == "granitemoe":
        words = {"num_local_experts": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
        kind = transformers.GraniteMoeForCausalLM
    else:
        words = {"layers_block_type": ["attention", "moe"], "n_routed_experts": 4, "num_experts_per_tok": 2}
        words |= {"moe_intermediate_size": 64, "intermediate_size": 64, "head_dim": 16, "num_attention_heads": 4}
        words |= {"moe_shared_expert_intermediate_size": 64, "num_key_value_heads": 2}
        kind = transformers.NemotronHForCausalLM
    words |= {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2}
    model = kind(kind.config_class(**words)).eval()
    assert any(".experts" in name for name in octile.quantize_(model, config).converted)
    with pytest.warns(UserWarning, match='"octile".*experts.* are experts that Transformers does not read one by one'):
        model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="octile"):
        kind.from_pretrained(tmp_path)
    assert zoo.same(from_checkpoint(tmp_path, kind), model)


def test_names_of_files(tmp_path):
    """Checkpoints have the names of the model's original files; those of its modules are read too."""
    model = zoo.make("mixtral")
    model.save_pretrained(tmp_path / "float")
    octile.quantize_(model, octile.W8A8Dynamic())
    model.save_pretrained(tmp_path)
    tensors, own = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "float" / "model.safetensors")
    assert {name.replace("weight_scale", "weight") for name in tensors} == set(own)
    assert any("block_sparse_moe.experts.3.w1" in name for name in own)
    for names in (".block_sparse_moe.", ".mlp."):
        save_file(
            {n.replace(".block_sparse_moe.", names): t for n, t in tensors.items()}, tmp_path / "model.safetensors"
        )
        assert zoo.same(octile.load_checkpoint_(zoo.make("mixtral"), tmp_path), model)
        assert zoo.same(from_checkpoint(tmp_path), model)
    both = {n.replace(".block_sparse_moe.", ".mlp."): t.clone() for n, t in tensors.items() if "self_attn" not in n}
    save_file(tensors | both, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="octile: .* is the same layer of an expert as"):
        octile.load_checkpoint_(zoo.make("mixtral"), tmp_path)


def test_names_that_transformers_reads_as_others(tmp_path):
    """Laguna's `shared_experts` is `shared_expert` in files; in a file, the former would be read as something else."""
    kind = transformers.LagunaForCausalLM
    words = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    words |= {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    words |= {"intermediate_size": 96, "shared_expert_intermediate_size": 32}
    model = kind(kind.config_class(**words)).eval()
    octile.quantize_(model, octile.W8A8Dynamic(), lambda module, name: "lm_head" not in name)
    left = [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]
    model.save_pretrained(tmp_path)
    assert zoo.same(from_checkpoint(tmp_path, kind), model)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"] == left


def test_ignored_layers_have_both_names(tmp_path):
    """The module's name and the name in files."""
    model = zoo.make("vit")
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    octile.quantize_(model, octile.W8A8Dynamic(), lambda module, name: name == names[0])
    model.save_pretrained(tmp_path)
    ignored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    stems = {name.removesuffix(".weight") for name in load_file(tmp_path / "model.safetensors")}
    assert set(names[1:]) < set(ignored) and set(ignored) - set(names) <= stems


def test_checkpoints_of_other_experts(tmp_path):
    model, fresh = zoo.make("mixtral"), zoo.make("mixtral")
    octile.quantize_(model, octile.W8A8Dynamic())
    octile.save_checkpoint(model, tmp_path)
    fresh.model.layers[0].mlp.experts.has_post_expert_norm = True
    with pytest.raises(
        ValueError, match="which model.layers.0.mlp.experts cannot be: it normalizes the output of each expert"
    ):
        octile.load_checkpoint_(fresh, tmp_path)
    # With one scale for x.
    tensors = load_file(tmp_path / "model.safetensors")
    scales = {name.replace("weight_scale", "input_scale"): torch.tensor([0.05]) for name in tensors if "_scale" in name}
    save_file(tensors | scales, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    group["input_activations"] |= {"dynamic": False, "strategy": "tensor"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for load in (lambda: octile.load_checkpoint_(zoo.make("mixtral"), tmp_path), lambda: from_checkpoint(tmp_path)):
        with pytest.raises(ValueError, match="experts: its experts are W8A8StaticLinear"):
            load()


@pytest.mark.skipif(not os.environ.get("OCTILE_COMMAND"), reason="OCTILE_COMMAND is not set")
@pytest.mark.parametrize("which", CONFIGS)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_the_command(name, which, tmp_path):
    """`octile quantize` followed by from_checkpoint() equals quantize_()."""
    model, config = zoo.make(name), CONFIGS[which][0]
    model.save_pretrained(tmp_path / "float")
    how = ["--format", which] + (["--group", "32", "--method", "clip"] if which == "w4a16" else [])
    folders = [str(tmp_path / "float"), str(tmp_path / "quantized")]
    subprocess.run([os.environ["OCTILE_COMMAND"], "quantize", *folders, *how], check=True, stdout=subprocess.DEVNULL)
    octile.quantize_(model, config)
    assert zoo.same(from_checkpoint(tmp_path / "quantized"), model)


@pytest.mark.parametrize("which", ["missing", "too many", "twice"])
def test_wrong_checkpoints(which, tmp_path):
    model = zoo.make("mixtral")
    quantized = copy.deepcopy(model)
    octile.quantize_(quantized, octile.W8A8Dynamic())
    octile.save_checkpoint(quantized, tmp_path)
    import safetensors.torch

    file = tmp_path / "model.safetensors"
    tensors, experts = safetensors.torch.load_file(file), "model.layers.0.block_sparse_moe.experts"
    for end in ("weight", "weight_scale"):
        if which == "missing":
            tensors.pop(f"{experts}.2.w3.{end}")
        elif which == "too many":
            tensors[f"{experts}.4.w3.{end}"] = tensors[f"{experts}.2.w3.{end}"].clone()
        else:
            tensors[f"{experts}.2.up_proj.{end}"] = tensors[f"{experts}.2.w3.{end}"].clone()
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    says = {
        "missing": "mlp.experts: there is no 2.up_proj",
        "too many": r"experts.4.w3 is a quantized linear layer, and the model has no such layer",
        "twice": "experts.2.(w3|up_proj) is the same layer of an expert as model.layers.0.block_sparse_moe.experts.2.(w3|up_proj)",
    }
    for load in (lambda: octile.load_checkpoint_(model, tmp_path), lambda: from_checkpoint(tmp_path)):
        with pytest.raises(ValueError, match=says[which]):
            load()
