"""What the machine can do at most, as `octile bench` measures it."""

import json
import os
import pathlib
import subprocess

from turns import limits


def ceilings(arguments):
    """The peaks of `octile bench --json`, or {"missing": why}."""
    command = pathlib.Path(arguments.octile) if arguments.octile else arguments.library.parent / "octile"
    if not command.exists():
        return {"missing": f"{command} is not there"}
    # The smallest benchmark there is; the peaks are measured before any.
    bench = [command, "bench", "--json", "--runs", "1", "--warm", "--shape", "1x64x64", "--filter", "backward_db"]
    ran = subprocess.run(
        [*bench, "--threads", str(arguments.threads)],
        capture_output=True,
        text=True,
        env={**os.environ, **limits(arguments.isa)},
    )
    if ran.returncode != 0:
        return {"missing": ran.stderr.strip().split("\n")[0]}
    return json.loads(ran.stdout)["peaks"]


def higher(*measured):
    """Of each peak the highest: a machine shared with others shows it only now and then."""
    if missing := [peaks for peaks in measured if "missing" in peaks]:
        return missing[0]
    return {name: max((peaks[name] for peaks in measured), key=lambda p: p["rate"]) for name in measured[0]}


def disturbed(*measured):
    """Whether others took processors away: then the arithmetic in registers is slower once than another time."""
    rates = [peaks["int8"]["rate"] for peaks in measured if "missing" not in peaks]
    return bool(rates) and min(rates) < 0.85 * max(rates)
