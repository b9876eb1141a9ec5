"""many_gpus_check.py, if there are enough GPUs."""

import os
import pathlib
import signal
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
    process = subprocess.Popen([sys.executable, program], start_new_session=True)
    try:
        assert process.wait(900) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
