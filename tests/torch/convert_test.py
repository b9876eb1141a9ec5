"""quantize_(): what it converts, what it leaves and reports, and that the models still work."""

import contextlib
import copy

import octile
import pytest
import torch
from octile import W4A8, W4A16, Int8Training, Linear, W4A8Linear, W4A16Linear, W8A8Dynamic, W8A8Linear, quantize_
from torch import nn


class Tied(nn.Module):
    """An embedding whose table is also the head's weight."""

    def __init__(self, head="lm_head"):
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.block = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64, bias=False))
        setattr(self, head, nn.Linear(64, 96, bias=False))
        self.head = head
        getattr(self, head).weight = self.embed.weight

    def forward(self, tokens):
        return getattr(self, self.head)(self.block(self.embed(tokens)))


def mlp(device="cpu"):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128)).to(device)


def draw(device):
    return torch.randn(9, 128, generator=torch.Generator().manual_seed(3)).to(device)


def error(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize(
    ("config", "kind", "limit"),
    [
        (Int8Training(), Linear, 0.03),
        (W8A8Dynamic(), W8A8Linear, 0.03),
        (W4A16(64), W4A16Linear, 0.25),
        (W4A8(64), W4A8Linear, 0.25),
    ],
)
def test_kinds(config, kind, limit, device):
    model = mlp(device)
    x = draw(device)
    with torch.no_grad():
        exact = model(x)
        report = quantize_(model, config)
        assert type(model[0]) is kind and type(model[2]) is kind and type(model[1]) is nn.ReLU
        assert error(model(x), exact) < limit
    assert report.converted == ["0", "2"] and report.skipped == {}
    assert str(report).splitlines()[0] == f"{config}: 2 layers converted, 0 left as they were"
    assert ": 1 layer converted, " in str(quantize_(nn.Sequential(nn.Linear(64, 64)), config))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("config", [W8A8Dynamic(), W4A16(64), W4A8(64), octile.W8A16()])
def test_weights_that_are_not_finite(config, value):
    model = mlp()
    with torch.no_grad():
        model[2].weight[1, 5] = value
    with pytest.raises(ValueError, match="the weight of 2 has values that are not finite"):
        quantize_(model, config)
    assert type(model[0]) is type(model[2]) is nn.Linear


def test_options_of_another_kind():
    with pytest.raises(TypeError, match="calibration is a str, expected octile.Calibration"):
        W4A16(method="clip", calibration="file")
    with pytest.raises(ValueError, match="method is \\['clip'\\]"):
        W4A16(method=["clip"])
    with pytest.raises(ValueError, match="group is False"):
        W4A16(group=False)


def test_training_keeps_parameters(device):
    model = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    quantize_(model, Int8Training(backward=["int8", "16bit"], activation="per_tensor", per_channel=False))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert (model[0].backward, model[0].activation, model[0].per_channel) == (("int8", "16bit"), "per_tensor", False)
    before = model[0].weight.detach().clone()
    model(draw(device)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    mlp(device).load_state_dict(model.state_dict())


def test_nothing_is_printed(capsys):
    report = quantize_(mlp(), W8A8Dynamic())
    assert capsys.readouterr() == ("", "")
    assert "weights: 263.7 kB to 68.6 kB" in str(report) and repr(report) == str(report)


def test_filter():
    seen = []

    def wanted(module, name):
        seen.append((type(module), name))
        return name == "2"

    report = quantize_(mlp(), W8A8Dynamic(), wanted)
    assert seen == [(nn.Linear, "0"), (nn.Linear, "2")]
    assert report.converted == ["2"] and report.skipped == {"0": "the filter"}


def test_a_forward_of_its_own():
    for config in (Int8Training(), W8A8Dynamic()):
        model = mlp()
        plain = model[0].forward
        model[0].forward = lambda x, plain=plain: plain(x)
        assert quantize_(model, config).skipped == {"0": "its forward was replaced, on the instance"}


def test_trained_and_then_served(device):
    model = mlp(device)
    quantize_(model, Int8Training(backward="int8"))
    x = draw(device)
    with torch.no_grad():
        y = model(x)
        cache = octile.cache_weights_(model[2])
        report = quantize_(model, W8A8Dynamic())
        assert report.converted == ["0"] and "call remove() first" in report.skipped["2"]
        cache.remove()
        assert quantize_(model, W8A8Dynamic()).converted == ["2"]
        assert torch.equal(model(x), y) and list(model.parameters()) == []
    assert not {"_options", "_weight_cache"} & set(model[0].__dict__)
    with pytest.warns(UserWarning, match="converted nothing: it is an octile.QuantizedLinear already"):
        assert quantize_(nn.Sequential(octile.QuantizedLinear(8, 8)), W8A8Dynamic()).converted == []


def test_subclasses_of_ours_and_lists():
    class Mine(Linear):
        pass

    with pytest.warns(UserWarning, match="converted nothing"):
        left = quantize_(nn.Sequential(Mine(64, 64)), W8A8Dynamic()).skipped
    assert left == {"0": "it is an octile.Linear, a Mine, already"}
    model = nn.Sequential(nn.Linear(8, 4))
    quantize_(model, Int8Training(backward="int8-whole"))
    assert model[0].backward == "int8-whole"
    pair = Int8Training(backward=["int8", "16bit"])
    assert hash(pair) == hash(Int8Training(backward=("int8", "16bit")))


def test_heads():
    model = Tied()
    report = quantize_(model, Int8Training())
    assert report.converted == ["block.0", "block.2"] and "a filter has to ask" in report.skipped["lm_head"]
    report = quantize_(model, Int8Training(), lambda module, name: True)
    assert report.converted == ["lm_head"] and "already" in report.skipped["block.0"]
    assert model.lm_head.weight is model.embed.weight  # tied as before
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    assert model.embed.weight.grad is not None


def test_tied_weights():
    model = Tied("decoder")
    report = quantize_(model, W8A8Dynamic())
    assert report.skipped == {"decoder": "its weight is that of embed too: a filter has to ask for it"}
    assert model.decoder.weight is model.embed.weight
    report = quantize_(model, W8A8Dynamic(), lambda module, name: name == "decoder")
    assert report.converted == ["decoder"] and model.decoder.quantized_weight.dtype == torch.int8
    assert model.embed.weight.dtype == torch.float32
    assert model(torch.tensor([[1, 2, 3]])).shape == (1, 3, 96)
    assert quantize_(Tied("decoder"), Int8Training()).skipped == {}


def test_what_is_left_and_why():
    class Mine(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    parametrized = nn.Linear(64, 64)
    nn.utils.parametrize.register_parametrization(parametrized, "weight", nn.Identity())
    model = nn.ModuleDict(
        {
            "mine": Mine(64, 64),
            "parametrized": parametrized,
            "attention": nn.MultiheadAttention(64, 4),
            "plain": nn.Linear(64, 64),
            "odd": nn.Linear(72, 64),
            "long": nn.Linear(131_072, 2, device="meta"),
            "wide": nn.Linear(2, 131_072, device="meta"),
            "imaginary": nn.Linear(64, 64, dtype=torch.complex64),
            "encoder": nn.TransformerEncoderLayer(64, 4, 64),
        }
    )
    left = quantize_(copy.deepcopy(model), W4A16(64)).skipped
    assert "Mine is a subclass" in left["mine"]
    assert "is a subclass" in left["parametrized"] or "not a parameter" in left["parametrized"]
    assert "is a subclass" in left["attention.out_proj"] and "MultiheadAttention reads" in left["attention.out_proj"]
    assert left["odd"] == "group is 64, which does not divide in_features, 72"
    assert left["imaginary"] == "its weight is torch.complex64"
    assert "reads the weight itself" in left["encoder.linear1"]
    assert "plain" not in left
    left = quantize_(copy.deepcopy(model), Int8Training(backward="int8")).skipped
    assert "at most 131071 terms" in left["long"] and "int8 dX" in left["wide"]
    assert "odd" not in left and "encoder.linear1" not in left
    assert "wide" not in quantize_(copy.deepcopy(model), Int8Training()).skipped
    report = quantize_(copy.deepcopy(model), W8A8Dynamic())
    assert "at most 131071 terms" in report.skipped["long"]
    assert "not odd" not in str(report) and "  not mine: Mine is a subclass" in str(report)


class Everything(nn.Module):
    """A matrix of every kind, and an embedding that the head shares."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 32)
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.attention = nn.MultiheadAttention(32, 4)
        self.picture = nn.Conv2d(3, 8, 2)
        self.recurrent = nn.GRU(32, 16)
        self.experts = nn.Module()
        self.experts.down = nn.Parameter(torch.randn(4, 32, 64))
        self.table = nn.Parameter(torch.randn(5, 7))
        self.head = nn.Linear(32, 10)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(9, 9))


def test_the_report_counts_every_matrix():
    model = Everything()
    total = sum(parameter.numel() for parameter in model.parameters())
    report = quantize_(model, W8A8Dynamic())
    matrices = {matrix.name: matrix for matrix in report.matrices}
    assert len(matrices) == len(report.matrices) and report.parameters == total
    expected = {
        "embed.weight": ("Embedding", (10, 32), "looked up"),
        "first.weight": ("W8A8Linear", (64, 32), ""),
        "second.weight": ("W8A8Linear", (32, 64), ""),
        "attention.in_proj_weight": ("MultiheadAttention", (96, 32), "uses it itself"),
        "attention.out_proj.weight": ("NonDynamicallyQuantizableLinear", (32, 32), "MultiheadAttention reads itself"),
        "picture.weight": ("Conv2d", (8, 3, 2, 2), "a convolution"),
        "recurrent.weight_ih_l0": ("GRU", (48, 32), "a recurrent layer"),
        "recurrent.weight_hh_l0": ("GRU", (48, 16), "a recurrent layer"),
        "experts.down": ("Module", (4, 32, 64), "experts in one tensor"),
        "table": ("Everything", (5, 7), "uses it itself"),
    }
    assert matrices.keys() == expected.keys()
    for name, (layer, shape, reason) in expected.items():
        matrix = matrices[name]
        assert (matrix.layer, matrix.shape, matrix.quantized) == (
            layer,
            shape,
            reason == "",
        ) and reason in matrix.reason
        assert (
            matrix.share == pytest.approx(torch.Size(shape).numel() / total)
            and matrix.module == name.rpartition(".")[0]
        )
    assert report.share == pytest.approx(2 * 32 * 64 / total)
    text = str(report)
    assert f"{100 * report.share:.1f} % of the model's {total:,} parameters are weights of quantized layers" in text
    assert "  not experts.down: experts in one tensor" in text and "(Module 4x32x64, " in text
    assert "  not head: its weight is that of embed too" in text and text.count("embed.weight") == 1


def test_what_was_quantized_before():
    model = mlp()
    quantize_(model, W8A8Dynamic(), lambda module, name: name == "0")
    report = quantize_(model, W4A16(64))
    assert report.converted == ["2"] and report.skipped == {"0": "it is an octile.W8A8Linear already"}
    assert [(m.name, m.quantized) for m in report.matrices] == [("0.weight", True), ("2.weight", True)]
    assert report.parameters == 2 * 128 * 256 + 128 + 256 and report.share == pytest.approx(65536 / report.parameters)
    with pytest.warns(
        UserWarning, match="converted nothing: it is an octile.W8A8Linear already .1 layers.; it is an octile.W4"
    ):
        quantize_(model, W4A16(64))


def test_in_training_a_shared_table_counts_once():
    report = quantize_(Tied("decoder"), Int8Training())
    assert {m.name: (m.layer, m.quantized) for m in report.matrices} == {
        "embed.weight": ("Embedding", True), "block.0.weight": ("Linear", True), "block.2.weight": ("Linear", True)
    }  # fmt: skip
    assert report.parameters == 96 * 64 + 2 * 64 * 128 + 128


@pytest.mark.parametrize(
    ("model", "wanted", "says"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 2), nn.Embedding(4, 4)), None, "no torch.nn.Linear and no Conv1D; its matrices: 1 in Conv2d"),
        (nn.Sequential(nn.ReLU()), None, "the model has no torch.nn.Linear and no Conv1D; see docs/how-to/not-converted.md$"),
        (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), lambda module, name: False, r"the filter \(2 layers\)"),
    ],
)  # fmt: skip
def test_nothing_converted(model, wanted, says):
    for config in (Int8Training(), W8A8Dynamic()):
        with pytest.warns(UserWarning, match=f"quantize_.. converted nothing: .*{says}"):
            report = quantize_(model, config, wanted)
        assert report.converted == [] and report.share == 0


def test_transformer_encoder_goes_on_working():
    """Its fast path reads its layers' weights directly."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2).eval()
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        exact = model(x)
        for config in (W8A8Dynamic(), Int8Training()):
            other = copy.deepcopy(model)
            training = type(config) is Int8Training
            with contextlib.nullcontext() if training else pytest.warns(UserWarning, match="reads the weight itself"):
                quantize_(other, config)
            assert error(other(x), exact) < 0.05


def test_the_model_may_be_a_layer(device):
    layer = nn.Linear(128, 64, device=device)
    x = draw(device)
    exact = layer(x).detach()
    report = quantize_(layer, W8A8Dynamic())
    assert type(layer) is W8A8Linear and report.converted == [""] and "the model itself" in str(report)
    assert error(layer(x), exact) < 0.03


def test_modules_stay_the_same_objects():
    shared = nn.Linear(64, 64)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    model.note = [shared]
    shared.mine = "kept"
    calls = []
    handle = shared.register_forward_hook(lambda module, inputs, output: calls.append(type(module)))
    model.eval()
    report = quantize_(model, W8A8Dynamic())
    assert report.converted == ["0"]  # one layer, however many names it has
    assert model[0] is shared and model[2] is shared and model.note[0] is shared
    assert shared.mine == "kept" and not shared.training
    model(torch.randn(3, 64))
    assert calls == [W8A8Linear] * 2
    handle.remove()
    model(torch.randn(3, 64))
    assert len(calls) == 2
    assert list(model.parameters()) == [] and set(copy.deepcopy(model).state_dict()) == set(model.state_dict())


def test_meta_model_is_loaded_later(device):
    """Converted on the meta device, then filled from a checkpoint of a converted model."""
    full = mlp(device)
    quantize_(full, W8A8Dynamic())
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    quantize_(model, W8A8Dynamic())
    model.to_empty(device=device)
    model.load_state_dict(full.state_dict())
    assert torch.equal(model(draw(device)), full(draw(device)))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    assert quantize_(model, W4A16()).converted == ["0", "2"]
    assert model[0].weight.is_meta and model[0].quantized_weight.shape == (256, 64)


def test_half_precision_models(device):
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        model = mlp(device).to(dtype)
        x = draw(device).to(dtype)
        with torch.no_grad():
            exact = model(x)
            quantize_(model, W8A8Dynamic())
            assert model(x).dtype == dtype and error(model(x), exact) < 0.03


def test_refusals():
    with pytest.raises(TypeError, match="converts a torch.nn.Module, not a NoneType"):
        quantize_(None, W8A8Dynamic())
    for config in ("int8", W8A8Dynamic, None):
        with pytest.raises(TypeError, match="none of Int8Training"):
            quantize_(mlp(), config)
    with pytest.raises(ValueError, match="backward is 'fp8'"):
        Int8Training(backward="fp8")
    with pytest.raises(ValueError, match="activation is"):
        Int8Training(activation="per_row")
    with pytest.raises(ValueError, match="group is 16"):
        W4A16(group=16)


@pytest.mark.parametrize("config", [Int8Training(), W8A8Dynamic(), W4A16(64)])
def test_all_or_nothing(config, monkeypatch):
    """Creating the second layer fails, as when memory runs out."""
    model = mlp()
    kinds, before = [type(m) for m in model.modules()], copy.deepcopy(model.state_dict())
    for kind in (Linear, W8A8Linear, W4A16Linear):
        make = kind.from_linear.__func__

        def fails(cls, linear, make=make, **more):
            if linear is model[2]:
                raise MemoryError("no more")
            return make(cls, linear, **more)

        monkeypatch.setattr(kind, "from_linear", classmethod(fails))
    with pytest.raises(MemoryError):
        quantize_(model, config)
    assert [type(m) for m in model.modules()] == kinds
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_names():
    assert all(hasattr(octile, name) for name in octile.__all__)
    assert octile.BINDING in ("stable", "ctypes")


@pytest.mark.parametrize("config", [Int8Training(), W8A8Dynamic()], ids=["training", "frozen"])
def test_what_a_user_has_registered_stays(config, device):
    model = nn.Sequential(nn.Linear(32, 16, device=device))
    layer = model[0]
    layer.gain = nn.Parameter(torch.tensor(2.0, device=device))
    layer.register_buffer("mask", torch.ones(16, device=device))
    layer.register_buffer("count", torch.zeros(1, device=device), persistent=False)
    layer.sub = nn.Identity()
    layer.register_forward_hook(lambda module, _, y: module.sub(y * module.gain * module.mask))
    plain = copy.deepcopy(model)
    octile.quantize_(model, config)
    assert model[0] is layer and {"0.gain", "0.mask"} <= model.state_dict().keys()
    assert "0.count" in dict(model.named_buffers()) and "0.count" not in model.state_dict()
    x = torch.randn(4, 32, device=device)
    torch.testing.assert_close(model(x), plain(x), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("config", [W8A8Dynamic(), W4A16(method="clip")], ids=["nearest", "clip"])
def test_a_weight_that_is_not_finite_is_named(config):
    model = nn.ModuleDict({"up": nn.Linear(128, 16), "down": nn.Linear(128, 16)})
    model["down"].weight.data[3, 3] = torch.inf
    with pytest.raises(ValueError, match="the weight of down has values that are not finite"):
        octile.quantize_(model, config)


def test_another_default_device_or_type(tmp_path):
    model = nn.Sequential(nn.Linear(128, 32))
    static = copy.deepcopy(model)
    with torch.device("meta"):  # as set_default_device() does
        with octile.calibrate(model, samples=4) as calibration:
            model(torch.randn(8, 128, device="cpu"))
        octile.quantize_(model, W4A16(method="clip"))
        octile.save_checkpoint(model, tmp_path / "folder")
        octile.pack_(model)
        octile.quantize_(static, octile.W8A8Static(calibration, smoothing=None))
    assert calibration.layers["0"].rows == 8
    torch.set_default_dtype(torch.float64)
    try:
        for kind in (W4A16Linear, octile.W8A8Linear, octile.W8A8StaticLinear):
            assert kind(128, 32)(torch.randn(2, 128)).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_training_takes_a_weight_that_is_not_finite_yet():
    model = nn.Sequential(nn.Linear(16, 16))
    model[0].weight.data.fill_(torch.nan)
    assert octile.quantize_(model, Int8Training()).converted == ["0"]
