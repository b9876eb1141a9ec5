"""Octile's C interface in ctypes. Needs neither torch nor the package around it.

The structures are those of octile.h and octile_calibration.h, read from the headers: beside this file in a wheel, in
include/ in a checkout. The constants are written out here, for readers; tests/torch/c_interface_test.py compares both
with what a C compiler makes of the headers.
"""

import ctypes as C
import functools
import os
import pathlib
import re

ABI_VERSION = 1  # OCTILE_ABI_VERSION
SEE_IMPORT = "see docs/how-to/errors.md#import"
CPU, CUDA = 1, 2  # OCTILE_DEVICE_...
UNSUPPORTED = 3  # OCTILE_UNSUPPORTED
F16, BF16, F32, F64, S8, U8, S4, S32 = range(8)  # OCTILE_DTYPE_...
NONE, DYNAMIC_PER_TOKEN, DYNAMIC_PER_TENSOR, STATIC_PER_TENSOR = range(4)  # OCTILE_ACTIVATION_...
S8_PER_CHANNEL, S8_PER_TENSOR, S4_GROUP, S8_GROUP = range(4)  # OCTILE_WEIGHT_...
PACKED = {4: S4_GROUP}  # formats with several values a byte, by their bits


def packed_bits(stored, k):
    """The bits of a value where rows of `stored` bytes hold k values, or None."""
    return next((bits for bits in PACKED if stored == (k * bits + 7) // 8), None)


PER_TENSOR, PER_ROW, PER_COLUMN, PER_GROUP = 0, 1, 2, 3  # OCTILE_GRANULARITY_...
SYMMETRIC, AFFINE = 0, 1  # OCTILE_MAPPING_...
GIVEN = 1  # OCTILE_SCALE_GIVEN
ROW_MAJOR, TRANSPOSED, BOTH = 0, 1, 2  # OCTILE_ORIENTATION_...
OUT_IN, IN_OUT = 0, 1  # OCTILE_LAYOUT_...
NO_PROLOGUE, GELU_TANH, SILU, RMS_NORM, LAYER_NORM = 0, 1, 2, 3, 4  # OCTILE_PROLOGUE_...
NO_PRODUCT, DEQUANTIZED, INT8 = 0, 1, 2  # OCTILE_PRODUCT_...
NEAREST, STOCHASTIC = 0, 1  # OCTILE_ROUNDING_...
METHOD_NEAREST, CLIP_SEARCH, ERROR_FEEDBACK = 0, 1, 2  # OCTILE_METHOD_...
AS_THEY_LIE, BY_MOMENT = 0, 1  # OCTILE_ORDER_...

_SCALARS = {"double": C.c_double, "char*": C.c_char_p, "void*": C.c_void_p, "size_t": C.c_size_t}
_SCALARS |= {"int64_t*": C.POINTER(C.c_int64)}
_SCALARS |= {f"{name}_t": getattr(C, f"c_{name}") for name in "int32 int64 uint8 uint16 uint64".split()}


def _structures():
    """The structures of the headers by their C names. A field is one `type name;`, of a union the first one."""
    here = pathlib.Path(__file__).resolve().parent
    folder = here if (here / "octile.h").exists() else here.parents[1] / "include" / "octile"
    text = "".join((folder / name).read_text(encoding="utf-8") for name in ("octile.h", "octile_calibration.h"))
    text = re.sub(r"/\*.*?\*/|\bconst ", "", text, flags=re.DOTALL)
    text = re.sub(r"union \{(.*?;).*?\};", r"\1", text, flags=re.DOTALL)
    types, made = dict(_SCALARS), {}
    for body, name in re.findall(r"^typedef struct \{(.*?)\} (\w+);", text, re.DOTALL | re.MULTILINE):
        fields = [(field, types[kind]) for kind, field in re.findall(r"(\w+\*?) (\w+);", body)]
        made[name] = types[name] = type(name, (C.Structure,), {"_fields_": fields})
        types[f"{name}*"] = C.POINTER(made[name])
    return made


STRUCTURES = _structures()
Device, Element, Tensor = (STRUCTURES[f"octile_{name}"] for name in ("device", "element", "tensor"))
LinearDescription, RunArguments = STRUCTURES["octile_linear_description"], STRUCTURES["octile_linear_args"]
PackArguments = STRUCTURES["octile_linear_pack_args"]
QuantizeDescription, QuantizeArguments = STRUCTURES["octile_quantize_description"], STRUCTURES["octile_quantize_args"]
BackwardDescription = STRUCTURES["octile_linear_backward_description"]
BackwardArguments = STRUCTURES["octile_linear_backward_args"]


class Error(RuntimeError):
    """A call of the library's that failed, with its text and its octile_status."""

    def __init__(self, text, status):
        super().__init__(text)
        self.status = status


def find():
    """The path of liboctile.so: what OCTILE_LIBRARY says, or the one beside this file."""
    chosen = os.environ.get("OCTILE_LIBRARY")
    if chosen:
        return pathlib.Path(chosen)
    here = pathlib.Path(__file__).resolve().parent
    for path in (here / "liboctile.so", *sorted(here.glob("liboctile.so.*"))):
        if path.exists():
            return path
    raise ImportError(f"octile: there is no liboctile.so in {here}, and OCTILE_LIBRARY is not set; {SEE_IMPORT}")


def beside(name):
    """The path of a binary beside the library or this package, or None; and the folders that were searched."""
    library = find()
    folders = (library.parent, library.resolve().parent, pathlib.Path(__file__).resolve().parent)
    return next((folder / name for folder in folders if (folder / name).exists()), None), folders


class Plan:
    """Owns a plan."""

    def __init__(self, library, handle):
        self.library, self.handle = library, handle

    def __del__(self):
        self.library.c.octile_plan_destroy(self.handle)

    @property
    def sku(self):
        return self.library.c.octile_plan_sku(self.handle).decode()

    @property
    def explain(self):
        return self.library.c.octile_plan_explain(self.handle).decode()

    @functools.cached_property
    def workspace_size(self):
        return self.library.c.octile_plan_workspace_size(self.handle)

    @property
    def packed_weight_size(self):
        size = C.c_size_t()
        self.library.ok(self.library.c.octile_linear_packed_weight_size(self.handle, C.byref(size)))
        return size.value


class Calibrator:
    """Owns a calibrator. Tensors are Tensor structures, as everywhere here."""

    def __init__(self, library, handle):
        self.library, self.handle = library, handle

    def __del__(self):
        self.library.c.octile_calibrator_destroy(self.handle)

    def _call(self, name, argument):
        self.library.ok(getattr(self.library.c, f"octile_calibrator_{name}")(self.handle, argument))

    def observe(self, x):
        self._call("observe", C.byref(x))

    def merge(self, other):
        self._call("merge", other.handle)

    def channel_max(self, out):
        self._call("channel_max", C.byref(out))

    def excess(self, out):
        self._call("excess", C.byref(out))

    def second_moments(self, out):
        self._call("second_moments", C.byref(out))

    @property
    def rows(self):
        return self.library.c.octile_calibrator_rows(self.handle)

    @property
    def max(self):
        return self.library.c.octile_calibrator_max(self.handle)


class Library:
    def __init__(self, path):
        try:
            self.c = C.CDLL(str(pathlib.Path(path).resolve()))  # a bare name would be looked for elsewhere
        except OSError as error:
            raise ImportError(f"octile: {path} cannot be loaded: {error}; {SEE_IMPORT}") from error
        for name in ("octile_last_error", "octile_version", "octile_plan_sku", "octile_plan_explain"):
            getattr(self.c, name).restype = C.c_char_p
        self.c.octile_plan_workspace_size.restype = C.c_size_t
        of_a_plan = ("sku", "explain", "workspace_size", "destroy")
        for name in of_a_plan:
            getattr(self.c, f"octile_plan_{name}").argtypes = [C.c_void_p]
        self.c.octile_plan_destroy.restype = None
        self.c.octile_calibrator_destroy.restype = None
        self.c.octile_calibrator_rows.restype = C.c_int64
        self.c.octile_calibrator_max.restype = C.c_float
        for name in ("destroy", "rows", "max"):
            getattr(self.c, f"octile_calibrator_{name}").argtypes = [C.c_void_p]
        version = self.c.octile_abi_version()
        if version != ABI_VERSION:
            raise ImportError(
                f"octile: {path} has ABI version {version}; this package speaks version {ABI_VERSION}; {SEE_IMPORT}"
            )

    def ok(self, status):
        if status != 0:
            raise Error(self.error(), status)

    def error(self):
        return self.c.octile_last_error().decode()

    def version(self):
        return self.c.octile_version().decode()

    def _description(self, kind, fields):
        description = STRUCTURES[f"octile_{kind}_description"]()
        initialize = getattr(self.c, f"octile_{kind}_description_init")
        self.ok(initialize(C.byref(description), C.c_size_t(C.sizeof(description))))
        for name, value in fields.items():
            setattr(description, name, value)
        return description

    def plan(self, kind, **fields):
        description, handle = self._description("quantize" if kind == "dequantize" else kind, fields), C.c_void_p()
        create = getattr(self.c, f"octile_{kind}_plan_create")
        self.ok(create(C.byref(description), C.byref(handle)))
        return Plan(self, handle)

    def calibrator(self, features, second_moments=False, threads=0):
        structure = STRUCTURES["octile_calibrator_description"]
        description = structure(C.sizeof(structure), features, second_moments, threads)
        handle = C.c_void_p()
        self.ok(self.c.octile_calibrator_create(C.byref(description), C.byref(handle)))
        return Calibrator(self, handle)

    # The methods below take tensors by name; None is an absent one.

    @staticmethod
    def arguments(name, fields):
        structure = STRUCTURES[f"octile_{name}_args"]
        pointers = {name: C.pointer(value) if isinstance(value, Tensor) else value for name, value in fields.items()}
        return structure(struct_size=C.sizeof(structure), **pointers)

    def pack(self, plan, **fields):
        self.ok(self.c.octile_linear_pack(plan.handle, C.byref(self.arguments("linear_pack", fields))))

    def smoothing_factors(self, **fields):
        """Writes the factors, and returns the largest smoothed input."""
        largest = C.c_float()
        arguments = self.arguments("smoothing", {"alpha": 0.5, **fields})
        self.ok(self.c.octile_smoothing_factors(C.byref(arguments), C.byref(largest)))
        return largest.value

    def search_smoothing(self, description, **fields):
        """The octile_smoothing_search_result. description: a dictionary of the fields that are not the default."""
        description = self._description("smoothing_search", description)
        arguments = self.arguments("smoothing_search", fields)
        result = STRUCTURES["octile_smoothing_search_result"]()
        result.struct_size = C.sizeof(result)
        self.ok(self.c.octile_search_smoothing(C.byref(description), C.byref(arguments), C.byref(result)))
        return result

    def quantize_weight(self, description, **fields):
        description = self._description("weight_quantizer", description)
        arguments = self.arguments("weight_quantizer", fields)
        self.ok(self.c.octile_quantize_weight(C.byref(description), C.byref(arguments)))


@functools.lru_cache(maxsize=1)
def library():
    """The library, loaded once."""
    return Library(find())


# A plan that falls out of the cache lives on until the call that uses it is over.
@functools.lru_cache(maxsize=1024)
def plan(kind, device_type, device_index, fields):
    """The plan of a description. kind: "linear", say, of octile_linear_plan_create; fields: pairs."""
    return library().plan(kind, **dict(fields, device=Device(device_type, device_index)))
