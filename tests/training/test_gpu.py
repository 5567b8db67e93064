"""The same runs on a GPU, where there is one."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dsv3fp8.training.generate import main
from dsv3fp8.training.loop import train
from dsv3fp8.training.metrics import read_metrics

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("recipe", ["dsv3", "delayed", "bf16"])
def test_a_run_resumes_on_the_gpu_and_follows_the_uninterrupted_one(
    nano: Any, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    words = (f"recipe={recipe}", "training.device=cuda", "optimizer.lr=0.01", "optimizer.moments=bf16")
    whole, cut = nano(*words, run="whole"), nano(*words, run="cut")
    assert train(whole) == 0

    def dying(*arguments: Any) -> Any:
        if next(calls) == 7:
            raise ZeroDivisionError
        return real(*arguments)

    from dsv3fp8.training import loop

    calls, real = iter(range(100)), loop.train_step
    monkeypatch.setattr(loop, "train_step", dying)
    with pytest.raises(ZeroDivisionError):
        train(cut)
    monkeypatch.setattr(loop, "train_step", real)
    assert train(cut) == 0
    records, expected = (read_metrics(Path(config.run_dir) / "metrics.jsonl") for config in (cut, whole))
    assert [record["step"] for record in records] == list(range(1, 11))
    for record, other in zip(records, expected, strict=True):
        assert record["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert record["lr"] == other["lr"]
    assert records[-1]["cuda_allocated_peak_gb"] > 0
    assert records[-1]["cuda_reserved_peak_gb"] >= records[-1]["cuda_allocated_peak_gb"]


def test_a_checkpoint_of_the_gpu_resumes_and_samples_on_the_cpu(nano: Any, capsys: pytest.CaptureFixture) -> None:
    config = nano("recipe=bf16", "training.device=cuda", "training.steps=5")
    assert train(config) == 0
    assert train(nano("recipe=bf16", "training.device=cpu", "training.steps=8", "resume=fork")) == 0
    capsys.readouterr()
    for device in ("cpu", "cuda"):
        assert main([f"run={config.run_dir}", "tokens=3", f"device={device}"]) == 0
    assert torch.cuda.is_available()
