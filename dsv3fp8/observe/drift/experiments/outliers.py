"""Tile against tensor scales as one channel grows: what is flushed to zero, and the error of what is no outlier."""

from __future__ import annotations

import torch

from dsv3fp8.kernels.quantize.reference import quantize, zero_codes
from dsv3fp8.observe.drift.errors import measure
from dsv3fp8.observe.drift.experiments.length import MIDDLE
from dsv3fp8.observe.drift.experiments.mechanisms import TILES, operands
from dsv3fp8.observe.drift.study import Row, Study
from dsv3fp8.observe.drift.sums import emulated_block_scaled
from dsv3fp8.precision.formats import E4M3

FACTORS = (1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6)


def outliers(study: Study) -> list[Row]:
    """Rows by scales and outlier size, fp32 scales, promoted every 128.

    flushed: share of the regular activations that become zero. values: their relative error. output: the product's.
    """
    k = min(MIDDLE, study.size.longest)
    regular = torch.arange(k, device=study.device) != k // 2
    rows = []
    for factor in FACTORS:
        x, w = operands(study, "outliers", k, factor)
        want = x.double() @ w.double().mT
        for scales, (left, right) in TILES.items():
            a, b = quantize(x, E4M3, left), quantize(w, E4M3, right)
            flushed = zero_codes(a.codes, E4M3, k)[:, regular] & (x[:, regular] != 0)
            rows.append(
                {
                    "factor": factor, "scales": scales, "k": k, "samples": flushed.numel(),
                    "flushed": float(flushed.double().mean()),
                    "values": measure(a.decode()[:, regular], x[:, regular]).rms,
                    "output": measure(emulated_block_scaled(a, b, 128), want).rms,
                }
            )  # fmt: skip
    return rows
