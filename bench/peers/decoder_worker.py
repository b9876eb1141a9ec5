"""One contender of decoder.py in a process of its own: a decoder, and generating with it when told to.

Started by decoder.py, which it answers in JSON, line by line.
"""

import sys
import time
import warnings

import numpy as np
from decoder_model import Decoder, gguf_file, transformers_model
from worker import serve

warnings.filterwarnings("ignore")


class Timestamps:
    """What generate() hands its tokens to; the first that it gets is the prompt."""

    def __init__(self):
        self.at = []

    def put(self, _):
        self.at.append(time.perf_counter())

    def end(self):
        pass


class InTransformers:
    """generate(), greedy. With `compiled` its decode is a graph over a static cache, with `decoding` Octile's loop over one."""

    def __init__(self, settings, dtype="bfloat16", compiled=False, convert=None, decoding=False):
        import torch
        import transformers

        torch.set_num_threads(settings["threads"])
        torch.manual_seed(0)
        self.torch = torch
        self.decoder = Decoder(**settings["decoder"])
        self.model = transformers_model(self.decoder, getattr(torch, dtype))
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        if convert:
            convert(self)
        self.how, self.streamer = {}, "streamer"
        if decoding:
            import octile.transformers

            decode = octile.transformers.Decoding()
            self.how, self.streamer = {"cache_implementation": "static", "custom_generate": decode}, "tokens_to"
        if compiled:
            compile_config = transformers.CompileConfig(mode="default", dynamic=False)
            compile_config._compile_all_devices = True
            self.how = {"cache_implementation": "static", "compile_config": compile_config}

    def generate(self, prompt, count):
        """Seconds to the first token, and seconds from there to the last of `count` more."""
        torch, timestamps = self.torch, Timestamps()
        ids = torch.from_numpy(self.decoder.tokens(prompt))[None]
        start = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count + 1,
                do_sample=False,
                **{self.streamer: timestamps},
                **self.how,
            )
        first, last = timestamps.at[-1 - count], timestamps.at[-1]
        return first - start, last - first

    def logits(self, prompt):
        ids = self.torch.from_numpy(self.decoder.tokens(prompt))[None]
        with self.torch.inference_mode():
            return self.model(ids, logits_to_keep=1).logits[0, -1].float().numpy()


def octile_config(kind, join=False):
    def convert(self):
        import octile

        config = {"w8a8": octile.W8A8Dynamic, "w4a8": octile.W4A8, "w4a16": octile.W4A16}[kind]()
        report = octile.quantize_(self.model, config, filter=lambda module, name: True)
        if join and not octile.join_(self.model):
            raise RuntimeError("no layers were joined")
        octile.pack_(self.model)
        if len(report.converted) != 7 * self.decoder.layers + 1:
            raise RuntimeError(f"{len(report.converted)} layers were converted")
        self.versions["octile"] = f"{octile.__version__}, {octile.BINDING} binding"

    return convert


def torchao_config(kind):
    def convert(self):
        import torchao
        from torchao.prototype.quantization import int4
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        if kind == "int8":
            config = Int8DynamicActivationInt8WeightConfig()
        else:
            config = int4.PrototypeInt4WeightOnlyConfig(group_size=128)
        quantize_(self.model, config)
        self.versions["torchao"] = torchao.__version__

    return convert


class LlamaCpp:
    """llama.cpp through its C interface; greedy too."""

    def __init__(self, settings, kind):
        import llama_cpp

        self.c, self.decoder = llama_cpp, Decoder(**settings["decoder"])
        path = gguf_file(self.decoder, kind, settings["folder"])
        self.log = llama_cpp.llama_log_callback(lambda level, text, _: None)
        llama_cpp.llama_log_set(self.log, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        how = llama_cpp.llama_context_default_params()
        how.n_ctx = how.n_batch = how.n_ubatch = settings["prompt"] + settings["tokens"] + 8
        how.n_threads = how.n_threads_batch = settings["threads"]
        self.context = llama_cpp.llama_init_from_model(self.model, how)
        if not self.model or not self.context:
            raise RuntimeError(f"llama.cpp does not load {path}")
        self.versions = {"llama-cpp-python": llama_cpp.__version__}

    def decode(self, tokens):
        """The logits after the last of the tokens."""
        tokens = np.ascontiguousarray(tokens, np.int32)
        pointer = tokens.ctypes.data_as(self.c.llama_cpp.ctypes.POINTER(self.c.llama_token))
        if self.c.llama_decode(self.context, self.c.llama_batch_get_one(pointer, len(tokens))):
            raise RuntimeError("llama_decode failed")
        logits = self.c.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(logits, (self.decoder.vocabulary,))

    def generate(self, prompt, count):
        ids = self.decoder.tokens(prompt)
        start = time.perf_counter()
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)
        token = self.decode(ids).argmax()
        first = time.perf_counter()
        for _ in range(count):
            token = self.decode([token]).argmax()
        return first - start, time.perf_counter() - first

    def logits(self, prompt):
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)
        return self.decode(self.decoder.tokens(prompt)).copy()


CONTENDERS = {
    "octile w8a8": lambda s: InTransformers(s, "float32", convert=octile_config("w8a8")),
    "octile w4a8": lambda s: InTransformers(s, "float32", convert=octile_config("w4a8")),
    "octile w4a16": lambda s: InTransformers(s, "float32", convert=octile_config("w4a16")),
    "octile w4a16 bf16": lambda s: InTransformers(s, "bfloat16", convert=octile_config("w4a16")),
    "octile w8a8 decoding": lambda s: InTransformers(s, "float32", convert=octile_config("w8a8", join=True), decoding=True),
    "octile w4a8 decoding": lambda s: InTransformers(s, "float32", convert=octile_config("w4a8", join=True), decoding=True),
    "octile w4a16 decoding": lambda s: InTransformers(s, "float32", convert=octile_config("w4a16", join=True), decoding=True),
    "octile w4a16 bf16 decoding": lambda s: InTransformers(s, "bfloat16", convert=octile_config("w4a16", join=True), decoding=True),
    "torch f32": lambda s: InTransformers(s, "float32"),
    "torch bf16": lambda s: InTransformers(s),
    "torch bf16 compiled": lambda s: InTransformers(s, compiled=True),
    "torchao int8": lambda s: InTransformers(s, convert=torchao_config("int8")),
    "torchao int8 compiled": lambda s: InTransformers(s, compiled=True, convert=torchao_config("int8")),
    "torchao int4": lambda s: InTransformers(s, convert=torchao_config("int4")),
    "torchao int4 compiled": lambda s: InTransformers(s, compiled=True, convert=torchao_config("int4")),
    "llama.cpp Q8_0": lambda s: LlamaCpp(s, "Q8_0"),
    "llama.cpp Q4_0": lambda s: LlamaCpp(s, "Q4_0"),
}


class Worker:
    def __init__(self, name, settings):
        self.contender = CONTENDERS[name](settings)
        self.prompt, self.tokens = settings["prompt"], settings["tokens"]

    def describe(self):
        """Generates once, so that all is compiled and at its place."""
        logits = self.contender.logits(self.prompt)
        self.contender.generate(self.prompt, self.tokens)
        return {"versions": self.contender.versions, "logits": logits.tolist()}

    def time(self, _):
        prefill, decode = self.contender.generate(self.prompt, self.tokens)
        return {"prefill": prefill, "decode": decode}


if __name__ == "__main__":
    serve(Worker, sys.argv)
