#!/usr/bin/env python3
"""Trains a byte-level GPT on text found on this machine, with bf16 nn.Linear and with Octile's layers, and compares.

    python3 examples/train_gpt.py                          # 101 million parameters, four kinds of layers, 1,000 steps
    python3 examples/train_gpt.py --modes bf16 octile-int8 --width 4096 --layers 6 --steps 40
    python3 examples/train_gpt.py --parallel fsdp          # each kind on all GPUs together, by torchrun and FSDP2
    python3 examples/train_gpt.py --parallel 2d --split 2  # FSDP2 over pairs of GPUs that share each layer
    python3 examples/train_gpt.py --tiny                   # a minute on a CPU

Every kind of layers sees the same initial values and the same bytes in the same order, seed by seed. Each trains in a
process of its own; with several GPUs they train side by side. Ctrl-C keeps what was measured so far.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from gpt import data, model, report, training  # noqa: E402

TINY = {"width": 64, "layers": 2, "heads": 4, "length": 64, "batch": 8, "steps": 20, "warm_steps": 5, "told_every": 5}
TINY |= {"validate_every": 0, "validation_windows": 16, "rate": 3e-3}


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    d = training.Settings()
    p.add_argument(
        "--modes", nargs="+", choices=training.MODES, default=list(training.MODES)[:4], help="kinds of layers"
    )
    p.add_argument("--architecture", choices=model.ARCHITECTURES, help="of the blocks (gpt)")
    p.add_argument("--seeds", type=positive, default=1, help="how many")
    p.add_argument("--first-seed", type=int, default=0)
    p.add_argument("--data", nargs="+", default=[], help="files or folders of text instead of Python's sources")
    p.add_argument("--data-bytes", type=positive, default=64_000_000, help="at most so many bytes of it")
    p.add_argument("--width", type=positive, help=f"d_model ({d.width})")
    p.add_argument("--layers", type=positive, help=f"blocks ({d.layers})")
    p.add_argument("--heads", type=positive, help="of attention (width / 64, from a width of 2048 on width / 128)")
    p.add_argument("--length", type=positive, help=f"bytes of a sequence ({d.length})")
    p.add_argument("--batch", type=positive, help=f"sequences ({d.batch})")
    p.add_argument("--accumulate", type=positive, help="micro-batches of an optimizer step (1)")
    p.add_argument("--steps", type=positive, help=f"optimizer steps ({d.steps})")
    p.add_argument("--rate", type=float, help=f"highest learning rate ({d.rate})")
    p.add_argument("--warm-steps", type=int, help=f"steps until it is reached ({d.warm_steps})")
    p.add_argument("--no-bias", dest="bias", action="store_false", default=None, help="linear layers without biases")
    p.add_argument("--split-qkv", action="store_true", default=None, help="a layer each for queries, keys and values")
    p.add_argument("--quantize-head", action="store_true", default=None, help="the head too; else it stays in 16 bits")
    p.add_argument("--activation", choices=["per_token", "per_tensor"], help="scales of X (per_token)")
    p.add_argument(
        "--precision", choices=["master", "bf16", "f32"], help="f32 parameters under bf16 autocast (master), ..."
    )
    p.add_argument("--compile", choices=["model", "blocks", "off"], help="what torch.compile is given (model)")
    p.add_argument("--compile-mode", help="torch.compile's mode (default)")
    p.add_argument("--graph", action="store_true", default=None, help="capture a step in a CUDA graph")
    p.add_argument("--deterministic", action="store_true", default=None, help="the same bits each time, slower")
    p.add_argument("--told-every", type=positive, help=f"steps between readings ({d.told_every})")
    p.add_argument("--validate-every", type=int, help=f"steps; 0: at the end alone ({d.validate_every})")
    p.add_argument("--validation-windows", type=positive, help=f"sequences ({d.validation_windows})")
    p.add_argument("--profile", action="store_true", default=None, help="a table of where the time of a step goes")
    p.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--gpus", type=positive, help="use at most so many (all that are visible)")
    p.add_argument(
        "--parallel",
        choices=["none", "fsdp", "tp", "2d"],
        help="every kind on all GPUs, or on --gpus processes: FSDP2, tensor parallelism, or both",
    )
    p.add_argument("--split", type=positive, help="with --parallel 2d: GPUs that share a layer (2)")
    p.add_argument("--exact", action="store_true", default=None, help="with tp and 2d: integers are summed over GPUs")
    p.add_argument("--tiny", action="store_true", help="a model for trying this out")
    p.add_argument("--out", type=pathlib.Path, default=pathlib.Path("out/training"), help="folder of the results")
    return p.parse_args(given)


def settings_of(a: argparse.Namespace) -> training.Settings:
    if a.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("train_gpt: --device cuda, but torch finds no GPU")
    fields = dict(TINY) if a.tiny else {}
    names = {f.name for f in dataclasses.fields(training.Settings)}
    fields |= {
        name: value for name, value in vars(a).items() if name in names and value is not None and name != "seeds"
    }
    if "heads" not in fields:
        width = fields.get("width", training.Settings.width)
        fields["heads"] = max(1, width // (128 if width >= 2048 else 64))
    if a.device == "cpu" and a.compile is None:
        fields["compile"] = "off"
    s = training.Settings(**fields)
    if s.parallel != "none":
        s.ranks = len(visible(a.gpus)) if s.device == "cuda" else a.gpus or (4 if s.parallel == "2d" else 2)
        s.compile = "blocks" if s.compile == "model" else s.compile
        shared = {"fsdp": 1, "tp": s.ranks, "2d": s.split}[s.parallel]
        s.split_qkv = s.split_qkv or shared > 1  # a rank has whole heads
        if s.ranks % shared or s.batch % (s.ranks // shared):
            raise SystemExit(
                f"train_gpt: a batch of {s.batch} does not divide into {s.ranks} processes, {shared} a layer"
            )
        if s.heads % shared or s.length % shared:
            raise SystemExit(f"train_gpt: {s.heads} heads and {s.length} bytes do not divide into {shared} processes")
        if shared > 1 and s.architecture != "gpt":
            raise SystemExit(f"train_gpt: --parallel {s.parallel} is for gpt; in llama gate and up are one layer")
    if s.graph and (s.device == "cpu" or s.compile_mode != "default" or s.profile):
        raise SystemExit("train_gpt: --graph needs a GPU, and takes neither --compile-mode nor --profile")
    if s.width % s.heads:
        raise SystemExit(f"train_gpt: a width of {s.width} does not divide into {s.heads} heads")
    return s


# ---- Workers ----


def worker() -> None:
    """What a worker does: settings and the place of the text from the command line, events to standard output."""
    s = training.Settings(**json.loads(sys.argv[2]))
    folder = pathlib.Path(sys.argv[3])
    texts = [torch.from_numpy(np.fromfile(folder / name, np.uint8)) for name in ("training", "validation")]
    training.work(s, *texts, lambda event: print(json.dumps(event), flush=True))
    if s.parallel != "none":
        os._exit(0)  # the interpreter's end beside gloo's threads has aborted now and then


class Driver:
    """Hands the runs to the GPUs, and keeps what they tell."""

    def __init__(self, document: dict, texts: pathlib.Path, told):
        self.document, self.texts, self.told = document, texts, told
        self.work, self.running, self.lock = queue.SimpleQueue(), set(), threading.Lock()
        self.stopped = threading.Event()

    def take(self, s: training.Settings, event: dict, place: str) -> None:
        name = event.pop("event")
        with self.lock:
            if name == "profile":
                self.document["profiles"].append({"mode": s.mode, **event})
            elif name in ("built", "compiled"):
                self.document["workers"].append({"mode": s.mode, "place": place, name: event})
            else:
                run = self.run_of(s.mode, event["seed"], place)
                if name == "steps":
                    run["step_seconds"].append(event["seconds"] / len(event["losses"]))
                    run["losses"] += event["losses"]
                elif name == "validation":
                    run["validation"].append([event["step"], event["loss"]])
                else:
                    run["peak"], run["done"] = event["peak"], True
            self.told(s, name, event)

    def run_of(self, mode: str, seed: int, place: str) -> dict:
        for run in self.document["runs"]:
            if (run["mode"], run["seed"]) == (mode, seed):
                return run
        run = {"mode": mode, "seed": seed, "place": place, "losses": [], "step_seconds": [], "validation": []}
        self.document["runs"].append(run | {"peak": None, "done": False})
        return self.document["runs"][-1]

    def start(self, s: training.Settings, gpu: str | None) -> None:
        environment = dict(os.environ) | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {})
        command = [__file__, "--worker", json.dumps(dataclasses.asdict(s)), str(self.texts)]
        if s.parallel != "none":
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(s.ranks)]
            command = [*torchrun, *command]
        command = [sys.executable, *command]
        with tempfile.TemporaryFile("w+") as errors:
            # A session of its own: Ctrl-C is for this process, which ends its workers.
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, start_new_session=True
            )
            self.running.add(process)
            for line in process.stdout:
                if line.startswith('{"'):
                    self.take(s, json.loads(line), f"GPU {gpu}" if gpu is not None else "CPU")
            code = process.wait()
            self.running.discard(process)
            if code and not self.stopped.is_set():
                errors.seek(0)
                tail = errors.read()[-6000:].strip()
                with self.lock:
                    self.document["failures"].append({"mode": s.mode, "error": tail or f"ended with {code}"})
                    self.told(s, "failed", {"error": tail})

    def serve(self, gpu: str | None) -> None:
        while not self.stopped.is_set():
            try:
                s = self.work.get_nowait()
            except queue.Empty:
                return
            self.start(s, gpu)

    def run(self, jobs: list[training.Settings], gpus: list[str | None]) -> None:
        for job in jobs:
            self.work.put(job)
        threads = [threading.Thread(target=self.serve, args=(gpu,), daemon=True) for gpu in gpus]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
        except KeyboardInterrupt:
            self.stopped.set()
            self.document["interrupted"] = True
            for process in list(self.running):
                process.terminate()
            for thread in threads:
                thread.join(10)


def visible(limit: int | None) -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    all_of_them = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    return all_of_them[:limit]


def split(s: training.Settings, modes: list[str], seeds: list[int], places: int) -> list[training.Settings]:
    """A worker a mode, which compiles once for all its seeds; a worker a run where there are GPUs for more."""
    if places > len(modes):
        return [dataclasses.replace(s, mode=m, seeds=[i]) for i in seeds for m in modes]
    return [dataclasses.replace(s, mode=m, seeds=seeds) for m in modes]


# ---- Progress ----


class Progress:
    """A bar a worker where there is a terminal and tqdm, else a line now and then."""

    SECONDS = 5.0

    def __init__(self, begun: float):
        self.begun, self.bars, self.last = begun, {}, {}
        self.tqdm = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm

                self.tqdm = tqdm
            except ImportError:
                pass

    def line(self, words: str) -> None:
        if self.tqdm:
            self.tqdm.write(words, file=sys.stderr)
        else:
            print(f"{time.monotonic() - self.begun:7.1f} s  {words}", file=sys.stderr, flush=True)

    def __call__(self, s: training.Settings, name: str, event: dict) -> None:
        of = s.mode + (f", seed {event['seed']}" if "seed" in event else "")
        if name == "compiled":
            self.line(f"{of}: first step after {event['seconds']:.1f} s")
        elif name == "failed":
            self.line(f"{of}: failed: {event['error'][-600:]}")
        elif name == "validation":
            self.line(f"{of}: step {event['step']}, validation loss {event['loss']:.4f}")
        elif name == "steps":
            speed = s.tokens * len(event["losses"]) / event["seconds"]
            if self.tqdm:
                if of not in self.bars:
                    self.bars[of] = self.tqdm(total=s.steps, desc=of, unit="step", file=sys.stderr)
                bar = self.bars[of]
                bar.update(event["until"] - bar.n)
                bar.set_postfix_str(f"loss {event['losses'][-1]:.4f}, {speed:,.0f} tokens/s")
                if event["until"] == s.steps:
                    bar.close()
            elif time.monotonic() - self.last.get(s.mode, 0) > self.SECONDS or event["until"] == s.steps:
                self.last[s.mode] = time.monotonic()
                self.line(
                    f"{of}: step {event['until']} of {s.steps}, loss {event['losses'][-1]:.4f}, {speed:,.0f} tokens/s"
                )


def main() -> int:
    # A time limit keeps what was measured, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    a = arguments()
    s = settings_of(a)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise SystemExit("train_gpt: starts torchrun itself: run python train_gpt.py --parallel ...")
    begun = time.monotonic()
    try:
        corpus = data.gather(a.data, a.data_bytes)
        for part in (corpus.training, corpus.validation):
            data.check_length(len(part), s.length)
    except (OSError, ValueError) as error:
        raise SystemExit(f"train_gpt: {error}") from None
    progress = Progress(begun)
    progress.line(corpus.describe())
    facts = {
        "device": torch.cuda.get_device_name() if s.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "text": corpus.describe(),
        "parameters": model.parameters(s.width, s.layers, s.heads, s.length, architecture=s.architecture),
        "command": " ".join(["train_gpt.py", *sys.argv[1:]]),
    }
    document = {"facts": facts, "settings": dataclasses.asdict(s) | {"tokens": s.tokens}}
    document |= {"workers": [], "runs": [], "profiles": [], "failures": [], "interrupted": False}
    places = visible(a.gpus) if s.device == "cuda" else [None]
    if s.parallel != "none" and s.device == "cuda":
        places = [",".join(places)]
    with tempfile.TemporaryDirectory() as folder:
        texts = pathlib.Path(folder)
        corpus.training.tofile(texts / "training")
        corpus.validation.tofile(texts / "validation")
        seeds = list(range(a.first_seed, a.first_seed + a.seeds))
        Driver(document, texts, progress).run(split(s, a.modes, seeds, len(places)), places)
    report.save(document, a.out)
    print(report.text(document))
    print(f"In {a.out}: training.json, training.md, training.svg", file=sys.stderr)
    return 130 if document["interrupted"] else 1 if document["failures"] else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker()
    else:
        sys.exit(main())
