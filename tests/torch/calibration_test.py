"""calibrate(): the statistics of layers' inputs, compared with the library's Calibrator, and their file."""

import json
import os
import resource
import stat
import sys

import octile
import pytest
import torch
from octile import Calibration, _plans, calibrate
from octile.calibration import InputStatistics, replacing, save_safetensors
from torch import nn

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


class Twice(nn.Module):
    """A layer that runs twice, one that is called by keyword, and one that never runs."""

    def __init__(self, dtype=torch.float32, device="cpu"):
        super().__init__()
        self.first = nn.Linear(16, 16, dtype=dtype, device=device)
        self.by_name = nn.Linear(16, 8, dtype=dtype, device=device)
        self.idle = nn.Linear(16, 8, dtype=dtype, device=device)

    def forward(self, x):
        return self.by_name(input=self.first(torch.relu(self.first(x))))


def inputs(generator, device="cpu", dtype=torch.float32, sizes=((5, 16), (2, 3, 16), (0, 16))):
    return [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]


def watched(model, batches, **more):
    with torch.no_grad(), calibrate(model, **more) as calibration:
        for x in batches:
            model(x)
    return calibration


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_as_the_library(dtype, device, generator):
    model, batches = Twice(dtype, device), inputs(generator, device, dtype)
    seen = []
    model.by_name.register_forward_pre_hook(lambda _, a, k: seen.append(k["input"].detach()), with_kwargs=True)
    calibration = watched(model, batches, second_moments=True, samples=4)
    assert list(calibration) == ["first", "by_name", "idle"] and calibration["first"].rows == 22
    rows = torch.cat([x.reshape(-1, 16) for x in seen])
    theirs = _plans.library().calibrator(16, second_moments=True)
    host = rows.cpu().contiguous()
    theirs.observe(_plans.view(host))
    channel_max, moments = torch.empty(16), torch.empty(16, 16, dtype=torch.float64)
    theirs.channel_max(_plans.view(channel_max))
    theirs.second_moments(_plans.view(moments))
    ours = calibration["by_name"]
    assert ours.rows == theirs.rows == 11 and ours.max.item() == theirs.max
    assert ours.channel_max.device == rows.device and torch.equal(ours.channel_max.cpu(), channel_max)
    # Sums of 11 products in float32, of 16-bit factors exact ones: Higham's gamma(11) times the sum of magnitudes.
    bound = 12 * 2.0**-24 * (host.double().abs().T @ host.double().abs())
    assert ((ours.second_moments.cpu() - moments).abs() <= bound).all()
    assert ours.samples.shape == (4, 16) and all((rows == row).all(1).any() for row in ours.samples)


def test_samples_are_drawn_evenly():
    """Each of 400 rows is kept with probability 100 / 400, whichever batch it came in."""
    model = nn.Sequential(nn.Linear(1, 1))
    batches = torch.arange(400.0).reshape(-1, 1).split([1, 99, 250, 50])
    samples = watched(model, batches, samples=100)["0"].samples.flatten()
    assert len(samples) == 100 and len(samples.unique()) == 100
    assert torch.equal(samples, watched(model, batches, samples=100)["0"].samples.flatten())
    # 62.5 expected of the third batch; 4.3 a standard deviation, 5 of them allowed.
    assert 41 <= ((samples >= 100) & (samples < 350)).sum() <= 84
    assert watched(model, batches[:2], samples=500)["0"].samples.shape == (100, 1)
    assert watched(model, batches, samples=0)["0"].samples is None


def test_hooks_go_and_modes_do_not_matter(device, generator):
    model, batches = Twice(device=device), inputs(generator, device)
    plain = watched(model, batches, second_moments=True)
    with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=False):
        again = watched(model, batches, second_moments=True)
    for name in ("first", "by_name"):
        assert torch.equal(plain[name].channel_max, again[name].channel_max)
        assert torch.equal(plain[name].second_moments, again[name].second_moments)
        assert not again[name].second_moments.is_inference()
    with torch.autocast(device.type, torch.bfloat16), calibrate(model, second_moments=True) as calibration:
        model(batches[0])
    x = batches[0].double()
    assert torch.allclose(
        calibration["first"].second_moments, (x.T @ x) + _of_second_call(model, x), rtol=0.02, atol=0.05
    )
    assert not any(module._forward_pre_hooks for module in model.modules())
    with pytest.raises(ZeroDivisionError), calibrate(model):
        raise ZeroDivisionError
    assert not any(module._forward_pre_hooks for module in model.modules())
    with calibrate(model, filter=lambda module, name: name == "by_name") as calibration:
        model(batches[0])
    assert list(calibration) == ["by_name"] and "1 layers, 5 rows" in repr(calibration)


def _of_second_call(model, x):
    second = torch.relu(model.first.double()(x)).detach()
    model.float()
    return second.T @ second


def test_what_is_not_finite_is_never_hidden(device, generator):
    for bad in (torch.nan, torch.inf, -torch.inf):
        model, batches = nn.Sequential(nn.Linear(16, 4, device=device)), inputs(generator, device)
        batches[0][2, 5] = bad
        calibration = watched(model, batches, second_moments=True)
        assert calibration["0"].channel_max.isnan().nonzero().flatten().tolist() == [5]
        assert calibration["0"].max.isnan() and calibration["0"].second_moments[5].isnan().all()
        for use in (
            lambda: calibration.save("never"),
            lambda: octile.quantize_(model, octile.W8A8Static(calibration)),
        ):
            with pytest.raises(ValueError, match="a NaN or an infinity came into 0 during calibration"):
                use()
        assert type(model[0]) is nn.Linear
    large = watched(
        nn.Sequential(nn.Linear(16, 4, dtype=torch.float64)), [torch.full((1, 16), 1e300, dtype=torch.float64)]
    )
    assert large["0"].channel_max.isnan().all()


def test_no_rows(generator):
    model = Twice()
    with pytest.raises(ValueError, match="no linear layer has seen a row"), calibrate(model):
        pass
    with pytest.raises(ValueError, match="no torch.nn.Linear to calibrate"), calibrate(nn.ReLU()):
        pass
    with pytest.raises(ValueError, match="samples is -1"), calibrate(model, samples=-1):
        pass
    calibration = watched(model, inputs(generator))
    report = octile.quantize_(model, octile.W8A8Static(calibration))
    assert report.converted == ["first", "by_name"]
    assert report.skipped == {"idle": "the calibration has seen no row of its inputs"}
    other = nn.Sequential(nn.Linear(4, 4))
    other[0].in_features = 16
    with calibrate(other, samples=0), pytest.raises(RuntimeError):
        other(torch.ones(2, 16))
    left = octile.quantize_(nn.Sequential(nn.Linear(8, 8)), octile.W8A8Static(Calibration({"0": calibration["first"]})))
    assert left.skipped == {"0": "the calibration has seen 16 input features, and it has 8"}


def test_merging(generator):
    model, batches = Twice(), inputs(generator)
    whole = watched(model, batches, second_moments=True)
    first, rest = (watched(model, part, second_moments=True) for part in (batches[:1], batches[1:]))
    merged = first.merge_(rest)
    for name in ("first", "by_name", "idle"):
        assert merged[name].rows == whole[name].rows
        assert torch.equal(merged[name].channel_max, whole[name].channel_max)
    assert torch.allclose(merged["first"].second_moments, whole["first"].second_moments)
    narrow = Calibration({"first": octile.calibration.InputStatistics(torch.ones(4), 1)})
    with pytest.raises(ValueError, match="first has 16 input features in one calibration and 4 in the other"):
        merged.merge_(narrow)
    rows = rest["first"].rows
    assert Calibration().merge_(rest).merge_(rest)["first"].rows == 2 * rows == 2 * rest["first"].rows
    assert rest.merge_(rest)["first"].rows == 2 * rows


def test_file(device, generator, tmp_path):
    path = tmp_path / "c.safetensors"
    calibration = watched(Twice(device=device), inputs(generator, device), second_moments=True)
    calibration.save(path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    assert header["__metadata__"] == {"format": "octile-calibration", "version": "1"}
    assert header["first.input_channel_max"]["shape"] == [16] and header["first.rows"]["dtype"] == "I64"
    assert header["first.input_max"]["shape"] == [1] and header["first.input_second_moments"]["dtype"] == "F32"
    loaded = Calibration.load(path)
    assert list(loaded.layers) == ["by_name", "first"] or set(loaded) == {"first", "by_name"}
    for name in loaded:
        assert loaded[name].rows == calibration[name].rows
        assert torch.equal(loaded[name].channel_max, calibration[name].channel_max.cpu())
        assert torch.equal(loaded[name].second_moments, calibration[name].second_moments.float().cpu())
        assert loaded[name].excess is None or torch.equal(loaded[name].excess, calibration[name].excess)
    assert any(loaded[name].excess is not None for name in loaded)
    with pytest.raises(ValueError, match="seen no rows"):
        Calibration({"a": octile.calibration.InputStatistics(torch.zeros(4), 0)}).save(tmp_path / "no")
    with pytest.raises(ValueError, match="has no layers"):
        Calibration().save(tmp_path / "no")
    assert not (tmp_path / "no").exists()


GOOD = {"a.input_channel_max": torch.ones(4), "a.input_max": torch.ones(1), "a.rows": torch.tensor([3])}
KIND = {"format": "octile-calibration", "version": "1"}


@pytest.mark.parametrize(
    ("change", "metadata", "says"),
    [
        ({}, {}, "its metadata does not say octile-calibration, version 1"),
        ({}, KIND | {"version": "2"}, "does not say octile-calibration, version 1"),
        ({"a.more": torch.ones(1)}, KIND, '"a.more" is nothing that a calibration holds'),
        ({"b.rows": torch.tensor([3])}, KIND, 'there is no tensor "b.input_channel_max"'),
        ({"a.rows": None}, KIND, 'there is no tensor "a.rows"'),
        ({"a.input_max": None}, KIND, 'there is no tensor "a.input_max"'),
        ({"a.input_channel_max": torch.ones(2, 2)}, KIND, r'"a.input_channel_max" is F32 \(2, 2\), not F32 of one dim'),
        ({"a.input_channel_max": torch.ones(4).half()}, KIND, r'"a.input_channel_max" is F16 \(4\), not F32 \(4\)'),
        (
            {"a.input_channel_max": -torch.ones(4)},
            KIND,
            '"a.input_channel_max" is -1 at channel 0, which is not a maximum',
        ),
        ({"a.input_max": torch.ones(2)}, KIND, r'"a.input_max" is F32 \(2\), not F32 \(1\)'),
        ({"a.input_max": 2 * torch.ones(1)}, KIND, '"a.input_max" is 2, and the largest of input_channel_max 1'),
        ({"a.rows": torch.tensor([0])}, KIND, '"a.rows" is 0; a calibration has seen 1 row or more'),
        ({"a.rows": torch.tensor([-1])}, KIND, '"a.rows" is -1; a calibration has seen 1 row or more'),
        ({"a.rows": torch.tensor([3.0])}, KIND, '"a.rows" is F32'),
        (
            {"a.input_second_moments": torch.ones(3, 3)},
            KIND,
            r"a.input_second_moments\" is F32 \(3, 3\), not F32 \(4, 4\)",
        ),
        ({"a.input_excess": torch.ones(3)}, KIND, r'"a.input_excess" is F32 \(3\), not F32 \(2\)'),
    ],
)
def test_files_that_are_none(change, metadata, says, tmp_path):
    tensors = {name: t for name, t in (GOOD | change).items() if t is not None}
    with replacing(tmp_path / "c") as file:
        save_safetensors(tensors, file, metadata)
    with pytest.raises(ValueError, match=says):
        Calibration.load(tmp_path / "c")


def test_no_safetensors_file(tmp_path):
    (tmp_path / "c").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="not a safetensors file"):
        Calibration.load(tmp_path / "c")
    os.mkfifo(tmp_path / "pipe")
    for name, says in (
        ("pipe", "it is not a file"),
        (".", "it is not a file"),
        ("none", "No such file"),
        ("x" * 300, "too long"),
    ):
        with pytest.raises(ValueError, match=f"cannot read .*{says}"):
            Calibration.load(tmp_path / name)
    with replacing(tmp_path / "c") as file:
        save_safetensors(GOOD, file, KIND)
    assert Calibration.load(tmp_path / "c")["a"].rows == 3


def test_excess_is_that_of_the_library(generator):
    """Two-dimensional inputs, in blocks of 128 however they are split."""
    from octile import _plans

    x = torch.randn(640, 16, generator=generator)
    layer = nn.Sequential(nn.Linear(16, 4))
    theirs = torch.empty(2)
    calibrator = _plans.library().calibrator(16)
    calibrator.observe(_plans.view(x))
    calibrator.excess(_plans.view(theirs))
    for size in (128, 256, 640):
        ours = watched(layer, x.split(size))["0"]
        assert torch.allclose(ours.excess, theirs, rtol=1e-5) and ours.rows == 640
    whole = watched(layer, [x])["0"].excess
    twice = watched(layer, [x]), watched(layer, [x])
    assert torch.allclose(twice[0].merge_(twice[1])["0"].excess, whole / 2)
    assert watched(layer, [x[:100]])["0"].excess is None


def test_rows_of_a_sequence_are_compared_with_other_sequences(generator):
    """Sequences of one repeated row: either all rows of a sequence exceed, or none."""
    x = torch.randn(40, 1, 16, generator=generator).expand(40, 20, 16)
    excess = watched(nn.Sequential(nn.Linear(16, 4)), [x])["0"].excess
    rows = watched(nn.Sequential(nn.Linear(16, 4)), [x.flatten(0, 1)])["0"].excess
    assert 1 / 80 < excess[0] < 1 / 20  # 1 of 40 sequences, rather than 1 of 800 rows
    assert rows[0] < excess[0]
    long = x[:8].expand(8, 20, 16).repeat(1, 10, 1)  # longer than the blocks of rows without sequences
    assert 1 / 16 < watched(nn.Sequential(nn.Linear(16, 4)), [long])["0"].excess[0] < 1 / 4
    assert watched(nn.Sequential(nn.Linear(16, 4)), [long[:1]])["0"].excess is None


def test_files_are_replaced_whole_and_with_the_mode_of_others(tmp_path, monkeypatch):
    """The mask of modes belongs to the process: another thread would see a temporary change."""
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("os.umask"))
    path, plain = tmp_path / "c", tmp_path / "plain"
    plain.write_text("")
    Calibration({"a": InputStatistics(torch.ones(4), 3)}).save(path)
    assert path.stat().st_mode == plain.stat().st_mode
    before = path.read_bytes()
    with pytest.raises(RuntimeError, match="halfway"), replacing(path) as file:
        file.write_text("half")
        raise RuntimeError("halfway")
    assert path.read_bytes() == before and sorted(tmp_path.iterdir()) == [path, plain]


def test_only_regular_files_are_replaced(tmp_path):
    calibration = Calibration({"a": InputStatistics(torch.ones(4), 3)})
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link to nothing").symlink_to("nothing")
    for name in ("pipe", "folder", "link to nothing"):
        before = (tmp_path / name).lstat()
        with pytest.raises(OSError, match=name):
            calibration.save(tmp_path / name)
        assert (tmp_path / name).lstat() == before
    private, link = tmp_path / "private", tmp_path / "link"
    private.write_text("old")
    private.chmod(0o600)
    link.symlink_to("private")
    calibration.save(link)
    assert link.is_symlink() and stat.S_IMODE(private.stat().st_mode) == 0o600
    assert Calibration.load(private)["a"].rows == 3
    calibration.save(tmp_path / ("n" * 255))
    assert len(list(tmp_path.iterdir())) == 6


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"octile: cannot write {tmp_path}/no/c: No such file or directory"):
        Calibration({"a": InputStatistics(torch.ones(4), 3)}).save(tmp_path / "no" / "c")


def test_a_full_disk(tmp_path):
    """As far as this process can tell."""
    path = tmp_path / "c"
    Calibration({"a": InputStatistics(torch.ones(4), 3)}).save(path)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"octile: cannot write {tmp_path}/\.c\.\w+: .*File too large"):
            Calibration({"a": InputStatistics(torch.ones(100_000), 3)}).save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_without_safetensors(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    calibration = watched(nn.Sequential(nn.Linear(16, 4)), [torch.ones(1, 16)])
    for use in (lambda: calibration.save(tmp_path / "c"), lambda: Calibration.load(tmp_path / "c")):
        with pytest.raises(ImportError, match="this needs the package safetensors: pip install safetensors"):
            use()


def test_an_input_that_arrives_quantized(device, generator):
    model = nn.Sequential(octile.GELU(), octile.Linear(64, 32)).to(device)
    x = torch.randn(5, 64, generator=generator).to(device)
    with calibrate(model) as calibration:
        model(x)
    seen = calibration.layers["1"]
    assert seen.rows == 5
    torch.testing.assert_close(
        seen.channel_max.to(device), nn.functional.gelu(x, approximate="tanh").abs().amax(0), atol=0.05, rtol=0
    )
