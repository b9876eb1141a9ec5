#!/usr/bin/env python3
"""Copies a Python package with every cpuid instruction of its libraries replaced, for cpuid_mask.cpp.

usage: mask_cpuid.py PACKAGE FOLDER
"""

import os
import pathlib
import shutil
import subprocess
import sys

CPUID, UD2 = b"\x0f\xa2", b"\x0f\x0b"


def executable_segments(library):
    """(address, offset in the file, size) of each."""
    lines = subprocess.run(["readelf", "-lW", library], capture_output=True, text=True, check=True).stdout.split("\n")
    loads = [line.split() for line in lines if line.strip().startswith("LOAD") and " E " in line[line.find("0x") :]]
    return [(int(f[2], 16), int(f[1], 16), int(f[4], 16)) for f in loads]


def cpuid_addresses(library):
    command = ["objdump", "-d", "--no-show-raw-insn", library]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as objdump:
        found = [int(line.split(":")[0], 16) for line in objdump.stdout if line.rstrip().endswith("\tcpuid")]
    return found


def replace(library):
    code = bytearray(library.read_bytes())
    segments, count = executable_segments(library), 0
    for address in cpuid_addresses(library):
        start, offset, _ = next(s for s in segments if s[0] <= address < s[0] + s[2])
        at = offset + address - start
        if code[at : at + 2] != CPUID:
            sys.exit(f"{library}: no cpuid at {address:#x}")
        code[at : at + 2] = UD2
        count += 1
    if count:
        library.unlink()  # a link to the original
        library.write_bytes(code)
    return count


def main():
    package, folder = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    copy = folder / package.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(package, copy, copy_function=os.link, ignore=shutil.ignore_patterns("__pycache__"))
    for library in [path for path in copy.rglob("*.so*") if path.is_file() and not path.is_symlink()]:
        if count := replace(library):
            print(f"{library.name}: {count} cpuid instructions", flush=True)


if __name__ == "__main__":
    sys.exit(main())
