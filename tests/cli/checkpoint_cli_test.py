#!/usr/bin/env python3
"""octile inspect, quantize and compare as a person or a program meets them: pages, exit statuses, JSON, Ctrl-C, memory that
does not grow with the model. Needs the environment variable OCTILE_COMMAND, and no package."""

import json
import os
import pathlib
import pty
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unicodedata
import unittest

import json_fields

COMMAND = os.environ.get("OCTILE_COMMAND")
if not COMMAND:
    print("skipped: OCTILE_COMMAND is not set")
    sys.exit(77)

COMMANDS = ("inspect", "quantize", "compare")


def octile(*arguments, **options):
    return subprocess.run([COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=300, **options)


def write_safetensors(path, tensors, metadata=None):
    """tensors: name to (type, shape, bytes, or a function that writes this many bytes to a file)."""
    header, at = {"__metadata__": metadata} if metadata else {}, 0
    sizes = {"F64": 8, "F32": 4, "F16": 2, "I64": 8, "I8": 1}
    for name, (kind, shape, _) in tensors.items():
        size = sizes[kind]
        for extent in shape:
            size *= extent
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, _, data in tensors.values():
            data(file) if callable(data) else file.write(data)


def floats(count, seed):
    random.seed(seed)
    return struct.pack(f"<{count}f", *(random.gauss(0, 1) for _ in range(count)))


def matrix(rows, columns, seed):
    return "F32", [rows, columns], floats(rows * columns, seed)


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.model = self.root / "model"
        self.model.mkdir()
        self.tensors = {
            "embeddings.word_embeddings.weight": matrix(10, 32, 1),
            "encoder.a.weight": matrix(24, 32, 2),
            "encoder.a.bias": ("F32", [24], floats(24, 3)),
            "encoder.b.weight": matrix(32, 64, 4),
        }
        write_safetensors(self.model / "model.safetensors", self.tensors)
        (self.model / "config.json").write_text('{"model_type": "bert"}')
        self.out = self.root / "out"

    def good(self, *arguments):
        done = octile(*arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def bad(self, status, *arguments, says=()):
        done = octile(*arguments)
        self.assertEqual(done.returncode, status, done)
        lines = [line for line in done.stderr.splitlines() if line.startswith("octile: ")]
        self.assertEqual(len(lines), 1, done.stderr)
        for words in says:
            self.assertIn(words, lines[0])
        return done


class PageTest(Case):
    def test_pages(self):
        for command in COMMANDS:
            with self.subTest(command):
                page = self.good(command, "--help")
                self.assertIn(f"Usage: octile {command}", page)
                self.assertIn(f"octile {command}", page.split("Examples:")[1])
                for line in page.splitlines():
                    self.assertLessEqual(len(line), 100, line)

    def test_wrong_command_lines(self):
        for arguments, says in (
            (["inspect"], "path"),
            (["inspect", "a", "b"], "b"),
            (["inspect", "a", "--outlier", "nan"], "nan is not a positive number"),
            (["inspect", "a", "--outlier", "-1"], "-1 is not a positive number"),
            (["compare", "a"], "b is required"),
            (["compare", "a", "b", "--min-sqnr", "x"], "--min-sqnr"),
            (["compare", "a", "b", "--min-sqnr", "nan"], "nan is not a finite number"),
            (["compare", "a", "b", "--worst", "-1"], "-1"),
            (["quantize", "a", "b"], "--format"),
            (["quantize", "a", "b", "--format", "w3"], "w3"),
            (["quantize", "a", "b", "--format", "w4a16", "--group", "48"], "48"),
            (["quantize", "a", "b", "--format", "w8a8", "--group", "16"], "--group: 16 not in {0,32,64,128}"),
            (["quantize", "a", "b", "--format", "w8a8", "--zero-points"], "zero points are for 4-bit weights alone"),
            (["quantize", "a", "b", "--format", "w4a8", "--method", "feedback"], "needs a calibration file"),
            (["quantize", "a", "b", "--format", "w8a16", "--zero-points"], "zero points are for 4-bit weights alone"),
            (["quantize", "a", "b", "--format", "w8a8", "--method", "best"], "best"),
            (["quantize", "a", "b", "--format", "w8a8", "--method", "feedback"], "needs a calibration file"),
            (["quantize", "a", "b", "--format", "w8a8-static"], "needs a calibration file"),
            (["quantize", "a", "b", "--format", "w8a8", "--smooth", "0.5"], "smoothing needs a calibration file"),
            (["quantize", "a", "b", "--format", "w8a8", "--smooth", "much", "--calibration", "c"], "much"),
            (["quantize", "a", "b", "--format", "w8a8", "--smooth", "1.5", "--calibration", "c"], "1.5"),
            (["quantize", "a", "b", "--format", "w4a16", "--smooth", "1", "--calibration", "c"], "smoothing is for"),
            (
                ["quantize", "a", "b", "--format", "w4a16", "--calibration", "c"],
                "the calibration file has no effect without",
            ),
            (["quantize", "a", "b", "--format", "w8a8", "--threads", "-1"], "-1"),
        ):
            with self.subTest(arguments):
                self.bad(2, *arguments, says=[says, f"octile {arguments[0]} --help"])


class QuantizeTest(Case):
    def test_text(self):
        text = self.good("quantize", self.model, self.out, "--format", "w4a16", "--group", "32")
        self.assertIn("an embedding: embeddings.word_embeddings", text)
        self.assertRegex(text, r"out: 2 layers, 11\.3 kB -> 1\.\d kB")
        self.assertRegex(text, r"SQNR of the weights: min \d+\.\d\d dB, median \d+\.\d\d dB")
        self.assertIn("worst layers", text)

    def test_json_and_compare(self):
        report = json.loads(self.good("quantize", self.model, self.out, "--format", "w8a8", "--json"))
        self.assertEqual([layer["name"] for layer in report["layers"]], ["encoder.a", "encoder.b"])
        self.assertEqual(report["bytes_after"], (self.out / "model.safetensors").stat().st_size)
        compared = json.loads(self.good("compare", self.model, self.out, "--json"))
        self.assertTrue(compared["good"])
        self.assertEqual(compared["other_tensors"]["equal"], 2)
        self.assertEqual(
            {layer["name"]: layer["sqnr_db"] for layer in compared["layers"]},
            {layer["name"]: layer["sqnr_db"] for layer in report["layers"]},
        )
        worst = compared["layers"][0]["sqnr_db"]
        self.assertEqual(worst, compared["sqnr_db_min"])
        self.good("compare", self.model, self.out, "--min-sqnr", worst)
        done = octile("compare", self.model, self.out, "--least-sqnr", worst + 1e-6)
        self.assertEqual((done.returncode, "worst layers" in done.stdout), (1, True))
        self.assertEqual(done.stderr, f"octile: 2 linear layers: 1 below {worst:.2f} dB\n")

    def test_one_layer_that_is_exact(self):
        path, out = self.root / "a.safetensors", self.root / "b.safetensors"
        write_safetensors(path, {"a.weight": ("F32", [1, 2], struct.pack("<2f", 127, -1))})
        said = self.good("quantize", path, out, "--format", "w8a8")
        self.assertIn("b.safetensors: 1 layer, ", said)
        self.assertIn("min exact, median exact\n", said)
        self.assertIn("1 linear layer, SQNR min exact, median exact\n", self.good("compare", path, out))

    def test_every_json_field_is_documented(self):
        block = "model.layers.0.self_attn."
        tensors = {f"{block}{part}_proj.weight": matrix(32, 32, 1) for part in "qkvo"}
        tensors["model.layers.0.input_layernorm.weight"] = ("F32", [32], floats(32, 2))
        write_safetensors(self.model / "model.safetensors", tensors)
        (self.model / "config.json").write_text('{"model_type": "llama"}')
        calibration = {}
        for part in "qkv":
            calibration[f"{block}{part}_proj.input_channel_max"] = ("F32", [32], struct.pack("<f", 1) * 32)
            calibration[f"{block}{part}_proj.input_max"] = ("F32", [1], struct.pack("<f", 1))
            calibration[f"{block}{part}_proj.rows"] = ("I64", [1], struct.pack("<q", 1))
        write_safetensors(self.root / "c", calibration, {"format": "octile-calibration", "version": "1"})
        options = ["--format", "w8a8", "--smooth", "0.5", "--calibration", self.root / "c"]
        report = json.loads(self.good("quantize", self.model, self.out, *options, "--json"))
        self.assertTrue(report["smoothed"] and report["not_smoothed"])
        self.assertEqual(json_fields.undocumented(report, "quantize"), [])
        for arguments in ([self.model], [self.out], [self.out, "--headers"]):
            document = json.loads(self.good("inspect", *arguments, "--json"))
            self.assertEqual(json_fields.undocumented(document, "inspect"), [])
        document = json.loads(octile("compare", self.model, self.out, "--json").stdout)
        self.assertEqual(json_fields.undocumented(document, "compare"), [])

    def test_weights_too_small_for_the_smallest_scale(self):
        """Compared with the values in the file: what f32 cannot hold does not become zero."""
        values = struct.unpack("<2048f", floats(2048, 7))
        path, out = self.root / "in.safetensors", self.root / "out.safetensors"
        tensors = {
            "a.weight": ("F32", [32, 64], struct.pack("<2048f", *(1e-9 * v for v in values))),
            "b.weight": ("F64", [32, 64], struct.pack("<2048d", *(1e-300 * v for v in values))),
            "c.weight": ("F64", [32, 64], struct.pack("<2048d", *(1e-160 * v for v in values[:64]), *values[64:])),
            "d.weight": ("F32", [32, 64], struct.pack("<2048f", *(1e-41 * v for v in values))),
            "e.weight": ("F32", [32, 64], bytes(4 * 2048)),
        }
        write_safetensors(path, tensors)
        lost = {"a": 32, "b": 32, "c": 1, "d": 32, "e": 0}
        arguments = ["quantize", path, out, "--format", "w8a8"]
        report = json.loads(self.good(*arguments, "--json"))
        compared = json.loads(self.good("compare", path, out, "--json"))
        for layers in (report["layers"], compared["layers"]):
            sqnr = {layer["name"]: layer["sqnr_db"] for layer in layers}
            self.assertEqual([sqnr[name] for name in "abd"], [0, 0, 0])
            self.assertTrue(40 < sqnr["c"] < 50, sqnr)
            self.assertEqual({layer["name"]: layer["vanished"] for layer in layers}, lost)
        self.assertEqual({layer["name"]: layer["exact"] for layer in compared["layers"]}["b"], False)
        self.assertEqual(len(report["warnings"]), 4)
        text = self.good(*arguments, "--force")
        self.assertIn('warning: "b": 32 of 32 rows became all zero: ', text)
        self.assertRegex(text, r"b +\(32, 64\) +0\.00 +\d\.\d\de-300")
        self.assertIn('warning: "c": 1 rows or groups are all zero in B and not in A', self.good("compare", path, out))
        tensors["c.weight"] = ("F64", [32, 64], struct.pack("<2048d", 1e300, *values[1:]))
        write_safetensors(path, tensors)
        self.bad(1, *arguments, "--force", says=["the weight is 1e+300 at (0, 0), which is beyond f32"])

    def test_patterns(self):
        arguments = ["--ignore", "*.a,x", self.model, self.out, "--format", "w8a8", "--json"]
        report = json.loads(self.good("quantize", *arguments))
        self.assertEqual([layer["name"] for layer in report["layers"]], ["encoder.b"])
        self.assertIn({"name": "encoder.a", "reason": "in --ignore"}, report["left_out"])
        self.assertEqual(report["warnings"], ['the pattern "x" matches no layer'])
        config = json.loads((self.out / "config.json").read_text())
        self.assertEqual(config["quantization_config"]["ignore"], ["encoder.a", "lm_head"])
        self.assertEqual(config["model_type"], "bert")

    def test_does_not_overwrite(self):
        arguments = ["quantize", self.model, self.out, "--format", "w8a8"]
        self.good(*arguments)
        before = (self.out / "model.safetensors").read_bytes()
        self.bad(1, *arguments, says=["it already exists", "--force"])
        self.good(*arguments, "--force", "--threads", "2")
        self.assertEqual((self.out / "model.safetensors").read_bytes(), before)
        self.bad(1, "quantize", self.out, self.root / "twice", "--format", "w8a8", says=["is quantized already"])
        self.assertEqual(sorted(os.listdir(self.root)), ["model", "out"])

    def test_force_replaces_what_comes_from_in(self):
        arguments = ["quantize", self.model, f"{self.out}/", "--format", "w8a8"]
        self.good(*arguments)
        self.good(*arguments, "--force")
        (self.out / "adapter.safetensors").write_bytes(b"another's")
        self.bad(1, *arguments, "--force", says=["adapter.safetensors in it does not come from"])
        self.assertEqual((self.out / "adapter.safetensors").read_bytes(), b"another's")
        self.assertEqual(sorted(os.listdir(self.root)), ["model", "out"])

    def test_progress_is_for_terminals(self):
        arguments = [COMMAND, "quantize", str(self.model), str(self.out), "--format", "w8a8", "--force", "--json"]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        for option, shown in ("--quiet", False), ("--json", True):
            ours, terminal = pty.openpty()
            with open(ours, "rb", buffering=0) as ours, open(terminal, "wb") as terminal:
                subprocess.run([*arguments, option], stdout=subprocess.DEVNULL, stderr=terminal, check=True, timeout=60)
                terminal.write(b".")
                terminal.flush()
                text = ours.read(4096)
            self.assertEqual(b"quantize [" in text, shown, text)

    def test_one_value_for_each_ignore(self):
        page = self.good("quantize", "--help")
        self.assertRegex(page, r"--ignore PATTERN\[,PATTERN\.\.\.\]\s")
        paths = [self.model, self.out, "--format", "w8a8"]
        self.bad(2, "quantize", "--ignore", "A", "B", *paths, says=[f"B {self.model} {self.out}", "--ignore", "commas"])
        self.good("quantize", "--ignore", "*.a,x", "--ignore", "y", *paths, "--only", "*.a", "--only", "*.b")
        self.bad(2, "quantize", *paths, "--ignore", says=["--ignore"])
        self.bad(2, "quantize", *paths, "--bogus", says=["--bogus"])

    def test_ctrl_c_leaves_nothing(self):
        """Interrupted at many moments, until one run gets through."""
        data = floats(1 << 14, 5) * 16
        tensors = {f"encoder.{i}.weight": ("F32", [512, 512], data) for i in range(24)}
        write_safetensors(self.model / "model.safetensors", tensors)
        interrupted = 0
        for step in range(200):
            command = [COMMAND, "quantize", str(self.model), str(self.out), "--format", "w4a16", "--method", "clip"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            time.sleep(0.01 + 0.02 * step)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
            if process.returncode == 0:
                break
            self.assertEqual(os.listdir(self.root), ["model"])
            if process.returncode == 130:
                self.assertIn("interrupted; nothing is left", errors)
                interrupted += 1
            else:  # before the command handles signals
                self.assertEqual(process.returncode, -signal.SIGINT)
        self.assertGreater(interrupted, 0)
        self.assertEqual(process.returncode, 0)
        self.good("compare", self.model, self.out)

    def test_ctrl_c_twice_ends_at_once(self):
        """In the middle of a layer that takes many seconds; before a shard is opened, so that nothing is left behind."""
        size = 1536
        block = floats(1 << 14, 5)
        moments = b"".join(bytes(4 * i) + struct.pack("<f", 1) + bytes(4 * (size - 1 - i)) for i in range(size))
        one = ("F32", [size, size], block * (size * size >> 14))
        name = "model.layers.0.self_attn."
        write_safetensors(self.model / "model.safetensors", {f"{name}{part}_proj.weight": one for part in "vo"})
        (self.model / "config.json").write_text('{"model_type": "llama"}')
        tensors = {
            f"{name}o_proj.input_channel_max": ("F32", [size], struct.pack("<f", 1) * size),
            f"{name}o_proj.input_max": ("F32", [1], struct.pack("<f", 1)),
            f"{name}o_proj.rows": ("I64", [1], struct.pack("<q", 1)),
            f"{name}o_proj.input_second_moments": ("F32", [size, size], moments),
        }
        metadata = {"format": "octile-calibration", "version": "1"}
        write_safetensors(self.root / "calibration", tensors, metadata)
        command = [COMMAND, "quantize", str(self.model), str(self.out), "--format", "w8a8", "--smooth", "search"]
        command += ["--calibration", str(self.root / "calibration"), "--threads", "1"]
        for delay in (0.2, 1, 5):
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            self.addCleanup(process.kill)
            with process.stderr:
                time.sleep(delay)
                process.send_signal(signal.SIGINT)
                lines = iter(process.stderr.readline, "")
                heard = any("ends at once" in line for line in lines)
                if heard:
                    began = time.monotonic()
                    process.send_signal(signal.SIGINT)
                self.assertEqual(process.wait(timeout=60), -signal.SIGINT)
            if heard:  # otherwise the command did not handle signals yet
                break
        self.assertTrue(heard)
        self.assertLess(time.monotonic() - began, 1)
        self.assertEqual(sorted(os.listdir(self.root)), ["calibration", "model"])


class EndTest(Case):
    """Signals that come while a temporary folder exists."""

    def setUp(self):
        super().setUp()
        data = floats(1 << 14, 5) * 16
        tensors = {f"encoder.{i}.weight": ("F32", [512, 512], data) for i in range(24)}
        write_safetensors(self.model / "model.safetensors", tensors)
        (self.model / "notes").mkdir()
        self.command = [COMMAND, "quantize", str(self.model), str(self.out), "--format", "w4a16", "--method", "clip"]

    def run_until_written(self, number, **options):
        process = subprocess.Popen(self.command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, **options)
        while not list(self.root.glob("out.*/*")) and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(number)
        process.communicate(timeout=60)
        return process.returncode

    def test_signals_leave_nothing(self):
        for number in (signal.SIGHUP, signal.SIGPIPE, signal.SIGTERM):
            self.assertEqual(self.run_until_written(number), -number)
            self.assertEqual(os.listdir(self.root), ["model"])

    def test_signals_that_are_ignored_stay_ignored(self):
        def ignore():
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            signal.signal(signal.SIGINT, signal.SIG_IGN)

        for number in (signal.SIGHUP, signal.SIGINT):
            self.assertEqual(self.run_until_written(number, preexec_fn=ignore), 0)
            self.command.append("--force")

    def test_the_limit_of_a_file_s_size(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

        done = subprocess.run(self.command, capture_output=True, text=True, timeout=60, preexec_fn=limit)
        self.assertEqual(done.returncode, 1, done)
        self.assertIn("File too large", done.stderr)
        self.assertEqual(os.listdir(self.root), ["model"])


class DamagedTest(Case):
    def test_truncated(self):
        path = self.model / "model.safetensors"
        whole = path.read_bytes()
        for size in (0, 7, 8, 100, len(whole) - 1):
            path.write_bytes(whole[:size])
            for arguments in (
                ["inspect", path],
                ["compare", path, path],
                ["quantize", path, self.out, "--format", "w8a8"],
            ):
                self.bad(1, *arguments, says=["model.safetensors"])
        self.assertFalse(self.out.exists())

    def test_other_files(self):
        path = self.root / "model.bin"
        path.write_bytes(b"PK\x03\x04" + bytes(100))
        self.bad(1, "inspect", path, says=["model.bin"])
        self.bad(1, "inspect", self.root / "none", says=["none", "No such file"])
        self.bad(1, "inspect", self.root, says=["has neither model.safetensors nor"])

    def test_names_that_would_move_the_cursor(self):
        write_safetensors(self.model / "model.safetensors", {"\x1b[2J\r.weight": matrix(4, 4, 1)})
        for arguments in (["inspect", self.model], ["compare", self.model, self.model]):
            text = self.good(*arguments)
            self.assertNotIn("\x1b", text)
            self.assertNotIn("\r", text)
            self.assertIn("?[2J?", text)

    def test_reasons_that_would_move_the_cursor(self):
        """The reasons name the layer that the calibration lacks, and one that reads the same input."""
        block = "\x1b[2J.self_attn."
        tensors = {f"{block}{part}.weight": matrix(32, 32, 1) for part in ("q_proj", "v_proj", "o_proj")}
        write_safetensors(self.model / "model.safetensors", tensors)
        (self.model / "config.json").write_text('{"model_type": "llama"}')
        of_one = {
            f"{block}v_proj.input_channel_max": ("F32", [32], struct.pack("<f", 1) * 32),
            f"{block}v_proj.input_max": ("F32", [1], struct.pack("<f", 1)),
            f"{block}v_proj.rows": ("I64", [1], struct.pack("<q", 1)),
        }
        write_safetensors(self.root / "calibration", of_one, {"format": "octile-calibration", "version": "1"})
        smooth = ["--smooth", "0.5", "--calibration", self.root / "calibration"]
        done = octile("quantize", self.model, self.out, "--format", "w8a8", *smooth)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("the calibration lacks ?[2J.self_attn.o_proj", done.stdout)
        self.assertIn("k_proj reads the same input and is not quantized: ?[2J", done.stdout)
        self.assertNotIn("\x1b", done.stdout + done.stderr)
        smooth[1] = "1e-400"  # is 0
        self.good("quantize", self.model, self.out, "--format", "w8a8", "--force", *smooth)
        # A shard's and another file's name.
        os.rename(self.model / "model.safetensors", self.model / "a\x1b[2J")
        index = {"weight_map": {name: "a\x1b[2J" for name in tensors}}
        (self.model / "model.safetensors.index.json").write_text(json.dumps(index))
        (self.model / "b\x1b[2J").symlink_to(".")
        for arguments in (
            ["inspect", self.model],
            ["quantize", self.model, self.root / "two", "--format", "w8a8"],
            ["compare", self.model, self.out],
        ):
            done = octile(*arguments)
            self.assertEqual(done.returncode, int(arguments[0] == "quantize"), done.stderr)
            self.assertNotIn("\x1b", done.stdout + done.stderr)
        self.bad(1, "quantize", self.model, self.root / "two", "--format", "w8a8", says=["b?[2J: a link to a folder"])

    def test_not_a_number(self):
        data = struct.pack("<4f", 1, float("nan"), 2, 3)
        write_safetensors(self.model / "model.safetensors", {"a.weight": ("F32", [2, 2], data)})
        self.assertIn("1 not finite", self.good("inspect", self.model))
        self.bad(1, "quantize", self.model, self.out, "--format", "w8a8", says=["nan at (0, 1)"])
        done = octile("compare", self.model, self.model)
        self.assertEqual((done.returncode, "NaN" in done.stdout), (1, True))
        self.assertEqual(done.stderr, "octile: 1 linear layer: 1 not finite\n")


    def test_nothing_that_a_terminal_obeys_is_shown(self):
        """Every control and format character, in names, in config.json and in a folder's name."""
        kinds = ("Cc", "Cf", "Zl", "Zp")
        bad = [c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) in kinds]
        self.assertGreater(len(bad), 200)
        for c in "\x1b\x9b\u200e\u200f\u061c\u202e\u2066\u200b\u2028\U000e0041":
            self.assertIn(c, bad)
        names = ["".join(bad[i : i + 30]) for i in range(0, len(bad), 30)]
        tensors = {f"{i}{name}.weight": matrix(32, 32, 1) for i, name in enumerate(names)}
        tensors |= {f"embed{i}{name}.weight": matrix(4, 4, 1) for i, name in enumerate(names)}
        write_safetensors(self.model / "model.safetensors", tensors)
        (self.model / "config.json").write_text(json.dumps({"model_type": names[3]}))
        os.rename(self.model, model := os.fsencode(self.root) + b"/\x9b\xe2\x80\xae\xe0\x81\x81" + names[7].encode())
        out = model + b"out"
        for arguments in (
            ["inspect", model], ["inspect", model, "--headers", "--json"], ["inspect", model, "--json"],
            ["compare", model, model, "--json"], ["compare", model, model], ["quantize", model, out, "--format", "w8a8"],
            ["quantize", model, out, "--format", "w8a8"], ["quantize", model, out, "--format", "w8a8", "--force", "--json"],
            ["compare", model, out], ["inspect", out], ["inspect", model + b"none"],
        ):  # fmt: skip
            done = subprocess.run([COMMAND, *arguments], capture_output=True, timeout=60)
            shown = (done.stdout + done.stderr).decode().replace("\n", "")  # all of it is UTF-8
            self.assertEqual([c for c in shown if c in bad], [], arguments)
        names = [tensor["name"] for tensor in json.loads(self.good("inspect", os.fsdecode(model), "--json"))["tensors"]]
        self.assertEqual(sorted(names), sorted(tensors))


class InspectTest(Case):
    def test_outliers(self):
        rows, columns = 8, 16
        values = [1.0 + (column == 5) * 99 for _ in range(rows) for column in range(columns)]
        data = struct.pack(f"<{rows * columns}f", *values)
        write_safetensors(self.model / "model.safetensors", {"a.weight": ("F32", [rows, columns], data)})
        layer = json.loads(self.good("inspect", self.model, "--json"))["layers"][0]
        self.assertEqual((layer["outlier_channels"], layer["max"], layer["kind"]), ([5], 100, "float"))
        layer = json.loads(self.good("inspect", self.model, "--json", "--outlier", "100"))["layers"][0]
        self.assertEqual(layer["outlier_channels"], [])
        self.assertNotIn("max", json.loads(self.good("inspect", self.model, "--json", "--headers"))["layers"][0])

    def test_text_has_every_tensor(self):
        text = self.good("inspect", self.model)
        for name in self.tensors:
            self.assertIn(name.removesuffix(".weight"), text)
        self.assertIn("an embedding: embeddings.word_embeddings", text)


class TimeTest(Case):
    def test_grows_with_the_layers_and_not_with_their_square(self):
        def seconds(layers, command):
            model = self.root / f"model{layers}"
            if not model.exists():
                model.mkdir()
                data = struct.pack("<2f", 1, 2)
                tensors = {f"layers.{i}.weight": ("F32", [1, 2], data) for i in range(layers)}
                write_safetensors(model / "model.safetensors", tensors)
                config = {"id2label": {str(i): f"LABEL_{i}" for i in range(layers)}}
                (model / "config.json").write_text(json.dumps(config))
            arguments = {
                "inspect": [model],
                "compare": [model, model],
                "quantize": [model, self.out, "--format", "w8a8", "--force"],
            }[command]
            began = time.monotonic()
            self.good(command, *arguments)
            return time.monotonic() - began

        for command in COMMANDS:
            # Eight times the size takes eight times as long; quadratic would be 64 times.
            few = min(seconds(2500, command) for _ in range(2))
            self.assertLess(seconds(20000, command), 20 * few, command)


def hostile_json(kind, size):
    """About `size` bytes of JSON that is slow for a bad parser."""
    def many(piece, before="", behind=""):
        return before + ",".join(piece.format(i) for i in range(max(size // (len(piece) + 6), 1))) + behind

    return {
        "sub-objects": lambda: many('"k{}":{{}}', '{"a":{', "}}"),
        "objects in an array": lambda: many('{{"k":{}}}', '{"a":[', "]}"),
        "deep arrays": lambda: '{"a":' + "[" * size,
        "deep objects": lambda: '{"a":' * (size // 5),
        "many keys": lambda: many('"k{}":0', "{", "}"),
        "keys of 1 kB": lambda: many('"' + "k" * 1000 + '{}":0', "{", "}"),
        "the same key": lambda: many('"k":{}', "{", "}"),
        "strings of 1 kB": lambda: many('"' + "s" * 1000 + '{}"', '{"a":[', "]}"),
        "escapes": lambda: '{"a":"' + r"\u0041\n" * (size // 8) + '"}',
        "numbers": lambda: many("-1.5e-30{}", '{"a":[', "]}"),
        "one number": lambda: '{"a":' + "7" * size + "}",
        "arrays of arrays": lambda: many("[[{}]]", '{"a":[', "]}"),
        "one string": lambda: '{"a":"' + "s" * size + '"}',
        "unterminated": lambda: '{"a":"' + "\x7f" * size,
        "spaces": lambda: "{" + " " * size + "}",
    }[kind]()  # fmt: skip


HOSTILE = ("sub-objects", "objects in an array", "deep arrays", "deep objects", "many keys", "keys of 1 kB", "the same key")
HOSTILE += ("strings of 1 kB", "escapes", "numbers", "one number", "arrays of arrays", "one string", "unterminated", "spaces")


def write_hostile(folder, where, text):
    """A checkpoint in a folder, with this text in the file `where`; returns the path to read."""
    tensors = {"a.weight": matrix(2, 2, 1)}
    path = folder / "model.safetensors"
    if where == "header":
        path.write_bytes(struct.pack("<Q", len(text)) + text.encode())
        return path
    if where == "metadata":
        write_safetensors(path, tensors, {"quantization_config": text})
        return path
    write_safetensors(path, tensors)
    if where == "index":
        path.rename(folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(text)
    elif where == "quantization_config":
        text = '{"quantization_config":{"quant_method":"compressed-tensors","config_groups":' + text + "}}"
        (folder / "config.json").write_text(text)
    else:
        (folder / "config.json").write_text(text)
    return folder


class HostileJsonTest(Case):
    def test_takes_linear_time(self):
        """A megabyte of each kind. A parser that looks back at each brace takes minutes for the first."""
        for where in ("config.json", "quantization_config", "index", "metadata", "header"):
            for kind in HOSTILE:
                with self.subTest(where=where, kind=kind), tempfile.TemporaryDirectory() as folder:
                    path = write_hostile(pathlib.Path(folder), where, hostile_json(kind, 1_000_000))
                    done = subprocess.run([COMMAND, "inspect", path], capture_output=True, text=True, timeout=10)
                    self.assertIn(done.returncode, (0, 1), done)
                    self.assertLess(len(done.stderr), 2000)

    def test_memory_is_bounded(self):
        """An index of 20 MB with as many entries as it can hold."""
        entries = ",".join(f'"t{i}":"a"' for i in range(1_300_000))
        path = write_hostile(self.model, "index", '{"weight_map":{' + entries + "}}")
        script = (
            "import resource, subprocess, sys\n"
            "subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        )
        command = [sys.executable, "-c", script, COMMAND, "inspect", str(path)]
        most = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 1024
        self.assertLess(most, 200 << 20)


class MemoryTest(Case):
    def test_is_that_of_one_layer(self):
        """24 layers of 8 MiB each: the process must not hold them all."""
        block = floats(1 << 14, 7)

        def data(file):
            for _ in range(128):
                file.write(block)

        tensors = {f"layer.{i:02}.weight": ("F32", [1024, 2048], data) for i in range(24)}
        write_safetensors(self.model / "model.safetensors", tensors)
        script = (
            "import resource, subprocess, sys\n"
            "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        )
        for arguments in (["quantize", self.model, self.out, "--format", "w8a8"], ["compare", self.model, self.out]):
            command = [sys.executable, "-c", script, COMMAND, *map(str, arguments)]
            most = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 1024
            # A layer from the file and as f32, twice when comparing, its levels, and the program; the model is 192 MiB.
            self.assertLess(most, 90 << 20, arguments)


if __name__ == "__main__":
    unittest.main()
