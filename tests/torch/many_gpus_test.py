"""many_gpus_check.py, where there are GPUs for it."""

import pathlib
import subprocess
import sys

import pytest
import torch


@pytest.mark.slow
def test_many_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"{torch.cuda.device_count()} GPUs, and two are needed")
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        pytest.skip("no NCCL")
    program = pathlib.Path(__file__).parent / "many_gpus_check.py"
    subprocess.run([sys.executable, program], check=True, timeout=900)
