"""What reads files that others wrote: _octile_reader.so, the checkpoint library of the command. What it refuses, the
command refuses in the same words."""

import ctypes
import functools
import json
import os

from . import _c

_BINARY = "_octile_reader.so"


@functools.cache
def _library():
    path, folders = _c.beside(_BINARY)
    if path is None:
        raise ImportError(f"octile: there is no {_BINARY} in {folders[0]}: build the target octile_torch")
    binary = ctypes.CDLL(str(path.resolve()))
    for function in (binary.octile_reader_checkpoint, binary.octile_reader_calibration):
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_void_p
    binary.octile_reader_folds.argtypes, binary.octile_reader_folds.restype = [], ctypes.c_void_p
    binary.octile_reader_free.argtypes, binary.octile_reader_free.restype = [ctypes.c_void_p], None
    return binary


def _ask(what, *paths):
    paths = [os.fsencode(path) for path in paths]
    for path in paths:
        if b"\0" in path:
            raise ValueError(f"octile: {path!r} is not a path: it contains a zero byte")
    library = _library()
    text = getattr(library, f"octile_reader_{what}")(*paths)
    if not text:
        raise MemoryError("octile: out of memory while reading a checkpoint")
    try:
        answer = json.loads(ctypes.string_at(text))
    finally:
        library.octile_reader_free(text)
    if "error" in answer:
        raise ValueError(f"octile: {answer['error']}")
    return answer["result"]


def checkpoint(path):
    """The files of a quantized checkpoint and its layers by name, once all of it but the levels is checked.

    Raises ValueError, with the names of the file and of the tensor, for what it has wrong.
    """
    return _ask("checkpoint", path)


def calibration(path):
    """Raises ValueError for a file that is no calibration."""
    _ask("calibration", path)


def folds():
    """The architectures whose layers before can be divided, as checkpoint/folds.cpp has them."""
    return _ask("folds")


def printable(name):
    """A name that a file chose, for messages: a terminal must not obey it."""
    return "".join(c if c.isprintable() else "?" for c in name[:200]) + ("..." if len(name) > 200 else "")
