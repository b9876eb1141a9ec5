"""The documents hold together: links and pictures lead somewhere, anchors are there, a page has no heading twice, and the
site's navigation has every page. The charts are drawn from the JSON that is there.

The anchors are GitHub's, which tools/site/hooks.py gives to the site as well.
"""

import os
import re
import subprocess
import sys
import unittest
from pathlib import Path

SOURCE = Path(os.environ.get("OCTILE_SOURCE_DIR", Path(__file__).parents[2]))
FOLDERS = ["bench", "check", "cli", "data", "docs", "examples", "include", "python", "src", "tests", "tile", "tools"]
FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2", re.MULTILINE | re.DOTALL)


def documents():
    return [*SOURCE.glob("*.md"), *(path for folder in FOLDERS for path in SOURCE.glob(f"{folder}/**/*.md"))]


def prose(path):
    return FENCE.sub("", path.read_text())


def headings(path):
    return re.findall(r"^#+ +(.*)$", prose(path), re.MULTILINE)


def anchors(path):
    return [re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings(path)]


class DocumentsTest(unittest.TestCase):
    def test_links_and_pictures(self):
        found, broken = 0, []
        for document in documents():
            for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
                if re.match(r"[a-z]+:", target):
                    continue
                found += 1
                path, _, anchor = target.partition("#")
                linked = document.parent / path if path else document
                if not linked.exists():
                    broken.append(f"{document.relative_to(SOURCE)}: there is no {target}")
                elif anchor and linked.suffix == ".md" and anchor not in anchors(linked):
                    broken.append(f"{document.relative_to(SOURCE)}: there is no heading {target}")
        self.assertGreater(found, 100)
        self.assertFalse(broken, "\n".join(broken))

    def test_pages_that_messages_name(self):
        """The pages and headings that sources name exist: messages refer to them."""
        linked, broken = set(), []
        for folder in set(FOLDERS) - {"docs", "data"}:
            for path in (SOURCE / folder).rglob("*"):
                if path.suffix not in {".h", ".hpp", ".cpp", ".cu", ".cuh", ".py", ".c", ".txt"} or not path.is_file():
                    continue
                for page, anchor in re.findall(r"\b(docs/[\w/-]+\.md)(?:#([\w-]+))?", path.read_text()):
                    if not (SOURCE / page).exists() or (anchor and anchor not in anchors(SOURCE / page)):
                        broken.append(f"{path.relative_to(SOURCE)}: there is no {page}#{anchor}")
                    if path.is_relative_to(SOURCE / "src") or path.is_relative_to(SOURCE / "python"):
                        linked.add(f"{page}#{anchor}" if anchor else page)
        self.assertFalse(broken, "\n".join(broken))
        errors = {name.partition("#")[2] for name in linked if name.startswith("docs/how-to/errors.md#")}
        led_to = {"no-kernel", "workspace", "alignment", "two-tensors-overlap", "cuda-errors", "import", "layers", "checkpoints",
                  "many-gpus"}
        self.assertEqual(errors, led_to)

    def test_no_heading_twice(self):
        for document in documents():
            found = anchors(document)
            with self.subTest(document=document):
                self.assertEqual(sorted(set(found)), sorted(found))
                if document.is_relative_to(SOURCE / "docs"):
                    self.assertEqual(len(re.findall(r"^# ", prose(document), re.MULTILINE)), 1, "one title a page")

    def test_charts_are_those_of_their_json(self):
        done = subprocess.run([sys.executable, SOURCE / "tools" / "charts.py", "--check"], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_navigation_has_every_page_once(self):
        navigation = (SOURCE / "tools" / "site" / "mkdocs.yml").read_text().split("\nnav:\n")[1]
        named = re.findall(r"[\w./-]+\.md", navigation)
        pages = [str(path.relative_to(SOURCE / "docs")) for path in (SOURCE / "docs").rglob("*.md")]
        made = [name for name in named if name.startswith(("reference/headers/", "reference/python-api", "source/"))]
        self.assertEqual(sorted(set(named) - set(made)), sorted(pages))
        self.assertEqual(len(named), len(set(named)))


if __name__ == "__main__":
    unittest.main()
