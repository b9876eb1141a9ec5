"""Makes a folder to link with, so that a shared library built on this machine loads with glibc 2.28 and newer.

    python3 tools/wheel/stubs.py FOLDER      prints the options for the linker

glibc keeps the old versions of each of its functions, and the linker always takes the newest. In FOLDER there are libraries
without code, named as glibc's are, whose functions have the newest version that glibc 2.28 has too. What is younger than that
is missing there: the link fails, and names it. The few such names that g++ itself needs are in compat.c.
"""

import re
import subprocess
import sys
from pathlib import Path

NEWEST = (2, 28)
LIBRARIES = {"c": "libc.so.6", "m": "libm.so.6", "pthread": "libpthread.so.0", "dl": "libdl.so.2", "rt": "librt.so.1"}
CC = "cc"


def run(*command):
    return subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, text=True).stdout


def path_of(name):
    path = Path(run(CC, f"-print-file-name={name}").strip())
    if not path.is_absolute():
        raise SystemExit(f"stubs.py: {CC} finds no {name}")
    return path


def symbols(library):
    """{name: (version, whether it is data)} of what glibc 2.28 has too."""
    chosen = {}
    for line in run("objdump", "-T", library).splitlines():
        match = re.match(r"[0-9a-f]+ .{5}(.)(.) (\S+)\s+[0-9a-f]+ +\(?GLIBC_([0-9.]+)\)?\s+(\S+)$", line)
        if not match or match[3] in ("*UND*", "*ABS*"):
            continue
        version, name = tuple(map(int, match[4].split("."))), match[5]
        if version <= NEWEST and version > chosen.get(name, ((), 0))[0]:
            chosen[name] = version, match[2] == "O"
    return chosen


def make_stub(folder, short, soname):
    found = symbols(path_of(soname))
    versions = sorted({version for version, _ in found.values()}) or [(2, 2, 5)]
    names = ["GLIBC_" + ".".join(map(str, version)) for version in versions]
    lines = []
    for index, (name, (version, data)) in enumerate(found.items()):
        kind = "object" if data else "function"
        stub, full = f"__stub_{index}", f"{name}@@{names[versions.index(version)]}"
        lines += [f".globl {stub}", f".type {stub}, @{kind}", f"{stub}: .byte 0", f".size {stub}, 1", f".symver {stub}, {full}"]
    source, script = folder / f"{short}.s", folder / f"{short}.map"
    source.write_text(".data\n" + "\n".join(lines) + "\n")
    script.write_text("".join(f"{name} {{}};\n" for name in names))
    # libc.so is a script for the linker.
    target = folder / (soname if short == "c" else f"lib{short}.so")
    run(CC, "-shared", "-nostdlib", f"-Wl,-soname,{soname},--version-script={script}", source, "-o", target)


def main():
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for short, soname in LIBRARIES.items():
        make_stub(folder, short, soname)
    run(CC, "-O2", "-fPIC", "-fvisibility=hidden", "-c", Path(__file__).with_name("compat.c"), "-o", folder / "compat.o")
    run("ar", "rcs", folder / "libcompat.a", folder / "compat.o")
    loader = "AS_NEEDED ( /lib64/ld-linux-x86-64.so.2 )"
    (folder / "libc.so").write_text(
        f"GROUP ( {folder}/libc.so.6 {folder}/libcompat.a {path_of('libc_nonshared.a')} {loader} )\n"
    )
    # Before 2.34 these were not part of libc.so.6: an older glibc finds their functions in whichever library is loaded.
    older = "-Wl,--push-state,--no-as-needed -lpthread -ldl -lrt -Wl,--pop-state"
    # libgcc_s stays shared: exceptions pass from one library to another.
    print(f"-L{folder} {older} -static-libstdc++ -Wl,--exclude-libs,ALL")


if __name__ == "__main__":
    main()
