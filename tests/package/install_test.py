"""Octile as users have it: installed and moved, found by CMake and pkg-config, or inside another CMake project."""

import os
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

SOURCE = Path(os.environ["OCTILE_SOURCE_DIR"])
BUILD = Path(os.environ["OCTILE_BUILD_DIR"])
CMAKE = os.environ["OCTILE_CMAKE"]
CC = os.environ["OCTILE_CC"]
CXX = os.environ["OCTILE_CXX"]
FLAGS = os.environ.get("OCTILE_FLAGS", "")  # a sanitizer's, which programs that link the library need too
CONSUMER = SOURCE / "tests" / "package" / "consumer"


def run(*command, **environment):
    """Runs a command and returns its output; if it fails, the exception contains all of it."""
    result = subprocess.run(list(map(str, command)), env={**os.environ, **environment}, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    if result.returncode != 0:
        raise AssertionError(f"{' '.join(map(str, command))}: exit status {result.returncode}\n{result.stdout}")
    return result.stdout


def configure_build_test(source, build, *options):
    run(CMAKE, "-S", source, "-B", build, "-G", "Ninja", f"-DCMAKE_C_COMPILER={CC}", f"-DCMAKE_CXX_COMPILER={CXX}",
        f"-DCMAKE_C_FLAGS={FLAGS}", f"-DCMAKE_CXX_FLAGS={FLAGS}", *options)
    run(CMAKE, "--build", build, "-j", "2")
    run(os.environ["OCTILE_CTEST"], "--test-dir", build, "--output-on-failure", "--no-tests=error")


class InstallTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = Path(tempfile.mkdtemp(prefix="octile-install-"))
        cls.addClassCleanup(shutil.rmtree, cls.scratch)
        run(CMAKE, "--install", BUILD, "--prefix", cls.scratch / "before")
        cls.prefix = cls.scratch / "after the move"  # breaks a tree that depends on its location or on quoting
        (cls.scratch / "before").rename(cls.prefix)
        cls.lib = next(cls.prefix.glob("lib*/**/pkgconfig")).parent
        cls.shared = (cls.lib / "liboctile.so").exists()

    def test_find_package(self):
        configure_build_test(CONSUMER, self.scratch / "consumer", f"-DCMAKE_PREFIX_PATH={self.prefix}")

    @unittest.skipIf("undefined" in FLAGS, "a C compiler does not link UBSan's runtime for C++")
    def test_find_package_in_c_alone(self):
        source = self.scratch / "in_c"
        source.mkdir()
        (source / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.22)\nproject(p LANGUAGES C)\nenable_testing()\n"
            f"find_package(octile 0.1 CONFIG REQUIRED)\nadd_executable(in_c {CONSUMER}/main.c)\n"
            "target_link_libraries(in_c PRIVATE octile::octile)\nadd_test(NAME in_c COMMAND in_c)\n")
        configure_build_test(source, self.scratch / "in_c_build", f"-DCMAKE_PREFIX_PATH={self.prefix}")

    def test_find_package_refuses_another_version(self):
        source = self.scratch / "wants_9_9"
        source.mkdir()
        (source / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.22)\nproject(p LANGUAGES NONE)\n"
                                               "find_package(octile 9.9 CONFIG REQUIRED)\n")
        with self.assertRaisesRegex(AssertionError, "octile"):
            run(CMAKE, "-S", source, "-B", source / "build", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={self.prefix}")

    def test_pkg_config(self):
        if not shutil.which("pkg-config"):
            self.skipTest("there is no pkg-config")
        pkg_config = {"PKG_CONFIG_PATH": str(self.lib / "pkgconfig")}
        version = run("pkg-config", "--modversion", "octile", **pkg_config).strip()
        self.assertRegex(version, r"^\d+\.\d+\.\d+$")
        # A shell interprets pkg-config's quoting, as a makefile would.
        for compiler, source in ((f"{CXX} {FLAGS} -std=c++20", "main.cpp"), (f"{CC} {FLAGS} -std=c11", "main.c")):
            program = self.scratch / f"pc_{source.replace('.', '_')}"
            run("sh", "-ec", f"""eval "{compiler} '{CONSUMER / source}' -o '{program}' """
                             """$(pkg-config --cflags --libs octile)" """, **pkg_config)
            run(program, LD_LIBRARY_PATH=str(self.lib))

    def test_pkg_config_as_the_documents_have_it(self):
        """Without LD_LIBRARY_PATH; the library is in a folder that the dynamic linker does not know."""
        if not shutil.which("pkg-config"):
            self.skipTest("there is no pkg-config")
        place = self.scratch / "plain"  # the page's line does not quote
        place.symlink_to(self.prefix)
        line, = [line for line in (SOURCE / "docs/how-to/serve-cpp.md").read_text().splitlines()
                 if line.startswith("g++ -std=c++20 main.cpp")]
        program = self.scratch / "readme"
        environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
        environment["PKG_CONFIG_PATH"] = str(place / self.lib.relative_to(self.prefix) / "pkgconfig")
        subprocess.run(["sh", "-ec", line.replace("g++", f"{CXX} {FLAGS}").replace("main.cpp", f"'{CONSUMER}/main.cpp' -o '{program}'")],
                       env=environment, check=True)
        subprocess.run([program], env=environment, check=True, stdout=subprocess.DEVNULL)

    def test_shared_library_is_versioned(self):
        if not self.shared:
            self.skipTest("a static library has no soname")
        library = (self.lib / "liboctile.so").resolve()
        soname = re.search(r"\(SONAME\).*\[(.*)\]", run("readelf", "-d", library)).group(1)
        self.assertRegex(soname, r"^liboctile\.so\.\d+$")
        self.assertTrue((self.lib / soname).exists())

    def test_headers_and_texts_are_there(self):
        ours = sorted(path.name for path in (SOURCE / "include" / "octile").iterdir())
        installed = self.prefix / "include" / "octile"
        self.assertEqual(sorted(path.name for path in installed.iterdir() if path.is_file()), ours)
        if (installed / "tile").exists():  # the tile language is an option of the build
            headers = sorted(path.name for path in (SOURCE / "tile" / "octile" / "tile").iterdir())
            self.assertEqual(sorted(path.name for path in (installed / "tile").iterdir()), headers)
        self.assertTrue(list(self.prefix.glob("share/doc/octile/LICENSE")))

    def test_headers_say_that_they_need_cxx20(self):
        source = self.scratch / "old.cpp"
        source.write_text('#include "octile/octile.hpp"\n')
        with self.assertRaisesRegex(AssertionError, r"need C\+\+20, as with -std=c\+\+20"):
            run(CXX, "-std=c++17", "-fsyntax-only", "-I", self.prefix / "include", source)
        source.write_text('#include "octile/octile.h"\n')
        run(CXX, "-std=c++17", "-fsyntax-only", "-I", self.prefix / "include", source)

    def test_documents_that_others_name_are_there(self):
        documents = self.prefix / "share" / "doc" / "octile"
        pages = [*documents.rglob("*.md")]
        self.assertIn(documents / "docs" / "reference" / "contract.md", pages)
        for page in pages:
            prose = re.sub(r"^( *)(`{3,}).*?^\1\2", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)  # [](int x) is no link
            for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose):
                if "://" not in link:
                    self.assertTrue((page.parent / link).exists(), f"{page.relative_to(documents)}: {link}")
        headers = [path for path in (self.prefix / "include").rglob("*") if path.is_file()]
        for path in [*headers, *pages]:
            for name in re.findall(r"\bdocs/[\w/-]+\.\w+", path.read_text()):
                self.assertTrue((documents / name).exists(), f"{path}: {name}")

    def test_by_another_user_than_the_builder(self):
        """A user who may read the build folder, but not write the list of installed files there."""
        prefix, manifest = self.scratch / "by another", BUILD / "install_manifest.txt"
        manifest.unlink()
        self.addCleanup(manifest.unlink)
        manifest.symlink_to("no such folder/list")  # not even root can write there
        self.assertIn("All is installed", run(CMAKE, "--install", BUILD, "--prefix", prefix))
        self.assertEqual(*(sorted(path.relative_to(folder) for path in folder.rglob("*")) for folder in (prefix, self.prefix)))

    @unittest.skipUnless("OCTILE_COMMAND" in os.environ, "the command was not built")
    def test_command(self):
        command = self.prefix / "bin" / "octile"
        version = run("pkg-config", "--modversion", "octile", PKG_CONFIG_PATH=str(self.lib / "pkgconfig")).strip()
        self.assertIn(version, run(command, "--version"))
        for page in ("man/man1/octile.1", "bash-completion/completions/octile", "zsh/site-functions/_octile",
                     "fish/vendor_completions.d/octile.fish"):
            self.assertGreater((self.prefix / "share" / page).stat().st_size, 1000)

    def test_puzzles_without_the_sources(self):
        if not (self.prefix / "share/octile/puzzles").exists() or "OCTILE_COMMAND" not in os.environ:
            self.skipTest("the puzzles are an option of the build")
        command, solution = self.prefix / "bin" / "octile", self.scratch / "constant_add.cpp"
        run(command, "puzzles", "new", "1", solution)
        kernel = "const auto i = t.arange(b0);\n    t.store(z + i, t.load(x + i) + 10.0f);"
        solution.write_text(solution.read_text().replace("// Your kernel.", kernel))
        self.assertIn("right", run(command, "puzzles", "check", "--stated", solution, CXX=CXX))

    def test_nothing_points_back_to_the_source_or_build_tree(self):
        for path in [*self.lib.glob("cmake/octile/*"), *self.lib.glob("pkgconfig/*")]:
            text = path.read_text()
            for place in (SOURCE, BUILD, self.scratch):
                self.assertNotIn(str(place), text, path)


@unittest.skipIf(FLAGS, "another compiler and its flags share no objects with a release build")
class SubprojectTest(unittest.TestCase):
    def test_fetch_content(self):
        # Beside a release build, and with its options, its objects are in the compile cache, whose base_dir may make
        # paths relative.
        with tempfile.TemporaryDirectory(prefix="subproject-", dir=BUILD.parent) as scratch:
            launcher = shutil.which("ccache") or ""
            configure_build_test(SOURCE / "tests" / "package" / "subproject", scratch, f"-DOCTILE_SOURCE_DIR={SOURCE}",
                                 f"-DCMAKE_CXX_COMPILER_LAUNCHER={launcher}", "-DCMAKE_BUILD_TYPE=Release",
                                 "-DBUILD_SHARED_LIBS=ON")

    def test_a_project_in_c_alone(self):
        with tempfile.TemporaryDirectory(prefix="c-project-", dir=BUILD.parent) as name:
            source = Path(name)
            (source / "CMakeLists.txt").write_text("cmake_minimum_required(VERSION 3.22)\nproject(p LANGUAGES C)\n"
                                                   f"add_subdirectory({SOURCE} octile)\n")
            with self.assertRaisesRegex(AssertionError, r"(?s)needs C\+\+.*LANGUAGES C CXX"):
                run(CMAKE, "-S", source, "-B", source / "build", "-G", "Ninja")


if __name__ == "__main__":
    unittest.main()
