"""Shared by checks with several processes: a rank's device, the meshes of the ranks, and sums of floats."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

device = "cpu"  # or "cuda": this rank's GPU is the current one
sums = {True: 0, False: 0}  # how many calls of assert_sums() had the same bits or not, on a GPU


def meshes():
    """Of 1, 2 and 4 ranks, by their number: rank r is the one r % n there. "2d": pairs of ranks, which are its dimension s."""
    size, names = dist.get_world_size(), {"mesh_dim_names": ("r", "s")}
    made = {n: init_device_mesh(device, (size // n, n), **names)["s"] for n in (1, 2, 4) if n <= size}
    return made | {"2d": init_device_mesh(device, (size // 2, 2), **names)}


def counts(meshes):
    return [n for n in meshes if n != "2d"]


def assert_near(got, expected, bound, what=None):
    """Equal within a fraction of the largest value."""
    assert got.dtype is expected.dtype and got.shape == expected.shape, what
    got, expected = got.detach().double(), expected.detach().double()
    finite = expected.isfinite()
    assert torch.equal(got[~finite].nan_to_num(nan=7), expected[~finite].nan_to_num(nan=7)), what
    got, expected = got[finite], expected[finite]
    error, largest = (t.abs().max().item() if t.numel() else 0 for t in (got - expected, expected))
    assert error <= bound * largest, (what, error, largest)


def assert_sums(got, expected, what=None, dtype=None):
    """Sums of floats that have the same terms: the same bits on a CPU. On a GPU kernels choose their order by the shapes.
    dtype: of what was computed, if that is not the tensors' own."""
    if device == "cpu":
        assert torch.equal(got, expected), what
        return
    sums[torch.equal(got, expected)] += 1
    dtype = dtype or got.dtype
    assert_near(got, expected, 1e-5 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps, what)
