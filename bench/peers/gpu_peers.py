#!/usr/bin/env python3
"""Octile on a GPU beside other libraries, in turns, in one run. See gpu/README.md.

Exit status: 0, or 1 if a result of Octile's is wrong, or 2 for a wrong command line or no GPU.
"""

import argparse
import datetime
import itertools
import json
import os
import pathlib
import shlex
import statistics
import sys
import time

from gpu import chart, report
from gpu.shape import Shape, layer_sizes

ROOT = pathlib.Path(__file__).resolve().parents[2]
PEERS = ("torch", "cublaslt", "triton", "cutlass")
SERVING_PEERS = ("torch", "vllm", "humming", "read")
TARGETS = {
    "4096x4096x4096": {"tops": 1510},
    "8192x8192x8192": {"tops": 1550},
    "4096x4096x14336": {"tops": 1560},
    "4096x14336x4096": {"tops": 1550},
    "16384x4096x14336": {"tops": 1480},
    "1024x4096x4096": {"us": 27},
    "256x4096x4096": {"us": 13.5},
    "64x4096x14336": {"us": 19},
    "16x4096x14336": {"us": 17},
    "1x4096x14336": {"us": 16},
}
BACKWARD = ("4096x4096x4096", "8192x8192x8192", "4096x4096x14336", "4096x14336x4096")
QUANTIZED = (8192, 8192)
SWEPT = ((4096, 14336), (4096, 4096))
SWEPT_TO = 512
FINALISTS = 3
ROUNDS, SERVING_ROUNDS = 40, 9
# What --serving takes, and what else it would be.
SERVING = {
    "layers": "4096x14336,8192x8192,14336x4096,5120x5120",
    "rows": "1,2,4,8,16,24,32,48,64,96,128,192,256,384,512,1024,4096",
    "formats": ",".join(report.FORMATS),
    "dtype": "f16",
    "group": None,
    "zero_points": False,
    "kernels": "",
    "vllm": None,
}


def parse_arguments():
    parser = argparse.ArgumentParser(description="Octile on a GPU beside other libraries, in turns, in one run.")
    add = parser.add_argument
    add("--shapes", metavar="MxKxN,...", help="instead of the usual ten; '' for none")
    usual = f"{','.join(PEERS)}; with --sweep torch, with --serving {','.join(SERVING_PEERS)}"
    add("--peers", metavar="NAME,...", help=f"default: {usual}")
    add("--rounds", type=int, help=f"turns of each contender (default {ROUNDS}; with --serving {SERVING_ROUNDS})")
    add(
        "--rest", type=float, default=5, metavar="TIMES", help="as long as it works the GPU rests (default %(default)s)"
    )
    add("--quick", action="store_true", help="21 rounds, and with --sweep some batch sizes")
    add("--sweep", action="store_true", help=f"only: the batch sizes from 1 to {SWEPT_TO}")
    add("--backward", action="store_true", help="only: the gradients and the training step")
    add("--no-quantizers", action="store_true", help="leave them out")
    add("--serving", action="store_true", help="only: layers in every format beside the kernels of serving engines")
    add("--out", type=pathlib.Path, default=ROOT / "build/peers", metavar="FOLDER", help="default: %(default)s")
    add("--library", type=pathlib.Path, metavar="FILE", help="liboctile.so (default: that of the preset cuda)")
    add("--built", type=pathlib.Path, default=ROOT / "build/peers/gpu", metavar="FOLDER", help="what build.py built")
    add("--tuned", type=pathlib.Path, metavar="JSON", help="of an earlier run: takes the peers' settings from there")
    add("--commit", metavar="TEXT", help="to be named in the output (default: what git says)")
    add("--render", type=pathlib.Path, metavar="JSON", help="only: the table and the chart of an earlier run")
    of = parser.add_argument_group("with --serving")
    add = of.add_argument
    add("--layers", metavar="KxN,...", help=f"default: {SERVING['layers']}")
    add("--rows", metavar="M,...", help=f"default: {SERVING['rows']}")
    add("--formats", metavar="FORMAT,...", help=f"default: {SERVING['formats']}")
    add("--dtype", choices=("f16", "bf16"), help="of X and the result (default: f16)")
    groups = "of the weights; 0: a scale per channel (default: 128 for 4 bits, 0 for w8a16)"
    add("--group", type=int, choices=(32, 64, 128, 0), help=groups)
    add("--zero-points", action="store_true", help="of w4a16; a kernel that takes none is skipped")
    add("--kernels", metavar="ROW,...", help="rows of the kernel table, beside what a plan chooses")
    binary = "vllm/_C_stable_libtorch.abi3.so of vLLM's wheel (default: that of an installed vllm)"
    add("--vllm", type=pathlib.Path, metavar="FILE", help=binary)
    arguments = parser.parse_args()
    if arguments.peers is None:
        arguments.peers = ",".join(("torch",) if arguments.sweep else SERVING_PEERS if arguments.serving else PEERS)
    arguments.peers = [name for name in arguments.peers.split(",") if name]
    known = dict.fromkeys(PEERS + SERVING_PEERS)
    for name in arguments.peers:
        if name not in known:
            parser.error(f"there is no peer {name}; there are {', '.join(known)}")
    if arguments.rounds is None:
        arguments.rounds = SERVING_ROUNDS if arguments.serving else ROUNDS
    if arguments.quick:
        arguments.rounds = 21
    if arguments.rounds < 1 or arguments.rest < 0:
        parser.error(f"--rounds {arguments.rounds} --rest {arguments.rest:g}: at least one round, and no negative rest")
    try:
        check_serving(arguments)
        choose_shapes(arguments)
        for name in ("shapes", "backward_shapes"):
            setattr(arguments, name, [Shape.parse(text) for text in getattr(arguments, name).split(",") if text])
    except ValueError as error:
        parser.error(str(error))
    if arguments.library is None:
        usual = [ROOT / "build" / preset / "liboctile.so" for preset in ("cuda", "release")]
        arguments.library = next((path for path in usual if path.exists()), usual[0])
    return arguments


def check_serving(arguments):
    """Fills what --serving leaves open, and takes the lists apart. Raises ValueError."""
    for name, usual in SERVING.items():
        given = getattr(arguments, name)
        if given and not arguments.serving:
            raise ValueError(f"--{name.replace('_', '-')} needs --serving")
        setattr(arguments, name, usual if given is None else given)
    if not arguments.serving:
        return
    if arguments.sweep or arguments.backward or arguments.shapes:
        raise ValueError("--serving is a part of its own, without --sweep, --backward and --shapes")
    for name in ("layers", "rows", "formats", "kernels"):
        texts = [text for text in getattr(arguments, name).split(",") if text]
        if not texts and name != "kernels":
            raise ValueError(f"--{name} names none")
        setattr(arguments, name, texts)
    for name in arguments.formats:
        if name not in report.FORMATS:
            raise ValueError(f"--formats: there is no format {name}; there are {', '.join(report.FORMATS)}")
    for text in arguments.rows:
        if not text.isdecimal() or int(text) == 0:
            raise ValueError(f"--rows: {text} is no number of rows")
    arguments.rows = sorted({int(text) for text in arguments.rows})
    arguments.layers = [layer_sizes(text) for text in arguments.layers]
    if arguments.zero_points and "w4a16" not in arguments.formats:
        raise ValueError(f"--zero-points are those of w4a16, which is not in --formats {','.join(arguments.formats)}")
    arguments.group = {name: group_of(name, arguments.group) for name in arguments.formats}
    for (k, n), (name, group) in itertools.product(arguments.layers, arguments.group.items()):
        if group and k % group:
            raise ValueError(f"--layers: of {k}x{n}, K is no multiple of {name}'s groups of {group}")


def group_of(name, asked):
    """w8a8 has a scale per channel; so has w8a16, unless asked."""
    if name == "w8a8":
        return 0
    return asked if asked is not None else 0 if name == "w8a16" else 128


def choose_shapes(arguments):
    """Of the forward, and of the backward. The usual ones for both, unless some are named."""
    named, arguments.backward_shapes = arguments.shapes, ""
    if arguments.backward:
        arguments.shapes, arguments.backward_shapes = "", ",".join(BACKWARD) if named is None else named
    elif named is None and not (arguments.sweep or arguments.serving):
        arguments.shapes, arguments.backward_shapes = ",".join(TARGETS), ",".join(BACKWARD)
    else:
        arguments.shapes = named or ""


def load_peers(arguments):
    """[peer], versions, and why others are missing."""
    from gpu.peer_torch import Torch

    def cublaslt():
        from gpu.peer_cublaslt import CublasLt

        return CublasLt(arguments.built)

    def triton():
        from gpu.peer_triton import Homework

        return Homework()

    def cutlass():
        from gpu.peer_cutlass import Cutlass

        return Cutlass(arguments.built)

    def vllm():
        from gpu.peer_vllm import Vllm

        return Vllm(arguments.vllm)

    def humming():
        from gpu.peer_humming import Humming

        return Humming()

    def read():
        from gpu.peer_read import Read

        return Read()

    def octile():
        from gpu.peer_octile import Octile

        return Octile(arguments.library, arguments.kernels)

    makers = {"torch": Torch, "cublaslt": cublaslt, "triton": triton, "cutlass": cutlass}
    makers |= {"vllm": vllm, "humming": humming, "read": read}
    peers, versions, missing = [], {}, {}
    for name, make in [*((name, makers[name]) for name in makers if name in arguments.peers), ("octile", octile)]:
        try:
            peer = make()
        except Exception as error:  # whatever a peer throws is shown, and the peer skipped
            missing[name] = reason(error)
            continue
        peers.append(peer)
        versions |= peer.versions
    return peers, versions, missing


def reason(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def timed(seconds):
    return {"us": statistics.median(seconds) * 1e6, "times": [round(s * 1e6, 3) for s in seconds]}


class Run:
    def __init__(self, arguments, peers):
        from gpu.clock import Clock, Monitor

        self.arguments, self.peers, self.failed = arguments, peers, []
        self.clock, self.monitor = Clock(arguments.rest), Monitor()
        self.tuned = {}
        earlier = json.loads(arguments.tuned.read_text()) if arguments.tuned else {}
        for s in [*earlier.get("shapes", []), *earlier.get("backward", [])]:
            self.tuned.setdefault(Shape(s["m"], s["k"], s["n"]), {}).update(s["finalists"])

    def forward(self, shape):
        from gpu.problem import Expected, Operands

        operands = Operands(shape)
        contenders = [c for peer in self.peers for c in peer.contenders(operands)]
        return {**self.entry(shape, report.PARTS, contenders, Expected(operands)), "target": TARGETS.get(str(shape))}

    def backward(self, shape):
        from gpu.gradients import Expected, Gradients

        gradients = Gradients(shape)
        contenders = [c for peer in self.peers for c in peer.backward(gradients)]
        return self.entry(shape, report.BACKWARD, contenders, Expected(gradients))

    def serving(self, k, n):
        """The entries of a layer. Its weights, and what the contenders make of them, are the same for all rows."""
        import torch
        from gpu.layer import Expected, Layer, Weight

        a, weights = self.arguments, {}
        dtype = {"f16": torch.float16, "bf16": torch.bfloat16}[a.dtype]
        for name in a.formats:
            kind = int(name[1]), a.group[name], a.zero_points and name == "w4a16"
            if kind not in weights:
                bits, group, zero_points = kind
                weights[kind] = Weight(k, n, bits, group, dtype, zero_points)
            parts = [part for part in report.SERVING if part.split("-")[0] == name]
            for m in a.rows:
                layer = Layer(weights[kind], m, name)
                contenders = [c for peer in self.peers for c in peer.serving(layer)]
                yield self.entry(layer.shape, parts, contenders, Expected(layer))

    def entry(self, shape, parts, contenders, expected):
        """One entry of the document: each contender with its best setting, all of them in turns."""
        import torch

        entry = {"m": shape.m, "k": shape.k, "n": shape.n, "skipped": {}, "finalists": {}, **{part: {} for part in parts}}
        runners = []
        for contender in contenders:
            try:
                settings = self.finalists(contender, shape)
                verdicts = [expected.verdict(contender, call) for call in settings.values()]
            except Exception as error:  # as above
                entry["skipped"][f"{contender.name}, {contender.part}"] = reason(error)
                self.note_wrong(contender.name, f"{shape}, {contender.part}", error)
                continue
            runners += [(contender, *setting, verdict) for setting, verdict in zip(settings.items(), verdicts)]
            entry["finalists"][f"{contender.name}, {contender.part}"] = list(settings)

        started = time.monotonic()
        times = self.clock.rounds([call for _, _, call, _ in runners], self.arguments.rounds)
        entry["clocks"] = self.monitor.since(started)
        for (contender, text, _, verdict), seconds in zip(runners, times):
            row, rows = {**timed(seconds), "setting": text, "check": verdict}, entry[contender.part]
            if contender.name not in rows or row["us"] < rows[contender.name]["us"]:
                rows[contender.name] = row
        del runners, contenders, expected
        torch.cuda.empty_cache()
        return entry

    def finalists(self, contender, shape):
        settings = contender.prepare()
        known = self.tuned.get(shape, {}).get(f"{contender.name}, {contender.part}")
        if known and all(text in settings for text in known):
            return {text: settings[text] for text in known}
        if contender.part not in report.PARTS:  # the two of each differ by little, and all take long
            return self.clock.finalists(settings, 1, rounds=4)
        return self.clock.finalists(settings, FINALISTS)

    def note_wrong(self, name, what, error):
        if name.startswith(report.OURS) and "WRONG" in str(error):
            self.failed.append(f"{what}: {error}")

    def quantizers(self):
        import torch

        rows, columns = QUANTIZED
        x = torch.randn(rows, columns, device="cuda", generator=torch.Generator("cuda").manual_seed(2)).half()
        ready, skipped = [], {}
        for quantizer in [q for peer in self.peers for q in peer.quantizers(x)]:
            try:
                call = quantizer.prepare()
                call()
                torch.cuda.synchronize()
                ready.append((quantizer, call, quantizer.check()))
            except Exception as error:  # as above
                skipped[quantizer.name] = reason(error)
                self.note_wrong(quantizer.name, quantizer.name, error)
        times = self.clock.rounds([call for _, call, _ in ready], self.arguments.rounds)
        out = []
        for (q, _, check), seconds in zip(ready, times):
            size = {"rows": rows, "columns": columns, "elements": rows * columns}
            size["bytes_per_element"] = q.bytes_per_element
            out.append({"name": q.name, **size, "check": check, **timed(seconds)})
        return out, skipped

    def sweep(self, k, n):
        """Microseconds of every contender over the batch sizes; None where one cannot do it."""
        from gpu.problem import Operands

        sizes, curves, chosen = sorted(self.swept_sizes()), {}, {}
        for m in sizes:
            operands = Operands(Shape(m, k, n), seed=m)
            contenders = [c for peer in self.peers for c in peer.contenders(operands) if c.name != "torch bf16"]
            # The floats are in both parts.
            wanted = [c for c in contenders if c.part == "layer" or c.task != "float"]
            calls = {}
            for contender in wanted:
                try:
                    settings = contender.prepare()
                    next(iter(settings.values()))()
                    settings = self.clock.finalists(settings, 1)
                except Exception as error:  # as above
                    progress(f"skipped: {contender.name}, {contender.part}, M = {m}: {reason(error)}")
                    continue
                name = contender.name + (", X in 8 bits" if contender.part == "product" else "")
                chosen.setdefault(name, {})[m], calls[name] = next(iter(settings.items()))
            for name, seconds in zip(calls, self.clock.rounds(list(calls.values()), min(self.arguments.rounds, 21))):
                curves.setdefault(name, {})[m] = statistics.median(seconds) * 1e6

        def aligned(values):
            return {name: [at.get(m) for m in sizes] for name, at in values.items()}

        return {"k": k, "n": n, "m": sizes, "curves": aligned(curves), "settings": aligned(chosen)}

    def swept_sizes(self):
        if not self.arguments.quick:
            return range(1, SWEPT_TO + 1)
        # Where tiles end, and beyond.
        edges = {edge + past for edge in range(16, SWEPT_TO + 1, 16) for past in (0, 1)}
        return {m for m in edges | set(range(1, 17)) if m <= SWEPT_TO}


def progress(text):
    print(text, file=sys.stderr, flush=True)


def facts(arguments, versions, missing):
    from gpu.clock import WARM_UP, gpu_facts
    from report import commit

    serving = {"dtype": arguments.dtype, "group": arguments.group, "zero_points": arguments.zero_points}
    return {
        "date": datetime.date.today().isoformat(),
        "commit": arguments.commit or commit(ROOT),
        "command": os.environ.get("OCTILE_DEV_COMMAND") or shlex.join(["python3", *sys.argv]),
        "gpu": gpu_facts(),
        "rounds": arguments.rounds,
        "rest": arguments.rest,
        "warm_up": WARM_UP,
        "versions": versions,
        "missing": missing,
        **({"serving": serving} if arguments.serving else {}),
    }


def write(document, folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu_peers.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / "gpu_peers.md").write_text(report.markdown(document))
    (folder / "gpu_peers.svg").write_text(chart.draw(document))


def measure(arguments, peers, document):
    import torch

    run = Run(arguments, peers)
    # A stream of its own: the default one waits for all others.
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        work = [("shapes", run.forward, shape) for shape in arguments.shapes]
        for part, take, shape in work + [("backward", run.backward, shape) for shape in arguments.backward_shapes]:
            started = time.monotonic()
            document[part].append(take(shape))
            progress(f"{part}, {shape}: {time.monotonic() - started:.1f} s")
            write(document, arguments.out)
        for k, n in arguments.layers if arguments.serving else ():
            started = time.monotonic()
            document["serving"] += run.serving(k, n)
            progress(f"serving, {k}x{n}: {time.monotonic() - started:.1f} s")
            write(document, arguments.out)
        if not (arguments.sweep or arguments.backward or arguments.serving or arguments.no_quantizers):
            document["quantizers"], skipped = run.quantizers()
            document["facts"]["missing"] |= skipped
        if arguments.sweep:
            document["sweep"] = [run.sweep(k, n) for k, n in SWEPT]
    run.monitor.stop()
    return run.failed


def main():
    arguments = parse_arguments()
    if arguments.render:
        write(json.loads(arguments.render.read_text()), arguments.out)
        return 0
    try:
        import torch
    except ImportError:
        progress("gpu_peers: there is no torch here")
        return 2
    if not torch.cuda.is_available():
        progress("gpu_peers: there is no GPU here that torch can use")
        return 2
    peers, versions, missing = load_peers(arguments)
    document = {"facts": facts(arguments, versions, missing)}
    document |= {part: [] for part in ("shapes", "backward", "quantizers", "sweep", "serving")}
    failed = measure(arguments, peers, document)
    write(document, arguments.out)
    print(report.markdown(document))
    print(f"written: {arguments.out}/gpu_peers.md, .json, .svg")
    for text in failed:
        print(f"WRONG: {text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
