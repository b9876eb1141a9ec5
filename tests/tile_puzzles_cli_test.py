"""octile puzzles: what list, run and new say, and that the files new writes compile, are judged, and can be solved.

The environment variable OCTILE_COMMAND names the command; without it the test is skipped (status 77).
"""
import concurrent.futures
import json
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

SOLUTION = """    const auto i = t.program_id(0) * b0 + t.arange(b0);
    t.store(z + i, t.load(x + i{load_mask}) + 10.0f, i < n0);"""


def octile(*arguments, status=0, cwd=None):
    done = subprocess.run([OCTILE, "puzzles", *arguments], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == status, f"{arguments}: status {done.returncode}\n{done.stdout}{done.stderr}"
    return done


class Puzzles(unittest.TestCase):
    def test_list(self):
        puzzles = json.loads(octile("list", "--json").stdout)["puzzles"]
        self.assertEqual([p["number"] for p in puzzles], list(range(1, 19)))
        lines = octile("list").stdout.splitlines()
        self.assertEqual(len(lines), 20)
        for puzzle, line in zip(puzzles, lines[2:]):
            self.assertRegex(line, f"^{puzzle['number']} +{puzzle['name']} ")
            self.assertLessEqual(len(line), 150)

    def test_run(self):
        puzzles = json.loads(octile("run", "all", "--json").stdout)["puzzles"]
        self.assertEqual(len(puzzles), 18)
        for puzzle in puzzles:
            self.assertTrue(puzzle["right"], puzzle)
            self.assertGreaterEqual(puzzle["score"]["bytes"], puzzle["score"]["least_bytes"])
        self.assertIn("18 right, 0 wrong", octile("run", "all").stdout)
        self.assertEqual(octile("run", "masked_add").stdout, octile("run", "2").stdout)

    def test_wrong_kernels(self):
        wrong = json.loads(octile("run", "all", "--wrong", "--json").stdout)["puzzles"]
        self.assertGreaterEqual(len(wrong), 41)
        for kernel in wrong:
            self.assertFalse(kernel["right"])
            first = kernel["problems"][0]
            lines = pathlib.Path(first["file"]).read_text().splitlines()
            self.assertTrue(lines[first["line"] - 1].endswith("// wrong: " + kernel["kernel"]), first)
        self.assertIn("// wrong: MaskTooWide\n", octile("run", "2", "--wrong").stdout)

    def test_what_is_refused(self):
        self.assertIn("44 is no puzzle", octile("run", "44", status=2).stderr)
        self.assertIn("one at a time", octile("new", "all", status=2).stderr)
        self.assertIn("--device", octile("run", "1", "--device", "tpu", status=2).stderr)
        octile(status=2)

    def test_reports(self):
        with tempfile.TemporaryDirectory() as directory:
            octile("run", "2", "--report", "right.html", cwd=directory)
            octile("run", "2", "--wrong", "--report", "wrong.html", cwd=directory)
            pages = sorted(p.name for p in pathlib.Path(directory).iterdir())
            self.assertEqual(pages, ["right.html", "wrong-MaskTooWide.html", "wrong-NoProgramId.html",
                                     "wrong-StoreWithoutMask.html"])
            self.assertIn("i &lt; n0 + 100", (pathlib.Path(directory) / pages[1]).read_text())


class Solving(unittest.TestCase):
    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)

    def new(self, puzzle):
        """The file and the command that compiles and runs it."""
        lines = octile("new", puzzle, cwd=self.directory.name).stdout.splitlines()
        file = pathlib.Path(self.directory.name) / re.match(r"wrote (\S+):", lines[0]).group(1)
        self.assertIn(lines[-1].strip(), file.read_text())
        return file, lines[-1].strip()

    def run_command(self, command):
        return subprocess.run(command, shell=True, cwd=self.directory.name, capture_output=True, text=True)

    def test_solving_the_second(self):
        file, command = self.new("2")
        done = self.run_command(command)
        self.assertEqual((done.returncode, done.stderr), (1, ""))
        self.assertIn("nobody wrote z[0] of 200", done.stdout)

        starter = file.read_text()
        file.write_text(starter.replace("    // Your kernel.", SOLUTION.format(load_mask="")))
        done = self.run_command(command)
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, r"masked_add\.cpp:\d+:\d+: load x: out of bounds, 24 lanes; first: program \(6,0,0\), "
                                      r"lane \[0,0,8\], x\[200\] of 200")
        self.assertIn("t.load(x + i) + 10.0f", done.stdout)

        file.write_text(starter.replace("    // Your kernel.", SOLUTION.format(load_mask=", i < n0")))
        done = self.run_command(command + " --report page.html")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("2 masked_add: right at 8 sizes, 7 of them hidden", done.stdout)
        self.assertIn("MyKernel", (pathlib.Path(self.directory.name) / "page.html").read_text())

        octile("new", "2", status=1, cwd=self.directory.name)  # does not overwrite
        self.assertIn("Your kernel", starter)

    def test_all_starters_compile(self):
        def compiled(number):
            _, command = self.new(str(number))
            words = command.split(" && ")[0].split()
            return self.run_command(" ".join(w for w in words if not w.endswith(".a")) + " -fsyntax-only")

        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for number, done in enumerate(pool.map(compiled, range(1, 19)), 1):
                self.assertEqual((number, done.returncode, done.stderr), (number, 0, ""))

    def test_two_kernels(self):
        _, command = self.new("quantize_global")
        done = self.run_command(command)
        self.assertIn("nobody wrote scale[0] of 1", done.stdout, done.stderr)


if __name__ == "__main__":
    unittest.main()
