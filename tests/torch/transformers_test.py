"""octile.transformers: from_pretrained(quantization_config=OctileConfig(...)) and from_checkpoint(), on tiny random models."""

import json
import os
import subprocess
import sys
import textwrap

import octile
import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
register = pytest.importorskip("transformers.quantizers.auto")
if not hasattr(register, "register_quantizer") or not hasattr(transformers, "core_model_loading"):
    pytest.skip("this Transformers takes no quantizer from outside", allow_module_level=True)

from octile.transformers import OctileConfig, from_checkpoint  # noqa: E402
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


def test_weights_that_the_files_lack(folders):
    torch.manual_seed(3)
    kind = transformers.BertForSequenceClassification
    model = kind.from_pretrained(folders / "bert", quantization_config=OctileConfig("w8a8"))
    assert "classifier" in model.octile_report.converted and len(model.octile_report.converted) == 8
    assert (model.classifier.weight != 0).any() and torch.isfinite(answer(model)).all()


def test_biases_that_the_files_lack(tmp_path):
    torch.manual_seed(1)
    model = bert()
    tensors = model.state_dict()
    del tensors["encoder.layer.0.output.dense.bias"]
    model.save_pretrained(tmp_path, state_dict=tensors)
    model = AutoModel.from_pretrained(tmp_path, quantization_config=OctileConfig("w8a8"))
    assert not model.encoder.layer[0].output.dense.bias.any()
    assert type(model.encoder.layer[0].output.dense) is octile.W8A8Linear


def test_fused_experts_stay(folders):
    with pytest.warns(UserWarning, match=r"experts in one tensor stay in float: model.layers.0.mlp.experts"):
        model = AutoModelForCausalLM.from_pretrained(folders / "mixtral", quantization_config=OctileConfig("w8a8"))
    plain = AutoModelForCausalLM.from_pretrained(folders / "mixtral")
    octile.quantize_(plain, octile.W8A8Dynamic())
    assert same(model, plain)


def test_recipe_in_config_json(folders, tmp_path):
    """A folder of floats whose config.json says how to quantize them."""
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
        ({"format": "int4"}, "format is 'int4'; w8a8, w8a16, w4a16, w4a8, int8-training are known"),
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


def steps(model, folder):
    """The losses of a few steps by Trainer."""
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
        load("small", format)  # what is loaded and made but once
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
