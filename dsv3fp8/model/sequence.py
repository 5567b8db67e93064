"""The batch as attention and the router see it: sequences, positions, documents, padding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dsv3fp8.errors import UserError
from dsv3fp8.model.config import ModelConfig
from dsv3fp8.model.rope import positions_of, rope_table


@dataclass(frozen=True)
class Sequences:
    """shape: (B, S). cos, sin: fp32 [1 or B, S, head_rope / 2]. documents: int [B, S] or None; -1 is padding.

    real: bool [B * S], False for padding, or None when every token is real.
    """

    shape: tuple[int, int]
    cos: Tensor
    sin: Tensor
    documents: Tensor | None
    real: Tensor | None

    @staticmethod
    def of(config: ModelConfig, tokens: Tensor, documents: Tensor | None) -> Sequences:
        """tokens: ids [B, S]; documents: [B, S] or None."""
        batch, length = tokens.shape
        if length > config.context:
            raise UserError(
                f"a sequence of {length} tokens exceeds model.context={config.context}: shorten it or raise the key"
            )
        cos, sin = rope_table(config, positions_of(documents, batch, length, tokens.device))
        real = None if documents is None else (documents >= 0).flatten()
        return Sequences((batch, length), cos, sin, documents, real)

    def first(self, length: int) -> Sequences:
        """The first `length` positions of every sequence."""
        batch = self.shape[0]
        documents = None if self.documents is None else self.documents[:, :length]
        real = None if self.real is None else self.real.view(self.shape)[:, :length].flatten()
        return Sequences((batch, length), self.cos[:, :length], self.sin[:, :length], documents, real)
