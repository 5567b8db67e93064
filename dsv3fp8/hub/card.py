"""The model card: what was trained, on what, for how long, and the losses that were measured."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import dsv3fp8
from dsv3fp8.data import Tokenizer
from dsv3fp8.errors import UserError
from dsv3fp8.hub.layout import layout, shapes
from dsv3fp8.hub.saved import Saved
from dsv3fp8.hub.settings import MODEL_TYPES
from dsv3fp8.training.metrics import read_metrics
from dsv3fp8.yaml_text import dump_yaml

STORED = {
    "bf16": "BF16; router and its bias FP32",
    "fp32": "FP32, the masters of training",
    "fp8": "linears E4M3 with a scale (`weight_scale_inv`) for each 128x128; embedding, head and norms BF16; router FP32",
}


def model_card(saved: Saved, number_format: str, codes_of_training: bool, tokenizer: Tokenizer, has_text: bool) -> str:
    """README.md of an export. Figures that the run did not measure are left out, never guessed."""
    config = saved.config
    recipe = dump_yaml(config.to_dict()["recipe"]).strip()
    rows = [*_model_rows(saved), ("weights", _weights(number_format, codes_of_training, config.recipe.name))]
    rows += (
        [("tokenizer", f"{tokenizer.name}, {tokenizer.vocab_size:,} ids")] if has_text else [("tokenizer", "none: ids alone")]
    )
    parts = [
        _front_matter(config.model.score),
        f"# {config.model.name}, {config.recipe.name}\n\nTrained with dsv3fp8 {dsv3fp8.__version__}, in the layout of "
        f"`transformers`' {MODEL_TYPES[config.model.score]}.",
        _table(rows),
        f"## Training\n\n{_table(_training_rows(saved))}",
        f"## Measured\n\n{_measured(saved)}",
        f"## Recipe\n\nWhat every operation of training computed in:\n\n```yaml\n{recipe}\n```",
        f"## Use\n\n{_use(saved, number_format, has_text)}",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(score: str) -> str:
    return f"---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- dsv3fp8\n- {MODEL_TYPES[score]}\n---"


def _model_rows(saved: Saved) -> list[tuple[str, str]]:
    model = saved.config.model
    sizes = [
        (name, tensor.numel()) for name, tensor in shapes(model, saved.config.recipe).items() if tensor.is_floating_point()
    ]
    modules = sum(size for name, size in sizes if name.startswith("mtp."))
    total = sum(size for name, size in sizes if not name.startswith("mtp.") and "quantizers." not in name)
    rows = [
        ("parameters", f"{total:,}" + (f", and {modules:,} of multi-token prediction" if modules else "")),
        ("layers", f"{model.layers}, of which {model.dense_layers} dense"),
        ("width", f"{model.dim}, {model.heads} heads"),
        ("context", f"{model.context:,} tokens; trained on windows of {saved.config.training.context:,}"),
    ]
    if model.has_experts:
        rows.insert(3, ("experts", f"{model.experts}, {model.top_k} a token, and {model.shared_experts} shared"))
    return rows


def _training_rows(saved: Saved) -> list[tuple[str, str]]:
    config, state = saved.config, saved.state
    training, optimizer, schedule = config.training, config.optimizer, config.schedule
    ranks = config.parallel.ranks
    batch = training.batch * training.accumulate * ranks
    rows = [
        ("steps", f"{state.step:,}" + (f", of which {state.skipped} skipped" if state.skipped else "")),
        ("tokens", f"{state.tokens:,}; {batch} sequences of {training.context:,} a step"),
        ("optimizer", f"AdamW, lr {optimizer.lr:g}, betas {optimizer.betas}, weight decay {optimizer.weight_decay:g}"),
        ("schedule", f"{schedule.name}, {schedule.warmup} steps of warm-up, {training.steps:,} steps in all"),
        ("seed", str(training.seed)),
    ]
    return [("data", _data(saved)), *rows]


def _data(saved: Saved) -> str:
    """The corpus, from corpus.json. Paths of the machine that trained stay there."""
    data = saved.config.data
    named = data.dataset if data.dataset is not None else data.source
    path = saved.directory.path / "corpus.json"
    if not path.exists():
        return f"{named}, no step done yet"
    try:
        corpus = json.loads(path.read_text(encoding="utf-8"))
        halves = [f"{corpus[half]['tokens']:,} {half} tokens" for half in ("train", "validation")]
        return f"{named}: {', '.join(halves)}; sha256 {corpus['sha256'][:12]}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not what a run writes there ({error}): run `train` again, which writes it anew") from error


def _measured(saved: Saved) -> str:
    """The last losses up to the checkpoint's step."""
    path = saved.directory.metrics
    records = [r for r in read_metrics(path) if r["step"] <= saved.state.step] if path.exists() else []
    rows = []
    for key, name in (("loss", "training loss"), ("validation_loss", "validation loss")):
        record = next((r for r in reversed(records) if r.get(key) is not None), None)
        if record is not None:
            bits = record.get("validation_bits_per_byte") if key == "validation_loss" else None
            also = f", {bits:.4f} bits a byte" if bits is not None else ""
            rows.append((name, f"{record[key]:.4f} nats a token{also} (step {record['step']:,})"))
    return _table(rows) if rows else "No loss: the run was not trained here."


def _weights(number_format: str, codes_of_training: bool, recipe: str) -> str:
    if number_format != "fp8":
        return STORED[number_format]
    whose = (
        "the codes that training multiplied by" if codes_of_training else f"codes made for this export, not those of {recipe}"
    )
    return f"{STORED['fp8']}; {whose}"


def _use(saved: Saved, number_format: str, has_text: bool) -> str:
    lines = ["```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    lines.append('model = AutoModelForCausalLM.from_pretrained("DIR", dtype="auto")')
    if has_text:
        lines += [
            'tokenizer = AutoTokenizer.from_pretrained("DIR")',
            'ids = tokenizer("def main(", return_tensors="pt")',
            "print(tokenizer.decode(model.generate(**ids, max_new_tokens=40)[0]))",
        ]
    lines.append("```")
    if number_format == "fp8":
        lines += ["", "Loading FP8 weights needs the package `accelerate` beside `transformers`."]
    if number_format == "fp8" and _cut_blocks(saved):
        lines += [
            "",
            "On a CPU, transformers 5.24 cuts a dimension that is no multiple of 128 into other blocks than these.",
        ]
    if saved.config.model.mtp_depth:
        lines += [
            "",
            "Modules of multi-token prediction are the layers behind the last. They were trained on the hidden state before "
            "the final norm (Eq. 21 of the DeepSeek-V3 report).",
        ]
    return "\n".join(lines)


def _cut_blocks(saved: Saved) -> bool:
    """Whether a quantized weight has a dimension above 128 that is no multiple of it."""
    tensors = shapes(saved.config.model, saved.config.recipe)
    parts = ((each.op, each.part(tensors).shape) for each in layout(saved.config.model))
    return any(size > 128 and size % 128 for op, shape in parts if op is not None for size in shape)


def _table(rows: Iterable[tuple[str, Any]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
