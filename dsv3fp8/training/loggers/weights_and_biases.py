"""Weights & Biases: the records of metrics.jsonl under an id that survives restarts.

Every point is logged under its optimizer step, both as W&B's own step and as the field ``step`` that all charts use as
x axis. A resumed run logs the steps after its checkpoint again: those that W&B already holds are left out, the others
are new to it, so that no point is lost and none is there twice. Offline runs leave one directory a session below
RUN_DIR/wandb, all under the run's id, which ``wandb sync`` puts together.
"""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv3fp8.errors import UserError
from dsv3fp8.training.config import LoggingConfig

if TYPE_CHECKING:
    import wandb

INIT_TIMEOUT = 30  # seconds to reach the server


class WeightsAndBiases:
    """A W&B run. Trouble with it after the start is reported in one line and ends it; training and local logs go on."""

    def __init__(
        self,
        logging: LoggingConfig,
        run_dir: Path,
        config: dict[str, Any],
        run_id: str,
        say: Callable[[str], None],
    ) -> None:
        """Open the run; ImportError if wandb is not installed, UserError if ``online`` finds no login or no server."""
        # The settings below come too late for what it says while it logs in.
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._say = say
        try:
            run = wandb.init(
                mode=logging.wandb,  # type: ignore[arg-type]
                project=logging.project,
                entity=logging.entity,
                group=logging.group,
                name=logging.name or run_dir.name,
                tags=logging.tags,
                id=run_id,
                resume="allow",
                dir=run_dir,
                config=config,
                settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_TIMEOUT),
            )
        except wandb.errors.Error as error:
            reason = str(error).splitlines()[0]
            raise UserError(
                f"logging.wandb={logging.wandb} cannot start ({reason}): log in with `wandb login`, or set "
                f"logging.wandb=offline and send the run later with `wandb sync {run_dir}/wandb/offline-run-*`"
            ) from error
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        self._run: wandb.Run | None = run
        # Of a resumed online run: the first step that the server does not hold yet.
        self._first_step = run.step

    def log(self, record: dict[str, Any]) -> None:
        """Send one record. NaN and inf go as they are, so that they show; unknown values are left out."""
        if record["step"] >= self._first_step:
            known = {name: value for name, value in record.items() if value is not None}
            self._guard(lambda run: run.log(known, step=record["step"]))

    def close(self) -> None:
        """Finish the run; online this waits for what is still on its way."""
        self._guard(lambda run: run.finish())

    def _guard(self, call: Callable[["wandb.Run"], None]) -> None:
        if self._run is None:
            return
        try:
            call(self._run)
        # Its background process can die of a signal meant for the whole job, and its errors share no base class.
        except Exception as error:
            self._run = None
            self._say(f"W&B stopped ({type(error).__name__}: {error}); metrics.jsonl goes on")


def new_run_id() -> str:
    """An id no other run has."""
    return secrets.token_hex(4)
