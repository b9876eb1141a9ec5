"""MkDocs' hooks of Octile's site.

Pages link to files of the repository as they do when they are read there. On the site such a link leads to a page made of
the file: a public header to its reference, python/octile/__init__.py to that of the package, a Markdown file and any other
source to itself. Drawings (SVG) are put into the page, so that they follow its colours.
"""

import os
import posixpath
import re
from pathlib import Path

import headers
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
PACKAGE = "python/octile/__init__.py"
MODULES = ["arrays", "compat", "fsdp", "parallel", "expert_parallel", "transformers", "vllm", "torchtitan"]


def slug(text, separator="-"):
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", separator)


def page_of(path):
    """The page of a file outside of docs/."""
    if path == PACKAGE:
        return "reference/python-api.md"
    if path.startswith("include/octile/"):
        return f"reference/headers/{Path(path).name.replace('.', '_')}.md"
    if path.endswith(".md"):
        return "source/" + path
    return f"source/{path}.md"


def outside(source, target):
    """The path in the repository of a link that leaves docs/, or None."""
    if re.match(r"[a-z]+:|#", target):
        return None
    full = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), target.partition("#")[0]))
    return None if full.startswith("docs/") or full == "docs" else full


def prose_only(text, function):
    """Applies the function to what is not in a fence."""
    result, last = [], 0
    for fence in FENCE.finditer(text):
        result += [function(text[last : fence.start()]), fence.group()]
        last = fence.end()
    return "".join(result) + function(text[last:])


def python_reference():
    import ast

    tree = ast.parse((ROOT / PACKAGE).read_text())
    places = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            for name in node.names:
                if not name.name.startswith("_"):
                    places.setdefault(name.name, f"octile.{node.module}.{name.name}")
    text = "# The Python package, name by name\n\nGenerated from the docstrings. The guide to them is [the package](python.md).\n"
    names = sorted((name for name in places if name != "BINDING"), key=str.lower)
    text += "\n## `octile`\n"
    for name in names:
        text += f"\n::: {places[name]}\n"
    for module in MODULES:
        text += f"\n## `octile.{module}`\n\n::: octile.{module}\n    options:\n      show_root_heading: false\n"
        text += "      show_docstring_description: true\n"
    return text


def content(path):
    file = ROOT / path
    if path == PACKAGE:
        return python_reference()
    if path.startswith("include/octile/"):
        return headers.page(file)
    text = file.read_text()
    if path.endswith(".md"):
        return text
    language = {".py": "python", ".h": "cpp", ".hpp": "cpp", ".cpp": "cpp", ".cu": "cpp", ".cuh": "cpp", ".txt": "cmake"}
    fence = "`" * 4
    return f"# {path}\n\n{fence}{language.get(file.suffix, 'text')}\n{text}\n{fence}\n"


def on_config(config):
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files, config):
    todo = [(file.src_uri, Path(file.abs_src_path).read_text()) for file in files if file.src_uri.endswith(".md")]
    made = {PACKAGE, *(f"include/octile/{path.name}" for path in (ROOT / "include" / "octile").iterdir())}
    for path in sorted(made):
        files.append(File.generated(config, page_of(path), content=content(path)))
    while todo:
        source, text = todo.pop()
        for _, _, target in LINK.findall(FENCE.sub("", text)):
            path = outside(source, target)
            if path and path not in made and (ROOT / path).is_file():
                made.add(path)
                files.append(File.generated(config, page_of(path), content=content(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    source = page.file.src_uri
    # Who searches finds messages first, then tasks, and headers, findings and sources last.
    if source == "how-to/errors.md":
        page.meta["search"] = {"boost": 8}
    elif source.startswith(("how-to/", "tutorials/")):
        page.meta["search"] = {"boost": 4}
    elif source.startswith(("notes/", "source/", "reference/headers/")):
        page.meta["search"] = {"boost": 0.5}
    here = posixpath.dirname(source)
    original = source.removeprefix("source/") if source.startswith("source/") else None

    def link(match):
        image, text, target = match.groups()
        if original is not None:  # a file of the repository, whose links are relative to its place there
            if re.match(r"[a-z]+:|#", target):
                return match.group()
            path, hash, anchor = target.partition("#")
            full = posixpath.normpath(posixpath.join(posixpath.dirname(original), path))
            inside = full.removeprefix("docs/") if full.startswith("docs/") else page_of(full)
            if inside not in files.src_uris:
                return text
            return f"{image}[{text}]({posixpath.relpath(inside, here)}{hash}{anchor})"
        path = outside(source, target)
        if path is None:
            return match.group()
        hash = "".join(target.partition("#")[1:])
        if (ROOT / path).is_dir():
            return text
        return f"{image}[{text}]({posixpath.relpath(page_of(path), here)}{hash})"

    return prose_only(markdown, lambda text: LINK.sub(link, text))


def on_page_content(html, page, config, files):
    folder = Path(page.file.abs_src_path).parent if page.file.abs_src_path else None

    def drawing(match):
        alt = re.search(r'alt="([^"]*)"', match.group())
        path = re.search(r'src="([^"]+\.svg)"', match.group())
        if folder is None or not path or not (folder / path.group(1)).is_file():
            return match.group()
        svg = re.sub(r"<\?xml.*?\?>|<!--.*?-->", "", (folder / path.group(1)).read_text(), flags=re.DOTALL)
        svg = re.sub(r"<style>.*?</style>", "", svg, count=1, flags=re.DOTALL) if "data-page-colours" in svg else svg
        label = alt.group(1) if alt else ""
        width = re.search(r'<svg [^>]*viewBox="0 0 (\d+)', svg)
        kind = "drawing narrow" if width and int(width.group(1)) <= 520 else "drawing"
        svg = svg.replace("<svg ", f'<svg class="{kind}" aria-label="{label}" ', 1)
        return f'<span class="drawing-frame" style="display: block">{svg}</span>'

    html = re.sub(r"<img [^>]*\.svg[^>]*>", drawing, html)
    return re.sub(r"<code>([^<\n]{1,24})</code>", r'<code class="whole">\1</code>', html)  # no break after the dashes of an option


def on_post_page(output, page, config):
    """The plugin `offline` loads a script from another site; ours does the same."""
    own = posixpath.relpath("assets/file-worker.js", posixpath.dirname(page.url) or ".")
    return output.replace("https://unpkg.com/iframe-worker/shim", own)


def on_post_build(config):
    """Nothing is fetched from elsewhere when a page is read."""
    site = Path(config.site_dir)
    (site / "404.html").unlink(missing_ok=True)  # of a server, which there need not be
    for page in site.rglob("*.html"):
        found = re.findall(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="(https?://[^"]+)"', page.read_text())
        if found:
            raise SystemExit(f"{page.relative_to(site)} fetches {', '.join(found)}")
