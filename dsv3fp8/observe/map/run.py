"""One block, forward and backward once, with the ledger open."""

from __future__ import annotations

import torch

from dsv3fp8.model.block import Block
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.sequence import Sequences
from dsv3fp8.precision import ledger
from dsv3fp8.precision.ledger import Ledger
from dsv3fp8.precision.recipe import Recipe

SCOPE = "block"


def observe_block(config: ModelConfig, recipe: Recipe, dense: bool, tokens: int, seed: int, device: torch.device) -> Ledger:
    """The ledger of one block on random input [tokens, D] and a random output gradient of a token-mean loss's size."""
    with torch.device("meta"):
        block = Block(config, recipe, dense)
    block.to_empty(device=device)
    _initialize(block, config.init_std, seed)
    block.train()
    compute = torch.bfloat16 if recipe.compute == "bf16" else torch.float32
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(tokens, config.dim, generator=generator).to(device, compute) for _ in range(2))
    sequences = Sequences.of(config, torch.zeros(1, tokens, dtype=torch.int64, device=device), None)
    with ledger.observe_ops() as observed:
        ledger.enter(SCOPE)
        out, balance = block(x.requires_grad_(), sequences)
        # The gradients that a loss would send in: the output's and, where there are experts, the balance loss's.
        torch.autograd.backward(
            [out] if balance is None else [out, balance],
            [dy / tokens] if balance is None else [dy / tokens, torch.full_like(balance, config.balance_loss)],
        )
    return observed


def _initialize(block: Block, std: float, seed: int) -> None:
    """Normal weights, norm gains of one, buffers of zero."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in block.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        for buffer in block.buffers():
            buffer.zero_()
