"""The chart of a run, from its JSON, as SVG. By hand, since matplotlib would be there for two kinds of line alone."""

import math
from xml.sax.saxutils import escape

from gpu.report import BACKWARD, KEPT, PARTS, is_ours, measured, names, speed, title

WIDTH, MARGIN, LABELS, NUMBERS = 980, 24, 170, 190
ROW, FONT = 26, 13
COLORS = ["#4e79a7", "#76b7b2", "#9c755f", "#b07aa1", "#59a14f", "#edc948", "#ff9da7", "#bab0ac"]
OUR_COLOR = "#d62728"
OUR_COLORS = {"Octile f16": "#ff7f0e", "Octile bf16": "#c49c00", "Octile int8, W kept": "#f4a3a3"}
OUR_COLORS |= {"Octile int8, blocks of 256": "#8c2d04"}


class Svg:
    def __init__(self, width):
        self.width, self.height, self.parts = width, MARGIN, []

    def text(self, x, y, text, anchor="start", weight="normal", color="#222"):
        style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{color}"'
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>')

    def line(self, x1, y1, x2, y2, color="#ddd", width=1):
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}"/>'
        )

    def dot(self, x, y, color, radius, tip=""):
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{color}"><title>{escape(tip)}</title></circle>'
        )

    def curve(self, points, color, width):
        at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{at}" fill="none" stroke="{color}" stroke-width="{width}"/>')

    def render(self):
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height:.0f}" '
            f'font-family="sans-serif" font-size="{FONT}">'
        )
        white = f'<rect width="{self.width}" height="{self.height:.0f}" fill="#fff"/>'
        return "\n".join([head, white, *self.parts, "</svg>"]) + "\n"


def color(name, all_names):
    if is_ours(name):
        return OUR_COLORS.get(name, OUR_COLOR)
    return COLORS[[n for n in all_names if not is_ours(n)].index(name) % len(COLORS)]


def legend(svg, shown, all_names):
    x = MARGIN
    for name in shown:
        wide = 28 + 8.2 * len(name)
        if x + wide > svg.width - MARGIN:
            x, svg.height = MARGIN, svg.height + 20
        svg.dot(x + 6, svg.height - 4, color(name, all_names), 5)
        svg.text(x + 16, svg.height, name)
        x += wide
    svg.height += 14


def ticks(highest, about):
    """Round numbers from 0 on, about so many."""
    step = 10 ** math.floor(math.log10(highest / about))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step * about >= highest)
    return [step * i for i in range(int(highest / step) + 1)]


def faster(s, part):
    """Of each contender how many times as fast as torch f16 it is."""
    return {name: s[part]["torch f16"]["us"] / row["us"] for name, row in s[part].items()}


def speeds(svg, shapes, parts, part, all_names):
    """A line a shape, a dot a contender, from left to right how many times as fast as torch f16."""
    shown = names(shapes, part)
    # Parts share a scale.
    highest = max((f for s in shapes for p in parts if "torch f16" in s[p] for f in faster(s, p).values()), default=0)
    highest *= 1.03
    shapes = [s for s in shapes if "torch f16" in s[part]]
    if not shapes:
        return
    left, right = MARGIN + LABELS, svg.width - MARGIN - NUMBERS
    x_of = lambda value: left + (right - left) * value / highest  # noqa: E731

    svg.text(MARGIN, svg.height, f"{parts[part]}: how many times as fast as torch f16", weight="bold")
    svg.height += 24
    legend(svg, shown, all_names)
    top = svg.height
    bottom = top + ROW * len(shapes)
    for tick in ticks(highest, 6):
        svg.line(x_of(tick), top, x_of(tick), bottom, "#999" if tick == 1 else "#e4e4e4")
        svg.text(x_of(tick), bottom + 16, f"{tick:g}", "middle", color="#666")
    for i, s in enumerate(shapes):
        y = top + ROW * (i + 0.5)
        svg.line(left, y, right, y, "#eee")
        svg.text(left - 10, y + 4, title(s), "end")
        for name in shown:
            if name in s[part]:
                tip = f"{name}: {speed(s, s[part][name]['us'], part)}"
                svg.dot(x_of(faster(s, part)[name]), y, color(name, all_names), 7 if is_ours(name) else 5, tip)
        told = min(s[part], key=lambda name: (not is_ours(name), KEPT in name, s[part][name]["us"]))
        text = f"{told} {speed(s, s[part][told]['us'], part)}"
        svg.text(right + 12, y + 4, text, color=color(told, all_names) if is_ours(told) else "#222")
    svg.height = bottom + 50


def curves(svg, s, all_names):
    """Time over the batch size, for one weight."""
    left, right, tall = MARGIN + 40, svg.width - MARGIN, 300
    svg.text(MARGIN, svg.height, f"K x N = {s['k']} x {s['n']}: microseconds over M", weight="bold")
    svg.height += 24
    legend(svg, list(s["curves"]), all_names)
    top, bottom = svg.height, svg.height + tall
    highest = max(us for curve in s["curves"].values() for _, us in measured(s["m"], curve)) * 1.05
    x_of = lambda m: left + (right - left) * m / max(s["m"])  # noqa: E731
    y_of = lambda us: bottom - tall * us / highest  # noqa: E731
    for tick in ticks(highest, 6):
        svg.line(left, y_of(tick), right, y_of(tick), "#e4e4e4")
        svg.text(left - 6, y_of(tick) + 4, f"{tick:g}", "end", color="#666")
    for tick in ticks(max(s["m"]), 8):
        svg.line(x_of(tick), top, x_of(tick), bottom, "#f0f0f0")
        # The last one would stick out of the picture.
        svg.text(x_of(tick), bottom + 16, f"{tick:g}", "end" if x_of(tick) > right - 10 else "middle", color="#666")
    for name, curve in s["curves"].items():
        points = [(x_of(m), y_of(us)) for m, us in measured(s["m"], curve)]
        svg.curve(points, color(name, all_names), 2 if is_ours(name) else 1.2)
    svg.height = bottom + 50


def draw(document):
    svg = Svg(WIDTH)
    facts = document["facts"]
    svg.height += 4
    svg.text(MARGIN, svg.height, f"Octile beside its peers, {facts['gpu']['gpu']}, {facts['date']}", weight="bold")
    svg.height += 34
    both = ((document["shapes"], PARTS), (document.get("backward", []), BACKWARD))
    all_names = list(dict.fromkeys(name for shapes, parts in both for part in parts for name in names(shapes, part)))
    for shapes, parts in both:
        for part in parts:
            if any(s[part] for s in shapes):
                speeds(svg, shapes, parts, part, all_names)
    all_names = list(dict.fromkeys(name for s in document["sweep"] for name in s["curves"]))
    for s in [s for s in document["sweep"] if s["curves"]]:
        curves(svg, s, all_names)
    return svg.render()
