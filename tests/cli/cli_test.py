"""The octile command as a program or a person meets it: its pages, its exit status, one line for each mistake, JSON that
is JSON, and output that cannot be written."""

import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

try:
    import resource
except ImportError:
    resource = None

import json_fields

COMMAND = os.environ.get("OCTILE_COMMAND")
SOURCE = Path(os.environ.get("OCTILE_SOURCE_DIR", Path(__file__).parents[2]))
COMMANDS = ("info", "check", "bench", "tune")


def octile(*arguments, **options):
    return subprocess.run([COMMAND, *arguments], text=True, timeout=300, stdin=subprocess.DEVNULL,
                          **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options})


def rows(**values):
    """The kernel table, or its rows that have these values."""
    table = json.loads(octile("info", "--json").stdout)["kernels"]
    return [row for row in table if all(row[key] == value for key, value in values.items())]


class Case(unittest.TestCase):
    def good(self, *arguments, **options):
        done = octile(*arguments, **options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def bad(self, status, *arguments, says=(), **options):
        """The command fails with this status and one line on standard error that contains all of `says`."""
        done = octile(*arguments, **options)
        self.assertEqual(done.returncode, status, done)
        self.assertRegex(done.stderr, r"\Aoctile: [^\n]+\n\Z")
        for words in says:
            self.assertIn(words, done.stderr)
        return done


class HelpTest(Case):
    def test_version_is_the_header_s(self):
        header = (SOURCE / "include/octile/octile.h").read_text()
        version = ".".join(re.findall(r"#define OCTILE_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))
        self.assertEqual(self.good("--version"), f"octile {version}\n")

    def test_the_page_of_the_command(self):
        page = self.good("--help")
        for words in ("Usage:", "Exit status:", "Environment:", "Examples:", *COMMANDS):
            self.assertIn(words, page)

    def test_the_page_of_each_command(self):
        for command in COMMANDS:
            with self.subTest(command):
                page = self.good(command, "--help")
                self.assertIn(f"Usage: octile {command}", page)
                self.assertIn("Examples:", page)
                self.assertIn(f"octile {command}", page.split("Examples:")[1])

    def test_pages_fit_a_terminal(self):
        for page in ([], *([command] for command in COMMANDS)):
            for line in self.good(*page, "--help").splitlines():
                self.assertLessEqual(len(line), 100, f"{page}: {line}")


class ManualTest(Case):
    """The command's own documentation: the reference page, the man page, completion."""

    def verbs(self):
        return re.findall(r"^## octile (.*)$", self.good("manual", "markdown"), re.MULTILINE)

    def test_examples_come_first(self):
        for verb in self.verbs():
            page = self.good(*verb.split(), "--help")
            if "Examples:" in page:
                with self.subTest(verb):
                    self.assertEqual(page.count("Examples:"), 1)
                    self.assertLess(page.index("Examples:"), page.index("\nOptions:"))

    def test_page_of_the_documents(self):
        if not {"bench", "quantize", "puzzles run"} <= set(self.verbs()):
            self.skipTest("not all of the command was built")
        page = (SOURCE / "docs" / "reference" / "command.md").read_text()
        self.assertEqual(page, self.good("manual", "markdown"), "octile manual markdown > docs/reference/command.md")

    def test_man_page(self):
        page = self.good("manual", "man")
        self.assertTrue(page.startswith(".TH OCTILE 1 "))
        for verb in self.verbs():
            self.assertIn(f"\n.SH octile {verb}\n", page)
        if shutil.which("groff"):
            done = subprocess.run(["groff", "-man", "-Tascii", "-ww"], input=page, capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stderr), (0, ""))

    def complete(self, script, *words):
        """What the script's shell, bash or zsh, suggests for the last of the words."""
        shell = script.suffix[1:]
        before = "autoload -U compinit && compinit -D -u;" if shell == "zsh" else ""
        after = "emulate sh;" if shell == "zsh" else ""
        line = " ".join(f"'{word}'" for word in words)
        text = (f"{before} source '{script}'; {after} COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _octile_proposals; "
                "printf '%s\\n' \"${COMPREPLY[@]}\"")
        done = subprocess.run([shell, *(["-f"] if shell == "zsh" else []), "-c", text], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return [word for word in done.stdout.split() if shell == "bash" or word.startswith(words[-1])]  # as zsh does itself

    def test_completion(self):
        with tempfile.TemporaryDirectory() as folder:
            for shell in ("bash", "zsh"):
                if not shutil.which(shell):
                    continue
                script = Path(folder) / f"octile.{shell}"
                script.write_text(self.good("completion", shell))
                self.assertEqual(self.complete(script, "octile", "che"), ["check"])
                self.assertEqual(self.complete(script, "octile", "check", "--device", ""), ["cpu", "cuda"])
                self.assertEqual(self.complete(script, "octile", "check", "--qu"), ["--quick", "--quiet"])
                self.assertEqual(self.complete(script, "octile", "check", "--seed", ""), [])  # the shell then suggests files
                self.assertEqual(self.complete(script, "octile", "bench", "--filter", "check", "--dig"), [])  # a value is not a verb
                self.assertEqual(self.complete(script, "octile", "completion", "f"), ["fish"])
                self.assertNotIn("manual", self.complete(script, "octile", ""))
            for shell in ("zsh", "fish"):
                other = Path(folder) / shell
                other.write_text(self.good("completion", shell))
                self.assertIn("octile", other.read_text())
                if shutil.which(shell):
                    subprocess.run([shell, "-n", str(other)], check=True)
        self.bad(2, "completion", "tcsh", says=["tcsh"])
        self.bad(2, "manual", "html", says=["html"])


class MistakeTest(Case):
    def test_no_command(self):
        self.assertEqual(self.bad(2, says=["octile --help"]).stdout, "")
        self.bad(2, "lst", says=["lst is not a command or option of octile"])

    def test_unknown_command(self):
        self.bad(2, "benchmark", says=["benchmark", "octile --help"])

    def test_unknown_option(self):
        self.bad(2, "--verbos", says=["--verbos"])
        for command in COMMANDS:
            with self.subTest(command):
                done = self.bad(2, command, "--no-such-option", says=["--no-such-option", f"octile {command} --help"])
                self.assertEqual(done.stdout, "")

    def test_unexpected_word(self):
        for command in COMMANDS:
            with self.subTest(command):
                self.bad(2, command, "surplus", says=["surplus"])

    def test_bad_values(self):
        for option, value in (("--threads", "0"), ("--threads", "-1"), ("--threads", "two"), ("--threads", "99999999999"),
                              ("--runs", "0"), ("--runs", "1.5"), ("--shape", "4"), ("--shape", "4x4"),
                              ("--shape", "0x4x4"), ("--shape", "4x-4x4"), ("--shape", "4x4x4x4"),
                              ("--shape", "4x4x99999999999999999999"), ("--shape", "axbxc"),
                              ("--filter", "no_such_benchmark"), ("--kernel", "no_such_kernel"),
                              ("--device", "gpu")):
            with self.subTest(option=option, value=value):
                self.bad(2, "bench", f"{option}={value}", says=[option, value])

    def test_empty_values(self):
        """As of a variable that a script has not set."""
        for arguments in (["bench", "--list", "--filter", ""], ["tune", "--list", "--group", ""],
                          ["tune", "--list", "--out", ""], ["puzzles", "run", ""]):
            with self.subTest(arguments):
                self.bad(2, *arguments, says=["the value is empty"])

    def test_what_is_not_expected_is_named_in_its_order(self):
        self.bad(2, "check", "one", "two", "--three", says=["not expected: one two --three (see octile check --help)"])

    def test_missing_value(self):
        for option in ("--threads", "--runs", "--shape", "--filter", "--kernel"):
            with self.subTest(option):
                self.bad(2, "bench", option, says=[option])


class UnwritableTest(Case):
    @unittest.skipUnless(os.path.exists("/dev/full"), "no /dev/full")
    def test_standard_output_is_full(self):
        for arguments in (["info"], ["info", "--json"], ["manual", "markdown"], ["bench", "--list", "--filter", "reference"], ["--help"]):
            with self.subTest(arguments), open("/dev/full", "w") as full:
                self.bad(1, *arguments, stdout=full, says=["standard output", "No space left on device"])


class InfoTest(Case):
    def test_text_has_every_kernel(self):
        text = self.good("info")
        for row in rows():
            self.assertRegex(text, rf"(?m)^{row['name']} +{row['operation']} +{row['device']} +(yes|no: .+)$")

    def test_json(self):
        document = json.loads(self.good("info", "--json"))
        self.assertEqual(set(document), {"version", "cpu", "gpus", "gpus_reason", "tuning", "kernels"})
        self.assertGreaterEqual(document["cpu"]["threads"], 1)
        self.assertTrue(document["cpu"]["name"])
        self.assertNotEqual(bool(document["gpus"]), bool(document["gpus_reason"]))
        names = [row["name"] for row in document["kernels"]]
        self.assertEqual(len(names), len(set(names)))
        for row in document["kernels"]:
            self.assertNotEqual(row["available"], bool(row["reason"]), row)
            operation = row["operation"].removesuffix("m")  # a gemv is a gemm with few rows
            self.assertTrue(row["name"].startswith(operation), row)

    def test_octile_isa_forces_a_narrower_instruction_set(self):
        forced = dict(os.environ, OCTILE_ISA="baseline")
        self.assertRegex(self.good("info", env=forced), r"(?m)^uses +baseline, .*OCTILE_ISA is baseline")
        cpu = json.loads(self.good("info", "--json", env=forced))["cpu"]
        self.assertEqual(cpu["isa"], "baseline")
        self.assertTrue(cpu["isa_reason"])

    def test_a_wrong_octile_isa_is_refused_by_every_verb(self):
        names = ["avx3", "BASELINE", "neon" if platform.machine() == "x86_64" else "avx2"]
        if platform.machine() == "x86_64" and not json.loads(self.good("info", "--json"))["cpu"]["isas"]["amx_int8"]:
            names.append("amx")
        verbs = (["info"], ["info", "--json"], ["check", "--quick"], ["bench", "--list"],
                 ["inspect", "no-such-file"], ["quantize", "in", "out", "--format", "w4a16"], ["puzzles", "list"])
        for isa in names:
            for arguments in verbs if isa == names[-1] else verbs[:1]:
                with self.subTest(isa=isa, arguments=arguments):
                    done = self.bad(2, *arguments, env=dict(os.environ, OCTILE_ISA=isa),
                                    says=[f"OCTILE_ISA is {isa}, expected one of baseline"])
                    self.assertEqual(done.stdout, "")
        self.good("--help", env=dict(os.environ, OCTILE_ISA="avx3"))
        self.good("info", env=dict(os.environ, OCTILE_ISA=""))

    @unittest.skipUnless(hasattr(os, "sched_setaffinity"), "no way to bind a process to one core")
    def test_threads_are_those_that_the_process_may_use(self):
        core = min(os.sched_getaffinity(0))
        text = self.good("info", "--json", preexec_fn=lambda: os.sched_setaffinity(0, {core}))
        self.assertEqual(json.loads(text)["cpu"]["threads"], 1)

    @unittest.skipUnless(platform.machine() == "x86_64" and os.path.exists("/proc/cpuinfo"), "no x86 Linux")
    def test_isas_are_those_that_the_kernel_tells(self):
        flags = re.search(r"(?m)^flags\s*: (.*)$", Path("/proc/cpuinfo").read_text()).group(1).split()
        for isa, usable in json.loads(self.good("info", "--json"))["cpu"]["isas"].items():
            if isa == "avx_vnni_int8":  # older kernels do not report it
                continue
            self.assertEqual(usable, isa.replace("sse4.1", "sse4_1") in flags, isa)


class JsonTest(Case):
    def test_every_field_is_documented(self):
        with tempfile.TemporaryDirectory() as folder:
            for section, *arguments in (
                ["info", "info"],
                ["check", "check", "--quick", "--digest", "--kernel", "quantize_reference"],
                ["bench", "bench", "--list", "--kernel", "w8a8_gemm_reference"],
                ["bench", "bench", "--kernel", "w8a8_gemm_reference", "--shape", "2x64x8", "--runs", "1"],
                ["puzzles list", "puzzles", "list"],
                ["puzzles run", "puzzles", "run", "2", "--report", os.path.join(folder, "page.html")],
                ["puzzles run", "puzzles", "run", "all", "--wrong"],
            ):
                if arguments[0] == "puzzles" and "puzzles" not in self.good("--help"):
                    continue
                with self.subTest(arguments):
                    document = json.loads(self.good(*arguments, "--json"))
                    self.assertEqual(json_fields.undocumented(document, section), [])


@unittest.skipIf(resource is None, "no limits on this system")
class LimitsTest(Case):
    """What a container or a job system may limit, and the verbs that must work within it."""

    def test_a_small_stack(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_STACK, (256 << 10, resource.getrlimit(resource.RLIMIT_STACK)[1]))

        arch = ["--kernel", "portable"] if rows(name="w8a8_gemm_portable") else ["--kernel", "quantize_reference"]
        self.good("check", "--quick", "--threads", "2", *arch, preexec_fn=limit)

    def test_no_threads(self):
        """Limits do not apply to root's processes, so the command runs as another user."""
        def limit():
            resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
            if os.geteuid() == 0:
                os.setuid(65534)

        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            command = os.path.join(folder, "octile")
            shutil.copy(COMMAND, command)
            os.chmod(command, 0o755)
            demo = []
            if "OCTILE_DIGITS" in os.environ:
                demo = [shutil.copy(os.environ["OCTILE_DIGITS"], folder), "--epochs", "1", "--seeds", "1", "--no-html"]
                shutil.copy(os.environ["OCTILE_LIBRARY"], os.path.join(folder, "liboctile.so.0"))
            for arguments in (["info"], ["--version"], ["check", "--quick", "--threads", "7", "--kernel", "quantize_reference"],
                              ["bench", "--runs", "1", "--filter", "forward_2x", "--shape", "2x64x8"],
                              demo):
                if not arguments:
                    continue
                with self.subTest(arguments):
                    program = [] if arguments is demo else [command]
                    done = subprocess.run([*program, *arguments], text=True, env=dict(os.environ, LD_LIBRARY_PATH=folder), timeout=300, stdin=subprocess.DEVNULL,
                                          cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=limit)
                    self.assertEqual(done.returncode, 0, done.stderr)
                    self.assertNotIn("pthread_create", done.stderr)


class CheckTest(Case):
    def test_rows_of_one_device(self):
        document = json.loads(self.good("check", "--quick", "--json", "--kernel", "quantize_reference"))
        self.assertEqual((document["device"], document["failed"]), ("cpu", 0))
        self.assertEqual([row["name"] for row in document["kernels"]], ["quantize_reference"])
        self.assertGreater(document["passed"], 100)
        with_cuda = bool(rows(device="cuda"))
        self.bad(2, "check", "--kernel", "sm80", says=["sm80", "octile info", *(["cpu"] if with_cuda else [])])
        self.bad(2, "check", "--device", "cuda", "--kernel", "reference", says=["reference", "cuda", "octile info"])

    def test_digests(self):
        """A row's digest depends only on its bits, which equal those of every exact row of its operation."""
        def digests(*arguments):
            done = self.good("check", "--quick", "--digest", "--kernel", *arguments)
            return dict(re.findall(r"(?m)^digest (\w+) ([0-9a-f]{16})$", done))

        once = digests("quantize_reference")
        self.assertEqual(list(once), ["quantize_reference"])
        self.assertEqual(digests("quantize_reference", "--threads", "3"), once)
        self.assertNotEqual(digests("quantize_reference", "--seed", "2"), once)
        if rows(name="quantize_portable"):
            both = digests("quantize_portable", "--kernel", "quantize_reference")
            self.assertEqual(both, {"quantize_portable": once["quantize_reference"], **once})

    def test_bad_values(self):
        for option, value in (("--device", "gpu"), ("--kernel", "no_such_kernel"), ("--threads", "0"),
                              ("--seed", "x"), ("--seed", "-1"), ("--seed", str(2**64)), ("--form", "-1"), ("--form", "100")):
            with self.subTest(option=option, value=value):
                self.bad(2, "check", f"{option}={value}", says=[option, value])


class CudaTest(Case):
    """Where there is a GPU its rows are checked and timed; elsewhere the reason is given."""

    def setUp(self):
        info = json.loads(self.good("info", "--json"))
        self.rows = [row for row in info["kernels"] if row["device"] == "cuda"]
        self.reason = info["gpus_reason"]

    def test_the_table_has_rows(self):
        self.assertEqual(bool(self.rows), "built without CUDA" not in self.reason)
        for row in self.rows:
            if self.reason:
                self.assertEqual(row["reason"], self.reason, row)

    def test_each_operation_has_a_benchmark(self):
        """Without a GPU no row's benchmarks are built, so one that is missing would only show on a GPU."""
        if not self.rows:
            self.skipTest(self.reason)
        table = (SOURCE / "cli" / "bench" / "cases.cpp").read_text().split("kGpuCases[] = {")[1].split("};")[0]
        self.assertEqual(set(re.findall(r'^ *\{"(\w+)"', table, re.MULTILINE)), {row["operation"] for row in self.rows})

    def test_without_a_gpu(self):
        if not self.reason:
            self.skipTest("there is a GPU")
        self.bad(1, "check", "--device", "cuda", says=["check --device cuda: ", self.reason])
        self.bad(1, "bench", "--device", "cuda", says=["bench --device cuda: ", self.reason])

    def test_check(self):
        if self.reason:
            self.skipTest(self.reason)
        document = json.loads(self.good("check", "--device", "cuda", "--quick", "--json"))
        self.assertEqual(document["failed"], 0)
        self.assertEqual([row["name"] for row in document["kernels"]], [row["name"] for row in self.rows])

    def test_bench(self):
        if self.reason:
            self.skipTest(self.reason)
        document = json.loads(self.good("bench", "--device", "cuda", "--chosen", "--json", "--shape", "9x96x32"))
        self.assertTrue(document["gpu"])
        for line in document["benchmarks"]:
            self.assertGreaterEqual(line["runs"], 20)
            self.assertGreater(line["seconds"], 0)
            self.assertGreater(line["host_seconds"], 0)
            self.assertGreater(line["share_of_peak"], 0)


class BenchTest(Case):
    def listed(self, *arguments):
        return json.loads(self.good("bench", "--list", "--json", *arguments))["benchmarks"]

    def test_every_row_of_the_table_is_timed(self):
        here = rows(available=True, device="cpu")
        fast = {row["name"] for row in here if not row["name"].endswith("_reference")}
        if fast:
            self.assertEqual({line["row"] for line in self.listed()}, fast)
        else:
            self.bad(1, "bench", "--list", says=["--kernel reference"])
        slow = {row["name"] for row in here if row["name"].endswith("_reference")}
        self.assertEqual({line["row"] for line in self.listed("--kernel", "reference")}, slow)
        self.assertEqual({line["row"] for line in self.listed("--filter", "reference")}, slow)
        for row in here:
            self.assertEqual({line["row"] for line in self.listed("--kernel", row["name"])}, {row["name"]})

    def test_names(self):
        lines = self.listed("--kernel", "reference", "--shape", "3x40x24", "--shape", "5x40x8", "--shape", "3x40x24")
        names = [line["name"] for line in lines]
        self.assertEqual(len(names), len(set(names)))
        self.assertIn("w8a8_forward_3x40x24", names)
        self.assertIn("s8_quantize_rows_5x40", names)
        self.assertIn("f32_backward_db_5x8", names)
        for line in lines:
            shape = "x".join(str(line["shape"][size]) for size in "mkn" if size in line["shape"])
            self.assertTrue(line["name"].endswith("_" + shape), line)
            self.assertIn(line["name"].split("_")[0], ("w8a8", "w8a16", "w4a16", "w4a8", "s8", "u8", "s4", "f32"))

    def test_other_floats_leave_products_out(self):
        names = [line["name"] for line in self.listed("--kernel", "reference", "--shape", "5x40x8", "--dtype", "bf16")]
        self.assertIn("s8_quantize_rows_5x40", names)
        self.assertIn("bf16_backward_db_5x8", names)
        self.assertFalse([name for name in names if name.startswith("w")])

    def test_filter_takes_benchmarks_and_kernels(self):
        lines = self.listed("--kernel", "reference", "--filter", "backward_dx")
        rows = ["w8a8_gemm_reference", "w8a8_blocked_gemm_reference", "w8a16_gemm_reference"]
        self.assertEqual([line["row"] for line in lines], rows)
        self.assertTrue(all("_backward_dx_" in line["name"] for line in lines))

    def test_chosen_leaves_reference_rows_out(self):
        """On a CPU, what plans choose instead of s8_gradient_quantize quantizes dY in two steps, which K = 0 skips."""
        if rows(available=True, name="blocked_gradient_quantize_portable"):
            names = {line["name"] for line in self.listed("--chosen", "--filter", "gradient_quantize", "--shape", "5x1x8")}
            self.assertEqual(names, {"s8_gradient_quantize_blocks_5x8"})

    def check_lines(self, lines):
        for line in lines:
            with self.subTest(line["name"]):
                self.assertEqual(line["runs"], 3)
                self.assertIn(line["row"], line["kernel"].split(" + "))
                self.assertGreater(line["seconds"], 0)
                work = line["operations"] if line["unit"] == "operations/s" else line["bytes"]
                self.assertAlmostEqual(line["rate"] * line["seconds"] / work, 1, places=6)
                self.assertAlmostEqual(line["ratio"] * line["seconds"] / line["baseline"]["seconds"], 1, places=6)
                self.assertGreater(line["share_of_peak"], 0)
                if line["unit"] == "operations/s":
                    sizes = line["shape"]
                    self.assertEqual(line["operations"], 2 * sizes["m"] * sizes["k"] * sizes["n"])
                    self.assertIn(line["baseline"]["name"], ("openblas_sgemm", "blas_sgemm"))
                else:
                    self.assertEqual((line["baseline"]["name"], line["peak"]), ("memcpy", "mem"))

    def test_all_rows_at_a_small_ragged_shape(self):
        small = ["--shape", "9x96x33", "--runs", "3", "--threads", "1", "--warm"]
        for kernel in ["reference"] + (["portable"] if rows(name="w8a8_gemm_portable") else []):
            with self.subTest(kernel):
                document = json.loads(self.good("bench", "--json", "--kernel", kernel, *small))
                self.assertEqual(document["threads"], 1)
                for peak in ("int8", "f32", "read", "copy"):
                    self.assertGreater(document["peaks"][peak]["rate"], 1e8)
                lines = document["benchmarks"]
                names = [line["name"] for line in self.listed("--kernel", kernel, "--shape", "9x96x33")]
                if kernel == "portable":
                    names.remove("w8a8_forward_9x96x33")  # its weight is packed
                self.assertEqual([line["name"] for line in lines], names)
                self.check_lines(lines)

    def test_table(self):
        done = octile("bench", "--kernel", "w8a8_gemm_reference", "--filter", "forward_2x", "--shape", "2x64x8", "--runs",
                      "1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"(?m)^w8a8_forward_2x64x8 +quantize_\w+ \+ w8a8_gemm_reference +[\d.]+ (us|ms|s)"
                                      r" +[\d.]+ GOPS +\d+% (int8|mem) +\w+_sgemm [\d.]+ (us|ms|s) +[\d.]+ +1$")
        self.assertEqual(done.stderr, "")

    def test_a_shape_that_no_kernel_takes(self):
        # K is above the limit for an exact s32 sum.
        done = octile("bench", "--kernel", "w8a8_gemm_reference", "--filter", "forward", "--shape", "1x131072x1")
        self.assertEqual(done.returncode, 1, done)
        self.assertIn("131072", done.stderr)
        self.assertRegex(done.stderr, r"(?m)^octile: no kernel could do what was asked$")


if __name__ == "__main__":
    if not COMMAND:
        raise SystemExit("OCTILE_COMMAND does not name the octile command")
    unittest.main()
