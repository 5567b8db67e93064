"""W&B's offline files, read back as `wandb sync` would send them."""

import importlib
import json
import struct
import time
from pathlib import Path
from typing import Any


def sessions(run_dir: Path, count: int = 1) -> list[list[Any]]:
    """Records of each session's .wandb file, oldest first; W&B's process may still be writing when finish() returns."""
    deadline = time.monotonic() + 20
    while True:
        found = [read_session(path) for path in sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))]
        if len(found) == count and all(session and session[-1].HasField("exit") for session in found):
            return found
        assert time.monotonic() < deadline, "W&B has not finished its files"
        time.sleep(0.05)


def read_session(path: Path) -> list[Any]:
    """The records of a .wandb file: LevelDB's log format around protocol buffers."""
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, parts, session = path.read_bytes(), 7, [], []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if at + 7 + size > len(data):
            break  # still being written
        parts.append(data[at + 7 : at + 7 + size])
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            session.append(records.Record.FromString(b"".join(parts)))
            parts = []
    return session


def history(session: list[Any]) -> list[dict[str, Any]]:
    rows = []
    for record in session:
        if record.HasField("history"):
            items = record.history.item
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
            rows.append({**row, "_step": record.history.step.num})
    return rows
