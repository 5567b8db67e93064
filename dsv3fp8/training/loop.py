"""The training loop: step after step until the run is done, with everything else that has to happen in between.

The order within a step is what makes a run repeatable: its line in metrics.jsonl is written before its checkpoint, so
that a run killed between the two drops the line and makes it again.
"""

import contextlib
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dsv3fp8.config import RunConfig
from dsv3fp8.errors import UserError
from dsv3fp8.kernels.backend import Choice
from dsv3fp8.parallel.ranks import join
from dsv3fp8.precision.cast_meter import CastCounts, CastMeter, measure_casts
from dsv3fp8.training.checks import select_device, validate_run
from dsv3fp8.training.graph import StepGraph
from dsv3fp8.training.metrics import expert_balance
from dsv3fp8.training.profiler import StepProfiler
from dsv3fp8.training.records import Records
from dsv3fp8.training.reporting import record_manifest, record_start, summary
from dsv3fp8.training.run_directory import RunDirectory, device_name
from dsv3fp8.training.schedule import learning_rate
from dsv3fp8.training.setup import Run, finished_line, prepare, validation
from dsv3fp8.training.signals import StopRequest
from dsv3fp8.training.speed import Speedometer, memory
from dsv3fp8.training.state import begin_checkpoint
from dsv3fp8.training.step import StepResult, train_step, validate

# What casts lose is counted on every so many logged steps: counting makes a step of the CPU reference 23 % longer (tiny).
# Not on a GPU, where a counted step casts in torch, and is no replayed one: ten times as long on an H200.
COUNT_EVERY = 10


def train(config: RunConfig) -> int:
    """Train, or go on with the run in run_dir. The exit status: 0 done, 143 or 130 stopped by SIGTERM or SIGINT.

    Raises UserError, one line, for whatever the user can put right.
    """
    config.validate()
    validate_run(config)
    device = select_device(config.training.device)
    with join(device, config.parallel.expert, config.parallel.dp_shard) as ranks, ExitStack() as stack:
        directory = RunDirectory(Path(config.run_dir))
        if ranks.first:
            stack.enter_context(directory)
        run = prepare(config, directory, device, ranks)
        if run is None:
            if ranks.first:
                print(finished_line(config), flush=True)
            return 0
        stack.enter_context(run.batches)
        stack.callback(run.saver.close)
        if ranks.first:
            record_start(run)
        return Loop(run, stack).run_steps()


class Loop:
    """A run under way."""

    def __init__(self, run: Run, stack: ExitStack) -> None:
        """`stack` closes what is opened here, also after an error."""
        self.run, self.state, self.training = run, run.state, run.config.training
        self.records = Records(run, stack)
        profiled = self.training.profile if run.ranks.first else 0
        self.profiler = StepProfiler(profiled, run.directory.profile, self.state.step + 1)
        stack.callback(self.profiler.close)
        self.graph: StepGraph | None = None
        self._count_every = COUNT_EVERY * self.training.log_every if run.device.type == "cpu" else 0
        if run.steps.backend == "graph":
            launched = None if self.training.cuda_graph else self._say_launched
            self.graph = StepGraph(run.model, run.optimizer, self.training.clip, run.ranks, launched)
            stack.callback(self.graph.close)
        flops = run.model.flops_per_token(self.training.context)
        self.speed = Speedometer(flops / run.ranks.count, device_name(run.device))
        self._saved_step = self.state.step
        self._checkpoint_due = False

    def run_steps(self) -> int:
        """All steps that are left; the exit status."""
        run, state, last = self.run, self.state, self.training.steps
        record: dict[str, Any] = {}
        with StopRequest(run.ranks) as stop:
            while state.step < last and not stop.heard():
                record = self._step()
                self._give_up_if_stuck()
                self._checkpoint_due |= _is_due(state.step, self.training.checkpoint_every)
                # While steps are skipped the weights stand still, and a checkpoint would only push an older one out.
                if state.step == last or (self._checkpoint_due and not state.skipped_in_a_row):
                    self._save()
            if state.step < last:
                assert stop.signal is not None
                if self._saved_step != state.step:
                    self._save()
                run.saver.wait()
                self.records.conclude(f"{stop.signal.name}: saved after step {state.step}; run again to go on from there")
                return stop.exit_code
            run.saver.wait()
        if run.ranks.first:
            self.records.conclude(summary(run, record))
        return 0

    def _step(self) -> dict[str, Any]:
        """One optimizer step with its validation; the record it logged, empty if it logged none."""
        run, state, training = self.run, self.state, self.training
        began = time.perf_counter()
        step = state.step + 1
        validating = step == training.steps or _is_due(step, training.validate_every)
        logging = validating or step == 1 or _is_due(step, training.log_every)
        lr = learning_rate(state.updates + 1, run.config.schedule, run.config.optimizer.lr, training.steps)
        # What Transformer Engine casts reports to no meter.
        counting = run.config.recipe.linears == "ours" and (validating or step == 1 or _is_due(step, self._count_every))
        with _measured(counting) as meter:
            micro_batches = [next(run.batches) for _ in range(training.accumulate)]
            if self.graph is None:
                result = train_step(run.model, run.optimizer, micro_batches, lr, training.clip, run.ranks)
            else:
                result = self.graph.step(micro_batches, lr)
        self._count_skipped(step, result)  # waits for the device
        self.profiler.step()
        self.speed.add(result.tokens)
        state.step = step
        state.tokens += result.tokens
        state.seconds += time.perf_counter() - began
        state.data = run.batches.state()

        validation = self._validate() if validating else {}
        if not logging and result.applied:
            self.records.advance(step)
            return {}
        counts = CastCounts(*run.ranks.sum_counts(meter.counts())) if meter else None
        record = {
            **self._figures(result, lr),
            **expert_balance(result.expert_load),
            "flushed_share": counts.flushed_share if counts else None,
            "saturated_share": counts.saturated_share if counts else None,
            **validation,
            **self.speed.read(),
            **memory(run.device),
        }
        self.records.append(record)
        return record

    def _figures(self, result: StepResult, lr: float) -> dict[str, Any]:
        """What the step itself found."""
        state = self.state
        return {
            "step": state.step,
            "tokens": state.tokens,
            "seconds": state.seconds,
            "loss": result.loss,
            **{f"mtp_loss_{depth}": loss for depth, loss in enumerate(result.mtp_losses, 1)},
            "balance_loss": result.balance_loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "skipped": state.skipped,
        }

    def _count_skipped(self, step: int, result: StepResult) -> None:
        state = self.state
        if result.applied:
            state.skipped_in_a_row = 0
            return
        state.skipped += 1
        state.skipped_in_a_row += 1
        self.records.say(
            f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}: skipped "
            f"({state.skipped_in_a_row} in a row, {state.skipped} in all)"
        )

    def _say_launched(self, why: str) -> None:
        """No step is recorded although the run has said so."""
        run, step = self.run, self.state.step + 1
        run.steps = Choice("launched", f"steps, kernel by kernel, since no CUDA graph could be recorded: {why}")
        if run.ranks.first:
            record_manifest(run)
        self.records.say(f"step {step}: {run.steps}")

    def _give_up_if_stuck(self) -> None:
        if self.state.skipped_in_a_row >= self.training.max_skipped:
            raise UserError(
                f"training.max_skipped={self.training.max_skipped} steps in a row up to step {self.state.step} had a loss "
                "or gradient that is not finite: lower optimizer.lr, set training.clip or take another recipe, with "
                "resume=fork to go on from the last checkpoint"
            )

    def _validate(self) -> dict[str, float | None]:
        run = self.run
        self.speed.pause()
        loss = validate(run.model, validation(run.config, run.corpus, run.ranks), run.device, run.ranks)
        self.speed.resume()
        return {"validation_loss": loss, "validation_bits_per_byte": run.corpus.validation.bits_per_byte(loss)}

    def _save(self) -> None:
        """Begin a checkpoint; it is written while training goes on."""
        run = self.run
        self.speed.pause()
        self.records.sync()
        begin_checkpoint(run.saver, self.state, run.model, run.optimizer, run.config.to_dict(), run.ranks)
        self._saved_step, self._checkpoint_due = self.state.step, False
        self.speed.resume()


@contextlib.contextmanager
def _measured(counting: bool) -> Iterator[CastMeter | None]:
    """Count what casts lose, or do not."""
    if not counting:
        yield None
        return
    with measure_casts() as meter:
        yield meter


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
