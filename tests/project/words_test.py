"""Sources, messages and documents use the field's standard terms, not the project's earlier words for them.

A line that says "deprecated", or one at most three lines below it, may name what it replaces.
"""

import os
import re
import unittest
from pathlib import Path

SOURCE = Path(os.environ.get("OCTILE_SOURCE_DIR", Path(__file__).parents[2]))
FOLDERS = ["src", "include", "cli", "check", "checkpoint", "tile", "python", "examples", "docs"]
FILES = {".h", ".hpp", ".c", ".cpp", ".cu", ".cuh", ".py", ".md", ".txt", ".in", ".map"}

# The old word, as a regular expression (a space matches any spaces, line breaks and comment signs between two words),
# and the word to use.
WORDS = {
    "[Cc]opy engines?": "TMA",
    "[Mm]atrix units?": "tensor cores, WGMMA or mma",
    r"\b[Mm]ultiprocessors?\b(?![\",}])": "SM",  # not the JSON field
    "[Ss]econd[- ]level cache": "L2",
    r"\b[Tt]wo looks|\btwo_looks": "two passes, two_pass",
    "[Tt]urners?": "transposer",
    r"\b[Ww]ish(es|ed)?\b|Wish": "requested",
    r"\bkMost": "kMax...",
    r"\bkLeast": "kMin...",
    r"\bkTallest": "kMax...",
    r"\bkTurned": "kTransposed...",
    r"\bleast_scale\b": "min_scale",
    r"\bclip_least\b": "min_clip",
    r"\b(give|take)_registers\b": "setmaxnreg_dec, setmaxnreg_inc",
    r"\bload_box": "tma_load",
    r"\bbegin_products\b": "wgmma_fence",
    r"\bkMeetBarrier\b": "kNamedBarrier",
    r"\bquantize_loose\b": "quantize_unaligned",
    r"\bhomework|\bHomework": "the reference interface, octile.compat",
    r"\b_fallback\b": "the module's subject",
    r"\b(transposed_boxes|folded_nibbles|nibble_stages|nibble_products)\b": "the kernel's name",
    "[Aa] mistake of": "error",
    "[Hh]anded over": "passed, given",
    r"\b[Ii]n silence\b": "silently",
}


def patterns():
    gap = r"[\s/*#]+"
    return [(re.compile(old.replace(" ", gap)), new) for old, new in WORDS.items()]


def text_files():
    for folder in FOLDERS:
        for path in sorted((SOURCE / folder).rglob("*")):
            if path.suffix in FILES and path.is_file() and "__pycache__" not in path.parts:
                yield path


class WordsTest(unittest.TestCase):
    def test_old_words_are_gone(self):
        found, files = [], 0
        for path in text_files():
            files += 1
            text = path.read_text()
            lines = text.splitlines()
            name = path.relative_to(SOURCE)
            for pattern, better in patterns():
                if pattern.search(path.name) and "deprecated" not in text.lower():
                    found.append(f"{name}: a file's name; write: {better}")
                for match in pattern.finditer(text):
                    number = text.count("\n", 0, match.start())
                    if any("deprecated" in line.lower() for line in lines[max(0, number - 3) : number + 1]):
                        continue
                    found.append(f"{name}:{number + 1}: {' '.join(match.group().split())}; write: {better}")
        self.assertGreater(files, 200)
        self.assertFalse(found, f"{len(found)} old words\n" + "\n".join(found))


if __name__ == "__main__":
    unittest.main()
