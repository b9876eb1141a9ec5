"""The blocks of C++, C, CMake and commands in the documents: see blocks.py. All C++ is one file, compiled once."""

import os
import re
import subprocess
import tempfile
import unittest
from pathlib import Path

from blocks import KINDS, OTHERS, SOURCE, blocks, pages, prints, wrong_words

LIBRARY = Path(os.environ["OCTILE_LIBRARY"])
BLOCKS = [block for page in pages() for block in blocks(page)]


def run(*command):
    done = subprocess.run(list(map(str, command)), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          stdin=subprocess.DEVNULL, timeout=300)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout


def program(block):
    return re.search(r"\bint main\(", block.text) is not None


class BlocksTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="octile-blocks-")
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_kinds(self):
        self.assertGreater(len(BLOCKS), 100)
        for block in BLOCKS:
            with self.subTest(place=block.place):
                self.assertIn(block.kind, KINDS)
                if block.kind == "":
                    self.assertNotRegex(block.text, r"\A(octile|\./dev|python3|cmake|pip|g\+\+) ", "commands are ```sh")

    def compile(self, compiler, standard, source, executable):
        flags = [standard, "-Wall", "-Wextra", "-Werror", "-Wno-unused", f"-I{SOURCE / 'include'}"]
        run(compiler, *flags, source, "-o", executable, LIBRARY, f"-Wl,-rpath,{LIBRARY.parent}", "-pthread")

    def test_cpp(self):
        ours = [b for b in BLOCKS if b.kind == "cpp" and str(b.page.relative_to(SOURCE)) not in OTHERS]
        self.assertGreater(len(ours), 5)
        includes, parts, calls = {'#include "octile/octile.hpp"', "#include <cstdlib>", "#include <vector>"}, [], []
        for i, block in enumerate(ours):
            includes |= set(re.findall(r"^#include .*$", block.text, re.MULTILINE))
            body = re.sub(r"^#include .*\n", "", block.text, flags=re.MULTILINE)
            where = f'#line {block.line} "{block.place.rsplit(":", 1)[0]}"\n'
            if program(block):
                parts.append(f"namespace block_{i} {{\n{where}{body.replace('int main(', 'int run(')}}}\n")
                calls.append(f"  if (block == {i}) return block_{i}::run();")
            else:
                self.assertTrue(block.given or block.needs, f"{block.place}: neither a program nor given anything")
                parts.append(f"namespace block_{i} {{\nusing namespace octile;\nvoid run() {{\n{block.given}\n{where}{body}}}\n}}\n")
        main = "int main(int, char** argv) {\n  const int block = std::atoi(argv[1]);\n" + "\n".join(calls) + "\n  return 1;\n}\n"
        # A function without a return in place of main, which needs none.
        source, executable = self.folder / "all.cpp", self.folder / "all"
        text = "\n".join(sorted(includes)) + "\n" + "\n".join(parts) + main
        source.write_text(re.sub(r"\bint run\(\) \{(.*?)^}\n", r"int run() {\1  return 0;\n}\n", text, flags=re.MULTILINE | re.DOTALL))
        self.compile(os.environ["OCTILE_CXX"], "-std=c++20", source, executable)
        for i, block in enumerate(ours):
            if program(block):
                with self.subTest(place=block.place):
                    printed = run(executable, i)
                    self.assertTrue(printed.strip())
                    if block.output is not None:
                        self.assertTrue(prints(block, printed), f"{block.place} prints\n{printed}")

    def test_c(self):
        for block in BLOCKS:
            if block.kind == "c":
                source, executable = self.folder / "block.c", self.folder / "block"
                source.write_text(block.text)
                self.compile(os.environ["OCTILE_CC"], "-std=c11", source, executable)
                self.assertTrue(prints(block, run(executable)), block.place)

    def test_cmake(self):
        """Each line occurs in a project that install_test.py builds, apart from names and paths."""
        tried = "".join((SOURCE / "tests" / "package" / name / "CMakeLists.txt").read_text() for name in ("consumer", "subproject"))
        tried = re.sub(r"consumer_cpp", "server", tried)
        found = 0
        for block in BLOCKS:
            for line in block.text.splitlines() if block.kind == "cmake" else []:
                if not re.match(r"cmake_minimum|project|add_executable|FetchContent_Declare", line):
                    found += 1
                    self.assertIn(line, tried, block.place)
        self.assertGreater(found, 3)

    @unittest.skipUnless("OCTILE_COMMAND" in os.environ, "the command was not built")
    def test_commands(self):
        found = 0
        for block in BLOCKS:
            if block.kind == "sh" and block.needs:
                found += 1
                with self.subTest(place=block.place):
                    self.assertEqual(wrong_words(block.text), [])
        self.assertGreater(found, 10)


if __name__ == "__main__":
    unittest.main()
