"""What the documents say of the Python package: their blocks run, and they name what is there."""

import re
from pathlib import Path

import octile
import pytest
import torch
from octile import _ops

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = ["README.md", "docs/python.md", "docs/inference.md"]


def blocks(document, language):
    """[(line, text)] of a document's code blocks."""
    text = (ROOT / document).read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(2)), match.group(2)) for match in found if match.group(1) == language]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_blocks_run_one_after_the_other(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {"__name__": "document"}
    found = blocks(document, "python")
    assert found
    for line, text in found:
        # Blank lines in front, so that an error names the line of the document.
        exec(compile("\n" * line + text, str(ROOT / document), "exec"), names)


def test_operators_are_those_of_the_page():
    stated = {}
    for _, text in blocks("docs/python.md", ""):
        stated |= dict(re.findall(r"^(\w+)(\(Tensor .*)$", text, re.MULTILINE))
    assert stated == _ops._SCHEMAS


def test_page_names_everything_public():
    page = (ROOT / "docs" / "python.md").read_text()
    assert octile.__all__
    assert [name for name in octile.__all__ if not re.search(rf"\b{name}\b", page)] == []
