"""vLLM's kernels through the operators of its binary, which loads without the rest of vLLM: CUTLASS, Marlin, Machete.

What is packed here is packed as vLLM packs it when it loads a model. Marlin and Machete take weights as GPTQ stores
them: unsigned, along K.
"""

import importlib.metadata
import importlib.util
import pathlib

import torch
from gpu.contender import Contender, Peer

BINARY = "_C_stable_libtorch.abi3.so"
# The order in which Marlin's threads read the scales of 64 channels, of groups and (of 32) of whole rows; and that of 8
# zero points in a word.
GROUPED = [i + 8 * j for i in range(8) for j in range(8)]
SINGLE = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
INTERLEAVED = [0, 2, 4, 6, 1, 3, 5, 7]


def load(path=None):
    """(vLLM's operators, its version) of a file, by default of the vLLM that is installed, which is not imported."""
    if path is None:
        found = importlib.util.find_spec("vllm")
        if found is None:
            raise RuntimeError(f"vllm is not installed, and no --vllm names its {BINARY}")
        path = pathlib.Path(found.submodule_search_locations[0]) / BINARY
    torch.ops.load_library(str(pathlib.Path(path).resolve()))
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = pathlib.Path(path).name
    return torch.ops._C, version


def scalar_type(bits, offset):
    """vLLM's number of an unsigned type whose value is the stored number less the offset."""
    return 1 << 50 | bits << 8 | offset << 17


def words(codes, bits):
    """Unsigned numbers (rows, columns) in words of 32 bits, 32 / bits successive rows in each, the first one lowest."""
    count = 32 // bits
    packed = torch.zeros(codes.shape[0] // count, codes.shape[1], dtype=torch.int32, device=codes.device)
    for i in range(count):
        packed |= codes[i::count].int() << bits * i
    return packed


def ordered(t, order):
    """Each run of as many columns as `order` has, in that order."""
    return t.reshape(-1, len(order))[:, order].reshape(t.shape).contiguous()


def marlin_zero_points(codes):
    """Zero points (groups, N) in 4 bits."""
    return words(ordered(ordered(codes, GROUPED), INTERLEAVED).T, 4).T.contiguous()


class Vllm(Peer):
    def __init__(self, path):
        self.ops, version = load(path)
        self.versions = {"vLLM": version}
        # Marlin's locks, zero between its calls.
        count = torch.cuda.get_device_properties(0).multi_processor_count
        self.locks = torch.zeros(4 * count, dtype=torch.int32, device="cuda")

    def serving(self, p):
        eight = "int8" if p.format.endswith("a8") else "float"
        made = {
            "w8a8": [
                ("vLLM", "w8a8", lambda: self.scaled_mm(p, given=False)),
                ("vLLM", "w8a8-product", lambda: self.scaled_mm(p, given=True)),
            ],
            "w4a8": [
                ("Marlin", "w4a8", lambda: self.marlin_int8(p, given=False)),
                ("Marlin", "w4a8-product", lambda: self.marlin_int8(p, given=True)),
            ],
        }
        sixteen = [("Marlin", p.format, lambda: self.marlin(p)), ("Machete", p.format, lambda: self.machete(p))]
        return [Contender(name, part, eight, prepare) for name, part, prepare in made.get(p.format, sixteen)]

    def quantizer(self, p):
        """(X in 8 bits, its scales (M, 1), the call that writes them)"""
        q, scale = torch.empty(p.x.shape, dtype=torch.int8, device="cuda"), torch.empty(p.shape.m, 1, device="cuda")
        return q, scale, lambda: self.ops.dynamic_scaled_int8_quant(q, p.x, scale, None)

    def scaled_mm(self, p, given):
        w, y = p.weight, p.empty()
        w_scale = w.scale.T.contiguous()
        if given:
            q, scale = p.quantized[0], p.quantized[1][:, None]
        else:
            q, scale, quantize = self.quantizer(p)

        def call():
            if not given:
                quantize()
            self.ops.cutlass_scaled_mm(y, q, w.q.T, scale, w_scale, None)
            return y

        return {"": call}

    def marlin_scales(self, w, order):
        return ordered(w.scale.T.to(w.dtype).contiguous(), order)

    def marlin_gemm(self, p, x, weight, scales, more):
        """more: the offset of the type, the scales of x and the zero points."""
        offset, x_scale, zeros = more
        s, number = p.shape, scalar_type(p.weight.bits, offset)
        rest = (x_scale, None, zeros, self.locks, number, s.m, s.n, s.k, False, True, False)
        return self.ops.marlin_gemm(x, None, weight, None, scales, *rest)

    def marlin(self, p):
        w = p.weight

        def pack():
            weight = self.ops.gptq_marlin_repack(words(w.codes.T, w.bits), w.k, w.n, w.bits, False)
            zeros = None if w.zero is None else marlin_zero_points((w.zero + 8).T)
            return weight, self.marlin_scales(w, GROUPED if w.group else SINGLE), zeros

        weight, scales, zeros = w.once("Marlin", pack)
        offset = 0 if zeros is not None else 2 ** (w.bits - 1)
        return {"": lambda: self.marlin_gemm(p, p.x, weight, scales, (offset, None, zeros))}

    def marlin_int8(self, p, given):
        w = p.weight

        def pack():
            weight = self.ops.gptq_marlin_repack(words(w.codes.T, w.bits), w.k, w.n, w.bits, True)
            scales = self.marlin_scales(w, SINGLE)
            if not w.group:
                return weight, scales, 1
            # Scales of groups are integers up to 4096, in the bytes of floats; the scales of x take the rest.
            unit = scales.max().float() / 4096
            return weight, (scales.float() / unit).round().to(torch.int16).view(w.dtype), unit

        weight, scales, unit = w.once("Marlin, X in 8 bits", pack)
        if given:
            q, scale = p.quantized[0], (p.quantized[1][:, None] * unit).contiguous()
        else:
            q, scale, quantize = self.quantizer(p)

        def call():
            if not given:
                quantize()
                if w.group:
                    scale.mul_(unit)
            return self.marlin_gemm(p, q, weight, scales, (8, scale, None))

        return {"": call}

    def machete(self, p):
        w = p.weight
        number = scalar_type(w.bits, 2 ** (w.bits - 1) if w.zero is None else 0)

        def pack():
            columns = words(w.codes.T, w.bits).T.contiguous().T  # stored column by column
            weight = self.ops.machete_prepack_B(columns, w.dtype, number, w.dtype)
            scales = w.scale.T.to(w.dtype).contiguous()
            zeros = None if w.zero is None else -scales * (w.zero + 8).T.to(w.dtype)
            return weight, scales, zeros

        weight, scales, zeros = w.once("Machete", pack)
        rest = (None, scales, zeros, w.group or -1, None, None, None)
        return {"": lambda: self.ops.machete_mm(p.x, weight, number, *rest)}
