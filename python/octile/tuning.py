"""The file of measured kernels that plans follow."""

import os

from . import _plans, kernels


def use_tuning(file=None):
    """Sets the file of measured kernels that plans follow from now on, in this process, instead of OCTILE_TUNING's.

    None: `octile tune`'s own file for the device, only for exact sums. "off": none. A path: that file, on a GPU for
    sums of floats too; if it cannot be used, the next layer that needs a plan raises RuntimeError. Plans made before
    keep their kernels, so call it before the first layer runs.
    """
    library = _plans.library()
    library.ok(library.c.octile_use_tuning(os.fsencode(file) if file else None))
    kernels._plan_text.cache_clear()
