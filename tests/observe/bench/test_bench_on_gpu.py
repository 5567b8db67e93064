"""Every kind at tiny sizes on a Hopper GPU: nothing fails, and what should be captured is."""

import json
from pathlib import Path

import pytest
import torch

from dsv3fp8 import cli
from dsv3fp8.kernels.backend import hopper_reason

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
