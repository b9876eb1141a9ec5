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

struct Flag {
  TILE_KERNEL void operator()(auto& t, auto x, auto z, bool plus, float s, [[maybe_unused]] unsigned n,
                              auto block) const {
    const auto i = t.arange(block);
    t.store(z + i, t.load(x + i) + (plus ? s : 0.0f), i < n);
  }
};

struct Wide {
  TILE_KERNEL void operator()(auto& t, auto z, s64 n, auto block) const {
    t.store(z + t.arange(block), cast<s32>(n + t.full(block, 0)));
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
    # Another process uses the file's choice, even if it would measure another.
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


def test_a_number_that_its_type_cannot_hold_is_refused(folder):
    x, z = torch.randn(64), torch.zeros(64)
    scale = tile.load(folder / "kernels.h", "Scale", flags=FLAGS)
    for n in (2**31, 2**32 + 5, -(2**31) - 1):
        with pytest.raises(OverflowError, match=f"n is {n}, but its type, int, holds -2147483648 to 2147483647"):
            scale[1](x, z, 2.0, 1.0, n, block=64)
    with pytest.raises(TypeError, match="n is declared as int, and 5.9 is a float"):
        scale[1](x, z, 2.0, 1.0, 5.9, block=64)
    with pytest.raises(OverflowError, match="block is 2147483648, but a constant holds -2147483648 to 2147483647"):
        scale[1](x, z, 2.0, 1.0, 64, block=2**31)
    assert torch.equal(z, torch.zeros(64))
    scale[1](x, z, 2, 1.0, 64, block=64)  # an integer for a float
    assert torch.equal(z, x * 2 + 1)
    wide = tile.load(folder / "kernels.h", "Wide", flags=FLAGS)
    with pytest.raises(OverflowError, match=f"n is {2**64 + 5}, but its type, s64, holds"):
        wide[1](torch.zeros(8, dtype=torch.int32), 2**64 + 5, block=8)
    with pytest.raises(TypeError, match="n is a tensor or a number, not bool"):
        wide[1](torch.zeros(8, dtype=torch.int32), True, block=8)


OUTPUTS = {
    "g++": """In file included from /octile/tile/mask.h:5,
/octile/tile/context.h: In instantiation of 'auto octile::tile::Context<E>::load(const P&) [with E = octile::tile::FastCpu]':
/home/kernels.h:12:9:   required from 'void Deep::operator()(auto:1&) const [with auto:1 = octile::tile::Context<>]'
/octile/tile/fast.h:250:15:   required from here
/octile/tile/operators.h:40:3: error: no match for 'operator+' (operand types are 'octile::tile::Tile<>' and 'int')
/octile/tile/operators.h:41:3: note: candidate: 'octile::tile::operator+'
/octile/tile/operators.h: In instantiation of 'A& octile::tile::operator+=(A&, const B&)':
/home/kernels.h:13:56:   required from 'Deep::operator()(auto:1&) const::<lambda(int)>'
/octile/tile/context.h:40:9:   required from 'void octile::tile::Fetches<>::each()'
/home/kernels.h:12:9:   required from 'void Deep::operator()(auto:1&) const'
/octile/tile/operators.h:181:19: error: static assertion failed: octile: += would change the type of the tile.
/octile/tile/operators.h:181:19: note: 'same_values<octile::tile::Tile<>, octile::tile::Tile<> >' evaluates to false
""",
    "clang": """In file included from /octile/tile/mask.h:5:
/octile/tile/operators.h:40:3: error: invalid operands to binary expression ('octile::tile::Tile<>' and 'int')
/home/kernels.h:12:9: note: in instantiation of function template specialization 'octile::tile::Context<>::load' requested here
/octile/tile/operators.h:181:19: error: static_assert failed "octile: += would change the type of the tile."
/octile/tile/context.h:40:9: note: in instantiation of function template specialization 'F' requested here
/home/kernels.h:13:56: note: in instantiation of function template specialization 'octile::tile::operator+=' requested here
/home/kernels.h:12:9: note: in instantiation of function template specialization 'Deep::operator()' requested here
2 errors generated.
""",
    "nvcc": """/octile/tile/operators.h(40): error: no operator "+" matches these operands
          detected during instantiation of "auto octile::tile::Context<E>::load(const P &)" at line 12 of /home/kernels.h
/octile/tile/operators.h(181): error: static assertion failed with "octile: += would change the type of the tile."
          detected during:
            instantiation of "A &octile::tile::operator+=(A &, const B &)" at line 13 of /home/kernels.h
            instantiation of "void Deep::operator()(<auto-1> &) const" at line 99 of /octile/tile/fast.h
2 errors detected in the compilation of "/tmp/kernel.cpp".
""",
}


@pytest.mark.parametrize("compiler", OUTPUTS)
def test_errors_of_a_compiler_are_short_and_name_the_line(compiler):
    first, from_13, second, from_12 = tile._errors(OUTPUTS[compiler], "kernels.h")
    assert "operators.h" in first and "octile: += would change the type of the tile." in first
    assert from_13.startswith("  from ") and "kernels.h:13" in from_13
    assert "operators.h" in second and "operator" in second.replace("operands", "operator")
    assert from_12.startswith("  from ") and "kernels.h:12" in from_12


def test_an_error_in_the_kernel_itself_is_told(folder):
    (folder / "broken.h").write_text(
        """#include "octile/tile/context.h"
struct Typo {
  TILE_KERNEL void operator()(auto& t, auto z, auto block) const { t.store(z + t.arrange(block), 1.0f); }
};
struct Deep {
  TILE_KERNEL void operator()(auto& t, auto z, auto block) const {
    auto sum = t.full(block, 0.0f);
    t.pipeline(octile::tile::c<3>, 2, [&](int) { return octile::tile::fetches(t.fetch(z + t.arange(block))); },
               [&](int, const auto& v) { sum += col(v); });
  }
};
"""
    )
    with pytest.raises(tile.CompileError, match=r"broken.h:3:\d+: error: .*arrange"):
        tile.load(folder / "broken.h", "Typo", flags=FLAGS)[1](torch.zeros(8), block=8)
    with pytest.raises(tile.CompileError, match=r"error: .*octile: .*\n  from .*broken.h:9:\d+") as error:
        tile.load(folder / "broken.h", "Deep", flags=FLAGS)[1](torch.zeros(8), block=8)
    assert all("error: " in line or line.startswith("  from ") for line in str(error.value).splitlines()[1:])
    assert "required from" in error.value.output


def test_the_types_of_parameters_are_read_as_cxx_has_them(folder):
    declared = {
        "bool flag": "bool",
        "const int n": "int",
        "[[maybe_unused]] int n": "int",
        "unsigned n": "unsigned",
        "unsigned int n": "unsigned",
        "signed n": "int",
        "std::size_t n": "size_t",
        "short n": "short",
        "short int n": "short",
        "int long n": "long",
        "const long long& n": "long long",
        "long unsigned int n": "unsigned long",
        "std::uint8_t n": "uint8_t",
        "float s = 2.0f": "float",
        "double s = f(1, 2)": "double",
        "auto s = 3": None,
        "c<3> s": None,
    }
    parameters = ", ".join(declared)
    (folder / "types.h").write_text(f"struct Types {{ void operator()(auto& t, {parameters}) const {{}} }};")
    read = tile._parameters(folder / "types.h", "Types")
    names = [text.partition(" = ")[0].split()[-1] for text in declared]
    assert read == tuple(zip(names, declared.values()))


@pytest.mark.parametrize("given", [True, 1])
def test_a_bool_takes_a_bool(folder, given):
    x, z = torch.randn(64), torch.zeros(64)
    flag = tile.load(folder / "kernels.h", "Flag", flags=FLAGS)
    flag[1](x, z, given, 2.0, 32, block=64)
    assert torch.equal(z[:32], x[:32] + 2) and torch.equal(z[32:], torch.zeros(32))
    with pytest.raises(OverflowError, match="plus is 2, but its type, bool, holds 0 to 1"):
        flag[1](x, z, 2, 2.0, 32, block=64)
    with pytest.raises(OverflowError, match="n is -1, but its type, unsigned, holds 0 to 4294967295"):
        flag[1](x, z, given, 2.0, -1, block=64)


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
