"""PEFT's LoRA over octile.Linear: trained, merged and unmerged by PEFT alone, on a small random Llama."""

import octile
import pytest
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(0, 96, (4, 32), generator=torch.Generator().manual_seed(1))


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.flatten().double(), b.flatten().double(), 0).item()


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("backward", ["16bit", "int8"])
def test_lora(backward, mode):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 96}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    plain = transformers.LlamaForCausalLM(config)
    octile.quantize_(plain, octile.Int8Training(backward=backward))
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    model = peft.get_peft_model(plain, peft.LoraConfig(r=8, lora_alpha=32, target_modules=targets))
    assert isinstance(plain.model.layers[0].mlp.down_proj.base_layer, octile.Linear)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=0.03), []
    for _ in range(15):
        losses.append(model(input_ids=TOKENS, labels=TOKENS).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.3
    model.train(mode == "train")
    with model.disable_adapter():
        base = logits(model)
    adapted = logits(model)
    assert cosine(base, adapted) < 0.5
    for _ in range(2):
        model.merge_adapter()
        assert cosine(logits(model), adapted) >= 0.999
        model.unmerge_adapter()
        assert cosine(logits(model), adapted) >= 0.999
        with model.disable_adapter():
            assert cosine(logits(model), base) >= 0.999
    merged = model.merge_and_unload()
    assert type(merged.model.layers[0].mlp.down_proj) is octile.Linear
    assert cosine(logits(merged), adapted) >= 0.999


def test_layers_for_inference_are_refused():
    """What the docstring of W8A8Linear says."""
    model = torch.nn.Sequential(octile.W8A8Linear(64, 32), torch.nn.Linear(32, 8))
    with pytest.raises(ValueError, match="Target module W8A8Linear.* is not supported"):
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"]))
