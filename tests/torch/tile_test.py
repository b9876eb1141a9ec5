"""octile.tile: kernels in the tile language, compiled and launched from Python."""

import subprocess
import sys

import octile.tile as tile
import pytest
import torch

KERNELS = """
#include "octile/tile/context.h"
using namespace octile::tile;

struct Scale {  // z = a x + b, `block` elements a program
  TILE_KERNEL void operator()(auto& t, auto x, auto z, float a, auto b, const int n, auto block) const {
    const auto i = t.program_id(0) * block + t.arange(block);
    t.store(z + i, t.load(x + i, i < n) * a + b, i < n);
  }
};

struct Bare {};
"""
FLAGS = ["-O0"]  # nothing here is timed


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("tile")
        (folder / "kernels.h").write_text(KERNELS)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.delenv("OCTILE_TILE_TUNING", raising=False)
        yield folder


def grid(constants):
    return tile.cdiv(1000, constants["block"])


def choices(*blocks):
    return [tile.Choice({"block": block}, threads=1) for block in blocks]


def test_a_kernel_is_compiled_once_and_launched(folder):
    x, z = torch.randn(1000), torch.zeros(1000)
    scale = tile.load(folder / "kernels.h", "Scale", flags=FLAGS)
    scale[grid](x, z, 2.0, 1.0, 1000, block=64)
    assert torch.equal(z, x * 2 + 1)
    compiled = sorted((folder / "cache/octile/tile").glob("Scale-*.so"))
    scale[(tile.cdiv(900, 64),)](x, z, 3.0, 1.0, 900, 64)
    assert torch.equal(z, torch.cat([x[:900] * 3 + 1, x[900:] * 2 + 1]))
    tile.load(folder / "kernels.h", "Scale", flags=FLAGS)[grid](x, z, 2.0, 1.0, 1000, 64)
    assert sorted((folder / "cache/octile/tile").glob("Scale-*.so")) == compiled


@pytest.mark.slow
def test_choices_are_measured_once_and_kept(folder):
    x, z = torch.randn(1000), torch.zeros(1000)
    scale = tile.load(folder / "kernels.h", "Scale", choices=choices(32, 1024), key=["n"], flags=FLAGS)
    scale[grid](x, z, 2.0, 1.0, 1000)
    assert torch.equal(z, x * 2 + 1)
    assert scale.taken in scale.choices
    (kept,) = (folder / "cache/octile").glob("*.tuning")
    line = next(line for line in kept.read_text().splitlines() if "Scale_f32_f32 1024 :" in line)
    # Another process takes what the file says, also if that is not what it would measure itself.
    other = next(choice for choice in scale.choices if choice != scale.taken)
    block, taken = other.constants["block"], scale.taken.constants["block"]
    kept.write_text(kept.read_text().replace(line, line.removesuffix(f" {taken}") + f" {block}"))
    program = f"""
import octile.tile as tile, torch
choices = [tile.Choice({{"block": block}}, threads=1) for block in (32, 1024)]
scale = tile.load({str(folder / "kernels.h")!r}, "Scale", choices=choices, key=["n"], flags={FLAGS})
scale[lambda c: tile.cdiv(1000, c["block"])](torch.zeros(1000), torch.zeros(1000), 2.0, 1.0, 1000)
print(scale.taken.constants["block"])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == f"{block}\n"


def test_what_does_not_fit_is_refused(folder):
    x, z = torch.randn(1000), torch.zeros(1000)
    with pytest.raises(ValueError, match="there is no struct Missing in"):
        tile.load(folder / "kernels.h", "Missing")
    with pytest.raises(ValueError, match=r"Bare in .* has no operator\(\)"):
        tile.load(folder / "kernels.h", "Bare")
    with pytest.raises(ValueError, match="Scale has no parameter rows; it has x, z, a, b, n, block"):
        tile.load(folder / "kernels.h", "Scale", choices=choices(32), key=["rows"])
    with pytest.raises(ValueError, match="all choices set the same constants"):
        tile.load(folder / "kernels.h", "Scale", choices=[*choices(32), tile.Choice({"n": 1})])
    with pytest.raises(ValueError, match="a checked kernel has no choices"):
        tile.load(folder / "kernels.h", "Scale", choices=choices(32), checked=True)
    with pytest.raises(ValueError, match="layout is \"Threads<..>\", .* not 'Blocks<3>'"):
        tile.Choice(layout="Blocks<3>")
    scale = tile.load(folder / "kernels.h", "Scale", flags=FLAGS)
    with pytest.raises(TypeError, match="Scale needs block, too"):
        scale[1](x, z, 2.0, 1.0, 1000)
    with pytest.raises(TypeError, match=r"Scale\(x, z, a, b, n, block\): rows is unknown"):
        scale[1](x, z, 2.0, 1.0, 1000, 64, rows=3)
    with pytest.raises(TypeError, match="z is of torch.float64; a kernel takes torch.float32"):
        scale[1](x, z.double(), 2.0, 1.0, 1000, 64)
    with pytest.raises(ValueError, match="takes tensors of one device, not x on cpu, z on meta"):
        scale[1](x, z.to("meta"), 2.0, 1.0, 1000, 64)
    with pytest.raises(ValueError, match=r"a grid has one to three sides .* not \(1, -1\)"):
        scale[(1, -1)](x, z, 2.0, 1.0, 1000, 64)
    with pytest.raises(tile.CompileError, match=r"kernels.h:.*octile: |octile: ") as error:
        scale[1](x, z, 2.0, 1.0, 1000, 63)
    assert "power of two" in str(error.value)
