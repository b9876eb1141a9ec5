#!/usr/bin/env python3
"""Layers with 4-bit weights on a GPU, beside PyTorch's and beside f16, in turns, in one run.

Microseconds, the median, L2 flushed; the line "read" is what a plain read of the weight's bytes takes. Each result of
Octile's is compared with a product in f64.

Exit status: 0, or 1 if a result of Octile's is wrong, or 2 for a wrong command line or no GPU.
"""

import argparse
import ctypes as C
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "bench" / "peers"))
BATCHES = "1,2,4,8,16,32,33,48,64,65,128,256,512,1024,2048,4096"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--library", type=pathlib.Path, default=ROOT / "build/cuda/liboctile.so", metavar="FILE")
    add("--layer", default="4096x14336", metavar="KxN")
    add("--batches", default=BATCHES, metavar="M,...")
    add("--group", type=int, default=128, help="32, 64, 128, or 0 for a whole row (default %(default)s)")
    add("--type", choices=("f16", "bf16"), default="f16", help="of x and y (default %(default)s)")
    add("--zero-points", action="store_true")
    add("--a8", action="store_true", help="W4A8 too: x quantized by the plan, a scale for each row")
    add("--kernels", default="", metavar="ROW,...", help="rows of the kernel table, beside what a plan chooses")
    add("--rounds", type=int, default=25)
    add("--flush", choices=("write", "read"), default="write", help="what L2 is flushed by (default %(default)s)")
    add("--no-peers", action="store_true")
    return parser.parse_args()


class Layer:
    """The weight of a layer, in the forms that the contenders take."""

    def __init__(self, torch, k, n, group, dtype, zero_points):
        self.k, self.n, self.dtype, self.group = k, n, dtype, group
        size = group or k
        self.w = torch.randn(n, k, device="cuda") * 0.02
        groups = self.w.view(n, k // size, size)
        self.scale = (groups.abs().amax(2) / 7).contiguous()
        self.zero = torch.randint(-3, 4, self.scale.shape, dtype=torch.int32, device="cuda") if zero_points else None
        q = torch.round(groups / self.scale[..., None]) + (self.zero[..., None] if zero_points else 0)
        q = q.clamp(-8, 7)
        self.exact = (
            (q - (self.zero[..., None] if zero_points else 0)).double() * self.scale[..., None].double()
        ).view(n, k)
        self.q = q.view(n, k).to(torch.int32)
        nibbles = self.q & 15
        self.bytes = (nibbles[:, ::2] | nibbles[:, 1::2] << 4).to(torch.uint8).contiguous()
        self.half = self.exact.to(dtype)
        self.bias = torch.randn(n, device="cuda", dtype=dtype)


class Octile:
    def __init__(self, path):
        import octile_c

        self.c, self.library = octile_c, octile_c.Library(path)

    def tensor(self, t, s4_columns=0):
        import octile_torch

        if s4_columns == 0 and str(t.dtype) not in ("torch.uint8", "torch.int32"):
            return octile_torch.tensor(t)
        sizes = (t.shape[0], s4_columns) if s4_columns else tuple(t.shape)
        element = (
            self.c.Element(0, 4, 1)
            if s4_columns
            else {1: self.c.Element(1, 8, 1), 4: self.c.Element(0, 32, 1)}[t.element_size()]
        )
        strides = (s4_columns, 1) if s4_columns else t.stride()
        kind = C.c_int64 * len(sizes)
        view = self.c.Tensor(
            t.data_ptr(), octile_torch.device(t.device), len(sizes), element, kind(*sizes), kind(*strides), 0
        )
        view.keep = t
        return view

    def run(self, torch, layer, x, packed, kernel="", a8=False):
        """(the plan's kernel, call, y)"""
        import octile_torch

        c, m = self.c, x.shape[0]
        types = octile_torch.DTYPES
        fields = {"m": m, "n": layer.n, "k": layer.k, "x": types[x.dtype], "y": types[x.dtype]}
        fields["activation"] = c.DYNAMIC_PER_TOKEN if a8 else c.NONE
        fields |= {"weight": c.S4_GROUP, "group": layer.group, "weight_zero_point": int(layer.zero is not None)}
        fields |= {
            "bias": 1,
            "packed_weight": int(packed),
            "device": octile_torch.device(x.device),
            "kernel": kernel.encode(),
        }
        plan = self.library.plan("linear", **fields)
        y = torch.full((m, layer.n), float("nan"), dtype=x.dtype, device="cuda")
        views = {"x": self.tensor(x), "bias": self.tensor(layer.bias), "y": self.tensor(y)}
        weight = {"weight": (layer.bytes, layer.k), "weight_scale": (layer.scale, 0)}
        if layer.zero is not None:
            weight["weight_zero_point"] = (layer.zero, 0)
        if packed:
            size = C.c_size_t()
            self.library.ok(self.library.c.octile_linear_packed_weight_size(plan.handle, C.byref(size)))
            home = torch.empty(size.value, dtype=torch.uint8)
            parts = {name: self.tensor(t.cpu(), columns) for name, (t, columns) in weight.items()}
            parts["packed"] = self.tensor(home)
            pointers = {name: C.pointer(view) for name, view in parts.items()}
            arguments = c.PackArguments(struct_size=C.sizeof(c.PackArguments), **pointers)
            self.library.ok(self.library.c.octile_linear_pack(plan.handle, C.byref(arguments)))
            views["weight"] = self.tensor(home.cuda())
        else:
            views |= {name: self.tensor(t, columns) for name, (t, columns) in weight.items()}
        pointers = {name: C.pointer(view) for name, view in views.items()}
        arguments = c.RunArguments(struct_size=C.sizeof(c.RunArguments), **pointers)
        workspace = torch.empty(max(1, plan.workspace_size), dtype=torch.uint8, device="cuda")
        stream = C.c_void_p(torch.cuda.current_stream().cuda_stream)
        rest = (C.byref(arguments), C.c_void_p(workspace.data_ptr()), C.c_size_t(plan.workspace_size), stream)

        def call(keep=(views, pointers, arguments, workspace)):
            self.library.ok(self.library.c.octile_linear_run(plan.handle, *rest))

        return plan, call, y


def reader(torch, layer):
    """A call that reads the weight and its scales, and nothing else."""
    import triton
    import triton.language as tl

    @triton.jit
    def read(data, out, count, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        words = tl.load(data + at, mask=at < count, other=0, eviction_policy="evict_first")
        tl.store(out + tl.program_id(0), tl.sum(words, 0))

    words = (layer.bytes.numel() + layer.scale.numel() * 4) // 4
    data = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device="cuda")
    block = 8192
    out = torch.empty(triton.cdiv(words, block), dtype=torch.int32, device="cuda")
    return lambda: read[(out.numel(),)](data, out, words, BLOCK=block, num_warps=8)


def peers(torch, layer, x):
    """For their speed alone: tinygemm takes unsigned nibbles, scales of bf16 and x of bf16."""
    calls = {f"cuBLAS {str(layer.dtype)[6:]}": lambda: torch.nn.functional.linear(x, layer.half, layer.bias)}
    if layer.group in (32, 64, 128):
        nibbles = ((layer.q + 8) & 15).to(torch.uint8)
        packed = torch.ops.aten._convert_weight_to_int4pack(nibbles[:, ::2] << 4 | nibbles[:, 1::2], 8)
        scales = torch.stack([layer.scale.T, torch.zeros_like(layer.scale.T)], 2).to(torch.bfloat16).contiguous()
        narrow = x.to(torch.bfloat16)
        calls["tinygemm"] = lambda: torch.ops.aten._weight_int4pack_mm(narrow, packed, layer.group, scales)
    return calls


class ReadFlush:
    """Fills L2 by reading: nothing is left that must be written back."""

    def __init__(self, memory, torch):
        self.words = memory.fill_(1).view(torch.int32)

    def fill_(self, _):
        self.words.max()


def octile_calls(torch, octile, layer, x, arguments, bound):
    """{name: (call, error, its bound)}, of either form of the weight."""
    exact = x.double() @ layer.exact.T + layer.bias.double()
    found = {}
    for packed in (False, True):
        for kernel in ("", *filter(None, arguments.kernels.split(","))):
            try:
                plan, call, y = octile.run(torch, layer, x, packed, kernel)
            except octile.c.Error:
                if kernel:  # that is named may have to refuse
                    continue
                raise
            call()
            error = ((y.double() - exact).norm() / exact.norm()).item()
            found[plan.sku + (" packed" if packed else "")] = call, error, bound
        if arguments.a8:
            plan, call, y = octile.run(torch, layer, x, packed, a8=True)
            call()
            error = ((y.double() - exact).norm() / exact.norm()).item()
            # Half a step of a row's largest value / 127 at most, evenly: of normal values, none of which is 6 deviations
            # away, 6 / 127 / sqrt(12) = 1.4 % in the mean square.
            found[plan.sku + (" packed" if packed else "")] = call, error, 2e-2
    return found


def main():
    arguments = parse_arguments()
    try:
        import torch

        torch.cuda.init()
    except (ImportError, RuntimeError, AssertionError) as error:  # no torch, or no GPU
        print(f"w4a16.py: {error}", file=sys.stderr)
        return 2
    from gpu.clock import Clock

    clock, octile, wrong = Clock(5), Octile(arguments.library), 0
    if arguments.flush == "read":
        clock.flushed = ReadFlush(clock.flushed, torch)
    torch.manual_seed(1)
    k, n = (int(size) for size in arguments.layer.split("x"))
    dtype, bound = {"f16": (torch.float16, 6e-4), "bf16": (torch.bfloat16, 5e-3)}[arguments.type]
    layer = Layer(torch, k, n, arguments.group, dtype, arguments.zero_points)
    name = torch.cuda.get_device_name()
    print(f"{name}, K {k}, N {n}, group {arguments.group}, {arguments.type}, flushed by {arguments.flush}")
    for m in (int(size) for size in arguments.batches.split(",")):
        x = torch.randn(m, k, device="cuda").to(dtype)
        ours = octile_calls(torch, octile, layer, x, arguments, bound)
        bad = {name: error for name, (_, error, limit) in ours.items() if not error < limit}
        wrong += len(bad)
        calls = {name: call for name, (call, _, _) in ours.items()}
        try:
            if not arguments.no_peers:
                calls |= peers(torch, layer, x)
            if m == 1:
                calls["read"] = reader(torch, layer)
        except Exception as error:  # whatever a peer throws is shown, and the peer skipped
            print(f"    {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}")
        times = clock.rounds(list(calls.values()), arguments.rounds)
        parts = [f"{name} {statistics.median(t) * 1e6:.1f}" for name, t in zip(calls, times)]
        print(f"  M {m}: " + "; ".join(parts), *(f"WRONG {name}: {e:.2e}" for name, e in bad.items()), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
