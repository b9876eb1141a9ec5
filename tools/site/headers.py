"""A page of reference from a public header: its comments as text, its declarations as they are.

The headers have one form, which clang-format and their tests keep: declarations are separated by blank lines, and the
comment of a declaration stands directly above it. So no parser of C++ is needed.
"""

import re

SKIP = re.compile(r"^(#pragma once|#ifndef|#ifdef|#if |#else|#endif|#include|extern \"C\"|namespace |}  // |}$|using namespace)")
NAMES = [
    r"^enum \{\s*(\w+)",
    r"(?:struct|class|enum class|enum|union)\s+(?:OCTILE_\w+\s+)?(\w+)",
    r"#define (\w+)",
    r"\b(operator\s*\S+|~?\w+)\(",
    r"(\w+)\s*(?:=[^=]|;|\[|\{)",
]


def escape(line):
    return re.sub(r"(?<![`\w])([*_<>])|(?<=\w)([*<>])", lambda match: "\\" + match.group(), line)


def prose(comment):
    """A comment as Markdown: lines that are indented are equations, and stay as they are."""
    lines = [re.sub(r"^(?://|/\*| \*/?) ?|\s*\*/$", "", line) for line in comment]
    text, equations = [], []

    def flush():
        if equations and equations[0].startswith("  - "):
            text.extend(["", *(escape(line[2:]) for line in equations), ""])
            equations.clear()
        elif equations:
            text.extend(["", "```text", *equations, "```", ""])
            equations.clear()

    for line in lines:
        if line.startswith("  ") or (equations and re.match(r"\s+\S", line)):
            equations.append(line)
        else:
            flush()
            text.append(escape(line))
    flush()
    return "\n".join(text).strip()


def name_of(code):
    body = re.sub(r"//[^\n]*|/\*.*?\*/", "", "\n".join(code), flags=re.DOTALL)
    body = re.sub(r"template <[^>]*>", "", body)
    if match := re.search(r"^typedef .*?\b(\w+);\s*\Z", body, re.DOTALL | re.MULTILINE):
        return match.group(1)
    for pattern in NAMES:
        if match := re.search(pattern, body):
            return match.group(1)
    return ""


def public(code):
    """A class without what is private."""
    kept, hidden = [], False
    for line in code:
        if re.match(r"^ (private|protected):", line):
            hidden = True
        elif re.match(r"^ public:|^};", line):
            hidden = False
        if not hidden:
            kept.append(line)
    return kept


def chunks(lines):
    """(comment, code) of the declarations: they end at a blank line outside of braces."""
    comment, code, depth = [], [], 0
    for line in [*lines, ""]:
        if depth == 0 and not line.strip():
            if comment or code:
                yield comment, code
            comment, code = [], []
            continue
        if depth == 0 and SKIP.match(line):
            continue
        if depth == 0 and not code and re.match(r"//|/\*| \*", line):
            comment.append(line)
            continue
        code.append(line)
        plain = re.sub(r"//.*|\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)'", "", line)
        depth += plain.count("{") - plain.count("}")


def page(path):
    parts = list(chunks(path.read_text().splitlines()))
    text = f"# `octile/{path.name}`\n"
    seen, level = set(), 2
    for comment, code in parts:
        code = public(code)
        if not code:
            part = re.fullmatch(r"/\* -+ (.*?) -+ \*/", "\n".join(comment))
            text += f"\n## {part.group(1)}\n" if part else "\n" + prose(comment) + "\n"
            level = 3 if part else level
            continue
        name = name_of(code)
        if name and name not in seen:
            seen.add(name)
            text += f"\n{'#' * level} `{name}`\n"
        if comment:
            text += "\n" + prose(comment) + "\n"
        text += "\n```cpp\n" + "\n".join(code) + "\n```\n"
    return text
