"""The study's experiments, by name and in order. Each takes a Study and gives rows of plain values."""

from collections.abc import Callable

from dsv3fp8.observe.drift.experiments.casts import casts
from dsv3fp8.observe.drift.experiments.cause import cause
from dsv3fp8.observe.drift.experiments.gradient_scales import gradient_scales
from dsv3fp8.observe.drift.experiments.length import against_interval, against_length, extremes
from dsv3fp8.observe.drift.experiments.mechanisms import mechanisms
from dsv3fp8.observe.drift.experiments.operands import operands
from dsv3fp8.observe.drift.experiments.outliers import outliers
from dsv3fp8.observe.drift.study import Row, Study

EXPERIMENTS: dict[str, Callable[[Study], list[Row]]] = {
    "length": against_length,
    "interval": against_interval,
    "extremes": extremes,
    "cause": cause,
    "operands": operands,
    "mechanisms": mechanisms,
    "outliers": outliers,
    "casts": casts,
    "gradient_scales": gradient_scales,
}
