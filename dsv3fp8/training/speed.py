"""Tokens and model FLOP a second, what share of the chip's peak that is, and memory.

Model FLOP are those of the equations (forward and backward of the active parameters and of attention); recomputation
and quantization count as time, not as work.
"""

import resource
import time
from pathlib import Path
from typing import Any

import torch

# Dense peaks of the data sheets in TFLOP/s, (BF16, FP8); the first name found in the device's name counts. Chips that
# are not listed, and CPUs, have no share rather than an invented one.
PEAKS: tuple[tuple[str, float, float | None], ...] = (
    ("B200", 2250, 4500),
    ("GH200", 989, 1979),
    ("H200", 989, 1979),
    ("H100 PCIe", 756, 1513),
    ("H100 NVL", 835, 1671),
    ("H100", 989, 1979),
    ("H800", 989, 1979),
    ("H20", 148, 296),
    ("L40S", 362, 733),
    ("A100", 312, None),
)


def peak_tflops(device_name: str) -> tuple[float | None, float | None]:
    """(BF16, FP8) peak of a device in TFLOP/s; None where unknown or where the chip has no such format."""
    words = device_name.split()
    for name, bf16, fp8 in PEAKS:
        # Whole words: "H200" must not be found by "H20".
        if all(any(part == word or part.startswith(f"{word}-") for part in words) for word in name.split()):
            return bf16, fp8
    return None, None


class Speedometer:
    """Measures the steps between two readings, without the time that validation and checkpoints take."""

    def __init__(self, flops_per_token: float, device_name: str) -> None:
        self._flops_per_token = flops_per_token
        self._bf16, self._fp8 = peak_tflops(device_name)
        self._since = time.perf_counter()
        self._paused: float | None = None
        self._tokens = 0

    def add(self, tokens: int) -> None:
        """Count the tokens of a finished step."""
        self._tokens += tokens

    def pause(self) -> None:
        """Stop the clock, for what is no training."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """Let the clock go on."""
        assert self._paused is not None
        self._since += time.perf_counter() - self._paused
        self._paused = None

    def read(self) -> dict[str, float | None]:
        """Rates since the last reading."""
        now = time.perf_counter()
        rate = self._tokens / max(now - self._since, 1e-9)
        self._since, self._tokens = now, 0
        tflops = rate * self._flops_per_token / 1e12
        return {
            "tokens_per_second": rate,
            "model_tflops": tflops,
            "bf16_peak_share": tflops / self._bf16 if self._bf16 else None,
            "fp8_peak_share": tflops / self._fp8 if self._fp8 else None,
        }


def memory(device: torch.device) -> dict[str, Any]:
    """Peaks of this process so far in GB (1e9 bytes): host memory, and CUDA memory allocated and reserved."""
    cuda = device.type == "cuda"
    return {
        "rss_peak_gb": peak_rss() / 1e9,
        "cuda_allocated_peak_gb": torch.cuda.max_memory_allocated(device) / 1e9 if cuda else None,
        "cuda_reserved_peak_gb": torch.cuda.max_memory_reserved(device) / 1e9 if cuda else None,
    }


def peak_rss() -> int:
    """Most bytes of host memory this process had resident."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # macOS counts bytes here, where Linux counts kilobytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
