"""The fields of a verb's --json, and those that docs/reference/json.md lists."""

import pathlib
import re

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "json.md"


def leaves(value, path=""):
    """The names of all fields, as the page writes them: "layers[].name"."""
    if isinstance(value, dict):
        return {leaf for key, part in value.items() for leaf in leaves(part, f"{path}.{key}" if path else key)}
    if isinstance(value, list):
        return {leaf for part in value for leaf in leaves(part, path + "[]")}
    return {path}


def documented(section):
    """A regular expression for the fields of the section's table: {a,b} is either, CAPITALS is any name."""
    text = PAGE.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    patterns = []
    for field in re.findall("`([^`]+)`", " ".join(cells)):
        pattern = re.escape(field).replace(r"\{", "(?:").replace(r"\}", ")").replace(",", "|")
        patterns.append(re.sub(r"\b[A-Z]+\b", r"[^\\[\\]]+", pattern))
    return re.compile("|".join(patterns))


def undocumented(document, section):
    known = documented(section)
    return sorted(field for field in leaves(document) if not known.fullmatch(field))
