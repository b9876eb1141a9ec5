"""ONNX Runtime: one-node models, weights as initializers, operands bound once."""

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from worker import Contender, Ready

TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int8): TensorProto.INT8,
    np.dtype(np.uint8): TensorProto.UINT8,
}
MICROSOFT = "com.microsoft"


class Runtime:
    def __init__(self, threads):
        # One pool for all sessions: the threads of an idle one would wait in a loop for some time after its turn.
        onnxruntime.set_global_thread_pool_sizes(threads, 1)
        self.options = onnxruntime.SessionOptions()
        self.options.use_per_session_threads = False
        self.options.log_severity_level = 3

    def prepare(self, operator, x, constants, y_type, **more):
        """The node operator(x, *constants). None is an input that is absent."""
        domain, attributes = more.get("domain", ""), more.get("attributes", {})
        names = ["x"] + [f"c{i}" if c is not None else "" for i, c in enumerate(constants)]
        node = helper.make_node(operator, names, ["y"], domain=domain, **attributes)
        n = more["n"]
        graph = helper.make_graph(
            [node],
            "peer",
            [helper.make_tensor_value_info("x", TYPES[x.dtype], x.shape)],
            [helper.make_tensor_value_info("y", TYPES[np.dtype(y_type)], (x.shape[0], n))],
            [numpy_helper.from_array(np.asarray(c), f"c{i}") for i, c in enumerate(constants) if c is not None],
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), self.options, providers=["CPUExecutionProvider"]
        )
        x_value = onnxruntime.OrtValue.ortvalue_from_numpy(x)
        y_value = onnxruntime.OrtValue.ortvalue_from_shape_and_type((x.shape[0], n), y_type)
        binding = session.io_binding()
        binding.bind_ortvalue_input("x", x_value)
        binding.bind_ortvalue_output("y", y_value)

        # The Python method of that name checks its argument at each call and then does this.
        run, bound = session._sess.run_with_iobinding, binding._iobinding

        def call():
            run(bound, None)

        call.keep = (session, binding, x, x_value)
        return Ready(call, y_value.numpy)


def unsigned(array):
    return (array.astype(np.int16) + 128).astype(np.uint8)


def transposed(array):
    return np.ascontiguousarray(array.T)


def load(_, settings):
    runtime = Runtime(settings["threads"])
    zero_u8, zero_s8 = np.array(128, np.uint8), np.array(0, np.int8)

    def f32(p):
        return runtime.prepare("MatMul", np.array(p.x), [transposed(p.float_weight())], np.float32, n=p.n)

    def integer(x_unsigned, w_unsigned):
        def prepare(p):
            x = p.xu() if x_unsigned else np.array(p.xq)
            w = transposed(unsigned(p.w) if w_unsigned else p.w)
            zeros = [zero_u8 if x_unsigned else None, zero_u8 if w_unsigned else None]
            return runtime.prepare("MatMulInteger", x, [w, *zeros], np.int32, n=p.n)

        return prepare

    def dynamic(w_unsigned):
        def prepare(p):
            w = transposed(unsigned(p.w) if w_unsigned else p.w)
            constants = [w, p.w_scale, zero_u8 if w_unsigned else zero_s8, p.bias]
            # A zero point of each channel, as the operator asks beside a scale of each.
            constants[2] = np.full(p.n, constants[2])
            return runtime.prepare(
                "DynamicQuantizeMatMul", np.array(p.x), constants, np.float32, n=p.n, domain=MICROSOFT
            )

        return prepare

    def to_float(w_unsigned):
        def prepare(p):
            w = transposed(unsigned(p.w) if w_unsigned else p.w)
            one, bias = np.float32(1), np.zeros(p.n, np.float32)
            constants = [w, one, np.ones(p.n, np.float32), zero_u8, np.full(p.n, zero_u8 if w_unsigned else zero_s8)]
            return runtime.prepare(
                "MatMulIntegerToFloat", p.xu(), [*constants, bias], np.float32, n=p.n, domain=MICROSOFT
            )

        return prepare

    def blocks(bits, accuracy_level):
        """Weights in blocks along K, each with its scale; level 4 quantizes X in blocks too, level 1 leaves it f32."""

        def prepare(p):
            count = p.k // p.group
            if bits == 4:
                nibbles = (p.w4 + 8).astype(np.uint8)
                w, scale = nibbles[:, ::2] | nibbles[:, 1::2] << 4, np.array(p.w4_scale)
            else:
                w, scale = unsigned(p.w), np.repeat(p.w_scale[:, None], count, axis=1)
            w = np.ascontiguousarray(w).reshape(p.n, count, p.group * bits // 8)
            attributes = {"K": p.k, "N": p.n, "bits": bits, "block_size": p.group, "accuracy_level": accuracy_level}
            constants = [w, np.ascontiguousarray(scale), None, None, p.bias]
            return runtime.prepare(
                "MatMulNBits", np.array(p.x), constants, np.float32, n=p.n, domain=MICROSOFT, attributes=attributes
            )

        return prepare

    everything, limit = "scales, bias", (1 << 29) // 4
    contenders = [
        Contender("ort f32", "float", f32, "f32", "nothing", largest_weight=limit),
        Contender("ort u8u8", "w8", integer(True, True), "s8", "nothing"),
        Contender("ort u8s8", "w8", integer(True, False), "s8", "nothing"),
        Contender("ort s8s8", "w8", integer(False, False), "s8", "nothing"),
        Contender("ort to_float u8u8", "w8", to_float(True), "s8", "scales"),
        Contender("ort to_float u8s8", "w8", to_float(False), "s8", "scales"),
        Contender("ort dynamic u8u8", "w8", dynamic(True), "f32", everything, quantizer="tensor"),
        Contender("ort dynamic u8s8", "w8", dynamic(False), "f32", everything, quantizer="tensor"),
        Contender("ort 8-bit blocks", "w8", blocks(8, 4), "f32", everything, quantizer="row"),
        Contender("ort 4-bit level 4", "w4", blocks(4, 4), "f32", everything),
        Contender("ort 4-bit level 1", "w4", blocks(4, 1), "f32", everything),
    ]
    versions = {"onnxruntime": onnxruntime.__version__, "onnx": onnx.__version__}
    return contenders, versions
