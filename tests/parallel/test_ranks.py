"""What a rank asks of its environment before it meets others."""

import pytest
import torch

from dsv3fp8.errors import UserError
from dsv3fp8.parallel.ranks import join, speaks

WHOLE = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("RANK", None, "RANK is missing"),
        ("LOCAL_RANK", None, "LOCAL_RANK is missing"),
        ("MASTER_ADDR", None, "MASTER_ADDR is missing"),
        ("MASTER_PORT", None, "MASTER_PORT is missing"),
        ("MASTER_PORT", "auto", "MASTER_PORT=auto is no number"),
        ("RANK", "one", "RANK=one is no number"),
    ],
)
def test_an_environment_that_no_launcher_made_is_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str | None, what: str
) -> None:
    for key, given in {**WHOLE, name: value}.items():
        if given is None:
            monkeypatch.delenv(key, raising=False)
        else:
            monkeypatch.setenv(key, given)
    with pytest.raises(UserError) as error, join(torch.device("cpu")):
        pass
    assert str(error.value) == f"WORLD_SIZE=2 is set, but {what}: start it with torchrun, or unset WORLD_SIZE"
    assert speaks()
