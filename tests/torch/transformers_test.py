"""octile.transformers: from_pretrained(quantization_config=OctileConfig(...)) and from_checkpoint(), on tiny random models."""

import json
import os
import subprocess
import sys
import textwrap
import unittest.mock

import octile
import pytest
import safetensors.torch
import torch
from awq_gptq_test import ORDER, words_along_rows

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
register = pytest.importorskip("transformers.quantizers.auto")
if not hasattr(register, "register_quantizer") or not hasattr(transformers, "core_model_loading"):
    pytest.skip("this Transformers takes no quantizer from outside", allow_module_level=True)

import transformers_zoo as zoo  # noqa: E402
from octile.transformers import OctileConfig, from_checkpoint, use_for  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM  # noqa: E402

transformers.utils.logging.disable_progress_bar()
pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.arange(3, 27).reshape(2, 12)
CONFIGS = {
    "w8a8": (octile.W8A8Dynamic, {}),
    "w4a16": (octile.W4A16, {"group": 32, "method": "clip"}),
    "w4a8": (octile.W4A8, {"group": 0}),
    "int8-training": (octile.Int8Training, {"backward": ["int8", "16bit"]}),
}
LLAMA = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.125}


def llama(**words):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, **words))


def tied():
    return llama(tie_word_embeddings=True)


def gpt2():
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 32, "initializer_range": 0.125}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=96, **sizes))


def bert():
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
    return transformers.BertModel(transformers.BertConfig(vocab_size=96, max_position_embeddings=32, **sizes))


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**LLAMA, num_local_experts=2))


MODELS = {"llama": llama, "tied": tied, "gpt2": gpt2, "bert": bert}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Float models as save_pretrained() writes them, the first in several files."""
    root = tmp_path_factory.mktemp("models")
    for name, make in (MODELS | {"mixtral": mixtral}).items():
        torch.manual_seed(1)
        make().save_pretrained(root / name, **({"max_shard_size": "40KB"} if name == "llama" else {}))
    return root


def auto(name):
    return AutoModel if name == "bert" else AutoModelForCausalLM


def answer(model):
    with torch.no_grad():
        return model(TOKENS)[0]


def same(a, b):
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(t, right[name]) for name, t in left.items())


@pytest.mark.parametrize("format", CONFIGS)
@pytest.mark.parametrize("name", MODELS)
def test_bits_are_those_of_quantize(name, format, folders, recwarn):
    kind, options = CONFIGS[format]
    plain = auto(name).from_pretrained(folders / name)
    report = octile.quantize_(plain, kind(**options))
    model = auto(name).from_pretrained(folders / name, quantization_config=OctileConfig(format, **options))
    assert same(model, plain) and torch.equal(answer(model), answer(plain))
    assert str(model.octile_report) == str(report) and report.converted
    assert not [w for w in recwarn if "octile" in str(w.message)]
    if name == "tied":
        assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("format", ["w8a8", "w4a16", "w4a8"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:octile. the format of this checkpoint")  # of Conv1D
def test_saved_and_loaded_again(name, format, folders, tmp_path):
    kind, options = CONFIGS[format]
    model = auto(name).from_pretrained(folders / name, quantization_config=OctileConfig(format, **options))
    model.save_pretrained(tmp_path / "one")
    plain = auto(name).from_pretrained(folders / name)
    octile.quantize_(plain, kind(**options))
    octile.save_checkpoint(plain, tmp_path / "two")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    again = from_checkpoint(tmp_path / "one", auto(name))
    assert same(again, model) and torch.equal(answer(again), answer(model)) and not again.training
    if name == "tied":
        assert again.lm_head.weight is again.model.embed_tokens.weight


def test_types_and_devices(folders, tmp_path):
    config = OctileConfig("w8a8")
    plain = AutoModelForCausalLM.from_pretrained(folders / "llama", dtype=torch.bfloat16)
    octile.quantize_(plain, octile.W8A8Dynamic())
    for device_map in ("cpu", "auto"):
        words = {"dtype": torch.bfloat16, "device_map": device_map, "quantization_config": config}
        model = AutoModelForCausalLM.from_pretrained(folders / "llama", **words)
        if model.device.type == "cpu":
            assert same(model, plain) and torch.equal(answer(model), answer(plain))
    plain.save_pretrained(tmp_path)
    again = from_checkpoint(tmp_path, dtype=torch.float32)
    assert again.model.norm.weight.dtype is again.dtype is torch.float32
    assert again.model.layers[0].mlp.up_proj.weight.dtype is torch.float32
    with pytest.raises(ValueError, match="device_map names cpu, disk: quantized weights are not offloaded"):
        AutoModelForCausalLM.from_pretrained(
            folders / "llama", quantization_config=config, offload_folder=tmp_path,
            device_map={"model.embed_tokens": "cpu", "model.layers": "disk", "model.norm": "cpu",
                        "model.rotary_emb": "cpu", "lm_head": "cpu"},
        )  # fmt: skip


def test_layers_by_name(folders):
    def converted(name="llama", **words):
        model = auto(name).from_pretrained(folders / name, quantization_config=OctileConfig("w8a8", **words))
        return model, model.octile_report.converted

    _, names = converted(modules_to_not_convert=["model.layers.0", "down_proj"])
    assert len(names) == 6 and all(n.startswith("model.layers.1.") and not n.endswith("down_proj") for n in names)
    _, names = converted(modules_to_convert=["lm_head", "up_proj"])
    assert names == ["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj", "lm_head"]
    model, names = converted("tied", modules_to_convert=["lm_head", "up_proj"], modules_to_not_convert=["up_proj"])
    assert names == ["lm_head"] and torch.equal(answer(model), answer(model))
    plain = AutoModelForCausalLM.from_pretrained(folders / "tied")
    octile.quantize_(plain, octile.W8A8Dynamic(), lambda module, name: name == "lm_head")
    assert torch.equal(answer(model), answer(plain))


@pytest.mark.parametrize("make", [llama, mixtral])
def test_weights_that_are_not_finite(make, tmp_path):
    """Transformers collects the errors and logs them in a table."""
    model = make()
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "mlp" in name and p.dim() > 1 and "gate." not in name)[
            0, 0
        ] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="CONVERSION"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=OctileConfig("w8a8"))


@pytest.mark.parametrize("format", ["w8a8", "w4a16", "int8-training"])
def test_weights_that_the_files_lack(folders, tmp_path, format):
    """A new head stays in float, since its weight would otherwise be frozen, and trains."""
    torch.manual_seed(3)
    config = OctileConfig(format, **CONFIGS[format][1])
    kind = transformers.BertForSequenceClassification
    model = kind.from_pretrained(folders / "bert", quantization_config=config)
    report, trains = model.octile_report, format == "int8-training"
    assert len(report.converted) == 7 + trains and ("classifier" in report.converted) == trains
    assert (type(model.classifier) is torch.nn.Linear) == (not trains)
    assert trains or report.skipped["classifier"].startswith("its weight is not from the files")
    assert (model.classifier.weight != 0).any() and torch.isfinite(answer(model)).all()
    model.train()(TOKENS, labels=torch.tensor([0, 1])).loss.backward()
    assert model.classifier.weight.grad.any()
    kind(bert().config).save_pretrained(tmp_path)
    model = kind.from_pretrained(tmp_path, quantization_config=config)  # a head from files
    assert "classifier" in model.octile_report.converted
    words = {"num_labels": 3, "ignore_mismatched_sizes": True}
    model = kind.from_pretrained(tmp_path, quantization_config=config, **words)
    assert ("classifier" in model.octile_report.converted) == trains and model.classifier.weight.shape == (3, 64)
    named = OctileConfig("w8a8", modules_to_convert=["classifier", "query"])
    model = kind.from_pretrained(folders / "bert", quantization_config=named)
    assert [n for n in model.octile_report.converted if "query" not in n] == ["classifier"]
    assert torch.isfinite(answer(model)).all()


def test_a_new_head_of_w8a8_static(folders, tmp_path):
    plain = transformers.BertForSequenceClassification.from_pretrained(folders / "bert")
    with octile.calibrate(plain) as calibration:
        answer(plain)
    calibration.save(tmp_path / "calibration.safetensors")
    config = OctileConfig("w8a8-static", smoothing=None, calibration=tmp_path / "calibration.safetensors")
    model = type(plain).from_pretrained(folders / "bert", quantization_config=config)
    assert type(model.classifier) is torch.nn.Linear and len(model.octile_report.converted) == 7


def test_experts_that_the_files_lack(folders, tmp_path):
    model = mixtral()
    model.save_pretrained(
        tmp_path, state_dict={n: t for n, t in model.state_dict().items() if "0.mlp.experts" not in n}
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=OctileConfig("w8a8"))
    kinds = [type(layer.mlp.experts) for layer in model.model.layers]
    assert kinds[0] is not octile.Experts and kinds[1] is octile.Experts


def test_biases_that_the_files_lack(tmp_path):
    torch.manual_seed(1)
    model = bert()
    tensors = model.state_dict()
    del tensors["encoder.layer.0.output.dense.bias"]
    model.save_pretrained(tmp_path, state_dict=tensors)
    model = AutoModel.from_pretrained(tmp_path, quantization_config=OctileConfig("w8a8"))
    assert not model.encoder.layer[0].output.dense.bias.any()
    assert type(model.encoder.layer[0].output.dense) is octile.W8A8Linear


@pytest.mark.parametrize("format", ["w8a8", "w4a16"])
def test_fused_experts(folders, format):
    kind, options = CONFIGS[format]
    config = OctileConfig(format, **options)
    model = AutoModelForCausalLM.from_pretrained(folders / "mixtral", quantization_config=config)
    plain = AutoModelForCausalLM.from_pretrained(folders / "mixtral")
    octile.quantize_(plain, kind(**options))
    assert type(model.model.layers[1].mlp.experts) is octile.Experts
    assert same(model, plain) and "model.layers.1.mlp.experts" in model.octile_report.converted
    model.dequantize()
    assert type(model.model.layers[1].mlp.experts) is type(
        transformers.MixtralModel(model.config).layers[1].mlp.experts
    )


def test_fused_experts_stay(folders):
    config = OctileConfig("w8a8", modules_to_not_convert=["experts"])
    model = AutoModelForCausalLM.from_pretrained(folders / "mixtral", quantization_config=config)
    assert model.octile_report.skipped["model.layers.0.mlp.experts"] == "the filter"
    config = OctileConfig("int8-training", activation="per_tensor")
    with pytest.warns(UserWarning, match="experts in one tensor stay in float: model.layers.0.mlp.experts"):
        AutoModelForCausalLM.from_pretrained(folders / "mixtral", quantization_config=config)


def test_fused_experts_train(folders, tmp_path):
    """As quantize_() makes them; Transformers reads what is saved."""
    plain = AutoModelForCausalLM.from_pretrained(folders / "mixtral")
    model = AutoModelForCausalLM.from_pretrained(folders / "mixtral", quantization_config=OctileConfig("int8-training"))
    assert "model.layers.0.mlp.experts" in model.octile_report.converted
    ids = torch.arange(8)[None]
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.model.layers[0].mlp.experts.parameters())
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), again.parameters(), strict=True))


def test_recipe_in_config_json(folders, tmp_path):
    """A folder of floats whose config.json describes how to quantize them."""
    plain = AutoModelForCausalLM.from_pretrained(folders / "tied")
    plain.save_pretrained(tmp_path)
    config = OctileConfig("w4a16", group=32, modules_to_not_convert=["v_proj"])
    text = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": config.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(text))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert len(model.octile_report.converted) == 12
    assert type(model.model.layers[0].mlp.up_proj) is octile.W4A16Linear


def test_config():
    for format, (kind, options) in CONFIGS.items():
        config = OctileConfig(format, modules_to_not_convert=("a",), **options)
        again = OctileConfig.from_dict(json.loads(config.to_json_string()))
        assert again == config and type(again.octile_config()) is kind
    assert OctileConfig("w8a8") != OctileConfig("w8a16")
    for words, says in (
        ({"format": "int4"}, "format is 'int4', expected one of w8a8, w8a8-static, w8a16, w4a16, w4a8, int8-training"),
        ({"format": "w8a8-static"}, 'w8a8-static needs calibration="file"'),
        ({"format": "w8a8", "method": "clip"}, "w8a8 has no option method; it has per_channel, group, backward"),
        ({"format": "w8a8", "group": 48}, "group is 48"),
        ({"format": "w4a16", "method": "feedback"}, "needs a calibration"),
        ({"format": "w4a16", "calibration": octile.Calibration({})}, "calibration is the path"),
        ({"format": "w8a8", "modules_to_not_convert": "lm_head"}, "expected a list of names"),
    ):
        with pytest.raises(ValueError, match=f"octile: .*{says}"):
            OctileConfig(**words)


def test_calibration(folders, tmp_path):
    plain = AutoModelForCausalLM.from_pretrained(folders / "llama")
    with octile.calibrate(plain, second_moments=True) as calibration:
        answer(plain)
    calibration.save(tmp_path / "calibration.safetensors")
    octile.quantize_(plain, octile.W4A16(group=32, method="feedback", calibration=calibration))
    words = {"group": 32, "method": "feedback", "calibration": tmp_path / "calibration.safetensors"}
    config = OctileConfig.from_dict(json.loads(OctileConfig("w4a16", **words).to_json_string()))
    assert same(AutoModelForCausalLM.from_pretrained(folders / "llama", quantization_config=config), plain)


def test_static(folders, tmp_path):
    plain = AutoModelForCausalLM.from_pretrained(folders / "llama")
    with octile.calibrate(plain) as calibration:
        answer(plain)
    calibration.save(tmp_path / "calibration.safetensors")
    with pytest.warns(UserWarning, match="smoothing is based on 24 calibration rows"):
        report = octile.quantize_(plain, octile.W8A8Static(calibration, 0.5))
        config = OctileConfig("w8a8-static", smoothing=0.5, calibration=tmp_path / "calibration.safetensors")
        model = AutoModelForCausalLM.from_pretrained(folders / "llama", quantization_config=config)
    assert same(model, plain) and str(model.octile_report) == str(report) and report.multipliers
    with pytest.warns(UserWarning, match="multiply their inputs"):
        model.save_pretrained(tmp_path / "saved")
    assert same(from_checkpoint(tmp_path / "saved"), model)


def test_models_with_nothing_to_convert(folders):
    config = OctileConfig("w8a8", modules_to_convert=["nothing"])
    with pytest.raises(ValueError, match=r"octile: LlamaForCausalLM has no layer to convert: the filter \(15 layers\)"):
        AutoModelForCausalLM.from_pretrained(folders / "llama", quantization_config=config)


def test_folders_of_other_methods(folders, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folders / "llama", quantization_config=OctileConfig("w8a8"))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="CompressedTensorsConfig but you are passing a OctileConfig"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=OctileConfig("w8a8"))
    with pytest.raises(ValueError, match="octile: "):
        from_checkpoint(folders / "llama")


@pytest.fixture
def used():
    give_back = use_for("compressed-tensors", "awq", "gptq")
    yield
    give_back()


def write_other(method, folder, model):
    """A sharded checkpoint of this method, made from a float model, which gets the dequantized weights."""
    tensors = model.state_dict()
    for name, module in model.named_modules():
        if type(module) is not torch.nn.Linear or name == "lm_head":
            continue
        w = module.weight.detach().unflatten(1, (-1, 32))
        low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)
        scale = ((high - low) / 15).half()
        z = (-low / scale).round().clamp(1, 15).int()  # GPTQ stores one less
        u = ((w / scale[..., None]).round() + z[..., None]).clamp(0, 15).int()
        module.weight.data = ((u - z[..., None]) * scale[..., None].float()).flatten(1)
        u, own = u.flatten(1), {"scales": scale.T.contiguous()}
        if method == "awq":
            own |= {"qweight": words_along_rows(u.T, ORDER), "qzeros": words_along_rows(z.T, ORDER)}
        else:
            own |= {"qweight": words_along_rows(u).T.contiguous(), "qzeros": words_along_rows(z.T - 1)}
            own |= {"g_idx": (torch.arange(u.shape[1]) // 32).int(), "bias": torch.zeros(len(u)).half()}
        del tensors[f"{name}.weight"]
        tensors |= {f"{name}.{suffix}": t for suffix, t in own.items()}
    more = {"version": "gemm", "zero_point": True} if method == "awq" else {"desc_act": False}
    config = json.loads(model.config.to_json_string())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": 32} | more
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    parts = {f"model-{i + 1:05}-of-00002.safetensors": names[i::2] for i in range(2)}
    for file, part in parts.items():
        safetensors.torch.save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_checkpoints_of_awq_and_gptq(method, folders, tmp_path, used):
    plain = AutoModelForCausalLM.from_pretrained(folders / "llama")
    write_other(method, tmp_path / "theirs", plain)
    model = from_checkpoint(tmp_path / "theirs", dtype=torch.float32)
    layers = [module for module in model.modules() if type(module) is octile.W4A16Linear]
    assert len(layers) == 14 and all(layer.zero_point for layer in layers)
    name = "model.layers.1.mlp.down_proj"
    assert torch.equal(model.get_submodule(name).to_linear().weight, plain.get_submodule(name).weight)
    torch.testing.assert_close(answer(model), answer(plain), rtol=1e-3, atol=1e-3)
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32), model)
    assert model.config.quantization_config.to_dict()["quant_method"] == method
    model.save_pretrained(tmp_path / "ours")
    assert torch.equal(answer(AutoModelForCausalLM.from_pretrained(tmp_path / "ours")), answer(model))
    half = from_checkpoint(tmp_path / "theirs", dtype=torch.float16, device="cpu")
    assert half.dtype is half.model.layers[0].mlp.up_proj.weight_dtype is torch.float16


def test_words_of_from_checkpoint(folders, tmp_path, monkeypatch):
    """They equal those of from_pretrained(), for the config and the weights."""
    model = AutoModelForCausalLM.from_pretrained(folders / "llama", quantization_config=OctileConfig("w8a8"))
    model.save_pretrained(tmp_path / "inner")
    asked, read = [], transformers.AutoConfig.from_pretrained
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *a, **k: asked.append(k) or read(*a, **k))
    hub = {"subfolder": "inner", "revision": "main", "token": "none", "trust_remote_code": True}
    again, info = from_checkpoint(
        tmp_path, **hub, use_cache=False, output_loading_info=True, attn_implementation="eager"
    )
    assert same(again, model) and not info["missing_keys"] and asked[0].items() >= hub.items()
    assert again.config.use_cache is False and again.config._attn_implementation == "eager"
    assert from_checkpoint(tmp_path / "inner", torch_dtype=torch.float16).dtype is torch.float16
    config = read(tmp_path / "inner", use_cache=False)
    for given in (config, again.config):
        assert from_checkpoint(tmp_path / "inner", config=given).config.use_cache is False
    assert config.quantization_config["quant_method"] == "compressed-tensors"


def test_what_others_load_and_what_octile_does(folders, tmp_path):
    pytest.importorskip("compressed_tensors")
    with pytest.raises(ValueError, match=r"octile: 'hqq' cannot be read; compressed-tensors, awq, gptq can"):
        use_for("awq", "hqq")
    model = AutoModelForCausalLM.from_pretrained(folders / "llama", quantization_config=OctileConfig("w8a8"))
    model.save_pretrained(tmp_path)
    give_back = use_for("compressed-tensors")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path)
    give_back()
    assert same(ours, model) and type(ours.model.layers[0].mlp.up_proj) is octile.W8A8Linear
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(theirs.model.layers[0].mlp.up_proj, torch.nn.Linear)


def test_quantized_heads_that_were_shared(folders, tmp_path):
    config = OctileConfig("w8a8", modules_to_convert=["lm_head", "up_proj"])
    model = AutoModelForCausalLM.from_pretrained(folders / "tied", quantization_config=config)
    model.save_pretrained(tmp_path)
    again = from_checkpoint(tmp_path)
    assert same(again, model) and torch.equal(answer(again), answer(model))
    assert type(again.lm_head) is octile.W8A8Linear and type(again.model.layers[0].mlp.down_proj) is torch.nn.Linear


def test_checkpoints_of_another_head(folders, tmp_path, used):
    model = AutoModel.from_pretrained(folders / "llama", quantization_config=OctileConfig("w4a16", group=32))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="octile: .*there is no lm_head.weight"):
        from_checkpoint(tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same(whole.model, model) and not whole.lm_head.weight.is_meta
    assert same(from_checkpoint(tmp_path, transformers.LlamaModel), model)


def test_checkpoints_that_are_refused(folders, tmp_path):
    with pytest.raises(ValueError, match="config.json has no quantization_config: the checkpoint is not quantized"):
        from_checkpoint(folders / "llama")
    model = AutoModelForCausalLM.from_pretrained(folders / "llama", quantization_config=OctileConfig("w8a8"))
    model.save_pretrained(tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")

    def refused(says, config={}, **changes):  # noqa: B006
        words = json.loads((tmp_path / "config.json").read_text()) | config
        safetensors.torch.save_file({**tensors, **changes}, tmp_path / "model.safetensors", {"format": "pt"})
        (tmp_path / "config.json").write_text(json.dumps(words))
        with pytest.raises(ValueError, match=f"octile: .*{says}"):
            from_checkpoint(tmp_path)

    levels, scale = torch.zeros(96, 64, dtype=torch.int8), torch.ones(96, 1)
    up = "model.layers.0.mlp.up_proj."
    refused("up_proj: the checkpoint has a bias, the model does not", **{up + "bias": torch.zeros(96)})
    expert = "model.layers.0.mlp.experts.3.up_proj.weight"
    refused("experts.3.up_proj is one of several experts", **{expert: levels, expert + "_scale": scale})
    other = "model.layers.9.mlp.up_proj.weight"
    refused("the model has no model.layers.9.mlp.up_proj.weight", **{other: levels, other + "_scale": scale})
    refused(r"down_proj is \(64, 96\), and the model's layer \(64, 80\)", {"intermediate_size": 80})


def test_dequantize(folders, tmp_path):
    for name, kind in (("llama", torch.nn.Linear), ("gpt2", transformers.pytorch_utils.Conv1D)):
        model = auto(name).from_pretrained(folders / name, quantization_config=OctileConfig("w4a16", group=32))
        before = answer(model)
        model.dequantize()
        layers = [module for module in model.modules() if isinstance(module, kind)]
        assert len(layers) == (15 if name == "llama" else 4) and not hasattr(model, "hf_quantizer")
        torch.testing.assert_close(answer(model), before, rtol=1e-3, atol=1e-3)
        model.save_pretrained(tmp_path / name)
        assert same(auto(name).from_pretrained(tmp_path / name), model)
    model = AutoModelForCausalLM.from_pretrained(folders / "llama", quantization_config=OctileConfig("w8a8"))
    model.save_pretrained(tmp_path / "saved")
    model = from_checkpoint(tmp_path / "saved")
    model.dequantize(torch.bfloat16)
    assert model.model.layers[0].mlp.up_proj.weight.dtype is torch.bfloat16
    model.save_pretrained(tmp_path / "floats")
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "floats", dtype=None), model)
    model = AutoModelForCausalLM.from_pretrained(folders / "llama", quantization_config=OctileConfig("w8a16"))
    before = answer(model.to(torch.bfloat16))
    model.dequantize()  # in the type that the model has now
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(answer(model), before, rtol=0.1, atol=0.1)


def test_layers_that_stay_wide(tmp_path):
    """T5 keeps some layers in float32 if the model is in float16, and checks their weights' type."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4}
    kind = transformers.T5EncoderModel
    kind(transformers.T5Config(**sizes)).save_pretrained(tmp_path / "one")
    model = kind.from_pretrained(tmp_path / "one", dtype=torch.float16, quantization_config=OctileConfig("w8a8"))
    model.save_pretrained(tmp_path / "two")
    again = from_checkpoint(tmp_path / "two", kind)
    for one in (model, again):
        layer = one.encoder.block[0].layer[1].DenseReluDense
        assert (layer.wi.weight_dtype, layer.wo.weight_dtype) == (torch.float16, torch.float32)
    assert torch.equal(answer(again), answer(model))


def test_several_processes_are_refused(folders):
    config = transformers.AutoConfig.from_pretrained(folders / "llama")
    config.distributed_config = transformers.distributed.DistributedConfig(tp_size=2)
    words = {"config": config, "quantization_config": OctileConfig("w8a8")}
    with pytest.raises(ValueError, match="octile: distributed_config has tp_size 2: quantized weights are not split"):
        AutoModelForCausalLM.from_pretrained(folders / "llama", **words)


def test_layers_that_accelerate_moves_to(folders, monkeypatch):
    """With several devices, accelerate has replaced a layer's forward before the layer is converted."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    def dispatch(model, *arguments):
        for module in model.modules():
            add_hook_to_module(module, AlignDevicesHook("cpu"))

    config = OctileConfig("w8a8", modules_to_convert=["lm_head", "up_proj"])
    plain = AutoModelForCausalLM.from_pretrained(folders / "tied", quantization_config=config)
    monkeypatch.setattr(transformers.PreTrainedModel, "set_use_kernels", dispatch)
    model = AutoModelForCausalLM.from_pretrained(folders / "tied", quantization_config=config)
    assert type(model.lm_head) is octile.W8A8Linear and hasattr(model.lm_head, "_hf_hook")
    assert torch.equal(answer(model), answer(plain))
    model.dequantize()
    plain.dequantize()
    assert type(model.lm_head) is torch.nn.Linear and hasattr(model.lm_head, "_hf_hook")
    assert torch.equal(answer(model), answer(plain))


def test_what_is_pushed(folders, monkeypatch):
    seen = {}
    for name in ("hf_api", "create_and_tag_model_card"):
        monkeypatch.setattr(transformers.utils.hub, name, unittest.mock.MagicMock())

    def upload(self, folder, *arguments, **words):
        seen["files"], seen["same"] = sorted(os.listdir(folder)), same(from_checkpoint(folder), self)

    monkeypatch.setattr(transformers.PreTrainedModel, "_upload_modified_files", upload)
    model = AutoModelForCausalLM.from_pretrained(folders / "llama", quantization_config=OctileConfig("w8a8"))
    model.push_to_hub("a/b")
    assert seen == {"files": ["config.json", "generation_config.json", "model.safetensors"], "same": True}


@pytest.mark.parametrize("format", ["w8a8-static", "w4a8", "int8-training"])
@pytest.mark.parametrize("name", ["falcon", "qwen2_vl", "jamba", "mixtral", "gpt_oss"])
def test_zoo(name, format, tmp_path):
    """For the other models see transformers_zoo.py."""
    pytest.importorskip("compressed_tensors")
    zoo.make(name).save_pretrained(tmp_path / name)
    assert not zoo.run(name, format, tmp_path / name).refusal


def steps(model, folder):
    """The losses of a few steps with Trainer."""
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 96, (8, 12))]
    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=8, per_device_train_batch_size=8, learning_rate=3e-3, report_to=[], save_strategy="no",
        logging_steps=1, disable_tqdm=True, use_cpu=True, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trainer(folders, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folders / "llama", quantization_config=OctileConfig("int8-training"))
    losses = steps(model, tmp_path)
    assert losses[-1] < losses[0] - 0.3
    model.save_pretrained(tmp_path / "trained")
    assert "quantization_config" not in json.loads((tmp_path / "trained" / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert same(loaded, model) and type(loaded.model.layers[0].mlp.up_proj) is torch.nn.Linear


def test_adapters_by_trainer(folders, tmp_path):
    peft = pytest.importorskip("peft")
    config = OctileConfig("w4a16", group=32)
    model = AutoModelForCausalLM.from_pretrained(folders / "llama", quantization_config=config)
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=32, target_modules=["q_proj", "up_proj"]))
    losses = steps(model, tmp_path)
    assert losses[-1] < losses[0] - 0.1
    model.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(folders / "llama", quantization_config=config)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(answer(again), answer(model.eval()))


def test_generate_and_compile(folders):
    model = AutoModelForCausalLM.from_pretrained(folders / "llama", quantization_config=OctileConfig("w8a8"))
    words = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    static = model.generate(TOKENS, cache_implementation="static", **words)
    assert static.shape == (2, 18) and torch.equal(static, model.generate(TOKENS, **words))
    assert model.hf_quantizer.is_compileable
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(answer(compiled), answer(model))


MEMORY = """
    import sys, threading, time
    import octile
    assert "transformers" not in sys.modules
    import torch, transformers
    from octile.transformers import OctileConfig
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    folder = sys.argv[1]

    def model(**sizes):
        config = transformers.LlamaConfig(vocab_size=256, num_attention_heads=4, num_key_value_heads=4, **sizes)
        return transformers.LlamaForCausalLM(config)

    def load(name, format):
        words = {"dtype": torch.bfloat16, "quantization_config": OctileConfig(format)}
        return transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", **words)

    def memory():
        with open("/proc/self/status") as status:
            return 1024 * next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))

    def watch():
        while not done:
            seen.append(memory())
            time.sleep(0.001)

    model(hidden_size=256, intermediate_size=256, num_hidden_layers=1).save_pretrained(f"{folder}/small")
    big = model(hidden_size=768, intermediate_size=2048, num_hidden_layers=4)
    assert sum(p.numel() for p in big.parameters()) * 4 > 1e8
    big.save_pretrained(f"{folder}/big")
    del big
    for format in ("w8a8", "w4a16"):
        load("small", format)  # loads and creates what is needed only once
        done, seen = False, [memory()]
        watcher = threading.Thread(target=watch)
        watcher.start()
        loaded = load("big", format)
        done = True
        watcher.join()
        size = sum(t.numel() * t.element_size() for t in (*loaded.parameters(), *loaded.buffers()))
        print(size, max(seen) - seen[0])
        del loaded
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_memory_while_loading(tmp_path):
    """The quantized model and one float layer, in the types of the file and of the model; the whole model would be 57 MB.
    malloc gives back what is freed, so that it is not counted."""
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", textwrap.dedent(MEMORY), str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    layer, slack = 768 * 2048 * (4 + 2), 4e6  # slack: buffers of what reads the file, and what else Python allocates
    for line in run.stdout.splitlines():
        size, peak = map(int, line.split())
        assert 0.7 * size < peak < size + layer + slack, (size, peak)
    assert len(run.stdout.splitlines()) == 2
