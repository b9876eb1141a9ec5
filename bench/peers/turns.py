"""The peers' processes, of which one runs at a time."""

import json
import os
import pathlib
import signal
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent

# What keeps each peer to an instruction set. Missing: there is no such name, and it is left alone.
LIMITS = {
    "ONEDNN_MAX_CPU_ISA": ("SSE41", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16", None),
    "DNNL_MAX_CPU_ISA": ("SSE41", "AVX2", "AVX2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16", None),
    "ATEN_CPU_CAPABILITY": ("default", "avx2", "avx2", "avx512", "avx512", "avx512", None),
    "MKL_ENABLE_INSTRUCTIONS": ("SSE4_2", "AVX2", "AVX2", "AVX512", "AVX512", "AVX512", None),
    "OPENBLAS_CORETYPE": ("Nehalem", "Haswell", "Haswell", "SkylakeX", "SkylakeX", "Cooperlake", None),
    "OCTILE_ISA": ("baseline", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx"),
}
ISAS = LIMITS["OCTILE_ISA"]


def limits(isa):
    chosen = {name: values[ISAS.index(isa)] for name, values in LIMITS.items()} if isa else {}
    return {name: value for name, value in chosen.items() if value}


def worker_settings(arguments):
    return {
        "threads": arguments.threads,
        # TBB, which one oneDNN uses, has as many threads as there are processors: all get only as many as asked for.
        "cpus": sorted(os.sched_getaffinity(0))[: arguments.threads],
        "library": str(arguments.library),
        "onednn-debian": str(arguments.onednn_debian),
        "onednn-pypi": str(arguments.onednn_pypi),
        "openblas": str(arguments.openblas),
    }


def can_mask(peer, arguments):
    folder = pathlib.Path(arguments.masked)
    return (folder / peer).is_dir() and (folder / "cpuid_mask.so").exists()


def environment(peer, arguments):
    count = str(arguments.threads)
    values = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    values |= {name: count for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    values |= limits(arguments.isa)
    if peer == "onednn-pypi":  # it finds the CPU through OpenCL
        values |= {"OCL_ICD_FILENAMES": f"{sys.prefix}/lib/libintelocl.so", "DPCPP_CPU_NUM_CUS": count}
    if arguments.isa and can_mask(peer, arguments):
        preload = f"{arguments.masked}/cpuid_mask.so"
        values |= {"LD_PRELOAD": preload, "PEERS_CPUID": arguments.isa, "PYTHONPATH": str(arguments.masked)}
    return values


class Peer:
    def __init__(self, name, settings, environment, script="worker.py"):
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, HERE / script, name, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("PEERS_VERBOSE") else subprocess.DEVNULL,
            env=environment,
            text=True,
        )

    def answer(self):
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        return {"failed": f"{self.name} ended with status {self.process.wait()}"}

    def stop(self):
        """Nothing of it runs afterwards, not even a thread that waits for work in a loop."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def ask(self, order):
        if self.process.poll() is not None:
            return {"failed": f"{self.name} has ended"}
        self.process.send_signal(signal.SIGCONT)
        try:
            print(json.dumps(order), file=self.process.stdin, flush=True)
            return self.answer()
        except BrokenPipeError:
            return {"failed": f"{self.name} has ended"}
        finally:
            self.stop()

    def end(self):
        self.process.kill()
        self.process.wait()


class Peers:
    def __init__(self, arguments, settings):
        self.arguments = arguments
        self.contenders, self.versions, self.missing, self.processes = [], {}, {}, {}
        for name in ["octile", *arguments.peers]:
            peer = self.processes[name] = Peer(name, settings, environment(name, arguments))
            answer = peer.answer()
            peer.stop()
            if "failed" in answer:
                if name == "octile":
                    self.end()
                    raise SystemExit(f"octile: {answer['failed']}")
                self.missing[name] = answer["failed"]
                continue
            self.versions |= answer["versions"]
            self.contenders += [{**c, "peer": name} for c in answer["contenders"] if self.wanted(name, c)]

    @property
    def not_limited(self):
        """Those that an --isa does not reach: they have no switch, and there is no copy of them that can be masked."""
        parts = {"onnxruntime": "ONNX Runtime", "torch": "FBGEMM inside torch", "ggml": "ggml", "litert": "XNNPACK"}
        return [text for name, text in parts.items() if name in self.processes and not can_mask(name, self.arguments)]

    def wanted(self, peer, contender):
        only = self.arguments.only
        return peer == "octile" or not only or any(text in contender["name"] for text in only)

    def contenders_for(self, shape):
        kinds = ("w4",) if shape.kind == "w4" else ("w8", "float")
        fitting = [c for c in self.contenders if c["kind"] in kinds and shape.k * shape.n <= c["largest_weight"]]
        return [c for c in fitting if c["timed"]]

    def ask(self, contender, what, **more):
        return self.processes[contender["peer"]].ask({"do": what, "name": contender["name"], **more})

    def free(self):
        for name, peer in self.processes.items():
            if name not in self.missing:
                peer.ask({"do": "free"})

    def end(self):
        for peer in self.processes.values():
            peer.end()
