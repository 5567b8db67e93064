"""Whether a run may go on from its checkpoint, and from where.

A run directory stands for one curve. Whatever would bend that curve (recipe, sizes, data, optimizer, schedule, seed)
must be the same when it is started again; what only looks on or decides where and how often to save may change freely.
``resume=fork`` takes the checkpoint's weights and goes on under the changed settings.
"""

from collections.abc import Mapping
from typing import Any

from dsv3fp8.errors import UserError
from dsv3fp8.schema import shown

# Keys that change no loss of the curve, and groups of such keys.
FREE_KEYS = {
    "run_dir",
    "resume",
    "data.cache_dir",
    "data.workers",
    "recipe.recompute",
    "training.device",
    "training.validate_every",
    "training.validation_batches",
    "training.log_every",
    "training.checkpoint_every",
    "training.keep",
    "training.max_skipped",
    "training.profile",
    "training.cuda_graph",
    "training.deterministic",
}
FREE_GROUPS = {"logging"}

ABSENT = "(absent)"
ELSEWHERE = "choose another run_dir= or set resume=fork to go on from there with the new ones"
"""What `train` takes in place of the old settings or files."""


def changed_keys(saved: Mapping[str, Any], current: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{key: (saved value, current value)} of every setting that differs and can change the curve."""
    before, after = flatten(saved), flatten(current)
    changed = {}
    for key in [*after, *(key for key in before if key not in after)]:
        values = before.get(key, ABSENT), after.get(key, ABSENT)
        if key in FREE_KEYS or key.partition(".")[0] in FREE_GROUPS or values[0] == values[1]:
            continue
        if key == "model.vocab_size" and after.get(key) is None:
            continue  # taken from the tokenizer, which the data keys and the corpus's hash stand for
        changed[key] = values
    return changed


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"training.steps": 10, …}; lists are values."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def refuse_changes(run_dir: str, step: int, changed: Mapping[str, tuple[Any, Any]], remedy: str = ELSEWHERE) -> None:
    """Raise UserError naming every changed key with its old and new value, if there is one.

    remedy: what else the command takes than the old settings.
    """
    if changed:
        listed = ", ".join(f"{key} {shown(old)} → {shown(new)}" for key, (old, new) in changed.items())
        raise UserError(
            f"run_dir={run_dir} holds step {step} of a run with other settings ({listed}): give the old ones, {remedy}"
        )


def refuse_other_corpus(run_dir: str, step: int, saved: str | None, current: str | None, remedy: str = ELSEWHERE) -> None:
    """Raise UserError if the files behind unchanged data settings are others than they were. remedy: as above."""
    if saved != current:
        raise UserError(
            f"run_dir={run_dir} holds step {step} of a run on other data (corpus hash {saved} → {current}; its files "
            f"are listed in corpus.json): restore the files, {remedy}"
        )
