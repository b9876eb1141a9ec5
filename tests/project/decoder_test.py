"""bench/peers/decoder.py without a peer: its tables, its weights, and its messages for wrong command lines."""

import os
import subprocess
import sys
import unittest
from pathlib import Path

try:
    import numpy as np
except ImportError:
    print("skipped: Python has no numpy")
    sys.exit(77)

SOURCE = Path(os.environ.get("OCTILE_SOURCE_DIR", Path(__file__).parents[2]))
PEERS = SOURCE / "bench" / "peers"
sys.dont_write_bytecode = True
sys.path.insert(0, str(PEERS))

import decoder  # noqa: E402
import problems  # noqa: E402
from decoder_model import Decoder  # noqa: E402

SMALL = Decoder(layers=2, hidden=256, intermediate=512, heads=4, key_value_heads=2, vocabulary=1000)


class TableTest(unittest.TestCase):
    def test_ratios_are_taken_in_each_round(self):
        times = {
            "octile w8a8 decoding": [{"prefill": 0.5, "decode": 1.0}, {"prefill": 1.0, "decode": 2.0}],
            "llama.cpp Q8_0": [{"prefill": 1.0, "decode": 1.0}, {"prefill": 2.0, "decode": 4.0}],
            "torch bf16": [{"prefill": 1.0, "decode": 8.0}, {"prefill": 1.0, "decode": 8.0}],
        }
        found = decoder.rates(times, prompt=100, tokens=16)
        self.assertEqual(found["prefill"]["octile w8a8 decoding"], [200, 100])
        self.assertEqual(found["decode"]["llama.cpp Q8_0"], [16, 4])
        text = decoder.tables(found, dict.fromkeys(times, 0.05))
        self.assertRegex(text, r"octile w8a8 decoding +150 \(100 to 200\) +12\.0 \(8\.0 to 16\.0\) +5\.0e-02")
        self.assertRegex(text, r"octile w8a8 decoding to llama\.cpp Q8_0 +2\.00 \(2\.00 to 2\.00\) +1\.50 \(1\.00 to 2\.00\)")
        self.assertEqual(text.count(" to llama.cpp"), 1)


class ModelTest(unittest.TestCase):
    def test_weights_are_the_same_each_time_and_no_row_is_another(self):
        shapes = SMALL.shapes()
        self.assertEqual(len(shapes), 2 * 7 + 2)
        self.assertEqual(SMALL.parameters(), 2 * 1000 * 256 + 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 256 * 512))
        for name in ("lm_head", "model.layers.1.mlp.down_proj"):
            weight = SMALL.weight(name)
            self.assertEqual(weight.shape, shapes[name])
            np.testing.assert_array_equal(weight, SMALL.weight(name))
            self.assertEqual(len(np.unique(weight[:, :4], axis=0)), len(weight))
        self.assertFalse(np.array_equal(SMALL.weight("lm_head"), SMALL.weight("model.embed_tokens")))


class ProblemTest(unittest.TestCase):
    def test_each_row_has_both_ends_and_each_block_one(self):
        """Makes the scale of every quantized row or block of X equal 1."""
        values = problems.full_range(np.random.default_rng(1), (16, 256), -127)
        self.assertTrue((values.min(axis=1) == -127).all() and (values.max(axis=1) == 127).all())
        blocks = np.abs(values.reshape(16, -1, problems.BLOCK).astype(int)).max(axis=2)
        self.assertTrue((blocks == 127).all())


class CommandTest(unittest.TestCase):
    def test_wrong_command_lines(self):
        for arguments, words in (
            (["--contenders", "octile w2a2"], "there is no octile w2a2"),
            (["--hidden", "200"], "--hidden is a multiple"),
            (["--hidden", "192", "--heads", "3", "--key-value-heads", "1"], "multiples of 128"),
            (["--layers", "0"], "at least 1"),
            (["--threads", "100000"], "--threads is 1 to"),
            (["--library", "/no/such/file"], "/no/such/file is not there"),
        ):
            library = [] if "--library" in arguments else ["--library", __file__]
            command = [sys.executable, "-B", str(PEERS / "decoder.py"), *library, *arguments]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            self.assertEqual(done.returncode, 2, arguments)
            self.assertIn(words, done.stderr)


if __name__ == "__main__":
    unittest.main()
