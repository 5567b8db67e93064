"""Every kind at tiny sizes on a Hopper GPU: nothing fails, and what should be captured is."""

import json
from pathlib import Path

import pytest
import torch

from dsv3fp8 import cli
from dsv3fp8.kernels.backend import hopper_reason
from dsv3fp8.observe.bench.breakdown import recorded_events

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["kernels", "linear", "layer", "step"])
def test_no_row_fails(kind: str, tmp_path: Path) -> None:
    if hopper_reason(torch.device("cuda", 0)) is not None:
        assert cli.main(["bench", kind, f"out={tmp_path}"]) == 1
        return
    assert cli.main(["bench", kind, "sizes=tiny", "rounds=1", f"out={tmp_path}"]) == 0
    data = json.loads((tmp_path / f"{kind}.json").read_text(encoding="utf-8"))
    for table in data["tables"]:
        for case in table["cases"]:
            assert case["failed"] == "", (table["name"], case["case"])
            for name, way in case["ways"].items():
                where = (table["name"], case["case"], name)
                assert way["failed"] == "", where
                if kind in ("kernels", "linear") and "host" not in table["name"]:
                    assert way["host_included"] == "", where
    for found in data["breakdowns"].values():
        assert found["launches"] > 0
        assert found["kernels"]
        assert found["peak_gb"] > 0


def test_a_profiler_of_another_thread_sees_what_a_graph_replays() -> None:
    device = torch.device("cuda", 0)
    x = torch.ones(1024, device=device)
    x.cos()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = x.cos().sin()
    noticed = []

    def replay() -> None:
        noticed.append(torch._C._autograd._profiler_enabled())
        graph.replay()

    names = [[event.name for event in recorded_events(replay, device, unnoticed=unnoticed)] for unnoticed in (False, True)]
    assert noticed == [True, False]
    assert names[0] == names[1]
    assert len(names[1]) >= 2
    del kept


def test_a_layout_is_measured_launched_and_replayed(tmp_path: Path) -> None:
    """On two GPUs where there are two; the exchange of NCCL ranks is recorded, and each kernel of NCCL has a call."""
    gpus = min(2, torch.cuda.device_count())
    words = ["sizes=tiny", "rounds=1", f"gpus={gpus}", "recipes=dsv3", "only=data,expert,exchange", f"out={tmp_path}"]
    against = hopper_reason(torch.device("cuda", 0))
    assert cli.main(["bench", "scale", *words]) == (against is not None)
    if against is not None:
        return
    data = json.loads((tmp_path / "scale.json").read_text(encoding="utf-8"))
    assert [row["name"] for row in data["rows"]][:gpus] == ["1 GPU", "2 GPUs, data parallel"][:gpus]
    for row in data["rows"]:
        assert row["failed"] == "", row["name"]
        assert row["modes"]["launched"]["peak"] > 0
        assert row["wire"]["launched"]["span_ms"] > 0
        if not row["name"].endswith("expert ranks"):
            assert row["modes"]["graph"]["failed"] == ""
            assert row["wire"]["graph"]["span_ms"] > 0
        if row["gpus"] > 1:
            assert {what: row["traffic"][what]["payload"] for what in row["plan"]["payload"]} == row["plan"]["payload"]
            assert row["wire"]["launched"]["wire_ms"] > 0
            assert row["by_what"].keys() >= row["plan"]["payload"].keys()
    assert all(way["captured"] for entry in data["exchange"] for way in entry["ways"].values())
