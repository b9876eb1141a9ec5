"""octile.use_tuning and OCTILE_TUNING: which file of measured kernels the layers' plans use."""

import os
import subprocess
import sys

import octile
import pytest
import torch


@pytest.fixture(autouse=True)
def off_afterwards():
    yield
    octile.use_tuning("off")


def explained(rows):
    return octile.Linear(48, 32, backward="int8").explain(rows=rows)


def test_a_file_is_named_found_or_turned_off(tmp_path, monkeypatch):
    octile.use_tuning("off")
    assert "\ntuning: off\n" in explained(3)
    octile.use_tuning(tmp_path / "absent")
    with pytest.raises(RuntimeError, match=r"the tuning file .*absent cannot be read: No such file"):
        explained(3)
    layer, x = octile.Linear(24, 8), torch.randn(71, 24)
    with pytest.raises(RuntimeError, match="absent cannot be read"):
        layer(x)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    octile.use_tuning()
    assert f"\ntuning: none; {tmp_path}/octile/cpu-" in explained(3)
    assert layer(x).shape == (71, 8)


@pytest.mark.slow
def test_the_environment_chooses():
    code = "import octile; print(octile.Linear(48, 32).explain(rows=3))"
    for value, says in (("off", "tuning: off"), ("/no/such/file", "the tuning file /no/such/file cannot be read")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=dict(os.environ, OCTILE_TUNING=value),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert says in done.stdout
