"""Four steps under training.deterministic=true, five times launched and, on a GPU, five times replayed from the third on.

    repeated_steps.py RECIPE DEVICE SEQUENCES CONTEXT

The last line is JSON: a digest of the gradients of each first step, one of the state behind each last step, and whether the
steps were recorded.
"""

import hashlib
import json
import sys
from collections.abc import Iterable
from typing import Any

import torch

from dsv3fp8.config import load_config
from dsv3fp8.data import Batch
from dsv3fp8.kernels.attention import choice
from dsv3fp8.training.graph import StepGraph
from dsv3fp8.training.optimizer import AdamW
from dsv3fp8.training.setup import build, repeat_bits
from dsv3fp8.training.step import train_step

WORDS = (
    "model=nano", "model.vocab_size=512", "data=synthetic", "data.vocab_size=512", "model.layers=3", "model.dim=512",
    "model.heads=8", "model.q_latent=128", "model.kv_latent=128", "model.head_nope=128", "model.head_rope=64",
    "model.head_v=128", "model.ffn=512", "model.expert_ffn=128", "model.experts=8", "model.top_k=2",
)  # fmt: skip


class Seen(AdamW):
    """Keeps a digest of the gradients of its first step."""

    first_gradients = ""

    def step(self, *given: Any) -> None:
        if not self.first_gradients:
            self.first_gradients = digest(p.grad for p in self.parameters.values() if p.grad is not None)
        super().step(*given)


def digest(tensors: Iterable[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main(recipe: str, device_name: str, sequences: int, context: int) -> None:
    repeat_bits(True)
    device = torch.device(device_name)
    words = (f"training.batch={sequences}", f"training.context={context}", f"model.context={context}")
    config = load_config([*WORDS, *words, f"recipe={recipe}", "training.deterministic=true"])
    generator = torch.Generator().manual_seed(0)
    batches = [[Batch(torch.randint(0, 512, (sequences, context + 1), generator=generator), None)] for _ in range(4)]
    found: dict[str, Any] = {"gradients": [], "states": [], "recorded": []}
    for recorded in (False, True) if device.type == "cuda" else (False,):
        for _ in range(5):
            model, _ = build(config, device)
            optimizer = Seen(model.parameter_groups(), config.optimizer)
            graph = StepGraph(model, optimizer, 1.0, launched=print)
            for given in batches:
                if recorded:
                    graph.step(given, 1e-3)
                else:
                    train_step(model, optimizer, given, 1e-3, 1.0)
            found["gradients"].append(optimizer.first_gradients)
            found["states"].append(
                digest((*model.state_dict().values(), *optimizer.first.values(), *optimizer.second.values()))
            )
            found["recorded"].append(graph._graph is not None)
            graph.close()
    head = config.model.head_qk, config.model.head_v
    found["attention"] = choice.choose(device, torch.bfloat16, head, masked=False).backend
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
