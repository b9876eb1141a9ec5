"""What every peer hands to the run."""

import dataclasses
import typing


@dataclasses.dataclass
class Contender:
    """One column of a table. `prepare` may raise: then the reason is shown, and the contender skipped.

    What it returns are its settings, {text: call}, each of which does the same work; the fastest counts. A call returns
    the tensor with the result; those of the backward a dictionary of them.
    """

    name: str
    part: str  # the table: of report.PARTS or report.BACKWARD
    # What is computed: "float", "sums", "product", "product, one scale", "layer", "layer, one scale"; of the backward
    # "float", "one scale", "int8", "int8 in blocks"
    task: str
    prepare: typing.Callable[[], dict]


@dataclasses.dataclass
class Quantizer:
    name: str
    bytes_per_element: int  # that it must move, of an f16 X
    prepare: typing.Callable[[], typing.Callable[[], object]]
    check: typing.Callable[[], str] = lambda: ""
