"""save_pretrained() of Transformers after quantize_(): a folder that loads, or an error."""

import copy
import json
import pickle

import octile
import pytest
import torch
from octile import Int8Training, W8A8Dynamic, load_checkpoint_, quantize_
from torch import nn

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
transformers.utils.logging.disable_progress_bar()
pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.arange(3, 27).reshape(2, 12)


def llama():
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.125,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def test_the_type_that_it_has_now(tmp_path):
    llama().save_pretrained(tmp_path / "float")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float").to(torch.bfloat16)
    quantize_(model, W8A8Dynamic(), lambda module, name: "lm_head" not in name)
    model.save_pretrained(tmp_path / "int8")
    assert json.loads((tmp_path / "int8" / "config.json").read_text())["dtype"] == "bfloat16"


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner


def a_part(model):
    quantize_(model.model.layers[0], W8A8Dynamic())
    return model


def the_base(model):
    quantize_(model.model, W8A8Dynamic())
    return model


def wrapped(model):
    quantize_(Wrapper(model), W8A8Dynamic())
    return model


def copied(model):
    return copy.deepcopy(the_base(model))


def pickled(model):
    return pickle.loads(pickle.dumps(the_base(model)))


def by_hand(model):
    for layer in model.model.layers:
        layer.mlp.up_proj = octile.W8A8Linear.from_linear(layer.mlp.up_proj)
    return model


def four_bits(model):
    quantize_(model, octile.W4A8(32))
    return model


@pytest.fixture
def plain_transformers(monkeypatch):
    """As in a new process, before any layer was created."""
    kind = transformers.PreTrainedModel
    monkeypatch.setattr(kind, "save_pretrained", getattr(kind.save_pretrained, "__wrapped__", kind.save_pretrained))


@pytest.mark.parametrize("how", [a_part, the_base, wrapped, copied, pickled, by_hand, four_bits])
def test_whatever_was_converted(how, plain_transformers, tmp_path):
    model = how(llama())
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    layout = "pack-quantized" if how is four_bits else "int-quantized"
    assert written["quantization_config"]["format"] == layout
    assert written["architectures"] == ["LlamaForCausalLM"] and (tmp_path / "generation_config.json").exists()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    y = logits(model)
    assert (logits(loaded) - y).norm() / y.norm() < 0.03
    assert torch.equal(logits(load_checkpoint_(llama(), tmp_path)), y)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_layers_of_another_process(how, plain_transformers, monkeypatch, tmp_path):
    """Copies and pickles contain their layers and do not create them again."""
    model = the_base(llama())
    kind = transformers.PreTrainedModel
    monkeypatch.setattr(kind, "save_pretrained", kind.save_pretrained.__wrapped__)
    how(model).save_pretrained(tmp_path)
    assert "quantization_config" in json.loads((tmp_path / "config.json").read_text())


def test_what_was_loaded_is_saved(tmp_path):
    """Over itself, as save_pretrained() allows, and over a sharded model."""
    octile.save_checkpoint(the_base(llama()), tmp_path)
    model = load_checkpoint_(llama(), tmp_path)
    y = logits(model)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    model.save_pretrained(tmp_path, False, None)
    assert (tmp_path / "model.safetensors.index.json").exists()
    model.save_pretrained(str(tmp_path), max_shard_size="1GB")
    assert torch.equal(logits(load_checkpoint_(llama(), tmp_path)), y)
    with pytest.raises(FileExistsError, match="force=True"):
        octile.save_checkpoint(model, tmp_path)


def test_files_of_the_model_before(tmp_path):
    """A float model's files, which vLLM would read beside ours: refused, or removed by save_pretrained(). Others stay."""
    llama().save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "model-card.safetensors").write_text("")
    shards = [*tmp_path.glob("model-0*.safetensors")]
    (tmp_path / "config.json").unlink()
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(FileExistsError, match="model-0000"):
        octile.save_checkpoint(the_base(llama()), tmp_path)
    assert len(shards) > 1 and all(path.exists() for path in shards)
    the_base(llama()).save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {"model.safetensors", "model-card.safetensors"}


@pytest.mark.parametrize("how", [the_base, four_bits])
def test_shards(how, tmp_path):
    model = how(llama())
    y = logits(model)
    model.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = {path.name: path.stat().st_size for path in tmp_path.glob("*.safetensors")}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(shards) > 1 and "model.safetensors" not in shards and {*index["weight_map"].values()} == {*shards}
    assert max(shards.values()) < 30_000  # a table of 96 x 64 floats alone has 24,576
    assert torch.equal(logits(load_checkpoint_(llama(), tmp_path)), y)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (logits(loaded) - y).norm() / y.norm() < 0.03
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for size, says in (("20 apples", "20 apples"), (-1, "max_shard_size is -1")):
        with pytest.raises(ValueError, match=says):
            model.save_pretrained(tmp_path, max_shard_size=size)
    with pytest.raises(FileExistsError, match="model-0000"):
        octile.save_checkpoint(model, tmp_path, max_shard_size=20_000)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    octile.save_checkpoint(model, tmp_path, force=True, max_shard_size=40_000)
    fewer = {path.name for path in tmp_path.glob("*.safetensors")}
    assert 1 < len(fewer) < len(shards) and torch.equal(logits(load_checkpoint_(llama(), tmp_path)), y)


def test_an_error_leaves_the_files_of_the_model_before(tmp_path):
    llama().save_pretrained(tmp_path, max_shard_size="20KB")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = the_base(llama())
    model.generation_config.temperature = 0.5  # without do_sample, which Transformers does not write
    with pytest.raises(ValueError, match="temperature"):
        model.save_pretrained(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_is_refused(tmp_path):
    model = the_base(llama())
    for arguments, keywords, says in (
        ((), {"state_dict": model.state_dict()}, "state_dict"),
        ((), {"push_to_hub": True}, "push_to_hub"),
        ((), {"variant": "int8"}, "variant"),
        ((True, model.state_dict()), {}, "state_dict"),
    ):
        with pytest.raises(ValueError, match=f"cannot take {says}: octile.save_checkpoint"):
            model.save_pretrained(tmp_path / "none", *arguments, **keywords)
    quantize_(model, octile.W4A16(32), lambda module, name: name == "lm_head")
    with pytest.raises(ValueError, match="layers of several kinds"):
        model.save_pretrained(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_floats_are_saved_as_ever(tmp_path):
    """Models in training, and models without any of our layers."""
    the_base(llama())
    model = llama()
    y = logits(model)
    model.save_pretrained(tmp_path / "plain", max_shard_size="20KB")
    assert (tmp_path / "plain" / "model.safetensors.index.json").exists()
    quantize_(model, Int8Training())
    model.save_pretrained(tmp_path / "trained", state_dict=model.state_dict())
    for folder in ("plain", "trained"):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert torch.equal(logits(loaded), y)


def test_adapters_are_saved_alone(tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)
    model = peft.get_peft_model(the_base(llama()), lora)
    y = logits(model)
    model.save_pretrained(tmp_path / "peft")
    own = the_base(llama())
    own.add_adapter(lora)
    own.save_pretrained(tmp_path / "transformers")
    for folder in ("peft", "transformers"):
        names = {path.name for path in (tmp_path / folder).iterdir()}
        assert "adapter_model.safetensors" in names and "model.safetensors" not in names
    again = peft.PeftModel.from_pretrained(the_base(llama()), tmp_path / "peft")
    assert torch.equal(logits(again), y)
