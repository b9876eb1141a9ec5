"""octile/_c.py against a C compiler's view of the headers: sizes, offsets and constants."""

import pathlib
import re
import shutil
import subprocess

import pytest
from octile import _c

HEADERS = pathlib.Path(__file__).resolve().parents[2] / "include"

# By the prefix in the header: the names in _c.py, all of them unless listed here.
CHOICES = {
    "DEVICE": "CPU CUDA",
    "DTYPE": "F16 BF16 F32 F64 S8 U8 S4 S32",
    "ACTIVATION": "NONE DYNAMIC_PER_TOKEN DYNAMIC_PER_TENSOR STATIC_PER_TENSOR",
    "WEIGHT": "S8_PER_CHANNEL S8_PER_TENSOR S4_GROUP S8_GROUP",
    "MAPPING": "SYMMETRIC AFFINE",
    "SCALE": "GIVEN",
    "ORIENTATION": "ROW_MAJOR TRANSPOSED BOTH",
    "LAYOUT": "OUT_IN IN_OUT",
    "PROLOGUE": "GELU_TANH SILU RMS_NORM LAYER_NORM",
    "PRODUCT": "DEQUANTIZED INT8",
    "ROUNDING": "NEAREST STOCHASTIC",
    "METHOD": "CLIP_SEARCH ERROR_FEEDBACK",
    "ORDER": "AS_THEY_LIE BY_MOMENT",
}
RENAMED = {
    "ABI_VERSION": "ABI_VERSION",
    "UNSUPPORTED": "UNSUPPORTED",
    "PER_TENSOR": "GRANULARITY_TENSOR",
    "PER_ROW": "GRANULARITY_ROW",
    "PER_COLUMN": "GRANULARITY_COLUMN",
    "PER_GROUP": "GRANULARITY_GROUP",
    "NO_PROLOGUE": "PROLOGUE_NONE",
    "NO_PRODUCT": "PRODUCT_NONE",
    "METHOD_NEAREST": "METHOD_NEAREST",
}


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_structures_and_constants_are_those_of_the_headers(tmp_path):
    constants = {name: f"{prefix}_{name}" for prefix, names in CHOICES.items() for name in names.split()} | RENAMED
    in_python = {n for n, v in vars(_c).items() if re.fullmatch("[A-Z][A-Z0-9_]*", n) and type(v) is int}
    assert in_python == set(constants)
    expected = {name: getattr(_c, name) for name in constants}
    lines = [f'print("{name}", OCTILE_{c_name});' for name, c_name in constants.items()]
    for name, structure in _c.STRUCTURES.items():
        expected[name] = _c.C.sizeof(structure)
        lines.append(f'print("{name}", sizeof({name}));')
        for field, _ in structure._fields_:
            expected[f"{name}.{field}"] = getattr(structure, field).offset
            expected[f"{name}.{field}:"] = getattr(structure, field).size
            lines.append(f'print("{name}.{field}", offsetof({name}, {field}));')
            lines.append(f'print("{name}.{field}:", sizeof((({name}*)0)->{field}));')
    source = '#include <stdio.h>\n#include "octile/octile_calibration.h"\n'
    source += 'static void print(const char* name, long long value) { printf("%s %lld\\n", name, value); }\n'
    (tmp_path / "probe.c").write_text(source + "int main(void) {\n" + "\n".join(lines) + "\n}\n")
    subprocess.run(["cc", "-I", HEADERS, tmp_path / "probe.c", "-o", tmp_path / "probe"], check=True)
    printed = subprocess.run([tmp_path / "probe"], check=True, capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in map(str.split, printed.splitlines())}
    assert found == expected
    text = "".join(path.read_text() for path in sorted((HEADERS / "octile").glob("octile*.h")))
    assert set(re.findall(r"^\} (octile_\w+);", text, re.MULTILINE)) == set(_c.STRUCTURES)
