"""XNNPACK, through LiteRT (TensorFlow Lite): models of one fully connected layer, written with its schema."""

import importlib.metadata

import flatbuffers
import numpy as np
from ai_edge_litert import interpreter
from ai_edge_litert import schema_py_generated as schema
from worker import Contender, Ready

Q = schema.TensorType


def tensor(name, kind, shape, buffer, scale=None, blocks=0):
    """scale: of each row; with blocks, the index of the tensor that has one for each so many values of a row."""
    t = schema.TensorT()
    t.name, t.type, t.shape, t.buffer = name, kind, list(shape), buffer
    if scale is not None or blocks:
        t.quantization = schema.QuantizationParametersT()
    if scale is not None:
        t.quantization.scale, t.quantization.zeroPoint = scale, np.zeros(len(scale), np.int64)
    if blocks:
        t.quantization.detailsType = schema.QuantizationDetails.BlockwiseQuantization
        t.quantization.details = schema.BlockwiseQuantizationT()
        t.quantization.details.scales, t.quantization.details.blockSize = blocks
        t.quantization.details.zeroPoints = -1
    return t


def buffer(array=None):
    b = schema.BufferT()
    b.data = None if array is None else np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return b


def model(p, weight, constants):
    """y = x * weight^T + bias. constants: more tensors, with their arrays."""
    rest = [(weight, None), (tensor("bias", Q.FLOAT32, [p.n], 2), p.bias), *constants]
    operator = schema.OperatorT()
    operator.inputs, operator.outputs = [0, 1, 2], [3 + len(constants)]
    operator.builtinOptionsType = schema.BuiltinOptions.FullyConnectedOptions
    operator.builtinOptions = schema.FullyConnectedOptionsT()
    graph = schema.SubGraphT()
    graph.tensors = [tensor("x", Q.FLOAT32, [p.m, p.k], 0), *(t for t, _ in rest)]
    graph.tensors.append(tensor("y", Q.FLOAT32, [p.m, p.n], 0))
    graph.inputs, graph.outputs, graph.operators = [0], operator.outputs, [operator]
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.FULLY_CONNECTED
    code.version = 12
    whole = schema.ModelT()
    whole.version, whole.operatorCodes, whole.subgraphs = 3, [code], [graph]
    return whole, [buffer(), None, *(buffer(array) for _, array in rest[1:])]


def ready(p, whole, buffers, threads):
    whole.buffers = buffers
    builder = flatbuffers.Builder(1 << 20)
    builder.Finish(whole.Pack(builder), b"TFL3")
    run = interpreter.Interpreter(model_content=bytes(builder.Output()), num_threads=threads)
    run.allocate_tensors()
    run.set_tensor(run.get_input_details()[0]["index"], np.array(p.x))
    at = run.get_output_details()[0]["index"]
    call = run._interpreter.Invoke  # the Python method around it checks its state at each call
    call.__self__  # keeps the interpreter alive
    return Ready(lambda: call(), lambda: run.get_tensor(at))


def load(_, settings):
    threads = settings["threads"]

    def eight(p):
        whole, buffers = model(p, tensor("w", Q.INT8, [p.n, p.k], 1, np.array(p.w_scale)), [])
        buffers[1] = buffer(p.w)
        return ready(p, whole, buffers, threads)

    def four(p):
        """Scales in f16, and levels in pairs."""
        weight = tensor("w", Q.INT4, [p.n, p.k], 1, blocks=(3, p.group))
        scales = tensor("scales", Q.FLOAT16, p.w4_scale.shape, 3)
        whole, buffers = model(p, weight, [(scales, p.w4_scale.astype(np.float16))])
        levels = p.w4.astype(np.uint8) & 15
        buffers[1] = buffer(levels[:, ::2] | levels[:, 1::2] << 4)
        return ready(p, whole, buffers, threads)

    everything, limit = "scales, bias", 1 << 30
    contenders = [
        Contender("xnnpack 8-bit", "w8", eight, "f32", everything, quantizer="tensor", largest_weight=limit),
        Contender("xnnpack 4-bit", "w4", four, "f32", everything, largest_weight=limit),
    ]
    return contenders, {"LiteRT": importlib.metadata.version("ai-edge-litert")}
