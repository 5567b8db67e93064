"""Scales of a gradient whose tokens differ in size: 1x128, 128x128 and one. The error of a token, and the global one."""

from __future__ import annotations

from statistics import mean, pstdev

import torch

from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.observe.drift.errors import measure, per_row
from dsv3fp8.observe.drift.study import Row, Study
from dsv3fp8.observe.drift.sums import ONE_SCALE
from dsv3fp8.precision.formats import E4M3
from dsv3fp8.precision.tiles import BLOCK_128, ROW_128

SIGMA = 3.0  # of the natural logarithm of a token's size
TOKENS, WIDTH = 4096, 128
DRAWS = 32  # a few large tokens decide the error of a draw: one draw says little
TILES = {"1×128": ROW_128, "128×128": BLOCK_128, "one scale": ONE_SCALE}


def gradient_scales(study: Study) -> list[Row]:
    """Rows by tile, means over draws. token: mean over tokens of ‖e‖ / ‖g‖; scatter: its standard deviation over draws;
    lost: the share of tokens above one half; overall: all tokens at once.
    """
    generator = study.generator("gradient scales")
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in TILES}
    for _ in range(DRAWS):
        sizes = torch.empty(TOKENS, 1).normal_(0, SIGMA, generator=generator).exp().to(study.device)
        g = study.draw("normal", TOKENS, WIDTH, generator) * sizes
        for name, tile in TILES.items():
            decoded = quantize(g, E4M3, tile).decode()
            errors = per_row(decoded, g)
            found[name].append((float(errors.mean()), float((errors > 0.5).double().mean()), measure(decoded, g).rms))
    rows = []
    for name, draws in found.items():
        token, lost, overall = zip(*draws, strict=True)
        rows.append(
            {
                "scales": name, "tokens": TOKENS, "draws": DRAWS, "token": mean(token), "scatter": pstdev(token),
                "lost": mean(lost), "overall": mean(overall),
            }
        )  # fmt: skip
    return rows
