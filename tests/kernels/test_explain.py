"""What a run's manifest says of its backends, held against the choices that its steps make."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")

from dsv3fp8.config import load_config
from dsv3fp8.data.batches import Batch
from dsv3fp8.kernels import backend
from dsv3fp8.kernels.explain import explain
from dsv3fp8.model.manifest import linear_shapes
from dsv3fp8.training.setup import build
from dsv3fp8.training.step import train_step

RECIPES = ["dsv3", "hybrid", "tensorwise", "delayed", "static", "rowwise", "blockwise_grad"]
WORDS = ["model=nano", "model.vocab_size=512", "data=synthetic", "data.vocab_size=512"]
CPU = torch.device("cpu")


@pytest.mark.parametrize("gate", ["before", "after"])
@pytest.mark.parametrize("name", RECIPES)
def test_experts_take_on_hopper_what_the_manifest_says(name: str, gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step on a CPU, whose operands are shown to the choice as a Hopper GPU would make it."""
    config = load_config([*WORDS, f"recipe={name}", f"recipe.gate={gate}"])
    seen: dict[str, set[str]] = {}
    choose, reason = backend.choose_grouped, backend.hopper_reason

    def spied(a: Any, b: Any, spec: Any, gemm: str, out_dtype: torch.dtype) -> Any:
        backend.hopper_reason = lambda _: None
        try:
            seen.setdefault(f"{spec.op}.{gemm}", set()).add(choose(a, b, spec, gemm, out_dtype).backend)
        finally:
            backend.hopper_reason = reason
        return choose(a, b, spec, gemm, out_dtype)

    monkeypatch.setattr(backend, "choose_grouped", spied)
    model, optimizer = build(config, CPU)
    train_step(model, optimizer, [Batch(torch.randint(0, 512, (2, 65)), None)], 1e-3, 1.0)
    monkeypatch.setattr(backend, "choose_grouped", choose)
    monkeypatch.setattr(backend, "hopper_reason", lambda _: None)
    told = {op: {choice.backend} for op, choice in explain(config.recipe, CPU, linear_shapes(config.model))}
    assert len(seen) == 6
    assert seen == {op: told[op] for op in seen}
