"""How the command writes files: completely or not at all, under unpredictable temporary names, and only regular files. One
source file does it for all of Octile's C++."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

COMMAND = os.environ.get("OCTILE_COMMAND")
SOURCE = pathlib.Path(os.environ.get("OCTILE_SOURCE_DIR", pathlib.Path(__file__).parents[2]))
if not COMMAND:
    print("skipped: OCTILE_COMMAND is not set")
    sys.exit(77)

VERBS = subprocess.run([COMMAND, "--help"], capture_output=True, text=True, check=True).stdout


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        # A verb, and its option that names the file.
        self.writers = []
        if "puzzles" in VERBS:
            self.writers += [("puzzles", "run", "1", "--report"), ("puzzles", "new", "1")]

    def octile(self, *arguments, status=0, **options):
        done = subprocess.run([COMMAND, *arguments], cwd=self.root, text=True, timeout=60, **options,
                              **({} if "stdout" in options else {"capture_output": True}))
        self.assertEqual(done.returncode, status, done)
        return done


class WriteTest(Case):
    def test_links_that_were_planted_are_not_followed(self):
        """The names that a process's temporary files would have if its process number determined them."""
        victim = self.root / "victim"
        victim.write_text("kept")

        def plant():
            for suffix in (f".{os.getpid()}.tmp", ".tmp", ".part", "~"):
                (self.root / f"page.cpp{suffix}").unlink(missing_ok=True)
                (self.root / f"page.cpp{suffix}").symlink_to("victim")

        for writer in self.writers:
            with self.subTest(writer):
                self.octile(*writer, "page.cpp", preexec_fn=plant)
                self.assertEqual(victim.read_text(), "kept")
                self.assertFalse((self.root / "page.cpp").is_symlink())
                for path in self.root.glob("page.cpp*"):
                    path.unlink()

    def test_pipes_and_devices_stay(self):
        pipe = self.root / "pipe.cpp"
        os.mkfifo(pipe)
        nodes = [pipe]
        if os.geteuid() == 0:
            try:
                os.mknod(self.root / "null.cpp", 0o600 | 0o020000, os.makedev(1, 3))
                nodes.append(self.root / "null.cpp")
            except PermissionError:
                pass
        for node in nodes:
            for writer in self.writers:
                with self.subTest(writer), open(os.open(node, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as reader:
                    kind = node.stat().st_mode
                    new = "new" in writer
                    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
                    text = b""
                    process = subprocess.Popen([COMMAND, *writer, node], **options)
                    while process.poll() is None:
                        text += reader.read(1 << 16) or b""
                    text += reader.read(1 << 16) or b""
                    self.assertEqual(process.returncode, int(new))  # a starter goes only into new files
                    self.assertEqual(text.endswith(b"</html>\n"), node is pipe and not new)
                    self.assertEqual(node.stat().st_mode, kind)
        self.assertEqual(sorted(self.root.iterdir()), sorted(nodes))

    def test_links_to_nothing_are_refused(self):
        (self.root / "link.cpp").symlink_to("nothing")
        for writer in self.writers:
            with self.subTest(writer):
                done = self.octile(*writer, "link.cpp", status=1)
                self.assertRegex(done.stderr, r"\Aoctile: .*link\.cpp.*\n\Z")
                self.assertEqual(os.listdir(self.root), ["link.cpp"])

    def test_what_is_replaced_keeps_its_permissions(self):
        page = self.root / "page.html"
        for writer in self.writers:
            if "new" not in writer:
                page.write_text("<!doctype html>old")
                page.chmod(0o600)
                self.octile(*writer, page)
                self.assertEqual((page.stat().st_mode & 0o777, page.read_text()[:5].lower()), (0o600, "<!doc"))

    @unittest.skipUnless("puzzles" in VERBS, "no puzzles")
    def test_the_standard_output_is_written_into(self):
        (self.root / "stdout").symlink_to("/proc/self/fd/1")  # as /dev/stdout, which the test must not risk
        with open(self.root / "all", "w") as out:
            self.octile("puzzles", "run", "1", "--report", "stdout", stdout=out)
        text = (self.root / "all").read_text()
        self.assertTrue(text.startswith("<!doctype html>") and "</html>\n" in text)
        self.assertIn("right", text.split("</html>\n")[1])


class SourceTest(unittest.TestCase):
    def test_one_file_opens_files_to_write(self):
        ways = re.compile(r"\b(?:ofstream|fstream|fopen|freopen|creat|mkstemp|mkostemp|tmpfile|O_CREAT|renameat2?|rename)\b")
        found = set()
        for folder in ("check", "checkpoint", "cli", "src", "tile"):
            for path in (SOURCE / folder).rglob("*"):
                if path.suffix in (".cpp", ".h", ".cu", ".cuh") and path.parent != SOURCE / "tile" / "tests":
                    code = "\n".join(line.split("//")[0] for line in path.read_text().splitlines())
                    if ways.search(code.replace("#include <fstream>", "").replace("std::ifstream", "")):
                        found.add(str(path.relative_to(SOURCE)))
        # puzzles check creates files (proof.cpp by name, others through its children) only in a folder that mkdtemp()
        # made for it.
        self.assertEqual(found, {"src/base/output.cpp", "cli/puzzles_check.cpp", "cli/support/group.cpp", "tile/puzzles/watch.cpp"})


if __name__ == "__main__":
    unittest.main()
