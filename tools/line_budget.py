#!/usr/bin/env python3
"""Lines per file, beside the budget of its kind. It only reports: going over is allowed with a reason.

usage: tools/line_budget.py [--over] [--since COMMIT]

  --over          only the files over their budget
  --since COMMIT  a column with the difference from that commit
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The first pattern that fits decides.
BUDGETS = [
    ("public header", 300, ["include/octile/*"]),
    ("kernel", 500, ["src/reference/*", "src/cpu/*/*", "src/cuda/*/*"]),
    ("host", 400, ["src/*/*", "check/*", "cli/*", "cli/*/*", "tile/*", "tile/*/*", "tile/octile/*/*", "checkpoint/*"]),
]


def kind_of(path):
    for kind, budget, patterns in BUDGETS:
        if any(path.match(pattern) for pattern in patterns):
            return kind, budget
    return None


def lines_at(commit, path):
    shown = subprocess.run(["git", "-C", ROOT, "show", f"{commit}:{path}"], capture_output=True)
    return shown.stdout.count(b"\n") if shown.returncode == 0 else 0


def main():
    parser = argparse.ArgumentParser(description="Lines per file, beside the budget of its kind.")
    parser.add_argument("--over", action="store_true", help="only the files over their budget")
    parser.add_argument("--since", metavar="COMMIT", help="a column with the difference from that commit")
    arguments = parser.parse_args()

    rows = []
    for path in sorted(path for folder in ("checkpoint", "cli", "include", "src", "tile") for path in (ROOT / folder).glob("**/*")):
        name = path.relative_to(ROOT)
        if path.suffix not in {".h", ".hpp", ".c", ".cpp", ".cu", ".cuh"} or not (found := kind_of(name)):
            continue
        rows.append((name, path.read_bytes().count(b"\n"), *found))
    total = sum(row[1] for row in rows)
    over = [row for row in rows if row[1] > row[3]]

    for name, lines, kind, budget in over if arguments.over else rows:
        change = f" {lines - lines_at(arguments.since, name):+6d}" if arguments.since else ""
        mark = f"  over by {lines - budget}" if lines > budget else ""
        print(f"{lines:6d} of {budget}{change}  {name} ({kind}){mark}")
    print(f"{total:6d} lines in {len(rows)} files, {len(over)} over budget")


if __name__ == "__main__":
    sys.exit(main())
