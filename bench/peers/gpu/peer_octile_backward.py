"""Octile's backward, and its training step, for one problem."""

import octile_c
import octile_torch
import torch
from gpu.contender import Contender
from gpu.gradients import BLOCK
from gpu.shape import Shape

BOTH = {"orientation": octile_c.BOTH, "granularity": octile_c.PER_ROW}
ROWS = {"orientation": octile_c.ROW_MAJOR, "granularity": octile_c.PER_ROW}
INT8 = {"dx": octile_c.INT8, "dw": octile_c.INT8}
BLOCKED = {**INT8, "gradient_block": BLOCK}
FLOAT = {"dx": octile_c.DEQUANTIZED, "dw": octile_c.DEQUANTIZED}
# For an int8 dX a step quantizes W in both orientations, or in one, and the plan turns it in each run.
TURNED = {"W^T kept": True, "W turned in the run": False}


def layouts(fields):
    return TURNED if fields["dx"] == octile_c.INT8 else {"W": False}


def in_order(runs, out):
    def call():
        for run in runs:
            run()
        return out

    return call


def told(made):
    """{setting: (run, results)} as calls, with the plan's kernels."""
    return {f"{text}: {run.plan.sku}": in_order([run], out) for text, (run, out) in made.items()}


class Kept:
    """The int8 tensors of a step, written by its quantizers."""

    def __init__(self, g, dtype, turned):
        self.xq, self.wq, self.xq_t = torch.empty_like(g.xq), torch.empty_like(g.wq), torch.empty_like(g.xq_t)
        self.x_scale, self.w_scale = torch.empty_like(g.x_scale), torch.empty_like(g.w_scale)
        self.wq_t = torch.empty_like(g.wq_t) if turned else None
        self.x, self.w, self.dy, self.bias = (t.to(dtype) for t in (g.x, g.w, g.dy, g.bias))


class Backward:
    def __init__(self, library, g):
        self.library, self.g = library, g

    def plan(self, tensors, **fields):
        return octile_torch.backward(self.library, self.g.shape, tensors, **fields)

    # ---- One gradient ----

    def dx(self, dtype):
        def with_weight(turned):
            out = self.g.empty("dx", dtype=dtype)
            tensors = {"dy": self.g.floats(dtype)[2], "weight_scale": self.g.w_scale, **out}
            tensors["weight"] = self.g.wq_t if turned else self.g.wq
            return self.plan(tensors, dx=octile_c.DEQUANTIZED, weight_layout=int(turned)), out

        return told({"W (OUT, IN)": with_weight(False), "W (IN, OUT)": with_weight(True)})

    def dw(self, dtype):
        def with_x(transposed):
            out = self.g.empty("dw", dtype=dtype)
            tensors = {"dy": self.g.floats(dtype)[2], "x_scale": self.g.x_scale, **out}
            tensors["x"] = self.g.xq_t if transposed else self.g.xq
            return self.plan(tensors, dw=octile_c.DEQUANTIZED, x_transposed=int(transposed)), out

        return told({"X": with_x(False), "X transposed": with_x(True)})

    def db(self):
        out = self.g.empty("db")
        run = self.plan({"dy": self.g.dy, **out})
        return {run.plan.sku: in_order([run], out)}

    def int8_product(self, name):
        """The product alone, dY handed over in 8 bits: what the plan runs after its pass over dY."""
        g, s = self.g, self.g.shape
        out = g.empty(name)
        if name == "dx":
            shape, operands = Shape(s.m, s.n, s.k), (g.q1, g.s1, g.wq_t)
        else:
            shape, operands = Shape(s.n, s.m, s.k), (g.q2_t, g.s2, g.xq_t)
        tensors = dict(zip(("x", "x_scale", "weight"), operands), weight_scale=g.one, y=out[name])
        run = octile_torch.linear(self.library, shape, tensors, weight=octile_c.S8_PER_TENSOR)
        return {run.plan.sku: in_order([run], out)}

    def pass_over_dy(self, products):
        """A plan for K = 0 has no product left."""
        g, s = self.g, self.g.shape
        tensors = {"weight": g.wq_t[:0], "weight_scale": g.w_scale, "x": g.xq_t[:0], "x_scale": g.x_scale, "dy": g.dy}
        out = g.empty("db")
        tensors |= {"dx": g.dy.new_empty(s.m, 0), "dw": g.dy.new_empty(0, s.n), **out}
        fields = {"weight_layout": octile_c.IN_OUT, "x_transposed": 1, **products}
        run = octile_torch.backward(self.library, Shape(s.m, 0, s.n), tensors, **fields)
        if "gradient_quantize" not in run.plan.sku:
            raise RuntimeError(f"the plan has no such step: {run.plan.sku}")
        return {run.plan.sku: in_order([run], out)}

    # ---- All three, and the step ----

    def gradients(self, dtype, fields, turned, kept=None):
        """The plan of all three on the tensors of `kept`, or of the problem."""
        k = kept or self.g
        dy = kept.dy if kept else self.g.floats(dtype)[2]
        out = self.g.empty("dx", "dw", "db", dtype=dtype)
        tensors = {"dy": dy, "weight": k.wq_t if turned else k.wq, "weight_scale": k.w_scale, "x_scale": k.x_scale}
        int8 = fields["dw"] == octile_c.INT8
        tensors |= {"x": k.xq_t if int8 else k.xq, **out}
        orientations = {"weight_layout": int(turned), "dw_layout": octile_c.OUT_IN, "x_transposed": int(int8)}
        return self.plan(tensors, **orientations, **fields), out

    def backward(self, dtype, fields):
        return told({text: self.gradients(dtype, fields, turned) for text, turned in layouts(fields).items()})

    def step(self, dtype, fields, with_weight=True):
        """Quantize W and X, forward, backward. Without W: what a micro-batch after the first takes."""
        return {text: self.one_step(dtype, fields, turned, with_weight) for text, turned in layouts(fields).items()}

    def one_step(self, dtype, fields, turned, with_weight):
        g, k, int8 = self.g, Kept(self.g, dtype, turned), fields["dx"] == octile_c.INT8
        w = {"q": k.wq, "scale": k.w_scale} | ({"q_transposed": k.wq_t} if turned else {})
        x = {"q": k.xq, "scale": k.x_scale} | ({"q_transposed": k.xq_t} if int8 else {})
        quantize_w = octile_torch.quantize(self.library, k.w, w, **(BOTH if turned else ROWS))
        quantize_x = octile_torch.quantize(self.library, k.x, x, **(BOTH if int8 else ROWS))
        out = g.empty("y", dtype=dtype)
        operands = {"x": k.xq, "x_scale": k.x_scale, "weight": k.wq, "weight_scale": k.w_scale, "bias": k.bias}
        forward = octile_torch.linear(self.library, g.shape, operands | out)
        backward, gradients = self.gradients(dtype, fields, turned, k)
        quantize_w()
        return in_order([*([quantize_w] if with_weight else []), quantize_x, forward, backward], out | gradients)

    def contenders(self):
        half, bfloat = ("f16", torch.float16), ("bf16", torch.bfloat16)
        made = []

        def add(name, part, task, prepare):
            made.append(Contender(f"Octile {name}", part, task, prepare))

        for name, dtype in (half, bfloat):
            add(name, "dx", "float", lambda dtype=dtype: self.dx(dtype))
            add(name, "dw", "float", lambda dtype=dtype: self.dw(dtype))
            add(name, "backward", "float", lambda dtype=dtype: self.backward(dtype, FLOAT))
        add("f16", "db", "float", self.db)
        add("int8", "dx", "int8", lambda: self.int8_product("dx"))
        add("int8", "dw", "int8", lambda: self.int8_product("dw"))
        add("int8", "pass", "int8", lambda: self.pass_over_dy(INT8))
        add("int8", "backward", "int8", lambda: self.backward(torch.float16, INT8))
        add("f16", "step", "float", lambda: self.step(torch.float16, FLOAT))
        add("int8", "step", "int8", lambda: self.step(torch.float16, INT8))
        for part, prepare in (
            ("pass", lambda: self.pass_over_dy(BLOCKED)),
            ("backward", lambda: self.backward(torch.float16, BLOCKED)),
            ("step", lambda: self.step(torch.float16, BLOCKED)),
        ):
            add(f"int8, blocks of {BLOCK}", part, "int8 in blocks", prepare)
        add("int8, W kept", "step", "int8", lambda: self.step(torch.float16, INT8, with_weight=False))
        return made
