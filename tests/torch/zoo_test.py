"""Small random models of Transformers, of ten kinds, under every config of quantize_()."""

import copy
import warnings

import octile
import pytest
import torch
from octile import W4A16, Int8Training, W8A8Dynamic, W8A8Static, calibrate, load_checkpoint_, quantize_
from octile.linears import is_linear

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
transformers.utils.logging.disable_progress_bar()
pytestmark = pytest.mark.usefixtures("one_thread")


def text(**more):
    heads = {"num_attention_heads": 4, "num_hidden_layers": 1, "max_position_embeddings": 64}
    return {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96} | heads | more


GQA = {"num_key_value_heads": 2, "head_dim": 16}
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", text(**GQA)),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", text(**GQA)),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", text(**GQA, num_local_experts=4)),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", text(**GQA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    ),
    "bert": ("BertForMaskedLM", "BertConfig", text()),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 96, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 64}),
    "opt": (
        "OPTForCausalLM", "OPTConfig",
        {"vocab_size": 96, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
         "max_position_embeddings": 64, "word_embed_proj_dim": 32},
    ),
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "vit": (
        "ViTForImageClassification", "ViTConfig",
        {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16,
         "patch_size": 8},
    ),
    "mamba": (
        "MambaForCausalLM", "MambaConfig",
        {"vocab_size": 96, "hidden_size": 64, "state_size": 16, "num_hidden_layers": 1, "time_step_rank": 32},
    ),
}  # fmt: skip
CONFIGS = ["training", "dynamic", "static", "folded", "four"]
DYNAMIC = {
    "llama": 7,
    "qwen3": 7,
    "mixtral": 4,
    "qwen3_moe": 4,
    "bert": 7,
    "gpt2": 4,
    "opt": 8,
    "t5": 16,
    "vit": 7,
    "mamba": 4,
}
# Transformers reads these layers' weights before compressed-tensors has unpacked them, unless it is told to dequantize.
UNPACKED_LATE = {"t5", "mamba"}


def make(name):
    """A model whose linear layers decide what it says: with the small weights of the configs it would be the residual."""
    kind, config, fields = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**fields)).eval()
    with torch.no_grad():
        for module in model.modules():
            if is_linear(module) and module is not getattr(model, "lm_head", None):
                inputs = module.weight.shape[0 if hasattr(module, "nx") else 1]
                module.weight.normal_(0, inputs**-0.5)
                if module.bias is not None:
                    module.bias.zero_()  # Mamba's would make its steps too short to matter
    return model


def inputs(name):
    g = torch.Generator().manual_seed(5)
    if name == "vit":
        return {"pixel_values": torch.randn(6, 3, 16, 16, generator=g)}
    x = {"input_ids": torch.randint(3, 96, (6, 12), generator=g)}
    return x | ({"decoder_input_ids": torch.randint(3, 96, (6, 6), generator=g)} if name == "t5" else {})


def logits(model, name):
    with torch.no_grad():
        return model(**inputs(name)).logits


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), dim=0).item()


def configured(which, model, name):
    if which in ("static", "folded"):
        with calibrate(model) as calibration:
            logits(model, name)
        # With a search no alpha may be the best for a layer, so that it has no multiplier.
        return W8A8Static(calibration, 0.5) if which == "static" else W8A8Static(calibration, multipliers=False)
    return {"training": Int8Training(), "dynamic": W8A8Dynamic(), "four": W4A16(32)}[which]


def loads(folder, model, **more):
    """As a user of Transformers loads it, without this package."""
    return type(model).from_pretrained(folder, **more).eval()


@pytest.mark.parametrize("which", CONFIGS)
@pytest.mark.parametrize("name", MODELS)
def test_zoo(name, which, tmp_path):
    """Bounds: with the rows of one layer in reverse the cosine is 0.92 at most (Mamba: x_proj 0.966, dt_proj 0.991)."""
    model = make(name)
    exact, plain, config = logits(model, name), copy.deepcopy(model), configured(which, model, name)
    report = quantize_(model, config)
    y = logits(model, name)
    assert (0.95 if which == "four" else 0.995) < cosine(y, exact) < 1 - 1e-9
    # Mamba never calls dt_proj, so that no calibration sees it; BERT's head trains with the table that it shares.
    fewer = which in ("static", "folded") and name == "mamba"
    assert len(report.converted) == DYNAMIC[name] - fewer + (which == "training" and name == "bert")
    assert 0.1 < report.share < 1 and report.parameters == plain.num_parameters()

    if model.can_generate():
        ids = inputs(name)["input_ids"][:1, :4]
        tokens = model.generate(ids, min_new_tokens=3, max_new_tokens=3, do_sample=False)
        assert tokens.shape[1] == (4 if name == "t5" else 7)
    second = copy.deepcopy(plain)
    quantize_(second, config)
    for parameter in second.parameters():
        parameter.data.zero_()
    second.load_state_dict(model.state_dict())
    assert torch.equal(logits(second, name), y) and torch.equal(logits(copy.deepcopy(model), name), y)

    if which == "training":
        model.save_pretrained(tmp_path)
        assert torch.equal(logits(loads(tmp_path, model), name), exact)
        return
    if which == "static" or name == "gpt2":
        with pytest.warns(
            UserWarning, match='"octile", which octile.load_checkpoint_.. reads, and neither Transformers'
        ):
            model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="octile"):
            loads(tmp_path, model)
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "octile")
            model.save_pretrained(tmp_path)
        more = {}
        if which == "four" and name in UNPACKED_LATE:
            more["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
        assert cosine(logits(loads(tmp_path, model, **more), name), y) > (0.9999 if which == "four" else 0.995)
    assert (tmp_path / "generation_config.json").exists() == model.can_generate()
    assert torch.equal(logits(load_checkpoint_(plain, tmp_path), name), y)
