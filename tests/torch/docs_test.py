"""The documents on the Python package: their blocks run (tests/project/blocks.py), and the names that they use exist."""

import ast
import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import octile
import pytest
import torch
from octile import _ops

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "project"))
from blocks import blocks, pages, prints  # noqa: E402

PAGES = {str(page.relative_to(ROOT)): blocks(page) for page in pages()}
RUN = [name for name, found in PAGES.items() if any(b.kind == "python" and not b.needs for b in found)]
COMMAND = os.environ.get("OCTILE_COMMAND")


@pytest.mark.parametrize("name", RUN)
def test_blocks_run_one_after_the_other(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")  # as in the checkout
    torch.manual_seed(0)
    names = {"__name__": "document"}
    if COMMAND:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin" / "octile").symlink_to(COMMAND)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for block in PAGES[name]:
        if block.needs or block.kind not in ("python", "sh"):
            continue
        if block.kind == "python":
            printed = io.StringIO()
            code = compile(
                "\n" * (block.line - 1) + block.text, str(ROOT / name), "exec"
            )  # an error names the page's line
            try:
                with contextlib.redirect_stdout(printed):
                    exec(code, names)
            except ModuleNotFoundError as error:
                if error.name not in ("peft", "transformers", "safetensors"):
                    raise
                pytest.skip(f"there is no {error.name}")
            said = printed.getvalue()
        elif COMMAND:
            done = subprocess.run(["bash", "-ec", block.text], capture_output=True, text=True)
            assert done.returncode == 0, f"{block.place}: {done.stderr}"
            said = done.stdout
        if block.output is not None and (block.kind == "python" or COMMAND):
            assert prints(block, said), f"{block.place} prints\n{said}"


@pytest.mark.parametrize(
    "name", [name for name, found in PAGES.items() if any(b.kind == "python" and b.needs for b in found)]
)
def test_blocks_that_need_more_name_what_is_there(name):
    for block in PAGES[name]:
        if block.kind != "python" or not block.needs:
            continue
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "octile":
                path = ROOT / "python" / Path(*node.module.split("."))
                source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
                for alias in node.names:  # not imported, which would need vLLM or torchtitan
                    assert re.search(rf"\b{alias.name}\b", source), f"{block.place}: {node.module}.{alias.name}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "octile":
                module = ROOT / "python" / "octile" / f"{node.attr}.py"  # imported by itself
                assert hasattr(octile, node.attr) or module.exists(), f"{block.place}: octile.{node.attr}"


def test_operators_are_those_of_the_page():
    stated = {}
    for block in PAGES["docs/reference/python.md"]:
        stated |= dict(re.findall(r"^(\w+)(\(Tensor .*)$", block.text, re.MULTILINE)) if block.kind == "" else {}
    assert stated == _ops._SCHEMAS


def test_page_names_everything_public():
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    assert octile.__all__
    assert [name for name in octile.__all__ if not re.search(rf"\b{name}\b", page)] == []
