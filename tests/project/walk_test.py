"""The documents keep up with the tree: "Follow one call" names files and functions that are there, each file once. Public
headers include the standard library and each other, nothing else.

The section "## Follow one call" of docs/explanation/architecture.md has five numbered lists: from C++ to the CPU's kernels, to a GPU's, from Python to
C++, `octile quantize` and a puzzle. Each item
begins with the path of a file in backticks; the names in backticks after it are found in that file, or, written
"`name` in `path`", in the file of that path.
"""

import os
import re
import unittest
from pathlib import Path

SOURCE = Path(os.environ.get("OCTILE_SOURCE_DIR", Path(__file__).parents[2]))
PATH = r"[\w./-]+/[\w.-]+\.\w+"
NAME = r"[A-Za-z_]\w*(?:::[A-Za-z_~]\w*)*"


def code(path):
    """The text of a file without its comments: a name that is only mentioned does not count."""
    text = (SOURCE / path).read_text()
    if path.endswith(".py"):
        return re.sub(r'#[^\n]*|"{3}.*?"{3}', " ", text, flags=re.DOTALL)
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)


def walks():
    """Of each list of "Follow one call": [(path, [names])], one entry per item, and the same for the names
    placed in other files."""
    page = (SOURCE / "docs" / "explanation" / "architecture.md").read_text()
    section = re.search(r"^## Follow one call\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert section, 'architecture.md has no section "## Follow one call"'
    found = []
    for number, item in re.findall(r"^(\d+)\. (.*?)(?=^\d+\. |^\S|\Z)", section.group(1), re.MULTILINE | re.DOTALL):
        if number == "1":
            found.append(([], []))
        steps, elsewhere = found[-1]
        item = re.sub(r"\s+", " ", item)
        for name, path in re.findall(rf"`({NAME})(?:\(\))?` in `({PATH})`", item):
            elsewhere.append((path, [name]))
        item = re.sub(rf"`{NAME}(?:\(\))?` in `{PATH}`", "", item)
        path = re.match(rf"\[?`({PATH})`", item)
        assert path, f"this step does not begin with a path in backticks: {item}"
        steps.append((path.group(1), re.findall(rf"`({NAME})(?:\(\))?`", item[path.end():])))
    return found


def has(text, name):
    """Whether the code has the name: all its parts as words, and the whole as written or, in a class, the last part."""
    return all(re.search(rf"\b{part}\b", text) for part in name.split("::"))


class WalkTest(unittest.TestCase):
    def test_call_is_a_straight_line(self):
        self.assertEqual(len(walks()), 5)
        for steps, _ in walks():
            self.assertGreaterEqual(len(steps), 3)
            self.assertLessEqual(len(steps), 6)
            paths = [path for path, _ in steps]
            self.assertEqual(len(paths), len(set(paths)), "a file is visited twice")

    def test_files_have_the_functions(self):
        for path, names in [entry for steps, elsewhere in walks() for entry in steps + elsewhere]:
            with self.subTest(path=path):
                self.assertTrue((SOURCE / path).is_file(), f"there is no {path}")
                self.assertTrue(names, f"the step of {path} names no function")
                text = code(path)
                for name in names:
                    self.assertTrue(has(text, name), f"{path} has no {name}")

    def test_the_last_two_files_end_with_the_rows_of_the_quantizer_and_the_product(self):
        for steps, _ in walks()[:2]:
            for (path, names), kind in zip(steps[-2:], ("Quantize", "Gemm")):
                row = f"extern constinit const {kind}Kernel {names[0]} ="
                self.assertIn(row, code(path), f"{path} does not end with a row {names[0]}")
                self.assertIn(f"ROW({names[0]})", code(steps[-3][0]))

    def test_public_headers_stand_alone(self):
        standard = re.compile(r"^<[a-z_0-9]+(\.h)?>$")
        for header in sorted((SOURCE / "include" / "octile").iterdir()):
            for target in re.findall(r'^ *# *include +([<"].*[>"])', header.read_text(), re.MULTILINE):
                with self.subTest(header=header.name, target=target):
                    self.assertTrue(standard.match(target) or re.match(r'^"octile/[a-z_]+\.(h|hpp)"$', target),
                                    f"{header.name} includes {target}")


if __name__ == "__main__":
    unittest.main()
