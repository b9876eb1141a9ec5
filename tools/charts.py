#!/usr/bin/env python3
"""Draws the charts of docs/benchmarks from the JSON beside them, and writes the page that shows them.

    python3 tools/charts.py                     docs/benchmarks/*.json -> *.svg, index.md, and the chart of README.md
    python3 tools/charts.py --check             says what is out of date, and changes nothing
    python3 tools/charts.py --add RUN --name N  makes N.json of a run: of gpu_peers.json, of peers.py --json FILE or of
                                                octile bench --json; then draws

The last section of the page has the fields of a file. Nothing but Python 3.10 is needed.
"""

import argparse
import datetime
import json
import math
import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "benchmarks"
SECTIONS = ["Inference on a GPU", "Training on a GPU", "Inference on a CPU", "The tile language"]
REQUIRED = ["title", "section", "order", "about", "date", "chip", "commit", "command", "versions", "points"]
# Told apart without colour too: the shape of the mark.
MARKS = ["circle", "square", "diamond", "triangle", "cross", "ring", "down", "bar"]
COLOURS = [f"var(--c{i})" for i in range(len(MARKS))]
LIGHT = ["#d97706", "#0d9488", "#9333ea", "#64748b", "#be123c", "#2563eb", "#65a30d", "#a16207"]
DARK = ["#f59e0b", "#2dd4bf", "#c084fc", "#94a3b8", "#fb7185", "#60a5fa", "#a3e635", "#eab308"]
FASTER = {"T/s": True, "tokens/s": True, "GOPS": True, "us": False, "ms": False, "s": False}


def palette(colours):
    return "; ".join(f"--c{i}: {colour}" for i, colour in enumerate(colours))


# For a page of the repository; the site has its own (docs/assets/site.css).
STYLE = f"""<style>
svg {{ --ink: #1f2328; --soft: #59636e; --line: #d1d9e0; --ours: #3f51b5; --peer: #b0b7c3; --paper: #fff; {palette(LIGHT)} }}
@media (prefers-color-scheme: dark) {{
svg {{ --ink: #e6edf3; --soft: #9198a1; --line: #3d444d; --ours: #8c9eff; --peer: #6b7280; --paper: #0d1117; {palette(DARK)} }} }}
</style>"""


class Svg:
    def __init__(self, width):
        self.width, self.height, self.parts = width, 0, []

    def text(self, x, y, text, anchor="start", size=13, weight="normal", colour="var(--ink)"):
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
            f'fill="{colour}">{escape(text)}</text>'
        )

    def line(self, x1, y1, x2, y2, colour="var(--line)", width=1):
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"/>'
        )

    def box(self, x, y, width, height, colour, tip=""):
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height}" rx="2" fill="{colour}">'
            f"<title>{escape(tip)}</title></rect>"
        )

    def mark(self, shape, x, y, colour, tip="", r=5):
        style, title = f'fill="{colour}"', f"<title>{escape(tip)}</title>"
        paths = {
            "square": f"M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h{-2 * r}z",
            "diamond": f"M{x:.1f} {y - r - 1:.1f}l{r + 1} {r + 1}l{-r - 1} {r + 1}l{-r - 1} {-r - 1}z",
            "triangle": f"M{x:.1f} {y - r:.1f}l{r + 1} {2 * r}h{-2 * r - 2}z",
            "down": f"M{x:.1f} {y + r:.1f}l{r + 1} {-2 * r}h{-2 * r - 2}z",
            "cross": f"M{x - r:.1f} {y - r:.1f}l{2 * r} {2 * r}m0 {-2 * r}l{-2 * r} {2 * r}",
            "bar": f"M{x - 2:.1f} {y - r - 1:.1f}h4v{2 * r + 2}h-4z",
        }
        if shape == "ring":
            self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r - 1}" fill="none" stroke="{colour}" stroke-width="2.5">{title}</circle>')
        elif shape == "circle":
            self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" {style}>{title}</circle>')
        else:
            stroke = f'fill="none" stroke="{colour}" stroke-width="2.5"' if shape == "cross" else style
            self.parts.append(f'<path d="{paths[shape]}" {stroke}>{title}</path>')

    def render(self, about):
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height:.0f}" width="{self.width}" '
            f'data-page-colours="" font-family="system-ui, sans-serif" role="img">\n{STYLE}\n<title>{escape(about)}</title>\n'
            + f'<rect width="{self.width}" height="{self.height:.0f}" fill="var(--paper)"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.2g}"


def unit_of(document, point):
    return point.get("unit", document.get("unit", ""))


def ours_of(document, point):
    """The name of ours in a point: the document's one, or the first of its list that the point has."""
    names = document.get("ours", [])
    names = [names] if isinstance(names, str) else names
    return next((name for name in names if name in point["values"]), None)


def ratios(document, point):
    """{peer: our speed over its speed}."""
    if "ratios" in point:
        return dict(point["ratios"])
    ours = ours_of(document, point)
    if ours is None:
        return {}
    own, faster = point["values"][ours], FASTER[unit_of(document, point)]
    all_ours = document["ours"] if isinstance(document["ours"], list) else [ours]
    return {
        name: (own / value if faster else value / own)
        for name, value in point["values"].items()
        if name not in all_ours and value
    }


def peers(document):
    found = [name for point in document["points"] for name in ratios(document, point)]
    return list(dict.fromkeys(found))


def mean(document, peer):
    """The geometric mean of our speed over the peer's, over the points that have both."""
    found = [ratios(document, point)[peer] for point in document["points"] if peer in ratios(document, point)]
    return math.exp(sum(map(math.log, found)) / len(found))


def legend(svg, names, y, marks):
    x = 16
    for name in names:
        shape, colour = marks[name]
        wide = 36 + 7.6 * len(name)
        if x + wide > svg.width - 10:
            x, y = 16, y + 20
        svg.mark(shape, x + 5, y - 4, colour)
        svg.text(x + 16, y, name, colour="var(--soft)")
        x += wide
    return y


def ratio_chart(document):
    """A row for each point: ours at 1, each peer at its speed by ours. Right of the line a peer is faster."""
    svg, names = Svg(760), peers(document)
    marks = {name: (MARKS[i % len(MARKS)], COLOURS[i % len(COLOURS)]) for i, name in enumerate(names)}
    label = 16 + 7.4 * max(len(point["name"]) for point in document["points"])
    left, right = min(label + 20, 330), svg.width - 130
    speeds = [1 / value for point in document["points"] for value in ratios(document, point).values()]
    low, high = min(0.5, max(min(speeds) * 0.9, 0.1)), max(1.25, max(speeds) * 1.05)

    def at(speed):
        return left + (right - left) * (math.log(max(speed, low)) - math.log(low)) / (math.log(high) - math.log(low))

    y = legend(svg, names, 20, marks) + 18
    svg.text(right + 14, y, "Octile", weight="bold", colour="var(--ours)")
    top = y + 8
    bottom = top + 26 * len(document["points"])
    for tick in (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3):
        if low <= tick <= high:
            svg.line(at(tick), top, at(tick), bottom, "var(--ours)" if tick == 1 else "var(--line)", 2 if tick == 1 else 1)
            svg.text(at(tick), bottom + 16, f"{tick:g}", "middle", 12, colour="var(--soft)")
    for i, point in enumerate(document["points"]):
        y = top + 26 * i + 17
        svg.text(left - 12, y, point["name"], "end")
        for name, value in ratios(document, point).items():
            shape, colour = marks[name]
            svg.mark(shape, at(1 / value), y - 4, colour, f"{name}: {1 / value:.2f} of Octile's speed")
        own = point["values"].get(ours_of(document, point)) if "values" in point else point.get("ours")
        if own is not None:
            svg.text(right + 14, y, f"{number(own)} {unit_of(document, point)}", colour="var(--ours)")
    svg.text((left + right) / 2, bottom + 36, "speed of the peer relative to Octile's", "middle", 12, colour="var(--soft)")
    svg.height = bottom + 48
    return svg


def sweep_chart(document):
    """A line for each series: our speed over the peer's, at each x."""
    svg, series = Svg(760), list(dict.fromkeys(point["series"] for point in document["points"]))
    (peer,) = peers(document)
    places = list(dict.fromkeys(point["x"] for point in document["points"]))
    marks = {name: (MARKS[i % len(MARKS)], COLOURS[i % len(COLOURS)]) for i, name in enumerate(series)}
    found = {(point["series"], point["x"]): ratios(document, point)[peer] for point in document["points"]}
    left, right, top = 60, svg.width - 30, legend(svg, series, 20, marks) + 24
    bottom, high = top + 240, max(found.values()) * 1.05
    low = min(0.8, *found.values())

    def at(value):
        return bottom - (bottom - top) * (value - low) / (high - low)

    for tick in range(math.ceil(low * 5), math.floor(high * 5) + 1):
        value = tick / 5
        svg.line(left, at(value), right, at(value), "var(--ours)" if value == 1 else "var(--line)", 2 if value == 1 else 1)
        svg.text(left - 8, at(value) + 4, f"{value:g} x", "end", 12, colour="var(--soft)")
    step = (right - left - 40) / max(len(places) - 1, 1)
    for i, place in enumerate(places):
        svg.text(left + 20 + step * i, bottom + 20, place, "middle", 12, colour="var(--soft)")
    for name in series:
        shape, colour = marks[name]
        dots = [(left + 20 + step * i, at(found[name, place])) for i, place in enumerate(places) if (name, place) in found]
        svg.parts.append(f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in dots)}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        for (x, y), place in zip(dots, places):
            svg.mark(shape, x, y, colour, f"{name}, {place}: {found[name, place]:.2f} times the speed of {peer}")
    svg.text((left + right) / 2, bottom + 42, f"rows of X; up: Octile's speed relative to {peer}", "middle", 12, colour="var(--soft)")
    svg.height = bottom + 54
    return svg


def bar_chart(document):
    """A bar for each value of each point, beside the baseline's."""
    svg, base = Svg(760), document["baseline"]
    rows = [(point, name) for point in document["points"] for name in point["values"]]
    left, right = min(30 + 7.4 * max(len(name) for _, name in rows), 330), svg.width - 190
    several = len(document["points"]) > 1
    y = 12
    ours = document["ours"] if isinstance(document["ours"], list) else [document["ours"]]
    # Points share a scale: the baseline is as long in each.
    most = max(max(point["values"].values()) / point["values"][base] for point in document["points"])
    for point in document["points"]:
        highest = most * point["values"][base]
        if several:
            y += 22
            svg.text(16, y - 4, point["name"], weight="bold")
        for name, value in point["values"].items():
            mine = name in ours
            svg.text(left - 10, y + 15, name, "end", colour="var(--ink)", weight="bold" if mine else "normal")
            width = (right - left) * value / highest
            svg.box(left, y + 3, width, 16, "var(--ours)" if mine else "var(--peer)", f"{name}: {number(value)}")
            by = value / point["values"][base]
            by = by if FASTER[unit_of(document, point)] else 1 / by
            text = f"{number(value)} {unit_of(document, point)}" + (f", {by:.2f} x" if name != base else "")
            svg.text(left + width + 8, y + 15, text, colour="var(--soft)")
            y += 24
    svg.height = y + 12
    return svg


def difference_chart(document):
    """A dot for each value with its standard error; 0 is no difference."""
    svg = Svg(760)
    rows = [(point, name, *value) for point in document["points"] for name, value in point["values"].items()]
    left, right = 300, svg.width - 150
    low = min(0, *(value - 2 * error for *_, value, error in rows))
    high = max(0, *(value + 2 * error for *_, value, error in rows))

    def at(value):
        return left + (right - left) * (value - low) / (high - low)

    y, last = 14, None
    top = y
    for point, name, value, error in rows:
        if point is not last:
            y += 24
            svg.text(16, y - 4, point["name"], weight="bold")
            last = point
        mine = name in document["ours"]
        colour = "var(--ours)" if mine else "var(--soft)"
        svg.text(left - 14, y + 15, name, "end", weight="bold" if mine else "normal")
        svg.line(at(value - error), y + 11, at(value + error), y + 11, colour, 3)
        svg.mark("circle", at(value), y + 11, colour, f"{value:+.2f} ± {error:.2f} %")
        svg.text(right + 14, y + 15, f"{value:+.2f} ± {error:.2f} %", colour="var(--soft)")
        y += 24
    svg.parts.insert(0, f'<line x1="{at(0):.1f}" y1="{top}" x2="{at(0):.1f}" y2="{y + 4}" stroke="var(--line)" stroke-width="2"/>')
    svg.text(at(0), y + 20, document["zero"], "middle", 12, colour="var(--soft)")
    svg.height = y + 32
    return svg


KINDS = {"ratio": ratio_chart, "sweep": sweep_chart, "bars": bar_chart, "difference": difference_chart}


def headlines(documents):
    """[(what, peer, ratio, document)] of the chart in README.md and on the front page."""
    found = []
    for document in documents:
        for line in document.get("headline", []):
            if "point" in line:
                (values,) = [point["values"] for point in document["points"] if point["name"] == line["point"]]
                ratio = values[line["ours"]] / values[line["of"]]
            else:
                ratio = mean(document, line["of"])
            found.append((line["what"], line["peer"], ratio, document))
    order = list(dict.fromkeys(what for what, *_ in found))
    return sorted(found, key=lambda line: (order.index(line[0]), line[2]))


def headline_chart(documents):
    svg, rows = Svg(500), headlines(documents)  # on a phone too
    left, right = 205, svg.width - 62
    high = max(ratio for _, _, ratio, _ in rows)
    y, last = 12, None
    top = y
    for what, peer, ratio, _ in rows:
        if what != last:
            y += 26
            svg.text(16, y - 4, what, weight="bold")
            last = what
        svg.text(left - 12, y + 15, peer, "end", colour="var(--soft)")
        width = (right - left) * ratio / high
        svg.box(left, y + 3, width, 16, "var(--ours)", f"{ratio:.2f} times the speed of {peer}")
        svg.text(left + width + 8, y + 15, f"{ratio:.2f} x", weight="bold")
        y += 23
    one = left + (right - left) / high
    svg.line(one, top, one, y + 4, "var(--ink)", 1.5)
    svg.text(one, y + 20, "as fast as the peer", "middle", 12, colour="var(--soft)")
    svg.height = y + 30
    return svg


def cell(value):
    if isinstance(value, list):
        return f"{value[0]:+.2f} ± {value[1]:.2f} %"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.10g}"


def table(document):
    names = list(dict.fromkeys(name for point in document["points"] for name in point.get("values") or ["Octile", *point["ratios"]]))
    units = {unit_of(document, point) for point in document["points"]}
    head = [document.get("of", ""), *names, *([] if len(units) == 1 else ["unit"])]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for point in document["points"]:
        values = {name: cell(value) for name, value in (point.get("values") or {"Octile": point["ours"]}).items()}
        for name, ratio in point.get("ratios", {}).items():
            values[name] = f"{values[name]}: {ratio:.2f}" if name in values else f"{ratio:.2f}"
        line = [point["name"], *(values.get(name, "") for name in names)]
        lines.append(line + ([] if len(units) == 1 else [unit_of(document, point)]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def provenance(document):
    day = datetime.date.fromisoformat(document["date"])
    chip = document["chip"] + (f" (driver {document['driver']})" if "driver" in document else "")
    text = f"{day.day} {day:%B %Y}, {chip}, commit {document['commit']}, `{document['command']}`"
    return text + (f"; {document['versions']}." if document["versions"] else ".")


def entry(name, document):
    unit = document.get("unit")
    text = f"### {document['title']}\n\n{document['about']}\n\n![{document['title']}]({name}.svg)\n\n"
    if document["kind"] in ("ratio", "sweep"):
        means = ", ".join(f"{peer} {mean(document, peer):.2f}" for peer in peers(document))
        text += f"Octile's speed relative to each peer, geometric mean: {means}.\n\n"
    text += provenance(document) + "\n\n"
    what = f"Figures, {unit}" if unit else "Figures"
    what += ", and Octile's speed relative to the peer" if "ratios" in document["points"][0] else ""
    text += f'<details markdown="1"><summary>{what} ({name}.json)</summary>\n\n{table(document)}\n\n</details>\n\n'
    return text


HEAD = """# Benchmarks

Every chart is drawn from a JSON file beside this page, which names the date, the chip, the commit and the command. Each compares contenders that
ran in one process or in turns in one run, so read the ratios: absolute times of shared machines drift by up to a factor of two.

T/s are 10^12 operations a second; a product has 2 M N K operations. The time of a whole layer includes quantizing its input; that of a bare product does not.
[Measurements](../explanation/measurements.md) has the rest: quantizers, comparisons of versions, single kernels, and what was tried.

"""
TAIL = """## Add a run

```sh
# needs: the run's JSON
python3 tools/charts.py --add out/gpu_peers/gpu_peers.json --name h200-w8a8-product
```

converts the output of `./dev gpu-peers`, `./dev peers --json FILE` or `octile bench --json` to a JSON file here, and draws it. `--part` selects
a table of `./dev gpu-peers`, such as `layer` or, of `--serving`, `w4a16`. Files written by hand need only the fields below. `./dev docs` and the tests call `tools/charts.py`, and the tests fail if a chart or this page does not match its JSON.

| field | what |
| --- | --- |
| `title`, `about`, `section`, `order` | heading, one or two sentences, one of the sections above, place in it |
| `date`, `chip`, `driver`, `commit`, `command`, `versions` | where the figures come from; `driver` for GPUs only |
| `kind` | `ratio`: peers beside ours; `sweep`: the same as lines, of points with `series` and `x`; `bars`: speeds beside a `baseline`; `difference`: with a standard error, beside 0 |
| `ours` | the name, or names, of Octile's contenders |
| `unit` | `T/s`, `tokens/s`, `GOPS`, `us`, `ms` or `s`, for the whole file or per point |
| `of` | heading of the table's first column |
| `points[].name` | a shape, a model, a batch size |
| `points[].values` | {contender: measured value}; in `difference` [value, standard error] |
| `points[].ratios` | our speed relative to each peer, where the run reports it itself (such as the median over rounds) |
| `points[].ours` | our own value, where there are ratios and no values |
| `headline[].{what,peer,of,point,ours}` | a bar of the front page's chart: its group, the peer's name there, its name here; `point` and `ours` select one point and one contender instead of the mean over all points |
"""


def page(documents):
    text = HEAD
    for section in SECTIONS:
        entries = [(name, document) for name, document in documents.items() if document["section"] == section]
        if entries:
            text += f"## {section}\n\n" + "".join(entry(name, document) for name, document in entries)
    return text + TAIL


def load():
    documents = {}
    for path in sorted(FOLDER.glob("*.json")):
        document = json.loads(path.read_text())
        missing = [field for field in REQUIRED if field not in document]
        if missing:
            sys.exit(f"{path.relative_to(ROOT)}: lacks {', '.join(missing)}")
        if document["section"] not in SECTIONS:
            sys.exit(f"{path.relative_to(ROOT)}: section is {document['section']!r}, not one of {SECTIONS}")
        document.setdefault("kind", "ratio")
        documents[path.stem] = document
    return dict(sorted(documents.items(), key=lambda item: (item[1]["order"], item[0])))


def rendered():
    """{path: text} of everything that is drawn."""
    documents = load()
    files = {FOLDER / f"{name}.svg": KINDS[document["kind"]](document).render(document["title"]) for name, document in documents.items()}
    files[FOLDER / "headline.svg"] = headline_chart(documents.values()).render("Octile's speed relative to other libraries")
    files[FOLDER / "index.md"] = page(documents)
    return files


# ---- Runs of the benchmarks, as documents ----


def of_gpu_peers(run, part):
    """What ./dev gpu-peers writes: a contender's microseconds, of the products or of whole layers (or dx, dw, w4a16, ...)."""
    facts = run["facts"]
    points = [
        {"name": f"{s['m']} x {s['k']} x {s['n']}", "values": values}
        for s in run["shapes"] + run.get("backward", []) + run.get("serving", [])
        if (values := {name: round(row["us"], 2) for name, row in s.get(part, {}).items() if name != "plain read"})
    ]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    gpu = facts["gpu"]
    own = list(dict.fromkeys(name for point in points for name in point["values"] if name.startswith("Octile")))
    own.sort(key=lambda name: name != "Octile")  # the first one that a point has is compared
    found = {"chip": gpu["gpu"], "versions": versions, "unit": "us", "ours": own, "points": points, "section": SECTIONS[0]}
    return {**found, **({"driver": gpu["driver"]} if "driver" in gpu else {})}, facts


def of_peers(run, _):
    """What ./dev peers --json FILE writes: seconds of each contender."""
    points = [
        {"name": s["shape"], "values": {name: round(row["seconds"] * 1e6, 2) for name, row in s["contenders"].items()}}
        for s in run["shapes"]
    ]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    own = list(dict.fromkeys(name for point in points for name in point["values"] if name.startswith("octile")))
    chip = f"{run['cpu']}, {run['threads']} threads"
    return {"chip": chip, "versions": versions, "unit": "us", "ours": own, "points": points, "section": SECTIONS[2]}, run


def of_bench(run, _):
    """What octile bench --json writes: our seconds beside the baseline's."""
    points = []
    for line in run["benchmarks"]:
        if line.get("baseline"):
            shape = " x ".join(str(size) for size in line["shape"].values())
            values = {line["baseline"]["name"]: line["baseline"]["seconds"], "Octile": line["seconds"]}
            points.append({"name": f"{line['name']} {shape}", "values": {k: round(v * 1e6, 2) for k, v in values.items()}})
    chip = f"{run['cpu']}, {run['threads']} threads" if "cpu" in run else run["gpu"]
    found = {"chip": chip, "versions": f"octile {run['version']}", "unit": "us", "ours": "Octile", "points": points}
    return {**found, "section": SECTIONS[2]}, {"command": "octile bench --json"}


def add(path, name, part):
    run = json.loads(path.read_text())
    kind = of_bench if "benchmarks" in run else of_gpu_peers if "facts" in run else of_peers if "shapes" in run else None
    if kind is None:
        sys.exit(f"{path}: not written by gpu-peers, by peers --json or by octile bench --json")
    found, facts = kind(run, part)
    if not found["points"]:
        sys.exit(f"{path}: no figures to draw")
    target = FOLDER / f"{name}.json"
    earlier = json.loads(target.read_text()) if target.exists() else {}  # whose words stay
    words = {"title": name, "order": 99, "about": "", "kind": "ratio", "of": "M x K x N", "command": "./dev peers", "commit": "unknown"}
    document = {**words, **earlier, **found, **({"section": earlier["section"]} if earlier else {})}
    document |= {key: str(facts[key]) for key in ("date", "commit", "command") if key in facts}
    document.setdefault("date", str(datetime.date.today()))
    target.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--add", metavar="RUN", type=Path)
    parser.add_argument("--name", help="of the file, without .json")
    parser.add_argument("--part", default="product", help="of gpu_peers.json: product (default), layer, dx, dw, backward, step, or of its --serving w8a8, w8a8-product, w8a16, w4a8, w4a8-product, w4a16")
    options = parser.parse_args()
    if options.add:
        if not options.name or not re.fullmatch(r"[\w-]+", options.name):
            parser.error("--add needs --name, of letters, digits and hyphens")
        add(options.add, options.name, options.part)
    stale = []
    for path, text in rendered().items():
        if not path.exists() or path.read_text() != text:
            stale.append(str(path.relative_to(ROOT)))
            if not options.check:
                path.write_text(text)
    if options.check and stale:
        sys.exit("older than their JSON (python3 tools/charts.py): " + ", ".join(stale))


if __name__ == "__main__":
    main()
