"""What the ledger sees on a GPU is what it sees on a CPU: the same tensors in the same types, tiles and bytes."""

import dataclasses
from typing import Any

import pytest
import torch
from support import RECIPES, recipe

from dsv3fp8.config import load_config
from dsv3fp8.observe.kept_bytes import block_config, observed_bytes
from dsv3fp8.observe.map.run import observe_block
from dsv3fp8.precision.ledger import Ledger

pytestmark = pytest.mark.gpu


def seen(ledger: Ledger) -> list[dict[str, Any]]:
    """The records without what may differ from machine to machine: which kernel it was."""
    return [{**dataclasses.asdict(record), "backend": None} for record in ledger.records]


@pytest.mark.parametrize("layer", ["dense", "moe"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_gpu_reports_the_ledger_of_a_cpu(name: str, layer: str) -> None:
    config = load_config(["model=tiny"]).model
    cpu, gpu = (observe_block(config, recipe(name), layer == "dense", 256, 0, torch.device(d)) for d in ("cpu", "cuda"))
    assert (gpu.unreported, gpu.unsaved) == ([], [])
    for ours, theirs in zip(seen(gpu), seen(cpu), strict=True):
        assert ours == theirs
    assert gpu.kept_bytes() == cpu.kept_bytes()


@pytest.mark.parametrize("words", [("bf16", "swiglu_output=keep"), ("dsv3",), ("dsv3", "recompute=norms_and_up")])
def test_a_gpu_keeps_what_a_cpu_keeps_and_its_allocator_no_more(words: tuple[str, ...]) -> None:
    given = recipe(*words)
    for model in ("tiny", "v2_lite_16b"):
        config = block_config(model)
        cpu, gpu = (observed_bytes(config, given, 128, torch.device(d)) for d in ("cpu", "cuda"))
        assert gpu.total == cpu.total
        assert gpu.allocated == pytest.approx(gpu.total, rel=0.005)


def test_a_v3_layer_runs_forward_and_backward_and_keeps_what_the_contract_says() -> None:
    config = block_config("v3_671b")
    ledger = observe_block(config, recipe("dsv3"), False, 4096, 0, torch.device("cuda"))
    gradients = [t for r in ledger.records for t in r.outputs if t.name.startswith("dw_")]
    assert {t.name for t in gradients} >= {"dw_expert_gate_up", "dw_expert_down", "dw_out", "dw_q_b", "dw_kv_b"}
    assert all(t.format == "fp32" for t in gradients)
    kept = observed_bytes(config, recipe("dsv3"), 128, torch.device("cuda"))
    assert kept.tensors == 303488
