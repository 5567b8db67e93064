"""Names of the tensors between the boxes of a block, as ops report them to the ledger, and which op a cast rides on.

A gradient is named d + its tensor; where several readers of one tensor give gradients, d + tensor + reader.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Names:
    """input and output of an op, and the gradient that leaves it for its input."""

    input: str
    output: str
    dinput: str

    @property
    def doutput(self) -> str:
        return f"d{self.output}"


_OPS = {
    "attention_norm": Names("x0", "y_attn", "dx0"),
    "ffn_norm": Names("x1", "y_ffn", "dx1"),
    "q_norm": Names("c_q", "y_q", "dc_q"),
    "kv_norm": Names("c_kv", "y_kv", "dc_kv"),
    "q": Names("y_attn", "q", "dy_attn_q"),
    "q_a": Names("y_attn", "c_q", "dy_attn_q"),
    "kv_a": Names("y_attn", "c_kv", "dy_attn_kv"),
    "q_b": Names("y_q", "q", "dy_q"),
    "kv_b": Names("y_kv", "kv", "dy_kv"),
    "out": Names("attn_operand", "x1", "dattn_out"),
    "gate_up": Names("y_ffn", "h", "dy_ffn"),
    "down": Names("act", "dense", "dact"),
    "shared_gate_up": Names("payload", "h", "dy_shared"),
    "shared_down": Names("act", "shared", "dact"),
    "expert_gate_up": Names("received", "h", "dreceived"),
    "expert_down": Names("act", "expert_out", "dact"),
    "mtp_projection": Names("joined", "x0", "djoined"),
}

_OTHER = Names("x", "y", "dx")

JUNCTIONS = {"attention_norm": ("dy_attn_q", "dy_attn_kv"), "ffn_norm": ("dpayload", "dy_shared", "dy_router")}
"""Gradients that a norm's junction sums, in order."""

INPUT_CAST_ON = {
    "q": "attention_norm", "q_a": "attention_norm", "kv_a": "attention_norm", "q_b": "q_norm", "kv_b": "kv_norm",
    "gate_up": "ffn_norm", "shared_gate_up": "ffn_norm", "expert_gate_up": "ffn_norm",
}  # fmt: skip
"""The norm whose kernel mints a linear's operand."""

GRADIENT_CAST_ON = {
    "q": "rope", "q_b": "rope", "kv_b": "rope", "q_a": "q_norm", "kv_a": "kv_norm",
    "gate_up": "swiglu", "shared_gate_up": "shared_swiglu", "expert_gate_up": "expert_swiglu",
}  # fmt: skip
"""The backward op whose kernel casts a linear's dY; the others' casts have a box of their own, NODE.cast."""


def names(op: str) -> Names:
    return _OPS.get(op, _OTHER)
