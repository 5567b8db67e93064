"""The two mechanisms apart: {tile, tensor} scales x {promoted every 128, never}, error of the whole product.

All scales are powers of two, in all four cells. The chip has no place to apply tile scales within a chain, so it cannot
compute tile scales that are never promoted; there the products carry their scales into the chain (see chain.py).
"""

from __future__ import annotations

from torch import Tensor

from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.observe.drift.chain import chain
from dsv3fp8.observe.drift.errors import measure
from dsv3fp8.observe.drift.experiments.length import MIDDLE
from dsv3fp8.observe.drift.study import Row, Study
from dsv3fp8.observe.drift.sums import ONE_SCALE, Promotion, emulated_block_scaled, on_chip_too
from dsv3fp8.precision.formats import E4M3
from dsv3fp8.precision.tiles import BLOCK_128, ROW_128, QuantizedTensor

OUTLIER = 1e5
TILES = {"tile": (ROW_128, BLOCK_128), "tensor": (ONE_SCALE, ONE_SCALE)}
PROMOTIONS: tuple[Promotion, ...] = (128, "never")
DATA = ("normal", "outliers", "uniform")


def mechanisms(study: Study) -> list[Row]:
    """Rows by data, scales and promotion: `total` against the product before quantization, `sum` against decoded operands.

    Both are of emulated sums. gpu: of a cell that a Hopper GPU can compute, on one: what it computes beside the emulation.
    """
    k = min(MIDDLE, study.size.longest)
    rows = []
    for data in DATA:
        x, w = operands(study, data, k)
        before = x.double() @ w.double().mT
        for scales, (left, right) in TILES.items():
            a, b = quantize(x, E4M3, left, "pow2"), quantize(w, E4M3, right, "pow2")
            decoded = a.decode().double() @ b.decode().double().mT
            for promote in PROMOTIONS:
                got = product(a, b, promote)
                rows.append(
                    {
                        "data": data, "k": k, "scales": scales, "promote": promote, "samples": got.numel(),
                        "reachable": reachable(scales, promote), "outlier": OUTLIER if data == "outliers" else None,
                        "gpu": on_chip_too(a, b, promote, got) if reachable(scales, promote) else None,
                        "total": measure(got, before).to_dict(), "sum": measure(got, decoded).to_dict(),
                    }
                )  # fmt: skip
    return rows


def reachable(scales: str, promote: Promotion) -> bool:
    """Whether a Hopper GPU can compute it."""
    return scales == "tensor" or promote != "never"


def product(a: QuantizedTensor, b: QuantizedTensor, promote: Promotion) -> Tensor:
    """a @ b^T as the chip sums it, or as chain.py defines it where the chip cannot."""
    constant_along_k = a.constant_along_k and b.constant_along_k
    return emulated_block_scaled(a, b, promote) if constant_along_k or promote != "never" else chain(a, b)


def operands(study: Study, data: str, k: int, outlier: float = OUTLIER) -> tuple[Tensor, Tensor]:
    """Activations x [32, K] and weights w [128, K], fp32.

    outliers: normal, but one channel of x is `outlier` times larger, and w reads it with weights as much smaller, so that
    it adds no more to the output than others. Otherwise its own rounding would be all that the output's error shows.
    """
    generator = study.generator(f"mechanisms {data}")
    kind = "uniform" if data == "uniform" else "normal"
    x, w = study.draw(kind, 32, k, generator), study.draw(kind, 128, k, generator)
    if data == "outliers":
        x[:, k // 2] *= outlier
        w[:, k // 2] /= outlier
    return x, w
