"""bench/peers/gpu_peers.py without a GPU: its table and its chart, fed with recorded figures; its view of the C
interface; what it says where nothing can be built or measured."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from pathlib import Path

SOURCE = Path(os.environ.get("OCTILE_SOURCE_DIR", Path(__file__).parents[2]))
PEERS = SOURCE / "bench" / "peers"
sys.dont_write_bytecode = True
sys.path.insert(0, str(PEERS))

import octile_c  # noqa: E402
from gpu import build, chart, report  # noqa: E402


def contender(microseconds, spread=(1.0, 1.25, 0.9)):
    """The first of the three times is the median."""
    return {"us": microseconds, "times": [microseconds * s for s in spread], "setting": "a tile", "check": "exact"}


def entry(shape, target, product, layer):
    m, k, n = map(int, shape.split("x"))
    contenders = {"product": product, "layer": layer}
    parts = {part: {name: contender(us) for name, us in rows.items()} for part, rows in contenders.items()}
    clocks = {"clocks.sm": [1755, 1980], "power.draw": [310, 640]}
    return {"m": m, "k": k, "n": n, "target": target, "skipped": {"x, product": "why"}, "clocks": clocks, **parts}


def gradients(shape, **parts):
    m, k, n = map(int, shape.split("x"))
    found = {part: {name: contender(us) for name, us in parts.get(part, {}).items()} for part in report.BACKWARD}
    return {"m": m, "k": k, "n": n, "skipped": {"y, dx": "none"}, "clocks": {"clocks.sm": [1700, 1980]}, **found}


def backward():
    floats = {"torch f16": 1600.0, "torch bf16": 1500.0, "Octile f16": 1500.0, "Octile bf16": 1600.0}
    return [
        gradients(
            "8192x8192x8192",
            dx={**floats, "Octile int8": 700.0},
            dw={"torch f16": 1600.0, "Triton": 2800.0, "Octile f16": 1600.0, "Octile int8": 800.0},
            db={"torch f16": 50.0, "Octile f16": 34.0},
            **{"pass": {"Octile int8": 110.0, "Octile int8, blocks of 256": 120.0}},
            backward={"torch f16": 3250.0, "Octile int8": 1620.0, "Octile int8, blocks of 256": 1820.0},
            step={"torch f16": 4800.0, "Triton": 7000.0, "Octile int8": 2600.0, "Octile int8, W kept": 2520.0},
        ),
        gradients("4096x4096x4096", dx={"torch f16": 200.0}, step={"torch f16": 600.0, "Octile int8": 400.0}),
    ]


def document(**more):
    """Measured on an H200, except for Octile's."""
    large = {"torch f16": 204.8, "cuBLASLt": 168.4, "Triton": 113.7, "CUTLASS": 91.1}
    small = {"torch f16": 39.1, "Triton": 24.8, "CUTLASS": 26.9}
    shapes = [
        entry("4096x4096x4096", {"tops": 1510}, {**large, "Octile": 86.0}, {"torch f16": 204.8, "Octile": 100.0}),
        entry("1x4096x14336", {"us": 16}, {**small, "Octile": 17.0}, {"torch f16": 39.1, "Octile": 16.5}),
        entry("64x4096x14336", None, small, {"torch f16": 40.0}),
    ]
    size = {"rows": 8192, "columns": 8192, "elements": 8192 * 8192}
    copy = {"name": "torch copy_, f16", "us": 63.6, "bytes_per_element": 4, "check": "", **size}
    rows = {"name": "Octile rows", "us": 50.0, "bytes_per_element": 3, "check": "exact", **size}
    sizes = list(range(1, 513))
    curves = {
        "Octile": [15 + 0.02 * m + (6 if m > 256 else 0) for m in sizes],
        "torch f16": [40 + 0.1 * m if m > 16 else None for m in sizes],
    }
    facts = {
        "date": "2026-11-21", "commit": "abcdef0", "command": "./dev gpu-peers", "rounds": 40, "warm_up": 2, "rest": 5,
        "gpu": {"gpu": "NVIDIA H200", "driver": "580.159.04", "power_limit": "700.00 W"},
        "versions": {"torch": "2.11.0", "CUTLASS": "4.2.0"}, "missing": {"cublaslt": "OSError: not there"},
    }  # fmt: skip
    settings = {"Octile": ["skinny" if m <= 256 else "tiles" for m in sizes], "torch f16": ["W (IN, OUT)"] * 512}
    sweep = [{"k": 4096, "n": 14336, "m": sizes, "curves": curves, "settings": settings}]
    found = {"shapes": shapes, "backward": backward(), "quantizers": [copy, rows], "sweep": sweep}
    return {"facts": facts, **found, **more}


def served(m, k, n, skipped=(), **parts):
    found = {part.replace("_", "-"): {name: contender(us) for name, us in rows.items()} for part, rows in parts.items()}
    return {"m": m, "k": k, "n": n, "skipped": dict(skipped), "clocks": {"clocks.sm": [1500 + m, 1980]}, **found}


def serving(**more):
    """Of two formats; M = 8 takes ours another kernel, and M = 1,024 is told as a speed."""
    four = {"Marlin": 25.0, "humming": 24.0, "plain read": 13.0, "Octile, plain weight": 21.0}
    absent = {"Machete, w4a16": "RuntimeError: no such operator"}
    entries = [
        served(1, 4096, 14336, absent, w4a16={**four, "Octile": 20.0}),
        served(8, 4096, 14336, absent, w4a16={**four, "Octile": 30.0}),
        served(64, 4096, 14336, absent, w4a16={**four, "Octile": 33.0}),
        served(1024, 4096, 14336, w4a16={"Marlin": 400.0, "Octile": 200.0}),
        served(1, 8192, 8192, w4a16={"Marlin": 30.0, "Octile": 25.0}),
        served(1, 4096, 14336, w8a8={"vLLM": 30.0, "Octile": 24.0}, w8a8_product={"torch _int_mm": 40.0}),
    ]
    entries[1]["w4a16"]["Octile"] |= {"setting": "another tile", "check": "within 3e-04"}
    empty = {"shapes": [], "backward": [], "quantizers": [], "sweep": []}
    found = document(**empty, serving=entries, **more)
    found["facts"]["serving"] = {"dtype": "f16", "group": {"w8a8": 0, "w4a16": 128}, "zero_points": False}
    return found


def cells(text, first):
    """The cells of the table row that begins with `first`."""
    line = next(line for line in text.split("\n") if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("| ").split("|")]


class TableTest(unittest.TestCase):
    def test_large_shapes_are_told_as_speeds_and_small_ones_as_times(self):
        product, layer = report.markdown(document()).split("## The whole layer")
        large, small = cells(product, "4096 x 4096 x 4096"), cells(product, "1 x 4096 x 14336")
        self.assertEqual(large[1:6], ["671 T/s", "816 T/s", "1,209 T/s", "1,509 T/s", "1,598 T/s"])
        self.assertEqual(large[6:], ["CUTLASS", "1.06", ">= 1,510 T/s: met"])
        self.assertEqual(small[1:6], ["39.1 us", "-", "24.8 us", "26.9 us", "17.0 us"])
        self.assertEqual(small[6:], ["Triton", "1.46", "<= 16 us: NOT met"])
        self.assertEqual(cells(layer, "1 x 4096 x 14336")[1:], ["39.1 us", "16.5 us", "torch f16", "2.37", "2.37"])

    def test_ratio_is_the_median_of_the_rounds(self):
        rows = {"Octile": {"us": 2.0, "times": [1.0, 2.0, 3.0]}, "peer": {"us": 4.0, "times": [2.0, 2.0, 12.0]}}
        self.assertEqual(report.ratio(rows, "peer"), 2.0)

    def test_without_octile(self):
        row = cells(report.markdown(document()), "64 x 4096 x 14336")
        self.assertEqual(row[1:], ["39.1 us", "-", "24.8 us", "26.9 us", "-", "Triton", "-"])

    def test_quantizers_are_told_in_bytes_moved(self):
        text = report.markdown(document())
        self.assertEqual(cells(text, "torch copy_, f16")[1:4], ["63.6", "4.22", "1.00"])
        self.assertEqual(cells(text, "Octile rows")[1:], ["50.0", "4.03", "0.95", "exact"])

    def test_cliff_is_found(self):
        row = cells(report.markdown(document()), "4096 x 14336 Octile")
        self.assertEqual(row[2:], ["+30 %, 256 to 257", "skinny, tiles"])
        self.assertEqual(cells(report.markdown(document()), "4096 x 14336 torch f16")[1], "41.7 at 17, 91.2 at 512")

    def test_names_the_machine_and_how_it_was_measured(self):
        text = report.markdown(document())
        for words in (
            "NVIDIA H200",
            "580.159.04",
            "abcdef0",
            "./dev gpu-peers",
            "2026-11-21",
            "40 rounds",
            "CUTLASS 4.2.0",
        ):
            self.assertIn(words, text)
        for words in ("skipped: cublaslt: OSError", "skipped: x, product: why", "1755 to 1980", "310 to 640"):
            self.assertIn(words, text)

    def test_nothing_measured(self):
        empty = document(shapes=[], backward=[], quantizers=[], sweep=[])
        self.assertIn("NVIDIA H200", report.markdown(empty))
        ElementTree.fromstring(chart.draw(empty))


class BackwardTableTest(unittest.TestCase):
    def row(self, heading, shape="8192 x 8192 x 8192"):
        return cells(report.markdown(document()).split(f"## {heading}\n")[1].split("\n## ")[0], shape)[1:]

    def test_gradients(self):
        self.assertEqual(self.row("dX")[:5], ["687 T/s", "733 T/s", "733 T/s", "687 T/s", "1,571 T/s"])
        self.assertEqual(self.row("dX")[5:], ["1.07 (met)", "0.94 (NOT met)", "1,571 (met)"])
        self.assertEqual(self.row("dW")[4:], ["1.00 (met)", "-", "1,374 (NOT met)"])
        self.assertEqual(self.row("dB"), ["2.68 TB/s", "3.95 TB/s", "1.47", "3.95 (met)"])

    def test_what_is_missing_is_a_dash(self):
        self.assertEqual(self.row("dX", "4096 x 4096 x 4096")[1:], ["-"] * 7)

    def test_pass_is_told_alone_and_as_the_rest_of_the_backward(self):
        row = self.row("The pass over dY")
        self.assertEqual(row, ["3.66 TB/s", "3.36 TB/s", "110.0 us", "3.66 (NOT met)", "120.0 us"])

    def test_step(self):
        self.assertEqual(self.row("The training step")[:3], ["687 T/s", "471 T/s", "1,269 T/s"])
        self.assertEqual(self.row("The training step")[3:], ["1.85 (met)", "2.69 (NOT met)"])
        self.assertEqual(self.row("The training step", "4096 x 4096 x 4096")[3:], ["1.50", "-"])  # has no target

    def test_weight_is_quantized_once_for_several_micro_batches(self):
        row = self.row("W quantized once for several micro-batches")
        self.assertEqual(row, ["4,800 us", "2,600 us, 1.85", "2,540 us, 1.89", "2,530 us, 1.90"])

    def test_files_without_a_backward_can_be_rendered(self):
        older = document()
        del older["backward"]
        self.assertNotIn("The training step", report.markdown(older))
        ElementTree.fromstring(chart.draw(older))


class ServingTableTest(unittest.TestCase):
    def section(self, heading, found=None):
        return report.markdown(found or serving()).split(f"## {heading}\n")[1].split("\n## ")[0]

    def test_a_table_for_each_format(self):
        text = self.section("W4A16")
        header = ["Marlin", "humming", "plain read", "Octile, plain weight", "Octile"]
        self.assertEqual(cells(text, "M x K x N")[1:], [*header, "best peer", "Octile is faster by"])
        row = cells(text, "1 x 4096 x 14336")[1:]
        self.assertEqual(row, ["25.0 us", "24.0 us", "13.0 us", "21.0 us", "20.0 us", "humming", "1.20"])
        row = cells(text, "1024 x 4096 x 14336")[1:]
        self.assertEqual(row, ["301 T/s", "-", "-", "-", "601 T/s", "Marlin", "2.00"])
        self.assertNotIn("W8A16", report.markdown(serving()))

    def test_a_format_in_which_octile_is_missing(self):
        self.assertEqual(cells(self.section("W8A8, X given in 8 bits"), "1 x 4096 x 14336")[1:], ["40.0 us", "torch _int_mm", "-"])

    def test_means_and_least_ratios(self):
        text = self.section("Beside the best peer of each shape")
        # 1.2, 0.8, 24 / 33, 2 and 1.2; without the fourth up to 64 rows.
        expected = ["1.11", "0.73 at 64 x 4096 x 14336", "0.96", "0.73 at 64 x 4096 x 14336"]
        self.assertEqual(cells(text, "W4A16")[1:], expected)
        self.assertEqual(cells(text, "W8A8")[1:], ["1.25", "1.25 at 1 x 4096 x 14336"] * 2)
        self.assertNotIn("W8A8, X given", text)

    def test_largest_step_of_ours(self):
        rows = self.section("From one number of rows to the next, up to 256").split("\n")
        self.assertEqual([row for row in rows if "Octile |" in row], [
            "| W4A16 | 4096 x 14336 Octile | 20.0 at 1, 33.0 at 64 | +50 %, 1 to 8 | a tile, another tile |"
        ])  # fmt: skip
        self.assertFalse([row for row in rows if "Marlin" in row])

    def test_what_ran_for_which_rows(self):
        text = self.section("What ran, and whether it was right")
        ran = "a tile (M = 1), another tile (M = 8), a tile (M = 64 to 1024); exact or within 3e-04"
        self.assertIn(f"- 4096 x 14336, W4A16, Octile: {ran}\n", text)
        self.assertNotIn("plain read", text)
        reason = "- skipped: Machete, w4a16: RuntimeError: no such operator (1 x 4096 x 14336; and 2 more)"
        self.assertEqual(text.count("skipped: Machete"), 1)
        self.assertIn(reason, text)

    def test_clocks_of_a_layer(self):
        self.assertEqual(cells(self.section("Clocks meanwhile"), "1 to 1024 x 4096 x 14336")[1], "1501 to 1980")

    def test_heading_names_the_weights(self):
        text = report.markdown(serving())
        self.assertIn("weights: W8A8 a scale per channel, W4A16 groups of 128. Octile's", text)
        self.assertNotIn("a normal times 30", text)
        ElementTree.fromstring(chart.draw(serving()))

    def test_charts_of_a_format(self):
        with tempfile.TemporaryDirectory(prefix="octile-peers-") as scratch:
            shutil.copytree(SOURCE / "docs/benchmarks", Path(scratch) / "docs/benchmarks")
            (Path(scratch) / "tools").mkdir()
            shutil.copy(SOURCE / "tools/charts.py", Path(scratch) / "tools")
            run = Path(scratch) / "run.json"
            run.write_text(json.dumps(serving()))
            command = [sys.executable, Path(scratch) / "tools/charts.py", "--add", run, "--name", "new", "--part"]
            done = subprocess.run([*command, "w4a16"], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            made = json.loads((Path(scratch) / "docs/benchmarks/new.json").read_text())
            self.assertEqual([point["name"] for point in made["points"]][::3], ["1 x 4096 x 14336", "1024 x 4096 x 14336"])
            self.assertEqual((made["kind"], made["unit"], made["command"]), ("ratio", "us", "./dev gpu-peers"))
            picture = (Path(scratch) / "docs/benchmarks/new.svg").read_text()
            self.assertIn("Marlin: 0.80 of Octile", picture)
            self.assertNotIn("plain", picture)  # no peer, and ours
            done = subprocess.run([*command, "w8a16"], capture_output=True, text=True)
            self.assertIn("no figures to draw", done.stderr)


class ChartTest(unittest.TestCase):
    SVG = "{http://www.w3.org/2000/svg}"

    def setUp(self):
        self.picture = ElementTree.fromstring(chart.draw(document()))
        self.width, self.height = map(float, self.picture.get("viewBox").split()[2:])

    def test_everything_is_inside(self):
        for text in self.picture.iter(f"{self.SVG}text"):
            wide, at = 0.62 * chart.FONT * len(text.text), float(text.get("x"))
            left = at - {"start": 0, "middle": wide / 2, "end": wide}[text.get("text-anchor")]
            self.assertGreaterEqual(left, 0, text.text)
            self.assertLessEqual(left + wide, self.width, text.text)
            self.assertTrue(chart.FONT <= float(text.get("y")) <= self.height - 4, text.text)
        points = [(float(c.get("cx")), float(c.get("cy"))) for c in self.picture.iter(f"{self.SVG}circle")]
        for line in self.picture.iter(f"{self.SVG}polyline"):
            points += [tuple(map(float, at.split(","))) for at in line.get("points").split()]
        self.assertTrue(all(0 <= x <= self.width and 0 <= y <= self.height for x, y in points))

    def test_a_dot_lies_where_its_speed_says(self):
        dots = {}
        for dot in self.picture.iter(f"{self.SVG}circle"):
            dots.setdefault(dot.find(f"{self.SVG}title").text, float(dot.get("cx")))  # the first is that of the product
        left, one = chart.MARGIN + chart.LABELS, dots["torch f16: 671 T/s"]
        self.assertAlmostEqual((dots["CUTLASS: 1,509 T/s"] - left) / (one - left), 204.8 / 91.1, delta=0.01)

    def test_every_contender_has_one_color(self):
        fills = {}
        for dot in self.picture.iter(f"{self.SVG}circle"):
            if ":" in (name := dot.find(f"{self.SVG}title").text or ""):
                fills.setdefault(name.split(":")[0], set()).add(dot.get("fill"))
        self.assertEqual({len(colors) for colors in fills.values()}, {1})
        self.assertEqual(fills["Octile"], {chart.OUR_COLOR})
        self.assertEqual(fills.pop("Octile int8"), {chart.OUR_COLOR})  # in charts that have no "Octile"
        self.assertEqual(len(set.union(*fills.values())), len(fills))


class InterfaceTest(unittest.TestCase):
    def test_structures_are_those_of_the_header(self):
        header = re.sub(r"/\*.*?\*/", "", (SOURCE / "include/octile/octile.h").read_text(), flags=re.DOTALL)
        for ours, name in (
            (octile_c.Tensor, "octile_tensor"),
            (octile_c.LinearDescription, "octile_linear_description"),
            (octile_c.RunArguments, "octile_linear_args"),
            (octile_c.PackArguments, "octile_linear_pack_args"),
            (octile_c.QuantizeDescription, "octile_quantize_description"),
            (octile_c.QuantizeArguments, "octile_quantize_args"),
            (octile_c.BackwardDescription, "octile_linear_backward_description"),
            (octile_c.BackwardArguments, "octile_linear_backward_args"),
        ):
            body = re.search(rf"typedef struct {{((?:[^{{}}]|{{[^{{}}]*}})*)}} {name};", header).group(1)
            body = re.sub(r"union {\s*(.*?;).*?}", r"\1", body, flags=re.DOTALL).replace(";;", ";")  # a union: its first name
            fields = [re.search(r"(\w+)$", declaration).group(1) for declaration in body.split(";")[:-1]]
            self.assertEqual([field[0] for field in ours._fields_], fields, name)


class CommandTest(unittest.TestCase):
    def run_script(self, script, *arguments, **environment):
        command = [sys.executable, "-B", str(PEERS / script), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})

    def test_render_writes_what_was_measured(self):
        with tempfile.TemporaryDirectory(prefix="octile-peers-") as scratch:
            recorded, out = Path(scratch) / "recorded.json", Path(scratch) / "out"
            recorded.write_text(json.dumps(document()))
            done = self.run_script("gpu_peers.py", "--render", recorded, "--out", out)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(json.loads((out / "gpu_peers.json").read_text()), document())
            self.assertEqual((out / "gpu_peers.md").read_text(), report.markdown(document()))
            self.assertEqual((out / "gpu_peers.svg").read_text(), chart.draw(document()))

    def test_wrong_command_lines(self):
        for line, told in {
            "--peers eigen": "eigen",
            "--shapes 4096x4096": "4096x4096",
            "--rounds 0": "--rounds 0",
            "--layers 64x64": "--layers needs --serving",
            "--zero-points": "--zero-points needs --serving",
            "--serving --formats w8a8,w4a4": "there is no format w4a4; there are w8a8",
            "--serving --formats ,": "--formats names none",
            "--serving --layers 4096": "4096 is not KxN",
            "--serving --layers 64x64,0x64": "0x64 is not KxN",
            "--serving --layers 4096x4096,4100x64": "4100x64, K is no multiple of w4a8's groups of 128",
            "--serving --rows 1,x": "x is no number of rows",
            "--serving --rows 0": "0 is no number of rows",
            "--serving --group 48": "48",
            "--serving --dtype f64": "f64",
            "--serving --zero-points --formats w4a8": "w4a16, which is not in --formats w4a8",
            "--serving --shapes 64x64x64": "without --sweep, --backward and --shapes",
            "--serving --sweep": "without --sweep",
        }.items():
            done = self.run_script("gpu_peers.py", *line.split())
            self.assertEqual(done.returncode, 2, line)
            self.assertIn(told, done.stderr.splitlines()[-1])

    def test_without_a_compiler_nothing_is_built(self):
        with tempfile.TemporaryDirectory(prefix="octile-peers-") as scratch:
            done = self.run_script("gpu/build.py", "--out", scratch, PATH="/nonexistent", CUDACXX="")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("skipped: CUTLASS, cuBLASLt: there is no nvcc", done.stdout)

    def test_tiles_have_names_of_their_own(self):
        self.assertEqual(len({tile.name for tile in build.TILES}), len(build.TILES))


if __name__ == "__main__":
    unittest.main()
