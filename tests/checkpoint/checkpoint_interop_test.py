#!/usr/bin/env python3
"""Checkpoints that `octile quantize` writes are read by the compressed-tensors package and by Transformers, and what that
package writes is read by `octile compare`: the same values, in both layouts.

Needs the environment variable OCTILE_COMMAND and the Python packages torch, safetensors and compressed-tensors; without
them it exits with 77, which CTest counts as skipped.
"""

import copy
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded
try:
    import torch
    from compressed_tensors.compressors import BaseCompressor, compress_module
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization
    from compressed_tensors.quantization.utils import calculate_qparams
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

COMMAND = os.environ.get("OCTILE_COMMAND")
if not COMMAND:
    print("skipped: OCTILE_COMMAND is not set")
    sys.exit(77)

FORMATS = {
    "w8a8": ["--format", "w8a8"],
    "w8a8-static": ["--format", "w8a8-static", "--smooth", "0.5"],
    "w8a8-group": ["--format", "w8a8", "--group", "32"],
    "w8a8-static-group": ["--format", "w8a8-static", "--smooth", "0.5", "--group", "64"],
    "w8a16": ["--format", "w8a16"],
    "w8a16-group": ["--format", "w8a16", "--group", "64", "--method", "clip"],
    "w4a16": ["--format", "w4a16", "--group", "32"],
    "w4a16-zero": ["--format", "w4a16", "--group", "64", "--zero-points", "--method", "clip"],
    "w4a16-row": ["--format", "w4a16", "--group", "0"],
    "w4a8": ["--format", "w4a8", "--group", "32"],
}
# A value's rounding to bf16 moves it by at most 2^-9 of itself.
BF16_DECIBELS = 20 * math.log10(2**9)


def octile(*arguments):
    done = subprocess.run([COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def compare(a, b):
    """The SQNR of each layer in dB, infinite for equal values."""
    layers = octile("compare", a, b, "--json")["layers"]
    return {layer["name"]: math.inf if layer["exact"] else layer["sqnr_db"] for layer in layers}


def calibration_of(model, tokens, path):
    """The calibration file that octile.calibration writes for these tokens."""
    tensors = {}

    def watch(name):
        def hook(_, inputs):
            rows = inputs[0].detach().float().flatten(0, 1)
            tensors[f"{name}.input_channel_max"] = rows.abs().amax(0)
            tensors[f"{name}.input_max"] = rows.abs().max().reshape(1)
            tensors[f"{name}.rows"] = torch.tensor([len(rows)])

        return hook

    linears = [item for item in model.named_modules() if isinstance(item[1], torch.nn.Linear)]
    handles = [module.register_forward_pre_hook(watch(name)) for name, module in linears]
    with torch.no_grad():
        model(tokens)
    for handle in handles:
        handle.remove()
    save_file(tensors, path, {"format": "octile-calibration", "version": "1"})


def decompressed(folder):
    """Each quantized layer's weight as compressed-tensors gives it, with its scheme, from the files alone."""
    config = QuantizationConfig.model_validate(json.loads((folder / "config.json").read_text())["quantization_config"])
    scheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config.format)
    state = load_file(folder / "model.safetensors")
    weights = {}
    for name in [name.removesuffix(".weight_scale") for name in state if name.endswith(".weight_scale")]:
        local = {key.removeprefix(name + "."): state[key] for key in state if key.startswith(name + ".")}
        weights[name] = compressor.decompress(local, scheme)["weight"]
    return weights, scheme


class OursIsRead(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        torch.manual_seed(1)
        cls.folder = tempfile.TemporaryDirectory()
        cls.root = pathlib.Path(cls.folder.name)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=False,
        )
        cls.tokens = torch.randint(0, 64, (2, 16))
        cls.models = {}
        for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
            model = LlamaForCausalLM(config).to(dtype).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 1:
                        parameter.uniform_(0.5, 2)  # norms of 1 would hide a wrong fold
                        parameter[7] = 40  # an outlier channel
            model.save_pretrained(cls.root / name)
            cls.models[name] = model
        cls.reports = {}
        for dtype in cls.models:
            calibration_of(cls.models[dtype], cls.tokens, cls.root / "calibration")
            for name, options in FORMATS.items():
                calibration = ["--calibration", cls.root / "calibration"] if "static" in name else []
                arguments = [cls.root / dtype, cls.root / f"{dtype}-{name}", *options, *calibration, "--json"]
                cls.reports[dtype, name] = octile("quantize", *arguments)

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()

    def test_decompresses_to_the_values_we_mean(self):
        for dtype, name in self.reports:
            with self.subTest(dtype=dtype, name=name):
                ours = self.root / f"{dtype}-{name}"
                weights, scheme = decompressed(ours)
                self.assertEqual(len(weights), 14)
                self.assertEqual(scheme.weights.symmetric, "zero" not in name)
                theirs = self.root / "theirs.safetensors"
                save_file({f"{layer}.weight": weight.contiguous() for layer, weight in weights.items()}, theirs)
                for layer, decibels in compare(theirs, ours).items():
                    if layer in weights:
                        self.assertGreaterEqual(decibels, math.inf if dtype == "f32" else BF16_DECIBELS, layer)

    def test_a_reported_sqnr_is_that_of_what_they_read(self):
        for name in ("w8a8", "w8a8-group", "w8a16-group", "w4a16-zero"):
            weights, _ = decompressed(self.root / f"f32-{name}")
            for layer in self.reports["f32", name]["layers"]:
                original = self.models["f32"].get_submodule(layer["name"]).weight.double()
                noise = (original - weights[layer["name"]].double()).square().sum()
                decibels = (10 * (original.square().sum() / noise).log10()).item()
                self.assertAlmostEqual(decibels, layer["sqnr_db"], places=6)

    def test_transformers_loads_and_runs_it(self):
        with torch.no_grad():
            for dtype, name in self.reports:
                if name == "w4a16-zero":
                    continue  # Transformers 5.23 with compressed-tensors 0.20 expects zero points unpacked, even its own
                with self.subTest(dtype=dtype, name=name):
                    loaded = AutoModelForCausalLM.from_pretrained(self.root / f"{dtype}-{name}", dtype="auto").eval()
                    model = self.models[dtype]
                    if "w8a8" not in name:
                        # Four-bit weights that meet an outlier channel lose 4 to 18 dB, depending on the draw. The loaded model
                        # is compared with the float model that has those weights.
                        model = copy.deepcopy(model)
                        for layer, weight in decompressed(self.root / f"{dtype}-{name}")[0].items():
                            model.get_submodule(layer).weight.copy_(weight)
                    expected = model(self.tokens).logits.double()
                    logits = loaded(self.tokens).logits.double()
                    decibels = 10 * (expected.square().sum() / (expected - logits).square().sum()).log10().item()
                    # The package quantizes and dequantizes inputs and weights. 8 bits give 35 dB and more for data within a
                    # few times its rms; two layers and two operands cost some.
                    self.assertGreater(decibels, 40 if "a16" in name else 20)

    def test_a_head_that_shares_the_embedding_stays_as_it_is(self):
        """It is in no file, but it is a Linear."""
        torch.manual_seed(3)
        sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
        model = LlamaForCausalLM(config).eval()
        model.save_pretrained(self.root / "tied")
        for name in ("w8a8", "w4a16"):
            with self.subTest(name), torch.no_grad():
                octile("quantize", self.root / "tied", self.root / f"tied-{name}", *FORMATS[name], "--json")
                loaded = AutoModelForCausalLM.from_pretrained(self.root / f"tied-{name}").eval()
                expected, logits = model(self.tokens).logits, loaded(self.tokens).logits
                decibels = 10 * (expected.square().sum() / (expected - logits).square().sum()).log10().item()
                self.assertGreater(decibels, 20 if name == "w8a8" else 8)  # as above

    def test_smoothing_folds_into_the_norms(self):
        report = self.reports["f32", "w8a8-static"]
        self.assertEqual(len(report["smoothed"]), 6)
        self.assertEqual(len(report["not_smoothed"]), 2)  # o_proj, whose heads share their values
        before = load_file(self.root / "f32" / "model.safetensors")
        after = load_file(self.root / "f32-w8a8-static" / "model.safetensors")
        weights, _ = decompressed(self.root / "f32-w8a8-static")
        for block in range(2):
            norm = f"model.layers.{block}.input_layernorm.weight"
            self.assertFalse(torch.equal(before[norm], after[norm]))
            name = f"model.layers.{block}.self_attn.q_proj"
            step = after[f"{name}.weight_scale"] * after[norm].abs()
            error = (weights[name] * after[norm] - before[f"{name}.weight"] * before[norm]).abs()
            # Half a step, and the products' rounding.
            self.assertTrue((error <= 0.501 * step).all())


class TheirsIsRead(unittest.TestCase):
    """Layers that compressed-tensors quantizes, with its own scales (absmax / 127.5: -128 occurs)."""

    def layer(self, weights, inputs, file_format, dtype):
        torch.manual_seed(2)
        module = torch.nn.Linear(192, 40, dtype=dtype)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs, format=file_format)
        initialize_module_for_quantization(module, scheme)
        group = weights.group_size or 192
        groups = module.weight.detach().reshape(40, -1, group)
        scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), weights)
        module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero.reshape(module.weight_zero_point.shape))
        compress_module(module)
        state = {f"layer.{name}": tensor for name, tensor in module.state_dict().items()}
        compressor = BaseCompressor.get_value_from_registry(file_format)
        weight = compressor.decompress(dict(module.state_dict()), scheme)["weight"]
        return state, weight

    def expect_equal(self, state, weight, folder):
        save_file(state, folder / "theirs.safetensors")
        save_file({"layer.weight": weight.contiguous()}, folder / "plain.safetensors")
        decibels = compare(folder / "plain.safetensors", folder / "theirs.safetensors")["layer"]
        self.assertGreaterEqual(decibels, math.inf if weight.dtype == torch.float32 else BF16_DECIBELS)

    def test_both_layouts(self):
        activations = QuantizationArgs(num_bits=8, strategy="token", dynamic=True)
        cases = [
            (QuantizationArgs(num_bits=8, strategy="channel"), activations, "int-quantized"),
            (QuantizationArgs(num_bits=8, strategy="group", group_size=32), activations, "int-quantized"),
            (QuantizationArgs(num_bits=8, strategy="group", group_size=64), None, "pack-quantized"),
            (QuantizationArgs(num_bits=8, strategy="channel"), None, "pack-quantized"),
            (QuantizationArgs(num_bits=8, strategy="group", group_size=64, symmetric=False), None, "pack-quantized"),
            (QuantizationArgs(num_bits=4, strategy="group", group_size=32), None, "pack-quantized"),
            (QuantizationArgs(num_bits=4, strategy="group", group_size=64, symmetric=False), None, "pack-quantized"),
            (QuantizationArgs(num_bits=4, strategy="channel"), None, "pack-quantized"),
        ]
        for dtype in (torch.float32, torch.bfloat16):
            for weights, inputs, file_format in cases:
                with self.subTest(dtype=dtype, weights=weights), tempfile.TemporaryDirectory() as folder:
                    state, weight = self.layer(weights, inputs, file_format, dtype)
                    if file_format == "int-quantized" and dtype == torch.float32:
                        self.assertEqual(state["layer.weight"].min(), -128)
                    self.expect_equal(state, weight, pathlib.Path(folder))

    def test_awq(self):
        """An AWQ layer, which the compressed-tensors package converts to its own layout."""
        torch.manual_seed(3)

        def words(*shape):
            return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)

        state = {"layer.qweight": words(64, 2), "layer.qzeros": words(2, 2), "layer.scales": torch.rand(2, 16)}
        converter = AutoAWQConverter(bits=4, group_size=32, zero_point=True, targets=["Linear"], ignore=[])
        converted = converter.process({name: tensor.clone() for name, tensor in state.items()})
        with tempfile.TemporaryDirectory() as folder:
            awq, packed = pathlib.Path(folder) / "awq.safetensors", pathlib.Path(folder) / "packed.safetensors"
            save_file(state, awq)
            save_file(converted, packed)
            self.assertEqual(compare(awq, packed), {"layer": math.inf})
            kinds = [octile("inspect", path, "--json")["layers"][0]["kind"] for path in (awq, packed)]
            self.assertEqual(kinds, ["awq", "pack-quantized"])


if __name__ == "__main__":
    unittest.main()
