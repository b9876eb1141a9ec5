"""Octile through its C interface, on CUDA tensors of torch's."""

import octile_c
import octile_torch
import torch
from gpu.contender import Contender, Peer, Quantizer
from gpu.peer_octile_backward import Backward
from gpu.problem import quantize

GRANULARITIES = {"rows": octile_c.PER_ROW, "tensor": octile_c.PER_TENSOR, "columns": octile_c.PER_COLUMN}
ORIENTATIONS = {octile_c.ROW_MAJOR: "", octile_c.TRANSPOSED: ", transposed", octile_c.BOTH: ", both orientations"}


class Octile(Peer):
    def __init__(self, path, rows=()):
        """rows: of the kernel table, to run beside what a plan chooses in `serving`."""
        self.library, self.rows = octile_c.Library(path), rows
        self.versions = {"octile": self.library.version()}

    def linear(self, o, x, x_scale=None):
        """{the plan's kernels: call}. With x_scale X is in 8 bits, and else quantized in the call."""
        y = torch.empty(o.shape.m, o.shape.n, dtype=torch.float16, device="cuda")
        tensors = {"x": x, "weight": o.w, "weight_scale": o.w_scale, "bias": o.bias, "y": y}
        if x_scale is not None:
            tensors["x_scale"] = x_scale
        run = octile_torch.linear(self.library, o.shape, tensors)

        def call():
            run()
            return y

        return {run.plan.sku: call}

    def contenders(self, o):
        return [
            Contender("Octile", "product", "product", lambda: self.linear(o, o.xq, o.x_scale)),
            Contender("Octile", "layer", "layer", lambda: self.linear(o, o.x)),
        ]

    def backward(self, g):
        return Backward(self.library, g).contenders()

    def quantizers(self, x):
        return [
            self.quantizer(x, "rows", octile_c.ROW_MAJOR, 3),
            self.quantizer(x, "rows", octile_c.TRANSPOSED, 3),
            self.quantizer(x, "rows", octile_c.BOTH, 4),
            self.quantizer(x, "tensor", octile_c.ROW_MAJOR, 3),
            self.quantizer(x, "tensor", octile_c.BOTH, 4),
            self.quantizer(x, "columns", octile_c.ROW_MAJOR, 3),
            self.quantizer(x, "columns", octile_c.TRANSPOSED, 3),
            self.quantizer(x, "columns", octile_c.BOTH, 4),
        ]

    def quantizer(self, x, granularity, orientation, bytes_per_element):
        (rows, columns), made = x.shape, {}

        def prepare():
            scales = {"rows": rows, "tensor": 1, "columns": columns}[granularity]
            tensors = {"scale": torch.empty(scales, device="cuda")}
            if orientation != octile_c.TRANSPOSED:
                tensors["q"] = torch.full((rows, columns), -128, dtype=torch.int8, device="cuda")
            if orientation != octile_c.ROW_MAJOR:
                tensors["q_transposed"] = torch.full((columns, rows), -128, dtype=torch.int8, device="cuda")
            fields = {"granularity": GRANULARITIES[granularity], "orientation": orientation}
            run = octile_torch.quantize(self.library, x, tensors, **fields)
            made.update(tensors, sku=run.plan.sku)
            return run

        def check():
            dimension = {"rows": 1, "tensor": (0, 1), "columns": 0}[granularity]
            q, scale = quantize(x, x.abs().amax(dimension, keepdim=True))
            q = q.to(torch.int8)
            same = torch.equal(made["scale"], scale.reshape(-1))
            same &= "q" not in made or torch.equal(made["q"], q)
            same &= "q_transposed" not in made or torch.equal(made["q_transposed"], q.T)
            if not same:
                raise RuntimeError("WRONG: not the bits of the contract")
            return f"{made['sku']}: exact"

        return Quantizer(f"Octile {granularity}{ORIENTATIONS[orientation]}", bytes_per_element, prepare, check)

    def serving(self, p):
        def contender(row, plain, given):
            name = ", ".join(["Octile", *(["plain weight"] if plain else []), *([row] if row else [])])
            part = p.format + ("-product" if given else "")
            task = "int8" if p.format.endswith("a8") else "float"
            packed = p.weight.bits == 4 and not plain
            return Contender(name, part, task, lambda: serve(self.library, p, packed=packed, given=given, row=row))

        plains = (False, True) if p.weight.bits == 4 else (False,)
        givens = (False, True) if p.format.endswith("a8") else (False,)
        return [contender(row, plain, given) for row in ("", *self.rows) for plain in plains for given in givens]


def serve(library, p, packed=False, given=False, row=""):
    """{the plan's kernels: call} of a layer.Layer. given: with X in 8 bits."""
    w, y = p.weight, p.empty()
    fields = {"n": w.n, "k": w.k}
    if w.bits == 4 or w.group:
        kind = octile_c.S4_GROUP if w.bits == 4 else octile_c.S8_GROUP
        fields |= {"weight": kind, "group": w.group, "weight_zero_point": int(w.zero is not None)}
    if p.format.endswith("a16"):
        fields["activation"] = octile_c.NONE
    weight = {"weight": w.q, "weight_scale": w.scale if "weight" in fields else w.scale[:, 0].contiguous()}
    if w.zero is not None:
        weight["weight_zero_point"] = w.zero
    if w.bits == 4:
        weight["weight"] = w.once("nibbles", lambda: (w.q[:, ::2] & 15 | w.q[:, 1::2] << 4).view(torch.uint8))
    tensors = {"x": p.quantized[0], "x_scale": p.quantized[1]} if given else {"x": p.x}
    if packed:

        def pack():
            parts = {name: t.cpu() for name, t in weight.items()}
            parts["weight"] = octile_torch.nibbles(parts["weight"], w.k)
            return octile_torch.pack(library, parts, **fields).to(w.q.device)

        weight = {"weight": w.once(("packed", library), pack)}
    elif w.bits == 4:
        weight["weight"] = octile_torch.nibbles(weight["weight"], w.k)
    run = octile_torch.linear(
        library, p.shape, {**tensors, **weight, "y": y}, **fields, packed_weight=int(packed), kernel=row.encode()
    )

    def call():
        run()
        return y

    return {run.plan.sku: call}
