"""The wheel and the source distribution that `./dev wheel` has made, and the Conan recipe; skipped where it has not run.

The wheel runs in a virtual environment of its own, with the PyTorch and numpy of the tests' one, and no program in PATH.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import unittest
import venv
import zipfile
from pathlib import Path

SOURCE = Path(os.environ["OCTILE_SOURCE_DIR"])
FOLDER = SOURCE / "build" / "wheel"
WHEELS = sorted((FOLDER / "dist").glob("*.whl"))
NEWEST = {"GLIBC": (2, 28), "GCC": (7, 0, 0)}  # manylinux_2_28 also has a libstdc++, which is inside here
SYSTEM = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}

NUMPY = """
import sys
sys.modules["torch"] = None
import numpy as np
import octile
assert octile.__file__.startswith(sys.prefix), octile.__file__
x, w = np.random.default_rng(0).standard_normal((2, 64, 256), dtype="float32")
for weight in (w, octile.arrays.quantize(w, 8, 64), octile.arrays.quantize(w, 4)):
    y, exact = octile.linear(x, weight), x @ w.T
    assert np.linalg.norm(y - exact) < 0.15 * np.linalg.norm(exact)
"""

TORCH = """
import time
import torch
start = time.process_time()
import octile
seconds = time.process_time() - start
torch.manual_seed(0)
layer, x = octile.Linear(256, 64, backward="int8"), torch.randn(7, 256, requires_grad=True)
y = layer(x)
y.square().mean().backward()
exact = torch.nn.functional.linear(x, layer.weight, layer.bias)
assert (y - exact).norm() < 0.02 * exact.norm() and x.grad.norm() > 0 and layer.weight.grad.norm() > 0
try:
    octile.load_checkpoint_(layer, "/nothing")
except Exception as error:
    assert "/nothing" in str(error), error
print(octile.BINDING, seconds)
"""


def run(*command, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OCTILE_LIBRARY")}
    result = subprocess.run(list(map(str, command)), env={**kept, **environment}, cwd=tempfile.gettempdir(), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    if result.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}: exit status {result.returncode}\n{result.stdout}")
    return result.stdout


class WheelTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.wheel, = WHEELS
        cls.scratch = Path(tempfile.mkdtemp(prefix="octile-wheel-"))
        cls.addClassCleanup(shutil.rmtree, cls.scratch)
        with zipfile.ZipFile(cls.wheel) as wheel:
            wheel.extractall(cls.scratch / "wheel")
        cls.libraries = sorted((cls.scratch / "wheel" / "octile").glob("*.so"))

    def test_names(self):
        self.assertRegex(self.wheel.name, r"^octile-[0-9.]+-py3-none-manylinux_2_28_x86_64\.whl$")
        self.assertTrue((FOLDER / "dist" / f"{self.wheel.name.split('-py3')[0]}.tar.gz").exists())
        self.assertEqual([path.name for path in self.libraries], ["_octile_reader.so", "_octile_torch.so", "liboctile.so"])

    def test_nothing_is_younger_than_the_name_says(self):
        for library in self.libraries:
            found = set(re.findall(r"\b(GLIBC|GLIBCXX|CXXABI|GCC)_([0-9.]+)", run("objdump", "-T", library)))
            self.assertIn(("GLIBC", "2.14"), found)
            young = [f"{kind}_{number}" for kind, number in sorted(found)
                     if kind not in NEWEST or tuple(map(int, number.split("."))) > NEWEST[kind]]
            self.assertEqual(young, [], library.name)

    def test_they_need_the_system_alone_and_export_their_own(self):
        for library in self.libraries:
            dynamic = run("readelf", "-d", library)
            needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
            self.assertEqual(needed - SYSTEM, {"liboctile.so"} if library.name == "_octile_torch.so" else set())
            self.assertEqual(set(re.findall(r"\(R(?:UN)?PATH\).*\[(.*)\]", dynamic)) - {"$ORIGIN"}, set())
            exported = re.findall(r"^[0-9a-f]{16} (?!.*\*UND\*).* (\S+)$", run("objdump", "-T", library), re.MULTILINE)
            self.assertTrue(exported)
            self.assertEqual([name for name in exported if not re.match(r"_?octile_|_Z\w*N?K?\d*6octile", name)], [], library.name)

    def test_installed_without_a_compiler(self):
        home = self.scratch / "installed here"
        venv.create(home, with_pip=False, symlinks=True)
        python = home / "bin" / "python"
        purelib = sysconfig.get_path("purelib", vars={"base": str(home)})
        Path(purelib, "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
        run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", self.wheel)
        try:
            run(python, "-c", "import numpy", PATH="")
        except AssertionError:
            self.skipTest("there is no numpy")
        run(python, "-c", NUMPY, PATH="")
        try:
            run(python, "-c", "import torch", PATH="")
        except AssertionError:
            self.skipTest("there is no torch")
        for wanted in ("stable", "ctypes"):
            binding, seconds = run(python, "-c", TORCH, PATH="", OCTILE_TORCH_BINDING=wanted).split()[-2:]
            self.assertEqual(binding, wanted)
            self.assertLess(float(seconds), 0.1)
        print(f"import octile: {1000 * float(seconds):.0f} ms of CPU beyond torch", file=sys.stderr)


@unittest.skipUnless("OCTILE_CONAN" in os.environ, "./dev wheel alone runs it: minutes")
class ConanTest(unittest.TestCase):
    def test_create(self):
        conan, scratch = os.environ["OCTILE_CONAN"], FOLDER / "conan"
        shutil.rmtree(scratch, ignore_errors=True)
        self.addCleanup(shutil.rmtree, scratch)
        run(conan, "profile", "detect", CONAN_HOME=str(scratch))
        printed = run(conan, "create", SOURCE, "--test-folder", SOURCE / "tests" / "package" / "consumer",
                      "-s", "compiler.cppstd=20", "-c", "tools.build:jobs=2", "-c", "tools.cmake.cmaketoolchain:generator=Ninja",
                      "-c", f"tools.cmake.cmake_layout:test_folder={scratch}/test", CONAN_HOME=str(scratch))
        self.assertIn("100% tests passed", printed)


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose torch/ is not PyTorch
    if not WHEELS:
        print("skipped: there is no build/wheel/dist; ./dev wheel makes it")
        sys.exit(77)
    unittest.main()
