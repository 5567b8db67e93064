"""The whole model: embedding, blocks, final norm, output head, multi-token prediction, and what a training loop asks of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from dsv3fp8.errors import UserError
from dsv3fp8.model.block import Block
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.linear import Masters, Reader, RMSNorm
from dsv3fp8.model.manifest import precision_manifest
from dsv3fp8.model.multi_token import MultiTokenModule
from dsv3fp8.model.router import Router, end_step
from dsv3fp8.model.sequence import Sequences
from dsv3fp8.model.sizes import flops_per_token, parameter_counts
from dsv3fp8.model.targets import Totals, count_targets, targets_at
from dsv3fp8.ops.cross_entropy import cross_entropy, head_logits
from dsv3fp8.ops.embedding import embedding
from dsv3fp8.ops.quantizers import LinearQuantizers, ScaleState
from dsv3fp8.ops.weights import WeightCodes
from dsv3fp8.precision import ledger
from dsv3fp8.precision.recipe import Recipe
from dsv3fp8.precision.tiles import values_of


@dataclass(frozen=True)
class Losses:
    """Sums over one micro-batch, fp32 scalars: next-token loss, MTP losses per depth, balance loss over sequences.

    tokens, documents: the windows that the sums range over.
    """

    loss: Tensor
    mtp: tuple[Tensor, ...]
    balance: Tensor
    tokens: Tensor
    documents: Tensor | None

    @property
    def totals(self) -> Totals:
        """What the sums range over, counted where the windows lie: with documents this waits for a GPU."""
        return count_targets(self.tokens, self.documents, len(self.mtp))


class Transformer(Masters):
    """A DeepSeek-V3-style model under a recipe. Its parameters are the FP32 masters.

    config.vocab_size must be set. Build it under `torch.device("meta")` to look at sizes without memory; call
    `initialize` before training.
    """

    def __init__(self, config: ModelConfig, recipe: Recipe) -> None:
        super().__init__()
        config.validate()
        if config.vocab_size is None:
            raise UserError("model.vocab_size=null: a run takes it from its tokenizer; give a number to build without one")
        self.config, self.recipe, self.vocab_size = config, recipe, config.vocab_size
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        self.layers = nn.ModuleList(
            Block(config, recipe, dense=i < config.dense_layers, scope=f"layers.{i}") for i in range(config.layers)
        )
        self.norm = RMSNorm(config.dim, config.norm_eps, recipe, "final_norm")
        if not config.tied_head:
            self.head = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        self.head_codes = WeightCodes(LinearQuantizers(recipe, "head"))
        self.mtp = nn.ModuleList(MultiTokenModule(config, recipe, scope=f"mtp.{d}") for d in range(config.mtp_depth))

    @property
    def head_weight(self) -> Tensor:
        return self.embedding if self.config.tied_head else self.head

    def forward(self, tokens: Tensor, documents: Tensor | None = None, *, ahead: bool = True) -> Losses:
        """Losses of windows tokens int64 [B, S + 1]; documents int [B, S + 1] isolates documents, -1 is padding.

        ahead=False leaves multi-token prediction out, for validation of the main model; `mtp` is then empty.
        """
        inputs = tokens[:, :-1]
        sequences = Sequences.of(self.config, inputs, None if documents is None else documents[:, :-1])
        x, balances = self._blocks(inputs, sequences)
        hidden, loss = self._loss(self.norm, x, targets_at(tokens, documents, 0))
        mtp = []
        for depth, module in enumerate(self.mtp if ahead else (), start=1):
            assert isinstance(module, MultiTokenModule)
            batch, length = sequences.shape
            shorter = sequences.first(max(length - 1, 0))
            hidden = hidden.view(batch, length, self.config.dim)[:, :-1].flatten(0, 1)
            embedded = self._embed(inputs[:, depth:])
            hidden, balance = module(hidden, embedded, shorter)
            balances.append(balance)
            hidden, loss_ahead = self._loss(module.norm, hidden, targets_at(tokens, documents, depth))
            mtp.append(loss_ahead)
            sequences = shorter
        given = [b for b in balances if b is not None]
        balance_sum = torch.stack(given).sum() if given else torch.zeros((), device=tokens.device)
        return Losses(loss, tuple(mtp), balance_sum, tokens, documents)

    def objective(self, losses: Losses, totals: Totals) -> Tensor:
        """The scalar to differentiate: this micro-batch's share of the optimizer step whose sums range over `totals`.

        Token-weighted means for the next token and each depth, sequence-weighted for the balance loss, so that any split
        into micro-batches gives the same gradient. Parts without a valid target contribute 0.
        """
        config = self.config
        total = losses.loss / max(totals.targets, 1)
        for loss, count in zip(losses.mtp, totals.mtp, strict=True):
            total = total + loss * (config.mtp_weight / len(losses.mtp) / max(count, 1))
        return total + losses.balance * (config.balance_loss / max(totals.sequences, 1))

    def logits(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Next-token logits fp32 [B, S, V] of ids [B, S], without gradients: for sampling and inspection."""
        with torch.no_grad():
            sequences = Sequences.of(self.config, tokens, documents)
            x, _ = self._blocks(tokens, sequences)
            _, (y,) = self.norm(x, [Reader(None, x.dtype)])
            return head_logits(values_of(y.operand), self.head_weight, self.head_codes).view(*tokens.shape, -1)

    def _blocks(self, inputs: Tensor, sequences: Sequences) -> tuple[Tensor, list[Tensor | None]]:
        ledger.enter("")
        x = self._embed(inputs)
        balances: list[Tensor | None] = []
        for block in self.layers:
            x, balance = block(x, sequences)
            balances.append(balance)
        ledger.enter("")
        return x, balances

    def _embed(self, ids: Tensor) -> Tensor:
        return embedding(ids.flatten(), self.embedding, self.recipe.compute)

    def _loss(self, norm: RMSNorm, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(x for a reader beside the head, the summed loss of the head on norm(x))."""
        rail, (y,) = norm(x, [Reader(None, x.dtype)])
        return rail, cross_entropy(
            y.edge, values_of(y.operand), self.head_weight, targets.flatten(), self.head_codes, y.stash
        ).sum()

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """V3 initialization: matrices normal(0, init_std), norms one, biases and scale histories zero."""
        parameters = dict(self.named_parameters())
        for name, matrix, values in self.initial_weights(seed):
            (parameters[name] if matrix is None else parameters[name][matrix]).copy_(values)
        self.clear_buffers()

    def initial_weights(self, seed: int) -> Iterator[tuple[str, int | None, Tensor]]:
        """(parameter, which matrix of a stack, its FP32 values), also of a model without memory.

        Drawn on the CPU in the order of the parameters, so that every device starts from the same bits.
        """
        generator = torch.Generator().manual_seed(seed)

        def drawn(shape: torch.Size) -> Tensor:
            empty = torch.empty(shape, dtype=torch.float32, device="cpu")
            return empty.normal_(0.0, self.config.init_std, generator=generator)

        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                yield name, None, torch.ones(parameter.shape, device="cpu")
            elif parameter.dim() == 2:
                yield name, None, drawn(parameter.shape)
            else:
                # torch draws 16 numbers at a time: matrices of so many are those of the stack, which need not lie there whole.
                alone = parameter.shape[1:].numel() % 16 == 0
                shapes = parameter.shape[1:] if alone else parameter.shape
                stack = (drawn(shapes) for _ in range(len(parameter))) if alone else iter(drawn(shapes))
                yield from ((name, matrix, values) for matrix, values in enumerate(stack))

    def clear_buffers(self) -> None:
        """Biases, counts and scale histories as they are before the first step."""
        for buffer in self.buffers():
            buffer.zero_()
        self.invalidate_codes()

    def end_step(self, applied: Tensor | bool) -> None:
        """Once per optimizer step: bias update and amax histories if it was applied, forgotten if it was skipped.

        applied: where it is a tensor, a bool scalar beside the weights, it is not read back.
        """
        end_step(self._routers, applied)
        for state in self._scale_states:
            state.end_step(applied)
        self.invalidate_codes()

    @cached_property
    def _routers(self) -> list[Router]:
        return [module for module in self.modules() if isinstance(module, Router)]

    @cached_property
    def _scale_states(self) -> list[ScaleState]:
        return [module for module in self.modules() if isinstance(module, ScaleState)]

    @cached_property
    def _codes(self) -> list[WeightCodes]:
        return [value for module in self.modules() for value in vars(module).values() if isinstance(value, WeightCodes)]

    def train(self, mode: bool = True) -> Self:
        """As nn.Module's; codes are made again, so that amax histories see the weights of every step they are used in."""
        super().train(mode)
        self.invalidate_codes()
        return self

    def invalidate_codes(self) -> None:
        """Drops every cached weight code; they are made again from the masters when next read."""
        for codes in self._codes:
            codes.invalidate()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As nn.Module's; refuses a non-finite router bias, which would route at random, by name."""
        for name, value in state_dict.items():
            if name.endswith("router.bias") and not torch.isfinite(value).all():
                raise UserError(f"{name} holds NaN or inf: the checkpoint is damaged; load an older one")
        result = super().load_state_dict(state_dict, strict, assign)
        self.invalidate_codes()
        return result

    def expert_load(self) -> Tensor:
        """Tokens per expert in this optimizer step so far, int64 [MoE layers, E]; empty without experts."""
        return torch.stack(self.loads) if self.loads else torch.zeros(0, 0, dtype=torch.int64)

    @property
    def loads(self) -> list[Tensor]:
        """Each router's own tokens per expert in this optimizer step so far, int64 [E]."""
        return [router.load for router in self._routers]

    @property
    def amaxes(self) -> list[Tensor]:
        """What each kept scale has seen in this optimizer step so far, fp32 [experts or 1]."""
        return [state.current for state in self._scale_states]

    def parameter_groups(self) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """Named parameters to decay (matrices) and not to decay (norms); a tied head appears once."""
        groups: dict[str, list[tuple[str, nn.Parameter]]] = {"decay": [], "no_decay": []}
        for name, parameter in self.named_parameters():
            groups["decay" if parameter.dim() > 1 else "no_decay"].append((name, parameter))
        return groups

    def parameter_counts(self) -> dict[str, int]:
        return parameter_counts(self, self.config)

    def flops_per_token(self, length: int) -> float:
        return flops_per_token(self, self.config, length)

    def manifest(self, isolated: bool = False) -> dict[str, Any]:
        """What is FP8, what is kept and its bytes, and which backend each op takes on this model's device.

        isolated: documents are kept apart in attention.
        """
        return precision_manifest(self.config, self.recipe, self.embedding.device, isolated)
