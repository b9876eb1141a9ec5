#!/usr/bin/env python3
"""The checks of FSDP2, tensor and expert parallelism and DDP that other tests run on CPUs, on GPUs over NCCL.

    python tests/torch/many_gpus_check.py                           # two GPUs, or four
    python tests/torch/many_gpus_check.py --device cpu --ranks 2    # CPUs over gloo, to try it out
    python tests/torch/many_gpus_check.py exact_bits expert_bits    # these alone; --list names all

Prints a line for each check, and exits with 1 where one has failed. A check that fails, crashes or hangs ends the
processes; those after it run in new ones. Sums of floats are within a bound, and a line says how many had the same bits.
"""

import argparse
import datetime
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from unittest import mock

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast is not everywhere

SILENT = 120  # seconds without a finished check after which the processes are taken to hang


# ---- What each rank checks ----


def checks():
    """By name: functions of (meshes, rank)."""
    import distributed_test as ddp
    import expert_parallel_test as experts
    import fsdp_test as fsdp
    import parallel_checks as tensor
    import ranks
    import torch

    def resized(module, check, *arguments, **sizes):
        """A check at sizes that are typical for the kernels."""

        def run(meshes, rank):
            with mock.patch.multiple(module, **sizes):
                check(meshes, rank, *arguments)

        return run

    bf16 = torch.bfloat16
    large_cases = [(backward, bf16, 2048) for backward in ("int8-whole", "int8", "16bit")]
    large_experts = {"K": 1024, "I": 512, "TOKENS": {1: (512,), 2: (300, 212), 4: (200, 0, 100, 212)}}
    return {
        "fsdp_bits": fsdp.bits,
        "fsdp_bits_large": resized(fsdp, fsdp.bits, bf16, ["int8", "16bit"], WIDTH=1024, HIDDEN=2048, OUT=1024),
        "fsdp_training": fsdp.training,
        "fsdp_training_large": resized(fsdp, fsdp.training, WIDTH=1024, HIDDEN=2048, OUT=1024),
        "fsdp_mixed_precision": fsdp.mixed_precision,
        "fsdp_wire": fsdp.wire,
        "fsdp_writes": fsdp.writes,
        "fsdp_checkpoints": fsdp.checkpoints,
        "fsdp_example": fsdp.example,
        "exact_bits": tensor.exact_bits,
        "exact_bits_large": resized(tensor, tensor.exact_bits, large_cases, TOKENS=256, WIDTH=1024),
        "inexact_sums": tensor.inexact_sums,
        "layouts": tensor.layouts,
        "written_by_one_rank": tensor.written_by_one_rank,
        "frozen_layers": tensor.frozen_layers,
        "frozen_layers_large": lambda meshes, rank: tensor.frozen_layers(meshes, rank, bf16, 512, (1024, 2048)),
        "two_dimensions": tensor.two_dimensions,
        "values_that_are_not_finite": tensor.values_that_are_not_finite,
        "unlike_ranks": tensor.unlike_ranks,
        "example_parallel": tensor.example_parallel,
        "expert_bits": experts.bits,
        "expert_bits_large": resized(experts, experts.bits, (bf16,), **large_experts),
        "expert_training": experts.training,
        "expert_training_large": resized(experts, experts.training, bf16, **large_experts),
        "expert_two_dimensions": experts.two_dimensions,
        "expert_wire": experts.wire,
        "expert_checkpoints": experts.checkpoints,
        "ddp": lambda meshes, rank: ddp.ddp(meshes[2], "int8"),
        "ddp_frozen": lambda meshes, rank: ddp.frozen_ddp(meshes[2], "int8"),
        "fsdp_float": lambda meshes, rank: ddp.fsdp(meshes[2], "int8"),
        "compiled": lambda meshes, rank: tensor.compiled(meshes[2], "inductor"),
    }


def begun_file(finished):
    """The file with the name of the check that these processes began last."""
    return pathlib.Path(f"{finished}.begun")


def work(a):
    """One rank: runs the checks that a.finished does not name, in order."""
    import ranks
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    ranks.device = a.device
    if a.device == "cuda":
        torch.cuda.set_device(a.rank)
    backend = "cpu:gloo,cuda:nccl" if a.device == "cuda" else "gloo"
    store = f"tcp://127.0.0.1:{a.port}"
    words = {"rank": a.rank, "world_size": a.ranks, "timeout": datetime.timedelta(seconds=60)}
    dist.init_process_group(backend, init_method=store, **words)
    meshes, finished = ranks.meshes(), pathlib.Path(a.finished).read_text().split()
    for name, check in checks().items():
        if name in finished or (a.checks and name not in a.checks):
            continue
        if a.rank == 0:
            begun_file(a.finished).write_text(name)
        begun = time.monotonic()
        ranks.sums.update({True: 0, False: 0})
        try:
            check(meshes, a.rank)
            together = torch.ones(1, device=a.device)
            dist.all_reduce(together)
            assert together.item() == a.ranks
        except BaseException:
            print(f"---- {name}, rank {a.rank}\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            os._exit(1)
        if a.rank == 0:
            same, all_sums = ranks.sums[True], sum(ranks.sums.values())
            told = f", {same} of {all_sums} sums of floats with the same bits" if all_sums else ""
            print(f"ok      {name}, {time.monotonic() - begun:.1f} s{told}", flush=True)
            with open(a.finished, "a") as file:
                file.write(f"{name}\n")
    os._exit(0)  # as in distributed_test.py


# ---- The process that starts them ----


def run_ranks(a, names, finished):
    """Runs all ranks until they have ended or one has failed. Returns how it failed, or None."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    words = [f"--device={a.device}", f"--ranks={a.ranks}", f"--port={port}", f"--finished={finished}", *names]
    processes = []
    try:
        for rank in range(a.ranks):
            processes.append(subprocess.Popen([sys.executable, __file__, f"--rank={rank}", *words]))
        seen, since = None, time.monotonic()
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                time.sleep(3)  # for the others' output
                break
            if seen != (seen := finished.stat().st_size):
                since = time.monotonic()
            if time.monotonic() - since > SILENT:
                return f"no end in {SILENT} s"
            time.sleep(0.05)
        failed = [f"rank {rank} ended with {p.poll()}" for rank, p in enumerate(processes) if p.poll()]
        return ", ".join(failed) or None
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                print(f"process {process.pid} does not end", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checks", nargs="*")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, choices=[2, 4])
    parser.add_argument("--list", action="store_true")
    for name, kind in (("rank", int), ("port", int), ("finished", str)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.rank is not None:
        return work(a)
    all_names = list(checks())
    if a.list:
        return print("\n".join(all_names))
    if unknown := set(a.checks) - set(all_names):
        parser.error(f"no check is called {', '.join(unknown)}")
    if a.ranks is None:
        import torch

        a.ranks = 4 if a.device == "cuda" and torch.cuda.device_count() >= 4 else 2
    names = [name for name in all_names if not a.checks or name in a.checks]
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        finished = pathlib.Path(folder) / "finished"
        finished.touch()
        while set(names) - set(finished.read_text().split()):
            begun_file(finished).write_text("")
            how = run_ranks(a, names, finished)
            if how is None and set(names) <= set(finished.read_text().split()):
                break
            name = begun_file(finished).read_text()
            print(f"FAILED  {name or 'the start of the processes'}: {how or 'not finished'}", flush=True)
            failed.append(name)
            if not name:
                break
            with finished.open("a") as file:
                file.write(f"{name}\n")
        passed = set(names) & set(finished.read_text().split()) - set(failed)
    print(f"{a.ranks} ranks, {a.device}: {len(passed)} of {len(names)} checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
