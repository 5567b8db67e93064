"""The shapes that are measured: DeepSeek-V3's layers, the peers' published shapes, and tiny ones that only try the path."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearShape:
    """A linear [inputs -> outputs]. op: the recipe's name for it. parts: fused halves (gate, up) of the outputs."""

    inputs: int
    outputs: int
    op: str
    parts: int = 1

    def __str__(self) -> str:
        return f"{self.inputs} → {self.outputs}"


@dataclass(frozen=True)
class StepSize:
    """A model and the tokens of its optimizer step. optimizer: the config group."""

    model: str
    batch: int
    context: int
    accumulate: int
    optimizer: str
    vocabulary: int

    @property
    def tokens(self) -> int:
        """Input tokens of an optimizer step."""
        return self.batch * self.context * self.accumulate


@dataclass(frozen=True)
class Sizes:
    """tokens: of the dense shapes and linears. dense: (N, K) of y = x W^T. grouped: (experts, tokens each, N, K).

    exchange: tokens, width, choices of a token, experts that rows go to. routed: experts that the router chooses among.
    logits: tokens and vocabulary. updated: elements that AdamW moves.
    cast, latent, swiglu: rows, columns of what is cast, of the latent norm's input, of SwiGLU's output.
    masters: (experts, N, K) of the FP32 weights that are cast. copied: bytes of the tensor that a copy reads.
    attention: heads, tokens, q and k width, v width. layer: the preset whose layer runs, and its tokens.
    """

    tokens: int
    dense: tuple[tuple[int, int], ...]
    grouped: tuple[tuple[int, int, int, int], ...]
    exchange: tuple[int, int, int, int]
    routed: int
    logits: tuple[int, int]
    updated: int
    cast: tuple[int, int]
    latent: tuple[int, int]
    swiglu: tuple[int, int]
    masters: tuple[int, int, int]
    copied: int
    attention: tuple[int, int, int, int]
    linears: tuple[LinearShape, ...]
    layer: tuple[str, int]
    steps: dict[str, StepSize]


FULL = Sizes(
    tokens=4096,
    dense=((2176, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)),
    grouped=(
        (4, 8192, 4096, 7168), (4, 8192, 7168, 2048), (8, 4096, 4096, 7168), (8, 4096, 7168, 2048),
        (32, 1024, 4096, 7168), (32, 1024, 7168, 2048), (64, 256, 2816, 2048), (64, 256, 2048, 1408),
    ),
    exchange=(4096, 7168, 8, 8),
    routed=256,
    logits=(4096, 32768),
    updated=2**27,
    cast=(32768, 7168),
    latent=(65536, 1536),
    swiglu=(32768, 2048),
    masters=(8, 4096, 7168),
    copied=2**29,
    attention=(128, 4096, 192, 128),
    linears=(
        LinearShape(7168, 2112, "q_a"), LinearShape(1536, 24576, "q_b"), LinearShape(512, 32768, "kv_b"),
        LinearShape(16384, 7168, "out"), LinearShape(7168, 4096, "shared_gate_up", 2), LinearShape(2048, 7168, "shared_down"),
    ),
    layer=("v3_671b", 4096),
    steps={
        "small": StepSize("small", 32, 1024, 1, "adamw", 32000),
        "medium": StepSize("medium", 4, 2048, 8, "adamw_bf16", 32000),
    },
)  # fmt: skip

TINY = Sizes(
    tokens=256,
    dense=((128, 256),),
    grouped=((2, 128, 128, 256),),
    exchange=(128, 256, 2, 4),
    routed=8,
    logits=(64, 512),
    updated=2**12,
    cast=(256, 384),
    latent=(256, 256),
    swiglu=(256, 128),
    masters=(2, 128, 256),
    copied=2**16,
    attention=(2, 128, 192, 128),
    linears=(LinearShape(256, 128, "q_a"), LinearShape(128, 256, "shared_gate_up", 2)),
    layer=("nano", 32),
    steps={"small": StepSize("nano", 1, 16, 1, "adamw", 512), "medium": StepSize("nano", 1, 16, 2, "adamw_bf16", 512)},
)

SIZES = {"full": FULL, "tiny": TINY}
