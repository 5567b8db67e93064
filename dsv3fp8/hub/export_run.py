"""`dsv3fp8 export`: a run's checkpoint as a Hugging Face directory that `transformers` loads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dsv3fp8.data import load_tokenizer
from dsv3fp8.errors import UserError
from dsv3fp8.hub.card import model_card
from dsv3fp8.hub.files import bytes_in, shards_of, write
from dsv3fp8.hub.fp8 import of_training, scale_kind_of
from dsv3fp8.hub.layout import Published, layout, shapes
from dsv3fp8.hub.saved import Saved, read_saved
from dsv3fp8.hub.settings import FILE, quantization, to_published
from dsv3fp8.hub.tokenizer import generation_config, tokenizer_files
from dsv3fp8.hub.weights import Weights
from dsv3fp8.hub.whole import check_new, in_words, new_directory
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.schema import build_words, key_values, leaves

HELP = ("-h", "--help", "help")


@dataclass
class ExportConfig:
    """The keys of the command."""

    # Run directory to take the checkpoint and the tokenizer from; the first word alone will do.
    run: str
    # Directory to write, which must not be there yet.
    out: str
    # bf16; fp32; fp8: DeepSeek's E4M3 weights with a scale for each 128x128, the rest in BF16.
    format: Literal["bf16", "fp8", "fp32"] = "bf16"
    # Checkpoint to take. null: the newest.
    step: int | None = None
    # A safetensors file is at most so large, in GB; a model above it takes several, and an index.
    shard: float = 5.0

    def validate(self) -> None:
        """Raise UserError with every value that makes no sense."""
        if not self.shard > 0:
            raise UserError(f"shard={self.shard} must be above 0 (GB)")
        if not self.out:
            raise UserError("out is empty: name the directory to write")


def main(arguments: list[str]) -> int:
    """Write the directory; the exit status."""
    if any(argument in HELP for argument in arguments):
        print(help_text())
        return 0
    if arguments and "=" not in arguments[0]:
        arguments = [f"run={arguments[0]}", *arguments[1:]]
    export(build_words(ExportConfig, key_values(arguments, "export runs/tiny-dsv3 out=tiny-hf format=bf16")))
    return 0


def help_text() -> str:
    """The keys with their comments."""
    keys = "\n".join(f"  {key:<10}{note}" for key, _, note in leaves(ExportConfig))
    return f"Usage: dsv3fp8 export RUN_DIR out=DIR [format=bf16|fp8|fp32] [key=value …]\n\n{keys}"


def export(config: ExportConfig) -> None:
    """Write the directory, whole or not at all. Raises UserError before any work where it cannot be done."""
    out = Path(config.out).expanduser()
    check_new("out", out, 0)
    saved = read_saved(config.run, config.step)
    model, recipe = saved.config.model, saved.config.recipe
    refuse_biases(saved)
    tensors = layout(model)
    settings = to_published(model) | _stored(config.format, recipe, tensors)
    tokenizer = load_tokenizer(saved.directory.tokenizer)
    assert model.vocab_size is not None
    generation = generation_config(tokenizer, model.vocab_size)
    settings |= {key: generation[key] for key in ("bos_token_id", "eos_token_id")}
    weights = Weights(tensors, shapes(model, recipe), saved.tensors, recipe, config.format)
    shards = shards_of(weights.layouts(), int(config.shard * 1e9))
    total = sum(map(bytes_in, shards.values()))
    check_new("out", out, total)
    count = f"{len(shards)} files" if len(shards) > 1 else "one file"
    print(f"step {saved.state.step} of {saved.directory.path}: {in_words(total)} in {count}, format={config.format}")
    texts = tokenizer_files(tokenizer, model.context)
    with new_directory("out", out) as directory:
        for file in write(directory, shards, weights.tensor):
            if len(shards) > 1:
                print(f"  {file}", flush=True)
        contents = {FILE: dict(sorted(settings.items())), "generation_config.json": generation, **texts}
        for name, content in contents.items():
            (directory / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        card = model_card(saved, config.format, codes_of_training(recipe, tensors), tokenizer, bool(texts))
        (directory / "README.md").write_text(card, encoding="utf-8")
    if config.format == "fp8" and not codes_of_training(recipe, tensors):
        print(f"recipe={recipe.name} trains on other codes than these, which are made anew, a scale for each 128x128")
    if not texts:
        print("no tokenizer: the run trained on ids whose text is not known")
    print(f"see {out / 'README.md'}")


def refuse_biases(saved: Saved) -> None:
    """Raise UserError for load-balance biases that DeepSeek-V2 has no place for."""
    if saved.config.model.score == "sigmoid":
        return
    moved = [name for name in saved.tensors if name.endswith("router.bias") and bool(saved.tensors[name].any())]
    if moved:
        raise UserError(
            f"{moved[0]} is not zero, and with model.score=softmax this is exported as DeepSeek-V2, which has no such bias: "
            "train with model.bias_update_speed=0, or with model.score=sigmoid"
        )


def codes_of_training(recipe: Recipe, tensors: list[Published]) -> bool:
    """Whether the FP8 weights written are the codes that training multiplies by."""
    return of_training(recipe, {each.op for each in tensors if each.op is not None})


def _stored(number_format: str, recipe: Recipe, tensors: list[Published]) -> dict[str, Any]:
    """The keys of config.json about how the weights are stored."""
    if number_format == "fp32":
        return {"torch_dtype": "float32"}
    stored: dict[str, Any] = {"torch_dtype": "bfloat16"}
    if number_format == "fp8":
        kinds = {scale_kind_of(recipe, each.op) for each in tensors if each.op is not None}
        stored["quantization_config"] = quantization("pow2" if kinds == {"pow2"} else "fp32")
    return stored
