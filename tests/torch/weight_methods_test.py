"""W4A16(method=...): clip search and error feedback lose less of a layer's output than rounding does."""

import octile
import pytest
import torch
from octile import W4A16, calibrate, quantize_, quantizer
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
            plain = octile.W4A16Linear.from_linear(
                model[0], group=group, method=method, second_moments=calibration["0"].second_moments
            ).to_linear()
            errors[method] = (plain(x) - exact).square().mean().item()
    assert errors["clip"] < 0.9 * errors["nearest"] and errors["feedback"] < 0.5 * errors["nearest"]


def test_weights_of_any_type(device):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        plain = layer()[0].to(device, dtype)
        four = octile.W4A16Linear.from_linear(plain, group=32, method="clip")
        assert four.weight.device.type == device.type and four.bias.dtype == dtype
        assert four.weight_scale.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert (four.to_linear(torch.float32).weight - plain.weight.float()).abs().max() < 0.02


def test_refusals():
    with pytest.raises(ValueError, match="method is 'best'; nearest, clip, feedback are known"):
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
    with torch.no_grad(), pytest.raises(RuntimeError, match="NaN|nan|finite"):
        broken = layer()
        broken[0].weight[0, 0] = torch.nan
        quantize_(broken, W4A16(32, "clip"))
