"""What a run can be told about its training: one dataclass a Hydra group, and the checks that need no other file.

The YAML files under ``configs/`` give the values; this file says what each key means and which values make sense.
Every ``validate()`` collects all its complaints into one line, so that a user mends them in one go.
"""

import math
from dataclasses import dataclass, field

from dsv3fp8.errors import UserError

DEVICES = ("auto", "cpu", "cuda")
SCHEDULES = ("v3", "cosine", "constant")
MOMENTS = ("fp32", "bf16")
WANDB_MODES = ("offline", "online", "disabled")
PROGRESS_STYLES = ("auto", "bar", "plain", "none")

# A BF16 number has 8 significant bits: a decay of less than half a step is rounded away, and the moment never shrinks.
SMALLEST_BF16_DECAY = 2.0**-8


@dataclass
class TrainingConfig:
    """The loop itself: how long, how much at a time, and how often it looks, checks and saves."""

    # Optimizer steps. A step skipped for a non-finite loss or gradient counts as one of them.
    steps: int
    # Sequences in one micro-batch of each rank.
    batch: int
    # Tokens a sequence is predicted from.
    context: int
    # Validation after every so many steps and after the last one; 0: after the last one alone.
    validate_every: int
    # Micro-batches of the validation split that each rank reads in one validation.
    validation_batches: int
    # A checkpoint after every so many steps and after the last one; 0: after the last one alone.
    checkpoint_every: int
    # Micro-batches whose gradients make one optimizer step. The loss is the mean over all their tokens.
    accumulate: int = 1
    # Initial weights and data order.
    seed: int = 0
    # auto: cuda where there is one, else cpu.
    device: str = "auto"
    # Gradients are scaled down to this L2 norm; 0: never.
    clip: float = 1.0
    # A line in metrics.jsonl, W&B and the plot every so many steps (the first and last step have one anyway).
    log_every: int = 1
    # Newest checkpoints that stay on disk.
    keep: int = 2
    # Steps in a row that may be skipped for a non-finite loss or gradient before the run gives up.
    max_skipped: int = 10
    # Steps recorded by torch.profiler into RUN_DIR/profile, from the third step of the session on; 0: none.
    profile: int = 0
    # Whether steps are recorded as a CUDA graph and replayed, which changes no bit: for models whose kernels take longer to
    # launch than to run. null: where they can be, and where the memory that the graph keeps beside that of a step outside of
    # it (one that counts what casts lose, say) is there; true: an error where they cannot be; false: never.
    cuda_graph: bool | None = None
    # Runs repeat their bits on a GPU too, more slowly: attention sums in one order, and torch is asked for deterministic
    # algorithms alone (an error where an op has none). CPU runs repeat bits without it.
    deterministic: bool = False

    def validate(self) -> None:
        """Raise UserError with every value that makes no sense."""
        problems = [
            f"training.{name}={getattr(self, name)} must be at least {least}"
            for name, least in (
                ("steps", 1), ("batch", 1), ("context", 1), ("validate_every", 0), ("validation_batches", 1),
                ("checkpoint_every", 0), ("accumulate", 1), ("seed", 0), ("log_every", 1), ("keep", 1),
                ("max_skipped", 1), ("profile", 0),
            )
            if getattr(self, name) < least
        ]  # fmt: skip
        if self.seed >= 2**63:
            problems.append(f"training.seed={self.seed} must be below 2**63")
        if not (math.isfinite(self.clip) and self.clip >= 0):
            problems.append(f"training.clip={self.clip} must be a norm above 0, or 0 for no clipping")
        if self.device not in DEVICES:
            problems.append(f"training.device={self.device} must be one of {', '.join(DEVICES)}")
        raise_problems(problems)


@dataclass
class OptimizerConfig:
    """AdamW on FP32 master weights."""

    # Peak learning rate; the schedule scales it.
    lr: float
    # Decoupled: a step takes lr * weight_decay off each weight. Norms and biases are never decayed.
    weight_decay: float
    # The only one there is.
    name: str = "adamw"
    # Decay of the first and of the second moment.
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    # Added to the root of the second moment.
    eps: float = 1e-8
    # What the two moments are stored in. Arithmetic is FP32 in both; bf16 halves the optimizer's memory.
    moments: str = "fp32"

    def validate(self) -> None:
        """Raise UserError with every value that makes no sense."""
        problems = []
        if self.name != "adamw":
            problems.append(f"optimizer.name={self.name} must be adamw")
        for name in ("lr", "weight_decay"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                problems.append(f"optimizer.{name}={getattr(self, name)} must be finite and not negative")
        if not (math.isfinite(self.eps) and self.eps > 0):
            problems.append(f"optimizer.eps={self.eps} must be above 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            problems.append(f"optimizer.betas={self.betas} must be two numbers from 0 up to, not with, 1")
        elif self.moments == "bf16" and 0 < 1 - max(self.betas) < SMALLEST_BF16_DECAY:
            problems.append(
                f"optimizer.betas={self.betas} decays by less than BF16 can show, so optimizer.moments=bf16 would "
                "never shrink a moment: take optimizer.moments=fp32 or betas of at most 0.996"
            )
        if self.moments not in MOMENTS:
            problems.append(f"optimizer.moments={self.moments} must be one of {', '.join(MOMENTS)}")
        raise_problems(problems)


@dataclass
class ScheduleConfig:
    """Learning rate over the steps: linear warm-up, then ``name`` decides.

    ``v3`` stays at the peak for ``constant`` of the run and then follows a cosine to ``final`` * lr; ``cosine`` starts
    the cosine at once; ``constant`` stays at the peak to the end.
    """

    # v3, cosine or constant: what follows the warm-up.
    name: str
    # Steps of linear warm-up: step s of them has lr * s / warmup, so the first step is not wasted on a rate of 0.
    warmup: int
    # Share of training.steps spent at the peak after the warm-up (v3 alone; DeepSeek-V3: 10T of 14.8T tokens, 0.67).
    constant: float = 0.0
    # The rate at and beyond the last step, as a share of optimizer.lr (DeepSeek-V3: 2.2e-5 of 2.2e-4, 0.1).
    final: float = 0.1

    def validate(self) -> None:
        """Raise UserError with every value that makes no sense."""
        problems = []
        if self.name not in SCHEDULES:
            problems.append(f"schedule.name={self.name} must be one of {', '.join(SCHEDULES)}")
        elif self.name != "v3" and self.constant:
            problems.append(f"schedule.constant={self.constant} means nothing under schedule.name={self.name}: take v3 or 0")
        if self.warmup < 0:
            problems.append(f"schedule.warmup={self.warmup} must be at least 0 steps")
        for name in ("constant", "final"):
            if not 0 <= getattr(self, name) <= 1:
                problems.append(f"schedule.{name}={getattr(self, name)} must be a share between 0 and 1")
        raise_problems(problems)


@dataclass
class LoggingConfig:
    """Who is told about the curve. RUN_DIR/metrics.jsonl is always written."""

    # auto: a live bar on a terminal, plain lines elsewhere.
    progress: str = "auto"
    # Keep RUN_DIR/loss.png fresh.
    plot: bool = True
    # Weights & Biases. offline writes RUN_DIR/wandb for `wandb sync`; online needs a login; disabled writes nothing.
    wandb: str = "offline"
    # The project in W&B.
    project: str = "dsv3fp8"
    # The team or user the run belongs to; null: W&B's default for the login.
    entity: str | None = None
    # The run's name in W&B; null: the name of the run directory.
    name: str | None = None
    # The group the run belongs to in W&B, as the runs of a comparison do; null: none.
    group: str | None = None
    # The run's tags in W&B.
    tags: list[str] = field(default_factory=list)

    def validate(self) -> None:
        """Raise UserError with every value that makes no sense."""
        problems = []
        if self.progress not in PROGRESS_STYLES:
            problems.append(f"logging.progress={self.progress} must be one of {', '.join(PROGRESS_STYLES)}")
        if self.wandb not in WANDB_MODES:
            problems.append(f"logging.wandb={self.wandb} must be one of {', '.join(WANDB_MODES)}")
        if not self.project:
            problems.append("logging.project='' must not be empty")
        raise_problems(problems)


def raise_problems(problems: list[str]) -> None:
    """Raise one UserError with all of them, if there are any."""
    if problems:
        raise UserError("; ".join(problems))
