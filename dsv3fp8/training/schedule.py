"""The learning rate as a pure function of the step, so that a resumed run cannot be one step off.

Shape of DeepSeek-V3's (report §4.2): linear warm-up, constant, cosine down to a share of the peak.
"""

import math

from dsv3fp8.training.config import ScheduleConfig


def learning_rate(step: int, schedule: ScheduleConfig, peak: float, total: int) -> float:
    """Learning rate of optimizer step `step`, counted from 1, of a run of `total` steps.

    The first step has peak / warmup (the peak where warmup is 0 or 1), step `warmup` has the peak, step `total` and
    every step beyond it has final * peak. A warm-up that is not over by then is cut off. ``constant`` never leaves
    the peak.
    """
    if schedule.name != "constant" and step > total:
        return schedule.final * peak
    if step < schedule.warmup:
        return peak * step / schedule.warmup
    if schedule.name == "constant":
        return peak
    start = schedule.warmup + round(schedule.constant * total)
    if step <= start:
        return peak
    progress = (step - start) / (total - start)
    return peak * (schedule.final + (1 - schedule.final) * 0.5 * (1 + math.cos(math.pi * progress)))
