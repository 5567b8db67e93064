"""Casts on the way to a sum: one E4M3 cast and product, E4M3 by way of E5M6, and re-tiling for the weight gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from dsv3fp8.kernels.quantize.reference import quantize, retile
from dsv3fp8.observe.drift.errors import measure
from dsv3fp8.observe.drift.study import Row, Study
from dsv3fp8.precision.formats import E4M3, E5M6
from dsv3fp8.precision.tiles import BLOCK_128, COLUMN_128, ROW_128


def casts(study: Study) -> list[Row]:
    """Rows by cast, of BF16 N(0,1): `before` and `after` are relative errors against the BF16 values.

    changed: the share of values that the second step changed.
    """
    x = study.draw("normal", study.size.rows, study.size.columns, study.generator("casts")).bfloat16().float()
    direct = quantize(x, E4M3, ROW_128, "pow2")
    double = retile(quantize(x, E5M6, ROW_128, "pow2"), ROW_128, fmt=E4M3)
    rows = [_row("BF16 → E5M6 → E4M3, pow2 scales", x, direct.decode(), double.decode())]
    for kind in ("fp32", "pow2"):
        tiled = quantize(x, E4M3, ROW_128, kind)
        again = retile(tiled, COLUMN_128)
        rows.append(_row(f"1×128 → 128×1, {kind} scales", x, tiled.decode(), again.decode()))
    return [*rows, _product(study)]


def _row(name: str, x: Tensor, before: Tensor, after: Tensor) -> Row:
    changed = float((before != after).double().mean())
    errors = {"before": measure(before, x).rms, "after": measure(after, x).rms}
    return {"cast": name, "samples": x.numel(), "changed": changed, **errors}


def _product(study: Study) -> Row:
    """What quantization alone does to a product: summed in float64."""
    generator = study.generator("product")
    k = min(4096, study.size.columns)
    x, w = (study.draw("normal", study.size.side, k, generator) for _ in range(2))
    a, b = quantize(x, E4M3, ROW_128).decode().double(), quantize(w, E4M3, BLOCK_128).decode().double()
    error = measure(a @ b.mT, x.double() @ w.double().mT)
    one_cast = float(torch.linalg.vector_norm(a - x.double()) / torch.linalg.vector_norm(x.double()))
    return {
        "cast": "product of 1×128 and 128×128, fp32 scales", "samples": study.size.side**2, "changed": None,
        "before": one_cast, "after": error.rms,
    }  # fmt: skip
