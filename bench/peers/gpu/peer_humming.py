"""humming, the kernels of Ant Group and vLLM that are compiled as a layer first runs: weights of 4 and 8 bits, X in 16 or 8."""

import importlib.metadata

from gpu.contender import Contender, Peer
from gpu.peer_vllm import words
from humming.layer import HummingLayer


class Humming(Peer):
    def __init__(self):
        self.versions = {"humming": importlib.metadata.version("humming-kernels")}

    def serving(self, p):
        task = "int8" if p.format.endswith("a8") else "float"
        return [Contender("humming", p.format, task, lambda: self.layer(p, task))]

    def layer(self, p, task):
        w = p.weight

        def pack():
            kinds = {
                "weight_config": {"dtype": f"int{w.bits}", "group_size": w.group, "has_zero_point": w.zero is not None}
            }
            kinds["input_config"] = {"dtype": "int8"} if task == "int8" else None
            layer = HummingLayer(shape_n=w.n, shape_k=w.k, torch_dtype=w.dtype, **kinds).cuda()
            tensors = {"weight": words(w.codes.T, w.bits).T.contiguous(), "weight_scale": w.scale.to(w.dtype)}
            if w.zero is not None:
                tensors["zero_point"] = words(w.zero + 8, 4)
            layer.load_from_tensors(tensors)
            layer.transform()
            return layer

        layer, y = w.once(f"humming, {task}", pack), p.empty()

        def call():
            layer(p.x, outputs=y)
            return y

        return {"": call}
