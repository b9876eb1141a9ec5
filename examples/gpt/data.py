"""Text for a byte-level model: files of this machine, in an order that depends only on the files."""

import dataclasses
import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Iterator

import numpy as np
import torch

PYTHON = {".py", ".pyi"}
TEXT = PYTHON | {".txt", ".md", ".rst", ".c", ".h", ".cpp", ".hpp", ".cu", ".js", ".rs", ".go", ".java"}
VALIDATION_SHARE = 20  # one file in this many
LONGEST_FILE = 1 << 20  # larger ones are tables, mostly


@dataclasses.dataclass
class Corpus:
    training: np.ndarray  # uint8
    validation: np.ndarray
    files: int
    validation_files: int
    digest: str  # of both: equal digests, equal data

    def describe(self) -> str:
        return (
            f"{len(self.training):,} bytes of {self.files:,} files to train on, {len(self.validation):,} bytes of "
            f"{self.validation_files:,} to validate, sha256 {self.digest[:16]}"
        )


def installed() -> list[pathlib.Path]:
    """Where the running Python keeps its library, and the packages beside torch."""
    places = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    places.append(pathlib.Path(torch.__file__).parents[1])
    return list(dict.fromkeys(pathlib.Path(p).resolve() for p in places))


def files(places: list[pathlib.Path], endings: set[str]) -> Iterator[tuple[str, pathlib.Path]]:
    """Pairs of a name, relative to its place, and a path. A place inside another adds nothing."""
    seen = set()
    for place in places:
        if place.is_file():
            yield place.name, place
            continue
        for folder, folders, names in os.walk(place):
            folders.sort()
            for name in sorted(names):
                path = pathlib.Path(folder, name)
                if path.suffix in endings and not path.is_symlink() and path not in seen:
                    seen.add(path)
                    yield path.relative_to(place).as_posix(), path


def read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes() if path.stat().st_size <= LONGEST_FILE else b""
    except OSError:
        return b""


def gather(given: list[str], limit: int) -> Corpus:
    """At most `limit` bytes of the given files and folders, or of the installed Python's sources.

    Files come in the order of their names' hashes, which mixes packages, each content once. A file is trained on or
    validated on, never both; with a single file its last part is for validation.
    """
    places = [pathlib.Path(p).resolve() for p in given] or installed()
    missing = [str(p) for p in places if given and not p.exists()]
    if missing:
        raise FileNotFoundError(f"no such file or folder: {', '.join(missing)}")
    named = {name: path for name, path in files(places, TEXT if given else PYTHON)}
    ordered = sorted(named, key=lambda name: hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest())

    parts, contents, total = {False: [], True: []}, set(), 0
    for name in ordered:
        text = read(named[name])
        digest = hashlib.sha256(text).digest()
        if not text or b"\0" in text or digest in contents:
            continue
        text = text[: limit - total]
        contents.add(digest)
        # By content, so that a copy under another name could not move it to the other side.
        parts[digest[0] % VALIDATION_SHARE == 0].append(text)
        total += len(text)
        if total >= limit:
            break
    if not total:
        raise ValueError(f"no text found in {', '.join(map(str, places))}")
    training, validation = (np.frombuffer(b"\0".join(parts[side]), np.uint8) for side in (False, True))
    if not len(training) or not len(validation):
        everything = np.concatenate([training, validation])
        cut = len(everything) - len(everything) // VALIDATION_SHARE
        training, validation = everything[:cut], everything[cut:]
    digest = hashlib.sha256(training.tobytes() + b"|" + validation.tobytes()).hexdigest()
    return Corpus(training, validation, len(parts[False]), len(parts[True]), digest)


def check_length(size: int, length: int) -> None:
    if size <= length:
        raise ValueError(f"{size} bytes of text are too few for windows of {length}")


def windows(text: torch.Tensor, starts: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, length) of bytes from each start on, and of those that follow them."""
    at = starts[:, None] + torch.arange(length + 1, device=text.device)
    rows = text[at].long()
    return rows[:, :-1], rows[:, 1:]


def random_starts(text: torch.Tensor, shape: tuple[int, ...], length: int, seed: int) -> torch.Tensor:
    """Drawn on the CPU, so that a seed means the same order on every device."""
    check_length(len(text), length)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(len(text) - length, shape, generator=generator).to(text.device)


def even_starts(text: torch.Tensor, count: int, length: int) -> torch.Tensor:
    """The same windows for every model, spread over the text."""
    check_length(len(text), length)
    last = len(text) - length - 1
    return (torch.arange(count, device=text.device) * last) // max(1, count - 1)
