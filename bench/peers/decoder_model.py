"""The decoder that decoder.py generates with: its shape, its random weights, and the files that llama.cpp reads."""

import dataclasses
import functools
import os
import pathlib
import zlib

import numpy as np


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A Llama of these sizes. All weights are normal: stretches of one pool, the same for every contender."""

    layers: int = 24
    hidden: int = 1536
    intermediate: int = 4096
    heads: int = 12
    key_value_heads: int = 4
    vocabulary: int = 32000

    @property
    def head_size(self):
        return self.hidden // self.heads

    def shapes(self):
        """Of the matrices, by their names in Transformers."""
        key_value = self.key_value_heads * self.head_size
        layer = {
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (key_value, self.hidden),
            "self_attn.v_proj": (key_value, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }
        shapes = {f"model.layers.{i}.{name}": shape for i in range(self.layers) for name, shape in layer.items()}
        return {"model.embed_tokens": (self.vocabulary, self.hidden), **shapes, "lm_head": (self.vocabulary, self.hidden)}

    def weight(self, name):
        rows, columns = self.shapes()[name]
        pool = np.roll(normal_pool(), zlib.crc32(name.encode()))
        return np.resize(pool if name == "model.embed_tokens" else pool * np.float32(columns**-0.5), (rows, columns))

    def parameters(self):
        return sum(rows * columns for rows, columns in self.shapes().values())

    def tokens(self, count):
        return np.random.default_rng(3).integers(0, self.vocabulary, count)

    def __str__(self):
        return "-".join(str(size) for size in dataclasses.astuple(self))


@functools.cache
def normal_pool():
    """Prime, so that no two rows of a matrix begin alike."""
    return np.random.default_rng(1).standard_normal(4_194_301, np.float32)


def transformers_model(decoder, dtype):
    """LlamaForCausalLM in `dtype`, in eval()."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=decoder.hidden,
        intermediate_size=decoder.intermediate,
        num_hidden_layers=decoder.layers,
        num_attention_heads=decoder.heads,
        num_key_value_heads=decoder.key_value_heads,
        vocab_size=decoder.vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for name in decoder.shapes():
        model.get_submodule(name).weight = torch.nn.Parameter(torch.from_numpy(decoder.weight(name)).to(dtype), False)
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.weight = torch.nn.Parameter(torch.ones(decoder.hidden, dtype=dtype), False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are not among the weights
    return model.eval()


def gguf_file(decoder, kind, folder):
    """The file of the decoder in "Q8_0" or "Q4_0", head and embedding included; written once."""
    path = pathlib.Path(folder) / f"decoder-{decoder}-{kind}.gguf"
    if path.exists():
        return path
    import gguf

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    writer = gguf.GGUFWriter(unfinished, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(decoder.hidden)
    writer.add_block_count(decoder.layers)
    writer.add_feed_forward_length(decoder.intermediate)
    writer.add_head_count(decoder.heads)
    writer.add_head_count_kv(decoder.key_value_heads)
    writer.add_rope_dimension_count(decoder.head_size)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(decoder.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    quantization = gguf.GGMLQuantizationType[kind]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, decoder.layers)
    for name in decoder.shapes():
        weight = decoder.weight(name)
        for part, heads in (("q_proj", decoder.heads), ("k_proj", decoder.key_value_heads)):
            if name.endswith(part):  # llama.cpp turns neighbours where Transformers turns halves of a head
                halves = weight.reshape(heads, 2, decoder.head_size // 2, -1)
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
        levels = gguf.quants.quantize(np.ascontiguousarray(weight), quantization)
        writer.add_tensor(names.get_name(name) + ".weight", levels, raw_dtype=quantization)
    ones = np.ones(decoder.hidden, np.float32)
    for i in range(decoder.layers):
        writer.add_tensor(f"blk.{i}.attn_norm.weight", ones)
        writer.add_tensor(f"blk.{i}.ffn_norm.weight", ones)
    writer.add_tensor("output_norm.weight", ones)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(path)
    return path
