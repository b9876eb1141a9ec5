"""One peer in a process of its own: prepares its contenders for a problem, checks them, and times them when told to.

Started by peers.py, which it answers in JSON, line by line. See README.md.
"""

import ctypes
import dataclasses
import importlib
import json
import os
import pathlib
import signal
import sys
import time
import traceback
import typing

import numpy as np

MODULES = {
    "octile": "peer_octile",
    "torch": "peer_torch",
    "onnxruntime": "peer_onnxruntime",
    "onednn-debian": "peer_c",
    "onednn-pypi": "peer_c",
    "openblas": "peer_c",
    "ggml": "peer_ggml",
    "litert": "peer_litert",
}


@dataclasses.dataclass
class Problem:
    """Operands that the peers share. W is (n, k). The floats are x and w * w_scale[:, None]."""

    m: int
    k: int
    n: int
    group: int
    x: np.ndarray  # f32
    bias: np.ndarray  # f32 (n)
    # In 8 bits
    xq: np.ndarray = None  # s8, of its own: what peers get that want X quantized
    w: np.ndarray = None  # s8
    w_scale: np.ndarray = None  # f32 (n)
    # In 4 bits
    w4: np.ndarray = None  # s8, -8 ... 7
    w4_scale: np.ndarray = None  # f32 (n, k / group)

    @staticmethod
    def load(folder):
        arrays = {path.stem: np.load(path, mmap_mode="r") for path in pathlib.Path(folder).glob("*.npy")}
        m, k, n, group = (int(size) for size in arrays.pop("sizes"))
        return Problem(m, k, n, group, **arrays)

    def xu(self):
        return (self.xq.astype(np.int16) + 128).astype(np.uint8)

    def float_weight(self):
        return self.w * self.w_scale[:, None]


@dataclasses.dataclass
class Ready:
    """A prepared contender: what to time, and where its result is afterwards."""

    run: typing.Callable[[], object]
    output: typing.Callable[[], np.ndarray]  # (m, n)
    note: str = ""


@dataclasses.dataclass
class Contender:
    name: str
    kind: str  # "w8": 8-bit weights and activations, "w4", "float"
    prepare: typing.Callable[[Problem], Ready]
    x: str  # the X that is passed: f32 (what is quantized, is quantized in the time), bf16, s8, u8
    fused: str  # what else is in the time: scales, bias, nothing
    # What the quantizer of f32 X writes: "row" -127 ... 127 with a scale a row or a block, "tensor" 0 ... 255 with one
    # scale, or one a row; "": there is none.
    quantizer: str = ""
    largest_weight: int = 1 << 62  # elements; beyond it is left out
    timed: bool = True  # else only checked


def expected(problem, x, rows, columns):
    """The exact result of the first rows and columns: sums for an X of integers, the layer for one of floats."""
    if x in ("s8", "u8"):
        xs = (problem.xq if x == "s8" else problem.xu())[:rows].astype(np.int64)
        return xs @ problem.w[:columns].astype(np.int64).T
    w = problem.w[:columns] * problem.w_scale[:columns, None].astype(np.float64)
    return problem.x[:rows].astype(np.float64) @ w.T


def relative_error(problem, contender, ready):
    """Of the result on random data: shows that the peer computes what it should. Zeros: it did not run at all."""
    rows, columns = min(problem.m, 2), min(problem.n, 64)
    if contender.kind == "w4":
        scale = np.repeat(problem.w4_scale[:columns].astype(np.float64), problem.group, axis=1)
        want = problem.x[:rows].astype(np.float64) @ (problem.w4[:columns] * scale).T
    else:
        want = expected(problem, contender.x, rows, columns)
    got = np.asarray(ready.output(), np.float64)[:rows, :columns]
    if "bias" in contender.fused:
        got = got - problem.bias[:columns]
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def worst_sum_error(problem, contender, ready):
    """Against exact sums. Every scale of the problem is 1, every bias 0, and what X is quantized to is X.

    An f32 result may be rounded at each step of a sum in f32; a sum that saturates is wrong by thousands.
    """
    ready.run()
    got, want = np.asarray(ready.output()), expected(problem, contender.x, problem.m, problem.n)
    allowed = 0 if got.dtype.kind == "i" else 0.5 + np.abs(want).max() * 2.0**-22
    error = np.abs(got.astype(np.float64) - want)
    return float(error.max()), int((error > allowed).sum()), error.size


class Worker:
    def __init__(self, peer, settings):
        module = importlib.import_module(MODULES[peer])
        self.contenders, self.versions = module.load(peer, settings)
        self.by_name = {c.name: c for c in self.contenders}
        self.ready = {}
        self.next_copy = {}

    def describe(self):
        fields = ("name", "kind", "x", "fused", "quantizer", "largest_weight", "timed")
        return {
            "contenders": [{f: getattr(c, f) for f in fields} for c in self.contenders],
            "versions": self.versions,
        }

    def prepare(self, order):
        contender, problem = self.by_name[order["name"]], Problem.load(order["problem"])
        copies = [contender.prepare(problem) for _ in range(order["copies"])]
        for copy in copies:
            copy.run()
        self.ready[contender.name], self.next_copy[contender.name] = copies, 0
        return {"note": copies[0].note, "error": relative_error(problem, contender, copies[0])}

    def time(self, order):
        copies, at = self.ready[order["name"]], self.next_copy[order["name"]]

        def seconds_of(count):
            nonlocal at
            runs = [copies[(at + i) % len(copies)].run for i in range(count)]
            at = (at + count) % len(copies)
            start = time.perf_counter()
            for run in runs:
                run()
            return (time.perf_counter() - start) / count

        # The first call after a pause is slow, and the second tells how many are to be timed.
        seconds_of(1)
        once = seconds_of(1)
        repetitions = min(10000, int(order["seconds"] / max(once, 1e-7)) + 1)
        seconds = seconds_of(repetitions) if repetitions > 1 else once
        self.next_copy[order["name"]] = at
        return {"seconds": seconds, "repetitions": repetitions}

    def check(self, order):
        contender, problem = self.by_name[order["name"]], Problem.load(order["problem"])
        ready = contender.prepare(problem)
        worst, wrong, count = worst_sum_error(problem, contender, ready) if contender.kind == "w8" else (0, 0, 0)
        seconds = []
        while len(seconds) < 3 or (len(seconds) < 50 and sum(seconds) < 0.1):
            start = time.perf_counter()
            ready.run()
            seconds.append(time.perf_counter() - start)
        operations = 2 * problem.m * problem.k * problem.n
        return {"worst": worst, "wrong": wrong, "of": count, "operations_per_second": operations / min(seconds)}

    def free(self, order):
        self.ready.clear()
        return {}


def serve(worker_class, argv):
    """Makes the worker that argv names, and answers its parent until that ends."""
    # Dies with its parent, even when stopped.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    # What libraries print must not be taken for answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings = json.loads(argv[2])
    os.sched_setaffinity(0, settings["cpus"])

    def answer(work):
        try:
            value = work()
        except Exception as error:  # whatever a peer throws is an answer: it is shown and the peer skipped
            text = f"{type(error).__name__}: {error}".strip().split("\n")[0]
            value = {"failed": text[:300], "trace": traceback.format_exc()}
        print(json.dumps(value), file=answers)

    worker = None

    def start():
        nonlocal worker
        worker = worker_class(argv[1], settings)
        return worker.describe()

    answer(start)
    for line in sys.stdin:
        order = json.loads(line)
        answer(lambda: getattr(worker, order["do"])(order))


if __name__ == "__main__":
    serve(Worker, sys.argv)
