"""What every peer hands to the run."""

import dataclasses
import typing


@dataclasses.dataclass
class Contender:
    """One column of a table. `prepare` may raise: then the reason is shown, and the contender skipped.

    What it returns are its settings, {text: call}, each of which does the same work; the fastest counts. A call returns
    the tensor with the result.
    """

    name: str
    part: str  # the table: "product" takes X in 8 bits, "layer" an f16 X
    task: str  # what is computed: "float", "sums", "product", "product, one scale", "layer", "layer, one scale"
    prepare: typing.Callable[[], dict]


@dataclasses.dataclass
class Quantizer:
    name: str
    bytes_per_element: int  # that it must move, of an f16 X
    prepare: typing.Callable[[], typing.Callable[[], object]]
    check: typing.Callable[[], str] = lambda: ""
