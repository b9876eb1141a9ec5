#!/usr/bin/env python3
"""Tokens a second of a small Llama on a CPU: Octile in Transformers beside PyTorch, torchao and llama.cpp, in turns, in one
run. See README.md.

Exit status: 0, or 1 if nothing could be timed, or 2 for a wrong command line.
"""

import argparse
import dataclasses
import datetime
import json
import os
import pathlib
import statistics
import sys

import numpy as np
import report
from decoder_model import Decoder
from turns import Peer, environment

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "peers" / "decoder"
REFERENCE = "torch f32"
OURS, COMPILED, DECODING = ("octile w8a8", "octile w4a8", "octile w4a16", "octile w4a16 bf16"), " compiled", " decoding"
PEERS = ("torch bf16", "torchao int8", "torchao int4")
CONTENDERS = (*OURS, *(name + DECODING for name in OURS), *PEERS, *(name + COMPILED for name in PEERS))
CONTENDERS += ("llama.cpp Q8_0", "llama.cpp Q4_0")
# Of each of ours the one to be compared with.
AGAINST = {name: "llama.cpp Q8_0" if name == "octile w8a8" else "llama.cpp Q4_0" for name in OURS}


def parse_arguments(argv=None):
    parser = argparse.ArgumentParser(
        description="Tokens a second of a small Llama on a CPU, beside other libraries, in turns, in one run.",
        epilog="bench/peers/README.md says what is measured and how.",
    )
    cpus, usual = len(os.sched_getaffinity(0)), Decoder()
    add = parser.add_argument
    for field in dataclasses.fields(Decoder):
        add(f"--{field.name.replace('_', '-')}", type=int, default=getattr(usual, field.name), metavar="N",
            help="default: %(default)s")  # fmt: skip
    add("--prompt", type=int, default=128, metavar="N", help="tokens of the prompt (default: %(default)s)")
    add("--tokens", type=int, default=32, metavar="N", help="tokens to generate after the first (default: %(default)s)")
    add("--rounds", type=int, default=5, help="turns of each contender (default: %(default)s)")
    add("--threads", type=int, default=cpus, help="of each contender (default: all, %(default)s)")
    add("--contenders", default=",".join(CONTENDERS), metavar="NAME,...", help="default: %(default)s")
    add("--wait", action="store_true", help="wait for Enter before timing, to begin on a quiet machine")
    add("--json", metavar="FILE", help="write everything measured there as well")
    add("--commit", metavar="TEXT", help="to be named in the output (default: what git says)")
    add("--library", default=ROOT / "build/release/liboctile.so", metavar="FILE", help="default: %(default)s")
    arguments = parser.parse_args(argv)
    sizes = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Decoder)}
    if min(*sizes.values(), arguments.prompt, arguments.tokens, arguments.rounds) < 1:
        parser.error("sizes and counts are at least 1")
    arguments.decoder = Decoder(**sizes)
    if sizes["hidden"] % (2 * sizes["heads"]) or sizes["heads"] % sizes["key_value_heads"]:
        parser.error("--hidden is a multiple of twice --heads, and --heads of --key-value-heads")
    if sizes["hidden"] % 128 or sizes["intermediate"] % 128:
        parser.error("--hidden and --intermediate are multiples of 128, the group of 4-bit weights")
    arguments.contenders = [name for name in arguments.contenders.split(",") if name]
    if unknown := [name for name in arguments.contenders if name not in (*CONTENDERS, REFERENCE)]:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(CONTENDERS)} and {REFERENCE}")
    if not 1 <= arguments.threads <= cpus:
        parser.error(f"--threads is 1 to {cpus} here")
    arguments.library = pathlib.Path(arguments.library).resolve()
    if not arguments.library.exists():
        parser.error(f"{arguments.library} is not there; ./dev decoder builds it")
    arguments.isa = None
    return arguments


def start(name, arguments):
    """The process of a contender, stopped, and what it says of itself."""
    settings = {
        "threads": arguments.threads,
        "cpus": sorted(os.sched_getaffinity(0))[: arguments.threads],
        "decoder": dataclasses.asdict(arguments.decoder),
        "prompt": arguments.prompt,
        "tokens": arguments.tokens,
        "folder": str(FOLDER),
    }
    values = environment(name, arguments) | {"OCTILE_LIBRARY": str(arguments.library)}
    values |= {"PYTHONPATH": str(ROOT / "python"), "TORCHINDUCTOR_CACHE_DIR": str(FOLDER / "inductor")}
    peer = Peer(name, settings, values, "decoder_worker.py")
    answer = peer.answer()
    peer.stop()
    return peer, answer


def reference(arguments):
    """The logits after the prompt, in f32, of an earlier run where there was one."""
    path = FOLDER / f"logits-{arguments.decoder}-{arguments.prompt}.npy"
    if not path.exists():
        peer, answer = start(REFERENCE, arguments)
        peer.end()
        if "failed" in answer:
            raise SystemExit(f"{REFERENCE}: {answer['failed']}")
        FOLDER.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.npy")
        np.save(unfinished, answer["logits"])
        unfinished.rename(path)
    return np.load(path)


def prepare(arguments, progress):
    """The processes by name, {name: error of the logits}, versions, and why the others are missing."""
    exact = reference(arguments)
    peers, errors, versions, missing = {}, {}, {}, {}
    for name in arguments.contenders:
        progress.say(f"preparing {name}")
        peer, answer = start(name, arguments)
        if "failed" in answer:
            peer.end()
            missing[name] = answer["failed"]
            continue
        peers[name] = peer
        versions |= answer["versions"]
        errors[name] = float(np.linalg.norm(answer["logits"] - exact) / np.linalg.norm(exact))
    return peers, errors, versions, missing


def measure(peers, rounds, progress):
    """{name: [{"prefill": seconds, "decode": seconds} of each round]}"""
    times, names = {name: [] for name in peers}, list(peers)
    for turn in range(rounds):
        first = turn % max(1, len(names))
        for name in names[first:] + names[:first]:
            progress.say(f"round {turn + 1}: {name}")
            answer = peers[name].ask({"do": "time"})
            if "failed" in answer:
                raise SystemExit(f"{name}: {answer['failed']}")
            times[name].append(answer)
    return times


def rates(times, prompt, tokens):
    """Tokens a second of each round, by part and contender."""
    counts = {"prefill": prompt, "decode": tokens}
    return {part: {name: [n / t[part] for t in turns] for name, turns in times.items()} for part, n in counts.items()}


def spread(values, digits):
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def tables(found, errors):
    """found: what rates() gives."""
    rows = [
        [name, spread(found["prefill"][name], 0), spread(found["decode"][name], 1), f"{errors[name]:.1e}"]
        for name in sorted(errors, key=lambda name: -statistics.median(found["decode"][name]))
    ]
    text = "Tokens a second: the median of the rounds, and the lowest and highest\n\n"
    text += report.table(["contender", "prefill", "decode", "error of logits"], rows)
    pairs = []
    for name in errors:
        theirs = AGAINST.get(name.removesuffix(DECODING))
        if theirs in errors:
            ratios = [[a / b for a, b in zip(of[name], of[theirs])] for of in (found["prefill"], found["decode"])]
            pairs.append([f"{name} to {theirs}", *(spread(r, 2) for r in ratios)])
    if pairs:
        text += "\n\n" + report.table(["speed, of each round", "prefill", "decode"], pairs)
    return text + "\n"


def heading(arguments, versions, missing):
    d = arguments.decoder
    threads = f"{arguments.threads} thread{'s' if arguments.threads != 1 else ''}"
    lines = [
        f"{datetime.date.today()}, {report.cpu_name()}, {threads}, commit {arguments.commit or report.commit(ROOT)}",
        f"{d.layers} layers of {d.hidden}, {d.intermediate} in the MLP, {d.heads} heads and {d.key_value_heads} for keys, "
        f"vocabulary {d.vocabulary}: {d.parameters() / 1e9:.2f} billion parameters; {arguments.prompt} tokens in, "
        f"{arguments.tokens} out, {arguments.rounds} rounds",
        ", ".join(f"{name} {version}" for name, version in versions.items()),
    ]
    return "\n".join([*lines, *(f"skipped: {name}: {why}" for name, why in missing.items())]) + "\n"


def main():
    arguments = parse_arguments()
    progress = report.Progress()
    peers, errors, versions, missing = prepare(arguments, progress)
    try:
        progress.clear()
        print(heading(arguments, versions, missing), flush=True)
        if arguments.wait:
            print("press Enter to begin", flush=True)
            sys.stdin.readline()
        times = measure(peers, arguments.rounds, progress)
    finally:
        progress.clear()
        for peer in peers.values():
            peer.end()
    print(tables(rates(times, arguments.prompt, arguments.tokens), errors))
    if arguments.json:
        facts = {"decoder": dataclasses.asdict(arguments.decoder), "prompt": arguments.prompt, "tokens": arguments.tokens}
        document = {**facts, "versions": versions, "missing": missing, "errors": errors, "times": times}
        pathlib.Path(arguments.json).write_text(json.dumps(document, indent=2) + "\n")
    return 0 if times else 1


if __name__ == "__main__":
    sys.exit(main())
