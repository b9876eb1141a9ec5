"""The ten lines of C++ in README.md compile and run. If a ```text block follows them, it is what they print."""

import os
import re
import subprocess
import tempfile
import unittest
from pathlib import Path

SOURCE = Path(os.environ["OCTILE_SOURCE_DIR"])
LIBRARY = Path(os.environ["OCTILE_LIBRARY"])


def run(*command):
    result = subprocess.run(list(map(str, command)), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            stdin=subprocess.DEVNULL, timeout=300)
    if result.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}: exit status {result.returncode}\n{result.stdout}")
    return result.stdout


class ReadmeTest(unittest.TestCase):
    def test_first_cpp_block(self):
        readme = (SOURCE / "README.md").read_text()
        block = re.search(r"^```cpp\n(.*?)^```\n(?:\s*^```text\n(.*?)^```$)?", readme, re.MULTILINE | re.DOTALL)
        self.assertIsNotNone(block, "README.md has no ```cpp block")
        with tempfile.TemporaryDirectory(prefix="octile-readme-") as scratch:
            source = Path(scratch) / "readme.cpp"
            source.write_text(block.group(1))
            program = Path(scratch) / "readme"
            run(os.environ["OCTILE_CXX"], "-std=c++20", "-Wall", "-Wextra", "-Werror", f"-I{SOURCE / 'include'}",
                source, "-o", program, LIBRARY, f"-Wl,-rpath,{LIBRARY.parent}", "-pthread")
            printed = run(program)
        self.assertTrue(printed.strip(), "the program printed nothing")
        if block.group(2) is not None:
            self.assertEqual(printed.strip(), block.group(2).strip())


if __name__ == "__main__":
    unittest.main()
