"""W4A16(method=...): clip search and error feedback lose less of a layer's output than plain rounding."""

import octile
import pytest
import torch
from octile import W4A8, W4A16, calibrate, quantize_, quantizer
from octile.weight_format import WeightFormat
from torch import nn


def rows(count=600, seed=1):
    """Correlated inputs of uneven size, as activations are."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(96, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -1.5, 96)
    return torch.randn(count, 96, generator=g) @ mix.T


def layer():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(96, 48))


def calibrated(model, **more):
    with torch.no_grad(), calibrate(model, **more) as calibration:
        model(rows())
    return calibration


@pytest.mark.parametrize("group", [0, 32])
def test_better_than_rounding(group, device):
    model = layer().to(device)
    with torch.no_grad(), calibrate(model, second_moments=True) as calibration:
        model(rows().to(device))
    x, errors = rows(seed=5).to(device), {}
    with torch.no_grad():
        exact = model(x)
        for method in quantizer.METHODS:
            other = layer().to(device)
            assert quantize_(other, W4A16(group, method, calibration)).converted == ["0"] or device.type == "cuda"
            integer = layer().to(device)
            assert quantize_(integer, W4A8(group, method, calibration)).converted == ["0"]
            assert torch.equal(integer[0].weight, other[0].weight)
            plain = octile.W4A16Linear.from_linear(
                model[0], group=group, method=method, second_moments=calibration["0"].second_moments
            ).to_linear()
            errors[method] = (plain(x) - exact).square().mean().item()
        scale = model[0].weight.unflatten(1, (-1, group or 96)).abs().amax(-1, keepdim=True) / 7
        plain = (model[0].weight.unflatten(1, (-1, group or 96)) / scale).round() * scale
        extremes = (nn.functional.linear(x, plain.flatten(1), model[0].bias) - exact).square().mean().item()
    assert errors["nearest"] < extremes and errors["clip"] < 0.9 * extremes
    assert errors["feedback"] < 0.5 * errors["nearest"]


DRAWS = {
    "normal": lambda shape: torch.randn(shape),
    "Laplace": lambda shape: torch.distributions.Laplace(0.0, 1.0).sample(shape),
    "uniform": lambda shape: torch.rand(shape) * 2 - 1,
    "heavy": lambda shape: torch.distributions.StudentT(3.0).sample(shape),
    "positive": lambda shape: torch.randn(shape).abs(),
    "negative": lambda shape: -torch.rand(shape),
}


def sqnr(values, quantized):
    return -10 * torch.log10((quantized - values).square().sum() / values.square().sum()).item()


@pytest.mark.parametrize("group", [0, 32, 64, 128])
@pytest.mark.parametrize("draw", DRAWS)
def test_nearest_uses_all_levels_where_that_wins(draw, group):
    """Never worse than a scale of the extremes over 7, nor than torchao's two rules for -8..7."""
    torch.manual_seed(3)
    w = DRAWS[draw]((48, 256))
    q, scale = quantizer.nearest_packed(w, group, 4)
    groups = w.reshape(48, -1, group or 256)
    levels = quantizer.unpack(q, 256).reshape(groups.shape)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    rules = (
        torch.maximum(-low, high) / 7,
        torch.maximum(-low, high) / 7.5,
        torch.maximum(-low / 8, high / 7),
    )
    by_rules = [sqnr(groups, (groups / s).round().clamp(-8, 7) * s) for s in rules]
    ours = sqnr(groups, levels * scale.unsqueeze(-1))
    assert ours > max(by_rules) - 1e-3 and ours > by_rules[0] + 0.4
    assert (scale > 0).all() and levels.max() <= 7 and (levels.min() == -8 or draw == "positive")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", [0, 32, 128])
def test_nearest_has_the_bits_of_the_library(dtype, group):
    for draw in DRAWS.values():
        torch.manual_seed(4)
        w = draw((33, 384) if group else (33, 131)).to(dtype)
        w[3] = 0
        w[4] *= 1e-9
        ours, theirs = (
            quantizer.nearest_packed(w, group, 4),
            quantizer.by_the_library(w, WeightFormat(4, group), "nearest", None),
        )
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("config", [octile.W8A8Dynamic(), W4A16(32), W4A16(0)])
def test_weights_that_become_zero(config):
    model = layer()
    with torch.no_grad():
        model[0].weight[5] *= 1e-10
    with pytest.warns(UserWarning, match=r"(1 of 48 rows|3 of 144 groups) of a weight \(48, 96\) became all zero"):
        quantize_(model, config)


def test_weights_of_any_type(device):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        plain = layer()[0].to(device, dtype)
        four = octile.W4A16Linear.from_linear(plain, group=32, method="clip")
        assert four.weight.device.type == device.type and four.bias.dtype == dtype
        assert four.weight_scale.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert (four.to_linear(torch.float32).weight - plain.weight.float()).abs().max() < 0.02


def test_refusals():
    with pytest.raises(ValueError, match="method is 'best', expected one of nearest, clip, feedback"):
        W4A16(32, "best")
    with pytest.raises(ValueError, match='method="feedback" needs a calibration'):
        W4A16(32, "feedback")
    report = quantize_(layer(), W4A16(32, "feedback", calibrated(layer())))
    assert "its calibration has no second moments" in report.skipped["0"]
    report = quantize_(layer(), W4A16(32, "feedback", octile.Calibration({"1": None})))
    assert report.skipped == {"0": "the calibration has seen no row of its inputs"}
    spoiled = calibrated(layer(), second_moments=True)
    spoiled["0"].channel_max[3] = torch.nan
    with pytest.raises(ValueError, match="a NaN or an infinity came into 0"):
        quantize_(layer(), W4A16(32, "feedback", spoiled))
    with torch.no_grad(), pytest.raises(ValueError, match="the weight of 0 has values that are not finite"):
        broken = layer()
        broken[0].weight[0, 0] = torch.nan
        quantize_(broken, W4A16(32, "clip"))
