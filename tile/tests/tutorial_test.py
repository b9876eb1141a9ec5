"""docs/tutorials/first-kernel.md, docs/reference/tile.md and docs/how-to/puzzle.md: every block of code compiles and runs, and every block of output is
what really comes out.

Comments in the pages say what a block is:
  <!-- program: FILE -->   the code is FILE, a kernel
  <!-- launch -->          the code launches the last program, in a function's body; a block of text after it is what it prints
  <!-- puzzle N -->        the code is a kernel for puzzle N, the text after it is what octile puzzles check says
  <!-- mistake: A -> B --> the text is what is said of the last kernel with A replaced by B; `mistake 2` replaces the second A
  <!-- compile: puzzle N --> the text is what octile puzzles check says of the last mistake in the file of puzzle N

All kernels are compiled at once. With TILE_TUTORIAL_UPDATE set, the blocks of output are written instead of compared.
The environment variable OCTILE_COMMAND names the command; without it the test is skipped (status 77).
"""

import dataclasses
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

SOURCE = pathlib.Path(os.environ.get("OCTILE_SOURCE_DIR", pathlib.Path(__file__).parents[2]))
PAGES = [SOURCE / "docs" / page for page in ("tutorials/first-kernel.md", "reference/tile.md", "how-to/puzzle.md")]
PART = re.compile(r"<!-- (?P<mark>[^\n]*?) -->\n|^```(?P<kind>cpp)?\n(?P<text>.*?)^```\n|^```(?:sh|python)\n.*?^```\n", re.DOTALL | re.MULTILINE)

PROGRAM = """#include <iostream>

#include "octile/tile/autotune.h"
#include "puzzles/elementwise.h"
#include "puzzles/products.h"
#include "puzzles/rows.h"
{namespaces}
int main(int argc, char** argv) {{
  const int step = std::stoi(argv[1]);
{calls}
  return 2;
}}
"""


@dataclasses.dataclass
class Step:
    """A kernel, where it stands, and how it is run."""

    file: str
    starter: str  # of the puzzle; empty for a program of the page itself
    kernel: str
    launch: str = ""  # the code that runs it, if it is not a puzzle's
    page: pathlib.Path | None = None
    output: re.Match | None = None  # the block of the page
    check: bool = False  # by octile puzzles check

    def source(self):
        return (
            re.sub(r"struct MyKernel \{.*?\n\};\n", lambda _: self.kernel, self.starter, flags=re.DOTALL) or self.kernel
        )

    def namespace(self, number):
        code = f"namespace step_{number} {{\nusing namespace octile::tile;\n"
        code += (
            f'#line {self.source()[: self.source().index(self.kernel)].count(chr(10)) + 1} "{self.file}"\n{self.kernel}'
        )
        if self.launch:
            code += f"int run(int, char**) {{\n{self.launch}return 0;\n}}\n"
        else:
            body = self.starter[self.starter.index("int main(") :].replace("int main(", "int run(")
            code += body
        return code + "}\n"


def octile(*arguments, cwd):
    return subprocess.run([OCTILE, "puzzles", *arguments], capture_output=True, text=True, cwd=cwd, check=False)


class Reader:
    """The steps of the page."""

    def __init__(self, folder):
        self.folder = folder
        self.starters = {}
        self.steps = []
        self.unmarked = []

    def read(self, page):
        mark = ""
        for part in PART.finditer(page):
            if part["mark"]:
                mark = part["mark"]
                if mark.startswith(("mistake", "compile")):
                    self.again(mark)
            elif part["kind"]:
                self.code(mark, part["text"])
                mark = ""
            elif part["text"] is None:  # commands, and Python, which tests/torch/docs_test.py runs
                continue
            elif self.steps and self.steps[-1].output is None:
                self.steps[-1].output = part
            else:
                self.unmarked.append(part["text"])

    def starter(self, number):
        if number not in self.starters:
            line = octile("new", number, cwd=self.folder).stdout.splitlines()[0]
            file = re.match(r"wrote (\S+):", line)[1]
            self.starters[number] = file, (self.folder / file).read_text()
        return self.starters[number]

    def code(self, mark, text):
        if found := re.fullmatch(r"puzzle (\d+)", mark):
            self.steps.append(Step(*self.starter(found[1]), text))
        elif found := re.fullmatch(r"program: (\S+)", mark):
            self.steps.append(Step(found[1], "", text))
        elif mark == "launch":
            self.steps[-1].launch = text
        else:
            self.unmarked.append(text)
        self.right = self.steps[-1] if self.steps else None

    def again(self, mark):
        if found := re.fullmatch(r"compile: puzzle (\d+)", mark):
            self.steps.append(Step(*self.starter(found[1]), self.steps[-1].kernel, check=True))
            return
        nth, old, new = re.fullmatch(r"mistake ?(\d*): (.*) -> (.*)", mark).groups()
        pieces = self.right.kernel.split(old)
        at = int(nth or 1)
        assert len(pieces) > at and (nth or len(pieces) == 2), f"{old!r} is there {len(pieces) - 1} times"
        kernel = old.join(pieces[:at]) + new + old.join(pieces[at:])
        self.steps.append(dataclasses.replace(self.right, kernel=kernel, output=None))


# Compilers count columns in different ways.
def plain(text):
    return re.sub(r"(\.(?:cpp|h):\d+):\d+", r"\1", re.sub(r"^ +\|? *\^\n", "", text, flags=re.MULTILINE))


class Tutorial(unittest.TestCase):
    maxDiff = None

    def test_page(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            reader = Reader(folder)
            for page in PAGES:
                before = len(reader.steps)
                reader.read(page.read_text())
                for step in reader.steps[before:]:
                    step.page = page
            self.assertEqual(reader.unmarked, [])
            self.assertGreater(len(reader.steps), 10)
            said = self.run_steps(reader, folder)
        if os.environ.get("TILE_TUTORIAL_UPDATE"):
            for step, text in reversed(list(zip(reader.steps, said))):
                if step.output:
                    page = step.page.read_text()
                    step.page.write_text(page[: step.output.start()] + f"```\n{text}```\n" + page[step.output.end() :])
            return
        for step, text in zip(reader.steps, said):
            with self.subTest(file=step.file):
                self.assertEqual(plain(step.output["text"] if step.output else ""), plain(text), step.kernel)

    def run_steps(self, reader, folder):
        compiled = {k: step for k, step in enumerate(reader.steps) if not step.check}
        program = PROGRAM.format(
            namespaces="".join(step.namespace(k) for k, step in compiled.items()),
            calls="\n".join(f"  if (step == {k}) return step_{k}::run(1, argv);" for k in compiled),
        )
        (folder / "all.cpp").write_text(program)
        file, starter = reader.starter("2")
        command = (
            re.search(r"^//   (.* -o \S+) && ", starter, re.MULTILINE)[1].replace(file, "all.cpp").replace("-O1", "-O0")
        )
        # The archives hold src/base/output.cpp, which comes after it.
        command = command.replace("all.cpp", f"all.cpp -I{SOURCE}/src {SOURCE}/tile/autotune/store.cpp", 1)
        done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        executable = folder / file.removesuffix(".cpp")
        said = []
        for k, step in enumerate(reader.steps):
            here = folder / str(k)
            here.mkdir()
            (here / step.file).write_text(step.source())
            if step.check:
                done = octile("check", step.file, cwd=here)
            else:
                done = subprocess.run([executable, str(k)], capture_output=True, text=True, cwd=here, check=False)
            self.assertEqual(done.stderr, "")
            said.append(done.stdout)
        return said


if __name__ == "__main__":
    unittest.main()
