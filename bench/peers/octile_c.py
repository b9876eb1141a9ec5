"""The C interface in ctypes: python/octile/_c.py by its path, since the package around it needs torch."""

import importlib.util
import pathlib
import sys

_path = pathlib.Path(__file__).resolve().parents[2] / "python" / "octile" / "_c.py"
_spec = importlib.util.spec_from_file_location(__name__, _path)
_module = importlib.util.module_from_spec(_spec)
sys.modules[__name__] = _module
_spec.loader.exec_module(_module)
