"""How the package finds its libraries and chooses between the two implementations, each time in a new process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from octile import _c, _ops

LIBRARY = _c.find().resolve()
PACKAGE = Path(_c.__file__).resolve().parent.parent
BINARY = "_octile_torch.so"


def variables(environment):
    kept = {k: v for k, v in os.environ.items() if not k.startswith("OCTILE_")}
    kept |= {"PYTHONPATH": str(PACKAGE), "OCTILE_LIBRARY": str(LIBRARY), **environment}
    return {k: v for k, v in kept.items() if v is not None}


def run(code, **environment):
    """(exit status, output) of Python code that can import the package."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables(environment), capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


# Forks for each line of input. Importing torch takes 3 s.
SERVER = """
import json, os, sys, traceback
import torch
for line in sys.stdin:
    code, variables, output = json.loads(line)
    child = os.fork()
    if child == 0:
        os.environ.clear()
        os.environ.update(variables)
        sys.path.insert(1, variables["PYTHONPATH"])
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1), os.dup2(file, 2)
        status = 0
        try:
            exec(code, {"__name__": "__main__"})
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def run_with_torch(tmp_path_factory):
    """run() in processes that have imported torch but not the package."""
    output = tmp_path_factory.mktemp("run") / "output"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}

    def run(code, **environment):
        output.unlink(missing_ok=True)
        server.stdin.write(json.dumps([code, variables(environment), str(output)]) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline()), output.read_text()

    with subprocess.Popen([sys.executable, "-c", SERVER], env=variables({}), **pipes) as server:
        yield run


def binary():
    found = [p / BINARY for p in (_c.find().parent, LIBRARY.parent, PACKAGE / "octile") if (p / BINARY).exists()]
    if not found:
        pytest.skip(f"there is no {BINARY}")
    return found[0]


TELL = "from octile import _ops; print('binding', _ops.BINDING, '|', _ops.BINDING_REASON)"


def test_binding_that_is_not_known(run_with_torch):
    status, text = run_with_torch(TELL, OCTILE_TORCH_BINDING="cython")
    assert status != 0 and "OCTILE_TORCH_BINDING is 'cython', expected stable or ctypes" in text


def test_binding_is_cpp_where_it_can_be(run_with_torch):
    folder = binary().parent
    status, text = run_with_torch(TELL, OCTILE_LIBRARY=str(folder / "liboctile.so"))
    assert status == 0
    old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11)
    assert ("older than 2.11" in text) if old else ("binding stable |" in text)
    assert "Warning" not in text


def test_forced_binding(run_with_torch):
    status, text = run_with_torch(TELL, OCTILE_TORCH_BINDING="ctypes")
    assert status == 0 and "binding ctypes | OCTILE_TORCH_BINDING is ctypes" in text and "Warning" not in text


def test_without_the_binary(tmp_path, run_with_torch):
    if (PACKAGE / "octile" / BINARY).exists():
        pytest.skip("the installed package has its binary beside it")
    alone = shutil.copy(LIBRARY, tmp_path / "liboctile.so")
    for binding in (None, "stable", "ctypes"):
        status, text = run_with_torch(TELL, OCTILE_LIBRARY=str(alone), OCTILE_TORCH_BINDING=binding)
        assert status != 0 and f"ImportError: octile: there is no {BINARY} in {tmp_path}" in text
    twice = "import os\ntry:\n    from octile import _ops\n"
    twice += f"except ImportError:\n    os.environ['OCTILE_LIBRARY'] = {str(binary().parent / 'liboctile.so')!r}\n"
    status, text = run_with_torch(twice + TELL, OCTILE_LIBRARY=str(alone))
    assert status == 0 and "binding" in text
    (tmp_path / BINARY).write_text("no library")
    status, text = run_with_torch(TELL, OCTILE_LIBRARY=str(alone))
    assert status != 0 and f"ImportError: octile: {tmp_path / BINARY} cannot be loaded" in text


FIND = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("c", {str(PACKAGE / "octile" / "_c.py")!r})
c = importlib.util.module_from_spec(spec)
spec.loader.exec_module(c)
c.Library(c.find())
"""


def test_without_the_library(tmp_path):
    assert run(FIND) == (0, "")
    status, text = run(FIND, OCTILE_LIBRARY=str(tmp_path / "liboctile.so"))
    assert status != 0 and f"ImportError: octile: {tmp_path / 'liboctile.so'} cannot be loaded" in text
    if not (PACKAGE / "octile" / "liboctile.so").exists():
        status, text = run(FIND, OCTILE_LIBRARY=None)
        assert status != 0 and "there is no liboctile.so in" in text and "OCTILE_LIBRARY is not set" in text


def test_library_of_another_version():
    status, text = run(FIND.replace("c.Library(", "c.ABI_VERSION += 1\nc.Library("))
    assert status != 0 and "has ABI version 1; this package speaks version 2" in text


LOAD = """
import ctypes
ctypes.CDLL({library!r})
register = ctypes.CDLL({binary!r}).octile_torch_register
register.restype = ctypes.c_char_p
"""


def test_binary_without_torch():
    code = LOAD.format(library=str(LIBRARY), binary=str(binary())) + "print(register())"
    status, text = run(code)
    assert status == 0 and "libtorch_cpu.so is not loaded" in text


@pytest.mark.skipif(_ops.BINDING != "stable", reason="of the C++ alone")
def test_schemas_of_another_version(run_with_torch):
    """A call with the wrong signature for the binary is refused, and nothing is read from its stack."""
    code = "import torch\nlibrary = torch.library.Library('octile', 'DEF')\n"
    code += "library.define('linear(Tensor x) -> Tensor')\n"
    code += LOAD.format(library=str(LIBRARY), binary=str(binary()))
    code += "print(register())\ntorch.ops.octile.linear(torch.ones(2, 3))"
    status, text = run_with_torch(code)
    assert status != 0 and "None" in text
    assert "RuntimeError: octile::linear: the schema and _octile_torch.so have different versions" in text


FORK = """
import os, signal, threading, warnings
import octile, torch
warnings.simplefilter("ignore")  # Python has one for forks beside threads
torch.set_num_threads(1)
inputs = [torch.ones(1, cols) for cols in range(1, 300)]  # more plans than a thread holds without a lock
quantize = torch.ops.octile.quantize.default
over = False
def quantize_all():
    for x in inputs:
        quantize(x, 1, 0)
def work():
    while not over:
        quantize_all()
threads = [threading.Thread(target=work) for _ in range(4)]
quantize_all()
for thread in threads:
    thread.start()
ended = []
while len(ended) < 100 and not any(ended):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        quantize_all()
        os._exit(0)
    ended.append(os.waitpid(child, 0)[1])
over = True
print(ended)
assert not any(ended)
"""


def test_a_forked_child_does_not_wait_for_the_parents_threads(run_with_torch):
    """As the workers of a DataLoader, beside threads that compute."""
    status, text = run_with_torch(FORK)
    assert status == 0, text
