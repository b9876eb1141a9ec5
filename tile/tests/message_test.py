"""Mistakes in a kernel that must not compile: the only error is one sentence of ours, which names the kernel's line."""
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

SOURCE = pathlib.Path(os.environ.get("OCTILE_SOURCE_DIR", pathlib.Path(__file__).parents[2]))
COMPILER = os.environ.get("OCTILE_CXX", "c++")

# The line of a kernel and its message. i is a column of 8, j a row of 16; x and z hold f32, n holds s32.
MISTAKES = {
    "t.store(z + j, t.load(x + j) + t.load(x + t.arange(c<8>)));":
        "the two tiles have different numbers of columns, and neither has 1; col(v) is v[:, None].",
    "t.store(z + i, t.load(x + i) + t.load(x + col(t.arange(c<4>))));":
        "the two tiles have different numbers of rows, and neither has 1.",
    "t.arange(c<200>);": "every side of a tile is a power of two.",
    "col(col(i));": "col() would make a tile of rank 4; the maximum is 3.",
    "t.load(x + j, i < 3);": "the mask has more rows, columns or planes than the tile of pointers.",
    "t.load(x + j, j);": "a mask is a comparison, or a tile of bool.",
    "t.store(z + j, t.load(x + i));": "the value stored has more rows, columns or planes than the tile of pointers.",
    "t.store(z + j, t.load(n + j));": "the value stored is of another type than the tensor; cast it, as in cast<f16>(v).",
    "t.store(n + j, 1.5f);": "the value stored is a float, but the tensor holds integers; cast it.",
    "t.store(n + j, f16(1.5f));": "the value stored is a float, but the tensor holds integers; cast it.",
    "t.full(c<2048>, c<1024>, 0.0f);": "a tile has at most 2^20 elements; take it block by block.",
    "t.load(n + j, j < 3, 0.5f);": "`other` is a float, but the tensor holds integers.",
    "cast<s8>(t.load(x + j));":
        "a cast from a float to an integer states its rounding, as in cast<s8, Round::even>(x).",
    "cast<f16, Round::zero>(t.load(x + j));":
        "only a cast from a float to an integer rounds in another way than to nearest.",
    "t.load(x + j) % 2;": "% takes integers.",
    "t.load(x + j) & 1;": "the bit operators & | ^ take integers or masks.",
    "exp2(j);": "exp2() takes floats.",
    "t.load(x + t.load(x + j));": "an index is an integer.",
    "auto p = x + t.load(n + j); p += 1;":
        "+= would change the type of the pointers on its left; x + cast<s64>(index) starts wide ones.",
    "where(j, 1.0f, 2.0f);": "the first argument of where() is a mask.",
    "reshape(t.load(x + j), c<8>);": "reshape() keeps the number of elements.",
    "dot(t.load(x + i * 16 + j), t.load(x + i * 16 + j), t.full(c<8>, c<16>, 0.0f));":
        "dot(a, b) needs as many columns of a as rows of b.",
    "dot(t.load(x + i * 16 + j), trans(t.load(x + i * 16 + j)), t.full(c<8>, c<16>, 0.0f));":
        "the accumulator of dot(a, b) has the rows of a and the columns of b.",
    "dot(t.load(x + i + j), trans(t.load(x + i + j)), t.full(c<8>, c<8>, 0));":
        "dot() sums floats in f32 and s8 in s32.",
    "auto total = t.full(c<8>, 0.0f); total += t.load(x + col(t.arange(c<8>)) + t.arange(c<8>));":
        "+= would change the type or the shape of the tile on its left.",
    "auto top = t.full(c<8>, 0.0f); top = maximum(top, max(t.load(x + i * 16 + j)));":
        "a variable keeps its type and its shape, and what is assigned has others; t.full(b, c<1>, v) starts a column.",
    "auto k = t.arange(c<16>); k = i;":
        "a variable keeps its type and its shape, and what is assigned has others; t.full(b, c<1>, v) starts a column.",
    "t.arange(32);": "arange() takes a size that the compiler knows, as c<32>.",
    "t.full(32, 0.0f);": "full() takes one to three sizes that the compiler knows, and a value.",
    "t.load(x + j, 0 <= j < 7);":
        "a mask is compared with something; 0 <= i < n is written (i >= 0) & (i < n).",
    "t.atomic_add(z, 1.0f);":
        "atomic_add() takes s32, atomic_max() s32 or f32; a sum of floats would depend on the order.",
    "col(j < 3);": "take col() of the index before it is compared: col(i) < n.",
}

PROGRAM = """#include "octile/tile/tile.h"
using namespace octile::tile;
struct Kernel {
  TILE_KERNEL void operator()(auto& t, auto x, auto z, auto n) const {
    const auto i = col(t.arange(c<8>));
    const auto j = t.arange(c<16>);
    (void)i, (void)j, (void)x, (void)z, (void)n;
    LINE
  }
};
int main() {
  Array<f32> x("x", {512}), z("z", {512});
  Array<s32> n("n", {512});
  launch(FastCpu{1}, Grid{1}, Kernel{}, x, z, n);
}
"""


class Messages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        """The headers are compiled once, which is nine tenths of each program."""
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        (cls.folder / "headers.h").write_text('#include "octile/tile/tile.h"\n')
        done = cls.compile("-x", "c++-header", cls.folder / "headers.h", "-o", cls.folder / "headers.h.gch")
        assert done.returncode == 0, done.stderr

    @classmethod
    def compile(cls, *arguments):
        command = [*COMPILER.split(), "-std=c++20", "-I", SOURCE / "tile", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def compile_line(self, line):
        path = self.folder / "kernel.cpp"
        path.write_text(PROGRAM.replace("LINE", line))
        return self.compile("-include", self.folder / "headers.h", "-fsyntax-only", path)

    def test_the_program_without_a_mistake_compiles(self):
        done = self.compile_line("t.store(z + i * 16 + j, t.load(x + j) + t.load(x + i));")
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_every_mistake_is_one_sentence(self):
        for line, sentence in MISTAKES.items():
            with self.subTest(line):
                done = self.compile_line(line)
                self.assertNotEqual(done.returncode, 0)
                errors = re.findall(r"\berror: .*", done.stderr)
                self.assertIn(f"octile: {sentence}", errors[0])
                self.assertEqual(len(errors), 1, done.stderr)
                self.assertRegex(done.stderr, r"kernel\.cpp:8:")


if __name__ == "__main__":
    unittest.main()
