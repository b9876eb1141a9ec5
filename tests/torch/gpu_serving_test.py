"""bench/peers/gpu without a GPU: weights packed for other kernels beside their plain definitions, Octile's contenders on the
CPU, and whether a wrong result is found."""

import functools
import json
import os
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "bench" / "peers"))

torch = pytest.importorskip("torch")

from gpu import peer_octile, peer_vllm  # noqa: E402
from gpu.contender import Contender  # noqa: E402
from gpu.layer import Expected, Layer, Weight  # noqa: E402

M, K, N = 5, 256, 48
FORMATS = [("w8a8", 0), ("w8a16", 0), ("w8a16", 32), ("w4a8", 128), ("w4a16", 0), ("w4a16", 64)]


def layer(name, group, dtype=torch.float16, zero_points=False, m=M):
    return Layer(Weight(K, N, int(name[1]), group, dtype, zero_points, device="cpu"), m, name)


def octile():
    if not os.environ.get("OCTILE_LIBRARY"):
        pytest.skip("OCTILE_LIBRARY names no library")
    return peer_octile.Octile(os.environ["OCTILE_LIBRARY"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "group"), FORMATS)
def test_results_of_octile_are_those_of_the_layer(name, group, dtype):
    p = layer(name, group, dtype)
    contenders, expected = octile().serving(p), Expected(p)
    assert len(contenders) == {"w8a8": 2, "w8a16": 1, "w4a8": 4, "w4a16": 2}[name]
    for contender in contenders:
        ((kernel, call),) = contender.prepare().items()
        told = expected.verdict(contender, call)
        assert told == "exact" if name == "w8a8" else told.startswith("within"), (kernel, told)


@pytest.mark.parametrize("plain", [False, True])
def test_zero_points(plain):
    p = layer("w4a16", 64, zero_points=True)
    assert len(p.weight.zero.unique()) == 7
    contender = next(c for c in octile().serving(p) if ("plain" in c.name) == plain)
    (call,) = contender.prepare().values()
    assert Expected(p).verdict(contender, call).startswith("within")


def test_a_weight_is_packed_once_for_all_rows():
    few, library = layer("w4a16", 64), octile()
    many = Layer(few.weight, 70, "w4a16")
    for p in (few, many):
        (call,) = library.serving(p)[0].prepare().values()
        call()
    assert len([key for key in few.weight.kept if key[0] == "packed"]) == 1
    assert len(Expected(many).rows) == 64


def contender(name, task, result):
    made = Contender(name, "w4a8", task, lambda: {"": lambda: result.clone()})
    return made, made.prepare()[""]


def test_a_wrong_result_is_found():
    p = layer("w4a8", 128)
    right = p.quantized[0].double() * p.quantized[1][:, None] @ p.weight.exact.T
    expected = Expected(p)
    assert expected.verdict(*contender("Octile", "int8", right.half())).startswith("within")
    worse = (right + 0.01 * right.abs().mean() * torch.randn_like(right)).half()
    with pytest.raises(RuntimeError, match="WRONG: relative error"):
        expected.verdict(*contender("Octile", "int8", worse))
    assert expected.verdict(*contender("Marlin", "int8", worse)).startswith("within")  # rounds as it likes
    with pytest.raises(RuntimeError, match="WRONG: relative error"):
        expected.verdict(*contender("Marlin", "int8", right.flip(1).half()))  # another layer
    right[3, 7] = float("nan")
    with pytest.raises(RuntimeError, match="WRONG: 1 elements"):
        expected.verdict(*contender("Octile", "int8", right.half()))


def test_sums_are_compared_as_they_are():
    p = layer("w8a8", 0)
    sums = (p.quantized[0].long() @ p.weight.q.long().T).int()
    assert Expected(p).verdict(*contender("torch _int_mm", "sums", sums)) == "exact"


def test_a_weight_is_its_levels_times_its_scales():
    w = Weight(K, N, 4, 32, torch.float16, True, device="cpu")
    assert w.q.min() == -8 and w.q.max() == 7
    for n, k in ((0, 0), (3, 77), (47, 255)):
        assert w.exact[n, k] == (int(w.q[n, k]) - int(w.zero[n, k // 32])) * float(w.scale[n, k // 32])
    assert torch.equal(w.scale.half().float(), w.scale)


def test_what_failed_once_is_not_tried_again():
    weight, calls = Weight(64, 64, 4, 32, torch.float16, device="cpu"), []

    def fail():
        calls.append(1)
        raise ValueError("no such kernel")

    for _ in range(2):
        with pytest.raises(ValueError, match="no such kernel"):
            weight.once("peer", fail)
    assert len(calls) == 1


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_successive_rows_the_first_one_lowest(bits):
    codes = torch.randint(0, 2**bits, (64, 6), generator=torch.Generator().manual_seed(3))
    packed, count = peer_vllm.words(codes, bits), 32 // bits
    assert packed.shape == (64 // count, 6) and packed.dtype == torch.int32
    for row in range(64):
        for column in range(6):
            word = int(packed[row // count, column]) & 0xFFFFFFFF
            assert word >> bits * (row % count) & (2**bits - 1) == codes[row, column]


def test_scales_lie_as_marlin_reads_them():
    scales = torch.arange(3 * 128).view(3, 128)
    grouped = peer_vllm.ordered(scales, peer_vllm.GROUPED)
    single = peer_vllm.ordered(scales, peer_vllm.SINGLE)
    for group in range(3):
        for n in range(128):
            # A thread's eight scales are 8 channels apart.
            block, at = n // 64 * 64, n % 64
            assert grouped[group, n] == scales[group, block + at // 8 + at % 8 * 8]
            # Of whole rows it has pairs of neighbours in each of the four tiles of 8 channels.
            block, at = n // 32 * 32, n % 32
            pair = at % 8
            assert single[group, n] == scales[group, block + at // 8 * 2 + pair % 2 + pair // 2 * 8]


def test_zero_points_lie_as_marlin_reads_them():
    codes = torch.randint(0, 16, (2, 128), generator=torch.Generator().manual_seed(4))
    packed = peer_vllm.marlin_zero_points(codes)
    assert packed.shape == (2, 16)
    permuted = codes.view(2, 2, 64)[:, :, peer_vllm.GROUPED].reshape(2, 16, 8)
    for word in range(16):
        # Even numbers in the low half of a word, odd ones in the high half.
        expected = sum(int(permuted[1, word, i]) << 4 * (i // 2 + i % 2 * 4) for i in range(8))
        assert int(packed[1, word]) & 0xFFFFFFFF == expected


def test_types_have_the_numbers_of_vllm():
    assert peer_vllm.scalar_type(4, 8) == 1125899907892224  # uint4b8
    assert peer_vllm.scalar_type(8, 128) == 1125899923621888  # uint8b128


class Clock:
    """Each call once a round, all as fast."""

    def rounds(self, calls, count):
        for call in calls:
            call()
        return [[1e-5] * count for _ in calls]

    def finalists(self, settings, keep, rounds):
        return dict(list(settings.items())[:keep])


def test_a_run_has_every_contender_or_its_reason(monkeypatch):
    import gpu.layer
    import gpu_peers
    from gpu.peer_torch import Torch

    command = [
        "gpu_peers.py",
        "--serving",
        "--layers",
        "256x48",
        "--rows",
        "32,1",
        "--zero-points",
        "--kernels",
        "w4a16_gemm",
    ]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(gpu.layer, "Weight", functools.partial(Weight, device="cpu"))
    run = object.__new__(gpu_peers.Run)
    run.arguments, run.clock, run.tuned, run.failed = gpu_peers.parse_arguments(), Clock(), {}, []
    run.monitor = types.SimpleNamespace(since=lambda start: {})
    run.peers = [Torch(), octile()]
    run.peers[1].rows = run.arguments.kernels
    entries = list(run.serving(256, 48))
    assert not run.failed
    assert [(s["m"], next(part for part in gpu_peers.report.SERVING if part in s)) for s in entries] == [
        (m, name) for name in ("w8a8", "w8a16", "w4a8", "w4a16") for m in (1, 32)
    ]
    few, *_, last = entries
    assert few["w8a8"].keys() == {"cuBLAS f16", "Octile"} and few["w8a8"]["Octile"]["check"] == "exact"
    assert few["w8a8-product"]["torch _int_mm"]["check"] == few["w8a8-product"]["Octile"]["check"] == "exact"
    assert last["w4a16"].keys() == {"cuBLAS f16", "Octile", "Octile, plain weight"}
    assert last["w4a16"]["cuBLAS f16"]["check"].startswith("within") and last["w4a16"]["Octile"]["us"] == 10
    # The CPU has no tinygemm by this name, and no row of the GPU's.
    assert last["skipped"].keys() == {
        f"{name}, w4a16" for name in ("tinygemm", "Octile, w4a16_gemm", "Octile, plain weight, w4a16_gemm")
    }
    facts = {"dtype": "f16", "group": run.arguments.group, "zero_points": True}
    assert facts["group"] == {"w8a8": 0, "w8a16": 0, "w4a8": 128, "w4a16": 128}
    assert "W4A16 groups of 128; W4A16 with zero points" in gpu_peers.report.serving_data(facts)
    from gpu import serving_report

    assert "| 32 x 256 x 48 | 10.0 us | 10.0 us | 10.0 us | cuBLAS f16 | 1.00 |" in serving_report.tables(
        json.loads(json.dumps(entries))
    )


def test_without_a_vllm(monkeypatch):
    monkeypatch.setattr(peer_vllm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="vllm is not installed, and no --vllm"):
        peer_vllm.load()
