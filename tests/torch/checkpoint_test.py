"""load_checkpoint_() and save_checkpoint(): compressed-tensors layouts, read and written, and what is refused."""

import json
import os
import subprocess
import sys

import octile
import pytest
import safetensors.torch
import torch
from octile import (
    W4A8,
    W4A16,
    W8A16,
    Int8Training,
    W8A8Dynamic,
    W8A8Static,
    calibrate,
    load_checkpoint_,
    quantize_,
    save_checkpoint,
)
from torch import nn


class Model(nn.Module):
    """An embedding, which the head shares, and two layers."""

    def __init__(self, device="cpu", dtype=torch.float32):
        super().__init__()
        torch.manual_seed(6)
        self.embed = nn.Embedding(40, 64, device=device, dtype=dtype)
        self.block = nn.Sequential(
            nn.Linear(64, 96, device=device, dtype=dtype), nn.ReLU(),
            nn.Linear(96, 64, bias=False, device=device, dtype=dtype), nn.LayerNorm(64, device=device, dtype=dtype),
        )  # fmt: skip
        self.lm_head = nn.Linear(64, 40, bias=False, device=device, dtype=dtype)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        return self.lm_head(self.block(self.embed(tokens)))


EIGHT = ["grouped", "eight", "eight_grouped"]  # 8 bits: in groups, and with float activations
FOUR = ["four", "row", "integer", "integer_row"]  # 4 bits, the last two with int8 activations
TOKENS = torch.arange(30).reshape(3, 10)


def converted(kind):
    model = Model()
    with torch.no_grad(), calibrate(model, second_moments=True) as calibration:
        model(TOKENS)
    config = {
        "dynamic": W8A8Dynamic(),
        "tensor": W8A8Dynamic(per_channel=False),
        "static": W8A8Static(calibration, smoothing=None),
        "smoothed": W8A8Static(calibration, 0.5),  # a search might find that not smoothing is best
        "four": W4A16(32),
        "feedback": W4A16(32, "feedback", calibration),
        "row": W4A16(0),
        "integer": W4A8(32),
        "integer_row": W4A8(0),
        "grouped": W8A8Dynamic(group=32),
        "eight": W8A16(),
        "eight_grouped": W8A16(32),
    }[kind]
    assert quantize_(model, config).converted == ["block.0", "block.2"]
    return model


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("target", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["dynamic", "tensor", "static", "smoothed", *FOUR, "feedback", *EIGHT])
def test_there_and_back(kind, target, packed, tmp_path):
    model = converted(kind)
    with torch.no_grad():
        y = model(TOKENS)
        if packed:
            octile.pack_(model)
        save_checkpoint(model, tmp_path)
        other = Model(target)
        assert load_checkpoint_(other, tmp_path) is other
        assert torch.equal(other(TOKENS), y) and other.lm_head.weight is other.embed.weight
    assert type(other.block[0]) is type(model.block[0]) and type(other.lm_head) is nn.Linear
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("config", [W8A8Dynamic(), W8A16(), W4A16(32)])
def test_float64_there_and_back(config, tmp_path):
    x, models = torch.randn(3, 64, dtype=torch.float64), [nn.Sequential(nn.Linear(64, 32)).double() for _ in range(2)]
    quantize_(models[0], config)
    save_checkpoint(models[0], tmp_path)
    load_checkpoint_(models[1], tmp_path)
    assert models[1][0].weight_scale.dtype is torch.float64
    assert torch.equal(models[0](x), models[1](x))


def test_the_layouts(tmp_path):
    """Checked byte by byte, as compressed-tensors describes them."""
    model = converted("static")
    save_checkpoint(model, tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items() if n.startswith("block.0")} == {
        "block.0.weight": (torch.int8, (96, 64)),
        "block.0.weight_scale": (torch.float32, (96, 1)),
        "block.0.input_scale": (torch.float32, (1,)),
        "block.0.bias": (torch.float32, (96,)),
    }
    assert "lm_head.weight" not in tensors and "embed.weight" in tensors
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors" and config["format"] == "int-quantized"
    group = config["config_groups"]["group_0"]
    assert config["ignore"] == ["lm_head"] and group["targets"] == ["Linear"]
    assert group["input_activations"] == {
        "num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "tensor"
    }  # fmt: skip
    model = converted("four")
    save_checkpoint(model, tmp_path, force=True)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    words = tensors["block.2.weight_packed"]
    assert words.dtype == torch.int32 and words.shape == (64, 12)
    assert tensors["block.2.weight_shape"].tolist() == [64, 96] and tensors["block.2.weight_scale"].shape == (64, 3)
    # Element i of a row, plus 8, is at bits 4 (i mod 8) to 4 (i mod 8) + 3 of word i / 8.
    value = (words[5, 4].item() >> 12 & 15) - 8
    exact = model.block[2].to_linear().weight[5, 35] / tensors["block.2.weight_scale"][5, 1]
    assert value == round(exact.item())
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    weights = config["config_groups"]["group_0"]["weights"]
    assert (config["format"], weights["num_bits"], weights["group_size"]) == ("pack-quantized", 4, 32)


def test_int_quantized_with_float_activations(tmp_path):
    """Without input_activations a layer multiplies floats, whichever layout the levels are in."""
    model = converted("dynamic")
    save_checkpoint(model, tmp_path)
    change(tmp_path, lambda c: group(c).update(input_activations=None))
    other = load_checkpoint_(Model(), tmp_path)
    assert type(other.block[0]) is octile.W8A16Linear
    assert torch.equal(other.block[0].to_linear().weight, model.block[0].to_linear().weight)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", ["integer", "integer_row", "four"])
def test_int_quantized_of_four_bits(kind, symmetric, tmp_path):
    """A byte for each level and zero point, as llm-compressor writes layers with input_activations."""
    model = converted(kind)
    save_checkpoint(model, tmp_path)
    tensors = dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    for name in ("block.0", "block.2"):
        layer = model.get_submodule(name)
        tensors[f"{name}.weight"] = layer.format.levels(layer.quantized_weight, layer.in_features)
        tensors[f"{name}.weight_zero_point"] = torch.full_like(layer.weight_scale, 0 if symmetric else -3).char()
        del tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_shape"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")

    def int_quantized(config):
        config["format"] = group(config)["format"] = "int-quantized"
        group(config)["weights"]["symmetric"] = symmetric

    change(tmp_path, int_quantized)
    loaded = load_checkpoint_(Model(), tmp_path)
    for name in ("block.0", "block.2"):
        layer, theirs = model.get_submodule(name), loaded.get_submodule(name)
        assert type(theirs) is type(layer) and theirs.zero_point is not symmetric and theirs.group == layer.group
        assert torch.equal(theirs.quantized_weight, layer.quantized_weight)
        assert symmetric or theirs.weight_zero_point.eq(-3).all()
    if COMMAND:
        done = subprocess.run([COMMAND, "inspect", tmp_path, "--json"], capture_output=True, check=True, timeout=60)
        shown = json.loads(done.stdout)["layers"][0]
        assert (shown["kind"], shown["bits"], shown["dynamic_input"]) == ("int-quantized", 4, kind != "four")
        save_checkpoint(loaded, tmp_path / "packed")
        done = command("compare", tmp_path, tmp_path / "packed", "--min-sqnr", "1000")
        assert done[0] == 0, done
    tensors["block.0.weight_zero_point"][0] = 8
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    refused_by_both(tmp_path, "weight_zero_point has 8, which is not a whole number within -8..7")


def test_others_refuse_what_they_would_misread(tmp_path):
    """Layers that multiply their inputs: the same weights without the multiplier give different results."""
    save_checkpoint(converted("smoothed"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["format"] == config["config_groups"]["group_0"]["format"] == "octile"
    theirs = pytest.importorskip("compressed_tensors.quantization").QuantizationConfig
    with pytest.raises(ValueError, match="octile"):
        theirs.model_validate(config)
    config["format"] = config["config_groups"]["group_0"]["format"] = "int-quantized"
    theirs.model_validate(config)


def test_zero_points_and_bf16(tmp_path):
    """As llm-compressor writes an asymmetric W4A16: zero points packed along the outputs, scales in bfloat16."""
    g = torch.Generator().manual_seed(3)
    q, z = torch.randint(0, 16, (96, 64), generator=g), torch.randint(0, 16, (96, 2), generator=g)
    scale = (torch.rand(96, 2, generator=g) + 0.1).bfloat16()

    def words(t):  # along the second dimension
        return sum((t[:, i::8] << (4 * i)) for i in range(8)).to(torch.int64).sub(1 << 32).to(torch.int32)

    save_checkpoint(converted("four"), tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors |= {"block.0.weight_packed": words(q), "block.0.weight_scale": scale}
    tensors["block.0.weight_zero_point"] = words(z.T).T.contiguous()
    tensors["block.2.weight_zero_point"] = words(torch.full((3, 64), 8)).T.contiguous()
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    change(tmp_path, lambda c: c["config_groups"]["group_0"]["weights"].update(symmetric=False))
    model = load_checkpoint_(Model(), tmp_path)
    exact = (q - z.repeat_interleave(32, 1)) * scale.float().repeat_interleave(32, 1)
    assert torch.equal(model.block[0].to_linear().weight, exact)
    folder = tmp_path / "again"
    save_checkpoint(model, folder)
    again = load_checkpoint_(Model(), folder)
    assert torch.equal(again.block[0].to_linear().weight, exact)


class Mixed(nn.Module):
    """A head with one output, as of a reward model, and a layer that occurs twice in the model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.body, self.score = nn.Linear(32, 32), nn.Linear(32, 1)
        self.again = nn.ModuleList([self.body])

    def forward(self, x):
        return self.score(self.again[0](self.body(x)))


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("only_score", [False, True])
def test_one_output_and_two_places(only_score, per_channel, tmp_path):
    """With one output a scale per channel and one per tensor are the same."""
    model, x = Mixed().eval(), torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    wanted = (lambda module, name: name == "score") if only_score else None
    with torch.no_grad():
        quantize_(model, W8A8Dynamic(per_channel=per_channel), wanted)
        save_checkpoint(model, tmp_path)
        strategy = "channel" if per_channel or only_score else "tensor"
        config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
        assert group(config)["weights"]["strategy"] == strategy
        tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
        assert tensors["score.weight_scale"].shape == ((1, 1) if strategy == "channel" else (1,))
        assert not any(name.startswith("again") for name in tensors)
        other = load_checkpoint_(Mixed().eval(), tmp_path)
        assert torch.equal(other(x), model(x)) and other.again[0] is other.body


@pytest.mark.parametrize("kind", ["dynamic", "static", "four"])
def test_zero_points_of_symmetric_layers(kind, tmp_path):
    """Older files may contain one that is zero; others would be ignored by some readers."""
    save_checkpoint(converted(kind), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = dict(safetensors.torch.load_file(path))
    with_zeros = tensors | {"block.0.weight_zero_point": torch.zeros(96, 1, dtype=torch.int8)}
    if kind == "static":
        with_zeros["block.0.input_zero_point"] = torch.zeros(1, dtype=torch.int8)
    safetensors.torch.save_file(with_zeros, path)
    if kind == "four":
        with pytest.raises(
            ValueError, match='"block.0": has a weight_zero_point, and quantization_config says symmetric'
        ):
            load_checkpoint_(Model(), tmp_path)
        return
    assert type(load_checkpoint_(Model(), tmp_path).block[0]) is not nn.Linear
    for name in with_zeros.keys() - tensors.keys():
        changed = with_zeros[name].clone()
        changed[-1] = -3
        safetensors.torch.save_file(with_zeros | {name: changed}, path)
        with pytest.raises(
            ValueError, match=rf"{name.split('.')[-1]} holds -3, and quantization_config says symmetric"
        ):
            load_checkpoint_(Model(), tmp_path)


def test_the_most_specific_target(tmp_path):
    """In any order of the groups, and as compressed-tensors reads them."""
    save_checkpoint(converted("tensor"), tmp_path)
    match = pytest.importorskip("compressed_tensors.utils.match")
    known = group(json.loads((tmp_path / "config.json").read_text())["quantization_config"])
    bits = {"Linear": 8, "re:.*block": 2, "re:.*0": 3, "block.0": 5, "Module": 6, "block": 7}
    for chosen in (list(bits), list(bits)[::-1], ["re:block.0", "Linear"], ["Module"]):
        groups = {
            target: known | {"targets": [target], "weights": known["weights"] | {"num_bits": bits.get(target, 9)}}
            for target in chosen
        }
        change(tmp_path, lambda c, groups=groups: c.update(config_groups=groups))
        first = match.match_targets("block.0", Model().block[0], chosen)[0]
        with pytest.raises(ValueError, match=f'"block.0": weights of {bits.get(first, 9)} bits'):
            load_checkpoint_(Model(), tmp_path)


def test_transforms_of_weights(tmp_path):
    """They are in the weights."""
    model = converted("dynamic")
    save_checkpoint(model, tmp_path)
    for config in (
        {},
        {"config_groups": {"R1": {"apply": [{"location": "weight_input"}, {"location": "weight_output"}]}}},
    ):
        change(tmp_path, lambda c, config=config: c.update(transform_config=config))
        assert torch.equal(load_checkpoint_(Model(), tmp_path).block[0].weight, model.block[0].weight)


def test_shards(tmp_path):
    model = converted("dynamic")
    save_checkpoint(model, tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    index = {}
    for i, part in enumerate((names[:3], names[3:])):
        safetensors.torch.save_file({name: tensors[name] for name in part}, tmp_path / f"model-{i}.safetensors")
        index |= dict.fromkeys(part, f"model-{i}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with torch.no_grad():
        assert torch.equal(load_checkpoint_(Model(), tmp_path)(TOKENS), model(TOKENS))
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match="cannot read .*model-1.safetensors: No such file"):
        load_checkpoint_(Model(), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(
        ValueError, match='"a" would be in "../a.safetensors", which is not the name of a file in this folder'
    ):
        load_checkpoint_(Model(), tmp_path)


class Tables(nn.Module):
    """No parameter but those of a linear layer, and a buffer that two modules share."""

    def __init__(self, values=0.0, device=None):
        super().__init__()
        self.linear, self.inner = nn.Linear(64, 32, device=device), nn.Module()
        self.register_buffer("table", torch.full((5,), values, device=device))
        self.inner.register_buffer("table", self.table)
        self.register_buffer("own", torch.full((3,), values, device=device))


def test_buffers_of_a_model_on_the_meta_device(tmp_path):
    model = Tables(7.0)
    quantize_(model, W8A8Dynamic())
    save_checkpoint(model, tmp_path)
    other = load_checkpoint_(Tables(device="meta"), tmp_path)
    assert torch.equal(other.own, model.own) and torch.equal(other.table, model.table)
    assert other.inner.table is other.table


@pytest.mark.parametrize("kind", ["dynamic", "static", "four"])
@pytest.mark.parametrize("target", ["cpu", "meta"])
def test_what_a_user_has_registered(kind, target, tmp_path):
    """In a layer that is quantized."""

    def registered(model, values):
        layer = model.block[0]
        layer.register_buffer("mask", torch.full((96,), values, device=layer.weight.device))
        layer.gain = nn.Parameter(torch.full((2,), values, device=layer.weight.device))
        return model

    model = registered(converted(kind), 3.0)
    save_checkpoint(model, tmp_path)
    other = load_checkpoint_(registered(Model(target), 0.0), tmp_path).block[0]
    assert type(other) is type(model.block[0])
    assert torch.equal(other.mask, model.block[0].mask) and torch.equal(other.gain, model.block[0].gain)
    with pytest.raises(ValueError, match=r"the model has no block\.0\.(gain|mask), block\.0\.(gain|mask)"):
        load_checkpoint_(Model(target), tmp_path)
    save_checkpoint(converted(kind), tmp_path, force=True)
    with pytest.raises(ValueError, match=r"there is no block\.0\.(gain|mask), block\.0\.(gain|mask)"):
        load_checkpoint_(registered(Model(target), 0.0), tmp_path)


def test_types_of_a_model_on_the_meta_device(tmp_path):
    """They are the model's, as elsewhere."""
    model = converted("dynamic")
    save_checkpoint(model, tmp_path)
    models = [load_checkpoint_(Model(target).bfloat16(), tmp_path) for target in ("cpu", "meta")]
    first, second = (
        {name: (t.dtype, t.requires_grad) for name, t in m.state_dict(keep_vars=True).items()} for m in models
    )
    assert first == second and first["embed.weight"] == (torch.bfloat16, True)


def test_buffers_that_the_model_makes_itself(tmp_path):
    """Files of older programs contain them."""
    save_checkpoint(converted("dynamic"), tmp_path)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(path) | {"positions": torch.zeros(5)}, path)
    model = Model()
    model.register_buffer("positions", torch.arange(5.0), persistent=False)
    load_checkpoint_(model, tmp_path)
    assert torch.equal(model.positions, torch.arange(5.0))
    model = Model("meta")
    model.register_buffer("positions", torch.empty(5, device="meta"), persistent=False)
    with pytest.raises(ValueError, match="positions would stay on the meta device.*real buffers"):
        load_checkpoint_(model, tmp_path)
    assert type(model.block[0]) is nn.Linear


def change(folder, how):
    config = json.loads((folder / "config.json").read_text())
    how(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))


def group(config):
    return config["config_groups"]["group_0"]


def put(**values):
    def how(tensors):
        for name, value in values.items():
            name = name.replace("__", ".")
            if value is None:
                del tensors[name]
            else:
                tensors[name] = value

    return how


COMMAND = os.environ.get("OCTILE_COMMAND")


def refused(path, says, model=None):
    """Tries to load an invalid checkpoint; returns the error's text. The model must not change."""
    model = model or Model()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=says) as error:
        load_checkpoint_(model, path)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert type(model.block[0]) is nn.Linear
    return str(error.value)


def command(verb, *arguments):
    """The command's exit status and output, or None if it is not built."""
    if not COMMAND:
        return None
    done = subprocess.run([COMMAND, verb, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


def refused_by_both(path, says):
    """By load_checkpoint_() and by the command, with the same message."""
    text = refused(path, says)
    assert "\x1b" not in text
    for verb, arguments in (("inspect", [path]), ("compare", [path, path])):
        done = command(verb, *arguments)
        assert done is None or (done[0] == 1 and done[1].splitlines()[-1] == text), (done, text)


def written(kind, config, tensors, folder):
    save_checkpoint(converted(kind), folder)
    if config:
        change(folder, config)
    if tensors:
        path = folder / "model.safetensors"
        changed = dict(safetensors.torch.load_file(path))
        tensors(changed)
        safetensors.torch.save_file(changed, path)


def transforms(apply):
    """A transform_config, as llm-compressor writes it for SpinQuant and QuIP."""
    return lambda c: c.update(transform_config={"config_groups": {"R4": {"type": "hadamard", "apply": apply}}})


def weights(**values):
    return lambda c: group(c)["weights"].update(values)


def inputs(**values):
    return lambda c: group(c)["input_activations"].update(values)


@pytest.mark.parametrize(
    ("kind", "config", "tensors", "says"),
    [
        ("dynamic", lambda c: c.update(quant_method="fp8"), None, 'quant_method is "fp8", expected compressed-tensors, awq or gptq'),
        ("dynamic", lambda c: c.update(quant_method=None), None, 'has no "quant_method"'),
        ("dynamic", lambda c: c.update(quant_method="gptq", bits=4), None, '"block.0": is int-quantized, and quant_method is "gptq"'),
        ("dynamic", lambda c: c.update(format="marlin-24"), None, 'format is "marlin-24", expected one of '),
        ("four", lambda c: (c.update(format="int-quantized"), group(c).pop("format")), None, 'is pack-quantized, and quantization_config says "int-quantized"'),
        ("dynamic", lambda c: group(c).update(format="nvfp4-pack-quantized"), None, "group_0: format is"),
        ("dynamic", lambda c: c.pop("config_groups"), None, "has no config_groups"),
        ("dynamic", lambda c: c["config_groups"].update(group_0=[]), None, "has no config_groups"),
        ("dynamic", lambda c: c["config_groups"].update(group_0="Linear"), None, "has no config_groups"),
        ("dynamic", lambda c: group(c).update(weights=[1]), None, '"weights" is not an object'),
        ("dynamic", lambda c: group(c).update(weights="int8"), None, '"weights" is not an object'),
        ("dynamic", lambda c: group(c).update(weights=None), None, '"block.0": its group of quantization_config has no weights'),
        ("dynamic", lambda c: group(c).update(input_activations=[]), None, '"input_activations" is not an object'),
        ("dynamic", lambda c: group(c).update(output_activations={"num_bits": 8}), None, 'group_0: "output_activations" is not null'),
        ("dynamic", lambda c: c.update(transform_config=[]), None, '"transform_config" is not an object'),
        ("dynamic", transforms([{"location": "weight_input"}, {"location": "input"}]), None, 'R4: "location" is "input", and transforms of activations'),
        ("dynamic", transforms([{"location": "k_cache"}]), None, 'transform_config: config_groups: R4: "location" is "k_cache"'),
        ("dynamic", transforms([{}]), None, '"location" is ""'),
        ("dynamic", transforms({}), None, '"apply" is not a list'),
        ("dynamic", transforms([1]), None, '"apply" is not a list of objects'),
        ("dynamic", weights(num_bits="8"), None, '"num_bits" is not an integer'),
        ("dynamic", weights(num_bits=8.5), None, '"num_bits" is not an integer'),
        ("dynamic", weights(num_bits=1 << 70), None, '"num_bits" is not an integer'),
        ("dynamic", weights(type=[]), None, '"type" is not a string'),
        ("dynamic", weights(symmetric="yes"), None, '"symmetric" is neither true nor false'),
        ("dynamic", weights(strategy={}), None, '"strategy" is not a string'),
        ("dynamic", inputs(dynamic=1), None, '"dynamic" is neither true nor false'),
        ("dynamic", lambda c: group(c).update(targets=["re:other"]), None, '"block.[02]": no group of quantization_config matches it'),
        ("dynamic", lambda c: group(c).update(targets=["re:("]), None, r'the target "re:\(" is not a supported regular expression'),
        ("dynamic", lambda c: group(c).update(targets=["re:(?=a)"]), None, "a group that looks around or sets flags, which is not read"),
        ("dynamic", lambda c: group(c).update(targets="Linear"), None, 'group_0: "targets" is not a list of names'),
        ("dynamic", lambda c: c.update(ignore=[1]), None, '"ignore" is not a list of names'),
        ("dynamic", lambda c: c.update(ignore=["re:.*2"]), None, '"block.2": it is quantized, and quantization_config ignores "re:.*2"'),
        ("dynamic", None, put(block__0__weight_shape=torch.tensor([96, 64])), '"block.0": weight_shape does not belong to layers of this scheme'),
        ("dynamic", None, put(block__0__weight_g_idx=torch.arange(64)), '"block.0": weight_g_idx does not belong to layers of this scheme'),
        ("dynamic", None, put(block__0__input_scale=torch.ones(1)), '"block.0": input_scale does not belong to layers of this scheme'),
        ("dynamic", None, put(block__0__input_multiplier=torch.ones(64)), '"block.0": input_multiplier does not belong to layers of this scheme'),
        ("dynamic", weights(num_bits=2), None, "weights of 2 bits"),
        ("dynamic", weights(num_bits=None), None, "weights of no bits"),
        ("dynamic", weights(num_bits=4), None, '"block.[02]": weight holds -?[0-9]+, and quantization_config says num_bits 4'),
        ("tensor", weights(num_bits=4), None, '4-bit weights per "tensor", expected group or channel'),
        ("four", weights(num_bits=8), None, "weight_packed holds 4 bits each, and quantization_config says num_bits 8"),
        ("dynamic", weights(type="float"), None, 'type "float", expected int of 4 or 8'),
        ("dynamic", weights(symmetric=False), None, '"block.0": has no weight_zero_point'),
        ("four", weights(group_size=16), None, r'"block.0": weight_scale is F32 \(96, 2\), expected a float type \(96, 4\)'),
        ("four", weights(group_size=64), put(block__0__weight_scale=torch.ones(96, 1)), "groups of 64 do not divide its 96 inputs"),
        ("four", weights(group_size=0), None, "groups of 0 do not divide"),
        ("four", weights(strategy="tensor"), None, '4-bit weights per "tensor", expected group or channel'),
        ("four", weights(symmetric=False), None, '"block.[02]": has no weight_zero_point'),
        ("dynamic", None, put(block__0__weight=torch.ones(96, 64)), r'"block.0": weight is F32 \(96, 64\), expected I8'),
        ("dynamic", None, put(block__0__weight=None), '"block.0": has a weight_scale and no weight'),
        ("dynamic", None, put(block__0__weight_scale=torch.ones(95, 1)), r"weight_scale is F32 \(95, 1\), expected a float type"),
        ("dynamic", None, put(block__0__weight_scale=torch.ones(1, 96)), r"weight_scale is F32 \(1, 96\), expected a float type"),
        ("dynamic", None, put(block__0__weight_scale=torch.ones(96, 1).int()), r"weight_scale is I32 \(96, 1\), expected a float type"),
        ("dynamic", None, put(block__0__weight_scale=torch.zeros(96, 1)), "weight_scale holds 0; scales are finite and above 0"),
        ("tensor", None, put(block__0__weight_scale=torch.tensor([-1.0])), "weight_scale holds -1; scales are finite and above 0"),
        ("static", None, put(block__0__input_scale=torch.tensor([torch.nan])), "input_scale holds nan"),
        ("static", None, put(block__0__input_scale=torch.ones(2)), r"input_scale is F32 \(2\), expected"),
        ("static", None, put(block__0__input_scale=None), '"block.0": has no input_scale'),
        ("smoothed", None, put(block__0__input_multiplier=torch.ones(63)), r"input_multiplier is F32 \(63\), expected a float type \(64\)"),
        ("smoothed", None, put(block__0__input_multiplier=torch.zeros(64)), "input_multiplier holds 0"),
        ("dynamic", None, put(block__0__bias=torch.ones(95)), r"bias is F32 \(95\), expected a float type \(96\)"),
        ("dynamic", None, put(block__9__weight_scale=torch.ones(1)), '"block.9": has a weight_scale and no weight'),
        ("four", None, put(block__0__weight_g_idx=torch.zeros(64).int()), '"block.0": g_idx puts input 32 in group 0, not 1'),
        ("four", None, put(block__0__weight_g_idx=torch.zeros(64)), r"weight_g_idx is F32 \(64\), expected I32 \(64\)"),
        ("four", None, put(block__0__weight_shape=None), '"block.0": has no weight_shape'),
        ("four", None, put(block__0__weight_shape=torch.tensor([96, 60])), "groups of 32 do not divide its 60 inputs"),
        ("four", None, put(block__0__weight_packed=torch.ones(96, 7).int()), r"weight_packed \(96, 7\) does not hold 4 or 8 bits each"),
        ("four", None, put(block__0__weight_scale=torch.ones(96, 1)), r"weight_scale is F32 \(96, 1\), expected a float type \(96, 2\)"),
        ("four", None, put(block__0__weight_scale=-torch.ones(96, 2)), "weight_scale holds -1"),
    ],
)  # fmt: skip
def test_what_is_refused(kind, config, tensors, says, tmp_path):
    written(kind, config, tensors, tmp_path)
    refused_by_both(tmp_path, says)


@pytest.mark.parametrize(
    ("kind", "config", "tensors", "says"),
    [
        ("dynamic", weights(symmetric=False), put(block__0__weight_zero_point=torch.ones(96, 1), block__2__weight_zero_point=torch.ones(64, 1)), "8-bit weights with zero points"),
        ("dynamic", weights(strategy="group", group_size=16), put(block__0__weight_scale=torch.ones(96, 4), block__2__weight_scale=torch.ones(64, 6)), "8-bit weights in groups of 16"),
        ("dynamic", inputs(num_bits=4), None, "activations of 4 bits"),
        ("dynamic", inputs(symmetric=False), None, "with a zero point"),
        ("dynamic", inputs(strategy="tensor"), None, "dynamic per tensor, expected dyn"),
        ("static", inputs(strategy="token"), None, "activations static per tok"),
        ("integer", inputs(strategy="tensor", dynamic=False), put(block__0__input_scale=torch.ones(1), block__2__input_scale=torch.ones(1)), "4-bit weights in groups with static activations"),
        ("integer", inputs(type="float"), None, "activations of 8 bits, type float, expected 8 bits, type int"),
        ("four", weights(group_size=16), put(block__0__weight_scale=torch.ones(96, 4), block__2__weight_scale=torch.ones(64, 6)), "in groups of 16, expected groups of 32, 64 or 128"),
        ("dynamic", None, put(block__0__weight=torch.ones(96, 60).char()), r"block.0 is \(96, 60\), and the model's layer \(96, 64\)"),
        ("dynamic", None, put(block__0__bias=None), "the model has a bias, the checkpoint does not"),
        ("dynamic", None, put(block__2__bias=torch.ones(64)), "the checkpoint has a bias, the model does not"),
        ("dynamic", None, put(block__9__weight=torch.ones(4, 4).char(), block__9__weight_scale=torch.ones(1)), "block.9 is a .* the model has no such layer"),
        ("dynamic", None, put(embed__weight=torch.ones(40, 64).char(), embed__weight_scale=torch.ones(1)), "embed is a quantized.*the model has a Embedding"),
        ("dynamic", None, put(block__0__weight_scale=None), "block.0.weight is torch.int8, but in the model torch.float32"),
        ("dynamic", None, put(other=torch.ones(1)), "the model has no other"),
        ("dynamic", None, put(block__3__weight=None), "there is no block.3.weight"),
        ("dynamic", None, put(block__3__weight=torch.ones(63)), r"block.3.weight is \(63,\), but in the model \(64,\)"),
        ("dynamic", None, put(block__3__weight=torch.ones(64).char()), "block.3.weight is torch.int8, but in the model torch.float32"),
    ],
)  # fmt: skip
def test_what_the_command_reads_and_no_layer_here(kind, config, tensors, says, tmp_path):
    """Schemes that no layer computes, and what does not fit the model; the command checks neither."""
    written(kind, config, tensors, tmp_path)
    refused(tmp_path, says)
    assert (command("inspect", tmp_path) or (0,))[0] == 0


def test_names_that_a_terminal_would_obey(tmp_path):
    written("dynamic", None, put(**{"x\x1b[2J\u202e\x9b": torch.ones(1)}), tmp_path)
    assert refused(tmp_path, "the model has no").endswith(
        "the model has no x?[2J??; see docs/how-to/errors.md#checkpoints"
    )
    written("dynamic", None, put(**{"\u200f\x9b.weight_scale": torch.ones(1)}), tmp_path / "two")
    refused_by_both(tmp_path / "two", r'"\?\?": has a weight_scale and no weight')


@pytest.mark.parametrize(
    ("targets", "fits"),
    [
        (["re:block.*"], True),
        (["re:.*\\.(0|2)$"], True),
        (["re:^block\\.[0-9]+$"], True),
        (["re:(?:model\\.)?block\\.\\d"], True),
        (["re:b{1,2}l?o+ck[.](?P<i>[^a-z]|x)"], True),
        (["re:lock"], False),
        (["re:block.0.", "block.2"], False),
        (["re:(block)+\\b\\.\\w\\Z"], True),
        (["re:" + "a?" * 200 + "b"], True),
    ],
)
def test_expressions(targets, fits, tmp_path):
    """With the semantics of Python's re.match, from the beginning of a name."""
    import re

    written("dynamic", lambda c: group(c).update(targets=targets), None, tmp_path)
    names = ["block.0", "block.2"]
    assert fits == all(any(t == n or (t[:3] == "re:" and re.match(t[3:], n)) for t in targets) for n in names)
    if fits:
        load_checkpoint_(Model(), tmp_path)
    else:
        refused_by_both(tmp_path, "no group of quantization_config matches it")


def test_expressions_take_linear_time(tmp_path):
    """Python's own matcher would take years. Many of them for many long names are refused."""
    for evil in ("re:(b|bl|o|lo|c|k|.)*(a|aa)+$x", "re:(b*)*(l*o*)*((c|k)*)*y", "re:(.*)*(.*)*(.*)*z"):
        written("dynamic", lambda c, evil=evil: group(c).update(targets=[evil]), None, tmp_path / str(hash(evil)))
        refused_by_both(tmp_path / str(hash(evil)), "no group of quantization_config matches it")
    many = {f"{'b' * 1000}{i}.weight": torch.ones(1, 1).char() for i in range(100)}
    many |= {name + "_scale": torch.ones(1) for name in list(many)}
    evil = ["Linear"] + [f"re:(b?b?)*x{i}" for i in range(5000)]
    written("dynamic", lambda c: group(c).update(targets=evil), put(**many), tmp_path / "many")
    refused(tmp_path / "many", "its regular expressions take too long")


def test_a_lone_file(tmp_path):
    """As `octile quantize` writes a single file: the config is in the metadata."""
    model, path = converted("four"), tmp_path / "x.safetensors"
    save_checkpoint(model, tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    config = json.dumps(json.loads((tmp_path / "config.json").read_text())["quantization_config"])
    safetensors.torch.save_file(tensors, path, {"quantization_config": config})
    other = load_checkpoint_(Model(), path)
    with torch.no_grad():
        assert torch.equal(other(TOKENS), model(TOKENS))
    assert other.block[0].group == 32
    for metadata, says in (
        (None, "x.safetensors: its metadata has no quantization_config"),
        ({"quantization_config": "{"}, r"x.safetensors: quantization_config: not JSON \(byte 2\)"),
        ({"quantization_config": "[]"}, "x.safetensors: quantization_config: not a JSON object"),
        ({"quantization_config": "{}"}, 'x.safetensors: quantization_config has no "quant_method"'),
    ):
        safetensors.torch.save_file(tensors, path, metadata)
        with pytest.raises(ValueError, match=says):
            load_checkpoint_(Model(), path)


def test_the_models_config(tmp_path):
    """Servers need the architecture and the type, which a model created from a config has not recorded in it."""

    class Config:
        def __init__(self, **values):
            self.values = values

        def to_json_string(self):
            return json.dumps(self.values)

    def written(**values):
        model = converted("dynamic")
        model.config, model.dtype = Config(**values), torch.bfloat16
        save_checkpoint(model, tmp_path, force=True)
        config = json.loads((tmp_path / "config.json").read_text())
        del config["quantization_config"]
        return config

    assert written(a=1) == {"a": 1, "architectures": ["Model"], "dtype": "bfloat16"}
    assert written(architectures=["B"], torch_dtype="float32") == {"architectures": ["B"], "torch_dtype": "float32"}


def test_an_index_beside_the_file(tmp_path):
    save_checkpoint(converted("dynamic"), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {}}')
    with pytest.raises(ValueError, match="has both model.safetensors and model.safetensors.index.json"):
        load_checkpoint_(Model(), tmp_path)
    with pytest.raises(FileExistsError):
        save_checkpoint(converted("dynamic"), tmp_path)
    save_checkpoint(converted("dynamic"), tmp_path, force=True)
    assert not index.exists()
    load_checkpoint_(Model(), tmp_path)


def test_a_tensor_in_two_files(tmp_path):
    save_checkpoint(converted("dynamic"), tmp_path)
    whole = tmp_path / "model.safetensors"
    (tmp_path / "a.safetensors").write_bytes(whole.read_bytes())
    whole.rename(tmp_path / "b.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="is in a.safetensors and in b.safetensors"):
        load_checkpoint_(Model(), tmp_path)


def test_files_that_are_none(tmp_path):
    refused_by_both(tmp_path, "has neither model.safetensors nor model.safetensors.index.json")
    refused_by_both(tmp_path / "none", "cannot read .*none: No such file")
    save_checkpoint(converted("dynamic"), tmp_path, force=True)
    config = (tmp_path / "config.json").read_bytes()
    deep = b'{"a":' + b"[" * 100_000
    for text, says in (
        (b"{", "config.json: not JSON"), (b"[]", "not a JSON object"), (deep, "deeper than 64 levels"),
        (b'{"a": 1, "a": 2}', '"a" appears twice'), (b'{"a": "\xff"}', "not JSON"), (b'{"quantization_config": []}', "not an object"),
        (b" " * 16_000_001, "more than 16000000 bytes of JSON"), (b'{"a": [' + b"0," * 1_000_001 + b"0]}", "more than 1000000 values"),
    ):  # fmt: skip
        (tmp_path / "config.json").write_bytes(text)
        refused_by_both(tmp_path, says)
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "config.json has no quantization_config: the checkpoint is not quantized")
    (tmp_path / "config.json").unlink()
    refused(tmp_path, "has no quantization_config")
    (tmp_path / "config.json").write_bytes(config)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-9])
    refused_by_both(tmp_path, "model.safetensors: truncated")
    safetensors.torch.save_file(
        dict(Model().state_dict(), **{"lm_head.weight": torch.ones(1)}), tmp_path / "model.safetensors"
    )
    refused(tmp_path, "holds no quantized layer")


def test_files_that_are_no_files(tmp_path):
    """Pipes are not opened, and no shard's name leads out of the folder."""
    save_checkpoint(converted("dynamic"), tmp_path)
    config, whole = tmp_path / "config.json", tmp_path / "model.safetensors"
    text = config.read_bytes()
    for path in (config, whole):
        content = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        refused_by_both(tmp_path, f"cannot read .*{path.name}: it is not a file")
        path.unlink()
        path.mkdir()
        refused_by_both(tmp_path, f"cannot read .*{path.name}: it is not a file")
        path.rmdir()
        path.write_bytes(content)
    assert config.read_bytes() == text
    whole.rename(tmp_path / "a.safetensors")
    names = list(safetensors.torch.load_file(tmp_path / "a.safetensors"))
    index = tmp_path / "model.safetensors.index.json"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for shard, says in (
        ("..", "which is not the name of a file in this folder"), (".", "not the name of a file"), ("", "not the name of a file"),
        ("folder", "cannot read .*folder: it is not a file"), ("pipe", "cannot read .*pipe: it is not a file"),
        ("x" * 300, "cannot read .*xxx.*: File name too long"), ("/etc/passwd", "not the name of a file"), ("a/../a.safetensors", "not the name of a file"),
        ("a\0b", "not the name of a file"), (7, "the file of .* is not a string"), (None, "is not a string"), ([], "is not a string"), ({}, "is not a string"),
    ):  # fmt: skip
        index.write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))
        refused_by_both(tmp_path, says)
    for text, says in (
        ("{}", 'there is no object "weight_map"'), ('{"weight_map": []}', 'no object "weight_map"'),
        ('{"weight_map": {}}', '"weight_map" is empty'), ('{"weight_map": {"a": "a", "a": "a"}}', '"a" appears twice'),
        ("[" * 100_000, "not a JSON object"), ('{"a":' * 100_000, "deeper than 64 levels"),
    ):  # fmt: skip
        index.write_text(text)
        refused_by_both(tmp_path, says)
    with pytest.raises(ValueError, match="is not a path: it contains a zero byte"):
        load_checkpoint_(Model(), "a\0b")


def test_what_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="the model has no quantized layer"):
        save_checkpoint(Model(), tmp_path)
    model = Model()
    quantize_(model, Int8Training())
    with pytest.raises(ValueError, match="layers are for training, with float weights: .* for inference first"):
        save_checkpoint(model, tmp_path)
    model = converted("dynamic")
    model.block[0] = converted("four").block[0]
    with pytest.raises(ValueError, match="layers of several kinds.*W4A16Linear.*W8A8Linear"):
        save_checkpoint(model, tmp_path)
    for kind, name in (("dynamic", "block.0.bias"), ("four", "block.0.bias"), ("dynamic", "embed.weight")):
        model = converted(kind)
        model.get_submodule(name.rpartition(".")[0]).to("meta")
        with pytest.raises(ValueError, match=f"octile: {name} is on the meta device: it has no values to write"):
            save_checkpoint(model, tmp_path / "none")
    for kind in ("dynamic", "four", "static"):
        model = converted(kind)
        model.block[0].refit_(torch.full((96, 64), torch.nan))
        with pytest.raises(ValueError, match="block.0.weight_scale holds nan; scales are finite and above 0"):
            save_checkpoint(model, tmp_path / "none")
    assert list(tmp_path.iterdir()) == []
    save_checkpoint(converted("dynamic"), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="force=True overwrites it"):
        save_checkpoint(converted("four"), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("kind", ["dynamic", "tensor", "static", *FOUR, *EIGHT])
def test_compressed_tensors_reads_them(kind, tmp_path):
    """The package's own decompression gives the same values as our layers."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model = converted(kind)
    save_checkpoint(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for name in ("block.0", "block.2"):
        own = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
        weight = compressor.decompress(own, scheme)["weight"]
        assert torch.equal(weight, model.get_submodule(name).to_linear().weight)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 32)
        self.embedding, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight.data = self.embedding.weight.data
        self.register_buffer("square", torch.randn(4, 4))
        self.register_buffer("turned", self.square.t())


def test_tensors_that_share_memory(tmp_path):
    model = Shared()
    octile.quantize_(model, W8A8Dynamic(), lambda module, name: name == "linear")
    octile.save_checkpoint(model, tmp_path)
    other = Shared()
    load_checkpoint_(other, tmp_path)
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in model.state_dict().items())


def test_what_a_file_cannot_hold(tmp_path):
    layer = nn.Linear(64, 32)
    octile.quantize_(layer, W8A8Dynamic())
    with pytest.raises(ValueError, match="the model is one layer"):
        octile.save_checkpoint(layer, tmp_path)

    class Extra(nn.Identity):
        def get_extra_state(self):
            return {"steps": 3}

    with pytest.raises(ValueError, match="1._extra_state is a dict"):
        octile.save_checkpoint(nn.Sequential(layer, Extra()), tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_loaded_is_a_view_of_the_file(tmp_path):
    model = nn.Sequential(nn.Linear(64, 32))
    octile.quantize_(model, W8A8Dynamic())
    octile.save_checkpoint(model, tmp_path)
    loaded = nn.Sequential(nn.Linear(64, 32))
    load_checkpoint_(loaded, tmp_path)
    file = tmp_path / "model.safetensors"
    with open(file, "r+b") as written:
        written.write(bytes(file.stat().st_size))
    assert all(torch.equal(t, loaded.state_dict()[name]) for name, t in model.state_dict().items())
