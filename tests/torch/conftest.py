"""Shared by the tests of the torch package."""

import gc
import multiprocessing
import os
import socket

# Otherwise torch.compile compiles a program for each instruction set to see whether the compiler supports it: 8 seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

# Tests' worker processes fork from a server that has already done the slow imports.
multiprocessing.get_context("forkserver").set_forkserver_preload(
    [
        "octile.expert_parallel",
        "pytest",
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.nn.parallel",
    ]
)

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: ./dev test fast leaves it out, as it does what is named after compiling")


def pytest_collection_modifyitems(items):
    if os.environ.get("OCTILE_FAST"):
        items[:] = [item for item in items if not item.get_closest_marker("slow") and "compil" not in item.name]


def pytest_collection_finish():
    """Freezes what the imports left, so that it is not collected again: with torch a collection takes 0.3 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20)


@pytest.fixture(scope="module")
def one_thread():
    """For models so small that two threads mostly wait for each other: on a busy machine 69 s become 14."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def start_processes():
    """start_processes(work, arguments, n) runs work(rank, port, *arguments) n times, for a group over gloo."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("no gloo")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]

    def start(work, arguments, n):
        torch.multiprocessing.start_processes(work, (port, *arguments), nprocs=n, start_method="forkserver")

    return start
