"""examples/train_gpt.py at a size for a CPU, and its parts: text, order, accumulation, reports."""

import _thread
import contextlib
import dataclasses
import io
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import types
import xml.etree.ElementTree

import numpy as np
import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "bench" / "torch")]

import predict
import train_gpt
from gpt import data, model, profiling, report, training

pytestmark = pytest.mark.usefixtures("one_thread")  # as in the workers

MODES = list(training.MODES)[:4]  # the default
SMALL = [
    "--width",
    "32",
    "--layers",
    "1",
    "--heads",
    "2",
    "--length",
    "32",
    "--batch",
    "4",
    "--validation-windows",
    "8",
]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Forty files in two folders, some twice, one empty, one that is no text."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(40):
        path = folder / ("a" if i % 2 else "b") / f"file{i}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"def function_{i}_{j}(value):\n    return value * {i * j}\n" for j in range(30)))
    (folder / "copy.py").write_bytes((folder / "a" / "file1.py").read_bytes())
    (folder / "empty.py").write_text("")
    (folder / "binary.py").write_bytes(b"\0\1\2")
    (folder / "picture.png").write_bytes(b"not for reading")
    return folder


def here(*arguments):
    """Runs train_gpt in this process, to save an import of torch; its workers are processes. Status and output."""
    said, handlers = io.StringIO(), {how: signal.getsignal(how) for how in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
    try:
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
            patch.setattr(sys, "argv", ["train_gpt.py", "--device", "cpu", *map(str, arguments)])
            patch.setenv("OMP_NUM_THREADS", "1")
            return train_gpt.main(), said.getvalue()
    finally:
        for how, handler in handlers.items():
            signal.signal(how, handler)


def results(folder):
    return json.loads((folder / "training.json").read_text())


# ---- Whole runs ----


@pytest.fixture(scope="module")
def small_run(texts, tmp_path_factory):
    """The output and the folder of a run of two kinds of layers with two seeds."""
    folder = tmp_path_factory.mktemp("run")
    status, out = here("--tiny", "--seeds", 2, "--data", texts, "--modes", "bf16", "octile-int8", "--out", folder)
    assert status == 0, out
    return out, folder


def test_a_run(small_run):
    out, folder = small_run
    document = results(folder)
    runs = {(r["mode"], r["seed"]): r for r in document["runs"]}
    assert set(runs) == {(mode, seed) for mode in ("bf16", "octile-int8") for seed in range(2)}
    for r in runs.values():
        assert r["done"] and len(r["losses"]) == 20 and [at for at, _ in r["validation"]] == [20]
        assert r["losses"][-1] < r["losses"][0] - 1
    assert not document["failures"] and not document["interrupted"]
    assert report.NAMES["bf16"] in out and report.NAMES["octile-int8"] in out
    xml.etree.ElementTree.parse(folder / "training.svg")
    assert not list(folder.glob("*.part"))


@pytest.mark.parametrize("mode", [*MODES, "octile-int8-fused", "octile-int8-fused-norms"])
def test_kinds_of_layers_differ_by_little(small_run, texts, mode):
    """Runs in this process, from the same initial values and bytes as the baseline above."""
    corpus = data.gather([str(texts)], 10**9)
    given = train_gpt.arguments(["--tiny", "--device", "cpu"])
    settings = dataclasses.replace(train_gpt.settings_of(given), mode=mode, seeds=[1])
    events = []
    training.work(settings, torch.tensor(corpus.training), torch.tensor(corpus.validation), events.append)
    losses = [loss for e in events if e["event"] == "steps" for loss in e["losses"]]
    baseline = next(r["losses"] for r in results(small_run[1])["runs"] if (r["mode"], r["seed"]) == ("bf16", 1))
    assert abs(losses[0] - math.log(256)) < 0.2  # nothing is learned yet
    # Before the first update only int8 makes the difference.
    assert losses[0] == pytest.approx(baseline[0], abs=2e-3)
    # Gradients that are lost, misplaced or of the wrong sign end much further away.
    assert losses[-1] == pytest.approx(baseline[-1], rel=1e-3 if mode == "bf16" else 0.02)


# Replaces train_gpt.py as a worker, to test the driver: octile-int8 fails, and the others take a step in
# 10 ms.
WORKER = """
import json, sys, time
settings = json.loads(sys.argv[2])
if settings["mode"] == "octile-int8":
    sys.exit("there is no /no/such/liboctile.so")
for step in range(1, settings["steps"] + 1):
    time.sleep(0.01)
    print(json.dumps({"seed": 0, "event": "steps", "until": step, "losses": [1 / step], "seconds": 0.01}), flush=True)
print(json.dumps({"seed": 0, "event": "seed done", "peak": None}), flush=True)
"""


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    (tmp_path / "worker.py").write_text(WORKER)
    monkeypatch.setattr(train_gpt, "__file__", str(tmp_path / "worker.py"))


def test_a_failing_kind_leaves_the_others(texts, tmp_path, pretended):
    given = [*SMALL, "--steps", 3, "--data", texts, "--out", tmp_path, "--modes", "octile-int8", "bf16"]
    status, out = here(*given)
    document = results(tmp_path)
    assert status == 1 and "Failed:" in out
    assert [r["mode"] for r in document["runs"]] == ["bf16"] and len(document["runs"][0]["losses"]) == 3
    assert [f["mode"] for f in document["failures"]] == ["octile-int8"]
    assert "/no/such/liboctile.so" in document["failures"][0]["error"]


def interrupted(folder):
    document = results(folder)
    assert document["interrupted"] and not document["failures"]
    assert 0 < len(document["runs"][0]["losses"]) < 10**6


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_what_was_measured(texts, tmp_path, how, pretended, monkeypatch):
    told = train_gpt.Progress.__call__

    def tells_and_interrupts(self, s, name, event):
        told(self, s, name, event)
        if event.get("until") == 5:
            _thread.interrupt_main(how)

    monkeypatch.setattr(train_gpt.Progress, "__call__", tells_and_interrupts)
    status, out = here(*SMALL, "--steps", 10**6, "--data", texts, "--out", tmp_path, "--modes", "bf16")
    assert status == 130 and "Interrupted" in out
    interrupted(tmp_path)


def test_a_signal_from_outside(texts, tmp_path):
    """The whole command, its worker, and a time limit's signal."""
    given = [*SMALL, "--steps", 10**6, "--told-every", 1, "--data", texts, "--out", tmp_path, "--modes", "bf16"]
    command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), "--device", "cpu", *map(str, given)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, text=True, env=environment)
    try:
        for line in process.stderr:
            if "step " in line and " of " in line:
                break
        process.terminate()
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "Interrupted" in out
    interrupted(tmp_path)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--data", "/no/such/folder"], "no such file or folder: /no/such/folder"),
        (["--width", 30, "--heads", 4], "a width of 30 does not divide into 4 heads"),
        (["--graph"], "--graph needs a GPU"),
        (["--data", __file__, "--data-bytes", 4000], "bytes of text are too few for windows of 512"),
        ([], "starts torchrun itself"),
    ],
)
def test_refusals(given, words, monkeypatch):
    if not given:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "0")
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", "--device", "cpu", *map(str, given)])
    with pytest.raises(SystemExit, match=words):
        train_gpt.main()


@pytest.mark.parametrize("option", ["--seeds", "--steps", "--batch", "--length", "--heads", "--split"])
def test_sizes_are_positive(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        train_gpt.arguments([option, "0"])
    assert f"argument {option}: 0 is not positive" in capsys.readouterr().err


# ---- Text ----


def test_gather(texts):
    corpus = data.gather([str(texts)], 10**9)
    assert corpus.files + corpus.validation_files == 40  # without one copy, one empty file and one binary
    both = corpus.training.tobytes() + b"\0" + corpus.validation.tobytes()
    assert both.count(b"function_1_0(") == 1 and b"picture" not in both and b"\1" not in both
    parts = [set(re.findall(rb"function_(\d+)_", side.tobytes())) for side in (corpus.training, corpus.validation)]
    assert not parts[0] & parts[1]
    for path in sorted(texts.rglob("*.py")):
        os.utime(path, (0, 0))
    assert data.gather([str(texts)], 10**9).digest == corpus.digest
    half = data.gather([str(texts)], 20_000)
    assert half.digest != corpus.digest
    assert len(half.training) + len(half.validation) <= 20_000 + half.files + half.validation_files


def test_a_single_file_is_cut(tmp_path):
    (tmp_path / "one.txt").write_text("a" * 1900 + "b" * 100)
    corpus = data.gather([str(tmp_path / "one.txt")], 10**9)
    assert len(corpus.training) == 1900 and bytes(corpus.validation) == b"b" * 100


def test_windows():
    text = torch.arange(100, dtype=torch.uint8)
    symbols, following = data.windows(text, torch.tensor([0, 90]), 9)
    assert symbols[1].tolist() == list(range(90, 99)) and following[1].tolist() == list(range(91, 100))
    starts = data.random_starts(text, (50, 2, 3), 9, seed=1)
    assert starts.min() >= 0 and starts.max() + 9 < 100
    assert torch.equal(starts, data.random_starts(text, (50, 2, 3), 9, seed=1))
    assert not torch.equal(starts, data.random_starts(text, (50, 2, 3), 9, seed=2))
    assert data.even_starts(text, 4, 9).tolist() == [0, 30, 60, 90]
    with pytest.raises(ValueError, match="too few"):
        data.random_starts(text, (1,), 100, 0)


# ---- Training ----


def trainer(**fields):
    shape = {"width": 32, "layers": 1, "heads": 2, "length": 16, "precision": "f32", "device": "cpu", "compile": "off"}
    shape["validation_windows"] = 8
    text = torch.from_numpy(np.random.default_rng(0).integers(97, 105, 5000, dtype=np.uint8))
    text = text.to(fields.get("device", "cpu"))
    return training.Trainer(training.Settings(**shape | {"steps": 4} | fields), text, text)


def gradients(t):
    starts = t.begin(0)
    kept = {}
    t.optimizer.step = lambda: kept.update({n: p.grad.clone() for n, p in t.model.named_parameters()})
    return t.step(0, starts[0]).item(), kept


@pytest.mark.parametrize("mode", ["bf16", "octile-int8"])
def test_micro_batches_add_up(mode):
    loss, whole = gradients(trainer(mode=mode, batch=8))
    split_loss, split = gradients(trainer(mode=mode, batch=4, accumulate=2))
    assert abs(loss - split_loss) < 1e-5
    for name, gradient in whole.items():
        # dW in int8 is quantized over other rows; everything else differs by the order of sums.
        bound = 0.05 if mode == "octile-int8" else 1e-5
        assert (gradient - split[name]).norm() <= bound * gradient.norm(), name


def test_compiled_with_kept_weights_as_eager(monkeypatch):
    """Micro-batches of a compiled model read the quantized weights from buffers, those of the right step and seed."""
    compiler = torch.compile  # without code generation, which takes half a minute
    monkeypatch.setattr(torch, "compile", lambda m, mode, **how: compiler(m, backend="aot_eager", **how))
    losses = {}
    for compile in ("off", "model"):
        t = trainer(mode="octile-int8", batch=4, accumulate=2, compile=compile, seeds=[0, 1], rate=3e-2, warm_steps=1)
        t.warm_up(lambda event: None)
        assert t.cached is not None
        if compile == "off":
            t.cached.remove()
            t.cached = None
        losses[compile] = [e["losses"] for seed in (0, 1) for e in t.run(seed) if e["event"] == "steps"]
    for eager, compiled in zip(losses["off"], losses["model"], strict=True):
        assert eager[0] - eager[-1] > 0.1
        assert compiled == pytest.approx(eager, rel=2e-3)


def test_conversion_takes_the_blocks_and_leaves_the_head():
    import octile

    t = trainer(mode="octile-mixed")
    kinds = {name: type(m) for name, m in t.model.named_modules() if isinstance(m, torch.nn.Linear)}
    assert kinds.pop("head") is torch.nn.Linear
    assert len(kinds) == 4 and all(issubclass(k, octile.Linear) for k in kinds.values())
    assert t.model.blocks[0].mlp.up.backward == ("int8", "16bit")
    assert isinstance(trainer(mode="octile-int8", quantize_head=True).model.head, octile.Linear)
    assert trainer(mode="octile-int8").model.blocks[0].mlp.up.backward == "int8"
    assert trainer(mode="octile-int8-whole").model.blocks[0].mlp.up.backward == "int8-whole"


@pytest.mark.parametrize("mode", ["bf16", "octile-int8"])
def test_a_seed_gives_the_same_losses_again(mode):
    t = trainer(mode=mode, seeds=[0, 1])
    losses = [[e["losses"] for e in t.run(seed) if e["event"] == "steps"] for seed in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_graph_gives_the_same_losses(accumulate):
    if not torch.cuda.is_available():
        pytest.skip("graphs are CUDA's")
    fields = {"mode": "octile-int8", "device": "cuda", "accumulate": accumulate, "steps": 12, "rate": 3e-2}
    losses = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for graph in (False, True):
            t = trainer(graph=graph, warm_steps=3, **fields)
            runs = [list(t.run(seed)) for seed in (0, 1)]
            losses.append([e.get("losses") or [e["loss"]] for run in runs for e in run[:-1]])
    assert losses[0][0][0] - losses[0][0][-1] > 0.1
    for eager, captured in zip(*losses, strict=True):
        assert captured == pytest.approx(eager, rel=1e-3)


def test_the_rate_rises_and_falls():
    s = training.Settings(steps=100, warm_steps=10, rate=1.0)
    rates = [training.rate_at(i, s) for i in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] == rates[10] == 1
    assert rates[99] == pytest.approx(training.LAST_RATE, abs=1e-3)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_parameters_are_counted():
    m = model.Gpt(64, 3, 4, 48, bias=False)
    matrices = sum(p.numel() for p in m.parameters() if p.dim() > 1)
    assert model.parameters(64, 3, 4, 48) == matrices


def test_what_is_predicted():
    modes = ("bf16", "octile-16bit", "octile-mixed", "octile-int8-whole")
    times = [sum(predict.parts(4096, 6, 16384, 1024, m, True).values()) for m in modes]
    assert times == sorted(times, reverse=True)
    # Three products of 2 * 12 * 4096^2 * 6 * 16384 operations.
    assert predict.parts(4096, 6, 16384, 1024, "bf16", True)["products"] == pytest.approx(118.7e12 / 720e12, rel=1e-3)


# ---- The driver and the report ----


def test_who_gets_which_seed():
    s, modes = training.Settings(), list(training.MODES)
    assert [j.seeds for j in train_gpt.split(s, modes, [0, 1, 2], len(modes))] == [[0, 1, 2]] * len(modes)
    jobs = train_gpt.split(s, modes, [0, 1, 2], len(modes) + 2)
    assert sorted((j.mode, *j.seeds) for j in jobs) == sorted((m, i) for m in modes for i in range(3))


def test_the_report_names_every_mode():
    assert set(report.NAMES) == set(report.COLORS) == set(training.MODES)


def made_up(**more):
    def one(mode, seed, loss, seconds):
        return {"mode": mode, "seed": seed, "place": "GPU 0", "losses": [loss + 1, loss, loss], "step_seconds": [seconds],
                "validation": [[3, loss + 0.1]], "peak": 2**30, "done": True}  # fmt: skip

    runs = [one("bf16", 0, 1.0, 0.2), one("bf16", 1, 2.0, 0.2), one("octile-int8", 0, 1.01, 0.1)]
    runs.append(one("octile-int8", 1, 2.04, 0.1))
    facts = {"device": "a <device>", "torch": "2", "text": "some", "parameters": 10}
    settings = vars(training.Settings(steps=3)) | {"tokens": 100}
    document = {"facts": facts, "settings": settings, "runs": runs, "workers": [], "profiles": [], "failures": []}
    return document | {"interrupted": False} | more


def test_the_table_compares_seed_by_seed():
    row = next(line for line in report.table(made_up()).splitlines() if "Octile, int8" in line)
    assert "1,000" in row and "2.00" in row and "1.0 GiB" in row
    assert "+1.50 ± 0.50 %" in row


def test_runs_of_other_lengths_are_not_compared():
    document = made_up()
    document["runs"][3]["losses"] = document["runs"][3]["losses"][:2]
    row = next(line for line in report.table(document).splitlines() if "Octile, int8" in line)
    assert "+1.00 %" in row and "0: 3, 1: 2" in row


def test_the_chart_is_xml():
    xml.etree.ElementTree.fromstring(report.draw(made_up()))


def test_a_run_that_was_stopped(tmp_path):
    document = made_up(interrupted=True)
    document["runs"][2] |= {"losses": [1.0], "validation": [], "peak": None, "done": False}
    report.save(document, tmp_path)
    row = next(line for line in report.table(document).splitlines() if "Octile, int8" in line)
    assert "2.0400" in row and "+2.00 %" in row and "1.0 GiB" in row


def test_nothing_measured(tmp_path):
    report.save(made_up(runs=[]), tmp_path)
    assert "Nothing was measured." in (tmp_path / "training.md").read_text()


def test_a_profile_is_summed_by_kind():
    rows = [{"kind": profiling.kind(n), "name": n, "calls": 2, "us": us} for n, us in KERNELS]
    assert {row["name"]: row["kind"] for row in rows} == {name: kind for (name, _), kind in zip(KERNELS, KINDS)}
    profile = {"mode": "bf16", "step_seconds": 0.5, "kernels": rows}
    table = report.profile_table(made_up(profiles=[profile]))
    assert "500.00" in table and "cuBLAS products" in table


KERNELS = [
    ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT", 5.0),
    ("triton_red_fused_native_layer_norm_3", 4.0),
    ("triton_poi_fused_gelu_quantize_1", 3.0),
    ("void octile::cuda::large::w8a8_gemm_kernel<Tile, __nv_bfloat16>", 2.0),
    ("void octile::cuda::quantize_bands<float, (octile::cuda::Scope)0>", 2.0),
    ("void octile::cuda::two_pass_kernel<__nv_bfloat16, true, true>", 2.0),
    ("multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>", 2.0),
    ("multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor>", 2.0),
]
KINDS = ["cuBLAS products", "compiled: reductions (norms, dB, loss)", "compiled: elementwise and copies"]
KINDS += ["Octile: products", "Octile: quantize", "Octile: pass over dY", "optimizer", "clipping"]


def test_a_kernel_that_starts_early_counts_from_the_end_of_the_one_before():
    def event(name, start, end, device=torch.autograd.DeviceType.CUDA):
        span = types.SimpleNamespace(start=start, end=end)
        return types.SimpleNamespace(name=name, time_range=span, device_type=device, is_user_annotation=False)

    events = [event("b", 5, 30), event("a", 0, 10), event("a", 40, 50)]
    events.append(event("host", 0, 100, torch.autograd.DeviceType.CPU))
    rows = profiling.kernels(types.SimpleNamespace(events=lambda: events))
    assert [(r["name"], r["calls"], r["us"]) for r in rows] == [("a", 2, 20), ("b", 1, 20)]


# ---- bench/torch/lora.py ----


def test_the_benchmark_of_lora_runs(tmp_path):
    out, script = tmp_path / "lora.json", ROOT / "bench" / "torch" / "lora.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, "--tiny", "--device", "cpu", "--steps", "40", "--seeds", "2", "--rate", "0.01"]
    done = subprocess.run([*command, "--json", out], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(out.read_text())
    assert [r["kind"] for r in told["results"]] == ["bf16", "w8a8", "w8a8-int8", "w4a16", "w4a8"]
    plain, *frozen = told["results"]
    assert plain["loss"] < 5.2  # of 5.55 at the start
    for r in frozen:
        assert r["loss"] == pytest.approx(plain["loss"], rel=0.1) and r["standard_error"] < 0.5
        assert r["tokens_per_second"] > 0 and r["weight_bytes"] < plain["weight_bytes"]
    assert done.stdout.count("skipped: bitsandbytes is measured on a GPU alone") == 2
