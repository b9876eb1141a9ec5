"""The deprecated name of octile.compat."""

import sys
import warnings

from . import compat

# The deprecated name says so.
warnings.warn(
    "octile.homework is now octile.compat; the old name will be removed in 0.2", DeprecationWarning, stacklevel=2
)
sys.modules[__name__] = compat
