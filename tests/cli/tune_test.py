"""octile tune: what it writes, also alongside another process and when interrupted, and what it refuses to overwrite."""

import json
import os
import re
import signal
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

import json_fields

COMMAND = os.environ.get("OCTILE_COMMAND")


class TuneTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.environment = dict(os.environ, XDG_CACHE_HOME=folder.name, OCTILE_TUNING="")

    def octile(self, *arguments, **environment):
        return subprocess.run([COMMAND, *arguments], text=True, capture_output=True, timeout=300,
                              env={**self.environment, **environment})

    def good(self, *arguments, **environment):
        done = self.octile(*arguments, **environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def bad(self, status, *arguments, says, **environment):
        done = self.octile(*arguments, **environment)
        self.assertEqual(done.returncode, status, done)
        self.assertRegex(done.stderr, r"\Aoctile: [^\n]+\n\Z")
        self.assertIn(says, done.stderr)

    def tune(self, *shapes, options=()):
        return self.good("tune", "--warm", "--threads", "1", *options, *(f"--shape={shape}" for shape in shapes))

    def choices(self):
        cpu, *gpus = json.loads(self.good("tune", "--list", "--json"))["devices"]
        self.assertTrue(cpu["used"], cpu)
        return {(choice["m"], choice["product"]) for choice in cpu["choices"]}

    def file(self):
        (path,) = (self.folder / "octile").iterdir()  # and nothing else
        return path

    def test_it_writes_what_plans_follow(self):
        self.assertRegex(self.good("info"), r"(?m)^tuning  cpu: none; .*\.tuning does not exist$")
        out = self.tune("2x64x48", "3x64x48", "3x32x48", options=["--group=0"])
        self.assertIn(f"\n{self.file()}\n", out)
        self.assertRegex(self.file().name, r"^cpu-[a-z0-9-]+-\d+\.\d+\.\d+\.tuning$")
        self.assertIn(f"tuning  cpu: {self.file()}, for exact sums alone\n", self.good("info"))
        self.assertIn("tuning  cpu: off\n", self.good("info", OCTILE_TUNING="off"))
        self.assertEqual(len(self.choices()), 6)
        self.assertEqual({m for m, product in self.choices() if re.match(r"w[48]a8_gemm n=48 k=64 ", product)}, {2, 3})
        self.tune("2x64x48", "8x64x48", options=["--format=w8a8"])  # earlier choices stay
        self.assertEqual(len(self.choices()), 7)

    def test_packed_weights_in_groups(self):
        self.tune("2x64x48", options=["--packed", "--group=32"])
        self.assertEqual(len(self.choices()), 2)
        for _, product in self.choices():
            self.assertRegex(product, " b=32 .* packed ")
        left_out = "w4a8 2x100x8 left out: LinearPlan::select: group = 128 does not divide k = 100\n"
        for options in ["--group=128"], []:
            done = self.octile("tune", *options, "--shape=2x100x8", "--shape=2x128x8", "--format=w4a8")
            self.assertEqual((done.returncode, done.stderr), (0, left_out))
        self.assertEqual(len([product for _, product in self.choices() if " k=100 " in product]), 0)

    def test_layers_of_a_model(self):
        config = self.folder / "config.json"
        config.write_text(json.dumps({"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
                                      "num_key_value_heads": 2, "time_step_limit": [0, float("inf")]}))
        self.tune(options=[f"--model-config={config}", "--batch=1,4", "--format=w8a8"])
        found = {(m, *re.match(r"w8a8_gemm n=(\d+) k=(\d+) ", product).groups()) for m, product in self.choices()}
        layers = {("64", "64"), ("32", "64"), ("96", "64"), ("64", "96")}
        self.assertEqual(found, {(m, *layer) for m in (1, 4) for layer in layers})

    def test_shapes_of_a_file(self):
        (self.folder / "shapes").write_text("1x32x16\n2x32x16\n")
        self.tune(options=[f"--shapes={self.folder / 'shapes'}", "--format=w8a8"])
        self.assertEqual({m for m, _ in self.choices()}, {1, 2})
        (self.folder / "shapes").write_text("1x32x16\n\n2x32x16 4x32\n")
        self.bad(1, "tune", f"--shapes={self.folder / 'shapes'}", says="shapes:3: 4x32 is not MxKxN")
        (self.folder / "shapes").write_text("\n")
        self.bad(1, "tune", f"--shapes={self.folder / 'shapes'}", says="shapes has no shape")
        self.bad(1, "tune", "--shapes=/dev/zero", says="cannot read /dev/zero: more than 16000000 bytes")

    def test_each_product_is_measured_once(self):
        (self.folder / "shapes").write_text("2x32x16\n")
        out = self.good("tune", "--warm", "--threads=1", "--format=w8a8", "--format=w8a8", "--shape=2x32x16", "--shape=2x32x16",
                        f"--shapes={self.folder / 'shapes'}", "--json")
        self.assertEqual(len(json.loads(out)["choices"]), 1)

    def test_several_at_once_lose_nothing(self):
        running = [subprocess.Popen([COMMAND, "tune", "--warm", "--threads=1", "--format=w8a8", "--quiet",
                                     *(f"--shape={m}x32x{n}" for m in (1, 2, 4))], env=self.environment,
                                    stdout=subprocess.DEVNULL) for n in (16, 17, 18, 19)]
        self.assertEqual([process.wait(300) for process in running], [0] * 4)
        self.assertEqual(len(self.choices()), 12)
        self.file()

    def test_an_interrupted_run_keeps_what_it_measured(self):
        shapes = [f"--shape={m}x256x256" for m in range(1, 300)]
        process = subprocess.Popen([COMMAND, "tune", "--threads=1", *shapes], env=self.environment)
        while not list(self.folder.glob("octile/*.tuning")):
            self.assertIsNone(process.poll())
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        self.assertEqual(process.wait(60), -signal.SIGINT)
        self.assertTrue(0 < len(self.choices()) < 598)
        self.file()

    def test_json(self):
        for arguments in (["tune", "--format=w8a8", "--shape=2x64x48"], ["tune", "--list"]):
            document = json.loads(self.good(*arguments, "--json"))
            self.assertEqual(json_fields.undocumented(document, "tune"), [])
        self.assertGreater(len(document["devices"][0]["choices"]), 0)

    def test_it_writes_over_nothing_else(self):
        self.tune("2x64x48", options=["--format=w8a8"])
        good = self.file().read_text()
        target = self.folder / "target"
        for text, says in (("my thesis\n", "is not a tuning file"), (good.replace("device cpu", "device cuda"), "is for cuda "),
                           (good.replace("library ", "library 7."), "is of version"), (good[:-7], "is cut off")):
            with self.subTest(says):
                target.write_text(text)
                self.bad(1, "tune", "--shape=2x64x48", "--out", str(target), says=f"{target} {says}")
                self.assertEqual(target.read_text(), text)
        os.mkfifo(self.folder / "fifo")
        for path in (self.folder, self.folder / "fifo"):
            self.bad(1, "tune", "--shape=2x64x48", "--out", str(path), says=f"{path} is not a regular file")
        self.bad(1, "tune", "--shape=2x64x48", "--out", str(self.folder / "no" / "file"), says="No such file")
        self.file().write_text(good[:-7])
        self.bad(1, "tune", "--shape=2x64x48", says="is cut off")
        self.assertIn(f"none; {self.file()} is cut off", self.good("info"))
        self.assertIn(f"none; {target} is cut off", self.good("info", OCTILE_TUNING=str(target)))

    def test_mistakes(self):
        for option in ("--format=w9a9", "--format=w4a16", "--shape=4x4", "--batch=0", "--batch=x", "--group=5", "--dtype=f64", "--threads=0",
                       "--device=tpu"):
            with self.subTest(option):
                self.bad(2, "tune", option, says=option.split("=")[0])
        self.bad(2, "tune", "--shape=2x64x48", "--batch=2", says="--batch: is for the layers of a model")
        config = self.folder / "config.json"
        for text, says in (("[]", "is not a JSON object"), ("{", "is not a JSON object"), ("{}", "has no hidden_size"),
                           ('{"hidden_size": "x"}', "hidden_size is not a size"), ('{"hidden_size": -1}', "is not a size"),
                           ('{"hidden_size": 1e30}', "is not a size")):
            config.write_text(text)
            self.bad(1, "tune", f"--model-config={config}", says=says)
        self.bad(1, "tune", f"--model-config={self.folder / 'absent'}", says="No such file")
        self.bad(1, "tune", "--shape=2x64x48", XDG_CACHE_HOME="", HOME="", says="give --out FILE")
        self.bad(1, "tune", "--shape=2x64x48", XDG_CACHE_HOME=str(config), says=f"cannot write into {config}/octile: Not a directory")


if __name__ == "__main__":
    unittest.main()
