"""Tables for people, and what goes into the JSON."""

import datetime
import math
import pathlib
import platform
import statistics
import subprocess
import sys


BESTS = {
    "best_float": "best float",
    "best_layer": "best exact int8, whole layer",
    "best_exact": "best exact int8, any",
    "best_any": "best of any",
}
AGAINST = {
    "layer": "the best exact int8 peer that quantizes X too",
    "exact": "the best exact int8 peer",
    "any": "the best of any peer",
}


class Progress:
    """A line on a terminal that the next one replaces."""

    def say(self, text):
        if sys.stderr.isatty():
            print(f"\r\033[K{text} ...", end="", file=sys.stderr, flush=True)

    def clear(self):
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def table(header, rows, left=1):
    """Columns as wide as needed, the first `left` ones flush left."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [str(c).ljust(w) if i < left else str(c).rjust(w) for i, (c, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join(lines)


def cpu_name():
    for line in open("/proc/cpuinfo", encoding="utf-8"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def last_cache_bytes():
    sizes = []
    for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]])
    return max(sizes, default=32 << 20)


def commit(root):
    """The commit that is checked out, with a + if files differ from it."""
    command = ["git", "-C", root, "describe", "--always", "--exclude=*", "--abbrev=7", "--dirty=+"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return "unknown"
    return ran.stdout.strip() if ran.returncode == 0 else "unknown"


def facts(arguments, peers, root):
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_name(),
        "threads": arguments.threads,
        "isa": arguments.isa or "any",
        "weights": "cold" if arguments.cold else "hot",
        "rounds": arguments.rounds,
        "commit": arguments.commit or commit(root),
        "last_cache_bytes": last_cache_bytes(),
        "versions": {**peers.versions, "python": platform.python_version()},
        "not_here": peers.missing,
        "not_limited": peers.not_limited,
    }


def heading(f, peers):
    threads = f"{f['threads']} thread{'s' if f['threads'] != 1 else ''}"
    versions = ", ".join(name if name.endswith(text) else f"{name} {text}" for name, text in f["versions"].items())
    lines = [
        f"{f['date']}, {f['cpu']}, {threads}, ISA {f['isa']}, weights {f['weights']}, {f['rounds']} rounds, "
        f"commit {f['commit']}",
        versions,
    ]
    lines += [f"skipped: {name}: {reason}" for name, reason in f["not_here"].items()]
    if f["isa"] != "any" and peers.not_limited:
        lines.append(f"not limited to {f['isa']}, used what the machine has: {', '.join(peers.not_limited)}")
    return "\n".join(lines) + "\n"


def check_table(verdicts):
    rows = []
    for name, v in verdicts.items():
        if v["kind"] != "w8":
            continue
        if "failed" in v:
            rows.append([name, "-", "", "", v["failed"][:90]])
        else:
            rows.append([name, v["exact"], f"{v['worst']:.0f}", f"{v['wrong']} of {v['of']}", ""])
    header = ["8 bits, full range", "exact", "worst error", "wrong sums", ""]
    return table(header, rows, left=2) + "\n"


def ceilings_line(peaks):
    if "missing" in peaks:
        return f"skipped: the machine's ceilings: {peaks['missing']}"
    parts = [f"{name} {p['rate'] / 1e9:.1f} G{p['unit']} ({p['how']})" for name, p in peaks.items()]
    return "the machine's ceilings, measured before and after: " + ", ".join(parts)


def main_of_ours(shape, rows):
    """Packed where there is that, and for W4 the one with int8 activations."""
    wanted = ["octile w4a8", "octile w4a16"] if shape.kind == "w4" else ["octile w8a8"]
    for name in [*wanted, *(w + " unpacked" for w in wanted)]:
        if name in rows:
            return name
    return None


def result(shape, measured, peers, verdicts, document):
    facts_of = {c["name"]: c for c in peers.contenders}
    peaks = measured["ceilings"]
    stays_in_cache = document["weights"] == "hot" and shape.weight_bytes() < 1.5 * document["last_cache_bytes"]
    rows = {}
    for name, times in measured["times"].items():
        good = [t for t in times if t == t]
        if not good:
            measured["failures"][name] = "no run succeeded"
            continue
        median = statistics.median(good)
        c = facts_of[name]
        rows[name] = {
            "seconds": median,
            "fastest_seconds": min(good),
            "gops": shape.operations() / median / 1e9,
            "fastest_gops": shape.operations() / min(good) / 1e9,
            "exact": verdicts[name]["exact"] if c["kind"] == "w8" else "",
            "x": c["x"],
            "fused": c["fused"],
            "kind": c["kind"],
            "error": measured["errors"][name],
            "note": measured["notes"][name],
            "times": [t if t == t else None for t in times],
        }
    ours = main_of_ours(shape, rows)
    out = {
        "shape": str(shape),
        "kind": shape.kind,
        "m": shape.m,
        "k": shape.k,
        "n": shape.n,
        "ours": ours,
        "ceilings": peaks,
        "contenders": rows,
        "failures": measured["failures"],
    }
    if not ours:
        return out
    for row in rows.values():
        pairs = zip(row["times"], rows[ours]["times"])
        row["ours_is_faster_by"] = statistics.median([a / b for a, b in pairs if a and b])
    theirs = {name: row for name, row in rows.items() if not name.startswith("octile")}
    out["best_layer"] = best(theirs, lambda r: r["exact"] == "yes" and r["x"] == "f32")
    out["best_exact"] = best(theirs, lambda r: r["exact"] == "yes")
    out["best_float"] = best(theirs, lambda r: r["kind"] == "float")
    out["best_any"] = best(theirs, lambda r: True)
    if "missing" not in peaks:
        moved = shape.weight_bytes() + 4 * shape.m * (shape.k + shape.n)
        out["share_of_int8"] = rows[ours]["gops"] * 1e9 / peaks["int8"]["rate"]
        if not stays_in_cache:
            out["share_of_read"] = moved / rows[ours]["seconds"] / peaks["read"]["rate"]
    return out


def best(rows, fits):
    names = [name for name, row in rows.items() if fits(row)]
    return min(names, key=lambda name: rows[name]["seconds"], default=None)


def ratio(r, name):
    return r["contenders"][name]["ours_is_faster_by"] if name else None


def fastest_ratio(r, name):
    return r["contenders"][name]["fastest_seconds"] / r["contenders"][r["ours"]]["fastest_seconds"]


def geometric_mean(values):
    return math.exp(statistics.fmean(math.log(x) for x in values))


def milliseconds(seconds):
    return f"{seconds * 1e3:.3f}"


def number(value, digits=2):
    return "-" if value is None else f"{value:.{digits}f}"


def shape_table(r):
    rows = []
    for name, c in sorted(r["contenders"].items(), key=lambda item: item[1]["seconds"]):
        # A bare sum of integers has no error unless it is wrong; of the others it is mostly that of quantizing X.
        error = "0" if c["error"] == 0 else f"{c['error']:.1e}"
        cells = [name, milliseconds(c["seconds"]), f"{c['gops']:.0f}", f"{c['fastest_gops']:.0f}"]
        rows.append([*cells, number(c.get("ours_is_faster_by")), c["exact"], c["x"], c["fused"], error])
    header = [f"{r['shape']}", "ms", "GOPS", "best GOPS", "ours/it", "exact", "X", "fused", "error"]
    text = table(header, rows)
    for name, reason in r["failures"].items():
        text += f"\nskipped: {name}: {reason[:120]}"
    text += "\n" + ceilings_line(r["ceilings"])
    return text + "\n"


def geometric_means(results):
    """Of the ratios, by kind, and of those of the best times."""
    means = {}
    for kind in ("w8", "w4"):
        for which in ("best_layer", "best_exact", "best_any"):
            ratios = [ratio(r, r[which]) for r in results if r["kind"] == kind and r.get(which)]
            fastest = [fastest_ratio(r, r[which]) for r in results if r["kind"] == kind and r.get(which)]
            if ratios:
                means[f"{kind}_{which}"] = [geometric_mean(ratios), geometric_mean(fastest)]
    return means


def summary(results, document):
    rows = []
    for r in [r for r in results if r["ours"]]:
        c = r["contenders"]
        unpacked = c.get(r["ours"] + " unpacked")
        cells = [r["shape"], f"{c[r['ours']]['gops']:.0f}", f"{unpacked['gops']:.0f}" if unpacked else "-"]
        for which in BESTS:
            name = r[which]
            cells += [f"{name} {c[name]['gops']:.0f}" if name else "-", number(ratio(r, name))]
        share = lambda key: f"{100 * r[key]:.0f}%" if key in r else "-"  # noqa: E731
        rows.append([*cells, share("share_of_int8"), share("share_of_read")])
    header = ["M x K x N", "ours", "unpacked"]
    for title in BESTS.values():
        header += [title, "ratio"]
    text = "GOPS, medians; ratio: the peer's time over ours, above 1 ours is faster (median over rounds)\n\n"
    text += table([*header, "of int8", "of read"], rows)
    for key, value in document["geometric_means"].items():
        kind, _, which = key.partition("_best_")
        text += f"\ngeometric mean, {kind.upper()}, against {AGAINST[which]}: {value[0]:.2f}, by the best times {value[1]:.2f}"
    if document["disturbed"]:
        text += "\nNOT QUIET: others had processors meanwhile; the ceilings differ within the run by more than 15 %"
    return text + "\n"
