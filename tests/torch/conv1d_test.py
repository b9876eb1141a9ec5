"""transformers' Conv1D, GPT-2's linear layer with a weight (IN, OUT), under every config."""

import copy
import pickle

import octile
import pytest
import torch
from octile import W4A16, Int8Training, QuantizedLinear, W8A8Dynamic, W8A8Static, calibrate, load_checkpoint_, quantize_
from torch import nn

Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    """A square layer too, where a transposed weight has the right shape."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.norm, self.first, self.square = nn.LayerNorm(64), Conv1D(96, 64), Conv1D(96, 96)
        self.last = Conv1D(32, 96)
        with torch.no_grad():
            for layer in (self.first, self.square, self.last):
                layer.weight.normal_(0, layer.nx**-0.5)
                layer.bias.normal_()

    def forward(self, x):
        return self.last(self.square(self.first(self.norm(x)).relu()).relu())


X = torch.randn(40, 64, generator=torch.Generator().manual_seed(9))


def configs(model):
    with torch.no_grad(), calibrate(model, second_moments=True) as calibration:
        model(X)
    fold = {"norm": ["first"]}
    return {
        "training": Int8Training(),
        "training_int8": Int8Training(backward="int8"),
        "dynamic": W8A8Dynamic(),
        "tensor": W8A8Dynamic(per_channel=False),
        "static": W8A8Static(calibration),
        "folded": W8A8Static(calibration, fold=fold, multipliers=False),
        "four": W4A16(32),
        "feedback": W4A16(32, "feedback", calibration),
    }


INFERENCE = ["dynamic", "tensor", "static", "folded", "four", "feedback"]


def error(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("kind", ["training", "training_int8", *INFERENCE])
def test_every_config(kind):
    model = Block()
    plain, config = copy.deepcopy(model), configs(model)[kind]
    report = quantize_(model, config)
    assert report.converted == ["first", "square", "last"] and report.skipped == {}
    with torch.no_grad():
        y = model(X)
        assert 0 < error(y, plain(X)) < (0.2 if kind in ("four", "feedback") else 0.03)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(X), y)
    for layer, old in ((model.first, plain.first), (model.square, plain.square)):
        assert (layer.nf, layer.nx, layer.out_features, layer.in_features) == (old.nf, old.nx, old.nf, old.nx)
        # The weight reads as it was, (IN, OUT), except for smoothing's factors.
        assert layer.weight.shape == old.weight.shape
        if kind != "static" and (kind != "folded" or layer is model.square):
            assert error(layer.weight.float(), old.weight) < (0.2 if kind in ("four", "feedback") else 0.02)
    if kind in INFERENCE:
        square = model.square.weight + 0
        with torch.no_grad():
            assert octile.pack_(model) == report.converted and torch.equal(model(X), y)
        assert torch.equal(model.square.weight, square)


@pytest.mark.parametrize("backward", ["16bit", "int8"])
def test_training_is_that_of_quantized_linear(backward):
    conv = Conv1D(96, 64)
    holder = nn.ModuleList([conv])
    weight, bias = conv.weight, conv.bias
    quantize_(holder, Int8Training(backward=backward))
    assert isinstance(conv, Conv1D) and conv.weight is weight and conv.bias is bias
    assert list(conv.state_dict()) == ["weight", "bias"] and "backward=" + backward in repr(conv)
    assert conv.activation == "per_token"
    ours = QuantizedLinear(64, 96, dtype=torch.float32, device="cpu", activation="per_token", backward=backward)
    ours.load_state_dict(conv.state_dict())
    results = []
    for layer in (conv, ours):
        x = X.clone().requires_grad_()
        y = layer(x.reshape(4, 10, 64))
        y.square().sum().backward()
        results.append((y, x.grad, layer.weight.grad, layer.bias.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert quantize_(holder, W8A8Dynamic()).converted == ["0"] and not list(holder.parameters())


def test_what_is_left():
    class Mine(Conv1D):
        pass

    shared = nn.Module()
    shared.table, shared.conv = nn.Embedding(32, 64), Conv1D(64, 32)
    shared.conv.weight = shared.table.weight
    with pytest.warns(UserWarning, match="converted nothing"):
        assert "is that of table too" in quantize_(shared, W8A8Dynamic()).skipped["conv"]
    assert quantize_(shared, Int8Training()).converted == ["conv"] and shared.conv.weight is shared.table.weight
    model = nn.ModuleDict({"mine": Mine(64, 32), "odd": Conv1D(64, 40), "plain": Conv1D(64, 64)})
    report = quantize_(model, W4A16(32))
    assert report.converted == ["plain"] and "a subclass of transformers' Conv1D" in report.skipped["mine"]
    assert report.skipped["odd"] == "group is 32, which does not divide in_features, 40"
    assert {m.name: m.shape for m in report.matrices}["odd.weight"] == (40, 64)


@pytest.mark.parametrize("target", ["cpu", "meta"])
@pytest.mark.parametrize("kind", INFERENCE)
def test_checkpoints_are_for_octile_alone(kind, target, tmp_path):
    model = Block()
    quantize_(model, configs(model)[kind])
    with pytest.warns(
        UserWarning, match="first, square, last were a Conv1D, which compressed-tensors has no layout for"
    ):
        octile.save_checkpoint(model, tmp_path)
    other = Block().to(target)
    load_checkpoint_(other, tmp_path)
    with torch.no_grad():
        assert torch.equal(other(X), model(X))
    assert torch.equal(other.square.weight + 0, model.square.weight + 0) and other.square.nf == 96
    layout = '"pack-quantized"' if kind in ("four", "feedback") else '"int-quantized"'
    text = (tmp_path / "config.json").read_text().replace('"octile"', layout)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="first is a quantized linear layer, and the model has a Conv1D there"):
        load_checkpoint_(Block(), tmp_path)
