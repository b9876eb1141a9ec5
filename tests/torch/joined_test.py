"""Layers multiplied as one: their bits, what is saved, and what happens when their buffers change."""

import copy
import pickle
import sys
import threading

import octile
import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("octile.transformers")

CONFIGS = {
    "w8a8": octile.W8A8Dynamic(),
    "w8a16": octile.W8A16(),
    "w4a8": octile.W4A8(group=32),
    "w4a16": octile.W4A16(group=32),
}
EXACT = ("w8a8", "w4a8")
JOINED = [f"model.layers.{i}.{name}" for i in range(2) for name in (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")]  # fmt: skip


def llama(config, device, joined=True, kind=transformers.LlamaForCausalLM, **words):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64}
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes, **words)).eval().to(device)
    octile.quantize_(model, CONFIGS[config], lambda module, name: "lm_head" not in name)
    if joined:
        assert sorted(octile.join_(model)) == sorted(JOINED)
    return model


def same_logits(a, b, config, ids):
    with torch.no_grad():
        a, b = a(ids).logits, b(ids).logits
    if config in EXACT:
        assert torch.equal(a, b)
    else:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def ids(device, rows=1, length=7):
    return torch.randint(0, 128, (rows, length), generator=torch.Generator().manual_seed(3)).to(device)


@pytest.mark.parametrize("config", CONFIGS)
def test_joined_layers_have_their_own_bits(config, device):
    joined, alone = llama(config, device), llama(config, device, False)
    for rows, length in ((1, 1), (3, 7)):
        same_logits(joined, alone, config, ids(device, rows, length))


def test_with_biases(device):
    words = {"kind": transformers.Qwen2ForCausalLM}
    same_logits(llama("w8a8", device, **words), llama("w8a8", device, False, **words), "w8a8", ids(device))


def test_one_product_for_all(device, monkeypatch):
    model, sizes = llama("w8a8", device), []
    run = octile.W8A8Linear._run
    monkeypatch.setattr(octile.W8A8Linear, "_run", lambda s, x, b: (sizes.append(s.out_features), run(s, x, b))[1])
    with torch.no_grad():
        model(ids(device))
    assert sizes == 2 * [128, 64, 192, 64]


@pytest.mark.parametrize("config", CONFIGS)
def test_what_is_saved(config, device, tmp_path):
    joined, alone = llama(config, device), llama(config, device, False)
    states = joined.state_dict(), alone.state_dict()
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values(), strict=True))
    for model, name in ((joined, "joined"), (alone, "alone")):
        model.save_pretrained(tmp_path / name)
    for file in (tmp_path / "alone").iterdir():
        assert file.read_bytes() == (tmp_path / "joined" / file.name).read_bytes(), file.name


def test_memory_is_shared(device):
    layer = llama("w4a16", device).model.layers[0].mlp
    gate, up = layer.gate_proj, layer.up_proj
    assert gate.quantized_weight.untyped_storage().data_ptr() == up.quantized_weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("assign", [False, True])
def test_loading(assign, device):
    model, other = llama("w8a8", device), llama("w8a8", device, False)
    for layer in other.modules():
        if isinstance(layer, octile.W8A8Linear):
            layer.weight_scale.mul_(2)
            layer.quantized_weight.neg_()
    model.load_state_dict(other.state_dict(), assign=assign)
    same_logits(model, other, "w8a8", ids(device))
    assert model.model.layers[0].mlp.up_proj._joined[0].layer is not None


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("config", CONFIGS)
def test_other_buffers(config, packed, device):
    """functional_call() puts other tensors into the modules for one call, an assignment for good."""
    model, other = llama(config, device), llama(config, device)
    for layer in other.modules():
        if isinstance(layer, octile.inference._Inference):
            layer.weight_scale.mul_(2)
    if packed:
        octile.pack_(model)
        octile.pack_(other)
    x, held = ids(device), {**dict(other.named_parameters()), **dict(other.named_buffers())}
    with torch.no_grad():
        before, expected = model(x).logits, other(x).logits
        assert torch.equal(torch.func.functional_call(model, held, (x,)).logits, expected)
        assert torch.equal(model(x).logits, before)
        for name, layer in model.named_modules():
            if isinstance(layer, octile.inference._Inference):
                for buffer, value in other.get_submodule(name).named_buffers():
                    setattr(layer, buffer, value)
        assert torch.equal(model(x).logits, expected)


def test_conversions_and_copies(device):
    model, alone = llama("w8a8", device), llama("w8a8", device, False)
    same_logits(copy.deepcopy(model), alone, "w8a8", ids(device))
    same_logits(model.to(torch.bfloat16), alone.to(torch.bfloat16), "w8a8", ids(device))
    moved = copy.deepcopy(model).to("meta")
    assert moved.model.layers[1].mlp.up_proj._joined[0].layer.quantized_weight.is_meta
    q, k = (getattr(model.model.layers[0].self_attn, name) for name in ("q_proj", "k_proj"))
    q.to("meta")  # one alone: the others are multiplied separately
    assert q._joined[0].layer is None
    x = torch.randn(2, 64, device=device)
    assert torch.equal(k(x), alone.model.layers[0].self_attn.k_proj(x))


def test_refit(device):
    model, alone = llama("w8a8", device), llama("w8a8", device, False)
    for one in (model, alone):
        layer = one.model.layers[0].self_attn.k_proj
        layer.refit_(torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(1)).to(device))
    same_logits(model, alone, "w8a8", ids(device))


def test_another_input_in_between(device):
    attention = llama("w8a8", device).model.layers[0].self_attn
    alone = llama("w8a8", device, False).model.layers[0].self_attn
    x, z = torch.randn(2, 3, 64, device=device)
    for name, t in (("q_proj", x), ("k_proj", z), ("v_proj", z), ("k_proj", x), ("q_proj", z), ("v_proj", x)):
        assert torch.equal(getattr(attention, name)(t), getattr(alone, name)(t))
    assert attention.q_proj._joined[0].held is None


def test_a_change_between_the_calls(device):
    """The first call's output is not reused after x was changed in place, or when a gradient is then wanted."""
    joined, alone = (llama("w8a8", device, joined).model.layers[0].mlp for joined in (True, False))
    x = torch.randn(3, 64, device=device)
    joined.gate_proj(x)
    x.mul_(-2)
    assert torch.equal(joined.up_proj(x), alone.up_proj(x))
    x.requires_grad_()
    with torch.no_grad():
        joined.gate_proj(x)
    joined.up_proj(x).sum().backward()
    assert x.grad.abs().sum() > 0


def test_gradients(device):
    joined, alone = (llama("w8a8", device, j).model.layers[0].mlp for j in (True, False))
    x = torch.randn(5, 64, device=device)
    dx = []
    for mlp in (joined, alone):
        leaf = x.clone().requires_grad_()
        dx.append(torch.autograd.grad(mlp(leaf).square().sum(), leaf)[0])
    torch.testing.assert_close(*dx, rtol=1e-4, atol=1e-4)


def pairs(device, *changes, bias=True, config="w8a8"):
    """A joined pair of layers and the same pair apart, after `changes` on each."""
    torch.manual_seed(1)
    alone = Pair(nn.Linear(64, 96, bias), nn.Linear(64, 96, bias)).to(device)
    octile.quantize_(alone, CONFIGS[config])
    joined = copy.deepcopy(alone)
    assert octile.join_(joined) == ["gate_proj", "up_proj"]
    for model in (joined, alone):
        for change in changes:
            change(model)
    return joined, alone


@pytest.mark.parametrize("packs", [False, True])
def test_a_bias_of_their_own(packs, device):
    """A new one is used; as a parameter it has a gradient; and both are converted and loaded as in other layers."""
    joined, alone = pairs(device, *[octile.pack_] * packs)
    if packs and joined.gate_proj.packed_weight is None:
        pytest.skip("no kernel of a GPU reads its packed weight")
    x = torch.randn(3, 64, device=device)
    for change in (lambda bias: bias + 100, lambda bias: nn.Parameter(bias - 7)):
        results = []
        for model in (joined, alone):
            for layer in (model.gate_proj, model.up_proj):
                bias = change(layer.bias.detach())
                del layer.bias
                if isinstance(bias, nn.Parameter):
                    layer.register_parameter("bias", bias)
                else:
                    layer.register_buffer("bias", bias)
            with torch.no_grad():
                results.append([layer(x) for layer in (model.gate_proj, model.up_proj)])
        for a, b in zip(*results, strict=True):
            assert torch.equal(a, b)
    for model in (joined, alone):
        (model.gate_proj(x).sum() + 2 * model.up_proj(x).sum()).backward()
        assert model.gate_proj.bias.grad.eq(3).all() and model.up_proj.bias.grad.eq(6).all()
        model.load_state_dict(copy.deepcopy(model.state_dict()))
        model.to(torch.bfloat16)
    assert joined.gate_proj.bias.dtype is torch.bfloat16
    x = x.bfloat16()
    with torch.no_grad():
        assert torch.equal(joined.up_proj(x), alone.up_proj(x))
        replaced = {"bias": torch.ones(96, device=device, dtype=torch.bfloat16)}
        called = [torch.func.functional_call(model.up_proj, replaced, (x,)) for model in (joined, alone)]
    assert torch.equal(*called)


def test_biases_are_converted(device):
    joined, _ = pairs(device, lambda model: model.to(torch.bfloat16))
    layer = joined.gate_proj._joined[0].layer
    assert layer._buffers["bias"].dtype is torch.bfloat16
    assert joined.gate_proj.bias.data_ptr() == layer._buffers["bias"].data_ptr()


def test_outputs_are_each_layers_own(device):
    """Changing an output affects no later call, and no other layer's gradient."""
    joined, alone = pairs(device)
    x = torch.randn(3, 64, device=device)
    for model in (joined, alone):
        with torch.no_grad():
            first = model.gate_proj(x)
            expected = first.clone()
            first.zero_()
            assert torch.equal(model.gate_proj(x), expected)
        leaf = x.clone().requires_grad_()
        gated = nn.functional.silu(model.gate_proj(leaf), inplace=True) * model.up_proj(leaf)
        gated.sum().backward()
        leaf.grad = None
        model.gate_proj(leaf).sum().backward()
        model.up_proj(leaf).sum().backward()
        late = x.clone()
        model.gate_proj(late)
        assert model.up_proj(late.requires_grad_()).requires_grad
        with torch.no_grad():
            with torch.autocast(device.type, dtype=torch.bfloat16):
                model.gate_proj(x)
            with torch.autocast(device.type, dtype=torch.float16):
                assert model.up_proj(x).dtype is torch.float16
        with torch.inference_mode():
            model.gate_proj(x)
        with torch.no_grad():
            assert not model.up_proj(x).is_inference()
        more = torch.ones(96, device=device, requires_grad=True)
        y = model.gate_proj(x)
        y += more  # an output that had no gradient
        y.sum().backward()
        assert more.grad.eq(3).all()
        first, second = model.gate_proj(x), model.up_proj(x)
        product = (more * first).sum()
        second.mul_(2)
        product.backward()


def test_one_unpacking_for_all_gradients(device, monkeypatch):
    joined, alone = pairs(device, octile.pack_)
    if joined.gate_proj.packed_weight is None:
        pytest.skip("no kernel of a GPU reads its packed weight")
    calls, unpack = [], type(joined.gate_proj.format).unpack
    monkeypatch.setattr(type(joined.gate_proj.format), "unpack", lambda *a: calls.append(1) or unpack(*a))
    x = torch.randn(3, 64, device=device)
    for _ in range(2):
        gradients = []
        for model in (joined, alone):
            leaf = x.clone().requires_grad_()
            (model.gate_proj(leaf) * model.up_proj(leaf)).sum().backward()
            gradients.append(leaf.grad)
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    assert len(calls) == 3  # one for the joined layers, two for the separate ones


def test_no_bias_any_more(device):
    def without(model):
        model.gate_proj.bias = model.up_proj.bias = None

    joined, alone = pairs(device, without)
    x = torch.randn(3, 64, device=device)
    assert torch.equal(joined.gate_proj(x), alone.gate_proj(x))
    joined.to(torch.bfloat16), alone.to(torch.bfloat16)
    assert torch.equal(joined.up_proj(x), alone.up_proj(x))
    with pytest.raises(TypeError, match="x is a NoneType, expected a tensor"):
        joined.gate_proj(None)


@pytest.mark.parametrize("packs", [False, True])
def test_pickles_share_memory_again(packs, device):
    joined, _ = pairs(device, *[octile.pack_] * packs)
    other = pickle.loads(pickle.dumps(joined))
    x, new = torch.randn(3, 64, device=device), torch.randn(96, 64, device=device)
    for model in (joined, other):
        model.up_proj.refit_(new)
    for name in ("gate_proj", "up_proj"):
        assert torch.equal(getattr(joined, name)(x), getattr(other, name)(x))
    assert other._modules["up_proj"]._joined[0]._whole()


def test_threads_share_an_input():
    """Each gets its own output, whichever layer ran the product."""
    joined, alone = pairs(torch.device("cpu"))
    x = torch.randn(1, 64)
    expected, wrong = [alone.gate_proj(x), alone.up_proj(x)], []

    def call():
        for _ in range(300):
            y = joined.gate_proj(x), joined.up_proj(x)
            wrong.extend(a for a, b in zip(y, expected, strict=True) if a is None or not torch.equal(a, b))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=call) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


def test_another_backward(device):
    def to_int8(model):
        model.gate_proj.backward = model.up_proj.backward = "int8"

    x, dy, gradients = torch.randn(300, 64, device=device), torch.randn(300, 96, device=device), []
    for changes in ((), (to_int8,)):
        for model in pairs(device, *changes):
            leaf = x.clone().requires_grad_()
            gradients.append(torch.autograd.grad(model.gate_proj(leaf) + model.up_proj(leaf), leaf, dy)[0])
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[2], gradients[3])
    assert not torch.equal(gradients[1], gradients[2])


@pytest.mark.parametrize("config", EXACT)
def test_a_refit_between_the_calls(config, device):
    joined, alone = pairs(device, config=config)
    x, new = torch.randn(3, 64, device=device), torch.randn(96, 64, device=device)
    with torch.no_grad():
        joined.gate_proj(x)
        for model in (joined, alone):
            model.up_proj.refit_(new)
        assert torch.equal(joined.up_proj(x), alone.up_proj(x))


@pytest.mark.parametrize("config", ["w8a8", "w4a16"])
def test_compiled_generation(config, device):
    torch._dynamo.reset()
    joined, alone = llama(config, device), llama(config, device, False)
    # Both are compiled: on a GPU, decomposed norms and attention round in another way than torch's own.
    compiled = [torch.compile(model, backend="aot_eager", fullgraph=True) for model in (joined, alone)]
    for length in (5, 1, 1):
        same_logits(*compiled, config, ids(device, 1, length))
    words = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True, "cache_implementation": "static"}
    tokens = [model.generate(ids(device), **words) for model in (joined, alone)]
    if config in EXACT:
        assert torch.equal(*tokens)
    torch._dynamo.reset()


def test_group_scales_pass_no_gradient_to_quantized_inputs():
    layer, x = quantized(group=32), torch.randn(3, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match="passes no gradient on to a QuantizedInput"):
        layer(octile.quantize_input(x, "16bit"))
    with torch.no_grad():
        assert torch.equal(layer(octile.quantize_input(x, "16bit")), layer(x))
    with pytest.raises(RuntimeError, match="its last size, is 64"):
        quantized()(octile.quantize_input(torch.randn(3, 48)))


def packed(config, device, **words):
    """A joined and packed model, and the same one as it was."""
    model, alone = llama(config, device, **words), llama(config, device, False, **words)
    linear = [name for name, module in model.named_modules() if hasattr(module, "pack_")]
    if octile.pack_(model) == [] and device.type == "cuda":
        pytest.skip("no kernel of a GPU reads its packed weight")
    assert octile.pack_(model) == [] and octile.pack_(alone) == linear
    assert octile.join_(alone) == []
    return model, alone


@pytest.mark.parametrize("config", CONFIGS)
def test_packed_as_one(config, device, tmp_path):
    model, alone = packed(config, device)
    for rows, length in ((1, 1), (3, 7)):
        same_logits(model, alone, config, ids(device, rows, length))
    one, other = (m.model.layers[1].self_attn for m in (model, alone))
    sizes = [getattr(one, name).packed_weight.numel() for name in ("q_proj", "k_proj", "v_proj")]
    assert sizes[1:] == [0, 0] and sizes[0] == one.q_proj._joined[0].layer.packed_weight.numel()
    for name in ("q_proj", "k_proj", "v_proj"):
        assert torch.equal(getattr(one, name).weight[:], getattr(other, name).weight[:])
    for m, folder in ((model, "joined"), (llama(config, device, False), "alone")):
        m.save_pretrained(tmp_path / folder)
    for file in (tmp_path / "alone").iterdir():
        assert file.read_bytes() == (tmp_path / "joined" / file.name).read_bytes(), file.name


def test_packed_changes_hands(device):
    model, alone = packed("w4a8", device, kind=transformers.Qwen2ForCausalLM)
    same_logits(copy.deepcopy(model), alone, "w4a8", ids(device))
    other = copy.deepcopy(model)
    for t in other.state_dict().values():
        t.zero_()
    for assign in (False, True):
        other.load_state_dict(copy.deepcopy(model.state_dict()), assign=assign)
        same_logits(other, alone, "w4a8", ids(device))
    with pytest.raises(RuntimeError, match="size mismatch for model.layers.0.self_attn.q_proj.packed_weight"):
        alone.load_state_dict(model.state_dict())
    same_logits(other.to(torch.bfloat16), copy.deepcopy(alone).to(torch.bfloat16), "w4a8", ids(device))
    mlp, x = other.model.layers[0].mlp, torch.randn(2, 64, device=device)
    mlp.gate_proj.to("meta")
    with pytest.raises(RuntimeError, match="belong on one device, and these are on .*meta"):
        mlp.up_proj(x)


def test_packed_takes_another_weight(device):
    model, alone = packed("w4a8", device)
    new = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(device)
    layers = [m.model.layers[0].self_attn.k_proj for m in (model, alone)]
    place = layers[0]._joined[0].layer.packed_weight.data_ptr()
    for layer in layers:
        layer.refit_(new)
    assert layers[0]._joined[0].layer.packed_weight.data_ptr() == place
    same_logits(model, alone, "w4a8", ids(device))
    with pytest.raises(RuntimeError, match="joined and packed cannot take another weight"):
        layers[0]._requantize(new)
    layers[1]._requantize(new)  # packed alone, it does
    same_logits(model, alone, "w4a8", ids(device))
    x, dx = torch.randn(5, 64, device=device), []
    for layer in layers:
        leaf = x.clone().requires_grad_()
        dx.append(torch.autograd.grad(layer(leaf).square().sum(), leaf)[0])
    assert torch.equal(*dx)


def test_an_adapter_merged_before_packing_stays(device):
    peft = pytest.importorskip("peft")
    model = llama("w4a8", device)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["k_proj"], init_lora_weights=False))
    with pytest.warns(UserWarning, match="an adapter is merged into weights of 4 bits"):
        wrapped.merge_adapter()
    if octile.pack_(model) == []:
        pytest.skip("no kernel of a GPU reads its packed weight")
    layer = model.model.layers[0].self_attn.k_proj.base_layer
    before = layer.weight[:].clone()
    with pytest.raises(RuntimeError, match="joined and packed cannot take another weight"):
        wrapped.unmerge_adapter()
    assert torch.equal(layer.weight[:], before)


class Pair(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.gate_proj, self.up_proj = first, second


def quantized(n=8, k=64, kind=octile.W8A8Linear, bias=False, **words):
    return kind.from_linear(nn.Linear(k, n, bias), **words)


@pytest.mark.parametrize(
    "pair",
    [
        lambda: (quantized(), nn.Linear(64, 8)),
        lambda: (quantized(), quantized(kind=octile.W8A16Linear)),
        lambda: (quantized(), quantized(k=32)),
        lambda: (quantized(bias=True), quantized()),
        lambda: (quantized(), quantized(per_channel=False)),
        lambda: (quantized(group=32), quantized()),
        lambda: (quantized(), quantized().pack_()),
        lambda: (quantized(), quantized().to("meta")),
    ],
)
def test_what_is_not_joined(pair):
    pair = Pair(*pair())
    assert octile.join_(pair) == [] and pair.gate_proj.__dict__.get("_joined") is None


def test_refusals():
    with pytest.raises(ValueError, match="names has 'q_proj', expected tuples"):
        octile.join_(nn.Module(), names=("q_proj", "k_proj"))
    pair = Pair(quantized(), quantized())
    assert octile.join_(pair, names=[("up_proj", "gate_proj")]) == ["up_proj", "gate_proj"]
    assert octile.join_(pair) == []
    from octile import parallel

    assert parallel._refusal(pair.up_proj, parallel.ColumnParallel(), 2, False) == "it is joined with others"


def test_to_another_type_and_back(device):
    model = nn.ModuleDict({n: nn.Linear(64, 32, device=device) for n in ("q_proj", "k_proj", "v_proj")})
    model.q_proj, model.k_proj, model.v_proj = model.values()
    octile.quantize_(model, octile.W8A8Dynamic())
    x = torch.randn(3, 64, device=device)
    expected = [layer(x) for layer in model.values()]
    assert octile.join_(model)
    model.double().float()
    assert all(torch.equal(layer(x), y) for layer, y in zip(model.values(), expected, strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_joined_then_float_then_quantized_again(packed, device):
    config = octile.transformers.OctileConfig("w8a8", backward="int8")
    model = llama("w8a8", device)
    if packed:
        octile.pack_(model)
    model.hf_quantizer = octile.transformers.OctileQuantizer(config)
    model.config.quantization_config = config
    model.dequantize()
    layer = model.model.layers[0].mlp.up_proj
    assert layer.__dict__.keys() - torch.nn.Linear(1, 1).__dict__.keys() <= {"_is_hf_initialized"}
    with torch.no_grad():
        layer.weight.mul_(1.5)
    weight = layer.weight.detach().clone()
    octile.quantize_(model, octile.W8A16())
    x = torch.randn(3, 64, device=device)
    torch.testing.assert_close(layer(x), x @ weight.T, rtol=0.1, atol=0.01)
    assert "backward=int8" not in repr(layer)
