"""What every peer gives to the run."""

import dataclasses
import typing


@dataclasses.dataclass
class Contender:
    """One column of a table. `prepare` may raise: then the reason is shown, and the contender skipped.

    What it returns are its settings, {text: call}, each of which does the same work; the fastest counts. A call returns
    the tensor with the result; those of the backward a dictionary of them.
    """

    name: str
    part: str  # the table: of report.PARTS, report.BACKWARD or report.SERVING
    # What is computed: "float", "sums", "product", "product, one scale", "layer", "layer, one scale"; of the backward
    # "float", "one scale", "int8", "int8 in blocks"; of serving "float", "sums", "int8", "read"
    task: str
    prepare: typing.Callable[[], dict]


@dataclasses.dataclass
class Quantizer:
    name: str
    bytes_per_element: int  # that it must move, of an f16 X
    prepare: typing.Callable[[], typing.Callable[[], object]]
    check: typing.Callable[[], str] = lambda: ""


class Peer:
    """A library. What it has nothing to show for stays an empty list."""

    versions = {}

    def contenders(self, operands):
        return []

    def backward(self, gradients):
        return []

    def quantizers(self, x):
        return []

    def serving(self, layer):
        return []
