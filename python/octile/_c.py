"""Octile's C interface, include/octile/octile.h and octile_calibration.h, in ctypes. Needs neither torch nor the package
around it."""

import ctypes as C
import functools
import os
import pathlib

ABI_VERSION = 1  # OCTILE_ABI_VERSION
CPU, CUDA = 1, 2  # OCTILE_DEVICE_...
F16, BF16, F32, F64, S8, U8, S4, S32 = range(8)  # OCTILE_DTYPE_...
NONE, DYNAMIC_PER_TOKEN, DYNAMIC_PER_TENSOR, STATIC_PER_TENSOR = range(4)  # OCTILE_ACTIVATION_...
S8_PER_CHANNEL, S8_PER_TENSOR, S4_GROUP = 0, 1, 2  # OCTILE_WEIGHT_...
PER_TENSOR, PER_ROW, PER_COLUMN = 0, 1, 2  # OCTILE_GRANULARITY_...
ROW_MAJOR, TRANSPOSED, BOTH = 0, 1, 2  # OCTILE_ORIENTATION_...
OUT_IN, IN_OUT = 0, 1  # OCTILE_LAYOUT_...
NO_PRODUCT, DEQUANTIZED, INT8 = 0, 1, 2  # OCTILE_PRODUCT_...
NEAREST, STOCHASTIC = 0, 1  # OCTILE_ROUNDING_...
METHOD_NEAREST, CLIP_SEARCH, ERROR_FEEDBACK = 0, 1, 2  # OCTILE_METHOD_...
AS_THEY_LIE, BY_MOMENT = 0, 1  # OCTILE_ORDER_...


class Device(C.Structure):
    _fields_ = [("type", C.c_int32), ("id", C.c_int32)]


class Element(C.Structure):
    _fields_ = [("code", C.c_uint8), ("bits", C.c_uint8), ("lanes", C.c_uint16)]


class Tensor(C.Structure):
    _fields_ = [
        ("data", C.c_void_p),
        ("device", Device),
        ("ndim", C.c_int32),
        ("dtype", Element),
        ("shape", C.POINTER(C.c_int64)),
        ("strides", C.POINTER(C.c_int64)),
        ("byte_offset", C.c_uint64),
    ]


class LinearDescription(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("m", C.c_int64),
        ("n", C.c_int64),
        ("k", C.c_int64),
        ("group", C.c_int64),
        ("static_scale", C.c_double),
        ("x", C.c_int32),
        ("y", C.c_int32),
        ("activation", C.c_int32),
        ("weight", C.c_int32),
        ("weight_layout", C.c_int32),
        ("weight_zero_point", C.c_int32),
        ("bias", C.c_int32),
        ("x_multiplier", C.c_int32),
        ("threads", C.c_int32),
        ("packed_weight", C.c_int32),
        ("device", Device),
        ("kernel", C.c_char_p),
    ]


def arguments(*names):
    class Arguments(C.Structure):
        _fields_ = [("struct_size", C.c_size_t)] + [(name, C.POINTER(Tensor)) for name in names]

    return Arguments


RunArguments = arguments("x", "x_scale", "x_multiplier", "weight", "weight_scale", "weight_zero_point", "bias", "y")
PackArguments = arguments("weight", "weight_scale", "weight_zero_point", "packed")


class QuantizeDescription(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("rows", C.c_int64),
        ("cols", C.c_int64),
        ("group", C.c_int64),
        ("x", C.c_int32),
        ("q", C.c_int32),
        ("granularity", C.c_int32),
        ("scale", C.c_int32),
        ("mapping", C.c_int32),
        ("rounding", C.c_int32),
        ("orientation", C.c_int32),
        ("multiplier", C.c_int32),
        ("mask", C.c_int32),
        ("q_min", C.c_int32),
        ("q_max", C.c_int32),
        ("threads", C.c_int32),
        ("device", Device),
        ("kernel", C.c_char_p),
        ("least_scale", C.c_double),
    ]


class QuantizeArguments(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        *((name, C.POINTER(Tensor)) for name in ("x", "multiplier", "given_scale", "given_zero_point")),
        *((name, C.POINTER(Tensor)) for name in ("q", "q_transposed", "scale", "zero_point")),
        ("seed", C.c_uint64),
    ]


class BackwardDescription(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("m", C.c_int64),
        ("n", C.c_int64),
        ("k", C.c_int64),
        ("static_scale", C.c_double),
        ("dy", C.c_int32),
        ("dw_dtype", C.c_int32),
        ("dx", C.c_int32),
        ("dw", C.c_int32),
        ("db", C.c_int32),
        ("activation", C.c_int32),
        ("x_transposed", C.c_int32),
        ("weight", C.c_int32),
        ("weight_layout", C.c_int32),
        ("rounding", C.c_int32),
        ("threads", C.c_int32),
        ("dw_accumulate", C.c_int32),
        ("device", Device),
        ("kernel", C.c_char_p),
        ("dw_layout", C.c_int32),
        ("reserved", C.c_int32),
    ]


class BackwardArguments(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        *((name, C.POINTER(Tensor)) for name in ("dy", "weight", "weight_scale", "x", "x_scale", "dx", "dw", "db")),
        ("seed", C.c_uint64),
    ]


class CalibratorDescription(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("features", C.c_int64),
        ("second_moments", C.c_int32),
        ("threads", C.c_int32),
    ]


class SmoothingArguments(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("alpha", C.c_double),
        *((n, C.POINTER(Tensor)) for n in ("input_channel_max", "weight_channel_max", "factors", "multiplier")),
    ]


SmoothBeforeArguments = arguments("factors", "weight", "bias")


class SmoothingSearchDescription(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("n", C.c_int64),
        ("k", C.c_int64),
        ("group", C.c_int64),
        ("first_alpha", C.c_double),
        ("last_alpha", C.c_double),
        ("x", C.c_int32),
        ("w", C.c_int32),
        ("activation", C.c_int32),
        ("weight", C.c_int32),
        ("steps", C.c_int32),
        ("threads", C.c_int32),
        ("calibration_rows", C.c_int64),
    ]


class SmoothingSearchArguments(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        *((name, C.POINTER(Tensor)) for name in ("weight", "input_channel_max", "x", "second_moments")),
        ("rows", C.c_int64),
        ("errors", C.POINTER(Tensor)),
        ("input_excess", C.POINTER(Tensor)),
    ]


class SmoothingSearchResult(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("alpha", C.c_double),
        ("error", C.c_double),
        ("unsmoothed_error", C.c_double),
        ("smooth", C.c_int32),
        ("reserved", C.c_int32),
    ]


class WeightQuantizerDescription(C.Structure):
    _fields_ = [
        ("struct_size", C.c_size_t),
        ("n", C.c_int64),
        ("k", C.c_int64),
        ("group", C.c_int64),
        ("damping", C.c_double),
        ("clip_least", C.c_double),
        ("w", C.c_int32),
        ("weight", C.c_int32),
        ("zero_point", C.c_int32),
        ("scale", C.c_int32),
        ("method", C.c_int32),
        ("order", C.c_int32),
        ("clip_steps", C.c_int32),
        ("threads", C.c_int32),
    ]


WeightQuantizerArguments = arguments("weight", "second_moments", "importance", "q", "scale", "zero_point")


class WeightErrorResult(C.Structure):
    _fields_ = [("struct_size", C.c_size_t), ("noise", C.c_double), ("signal", C.c_double)]


class Error(RuntimeError):
    """A call of the library's that failed, with its text."""


def find():
    """The path of liboctile.so: what OCTILE_LIBRARY says, or the one beside this file."""
    chosen = os.environ.get("OCTILE_LIBRARY")
    if chosen:
        return pathlib.Path(chosen)
    here = pathlib.Path(__file__).resolve().parent
    for path in (here / "liboctile.so", *sorted(here.glob("liboctile.so.*"))):
        if path.exists():
            return path
    raise ImportError(f"octile: there is no liboctile.so in {here}, and OCTILE_LIBRARY is not set")


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
            raise ImportError(f"octile: {path} cannot be loaded: {error}") from error
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
            raise ImportError(f"octile: {path} has ABI version {version}; this package speaks version {ABI_VERSION}")

    def ok(self, status):
        if status != 0:
            raise Error(self.error())

    def error(self):
        return self.c.octile_last_error().decode()

    def version(self):
        return self.c.octile_version().decode()

    def _description(self, kind, structure, fields):
        description = structure()
        initialize = getattr(self.c, f"octile_{kind}_description_init")
        self.ok(initialize(C.byref(description), C.c_size_t(C.sizeof(description))))
        for name, value in fields.items():
            setattr(description, name, value)
        return description

    def _plan(self, kind, structure, fields):
        description, handle = self._description(kind, structure, fields), C.c_void_p()
        create = getattr(self.c, f"octile_{kind}_plan_create")
        self.ok(create(C.byref(description), C.byref(handle)))
        return Plan(self, handle)

    def linear(self, **fields):
        return self._plan("linear", LinearDescription, fields)

    def quantize(self, **fields):
        return self._plan("quantize", QuantizeDescription, fields)

    def backward(self, **fields):
        return self._plan("linear_backward", BackwardDescription, fields)

    def calibrator(self, features, second_moments=False, threads=0):
        description = CalibratorDescription(C.sizeof(CalibratorDescription), features, second_moments, threads)
        handle = C.c_void_p()
        self.ok(self.c.octile_calibrator_create(C.byref(description), C.byref(handle)))
        return Calibrator(self, handle)

    # What follows takes tensors by name; None is an absent one.

    def pack(self, plan, **fields):
        arguments = self._arguments(PackArguments, fields)
        self.ok(self.c.octile_linear_pack(plan.handle, C.byref(arguments)))

    @staticmethod
    def _arguments(structure, fields):
        pointers = {name: C.pointer(value) if isinstance(value, Tensor) else value for name, value in fields.items()}
        return structure(struct_size=C.sizeof(structure), **pointers)

    def smoothing_factors(self, **fields):
        """Writes the factors, and returns the largest smoothed input."""
        largest = C.c_float()
        arguments = self._arguments(SmoothingArguments, {"alpha": 0.5, **fields})
        self.ok(self.c.octile_smoothing_factors(C.byref(arguments), C.byref(largest)))
        return largest.value

    def smooth_weight(self, weight, factors):
        self.ok(self.c.octile_smooth_weight(C.byref(weight), C.byref(factors)))

    def smooth_before(self, **fields):
        self.ok(self.c.octile_smooth_before(C.byref(self._arguments(SmoothBeforeArguments, fields))))

    def search_smoothing(self, description, **fields):
        """The fields of a description in a dictionary; a SmoothingSearchResult comes back."""
        description = self._description("smoothing_search", SmoothingSearchDescription, description)
        arguments = self._arguments(SmoothingSearchArguments, fields)
        result = SmoothingSearchResult(C.sizeof(SmoothingSearchResult))
        self.ok(self.c.octile_search_smoothing(C.byref(description), C.byref(arguments), C.byref(result)))
        return result

    def quantize_weight(self, description, **fields):
        description = self._description("weight_quantizer", WeightQuantizerDescription, description)
        arguments = self._arguments(WeightQuantizerArguments, fields)
        self.ok(self.c.octile_quantize_weight(C.byref(description), C.byref(arguments)))

    def weight_error(self, description, **fields):
        """noise and signal of a quantized weight."""
        description = self._description("weight_quantizer", WeightQuantizerDescription, description)
        arguments = self._arguments(WeightQuantizerArguments, fields)
        result = WeightErrorResult(C.sizeof(WeightErrorResult))
        self.ok(self.c.octile_weight_error(C.byref(description), C.byref(arguments), C.byref(result)))
        return result.noise, result.signal
