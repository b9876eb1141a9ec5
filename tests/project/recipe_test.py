"""The recipe for a new kernel, docs/how-to/add-kernel.md, followed to the letter: its code blocks go into a copy of the sources, which is
configured and built, and `octile check` finds the new row and compares it with the reference.

What the recipe does not touch is not compiled again: a compiler launcher takes the objects of this build.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SOURCE = Path(os.environ["OCTILE_SOURCE_DIR"])
BUILD = Path(os.environ["OCTILE_BUILD_DIR"])
PAGE = SOURCE / "docs" / "how-to" / "add-kernel.md"
FOLDERS = ("bench", "check", "checkpoint", "cli", "cmake", "data", "docs", "examples", "include", "python", "src", "tile")

# usage: launcher.py COPY COMPILER ARGUMENTS...: reuses the build's object of the same name if its source is the same.
LAUNCHER = """
import os, shutil, subprocess, sys
from pathlib import Path

source_root, build, copy, command = Path({source!r}), Path({build!r}), Path(sys.argv[1]), sys.argv[2:]
if "-c" in command and "-o" in command:
    source, object = Path(command[command.index("-c") + 1]), Path(command[command.index("-o") + 1])
    made = build / object
    if source.is_relative_to(copy) and made.exists():
        original = source_root / source.relative_to(copy)
        if original.exists() and original.read_bytes() == source.read_bytes():
            shutil.copyfile(made, object)
            if "-MF" in command:
                Path(command[command.index("-MF") + 1]).write_text(f"{{object}}: {{source}}\\n")
            sys.exit(0)
with open(Path({log!r}), "a") as log:
    print(command[-1], file=log)
sys.exit(subprocess.call(command))
"""


def blocks():
    """The recipe's code blocks: [(first comment, text)]."""
    codes = re.findall(r"^```cpp\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [(re.match(r"// (.*)\n", code).group(1), code) for code in codes]


def run(*command, **options):
    result = subprocess.run(list(map(str, command)), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            stdin=subprocess.DEVNULL, timeout=600, **options)
    if result.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}: exit status {result.returncode}\n{result.stdout[-4000:]}")
    return result.stdout


class RecipeTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="octile-recipe-")
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve()
        self.copy = self.root / "copy"
        self.copy.mkdir()
        for name in FOLDERS:
            if (SOURCE / name).is_dir():
                shutil.copytree(SOURCE / name, self.copy / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        for path in SOURCE.iterdir():
            if path.is_file() and not path.name.startswith("."):
                shutil.copy(path, self.copy)

    def follow(self):
        """Follows the recipe, and returns the row's name."""
        (path, code), (place, line) = blocks()
        self.assertFalse((self.copy / path).exists())
        (self.copy / path).write_text(code)
        table, macro = re.fullmatch(r"(\S+), in (\w+)", place).groups()
        text = (self.copy / table).read_text()
        start = f"#define {macro}(ROW) \\\n"
        self.assertEqual(text.count(start), 1)
        (self.copy / table).write_text(text.replace(start, start + line.split("\n", 1)[1]))
        return Path(path).stem

    def test_a_new_kernel(self):
        row = self.follow()
        self.assertRegex(row, r"^w8a8_gemm_\w+$")
        launcher, log, made = self.root / "launcher.py", self.root / "compiled", self.root / "build"
        launcher.write_text(LAUNCHER.format(source=str(SOURCE), build=str(BUILD), log=str(log)))
        cache = (BUILD / "CMakeCache.txt").read_text()
        options = re.findall(r"^((?:OCTILE_(?!CCACHE)|CMAKE_(?:CXX|C)_FLAGS|CMAKE_BUILD_TYPE|BUILD_SHARED)\w*):\w+=(.*)$",
                             cache, re.MULTILINE)
        run(os.environ["OCTILE_CMAKE"], "-S", self.copy, "-B", made, "-G", "Ninja", "-DBUILD_TESTING=OFF",
            f"-DCMAKE_C_COMPILER={os.environ['OCTILE_CC']}", f"-DCMAKE_CXX_COMPILER={os.environ['OCTILE_CXX']}",
            *(f"-D{name}={value}" for name, value in options),
            *(f"-DCMAKE_{language}_COMPILER_LAUNCHER={sys.executable};{launcher};{self.copy}" for language in ("C", "CXX", "CUDA")))
        run(os.environ["OCTILE_CMAKE"], "--build", made, "--target", "octile_cli", "-j", "2")
        compiled = log.read_text().split()
        self.assertEqual([path for path in compiled if row in path], [str(self.copy / "src/cpu/gemm" / f"{row}.cpp")])
        info = run(made / "octile", "info")
        self.assertRegex(info, rf"(?m)^{row} +w8a8_gemm +cpu +yes$")
        checked = run(made / "octile", "check", "--kernel", row.rsplit("_", 1)[1], "--quick")
        self.assertRegex(checked, r"[1-9]\d* passed, 0 failed")

    def test_the_recipe_for_a_format_names_what_is_there(self):
        """Its files are at most fifteen, not counting kernels, documents and tests, and contain the names that it gives."""
        section = PAGE.read_text().split("\n## Add a weight format\n")[1]
        section = re.sub(r"\s+", " ", section)
        files = set(re.findall(r"`([a-z][\w/]*/[\w./]+\.\w+)`", section))
        touched = [path for path in files if not re.match(r"docs/|src/reference/|src/cpu/|src/cuda/", path)]
        self.assertGreater(len(touched), 10)
        self.assertLessEqual(len(touched), 15 + 2)  # validate.cpp and packed_weight.h are only for some formats
        named = re.findall(r"`(\w+)(?:\(\))?` in `([\w./]+)`", section)
        self.assertGreater(len(named), 5)
        for name, path in named:
            with self.subTest(path=path):
                self.assertRegex((SOURCE / path).read_text(), rf"\b{name}\b")

    def test_files_that_the_recipes_name_are_there(self):
        text = PAGE.read_text() + (SOURCE / "CONTRIBUTING.md").read_text()
        named = [name for name in re.findall(r"`((?:src|include|cmake|check|checkpoint|docs|tests|tools|python)/[\w./]+)`", text)]
        self.assertGreater(len(named), 10)
        self.assertEqual([name for name in named if not (SOURCE / name).exists()], [])


if __name__ == "__main__":
    unittest.main()
