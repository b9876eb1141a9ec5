#!/usr/bin/env python3
"""Builds the peers that are C++: CUTLASS, one library a tile, and cuBLASLt. Several at a time; what is there is kept.

usage: build.py --out FOLDER [--cutlass FOLDER] [--cublas FOLDER] [--jobs N] [--only TEXT]
Exit status: 0 also where a peer cannot be built, which is said; 2 for a wrong command line.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile of CUTLASS's: its size, how many blocks form a cluster, and its schedule.

    swapped: its M lies along the layer's N, so that a batch of 16 fills a tile.
    """

    m: int
    n: int
    k: int
    cluster_m: int
    cluster_n: int
    schedule: str
    swapped: bool = False

    @property
    def name(self):
        tile = f"{self.m}x{self.n}x{self.k}_{self.schedule}_{self.cluster_m}x{self.cluster_n}"
        return tile + ("_swapped" if self.swapped else "")

    def definitions(self):
        return [
            f"-DTILE_M={self.m}",
            f"-DTILE_N={self.n}",
            f"-DTILE_K={self.k}",
            f"-DCLUSTER_M={self.cluster_m}",
            f"-DCLUSTER_N={self.cluster_n}",
            f"-DCOOPERATIVE={int(self.schedule == 'cooperative')}",
            f"-DSWAPPED={int(self.swapped)}",
        ]


TILES = [
    Tile(128, 128, 128, 2, 1, "pingpong"),
    Tile(128, 128, 128, 1, 2, "pingpong"),
    Tile(128, 256, 128, 2, 1, "cooperative"),
    Tile(128, 256, 128, 1, 1, "cooperative"),
    Tile(256, 128, 128, 2, 1, "cooperative"),
    Tile(64, 128, 128, 2, 1, "pingpong"),
    Tile(64, 256, 128, 1, 1, "pingpong"),
    # For small batches, where the tiles above multiply rows that are not there.
    Tile(64, 128, 128, 1, 1, "pingpong"),
    Tile(64, 16, 256, 1, 1, "pingpong", swapped=True),
    Tile(128, 64, 128, 1, 1, "pingpong", swapped=True),
]


@dataclasses.dataclass(frozen=True)
class Job:
    target: pathlib.Path
    source: pathlib.Path
    command: list

    @property
    def done(self):
        return self.target.exists() and self.target.stat().st_mtime > self.source.stat().st_mtime

    def run(self):
        """None, or why it failed. A library appears under its name only when it is whole."""
        unfinished = self.target.with_suffix(".unfinished")
        ran = subprocess.run([*self.command, self.source, "-o", unfinished], capture_output=True, text=True)
        if ran.returncode == 0:
            unfinished.rename(self.target)
            return None
        unfinished.unlink(missing_ok=True)
        log = self.target.with_suffix(".log")
        log.write_text(ran.stdout + ran.stderr)
        lines = [line for line in (ran.stderr + ran.stdout).splitlines() if "error" in line]
        return f"{(lines or ['nvcc failed'])[0][:160]} (all of it: {log})"


def parse_arguments():
    parser = argparse.ArgumentParser(description="Builds the peers that are C++.")
    add = parser.add_argument
    add("--out", type=pathlib.Path, required=True, metavar="FOLDER", help="where the libraries go")
    add("--cutlass", type=pathlib.Path, metavar="FOLDER", help="with include/ and tools/ (default: the PyPI package)")
    add("--cublas", type=pathlib.Path, metavar="FOLDER", help="with include/ and lib/ (default: nvcc's, else PyPI's)")
    add("--jobs", type=int, default=os.cpu_count(), help="compilers at a time (default: one a CPU)")
    add("--only", default="", metavar="TEXT", help="libraries whose name has it")
    return parser.parse_args()


def nvcc():
    return os.environ.get("CUDACXX") or shutil.which("nvcc")


def packages():
    return [pathlib.Path(folder) for folder in sys.path if folder.endswith("-packages")]


def first(folders, file):
    """The first of the folders that has the file, or None."""
    return next((folder for folder in folders if folder and (folder / file).exists()), None)


def cutlass_jobs(arguments, compiler):
    folders = [arguments.cutlass, *(folder / "cutlass_library/source" for folder in packages())]
    source = first(folders, "include/cutlass/cutlass.h")
    if not source:
        print("skipped: CUTLASS: its headers are not here (pip install --no-deps nvidia-cutlass)")
        return []
    flags = [
        "-std=c++17",
        "-O3",
        "-DNDEBUG",
        "-arch=sm_90a",
        "--expt-relaxed-constexpr",
        "-shared",
        "-Xcompiler",
        "-fPIC",
        "-w",
    ]
    command = [compiler, *flags, "-I", source / "include", "-I", source / "tools/util/include"]
    code = HERE / "cutlass_peer.cu"
    return [Job(arguments.out / f"cutlass_{t.name}.so", code, [*command, *t.definitions()]) for t in TILES]


def cublaslt_jobs(arguments, compiler):
    toolkit = pathlib.Path(compiler).resolve().parent.parent
    folders = [arguments.cublas, toolkit, toolkit / "targets/x86_64-linux", pathlib.Path("/usr/local/cuda")]
    folders += [folder / "nvidia/cu13" for folder in packages()] + [folder / "nvidia/cublas" for folder in packages()]
    source = first(folders, "include/cublasLt.h")
    if not source:
        print("skipped: cuBLASLt: there is no cublasLt.h here")
        return []
    libraries = [p for name in ("lib64", "lib") for p in sorted((source / name).glob("libcublasLt.so*"))]
    if not libraries:
        print(f"skipped: cuBLASLt: there is no libcublasLt.so beside {source}/include")
        return []
    # The library is known by its name alone, so that the copy that torch has loaded serves.
    flags = ["-std=c++20", "-O2", "-shared", "-Xcompiler", "-fPIC,-Wall,-Wextra", "-Xlinker", libraries[0]]
    command = [compiler, "-I", source / "include", *flags]
    return [Job(arguments.out / "cublaslt.so", HERE / "cublaslt_peer.cpp", command)]


def main():
    arguments = parse_arguments()
    compiler = nvcc()
    if not compiler:
        print("skipped: CUTLASS, cuBLASLt: there is no nvcc here")
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    jobs = [*cublaslt_jobs(arguments, compiler), *cutlass_jobs(arguments, compiler)]
    jobs = [j for j in jobs if arguments.only in j.target.name and not j.done]
    with concurrent.futures.ThreadPoolExecutor(max(1, arguments.jobs)) as pool:
        for job, failure in zip(jobs, pool.map(Job.run, jobs)):
            print(f"skipped: {job.target.stem}: {failure}" if failure else f"built {job.target.stem}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
