"""octile puzzles check --prove of a correct kernel, of one that is wrong only beyond the hidden sizes, and of one that does
not compile.

The environment variable OCTILE_COMMAND names the command; without it the test is skipped (status 77), and so it is where
Octile was built without Z3.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

OCTILE = os.environ.get("OCTILE_COMMAND")
if not OCTILE:
    print("skipped: OCTILE_COMMAND is not set")
    sys.exit(77)

KERNEL = """struct MyKernel {
  TILE_KERNEL void operator()(auto& t, auto x, auto z, int n0, auto b0) const {
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    const auto v = t.load(x + i, i < n0);
    t.store(z + i, v + 10.0f, i < n0);
  }
};
"""


def octile(*arguments, cwd):
    return subprocess.run([OCTILE, "puzzles", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cwd)


class Prove(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="octile-prove-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        octile("new", "2", cwd=self.folder)

    def check(self, old, new, *arguments):
        file = self.folder / "masked_add.cpp"
        kernel = KERNEL.replace(old, new)
        file.write_text(re.sub(r"struct MyKernel \{.*?\n\};\n", lambda _: kernel, file.read_text(), flags=re.DOTALL))
        done = octile("check", "masked_add.cpp", "--prove", *arguments, cwd=self.folder)
        if "built without Z3" in done.stdout:
            self.skipTest(done.stdout)
        return done

    def test_right(self):
        done = self.check("", "")
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertRegex(done.stdout, r"right at 10 sizes.*\n.*\n  proved for all sizes, in [0-9.]+ s: in bounds, no race, ")

    def test_wrong_beyond_the_hidden_sizes(self):
        done = self.check("t.program_id(0)", "(t.program_id(0) & 255)", "--report", "page.html")
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertRegex(done.stdout, r"unsafe, at n0 = 8193 \(a hidden size\)\n  masked_add.cpp:20:12: store z: race, ")
        self.assertIn("  refuted: no two programs meet at an element that one of them writes; at n0 = 8193: ", done.stdout)
        page = (self.folder / "page.html").read_text()
        self.assertIn("n0 = 8193", page)
        self.assertIn("refuted: no two programs meet", page)

    def test_a_solution(self):
        done = octile("run", "13", "--prove", cwd=self.folder)
        if "built without Z3" in done.stdout:
            self.skipTest(done.stdout)
        self.assertEqual(done.returncode, 0, done.stdout)
        self.assertRegex(done.stdout, r"13 quantize_global: right at .*\n.*\n.*\n  proved for all sizes, in ")

    def test_that_does_not_compile(self):
        done = self.check("i < n0);", "i < );")
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("masked_add.cpp:19:38: ", done.stdout)


if __name__ == "__main__":
    unittest.main()
