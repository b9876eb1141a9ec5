"""octile puzzles: the output of list, run, new and check; and the files that new writes compile, are judged and can be solved.

The environment variable OCTILE_COMMAND names the command; without it the test is skipped (status 77).
"""
import html
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

OCTILE = os.environ.get("OCTILE_COMMAND")
if not OCTILE:
    print("skipped: OCTILE_COMMAND is not set")
    sys.exit(77)

SOLUTION = """    const auto i = t.program_id(0) * b0 + t.arange(b0);
    t.store(z + i, t.load(x + i{load_mask}) + 10.0f, i < n0);"""


def octile(*arguments, status=0, cwd=None, compiler=None):
    environment = os.environ | ({"CXX": compiler} if compiler else {})
    done = subprocess.run([OCTILE, "puzzles", *arguments], capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == status, f"{arguments}: status {done.returncode}\n{done.stdout}{done.stderr}"
    return done


class Puzzles(unittest.TestCase):
    def test_list(self):
        puzzles = json.loads(octile("list", "--json").stdout)["puzzles"]
        self.assertEqual([p["number"] for p in puzzles], list(range(1, 19)))
        lines = octile("list").stdout.splitlines()
        self.assertEqual(len(lines), 22)
        self.assertTrue(lines[-1].endswith(" puzzles new 1"), lines[-1])
        for puzzle, line in zip(puzzles, lines[2:]):
            self.assertRegex(line, f"^{puzzle['number']} +{puzzle['name']} ")
            self.assertLessEqual(len(line), 150)

    def test_unknown_verbs_are_named(self):
        for word in ("lst", "--bogus"):
            self.assertIn(f"{word} is not a command or option", octile(word, status=2).stderr)

    def test_run(self):
        said = octile("run", "all").stdout
        rows = re.findall(r"(?m)^(\d+) +(\w+) +right +\d+ +(\d+) +(\d+\.\d+) ", said)
        self.assertEqual([int(number) for number, _, _, _ in rows], list(range(1, 19)), said)
        self.assertIn("18 right, 0 wrong", said)
        self.assertGreaterEqual(min(float(of_the_least) for _, _, _, of_the_least in rows), 1)
        for number, name, moved, of_the_least in rows[1], rows[6]:
            puzzle, = json.loads(octile("run", number, "--json").stdout)["puzzles"]
            self.assertEqual((puzzle["name"], puzzle["right"]), (name, True))
            self.assertEqual(puzzle["score"]["bytes"], int(moved))
            self.assertAlmostEqual(puzzle["score"]["bytes"] / puzzle["score"]["least_bytes"], float(of_the_least), delta=0.006)
        self.assertEqual(octile("run", "masked_add").stdout, octile("run", "2").stdout)

    def test_wrong_kernels(self):
        wrong = json.loads(octile("run", "all", "--wrong", "--json").stdout)["puzzles"]
        self.assertGreaterEqual(len(wrong), 100)
        for kernel in wrong:
            self.assertFalse(kernel["right"])
            first = kernel["problems"][0]
            if first["problem"] == "not written":  # at no line
                self.assertIn(kernel["kernel"], ("SwappedPrograms", "ConvolutionBut.at_most_24_columns"))
                continue
            lines = pathlib.Path(first["file"]).read_text().splitlines()
            marked = lines[first["line"] - 1].partition("// wrong: ")[2].split(", ")
            self.assertIn(kernel["kernel"].split(".")[0], marked, first)
        self.assertIn("// wrong: MaskTooWide\n", octile("run", "2", "--wrong").stdout)

    def refused(self, message, *arguments, status=2, cwd=None):
        done = octile(*arguments, status=status, cwd=cwd)
        self.assertEqual(done.stdout, "")
        self.assertEqual(done.stderr.count("\n"), 1, done.stderr)
        self.assertIn(message, done.stderr)

    def test_what_is_refused(self):
        self.refused("subcommand is required")
        self.refused("puzzle is required", "run")
        self.refused("puzzle is required", "new")
        self.refused("file is required", "check")
        for verb in ("run", "new"):
            self.refused("the value is empty", verb, "--", "")
        for number in ("44", "0", "-1", "1.5", "masked"):
            self.refused(f"{number} is not a puzzle", "run", "--", number)
            self.refused(f"{number} is not a puzzle", "new", "--", number)
        self.refused("one at a time", "new", "all")
        self.refused("notes.txt does not end in .cpp", "new", "2", "notes.txt")
        self.refused("--device", "run", "1", "--device", "tpu")
        self.refused("on the cpu", "run", "1", "--device", "cuda", "--wrong")
        self.refused("on the cpu", "run", "1", "--device", "cuda", "--report", "x.html")
        self.refused("--frobnicate", "run", "1", "--frobnicate")
        self.refused("there is no file nothing.cpp; octile puzzles new N", "check", "nothing.cpp", status=1)
        self.refused("there is no file /", "check", "/", status=1)

    def test_what_cannot_be_written(self):
        with tempfile.TemporaryDirectory() as directory:
            (pathlib.Path(directory) / "file").write_text("")
            for path in ("no/such/folder/a.cpp", "file/a.cpp"):  # the second also fails for root, who may write to any folder
                self.refused("cannot write " + path, "new", "2", path, status=1, cwd=directory)
            done = octile("run", "2", "--report", "no/such/page.html", status=1, cwd=directory)
            self.assertIn("no/such/page.html", done.stderr)
            done = octile("run", "all", "--report", ".", status=1, cwd=directory)
            self.assertIn("cannot write .: Is a directory", done.stderr)
            self.assertEqual([p.name for p in pathlib.Path(directory).iterdir()], ["file"])

    def test_a_command_without_its_headers_and_libraries(self):
        with tempfile.TemporaryDirectory() as name:
            directory = pathlib.Path(name)
            (directory / "bin").mkdir()
            command = shutil.copy(OCTILE, directory / "bin")

            def said():
                done = subprocess.run([command, "puzzles", "new", "2"], capture_output=True, text=True, cwd=directory)
                self.assertEqual((done.returncode, done.stdout, (directory / "masked_add.cpp").exists()), (1, "", False))
                return done.stderr

            self.assertIn("context.h: neither a build directory nor an installed octile", said())
            (directory / "include" / "octile" / "tile").mkdir(parents=True)
            (directory / "include" / "octile" / "tile" / "context.h").write_text("")
            self.assertRegex(said(), r"there is no \S+liboctile_puzzles\.a, which a solution is linked with")

    def test_help(self):
        pages = {name: octile(*name.split(), "--help").stdout for name in ("", "list", "run", "new", "check")}
        for name in pages:
            if name:
                self.assertRegex(pages[""], f"(?m)^  {name} ")
        for option in ("--device", "--report FILE", "--wrong", "--json"):
            self.assertIn(option, pages["run"])
        for option in ("--report FILE", "--stated", "--verbose", "--timeout SECONDS", "--compile-timeout SECONDS"):
            self.assertIn(option, pages["check"])
        self.assertIn("runs it as you", pages["check"])

    def test_reports(self):
        with tempfile.TemporaryDirectory() as directory:
            octile("run", "2", "--report", "the right.html", cwd=directory)
            octile("run", "2", "--wrong", "--report", "wrong.html", cwd=directory)
            pages = sorted(p.name for p in pathlib.Path(directory).iterdir())
            self.assertIn("octile puzzles run 2 --report 'the right.html'", html.unescape((pathlib.Path(directory) / pages[0]).read_text()))
            self.assertEqual(pages, ["the right.html", "wrong-MaskTooWide.html", "wrong-NoProgramId.html",
                                     "wrong-ProgramsOfFiveBits.html", "wrong-StoreWithoutMask.html"])
            self.assertIn("i &lt; n0 + 100", (pathlib.Path(directory) / pages[1]).read_text())


class Solving(unittest.TestCase):
    program = None  # of solution(), compiled once

    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)

    def new(self, puzzle):
        """The file, and the command in it that compiles and runs it."""
        lines = octile("new", puzzle, cwd=self.directory.name).stdout.splitlines()
        file = pathlib.Path(self.directory.name) / re.match(r"wrote (\S+):", lines[0]).group(1)
        self.assertTrue(lines[-1].endswith(" puzzles check " + file.name), lines)
        text = file.read_text()
        self.assertIn("\n//   " + lines[-1].strip() + "\n", text)
        return file, re.search(r"\n//   (\S.* && .*)\n", text).group(1)

    def run_command(self, command):
        return subprocess.run(command, shell=True, cwd=self.directory.name, capture_output=True, text=True)

    def check(self, file, *arguments, status):
        done = octile("check", file.name, *arguments, status=status, cwd=self.directory.name)
        self.assertEqual(done.stderr, "")
        return done.stdout

    def test_solving_the_second(self):
        file, command = self.new("2")
        starter, folder = file.read_text(), file.parent
        file.write_text(starter.replace("    // Your kernel.", SOLUTION.format(load_mask=", i < n0")))
        done = self.run_command(command)  # run by hand
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertIn("2 masked_add: right at 10 sizes, 9 of them hidden", done.stdout)
        done = self.run_command("./masked_add --nonsense")
        self.assertEqual((done.returncode, done.stdout), (2, ""))
        self.assertIn("--nonsense is not an option here", done.stderr)
        done = self.run_command("./masked_add --report no/such/page.html")
        self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1))
        self.assertIn("no/such/page.html", done.stderr)
        self.assertIn("right at 1 size;", self.run_command("./masked_add --stated --report 'by hand.html'").stdout)
        self.assertIn("./masked_add --report 'by hand.html'", html.unescape((folder / "by hand.html").read_text()))

        # A file that is no command's option. It has two empty kernels.
        odd = folder / "-my @first try.cpp"
        odd.write_text(self.new("quantize_global")[0].read_text())
        said = octile("check", "--report=-page.html", "--", odd.name, status=1, cwd=folder).stdout
        self.assertIn("scale[0] of 1 was never written", said)
        page = html.unescape((folder / "-page.html").read_text())
        self.assertIn("MyKernel", page)
        self.assertIn(" puzzles check './-my @first try.cpp' --report ./-page.html", page)
        files = ["masked_add", "masked_add.cpp", "quantize_global.cpp"]
        self.assertEqual(sorted(os.listdir(folder)), [odd.name, "-page.html", "by hand.html", *files])

        octile("new", "2", status=1, cwd=self.directory.name)  # does not overwrite
        octile("new", "2", ".", status=1, cwd=self.directory.name)
        self.assertIn("i < n0) + 10.0f", file.read_text())
        self.assertIn(" puzzles check './@x.cpp'\n", octile("new", "2", "@x.cpp", cwd=self.directory.name).stdout)
        self.assertTrue((file.parent / "@x.cpp").exists())

    def test_mistakes_that_do_not_compile(self):
        file, _ = self.new("3")
        starter = file.read_text()

        def said(*lines):
            file.write_text(starter.replace("    // Your kernel.", "\n".join(lines)))
            return self.check(file, status=1)

        shapes = said("    const auto i = t.arange(b0);",
                      "    const auto sum = t.load(x + i) + t.load(y + t.arange(b1));", "    t.store(z + i, sum);")
        self.assertRegex(shapes, r"outer_add.cpp does not compile:\n  outer_add\.cpp:\d+:\d+: octile: the two tiles have different "
                                 r"numbers of columns, and neither has 1; col\(v\) is v\[:, None\]\.\n"
                                 r"    \d+ \|     const auto sum = t.load\(x \+ i\) \+ t.load\(y \+ t.arange\(b1\)\);\n")
        self.assertNotIn("required from", shapes)
        self.assertLess(shapes.count("\n"), 12)

        several = said("    t.store(z + nowhere, 1.0f);", "    t.store(z, 1.0f)", "    t.store(z, 2.0f);")
        self.assertRegex(several, r"outer_add\.cpp:\d+:\d+: .*nowhere")
        self.assertRegex(several, r"outer_add\.cpp:\d+:\d+: expected")

    def test_all_starters_compile(self):
        """As one file, each in its own namespace."""
        merged, command = "", ""
        for number in range(1, 19):
            file, command = self.new(str(number))
            parts = re.fullmatch(r"((?://[^\n]*\n)+)(#include [^\n]*\n)\n(.*)", file.read_text(), re.DOTALL)
            head, include, kernel = parts.groups()
            self.assertTrue(head.startswith(f"// Puzzle {number}: "))
            self.assertLessEqual(max(len(line) for line in head.splitlines() if " && " not in line), 120)
            merged += f"{include}namespace puzzle_{number} {{\n{kernel.replace('int main(', 'int run(')}}}\n"
        (pathlib.Path(self.directory.name) / "all.cpp").write_text(merged)
        words = [w for w in command.split(" && ")[0].split() if not w.endswith((".a", ".cpp"))]
        done = self.run_command(" ".join(words) + " -fsyntax-only all.cpp")
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def compiler(self, body, status=0):
        """A command that replaces the compiler: `body` is Python, with the words of its command line in `words`."""
        path = pathlib.Path(self.directory.name) / "compiler.py"
        path.write_text(f"import os, stat, sys\nwords = sys.argv[1:]\n{body}\nsys.exit({status})\n")
        return f"{sys.executable} {path}"

    def test_what_compilers_say(self):
        file, _ = self.new("1")
        long = "x" * 300_000
        says = [
            long,
            f"constant_add.cpp:{long}",
            f"constant_add.cpp:7:3:   required from '{long}'",
            f"/usr/include/a.h:1:2: error: static assertion failed: octile: {long}",
            "constant_add.cpp:99999999999999999999:1: error: no line has this number",
            "in.h:3:4: fatal error: static_assert failed due to requirement 'is<1>::value' \"octile: quoted\"",
            "constant_add.cpp:8:5: note: in instantiation of",
            "constant_add.cpp:9:1: error: octile: a name with :3:4: in it",
            "constant_add.cpp:9:2: warning: unused",
        ]
        fake = self.compiler(f"print({chr(10).join(says)!r})", 1)
        said = octile("check", file.name, status=1, cwd=self.directory.name, compiler=fake).stdout
        places = [line[2:][:70] for line in said.splitlines() if line.startswith("  constant_add.cpp:")]
        self.assertEqual(places, [f"constant_add.cpp:7:3: octile: {long}"[:70], "constant_add.cpp:8:5: octile: quoted",
                                  "constant_add.cpp:9:1: octile: a name with :3:4: in it"])
        said = octile("check", file.name, "--verbose", status=1, cwd=self.directory.name, compiler=fake).stdout
        self.assertEqual(said.splitlines()[1:], says)

    def test_a_compiler_that_cannot_be_run(self):
        file, _ = self.new("1")
        (file.parent / "plain").write_text("no program")
        for compiler in ("no-such-compiler -O0", "./plain"):
            done = octile("check", file.name, status=1, cwd=self.directory.name, compiler=compiler)
            self.assertEqual(done.stdout, "")
            self.assertIn(f'octile: cannot run the compiler, "{compiler}"; set CXX to another', done.stderr)

    def test_a_temporary_folder_that_is_not_there(self):
        file, _ = self.new("1")
        done = subprocess.run([OCTILE, "puzzles", "check", file.name], cwd=self.directory.name, text=True, capture_output=True,
                              env=os.environ | {"TMPDIR": "no/such/folder"})
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertEqual(done.stderr, "octile: cannot write into no/such/folder: No such file or directory\n")

    def test_a_report_in_place_of_the_kernel(self):
        file, _ = self.new("1")
        before = file.read_text()
        done = octile("check", file.name, "--report", file.name, status=1, cwd=self.directory.name)
        self.assertIn("cannot write constant_add.cpp: it already exists, and is not a page of HTML", done.stderr)
        self.assertEqual(file.read_text(), before)

    def solution(self):
        """masked_add.cpp, whose kernel does what the environment variable MODE says, and a compiler that returns its program."""
        file, command = self.new("2")
        head = "#include <cstdlib>\n#include <fstream>\n#include <stdexcept>\n#include <string>\n#include <unistd.h>\n"
        head += "[[gnu::noinline]] inline int deep() { volatile char large[80'000'000]; large[0] = 1; return large[0]; }\n"
        kernel = """    static const std::string mode = std::getenv("MODE");
    const auto i = t.program_id(0) * b0 + t.arange(b0);
    auto v = t.load(x + i, i < n0);  // the last access
    if (t.program_id(0) == 3) {
      volatile std::uintptr_t nowhere = 8;
      if (mode == "segv") *reinterpret_cast<volatile int*>(nowhere) = 1;
      if (mode == "stack") v = v + deep();
      if (mode == "abort") std::abort();
      if (mode == "exit") std::exit(0);
      if (mode == "throw") throw std::out_of_range("no such element");
      if (mode == "throw int") throw 5;
      volatile bool again = mode == "endless loads";
      while (again) v = t.load(x + i, i < n0);
      again = mode == "endless";
      if (again) {
        if (const pid_t child = fork(); child != 0) std::ofstream("pids") << getpid() << " " << child << std::endl;
        while (again) usleep(1000);
      }
    }
    t.store(z + i, v + 10.0f, i < n0);"""
        text = head + file.read_text().replace("    // Your kernel.", kernel)
        text = text.replace("  return puzzles::check", "  const int status = puzzles::check")
        file.write_text(text[:text.rindex("}")] + """  const std::string mode = std::getenv("MODE");
  if (mode == "abort after") std::abort();
  return mode == "says 0" ? 0 : mode == "says 3" ? 3 : status;
}
""")
        program = file.with_suffix("")
        if self.program is None:
            done = self.run_command(command.split(" && ")[0])
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            Solving.program = program.read_bytes()
        program.write_bytes(self.program)
        program.chmod(0o700)
        return file, self.compiler(f"import shutil\nshutil.copy({str(program)!r}, words[words.index('-o') + 1])")

    def start(self, file, compiler, mode, *arguments):
        """octile puzzles check, with its own folder for temporary ones."""
        temporary = pathlib.Path(self.directory.name) / "temporary"
        temporary.mkdir(exist_ok=True)
        environment = os.environ | {"CXX": compiler, "MODE": mode, "TMPDIR": str(temporary)}
        return subprocess.Popen([OCTILE, "puzzles", "check", file.name, *arguments], cwd=self.directory.name, text=True,
                                env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def end(self, process):
        """What it prints, once nothing of it is left."""
        said, complaint = process.communicate(timeout=60)
        self.assertEqual(os.listdir(pathlib.Path(self.directory.name) / "temporary"), [])
        return process.returncode, said, complaint

    def assert_gone(self, pids):
        for pid in pids:
            for _ in range(500):
                try:
                    if pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                        break
                except OSError:
                    break
                time.sleep(0.01)
            else:
                self.fail(f"{pid} still runs")

    def pids(self):
        path = pathlib.Path(self.directory.name) / "pids"
        for _ in range(3000):
            if path.exists() and len(path.read_text().split()) == 2:
                pids = path.read_text().split()
                path.unlink()
                return pids
            time.sleep(0.01)
        self.fail("the program did not start")

    def test_ends_that_are_no_verdict(self):
        file, compiler = self.solution()
        lines = file.read_text().splitlines()
        line = 1 + lines.index("    auto v = t.load(x + i, i < n0);  // the last access")
        loop = 1 + lines.index("      while (again) v = t.load(x + i, i < n0);")
        place = f"at n0 = 200, checked executor, program (3,0,0), after 1 access: load x at masked_add.cpp:{line}:20"

        def end(mode, *arguments):
            return self.end(self.start(file, compiler, mode, *arguments))

        self.assertEqual(end("right")[::2], (0, ""))
        for mode, how in (("segv", "was ended by a signal: Segmentation fault"), ("stack", "was ended by a signal: Segmentation fault"),
                          ("abort", "was ended by a signal: Aborted"), ("exit", "ended with status 0 and without a verdict")):
            self.assertEqual(end(mode), (1, "", f"octile: masked_add.cpp {how}, {place}\n"))
        for mode, what in (("throw", "out_of_range: no such element"), ("throw int", "what is not a std::exception")):
            status, said, complaint = end(mode)
            self.assertEqual((status, complaint), (1, ""))
            self.assertIn(f"2 masked_add: wrong, it threw {what}\n  {place}\n    {line} |     auto v = t.load(", said)
        self.assertEqual(end("abort after")[::2], (1, "octile: masked_add.cpp was ended by a signal: Aborted, after its verdict\n"))
        self.assertEqual(end("says 3")[0], 3)
        status, said, _ = end("endless loads")
        self.assertEqual(status, 1)
        self.assertIn(f"masked_add.cpp:{loop}:31: load x: endless loop, 1000000 steps; first: program (3,0,0)\n", said)

        status, said, complaint = end("endless", "--timeout", "0.5")
        self.assertEqual((status, said), (1, ""))
        self.assertEqual(complaint, f"octile: masked_add.cpp was stopped after 0.5 seconds (--timeout), {place}\n")
        self.assert_gone(self.pids())

    def test_a_program_without_a_check(self):
        file = pathlib.Path(self.directory.name) / "nothing.cpp"
        file.write_text("int main() {}\n")
        done = octile("check", file.name, status=1, cwd=self.directory.name)
        self.assertEqual(done.stderr, "octile: nothing.cpp ended with status 0 and without a verdict: its main() has to return "
                                      "puzzles::check<...>(argc, argv, ...), as octile puzzles new writes it\n")

    def test_what_ends_the_command_ends_the_program(self):
        file, compiler = self.solution()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            process = self.start(file, compiler, "endless")
            pids = self.pids()
            process.send_signal(number)
            self.assertEqual(self.end(process), (-number, "", ""))
            self.assert_gone(pids)
        process = self.start(file, compiler, "endless")
        pids = self.pids()
        process.kill()  # it can clean up nothing, but the kernel ends the program: not what that has started
        process.wait(timeout=60)
        self.assert_gone(pids[:1])
        os.kill(int(pids[1]), signal.SIGKILL)
        process.communicate(timeout=60)
        shutil.rmtree(pathlib.Path(self.directory.name) / "temporary")

        slow = self.compiler("import time\nopen('pids', 'w').write(f'{os.getpid()} {os.getpid()}')\ntime.sleep(60)")
        process = self.start(file, slow, "")
        pids = self.pids()
        process.terminate()
        self.assertEqual(self.end(process), (-signal.SIGTERM, "", ""))
        self.assert_gone(pids)
        status, said, complaint = self.end(self.start(file, slow, "", "--compile-timeout", "1"))
        self.assertEqual((status, said), (1, ""))
        self.assertEqual(complaint, "octile: the compiler, with masked_add.cpp, was stopped after 1 second (--compile-timeout)\n")
        self.assert_gone(self.pids())

    def test_signals(self):
        file, _ = self.new("1")

        def check(program, status):
            body = "path = words[words.index('-o') + 1]\nopen(path, 'w').write('#!/bin/sh\\n" + program + "\\n')\nos.chmod(path, 0o700)"
            return octile("check", file.name, status=status, cwd=self.directory.name, compiler=self.compiler(body)).stderr

        for signal, name in (("SEGV", "Segmentation fault"), ("FPE", "Floating point exception")):
            self.assertIn(f"constant_add.cpp was ended by a signal: {name}", check(f"kill -{signal} $$", 1))
        self.assertIn("constant_add.cpp was ended by a signal: Aborted", check("exit 134", 1))  # as a shell says it
        for status in (0, 2, 127, 128, 193, 255):  # its own
            self.assertIn(f"constant_add.cpp ended with status {status} and without a verdict", check(f"exit {status}", 1))
        killed = self.compiler("os.kill(os.getpid(), 9)")
        done = octile("check", file.name, status=1, cwd=self.directory.name, compiler=killed)
        self.assertIn("the compiler, with constant_add.cpp, was ended by a signal: Killed", done.stderr)


if __name__ == "__main__":
    unittest.main()
