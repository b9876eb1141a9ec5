"""The code blocks of the documents.

What a block is, is seen in it:
    ```python, ```sh    run one after the other on their page by tests/torch/docs_test.py; ```text behind one is what it prints,
                        where "..." stands for any text
    ```cpp, ```c        with a main they are compiled and run by blocks_test.py, and ```text behind one is what it prints. Others
                        are compiled in the body of a function, whose declarations stand above, in <!-- given: ... -->
    ```cmake            lines of the projects in tests/package
A block whose first line is a comment "needs: ..." is not run: its syntax and its names are checked.
"""

import dataclasses
import functools
import os
import re
import subprocess
import textwrap
from pathlib import Path

SOURCE = Path(os.environ.get("OCTILE_SOURCE_DIR", Path(__file__).parents[2]))
BLOCK = re.compile(
    r"(?:^<!-- given: (?P<given>.*?) -->\n)?^(?P<indent> *)```(?P<kind>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
KINDS = {"python", "sh", "cpp", "c", "cmake", "text", ""}
# What other tests compile.
OTHERS = [
    "docs/tutorials/first-kernel.md",
    "docs/reference/tile.md",
    "docs/reference/proofs.md",
    "docs/how-to/puzzle.md",
    "docs/how-to/add-kernel.md",
]


@dataclasses.dataclass
class Block:
    page: Path
    line: int
    kind: str
    text: str
    given: str
    output: str | None = None  # of the block after it

    @property
    def needs(self):
        found = re.match(r"(?:#|//) needs: (.+)", self.text)
        return found.group(1) if found else ""

    @property
    def place(self):
        return f"{self.page.relative_to(SOURCE)}:{self.line}"


def pages():
    return [SOURCE / "README.md", SOURCE / "CONTRIBUTING.md", *sorted((SOURCE / "docs").rglob("*.md"))]


def blocks(page):
    found = []
    text = page.read_text()
    for match in BLOCK.finditer(text):
        if match["kind"] == "text" and found and text[found[-1][1] : match.start()].strip() == "":
            found[-1][0].output = textwrap.dedent(match["text"])
            continue
        line = text.count("\n", 0, match.start("text")) + 1
        block = Block(page, line, match["kind"], textwrap.dedent(match["text"]), match["given"] or "")
        found.append((block, match.end()))
    return [block for block, _ in found]


def prints(block, printed):
    """Whether this is what the block prints."""
    pattern = ".*?".join(re.escape(part) for part in block.output.strip().split("..."))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


@functools.cache
def helped(*command):
    done = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)} --help: {done.stderr}"
    return done.stdout


def has_option(sources, option):
    """Whether a script has the option: by name, as the negation of a BooleanOptionalAction, or as a dataclass field."""
    name = option.removeprefix("--")
    field = 'f"--{f.name}"' in sources and re.search(rf"^    {name}: ", sources, re.MULTILINE)
    other = re.search(rf'"--{name.removeprefix("no-")}",.* action=argparse.BooleanOptionalAction', sources)
    return f'"{option}"' in sources or bool(field or other)


def wrong_words(text):
    """What is wrong with the commands of a block that is not run: unknown verbs, options and files."""
    found = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        line = re.sub(r"(^|\s)#.*", "", line)
        line = re.sub(r"""(["']).*?\1""", '""', line)  # a quoted ";" does not end a command
        for command in re.split(r"&&|\||;", line):
            words = [word for word in command.split() if not re.match(r"[A-Z_]+=", word)]
            if not words:
                continue
            if words[:2] == ["./dev", "octile"]:
                words = words[1:]
            options = [word.split("=")[0] for word in words if word.startswith("--")]
            if words[0] in ("octile", "../octile/dev"):
                verb = words[1:3] if words[1:2] == ["puzzles"] else words[1:2]
                page = helped(os.environ.get("OCTILE_COMMAND", "octile"), *verb)
                found += [f"{' '.join(words[:2])} {option}" for option in options if not re.search(rf"{option}\b", page)]
            elif words[0] == "./dev":
                if not re.search(rf"^  {words[1]}\b", helped(str(SOURCE / "dev")), re.MULTILINE):
                    found.append(f"./dev {words[1]}")
            elif words[0] in ("python3", "torchrun"):
                scripts = [word for word in words if word.endswith(".py")]
                for script in scripts:
                    if script in ("train_fsdp.py",):  # defined on the page itself
                        continue
                    if not (SOURCE / script).is_file():
                        found.append(script)
                        continue
                    sources = [SOURCE / script, *(SOURCE / "examples").rglob("*.py"), *(SOURCE / "bench/peers").rglob("*.py")]
                    known = "".join(path.read_text() for path in sources)
                    own = options if words[0] == "python3" else [o for o in options if o != "--nproc-per-node"]
                    found += [f"{script} {option}" for option in own if option != "--help" and not has_option(known, option)]
            elif words[0] in ("cmake", "ctest") and "--preset" in words:
                preset = words[words.index("--preset") + 1]
                if f'"{preset}"' not in (SOURCE / "CMakePresets.json").read_text():
                    found.append(f"preset {preset}")
            elif words[0] not in ("pip", "cmake", "ctest", "g++", "taskset", "vllm", "jq", "sudo", "source", "conan", ".venv/bin/python"):
                found.append(words[0])
    return found
