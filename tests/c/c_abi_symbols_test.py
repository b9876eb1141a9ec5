"""What liboctile.so shows to others: the functions of octile.h and octile_calibration.h, the C++ names that the headers mark
OCTILE_API, and nothing else; and what it needs: the C and C++ runtime alone."""

import os
import re
import shutil
import subprocess
import sys
import unittest
from pathlib import Path

SOURCE = Path(os.environ["OCTILE_SOURCE_DIR"])
LIBRARY = os.environ["OCTILE_LIBRARY"]
HEADERS = SOURCE / "include" / "octile"
RUNTIME = r"(libc|libm|libstdc\+\+|libgcc_s|libpthread|libdl|librt|ld-linux[-\w]*)\.so[.\d]*"


def output(*command):
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def declared_in_c():
    return set(re.findall(r"OCTILE_API[^;(]*?(octile_\w+)\(", "".join(map(Path.read_text, HEADERS.glob("octile*.h")))))


def declared_in_cpp():
    names = set()
    for header in HEADERS.glob("*.h"):
        if header.name.startswith("octile") or header.name == "export.h":
            continue
        for line in header.read_text().splitlines():
            match = re.search(r"class OCTILE_API (\w+)", line) or re.search(r"^OCTILE_API .*?(\w+)\(", line)
            if match:
                names.add(match.group(1))
    return names


class SymbolsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.c = set()
        cls.cpp = set()
        for line in output("nm", "-D", "--defined-only", LIBRARY).splitlines():
            *_, kind, mangled = line.split()
            if kind == "A":  # the name of a symbol version
                continue
            name = output("c++filt", mangled).strip() if mangled.startswith("_Z") else mangled
            (cls.cpp if mangled.startswith("_Z") else cls.c).add(name)

    def test_the_c_functions_are_those_of_the_header(self):
        declared = declared_in_c()
        self.assertGreater(len(declared), 30)
        self.assertEqual(self.c, declared)

    def test_the_cpp_names_are_those_of_the_headers(self):
        declared = declared_in_cpp()
        self.assertLessEqual({"Error", "Plan", "LinearPlan", "kernels", "name"}, declared)
        names = "|".join(sorted(declared))
        # A function, a member of a class, or a class's type information. Not a nested class: Plan::Impl is internal.
        allowed = re.compile(rf"octile::(?P<name>{names})(<octile::\w+>)?(::~?\w+)?(\[abi:\w+\])?\(.*\)( const)?"
                             rf"|(typeinfo|typeinfo name|vtable) for octile::({names})")
        self.assertEqual([name for name in sorted(self.cpp) if not allowed.fullmatch(name)], [])
        found = {match.group("name") for match in map(allowed.fullmatch, self.cpp) if match}
        self.assertEqual(declared - found, set())

    def test_it_needs_the_runtime_alone(self):
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-d", LIBRARY))
        self.assertIn("libc.so.6", needed)
        self.assertEqual([name for name in needed if not re.fullmatch(RUNTIME, name)], [])


if __name__ == "__main__":
    missing = [tool for tool in ("nm", "c++filt", "readelf") if not shutil.which(tool)]
    if missing or ".so" not in os.path.basename(LIBRARY):
        print(f"skipped: {LIBRARY} is no shared library" if not missing else f"skipped: no {', '.join(missing)}")
        sys.exit(77)
    unittest.main()
