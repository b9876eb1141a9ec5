"""What is multiplied: shapes, and operands in files that all peers read."""

import atexit
import contextlib
import dataclasses
import pathlib
import shutil
import tempfile

import numpy as np

GROUP = 128
BLOCK = 32  # the smallest that a contender quantizes X in


@dataclasses.dataclass(frozen=True)
class Shape:
    kind: str  # "w8" or "w4"
    m: int
    k: int
    n: int

    @staticmethod
    def parse(text):
        kind, _, sizes = text.rpartition(":")
        m, k, n = (int(size) for size in sizes.split("x"))
        if kind not in ("", "w8", "w4") or min(m, k, n) < 1 or k % GROUP:
            raise ValueError(text)
        return Shape(kind or "w8", m, k, n)

    def __str__(self):
        return ("W4 " if self.kind == "w4" else "") + f"{self.m}x{self.k}x{self.n}"

    def operations(self):
        return 2 * self.m * self.k * self.n

    def weight_bytes(self):
        scales = 4 * self.n * self.k // GROUP
        return self.n * self.k // 2 + scales if self.kind == "w4" else self.n * self.k + 4 * self.n


def temporary_folder():
    memory = pathlib.Path("/dev/shm")
    enough = memory.is_dir() and shutil.disk_usage(memory).free > 1 << 30
    return tempfile.mkdtemp(prefix="octile-peers-", dir=memory if enough else None)


def save(folder, shape, arrays):
    sizes = np.array([shape.m, shape.k, shape.n, GROUP])
    for name, array in {"sizes": sizes, **arrays}.items():
        np.save(f"{folder}/{name}.npy", array)


def clipped(values, low, high):
    return np.clip(np.rint(values), low, high).astype(np.int8)


@contextlib.contextmanager
def folder_of_problem(shape):
    """Normal data; in 8 bits a normal times 30, which reaches the ends of the range."""
    folder = temporary_folder()
    try:
        rng = np.random.default_rng(1)
        normal = lambda *sizes: rng.standard_normal(sizes, np.float32)  # noqa: E731
        w = normal(shape.n, shape.k)
        scale = lambda *sizes: rng.random(sizes, np.float32) + np.float32(0.5)  # noqa: E731
        arrays = {"x": normal(shape.m, shape.k), "bias": normal(shape.n)}
        if shape.kind == "w4":
            arrays |= {"w4": clipped(2.5 * w, -8, 7), "w4_scale": scale(shape.n, shape.k // GROUP) / 100}
        else:
            arrays |= {"w": clipped(30 * w, -128, 127), "w_scale": scale(shape.n) / 1000}
            arrays["xq"] = clipped(30 * normal(shape.m, shape.k), -128, 127)
        save(folder, shape, arrays)
        yield folder
    finally:
        shutil.rmtree(folder)


def full_range(rng, shape, low):
    """A row of the lowest and a row of the highest except for one value, and random ones, whose blocks of K have both ends."""
    rows, k = shape
    high = 127
    values = rng.integers(low, high, (rows, k), endpoint=True, dtype=np.int8)
    values[:, ::BLOCK], values[:, 1::BLOCK] = low, high
    if rows > 2:
        values[0], values[1] = low, high
        values[0, 0], values[1, 0] = high, low  # for quantizers that map a row's ends
    return values


check_folders = {}


def check_problems(contender):
    """Folders of problems whose scales are all 1, so that every result is an integer of at most 24 bits.

    A quantizer of f32 X finds the scale 1 in them by itself, and writes X as it is: its range is all used.
    """
    low = -127 if contender["quantizer"] == "row" else -128
    if low not in check_folders:
        rng = np.random.default_rng(2)
        folders = []
        for m in (1, 16, 96):
            shape = Shape("w8", m, 1024, 256)
            x = full_range(rng, (m, shape.k), low)
            ones = np.ones(shape.n, np.float32)
            w = full_range(rng, (shape.n, shape.k), -128)
            arrays = {"x": x.astype(np.float32), "xq": x, "w": w, "w_scale": ones, "bias": 0 * ones}
            arrays |= {"w4": w // 16, "w4_scale": np.ones((shape.n, shape.k // GROUP), np.float32)}
            folder = temporary_folder()
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            save(folder, shape, arrays)
            folders.append(folder)
        check_folders[low] = folders
    return check_folders[low]
