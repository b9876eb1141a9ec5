"""Where the time of one step goes, by kind of kernel."""

import re
from collections.abc import Callable

import torch
from torch.autograd import DeviceType

# The first that matches counts.
KINDS = [
    ("Octile: products", r"octile.*(gemm|w8a8|w8a16)"),
    ("Octile: pass over dY", r"octile.*(two_pass|gradient_quantize)"),
    ("Octile: quantize", r"octile.*(quantize|activate|transpose_bytes)"),
    ("Octile: dB", r"octile.*sum_rows"),
    ("Octile: other", r"octile"),
    ("attention", r"flash|fmha|sdpa|cudnn::fusion"),
    ("cuBLAS products", r"gemm|nvjet|cutlass|xmma|splitK|cublas"),
    ("optimizer", r"[Aa]dam|FusedOptimizer"),
    ("clipping", r"multi_tensor_apply|lpnorm|norm_kernel|foreach"),
    ("compiled: reductions (norms, dB, loss)", r"triton_(red|per)"),
    ("compiled: elementwise and copies", r"triton_"),
    ("copies, fills", r"[Mm]emcpy|[Mm]emset|copy_kernel|direct_copy|FillFunctor"),
]


def kind(name: str) -> str:
    return next((text for text, pattern in KINDS if re.search(pattern, name)), "other")


def kernels(profile) -> list[dict]:
    """Calls and microseconds of each kernel. One that was started before its predecessor ended counts from that end on."""
    events = [e for e in profile.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    sums: dict[str, list[float]] = {}
    ended = 0.0
    for event in sorted(events, key=lambda e: e.time_range.end):
        row = sums.setdefault(event.name, [0, 0.0])
        row[0] += 1
        row[1] += event.time_range.end - max(event.time_range.start, ended)
        ended = event.time_range.end
    rows = [{"kind": kind(n), "name": n[:160], "calls": c, "us": us} for n, (c, us) in sums.items()]
    return sorted(rows, key=lambda row: -row["us"])


def of(step: Callable[[], object], wait: Callable[[], float]) -> dict:
    """Profiles one step, and times two more without the profiler, since that slows the host."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    wait()
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        step()
        wait()
    begun = wait()
    step()
    step()
    seconds = (wait() - begun) / 2
    return {"step_seconds": seconds, "kernels": kernels(profile)}


def by_kind(rows: list[dict]) -> dict[str, tuple[int, float]]:
    """{kind: (calls, microseconds)}, the longest first."""
    sums: dict[str, tuple[int, float]] = {}
    for row in rows:
        calls, us = sums.get(row["kind"], (0, 0.0))
        sums[row["kind"]] = (calls + row["calls"], us + row["us"])
    return dict(sorted(sums.items(), key=lambda item: -item[1][1]))
