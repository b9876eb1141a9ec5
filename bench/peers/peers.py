#!/usr/bin/env python3
"""Octile's CPU linear layers beside other libraries, in turns, in one run. See README.md.

Exit status: 0, or 1 if Octile's own sums are wrong or nothing could be timed, or 2 for a wrong command line.
"""

import argparse
import json
import os
import pathlib
import sys

import report
from ceilings import ceilings, disturbed, higher
from problems import Shape, check_problems, folder_of_problem
from turns import Peers, worker_settings

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "peers"
ISAS = ("baseline", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx")
PEERS = ("torch", "onnxruntime", "onednn-debian", "onednn-pypi", "openblas", "ggml", "litert")
SHAPES = """1x4096x4096 16x4096x4096 128x1024x4096 512x768x3072 512x4096x4096 1024x1024x1024 1x16384x8192
            w4:1x4096x4096 w4:512x4096x4096 w4:1x16384x8192""".split()

SLOWEST = 0.5  # seconds a call, foreseen from its speed in the check


def parse_arguments():
    parser = argparse.ArgumentParser(
        description="Octile's CPU linear layers beside other libraries, in turns, in one run.",
        epilog="bench/peers/README.md says what is measured and how.",
    )
    cpus = len(os.sched_getaffinity(0))
    add = parser.add_argument
    add("--threads", type=int, default=cpus, help="of each contender (default: all, %(default)s)")
    add("--isa", choices=ISAS, help="the widest instruction set that any of them may use")
    add("--shape", action="append", type=Shape.parse, metavar="[w4:]MxKxN", help="instead of the usual; may be repeated")
    add("--peers", default=",".join(PEERS), metavar="NAME,...", help="default: %(default)s")
    add("--only", action="append", metavar="TEXT", help="contenders whose name has it; Octile's always; may be repeated")
    add("--rounds", type=int, default=9, help="turns of each contender (default %(default)s)")
    add("--seconds", type=float, default=0.005, help="at least this long a turn (default %(default)s)")
    add("--cold", action="store_true", help="walk over copies of the weights that together exceed the last cache")
    add("--check-exact", action="store_true", help="only check whether full-range sums are right")
    add("--json", metavar="FILE", help="write everything measured there as well")
    add("--commit", metavar="TEXT", help="to be named in the output (default: what git says)")
    add("--library", default=ROOT / "build/release/liboctile.so", metavar="FILE", help="default: %(default)s")
    add("--octile", metavar="FILE", help="the command, for the machine's ceilings (default: beside the library)")
    add("--onednn-debian", default=BUILD / "onednn_debian.so", metavar="FILE", help="onednn_peer.cpp, built")
    add("--onednn-pypi", default=BUILD / "onednn_pypi.so", metavar="FILE", help="the same, with the other oneDNN")
    add("--openblas", default="libopenblas.so.0", metavar="FILE", help="default: %(default)s")
    add("--masked", default=BUILD / "masked", metavar="FOLDER", help="ONNX Runtime whose view of the CPU can be limited")
    arguments = parser.parse_args()
    arguments.peers = [name for name in arguments.peers.split(",") if name]
    for name in arguments.peers:
        if name not in PEERS:
            parser.error(f"there is no peer {name}; there are {', '.join(PEERS)}")
    if not 1 <= arguments.threads <= cpus:
        parser.error(f"--threads is 1 to {cpus} here")
    arguments.shape = arguments.shape or [Shape.parse(text) for text in SHAPES]
    arguments.library = pathlib.Path(arguments.library).resolve()
    if not arguments.library.exists():
        parser.error(f"{arguments.library} is not there; ./dev peers builds it")
    return arguments


def check_exact(peers):
    """Of each contender in 8 bits whether its sums are exact: "yes" or "no", or "-" and why it does not run.

    Those in 4 bits have float sums and are run for their speed alone, by which hopeless ones are left out.
    """
    verdicts = {}
    for contender in peers.contenders:
        answers = [peers.ask(contender, "check", problem=folder) for folder in check_problems(contender)]
        failed = [a["failed"] for a in answers if "failed" in a]
        if failed:
            verdict = {"exact": "-", "failed": failed[0]}
        else:
            wrong, of = (sum(a[key] for a in answers) for key in ("wrong", "of"))
            worst = max(a["worst"] for a in answers)
            verdict = {"exact": "no" if wrong else "yes", "worst": worst, "wrong": wrong, "of": of}
            verdict["operations_per_second"] = max(a["operations_per_second"] for a in answers)
        verdicts[contender["name"]] = {"kind": contender["kind"], **verdict}
    return verdicts


def why_not(shape, verdict):
    """Why a contender is not timed. "": it is."""
    if "failed" in verdict:
        return verdict["failed"]
    seconds = shape.operations() / verdict["operations_per_second"]
    return "" if seconds < SLOWEST else f"takes about {seconds:.1f} s"


def measure(peers, shape, verdicts, arguments, last_cache):
    """Seconds a call, by contender and round."""
    copies = 1
    if arguments.cold:
        copies = 2 + int(2 * last_cache / (shape.k * shape.n * (0.5 if shape.kind == "w4" else 1)))
    with folder_of_problem(shape) as folder:
        ready, failures, errors, notes = [], {}, {}, {}
        for contender in peers.contenders_for(shape):
            name = contender["name"]
            if reason := why_not(shape, verdicts[name]):
                failures[name] = reason
                continue
            answer = peers.ask(contender, "prepare", problem=folder, copies=copies)
            if "failed" in answer:
                failures[name] = answer["failed"]
                continue
            ready.append(contender)
            errors[name], notes[name] = answer["error"], answer["note"]
        times = {c["name"]: [] for c in ready}
        for turn in range(arguments.rounds):
            first = turn % len(ready) if ready else 0  # so that not always the same one follows the same other
            for contender in ready[first:] + ready[:first]:
                times[contender["name"]].append(
                    peers.ask(contender, "time", seconds=arguments.seconds).get("seconds", float("nan"))
                )
        peers.free()
    return {"times": times, "failures": failures, "errors": errors, "notes": notes}


def main():
    arguments = parse_arguments()
    progress = report.Progress()
    progress.say("starting the peers")
    peers = Peers(arguments, worker_settings(arguments))
    try:
        facts = report.facts(arguments, peers, ROOT)
        print(report.heading(facts, peers), flush=True)
        progress.say("checking sums")
        verdicts = check_exact(peers)
        print(report.check_table(verdicts), flush=True)
        wrong = [name for name, v in verdicts.items() if name.startswith("octile") and v["exact"] == "no"]
        if wrong:
            print("WRONG: " + ", ".join(wrong))
        document = {**facts, "checks": verdicts}
        if not arguments.check_exact:
            results = []
            seen = [ceilings(arguments)]
            for shape in arguments.shape:
                progress.say(f"timing {shape}")
                measured = measure(peers, shape, verdicts, arguments, facts["last_cache_bytes"])
                seen.append(ceilings(arguments))
                measured["ceilings"] = higher(*seen[-2:])
                results.append(report.result(shape, measured, peers, verdicts, document))
                print(report.shape_table(results[-1]), flush=True)
            document["shapes"] = results
            document["geometric_means"] = report.geometric_means(results)
            document["disturbed"] = disturbed(*seen)
            print(report.summary(results, document), flush=True)
        if arguments.json:
            pathlib.Path(arguments.json).write_text(json.dumps(document, indent=2) + "\n")
        timed = arguments.check_exact or any(r["ours"] for r in document["shapes"])
        return 1 if wrong or not timed else 0
    finally:
        progress.clear()
        peers.end()


if __name__ == "__main__":
    sys.exit(main())
