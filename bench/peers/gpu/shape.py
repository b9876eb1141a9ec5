import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Shape:
    """X (m, k), W (n, k), Y (m, n)."""

    m: int
    k: int
    n: int

    @staticmethod
    def parse(text):
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
        if not match or "0" in match.groups():
            raise ValueError(f"{text} is not MxKxN, as 4096x4096x14336")
        return Shape(*map(int, match.groups()))

    def __str__(self):
        return f"{self.m}x{self.k}x{self.n}"


def layer_sizes(text):
    """(K, N)"""
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if not match or "0" in match.groups():
        raise ValueError(f"{text} is not KxN, as 4096x14336")
    return tuple(map(int, match.groups()))
