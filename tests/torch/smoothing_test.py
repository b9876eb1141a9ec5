"""W8A8Static: smoothing, folding into the layers before, and the outliers that it removes."""

import copy
import dataclasses
import json
import warnings

import numpy as np
import octile
import pytest
import torch
from octile import W8A8Static, W8A8StaticLinear, calibrate, quantize_, smoothing
from torch import nn

WIDTH = 64


class Block(nn.Module):
    """A norm that two layers read, values that an output layer reads, and a feed-forward part."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.norm = norm(WIDTH)
        self.value, self.gate = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32)
        self.out = nn.Linear(32, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 96), nn.ReLU(), nn.Linear(96, WIDTH))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.out(self.value(h) * self.gate(h).sigmoid())
        return x + self.mlp(x)


FOLD = {"norm": ["value", "gate"], "value": ["out"], "mlp.0": ["mlp.1"], "mlp.1": ["mlp.3"]}


def block(outliers=1.0, norm=nn.LayerNorm):
    """With outliers in a few channels of the layers' inputs, which the next layer scales back: the same function."""
    torch.manual_seed(3)
    model = Block(norm).eval()
    with torch.no_grad():
        for first, nexts, columns in (
            (model.norm, (model.value, model.gate), [5]),
            (model.mlp[0], (model.mlp[1],), [7]),
            (model.value, (model.out,), [9]),
            (model.mlp[1], (model.mlp[3],), [40]),
        ):
            for parameter in (first.weight, getattr(first, "bias", None)):
                if parameter is not None:
                    parameter[columns] *= outliers
            for layer in nexts:
                layer.weight[:, columns] /= outliers
    return model


def batch(rows=200, seed=4):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def calibrated(model, **more):
    # With few rows a channel's largest value is soon exceeded, the more so the more channels are made equally large.
    with torch.no_grad(), calibrate(model, **more) as calibration:
        model(batch(4000))
    return calibration


def sqnr(y, exact):
    return 10 * torch.log10(exact.square().mean() / (y - exact).square().mean()).item()


def served(model, calibration, **config):
    model = copy.deepcopy(model)
    report = quantize_(model, W8A8Static(calibration, **config))
    assert len(report.converted) == 5
    with torch.no_grad():
        return model, model(batch(seed=5))


@pytest.fixture(scope="module")
def outliers():
    """x50 in a channel of each input: a block, its calibration, the exact result, the SQNR without and with outliers."""
    plain, spoiled = block(), block(50.0)
    with torch.no_grad():
        exact = plain(batch(seed=5))
        assert sqnr(spoiled(batch(seed=5)), exact) > 100
    calibration = calibrated(spoiled)
    before = sqnr(served(plain, calibrated(plain), smoothing=None)[1], exact)
    naive = sqnr(served(spoiled, calibration, smoothing=None)[1], exact)
    return spoiled, calibration, exact, before, naive


@pytest.mark.parametrize("fold", [FOLD, "auto", None])
@pytest.mark.parametrize("smoothing", ["search", 0.8])
def test_outliers(outliers, smoothing, fold):
    """Smoothing recovers at least 90 % of the decibels that the outliers cost."""
    spoiled, calibration, exact, before, naive = outliers
    model, y = served(spoiled, calibration, smoothing=smoothing, fold=fold)
    assert before - naive > 15
    assert sqnr(y, exact) - naive >= 0.9 * (before - naive)
    with_multiplier = [n for n, m in model.named_modules() if getattr(m, "input_multiplier", None) is not None]
    expected = {"auto": ["value", "gate", "out", "mlp.3"], None: ["value", "gate", "out", "mlp.1", "mlp.3"]}
    assert with_multiplier == ([] if fold is FOLD else expected[fold])


def test_only_where_it_folds(tmp_path):
    """multipliers=False; and what the report and save_checkpoint say about layers that multiply their inputs."""
    model = block(50.0)
    calibration = calibrated(model)
    folds = {"norm": ["value", "gate"], "value": ["out"]}
    results = {}
    for multipliers in (True, False):
        results[multipliers] = other = copy.deepcopy(model)
        report = quantize_(other, W8A8Static(calibration, smoothing=0.7, fold=folds, multipliers=multipliers))
        rest = ["mlp.1", "mlp.3"]
        assert report.multipliers == (rest if multipliers else [])
        assert list(report.unsmoothed) == ([] if multipliers else rest)
        assert ("2 layers multiply their inputs: mlp.1, mlp.3" in str(report)) == multipliers
        assert ("only Octile loads a checkpoint of them; multipliers=False" in str(report)) == multipliers
        assert ("  not smoothed: mlp.1: no layer before it takes the factors" in str(report)) != multipliers
        assert other.value.input_multiplier is None and (other.mlp[1].input_multiplier is not None) == multipliers
    # The same folds; other layers as if nothing had been smoothed.
    plain = copy.deepcopy(model)
    assert quantize_(plain, W8A8Static(calibration, smoothing=None)).unsmoothed == {}
    assert torch.equal(results[True].gate.quantized_weight, results[False].gate.quantized_weight)
    assert torch.equal(plain.mlp[3].quantized_weight, results[False].mlp[3].quantized_weight)
    assert not torch.equal(plain.gate.quantized_weight, results[False].gate.quantized_weight)

    with pytest.warns(UserWarning, match=r"mlp.1, mlp.3 multiply their inputs: W8A8Static\(multipliers=False\)"):
        octile.save_checkpoint(results[True], tmp_path / "multiplied")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        octile.save_checkpoint(results[False], tmp_path / "folded")
    for name, layout in (("multiplied", "octile"), ("folded", "int-quantized")):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["quantization_config"]["format"] == layout
    with pytest.raises(ValueError, match="fold=None with multipliers=False smooths nothing: use smoothing=None"):
        W8A8Static(calibration, fold=None, multipliers=False)
    with pytest.raises(ValueError, match="multipliers is 'never', expected True or False"):
        W8A8Static(calibration, multipliers="never")


def smoothed_in_place(model, layers, config):
    """The float model after smoothing, before any of it is quantized."""
    smoothed, changes = smoothing.smooth(model, layers, config)
    for name, own in smoothed.items():
        layers[name].weight.copy_(own.weight if own.multiplier is None else own.weight * own.multiplier)
        if own.bias is not None:
            layers[name].bias.copy_(own.bias)
    for parameter, new in changes:
        parameter.copy_(new)
    return smoothed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_columns_are_multiplied_by_what_the_norm_was_divided_by(dtype):
    """A norm's weight is rounded to its type: to 8 bits in bfloat16."""
    model = block(50.0).to(dtype)
    config = W8A8Static(calibrated(block(50.0)), smoothing=0.7, fold={"norm": ["value", "gate"]})
    layers = {name: getattr(model, name) for name in ("value", "gate", "out")}
    with torch.no_grad():
        model.norm.weight *= torch.rand(WIDTH, generator=torch.Generator().manual_seed(1)) + 0.5
    smoothed, changes = smoothing.smooth(model, layers, config)
    (_, norm), (_, bias) = changes
    assert norm.dtype is dtype and not torch.equal(norm, model.norm.weight)
    for name in ("value", "gate"):
        # Three roundings to float32: of the quotient, the product, and the smoothed weight when read back.
        exact = layers[name].weight.detach().double() * model.norm.weight.detach().double()
        assert torch.allclose(smoothed[name].weight.double() * norm.double(), exact, rtol=3 * 2.0**-24, atol=0)
    s = model.norm.weight.detach().double() / norm.double()
    assert torch.equal(bias, (model.norm.bias.detach().double() / s.float()).to(dtype))
    again = W8A8Static(config.calibration, smoothing=0.7, fold=config.fold)
    with torch.no_grad():
        quantize_(model, again, lambda module, name: name in layers)
    assert torch.equal(model.norm.weight, norm)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_fold_keeps_the_function(norm):
    model = block(50.0, norm)
    config = W8A8Static(calibrated(model), fold=FOLD)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    with torch.no_grad():
        exact = model.double()(batch().double())
        smoothed = smoothed_in_place(model, layers, config)
        for name, own in smoothed.items():
            assert own.multiplier is None and own.channel_max.shape == (layers[name].in_features,)
        assert torch.allclose(model(batch().double()), exact, rtol=1e-9, atol=1e-9)
    again = calibrated(model.float())
    for name, own in smoothed.items():
        assert torch.allclose(again[name].channel_max, own.channel_max, rtol=1e-4)


def test_scales_and_weights_are_the_formula():
    model = block()
    calibration = calibrated(model)
    weight, largest = model.value.weight.detach().clone(), calibration["value"].channel_max
    quantize_(model, W8A8Static(calibration, smoothing=0.7, fold=None))
    s = (largest.clamp(1e-5) ** 0.7 / weight.abs().amax(0).clamp(1e-5) ** 0.3).clamp(1e-5)
    layer = model.value
    assert type(layer) is W8A8StaticLinear and torch.allclose(layer.input_multiplier, 1 / s, rtol=1e-6)
    assert layer.input_scale.item() == ((largest * layer.input_multiplier).max() / torch.tensor(127.0)).item()
    q, _, scale = torch.ops.octile.quantize(weight / layer.input_multiplier, 1, 0)
    assert torch.allclose(layer.weight_scale, scale, rtol=1e-6) and (layer.quantized_weight - q).abs().max() <= 1
    plain = block()
    quantize_(plain, W8A8Static(calibration, smoothing=None))
    assert plain.value.input_multiplier is None
    assert plain.value.input_scale.item() == (largest.max() / torch.tensor(127.0)).item()


def test_search_by_second_moments():
    model = block(50.0)
    with torch.no_grad():
        exact = model(batch(seed=5))
        by_moments, by_rows = copy.deepcopy(model), copy.deepcopy(model)
        quantize_(by_moments, W8A8Static(calibrated(model, second_moments=True, samples=0)))
        quantize_(by_rows, W8A8Static(calibrated(model)))
        assert abs(sqnr(by_moments(batch(seed=5)), exact) - sqnr(by_rows(batch(seed=5)), exact)) < 3
    with pytest.raises(ValueError, match='smoothing="search" needs sample rows or second moments, and value has neith'):
        quantize_(model, W8A8Static(calibrated(model, samples=0), fold=None))
    assert type(model.value) is nn.Linear


def small(name):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    same = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": 256, "max_position_embeddings": 64}
    if name == "llama":
        config = transformers.LlamaConfig(**same, **text, intermediate_size=128)
        return transformers.LlamaModel(config).eval()
    if name == "bert":
        config = transformers.BertConfig(**same, **text, intermediate_size=256)
        return transformers.BertModel(config, add_pooling_layer=False).eval()
    config = transformers.ViTConfig(**same, intermediate_size=256, image_size=32, patch_size=8)
    return transformers.ViTModel(config, add_pooling_layer=False).eval()


def sequences(name, rows, seed):
    """Batches of at least this many rows: texts of 33 tokens, images of 17 patches."""
    g = torch.Generator().manual_seed(seed)
    if name == "vit":
        return torch.randn(-(-rows // 17), 3, 32, 32, generator=g).split(64)
    return torch.randint(2, 256, (-(-rows // 33), 33), generator=g).split(64)


def hidden(model, batches):
    with torch.no_grad():
        return torch.cat([model(batch).last_hidden_state.flatten(0, 1) for batch in batches])


@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_the_search_on_unseen_rows(name, one_thread):
    """Never more than 0.3 dB worse than no smoothing, and better by more than 1 dB where there are rows enough.

    Rows of one text resemble each other, above all behind BERT's attention: its maxima are those of few texts.
    """
    model = small(name)
    unseen = sequences(name, 3000, 777)
    exact, gains = hidden(model, unseen), {}
    for rows in (256, 512, 1056, 4352, 16896):
        with torch.no_grad(), calibrate(model, second_moments=True) as by_samples:
            for batch in sequences(name, rows, 1):
                model(batch)
        without = {name: dataclasses.replace(s, samples=None) for name, s in by_samples.layers.items()}
        errors = []
        for seen, how in ((by_samples, None), (by_samples, "search"), (octile.Calibration(without), "search")):
            quantized = copy.deepcopy(model)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about few rows
                quantize_(quantized, W8A8Static(seen, how))
            errors.append(sqnr(hidden(quantized, unseen), exact))
        gains[rows] = [error - errors[0] for error in errors[1:]]
    assert min(min(both) for both in gains.values()) > -0.3 and min(gains[4352]) > 1 and min(gains[16896]) > 1.5, gains


def test_no_smoothing_is_a_choice():
    """Equal channels and few rows: nothing is folded, and no layer multiplies its input."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32))
    with torch.no_grad(), calibrate(model) as few:
        model(batch(140))
    norm = model[0].weight.clone()
    few_rows = "smoothing is based on 140 calibration rows. With fewer than 1,024, unseen"
    with pytest.warns(UserWarning, match=few_rows) as warned:
        report = quantize_(model, W8A8Static(few))
    assert warned[0].filename == __file__
    assert report.unsmoothed == {"1": "no alpha is better than no smoothing"}
    assert torch.equal(model[0].weight, norm) and model[1].input_multiplier is None
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "octile: smoothing is based")
        quantize_(block(), W8A8Static(few, smoothing=None), lambda module, name: False)
        quantize_(block(50.0), W8A8Static(calibrated(block(50.0))))


def test_bad_configurations():
    calibration = calibrated(block())
    for smoothing in (1.5, -0.1, "best", float("nan"), True, False, np.float32(1.5)):
        with pytest.raises(ValueError, match="smoothing is .*, expected None"):
            W8A8Static(calibration, smoothing)
    assert W8A8Static(calibration, np.float32(0.5)).smoothing == 0.5
    with pytest.raises(ValueError, match="fold is 'all'"):
        W8A8Static(calibration, fold="all")
    with pytest.raises(TypeError, match="calibration is a dict, expected octile.Calibration"):
        W8A8Static({})
    with pytest.raises(ValueError, match="the calibration has no layers"):
        quantize_(block(), W8A8Static(octile.Calibration()), lambda module, name: True)


class Shifted(nn.RMSNorm):
    def forward(self, x):
        return nn.functional.rms_norm(x, (WIDTH,)) * (1 + self.weight)


@pytest.mark.parametrize(
    ("fold", "says"),
    [
        ({"nothing": ["value"]}, "the model has no 'nothing'"),
        ({"mlp.2": ["mlp.3"]}, "mlp.2, a ReLU, has no weight to divide"),
        ({"norm": ["mlp.0"]}, "'mlp.0' is not a layer that is converted"),
        ({"norm": ["out"]}, "out has 32 inputs, and norm 64 outputs"),
        ({"norm": ["value", "value"]}, "value is listed twice"),
        ({"norm": ["value", "value_again"]}, "value is listed twice"),
        ({"norm": ["value"], "norm_again": ["gate", "value"]}, "value is listed twice"),
        ({"shifted": ["value"]}, "the output of shifted, a Shifted, is not proportional to its weight"),
        ({"table": ["value"]}, "table is a Embedding; norms and torch.nn.Linear can be"),
        ({"norm": "value"}, "'norm' has 'value', expected a list of names"),
        ({"norm": None}, "'norm' has None, expected a list of names"),
        ({"tied": ["value"]}, r"tied shares its weight with \['mlp.0', 'tied'\]"),
    ],
)
def test_bad_folds(fold, says):
    model = block()
    calibration = calibrated(model)
    model.shifted, model.tied, model.table = Shifted(WIDTH), nn.LayerNorm(WIDTH), nn.Embedding(WIDTH, 2)
    model.tied.weight = model.mlp[0].weight
    model.value_again, model.norm_again = model.value, model.norm
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=says):
        quantize_(model, W8A8Static(calibration, fold=fold))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize("fold", [{"0": ["0"]}, {"0": ["2"], "2": ["0"]}])
def test_folds_that_go_in_circles(fold):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with torch.no_grad(), octile.calibrate(model) as calibration:
        model(torch.randn(100, 64))
    with pytest.raises(ValueError, match="fold: the output of 0 feeds back into it"):
        quantize_(model, W8A8Static(calibration, fold=fold))


def test_a_producer_that_cannot_hold_it():
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)).half()
    with torch.no_grad():
        model[0].weight.fill_(6e4)
        model[1].weight.fill_(6e4)
    statistics = octile.calibration.InputStatistics(torch.full((4,), 1e-5), 3)
    with pytest.raises(ValueError, match="torch.float16 cannot hold the divided weights of a layer before"):
        quantize_(model, W8A8Static(octile.Calibration({"1": statistics}), smoothing=0.0))
    assert model[0].weight[0] == 6e4


def test_a_module_that_comes_again_is_no_neighbour():
    act, norm = nn.GELU(), nn.LayerNorm(8)
    assert smoothing.known_folds(nn.Sequential(nn.Linear(8, 8), act, nn.LayerNorm(8), act, nn.Linear(8, 8))) == {}
    assert smoothing.known_folds(nn.Sequential(norm, nn.Linear(8, 8), norm, nn.Linear(8, 8))) == {}
    assert smoothing.known_folds(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))) == {"0": ["1"]}


@pytest.mark.parametrize(
    "fold",
    [
        {"again.norm": ["again.value", "gate"]},
        {"norm": ["value"], "again.norm": ["gate"]},
        {"again.norm": ["gate", "value"]},
    ],
)
def test_a_layer_of_several_names(fold):
    """The same module under several names: one norm, divided once, by one s."""
    plain, model = block(50.0), block(50.0)
    model.again = nn.ModuleDict({"value": model.value, "norm": model.norm})
    for each, folds in ((plain, {"norm": ["value", "gate"]}), (model, fold)):
        quantize_(each, W8A8Static(calibrated(each), smoothing=0.7, fold=folds))
    assert torch.equal(plain.norm.weight, model.norm.weight)
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in plain.state_dict().items())


def test_shared_layers_are_not_folded_by_themselves():
    """What else reads them is not known; folds that are named are trusted."""
    norm = nn.LayerNorm(8)
    model = nn.ModuleList([nn.Sequential(norm, nn.Linear(8, 8)), nn.Sequential(norm, nn.ReLU())])
    assert smoothing.known_folds(model) == {}
    model = nn.ModuleList([nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))] * 2)  # a shared block
    assert smoothing.known_folds(model) == {"0.0": ["0.1"]}
    model = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))
    model[1][0].weight = model[0][0].weight
    assert smoothing.known_folds(model) == {}
    assert smoothing.known_folds(nn.Sequential(nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 8))) == {}


def test_nothing_is_changed_by_halves(monkeypatch):
    """Creating a layer fails after the layers before were divided."""
    model = block(50.0)
    calibration, before = calibrated(model), copy.deepcopy(model.state_dict())
    make = W8A8StaticLinear.from_linear.__func__

    def fails(cls, linear, *given, **more):
        if linear is model.mlp[3]:
            raise MemoryError("no more")
        return make(cls, linear, *given, **more)

    monkeypatch.setattr(W8A8StaticLinear, "from_linear", classmethod(fails))
    with pytest.raises(MemoryError):
        quantize_(model, W8A8Static(calibration, fold=FOLD))
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert type(model.value) is nn.Linear


def test_filtered_layers_are_not_folded():
    """`gate` reads the norm's output too, and stays as it is."""
    model = block()
    calibration = calibrated(model)
    only = lambda module, name: name == "value"  # noqa: E731
    with pytest.raises(ValueError, match="'gate' is not a layer that is converted"):
        quantize_(model, W8A8Static(calibration, fold={"norm": ["value", "gate"]}), only)
    norm = model.norm.weight.clone()
    quantize_(model, W8A8Static(calibration), only)
    assert model.value.input_multiplier is not None and torch.equal(model.norm.weight, norm)


KNOWN = [
    "BertModel",
    "RobertaModel",
    "ElectraModel",
    "OPTModel",
    "LlamaModel",
    "MistralModel",
    "Qwen2Model",
    "Qwen3Model",
]


@pytest.mark.parametrize("name", KNOWN)
def test_known_blocks(name):
    """Folds in transformers' blocks do not change the float model's function."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, name.replace("Model", "Config"))(
        vocab_size=64, hidden_size=64, intermediate_size=96, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=16, max_position_embeddings=64, word_embed_proj_dim=64, pad_token_id=1,
    )  # fmt: skip
    torch.manual_seed(1)
    model = getattr(transformers, name)(config).eval()
    tokens = torch.randint(2, 64, (3, 9), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        exact = model(tokens).last_hidden_state
        with calibrate(model) as calibration:
            model(tokens)
        layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and calibration[n].rows}
        folds = smoothing.known_folds(model)
        assert len(folds) == {"BertModel": 2, "RobertaModel": 2, "ElectraModel": 2, "OPTModel": 6}.get(name, 8)
        before = copy.deepcopy(model.state_dict())
        smoothed_in_place(model, layers, W8A8Static(calibration, smoothing=0.6))
        changed = [n for n, t in model.state_dict().items() if not torch.allclose(t, before[n], rtol=1e-3)]
        assert {n.removesuffix(".weight") for n in changed if n.endswith("weight")} >= set(folds)
        assert torch.allclose(model(tokens).last_hidden_state, exact, rtol=1e-3, atol=1e-4)
        report = quantize_(model, W8A8Static(calibration))
        assert len(report.converted) == len(layers)
        assert sqnr(model(tokens).last_hidden_state, exact) > 20
