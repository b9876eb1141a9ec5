"""The Python package as others get it: a source distribution with all that a build needs, a wheel with all that the package
needs, and that wheel in a virtual environment of its own, away from the checkout.

The wheel is made by pip from the checkout, without CUDA. With ccache that is quick after a release build, since it is built
beside it; without, it takes a minute. PyTorch is that of the tests' virtual environment.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import unittest
import venv
import zipfile
from pathlib import Path

SOURCE = Path(os.environ["OCTILE_SOURCE_DIR"])

# Run in the new environment; argument: the version in octile.h.
USE = """
import sys
from importlib.metadata import version
from pathlib import Path

import torch

import octile

assert Path(octile.__file__).is_relative_to(sys.prefix), octile.__file__
assert version("octile") == octile.__version__ == sys.argv[1], (version("octile"), octile.__version__)

torch.manual_seed(0)
layer = octile.QuantizedLinear(96, 40, device="cpu", dtype=torch.float32)
x = torch.randn(7, 96, requires_grad=True)
y = layer(x)
y.square().mean().backward()
exact = x @ layer.weight + layer.bias
assert (y - exact).norm() < 0.02 * exact.norm(), (y - exact).norm() / exact.norm()
for tensor in (x, layer.weight, layer.bias):
    assert tensor.grad.shape == tensor.shape and tensor.grad.abs().sum() > 0
print(octile.BINDING)
"""


def run(*command, cwd=None, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OCTILE_LIBRARY")}
    result = subprocess.run(list(map(str, command)), env={**kept, **environment}, cwd=cwd, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=600)
    if result.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}: exit status {result.returncode}\n{result.stdout}")
    return result.stdout


def version_of_header():
    text = (SOURCE / "include" / "octile" / "octile.h").read_text()
    return ".".join(re.search(rf"OCTILE_VERSION_{part} (\d+)", text).group(1) for part in ("MAJOR", "MINOR", "PATCH"))


class PackageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = Path(tempfile.mkdtemp(prefix="octile-package-"))
        cls.addClassCleanup(shutil.rmtree, cls.scratch)
        build = Path(tempfile.mkdtemp(prefix="wheel-", dir=Path(os.environ["OCTILE_BUILD_DIR"]).parent))
        cls.addClassCleanup(shutil.rmtree, build)
        run(sys.executable, "-m", "pip", "wheel", SOURCE, "--no-deps", "--no-build-isolation", "--wheel-dir", cls.scratch,
            "-C", "cmake.define.OCTILE_CUDA=OFF", "-C", f"build-dir={build}", CC=os.environ["OCTILE_CC"], CXX=os.environ["OCTILE_CXX"])
        cls.wheel, = cls.scratch.glob("*.whl")

    def test_wheel(self):
        self.assertRegex(self.wheel.name, rf"^octile-{re.escape(version_of_header())}-py3-none-linux_\w+\.whl$")
        with zipfile.ZipFile(self.wheel) as wheel:
            names = set(wheel.namelist())
            wheel.extractall(self.scratch / "wheel")
            entry_points = wheel.read(f"octile-{version_of_header()}.dist-info/entry_points.txt").decode()
        self.assertEqual(entry_points.split(), ["[vllm.general_plugins]", "octile", "=", "octile.vllm:register"])
        package = {f"octile/{path.name}" for path in (SOURCE / "python" / "octile").iterdir() if path.is_file()}
        self.assertIn("octile/py.typed", package)
        expected = package | {"octile/liboctile.so", "octile/_octile_torch.so", "octile/_octile_reader.so"}
        expected |= {"octile/octile.h", "octile/octile_calibration.h"}
        for shelf in ("tutorials", "how-to", "reference", "explanation"):  # which messages name
            expected |= {f"octile/docs/{shelf}/{path.name}" for path in (SOURCE / "docs" / shelf).iterdir()}
        self.assertEqual({name for name in names if ".dist-info/" not in name}, expected)
        self.assertIn(f"octile-{version_of_header()}.dist-info/licenses/LICENSE", names)

    def test_the_operators_need_no_torch_to_load(self):
        with zipfile.ZipFile(self.wheel) as wheel:
            wheel.extractall(self.scratch / "loaded")
        library = self.scratch / "loaded" / "octile" / "_octile_torch.so"
        if shutil.which("readelf"):
            dynamic = run("readelf", "-d", library)
            self.assertRegex(dynamic, r"RUNPATH.*\[\$ORIGIN\]")
            self.assertNotRegex(dynamic, r"NEEDED.*(torch|c10|python)")
        run(sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", library)

    def test_installed(self):
        home = self.scratch / "installed here"
        venv.create(home, with_pip=False, symlinks=True)
        python = home / "bin" / "python"
        purelib = sysconfig.get_path("purelib", vars={"base": str(home)})
        Path(purelib, "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
        run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", self.wheel)
        for wanted in ("stable", "ctypes"):
            with self.subTest(binding=wanted):
                printed = run(python, "-c", USE, version_of_header(), cwd=self.scratch, OCTILE_TORCH_BINDING=wanted)
                self.assertEqual(printed.strip().splitlines()[-1], wanted)

    def test_source_distribution_is_complete(self):
        run(sys.executable, "-c", "import sys, scikit_build_core.build as b; b.build_sdist(sys.argv[1])", self.scratch,
            cwd=SOURCE)
        archive, = self.scratch.glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            names = {name.partition("/")[2] for name in tar.getnames()}
        needed = ["CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml"]
        for folder in ("cli", "cmake", "data", "docs", "include", "python", "src", "tests"):
            for path in (SOURCE / folder).rglob("*"):
                if path.is_file() and "__pycache__" not in path.parts:
                    needed.append(str(path.relative_to(SOURCE)))
        self.assertEqual([name for name in needed if name not in names], [])
        self.assertEqual([name for name in names if name.startswith((".", "build/")) and name != ".gitignore"], [])


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose torch/ is not PyTorch
    missing = [name for name in ("torch", "scikit_build_core", "pip") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"skipped: Python has no {', '.join(missing)}")
        sys.exit(77)
    unittest.main()
