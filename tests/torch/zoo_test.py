"""Small random models of ten kinds from Transformers, with every config of quantize_()."""

import copy
import warnings

import pytest
import torch
from octile import W4A16, Int8Training, W8A8Dynamic, W8A8Static, calibrate, load_checkpoint_, quantize_

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
from transformers_zoo import UNPACKED_LATE, cosine, inputs, logits, make  # noqa: E402

transformers.utils.logging.disable_progress_bar()
pytestmark = pytest.mark.usefixtures("one_thread")

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


def configured(which, model, name):
    if which in ("static", "folded"):
        with calibrate(model) as calibration:
            logits(model, name)
        # A search may find no alpha that is best for a layer, so that it has no multiplier.
        return W8A8Static(calibration, 0.5) if which == "static" else W8A8Static(calibration, multipliers=False)
    return {"training": Int8Training(), "dynamic": W8A8Dynamic(), "four": W4A16(32)}[which]


def loads(folder, model, **more):
    """As a user of Transformers loads it, without this package."""
    return type(model).from_pretrained(folder, **more).eval()


@pytest.mark.parametrize("which", CONFIGS)
@pytest.mark.parametrize("name", DYNAMIC)
def test_zoo(name, which, tmp_path):
    """Bounds: with one layer's rows reversed the cosine is at most 0.92 (Mamba: x_proj 0.966, dt_proj 0.991)."""
    model = make(name)
    exact, plain, config = logits(model, name), copy.deepcopy(model), configured(which, model, name)
    report = quantize_(model, config)
    y = logits(model, name)
    assert (0.95 if which == "four" else 0.995) < cosine(y, exact) < 1 - 1e-9
    # Mamba never calls dt_proj, so calibration does not see it; BERT's head trains with its tied table.
    fewer = which in ("static", "folded") and name == "mamba"
    experts = name in ("mixtral", "qwen3_moe") and which in ("training", "dynamic", "four")
    assert len(report.converted) == DYNAMIC[name] - fewer + (which == "training" and name == "bert") + experts
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
        with pytest.warns(UserWarning, match='"octile", which only octile.load_checkpoint_.. reads, not Transformers'):
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
        if experts and which == "dynamic":
            with pytest.raises(RuntimeError):  # Transformers 5.23 joins none but packed experts
                loads(tmp_path, model)
        else:
            assert cosine(logits(loads(tmp_path, model, **more), name), y) > (0.9999 if which == "four" else 0.995)
    assert (tmp_path / "generation_config.json").exists() == model.can_generate()
    assert torch.equal(logits(load_checkpoint_(plain, tmp_path), name), y)
