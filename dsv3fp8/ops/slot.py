"""Where an op's backward leaves a gradient as codes, for the linear whose output the op read, in place of a BF16 dY."""

from __future__ import annotations

from dsv3fp8.ops.quantizers import Cast, LinearQuantizers
from dsv3fp8.precision.tiles import QuantizedTensor

Codes = tuple[QuantizedTensor, QuantizedTensor]


class GradientSlot:
    """Shared by one call of a linear and the op that alone reads its output.

    cast: dY's, in both orientations; None where only the linear itself can do it.
    An op that fills the slot gives autograd an edge without values (`edge_of`), which carries the order of the nodes alone.
    """

    def __init__(self, quantizers: LinearQuantizers) -> None:
        self.cast: Cast | None = quantizers.rides("gradient")
        self._codes: Codes | None = None

    def fill(self, along_n: QuantizedTensor, along_tokens: QuantizedTensor) -> None:
        self._codes = along_n, along_tokens

    def take(self) -> Codes | None:
        """dY in 1x128 and in 128x1 tiles, None where nobody left it; the slot is empty again."""
        codes, self._codes = self._codes, None
        return codes
