"""Kernels in the tile language, compiled when they are first launched and run on torch's tensors.

    add = octile.tile.load("masked_add.h", "MaskedAdd")
    add[octile.tile.cdiv(n, 1024)](x, z, n, b0=1024)

A parameter that the kernel declares as a number takes one; an integer for any other is a constant that the
compiler knows, c<1024>. CPU tensors run on the fast CPU executor, CUDA tensors on the GPU. With `choices`, the launch
takes the fastest of them, which is measured once for each device and class of the sizes named by `key`:

    matmul = octile.tile.load("matmul.h", "Matmul", key=["n0", "n1", "middle"], choices=[
        octile.tile.Choice({"b0": 128, "b1": 256, "b2": 64}, layout="Warpgroups<2>"),
        octile.tile.Choice({"b0": 256, "b1": 128, "b2": 64}, layout="Warpgroups<2>", band=8)])
    matmul[lambda c: (octile.tile.cdiv(n0, c["b0"]), octile.tile.cdiv(n1, c["b1"]))](x, y, z, n0, n1, middle)
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import pathlib
import platform
import re
import subprocess
import tempfile
from dataclasses import dataclass, field

import torch

_ELEMENTS = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int8: "s8",
    torch.uint8: "u8",
    torch.int32: "s32",
    torch.int64: "s64",
    torch.bool: "bool",
}
_FLOATS = ("float", "double", "f32")
_INTEGERS = {  # a type's smallest and largest number, by its name
    "bool": (0, 1),
    **{name: (-(1 << 7), (1 << 7) - 1) for name in ("s8", "int8_t")},
    **{name: (-(1 << 15), (1 << 15) - 1) for name in ("short", "int16_t")},
    **{name: (-(1 << 31), (1 << 31) - 1) for name in ("int", "s32", "int32_t")},
    **{name: (-(1 << 63), (1 << 63) - 1) for name in ("long", "long long", "s64", "int64_t", "ptrdiff_t")},
    **{name: (0, (1 << 8) - 1) for name in ("u8", "uint8_t")},
    **{name: (0, (1 << 16) - 1) for name in ("unsigned short", "uint16_t")},
    **{name: (0, (1 << 32) - 1) for name in ("unsigned", "uint32_t")},
    **{name: (0, (1 << 64) - 1) for name in ("unsigned long", "unsigned long long", "uint64_t", "size_t")},
}
_MESSAGE_BYTES = 1 << 16


class CompileError(RuntimeError):
    """A kernel does not compile. `output` is the compiler's full output; the text has its errors."""

    def __init__(self, text, output):
        super().__init__(text)
        self.output = output


class CheckError(RuntimeError):
    """A checked launch found mistakes; the text has one per line."""


@dataclass(frozen=True)
class Choice:
    """One of the ways to launch a kernel: its constants, and on a GPU how the threads share a tile.

    constants             of the kernel's parameters, by name
    layout                CUDA: "Threads<1, 256>", "Warps<2, 2>", "Warpgroups<2>", ...
    math                  CUDA: "fast" gives up the bits of exp2 and /
    band, persistent      CUDA, of Warpgroups: the order of the programs, and whether a block runs several
    threads               CPU: 0 is one for each core
    """

    constants: dict = field(default_factory=dict)
    layout: str = "Threads<4, 32>"
    math: str = "exact"
    band: int = 16
    persistent: bool = True
    threads: int = 0

    def __post_init__(self):
        if not re.fullmatch(r"(Threads|Warps|Warpgroups)<[\w ,<>]*>", self.layout):
            raise ValueError(f'octile: layout is "Threads<..>", "Warps<..>" or "Warpgroups<..>", not {self.layout!r}')
        if self.math not in ("exact", "fast"):
            raise ValueError(f'octile: math is "exact" or "fast", not {self.math!r}')

    def _executor(self, cuda):
        if not cuda:
            return f"FastCpu{{.threads = {int(self.threads)}}}"
        options = ".stream = stream"
        if self.layout.startswith("Warpgroups"):
            options += f", .persistent = {str(bool(self.persistent)).lower()}, .band = {int(self.band)}"
        return f"Cuda<{self.layout}, Math::{self.math}>{{{options}}}"


def cdiv(a, b):
    """The quotient, rounded up."""
    return -(-a // b)


def load(file, name, *, choices=None, key=(), checked=False, flags=()):
    """The kernel `name`, a struct in the C++ file `file`, as something to launch: kernel[grid](arguments). A namespace
    of the file's own goes before the name: "mine::Add".

    choices, key   see Choice: the constants that vary, and the parameters whose sizes a measurement holds for
    checked        CPU tensors run on the checked executor: a mistake, such as a load out of bounds, raises CheckError
    flags          for the compiler, after Octile's own
    """
    return Kernel(file, name, choices, key, checked, flags)


class Kernel:
    """A kernel that is compiled for each combination of types and constants, once: the results are kept in
    ~/.cache/octile/tile (under XDG_CACHE_HOME). `taken` is the choice of the last launch."""

    def __init__(self, file, name, choices, key, checked, flags):
        self.file = pathlib.Path(file).resolve()
        self.name, self.checked, self.flags = name, checked, tuple(flags)
        self.parameters = _parameters(self.file, name)
        names = [parameter for parameter, _ in self.parameters]
        self.choices = None if choices is None else tuple(choices)
        self.key = tuple(key)
        self.taken = None
        if self.choices is not None:
            if not self.choices:
                raise ValueError("octile: choices is empty")
            for choice in self.choices:
                if set(choice.constants) != set(self.choices[0].constants):
                    raise ValueError(
                        f"octile: all choices set the same constants; {list(self.choices[0].constants)} and "
                        f"{list(choice.constants)} are different"
                    )
            if checked:
                raise ValueError("octile: a checked kernel has no choices: nothing of it is timed")
        elif key:
            raise ValueError("octile: key is for a kernel with choices")
        for parameter in (*self.key, *(self.choices[0].constants if self.choices else ())):
            if parameter not in names:
                raise ValueError(f"octile: {name} has no parameter {parameter}; it has {', '.join(names)}")

    def __getitem__(self, grid):
        return functools.partial(self._launch, grid)

    def _launch(self, grid, *arguments, **named):
        choices = self.choices or (Choice(),)
        values = self._bind(arguments, named)
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        devices = {tensor.device for tensor in tensors.values()}
        if len(devices) != 1:
            found = ", ".join(f"{name} on {tensor.device}" for name, tensor in tensors.items())
            raise ValueError(f"octile: {self.name} takes tensors of one device, not {found or 'none'}")
        device = devices.pop()
        if device.type not in ("cpu", "cuda") or (self.checked and device.type != "cpu"):
            raise ValueError(f"octile: {self.name} runs on {'CPU' if self.checked else 'CPU and CUDA'} tensors, "
                             f"not on {device}")  # fmt: skip
        signature = tuple(self._kind(name, number, values.get(name)) for name, number in self.parameters)
        function = self._compiled(signature, device)
        grids = [_grid(grid, {**self._constants(values), **choice.constants}) for choice in choices]
        return self._call(function, values, signature, grids, device)

    def _bind(self, arguments, named):
        """The values of the parameters that no choice sets, by name."""
        chosen = self.choices[0].constants if self.choices else {}
        names = [name for name, _ in self.parameters if name not in chosen]
        if len(arguments) > len(names):
            raise TypeError(f"octile: {self.name} takes {', '.join(names)}, not {len(arguments)} values")
        values = dict(zip(names, arguments))
        for name, value in named.items():
            if name in values or name not in names:
                why = (
                    "is given twice" if name in values else "is set by the choices" if name in chosen else "is unknown"
                )
                raise TypeError(f"octile: {self.name}({', '.join(names)}): {name} {why}")
            values[name] = value
        missing = [name for name in names if name not in values]
        if missing:
            raise TypeError(f"octile: {self.name} needs {', '.join(missing)}, too")
        return values

    def _kind(self, name, number, value):
        """How a parameter is passed, as C++: "Tensor<f32>", "int", "float", or "c<8>"; None if choices set it."""
        if isinstance(value, torch.Tensor):
            if value.dtype not in _ELEMENTS:
                raise TypeError(f"octile: {name} is of {value.dtype}; a kernel takes {', '.join(map(str, _ELEMENTS))}")
            return f"Tensor<{_ELEMENTS[value.dtype]}>"
        if value is None and self.choices and name in self.choices[0].constants:
            return None
        if not isinstance(value, (int, float)) or (isinstance(value, bool) and number != "bool"):
            raise TypeError(f"octile: {name} is a tensor or a number, not {type(value).__name__}")
        if number in _FLOATS:
            return number
        if isinstance(value, float):
            if number:
                raise TypeError(f"octile: {name} is declared as {number}, and {value!r} is a float")
            return "f32"
        low, high = _INTEGERS[number or "int"]
        if not low <= value <= high:
            raise OverflowError(
                f"octile: {name} is {value}, but {f'its type, {number},' if number else 'a constant'} holds {low} to {high}"
            )
        return number if number else f"c<{value}>"

    def _constants(self, values):
        return {
            name: values[name]
            for name, number in self.parameters
            if not number and isinstance(values.get(name), int) and not isinstance(values.get(name), bool)
        }

    @functools.lru_cache(maxsize=None)  # noqa: B019
    def _compiled(self, signature, device):
        cuda = device.type == "cuda"
        library = ctypes.CDLL(str(_build(self, signature, cuda, _architecture(device) if cuda else None)))
        library.octile_tile_run.restype = ctypes.c_int
        return library.octile_tile_run

    def _call(self, function, values, signature, grids, device):
        pointers, shapes, integers, floats = [], [], [], []
        for (name, _), kind in zip(self.parameters, signature):
            value = values.get(name)
            if isinstance(value, torch.Tensor):
                pointers.append(value.data_ptr())
                shapes.append(value.numel() if value.is_contiguous() else _extent(value))
            elif kind in _FLOATS:
                floats.append(float(value))
            elif kind is not None and not kind.startswith("c<"):
                integers.append(int(value))
        sizes = [int(values[name]) for name in self.key]
        message, taken = ctypes.create_string_buffer(_MESSAGE_BYTES), ctypes.c_int(0)
        stream = None
        if device.type == "cuda":
            stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            status = function(
                (ctypes.c_void_p * len(pointers))(*pointers),
                (ctypes.c_int64 * len(shapes))(*shapes),
                (ctypes.c_int64 * len(integers))(*integers),
                (ctypes.c_double * len(floats))(*floats),
                (ctypes.c_int * (3 * len(grids)))(*(side for grid in grids for side in grid)),
                (ctypes.c_int64 * len(sizes))(*sizes),
                stream,
                ctypes.byref(taken),
                message,
                ctypes.c_size_t(_MESSAGE_BYTES),
            )
        text = message.value.decode(errors="replace")
        if status == 2:
            raise CheckError(text)
        if status != 0:
            raise RuntimeError(text)
        if self.choices:
            self.taken = self.choices[taken.value]


def _extent(tensor):
    """How many elements there are from a tensor's first to its last."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((side - 1) * stride for side, stride in zip(tensor.shape, tensor.stride()))


def _grid(grid, constants):
    if callable(grid):
        grid = grid(constants)
    sides = grid if isinstance(grid, (tuple, list)) else (grid,)
    if not 1 <= len(sides) <= 3 or not all(isinstance(side, int) and 0 <= side < 1 << 31 for side in sides):
        raise ValueError(f"octile: a grid has one to three sides from 0 to 2^31 - 1, not {grid!r}")
    return (*sides, 1, 1)[:3]


# ---- Source ----


def _parameters(file, name):
    """The parameters of a kernel after its context: their names, and the types of those that are numbers."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", file.read_text(), flags=re.DOTALL)
    start = re.search(rf"\b(?:struct|class)\s+{re.escape(name.split('::')[-1])}\b[^;{{]*\{{", text)
    if start is None:
        raise ValueError(f"octile: there is no struct {name} in {file}")
    call = re.search(r"\boperator\s*\(\s*\)\s*\(", text[start.end() :])
    if call is None:
        raise ValueError(f"octile: {name} in {file} has no operator(), so it is not a kernel")
    parts, depth = [""], 1
    for letter in text[start.end() + call.end() :]:
        depth += (letter in "(<{[") - (letter in ")>}]")
        if depth == 0:
            break
        if letter == "," and depth == 1:
            parts.append("")
        else:
            parts[-1] += letter
    result = []
    for part in parts[1:]:
        part = re.sub(r"\[\[.*?\]\]", "", part, flags=re.DOTALL).partition("=")[0]  # no attribute and no default value
        kind, parameter = re.fullmatch(r"\s*(.*?)[\s&]*\b(\w+)\s*", part, flags=re.DOTALL).groups()
        result.append((parameter, _number(kind)))
    return tuple(result)


def _number(kind):
    """A number's type as _FLOATS or _INTEGERS has it, or None: "const std::size_t" is "size_t", "long int" is "long"."""
    words = [word.removeprefix("std::") for word in kind.split() if word != "const"]
    rest = [word for word in words if word not in ("unsigned", "signed", "int")]
    if len(rest) < len(words):  # the words of an integer stand in any order
        words = ["unsigned"] * ("unsigned" in words) + rest or ["int"]
    name = " ".join(words)
    return name if name in _FLOATS or name in _INTEGERS else None


def _source(kernel, signature, cuda):
    """A C function that launches a kernel with one combination of types."""
    types, pointer, integer, number = [], 0, 0, 0
    for (name, _), kind in zip(kernel.parameters, signature):
        if kind is None:
            types.append(f"chosen_{name}")
        elif kind.startswith("Tensor"):
            element = kind[7:-1]
            types.append(
                f'Tensor<{element}>{{"{name}", static_cast<{element}*>(data[{pointer}]), {{sizes[{pointer}]}}}}'
            )
            pointer += 1
        elif kind in _FLOATS:
            types.append(f"static_cast<{kind}>(numbers[{number}])")
            number += 1
        elif kind.startswith("c<"):
            types.append(kind)
        else:
            types.append(f"static_cast<{kind}>(integers[{integer}])")
            integer += 1
    arguments = ", ".join([f"{kernel.name}{{}}", *types])
    headers = ["octile/tile/tile.h"] + ["octile/tile/cuda.h"] * cuda + ["octile/tile/autotune.h"] * bool(kernel.choices)
    if kernel.checked:
        body = f"""  const Report report = launch(CheckedCpu{{}}, grid(0), {arguments});
  std::string found;
  for (const Finding& finding : report.findings) found += text(report, finding) + '\\n';
  if (!found.empty()) return say(found, 2);
"""
    elif kernel.choices is None:
        body = f"  launch({Choice()._executor(cuda)}, grid(0), {arguments});\n"
    else:
        names = list(kernel.choices[0].constants)
        elements = "_".join(kind[7:-1] for kind in signature if kind is not None and kind.startswith("Tensor"))
        fixed = "".join(f"_{kind[2:-1]}" for kind in signature if kind is not None and kind.startswith("c<"))
        listed = [
            f"choice({choice._executor(cuda)}" + "".join(f", c<{int(choice.constants[n])}>" for n in names) + ")"
            for choice in kernel.choices
        ]
        blocks = "".join(f", auto chosen_{name}" for name in names)
        rows = ", ".join("{" + ", ".join(str(int(c.constants[n])) for n in names) + "}" for c in kernel.choices)
        given = ", ".join(f"int{{chosen_{name}}}" for name in names)
        words = ", ".join(f"tuning::text({one})" for one in listed)
        body = f"""  // Grids depend on the constants alone, so the first choice with the same ones tells it.
  static const std::vector<std::vector<int>> constants = {{{rows}}};
  const auto place = [](const std::vector<int>& given) {{
    return static_cast<int>(std::find(constants.begin(), constants.end(), given) - constants.begin());
  }};
  const TunedLaunch tuned = autotuned(
      {{.name = "{kernel.name.replace("::", ".")}_{elements}{fixed}", .sizes = std::vector<std::int64_t>(key, key + {len(kernel.key)})}},
      [&](auto executor{blocks}) {{ launch(executor, grid(place({{{given}}})), {arguments}); }},
      {", ".join(listed)});
  const std::vector<std::string> all = {{{words}}};
  *taken = static_cast<int>(std::find(all.begin(), all.end(), tuned.choice) - all.begin());
"""
    includes = "".join(f'#include "{header}"\n' for header in headers)
    return f"""{includes}#include <algorithm>
#include <cstdio>
#include "{kernel.file}"

using namespace octile::tile;

extern "C" int octile_tile_run([[maybe_unused]] void* const* data, [[maybe_unused]] const std::int64_t* sizes,
                               [[maybe_unused]] const std::int64_t* integers, [[maybe_unused]] const double* numbers,
                               const int* grids, [[maybe_unused]] const std::int64_t* key, [[maybe_unused]] void* stream,
                               [[maybe_unused]] int* taken, char* message, std::size_t capacity) {{
  const auto say = [&](const std::string& words, int status) {{
    std::snprintf(message, capacity, "%s", words.c_str());
    return status;
  }};
  const auto grid = [&](int i) {{ return Grid{{grids[3 * i], grids[3 * i + 1], grids[3 * i + 2]}}; }};
  try {{
{body}    return 0;
  }} catch (const std::exception& error) {{
    return say(error.what(), 1);
  }}
}}
"""


# ---- Compiling ----


def _root():
    """The sources of the tile language: OCTILE_SOURCE_DIR, or the checkout that this package is in."""
    chosen = os.environ.get("OCTILE_SOURCE_DIR")
    folder = pathlib.Path(chosen) if chosen else pathlib.Path(__file__).resolve().parents[2]
    if not (folder / "tile/octile/tile/tile.h").exists():
        raise RuntimeError(
            f"octile: kernels are compiled against the sources of the tile language, which are not in {folder}; set "
            "OCTILE_SOURCE_DIR to a checkout of Octile"
        )
    return folder


def _cache():
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    folder = pathlib.Path(base) / "octile" / "tile"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@functools.cache
def _architecture(device):
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")


def _with_includes(file, seen):
    """A file and what it includes by a path relative to it."""
    if file in seen or not file.is_file():
        return seen
    seen.append(file)
    for path in re.findall(r'^\s*#\s*include\s*"([^"]+)"', file.read_text(errors="replace"), flags=re.MULTILINE):
        _with_includes((file.parent / path).resolve(), seen)
    return seen


_CXX_FLAGS = ["-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno", "-Wno-psabi"]


def _compiler():
    return os.environ.get("OCTILE_CXX") or os.environ.get("CXX") or "g++"


def _build(kernel, signature, cuda, architecture):
    """The shared library of a kernel for one combination of types: from the cache, or compiled."""
    root = _root()
    include = [f"-I{root / 'tile'}", f"-I{root / 'src'}"]
    if cuda:
        command = [os.environ.get("OCTILE_NVCC", "nvcc"), "-std=c++20", "-O3", "--fmad=false", "-Xcompiler", "-fPIC"]
        command += [f"-gencode=arch=compute_{architecture[3:]},code={architecture}", "-x", "cu"]
        command += ["--diag-suppress=554,177,20011,20012,20013,20014,20015", "-Xcompiler", ",".join(_CXX_FLAGS[:3])]
    else:
        command = [_compiler(), "-std=c++20", "-O3", "-march=native", "-fPIC", "-w", *_CXX_FLAGS]
    command += kernel.flags
    parts = ["tile/fast.cpp"]
    if kernel.checked:
        parts += ["tile/recorder.cpp", "tile/coalescing.cpp", "tile/checked_index.cpp"]
    if kernel.choices is not None:
        parts += ["tile/autotune/store.cpp", "src/base/output.cpp"]
    source = _source(kernel, signature, cuda)
    files = _with_includes(kernel.file, []) + sorted((root / "tile/octile/tile").glob("*.h"))
    files += [root / part for part in parts]
    named = source.replace(str(kernel.file), kernel.file.name)
    target = _cache() / f"{kernel.name.split('::')[-1]}-{_digest([_processor(), *command], named, files)}.so"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        main = pathlib.Path(folder) / "kernel.cpp"
        main.write_text(source)
        _run([*command, *include, "-c", str(main), "-o", f"{folder}/kernel.o"], kernel)
        plain = [_compiler(), "-std=c++20", "-O2", "-fPIC", *_CXX_FLAGS, *([] if cuda else kernel.flags)]
        objects = [_object(root / part, plain, include, kernel) for part in parts]
        link = [command[0], "-shared", f"{folder}/kernel.o", *map(str, objects), "-o", f"{folder}/kernel.so"]
        _run([*link] if cuda else [*link, "-pthread"], kernel)
        os.replace(f"{folder}/kernel.so", target)
    return target


def _object(file, command, include, kernel):
    """What all kernels link, compiled once."""
    target = _cache() / f"{file.stem}-{_digest(command, '', [file])}.o"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            _run([*command, *include, "-c", str(file), "-o", f"{folder}/part.o"], kernel)
            os.replace(f"{folder}/part.o", target)
    return target


@functools.cache
def _processor():
    """What -march=native means here: machines may share a cache."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _digest(command, source, files):
    digest = hashlib.sha256(repr(command).encode() + source.encode())
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:24]


def _run(command, kernel):
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise RuntimeError(f"octile: there is no compiler {command[0]}; set OCTILE_CXX or OCTILE_NVCC") from error
    if result.returncode == 0:
        return
    output = result.stdout + result.stderr
    told = _errors(output, kernel.file.name) or output.splitlines()[-8:]
    raise CompileError(f"octile: {kernel.name} does not compile:\n" + "\n".join(told), output)


def _errors(output, name):
    """The first errors in a compiler's output: Octile's own sentences, then others, each with the line of the file `name`
    that led to it, if it is in another file."""
    lines = output.splitlines()
    error = re.compile(r"\berror( #[\w-]+)?:")
    at = [i for i, line in enumerate(lines) if error.search(line)]
    place = re.compile(rf"\S*\b{re.escape(name)}[:(]\d+[:)\d]*")
    own, others = [], []
    for number, i in enumerate(at):
        previous, following = at[number - 1] if number else -1, at[number + 1] if number + 1 < len(at) else len(lines)
        # g++ names the way to an error before it, clang and nvcc after it; both begin with the innermost call.
        before = [line for line in lines[previous + 1 : i] if re.search(r"\brequired (from|by)\b", line)]
        after = [line for line in lines[i + 1 : following] if re.search(r"\b(requested here|at line)\b", line)]
        shown = [lines[i]]
        if not place.search(lines[i]):
            for line in before + after:
                if found := place.search(line) or re.search(rf"at line (\d+) of \S*{re.escape(name)}", line):
                    where = found[0] if found.re is place else f"{name}:{found[1]}"
                    shown.append(f"  from {where.rstrip(':')}")
                    break
        group = own if "octile: " in error.split(lines[i], maxsplit=1)[-1] else others
        if shown not in group:
            group.append(shown)
    return [line for shown in (own + others)[:8] for line in shown]
