"""load_checkpoint_() with AWQ's and GPTQ's layouts, packed here value by value."""

import json
import os
import subprocess

import pytest
import safetensors.torch
import torch
from octile import W4A16Linear, load_checkpoint_, save_checkpoint
from torch import nn

N, K, GROUP = 24, 64, 32
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs of an AWQ word, from its lowest bits


def word(values):
    total = sum(value << (4 * i) for i, value in enumerate(values))
    return total - (1 << 32) if total >= 1 << 31 else total


def words_along_rows(u, order=range(8)):
    """(R, C) of 0..15 -> int32 (R, C / 8)."""
    return torch.tensor(
        [[word([row[8 * w + i] for i in order]) for w in range(len(row) // 8)] for row in u.tolist()],
        dtype=torch.int32,
    )


class Case:
    """A layer's levels and zero points, as stored, and its weight in float."""

    def __init__(self, method, symmetric=False, group=GROUP):
        g = torch.Generator().manual_seed(4)
        groups = K // group
        self.method, self.group = method, group
        self.u = torch.randint(0, 16, (N, K), generator=g)
        low = 1 if method == "gptq" else 0  # GPTQ stores one less
        self.z = torch.full((N, groups), 8) if symmetric else torch.randint(low, 16, (N, groups), generator=g)
        self.scale = (torch.rand(N, groups, generator=g) + 0.1).half()
        spread = [t.repeat_interleave(group, 1) for t in (self.z, self.scale.float())]
        self.weight = (self.u - spread[0]) * spread[1]

    def tensors(self):
        scales = self.scale.T.contiguous()
        if self.method == "awq":
            words, zeros = words_along_rows(self.u.T, ORDER), words_along_rows(self.z.T, ORDER)
            return {"0.qweight": words, "0.qzeros": zeros, "0.scales": scales}
        words = words_along_rows(self.u).T.contiguous()
        order = (torch.arange(K) // self.group).int()
        return {
            "0.qweight": words, "0.qzeros": words_along_rows(self.z.T - 1), "0.scales": scales, "0.g_idx": order
        }  # fmt: skip

    def config(self):
        group = -1 if self.group == K else self.group
        config = {"quant_method": self.method, "bits": 4, "group_size": group}
        return config | ({"version": "gemm", "zero_point": True} if self.method == "awq" else {"desc_act": False})


def model(bias=False):
    return nn.Sequential(nn.Linear(K, N, bias=bias))


def write(folder, tensors, config):
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))


@pytest.mark.parametrize("group", [GROUP, K])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_values(method, symmetric, group, tmp_path):
    case = Case(method, symmetric, group)
    write(tmp_path, case.tensors(), case.config())
    loaded = load_checkpoint_(model(), tmp_path)
    layer = loaded[0]
    assert type(layer) is W4A16Linear and layer.zero_point is not symmetric
    assert torch.equal(layer.to_linear().weight, case.weight)
    save_checkpoint(loaded, tmp_path / "anew")  # as pack-quantized
    assert torch.equal(load_checkpoint_(model(), tmp_path / "anew")[0].to_linear().weight, case.weight)


def test_gptq_version_2_stores_zero_points_as_they_are(tmp_path):
    case = Case("gptq")
    tensors = case.tensors() | {"0.qzeros": words_along_rows(case.z.T)}
    write(tmp_path, tensors, case.config() | {"checkpoint_format": "gptq_v2"})
    assert torch.equal(load_checkpoint_(model(), tmp_path)[0].to_linear().weight, case.weight)


def test_biases(tmp_path):
    case = Case("gptq")
    bias = torch.arange(N).half()
    write(tmp_path, case.tensors() | {"0.bias": bias}, case.config())
    assert torch.equal(load_checkpoint_(model(bias=True), tmp_path)[0].bias, bias.float())
    with pytest.raises(ValueError, match="0: the checkpoint has a bias, the model does not"):
        load_checkpoint_(model(), tmp_path)
    write(tmp_path, case.tensors() | {"0.bias": torch.zeros(N).half()}, case.config())
    assert load_checkpoint_(model(), tmp_path)[0].bias is None  # as older programs write


@pytest.mark.parametrize(
    "method, tensors, config, says",
    [
        ("awq", {}, {"bits": 3}, '"0": 3 bits; only 4 are supported'),
        ("awq", {}, {"bits": None}, '"0": no bits; only 4 are supported'),
        ("gptq", {}, {"bits": "4"}, '"bits" is not an integer'),
        ("gptq", {}, {"group_size": [32]}, '"group_size" is not an integer'),
        ("awq", {}, {"version": "gemv"}, 'version is "gemv", expected one of gemm, GEMM'),
        ("awq", {}, {"version": "gemv_fast"}, 'version is "gemv_fast"'),
        ("awq", {}, {"version": "exllama"}, 'version is "exllama"'),
        ("awq", {}, {"checkpoint_format": "marlin"}, 'checkpoint_format is "marlin"'),
        ("gptq", {}, {"checkpoint_format": "gptq_v3"}, 'checkpoint_format is "gptq_v3", expected one of gptq, gptq_v2'),
        ("gptq", {}, {"checkpoint_format": "marlin"}, 'checkpoint_format is "marlin"'),
        ("gptq", {}, {"checkpoint_format": "GPTQ_V2"}, 'checkpoint_format is "GPTQ_V2"'),
        ("gptq", {}, {"checkpoint_format": 2}, '"checkpoint_format" is not a string'),
        ("gptq", {}, {"is_marlin_format": True}, '"is_marlin_format" is true, a layout that is not supported'),
        ("gptq", {}, {"quant_method": "awq"}, '"0": is gptq, and quant_method is "awq"'),
        ("awq", {}, {"quant_method": "hqq"}, 'quant_method is "hqq", expected compressed-tensors, awq or gptq'),
        ("awq", {"0.qweight": torch.zeros(K, 2, dtype=torch.int32)}, {}, r"qweight \(64, 2\) with scales \(2, 24\) is not a supported layout"),
        ("awq", {"0.qzeros": torch.zeros(3, 2, dtype=torch.int32)}, {}, r"qzeros is I32 \(3, 2\), expected I32 \(2, 3\)"),
        ("gptq", {"0.qzeros": torch.zeros(1, 3, dtype=torch.int32)}, {}, r"qzeros is I32 \(1, 3\), expected I32 \(2, 3\)"),
        ("gptq", {"0.scales": torch.ones(3, N)}, {}, r"scales is F32 \(3, 24\), expected a float type \(2, 24\)"),
        ("gptq", {"0.scales": torch.zeros(2, N, dtype=torch.int32)}, {}, r"scales is I32 \(2, 24\), not a matrix of a float type"),
        ("gptq", {"0.qweight": torch.zeros(8, N)}, {}, r"qweight is F32 \(8, 24\), not a matrix of I32"),
        ("gptq", {"0.qzeros": None}, {}, '"0": has no qzeros'),
        ("awq", {"0.qzeros": None}, {}, '"0": has no qzeros'),
        ("awq", {"0.scales": None}, {}, '"0": has no scales'),
        ("gptq", {"0.g_idx": torch.arange(K).int() % 2}, {}, "g_idx puts input 1 in group 1, not 0: .*desc_act"),
        ("gptq", {"0.g_idx": torch.zeros(K)}, {}, r"g_idx is F32 \(64\), expected I32 \(64\)"),
        ("gptq", {"0.g_idx": torch.zeros(8).int()}, {}, r"g_idx is I32 \(8\), expected I32 \(64\)"),
        ("gptq", {"0.g_idx": None}, {"desc_act": True}, "has no g_idx, and quantization_config says desc_act"),
        ("gptq", {"0.qzeros": torch.full((2, 3), -1, dtype=torch.int32)}, {}, "output 0, group 0 is 15, which stands for 16"),
        ("gptq", {"0.scales": torch.full((2, N), torch.nan)}, {}, "scales holds nan"),
        ("awq", {"0.scales": torch.zeros(2, N)}, {}, "scales holds 0; scales are finite and above 0"),
        ("awq", {"0.scales": -torch.ones(2, N)}, {}, "scales holds -1"),
        ("gptq", {}, {"group_size": 64}, r"scales is F16 \(2, 24\), expected a float type \(1, 24\)"),
        ("gptq", {}, {"group_size": 0}, "groups of 0 do not divide its 64 inputs"),
        ("gptq", {"0.weight": torch.ones(N, K)}, {}, '"0": weight does not belong to layers of this scheme'),
        ("gptq", {"0.bias": torch.ones(5)}, {}, r"bias is F32 \(5\), expected a float type \(24\)"),
    ],
)  # fmt: skip
def test_what_is_refused(method, tensors, config, says, tmp_path):
    """The command refuses them too, with the same message."""
    case, own = Case(method), model()
    changed = {name: t for name, t in (case.tensors() | tensors).items() if t is not None}
    write(tmp_path, changed, case.config() | config)
    with pytest.raises(ValueError, match=says) as error:
        load_checkpoint_(own, tmp_path)
    assert type(own[0]) is nn.Linear
    if command := os.environ.get("OCTILE_COMMAND"):
        done = subprocess.run([command, "inspect", str(tmp_path)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1 and done.stderr.splitlines()[-1] == str(error.value)
