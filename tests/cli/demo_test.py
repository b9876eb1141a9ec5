#!/usr/bin/env python3
"""examples/digits on files and options that it must refuse, and on a data file that it must take.

usage: demo_test.py [PROGRAM]     (or the environment variable OCTILE_DIGITS)
"""

import gzip
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import json_fields

PROGRAM = os.path.abspath(sys.argv[1] if len(sys.argv) > 1 else os.environ.get("OCTILE_DIGITS", "build/octile-digits"))
DIGITS = pathlib.Path(__file__).parents[2] / "examples" / "digits" / "digits.csv"
QUICK = ["--epochs", "1", "--seeds", "1", "--hidden", "32", "--json"]

failures = 0


def check(good, what):
    global failures
    if not good:
        failures += 1
        print("FAILED:", what)


def demo(*arguments, cwd):
    run = subprocess.run([PROGRAM, *arguments], cwd=cwd, text=True, capture_output=True)
    return run.returncode, run.stdout, run.stderr


def refused(status, text, arguments, cwd):
    got, out, err = demo(*arguments, cwd=cwd)
    check(got == status, f"{arguments}: status {got}, expected {status}")
    check(text in err, f"{arguments}: {err.strip()!r}, expected {text!r} in it")
    check(out == "", f"{arguments}: prints {out!r}")
    check(not list(pathlib.Path(cwd).glob("octile-demo.html*")), f"{arguments}: leaves a page behind")


def bad_files():
    lines = DIGITS.read_text().splitlines()
    text = "\n".join(lines) + "\n"
    third = lines[2].split(",")

    def with_third(values):
        return "\n".join([*lines[:2], ",".join(values), *lines[3:]]) + "\n"

    yield "cut.csv", text[:-20], "cut.csv:1797: 57 values, expected 65"
    yield "short.csv", with_third(third[:-1]), "short.csv:3: 64 values, expected 65"
    yield "long.csv", with_third(third + ["1"]), "long.csv:3: 66 values, expected 65"
    yield "ink.csv", with_third(["17"] + third[1:]), "ink.csv:3: pixel 1 is '17', expected an integer from 0 to 16"
    yield "word.csv", with_third(third[:63] + ["ink"] + third[64:]), "word.csv:3: pixel 64 is 'ink'"
    yield "minus.csv", with_third(third[:9] + ["-1"] + third[10:]), "minus.csv:3: pixel 10 is '-1'"
    yield "empty_value.csv", with_third(third[:9] + [""] + third[10:]), "empty_value.csv:3: pixel 10 is ''"
    yield "huge.csv", with_third(["9" * 40] + third[1:]), "huge.csv:3: pixel 1 is '999999999999999999999999...'"
    yield "digit.csv", with_third(third[:-1] + ["10"]), "digit.csv:3: the digit is '10', expected an integer from 0 to 9"
    yield "blank.csv", "\n" + text, "blank.csv:1: 0 values"
    yield "none.csv", "", "none.csv: digit 0 occurs 0 times in 0 lines, expected at least 2 times"
    yield "few.csv", "\n".join(lines[:12]) + "\n", "few.csv: digit 2 occurs 1 times in 12 lines"
    yield "binary.csv", "\x00\x01\x7f" * 100, "binary.csv:1: 1 values"


def main():
    if not os.path.exists(PROGRAM):
        print("skipped: there is no program", PROGRAM)
        sys.exit(77)
    with tempfile.TemporaryDirectory() as directory:
        folder = pathlib.Path(directory)
        for name, text, reason in bad_files():
            (folder / name).write_text(text)
            refused(1, reason, ["--data", name], folder)
        (folder / "digits.csv.gz").write_bytes(gzip.compress(DIGITS.read_bytes()))
        refused(1, "digits.csv.gz: is compressed", ["--data", "digits.csv.gz"], folder)
        refused(1, "missing.csv", ["--data", "missing.csv"], folder)
        refused(1, "there is no directory", ["--html", "nowhere/page.html"], folder)
        refused(1, "it is a directory", ["--html", "."], folder)
        (folder / "work.txt").write_text("mine")
        refused(1, "work.txt: it already exists, and is not a page of HTML", ["--html", "work.txt"], folder)
        check((folder / "work.txt").read_text() == "mine", "--html replaces what is no page")
        for option, value in (("--epochs", "0"), ("--seeds", "-1"), ("--batch", "0"), ("--batch", "x"), ("--hidden", "48"),
                              ("--hidden", "0"), ("--threads", "-2"), ("--epoch", "3")):
            refused(2, option, [option, value], folder)
        refused(2, "--no-html", ["--no-html", "--html", "page.html"], folder)

        # The built-in digits equal the file's, and those of a file with another system's line ends and none at
        # its end. Equal results also show that a run is repeatable.
        (folder / "crlf.csv").write_bytes(DIGITS.read_bytes().rstrip().replace(b"\n", b"\r\n"))
        results = []
        for data in ([], ["--data", str(DIGITS)], ["--data", "crlf.csv"]):
            status, out, err = demo(*QUICK, "--no-html", *data, cwd=folder)
            check(status == 0, f"{data}: status {status}: {err}")
            result = json.loads(out)
            check(not json_fields.undocumented(result, "demo"), json_fields.undocumented(result, "demo"))
            check(result["data"]["images"] == 1797, f"{data}: {result['data']}")
            results.append([(way["accuracy"], way["curves"]) for way in result["ways"]])
        check(results[0] == results[1] == results[2], "the same digits give the same curves")
        check(not (folder / "octile-demo.html").exists(), "--no-html writes no page")

        status, out, err = demo("--epochs", "1", "--seeds", "1", "--hidden", "32", cwd=folder)
        check(status == 0 and "wrote octile-demo.html" in out, f"status {status}: {out}{err}")
        check((folder / "octile-demo.html").read_text().endswith("</html>\n"), "the page is whole")

        # Replaces a page: completely or not at all, under no predictable name; through a link, and into a pipe.
        page = folder / "octile-demo.html"
        page.write_text("<!DOCTYPE html>old")
        for suffix in (".tmp", ".part", "~"):
            (folder / f"octile-demo.html{suffix}").symlink_to("victim")
        (folder / "link.html").symlink_to("octile-demo.html")
        status, out, err = demo(*QUICK, "--html", "link.html", cwd=folder)
        check(status == 0 and (folder / "link.html").is_symlink(), f"status {status}: {err}")
        check(page.read_text().endswith("</html>\n") and not (folder / "victim").exists(), "the page behind the link")
        status, out, err = demo(*QUICK, "--html", "/dev/stdout", cwd=folder)
        check(status == 0 and out.startswith("<!DOCTYPE html>") and "</html>\n" in out, f"/dev/stdout: {status}: {err}")

        # Minibatches of one image, of a size that does not divide the number of images, and of more than there are.
        for batch in ("1", "33", "4096"):
            status, out, err = demo(*QUICK, "--no-html", "--batch", batch, cwd=folder)
            check(status == 0, f"--batch {batch}: status {status}: {err}")
    print(f"{failures} failed")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
