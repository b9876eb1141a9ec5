"""Runs tests of the Python package: the arguments are pytest's. Ends with 77, which CTest takes for a skip, where Python
has no torch or no pytest, and where every test was skipped; with --gpu before them, where there is no driver of a GPU,
before torch is imported."""

import ctypes
import importlib.util
import os
import sys
import tempfile


class Outcomes:
    ran = skipped = 0

    def pytest_runtest_logreport(self, report):
        self.ran += report.when == "call" and not report.skipped
        self.skipped += report.skipped

    def pytest_collectreport(self, report):
        self.skipped += report.skipped


def main(arguments):
    del sys.path[0]  # this folder, whose torch/ is not PyTorch
    missing = [name for name in ("torch", "pytest") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"skipped: Python has no {' and no '.join(missing)}")
        return 77
    if arguments[0] == "--gpu":
        del arguments[0]
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            print(f"skipped: there is no GPU: {error}")
            return 77
    import pytest

    outcomes = Outcomes()
    # A cache that lasts would hold code that torch.compile made for an earlier version of the package.
    with tempfile.TemporaryDirectory(prefix="octile-inductor-") as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
        status = pytest.main(["-q", "-rs", "-p", "no:cacheprovider", "-p", "no:logging", *arguments], plugins=[outcomes])
    nothing_failed = status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    return 77 if nothing_failed and outcomes.skipped and not outcomes.ran else int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
