"""The drawing as data: which node stands in which row, what feeds what, and who says so.

No dtype is written here. A box or chip wears what the ledger reported for it; one that the ledger did not report is
drawn as missing. Rows run from the block's input down to its output. A row holds ops or chips: the forward column on the
left, the backward column beside it (read upwards), the weight-gradient column on the right.

Sources: a section of the DeepSeek-V3 report (arXiv 2412.19437), `seed` (the document this visual language comes from), or
`~` for what neither pins down.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Slot = Literal["full", "left", "right"]
EDGE_KINDS = {
    "flow": "flow, forward down and backward up; rails beside it",
    "amber": "kept, read by the backward of a norm, SwiGLU, attention or the router",
    "blue": "kept for a weight gradient only",
    "orange": "dY into the weight-gradient column",
    "gradient": "gradient of a weight or of a norm's gain",
}


@dataclass(frozen=True)
class Box:
    """One op. node: its name in the ledger.

    when: always; reported: only some recipes have it; wgrad or dgrad: a cast that must be there if that GEMM of `of`
    ran in FP8, a re-tiling only of codes with a scale per row.
    """

    node: str
    label: str
    source: str
    slot: Slot = "full"
    when: Literal["always", "reported", "wgrad", "dgrad"] = "always"
    of: str = ""

    @property
    def key(self) -> str:
        return self.node


@dataclass(frozen=True)
class Chip:
    """One tensor. nodes: the ops ("column/node") that may report it; names: what they may call it.

    loose: nothing flows at its lower side: below it a rail or a stash goes on.
    """

    key: str
    label: str
    nodes: tuple[str, ...]
    names: tuple[str, ...]
    slot: Slot = "full"
    when: Literal["always", "reported"] = "always"
    loose: bool = False


Cell = Box | Chip


@dataclass(frozen=True)
class Row:
    """broken: the columns ("f", "b") in which nothing flows between this row and the one above, because a rail does.

    note: words beside the backward flow, where a forward box has no op of its own in backward.
    """

    kind: Literal["ops", "chips"]
    forward: tuple[Cell, ...] = ()
    backward: tuple[Cell, ...] = ()
    wgrad: tuple[Cell, ...] = ()
    broken: str = ""
    note: str = ""


@dataclass(frozen=True)
class Edge:
    """An edge that leaves its column. ends: "f:", "b:" or "w:" and the key of a box or chip; lane: where it runs vertically.

    sources: drawn from the first one that is there; of a stash, from the first that was kept. A stash that nothing keeps is
    recomputed, and dotted. with_source: chips beside the source that take the same way. leave, enter: vertical offset of
    the ports; below: it leaves by the lower side. when: always; kept: only if the source was; reads or emits: only if the
    op at that end reported the tensor, and of a stash only what was kept.
    """

    kind: str
    sources: tuple[str, ...]
    target: str
    lane: str
    leave: int = 0
    enter: int = 0
    with_source: tuple[str, ...] = ()
    below: bool = False
    when: Literal["always", "kept", "reads", "emits"] = "always"


def _chip(
    key: str, label: str, *nodes: str, names: str = "", slot: Slot = "full", optional: bool = False, loose: bool = False
) -> Chip:
    return Chip(key, label, nodes, tuple((names or key).split()), slot, "reported" if optional else "always", loose)


def _linear(node: str, label: str, forward: str = "") -> Row:
    """The three GEMMs of a linear, each in its column. forward: what is said in forward, if more than label."""
    short = node.removeprefix("expert_").removeprefix("shared_").replace("gate_up", "gate/up")
    return Row(
        "ops",
        (Box(node, forward or label, "§3.3.1"),),
        (Box(node, f"{label} dgrad", "§3.3.1"),),
        (Box(node, f"{short} wgrad", "§3.3.1"), _chip(f"dw_{node}", "dW", f"wgrad/{node}")),
    )


def _retile(node: str, suffix: str = "") -> Box:
    """The box that re-tiles a wgrad operand; suffix "_dy": its dY."""
    return Box(f"{node}.requant{suffix}", "requant ᵀ", "§3.3.2", when="wgrad", of=node)


def _norm(node: str, label: str, gain: str) -> Row:
    gain_chip = _chip(f"dg_{node}", "dγ", f"backward/{node}", names=f"dg_{node} dg_{gain}")
    return Row("ops", (Box(node, label, "§3.3.2"),), (Box(node, f"{label} bwd", "§3.2.3"),), (gain_chip,))


def _q_rows(latent: bool) -> tuple[Row, ...]:
    if not latent:
        return (_linear("q", "q projection"),)
    return (
        _linear("q_a", "q_a down-proj"),
        Row("chips", (_chip("c_q", "c_q", "forward/q_a", "forward/q_norm"),),
            (_chip("dc_q", "dc_q", "backward/q_norm"),)),
        _norm("q_norm", "q latent norm", "q"),
        Row("chips", (_chip("y_q", "norm(c_q)", "forward/q_norm", "forward/q_b"),),
            (_chip("dy_q", "d norm(c_q)", "backward/q_b"),), (_retile("q_b"),)),
        _linear("q_b", "q_b up-proj"),
    )  # fmt: skip


def attention_rows(latent: bool) -> tuple[Row, ...]:
    """The attention half of a block. latent: queries go through a latent (q_a, q_norm, q_b), not one projection."""
    first_q, last_q = ("q_a", "q_b") if latent else ("q", "q")
    return (
        Row("chips", (_chip("x0", "x0", "forward/attention_norm"),), (_chip("dx0", "dx0", "backward/attention_norm"),)),
        _norm("attention_norm", "attention norm", "attention"),
        Row("chips", (_chip("y_attn", "y", "forward/attention_norm", f"forward/{first_q}", "forward/kv_a"),),
            (_chip("dy_attn", "dy", "backward/attention_norm.junction"),)),
        Row("ops", (), (Box("attention_norm.junction", "junction of dy", "§3.3.2"),)),
        Row("chips", (), (_chip("dy_from_q", "dy from q", f"backward/{first_q}", names="dy_attn_q dy_attn dy_q"),),
            (_retile(first_q),)),
        *_q_rows(latent),
        Row("chips", (_chip("q_out", "q", f"forward/{last_q}", names="q", loose=True),),
            (_chip("dq", "dq", "backward/rope", loose=True),)),
        Row("chips", (), (_chip("dy_from_kv", "dy from kv", "backward/kv_a", names="dy_attn_kv dy_attn dy_kv"),),
            (_retile("kv_a"),), broken="fb"),
        _linear("kv_a", "kv_a down-proj"),
        Row("chips", (_chip("k_rope", "k_rope", "forward/kv_a", "forward/rope", loose=True),
                      _chip("c_kv", "c_kv", "forward/kv_a", "forward/kv_norm")),
            (_chip("dk_rope", "dk_rope", "backward/rope", loose=True), _chip("dc_kv", "dc_kv", "backward/kv_norm"))),
        _norm("kv_norm", "kv latent norm", "kv"),
        Row("chips", (_chip("y_kv", "norm(c_kv)", "forward/kv_norm", "forward/kv_b"),),
            (_chip("dy_kv", "d norm(c_kv)", "backward/kv_b"),), (_retile("kv_b"),)),
        _linear("kv_b", "kv_b up-proj"),
        Row("chips", (_chip("kv", "k_nope, v", "forward/kv_b"),), (_chip("dkv", "dk_nope, dv", "backward/rope"),)),
        Row("ops", (Box("rope", "RoPE", "~"),), (Box("rope", "RoPE bwd", "~"),)),
        Row("chips", (_chip("qr", "q", "forward/rope", "forward/attention", names="q"),
                      _chip("kr", "k", "forward/rope", "forward/attention", names="k"),
                      _chip("v", "v", "forward/rope", "forward/attention")),
            (_chip("dqr", "dq", "backward/attention", names="dq"), _chip("dkr", "dk", "backward/attention", names="dk"),
             _chip("dv", "dv", "backward/attention"))),
        Row("ops", (Box("attention", "attention", "§3.3.2"),), (Box("attention", "attention bwd", "§3.3.2"),)),
        Row("chips", (_chip("lse", "lse", "forward/attention", loose=True),
                      _chip("attn_cache", "output", "forward/attention", "forward/out", names="attn_cache attn_out")),
            (_chip("dattn_out", "d output", "backward/out", names="dattn_out dattn_operand"),)),
        Row("ops", (Box("requantize", "requantize", "§3.3.3 ~", when="dgrad", of="out"),), note="straight-through ~"),
        Row("chips", (_chip("attn_operand", "operand", "forward/requantize", "forward/out", optional=True),), (),
            (_retile("out"),)),
        _linear("out", "out proj", "out proj + x0"),
        Row("chips", (), (_chip("dx1_cast", "dY", "backward/out.cast", names="dx1", optional=True),)),
        Row("ops", (), (Box("out.cast", "cast dY", "§3.3.1", when="dgrad", of="out"),)),
        Row("chips", (_chip("x1", "x1", "forward/out", "forward/ffn_norm"),), (_chip("dx1", "dx1", "backward/ffn_norm"),)),
    )  # fmt: skip


def swiglu_rows(prefix: str, label: str, source: str) -> tuple[Row, ...]:
    """gate_up, quantize, SwiGLU and down of the experts ("expert_"), the shared expert ("shared_") or a dense layer ("")."""
    gate_up, quantize, swiglu, down = (f"{prefix}{name}" for name in ("gate_up", "quantize", "swiglu", "down"))
    return (
        _linear(gate_up, f"{label}gate/up"),
        Row("chips", (_chip(f"{prefix}h", "h = gate | up", f"forward/{gate_up}", names="h"),),
            (_chip(f"{prefix}dh", "dh", f"backward/{swiglu}", names="dh"),)),
        Row("ops", (Box(quantize, "quantize", "§3.3.3", when="reported"),), note="straight-through ~"),
        Row("chips", (_chip(f"{prefix}h_cache", "cached h", f"forward/{quantize}", f"forward/{swiglu}", names="h_cache h",
                            optional=True),)),
        Row("ops", (Box(swiglu, f"{label}SwiGLU", source),), (Box(swiglu, f"{label}SwiGLU bwd", "§3.3.3 ~"),)),
        Row("chips", (_chip(f"{prefix}act", "act", f"forward/{swiglu}", f"forward/{down}", names="act"),),
            (_chip(f"{prefix}dact", "d act", f"backward/{down}", names="dact"),), (_retile(down),)),
        _linear(down, f"{label}down"),
    )  # fmt: skip


def moe_rows(shared: bool) -> tuple[Row, ...]:
    """The MoE half of a block."""
    rows = (
        _norm("ffn_norm", "FFN norm", "ffn"),
        Row("chips", (_chip("payload", "y, payload", "forward/ffn_norm", "forward/dispatch", "forward/shared_gate_up",
                            names="payload y_ffn", slot="left"),
                      _chip("y_ffn", "y for router", "forward/ffn_norm", "forward/router", slot="right")),
            (_chip("dy_ffn", "dy", "backward/ffn_norm.junction"),)),
        Row("ops", (), (Box("ffn_norm.junction", "junction of dy", "§3.3.2"),)),
        Row("chips", (), (_chip("dpayload", "dy, routed", "backward/dispatch", names="dpayload dy_ffn", slot="left"),
                          _chip("dy_router", "dy, router", "backward/router", names="dy_router dy_ffn", slot="right"))),
        Row("ops", (Box("router", "router", "§3.3.2", slot="right"),), (Box("router", "router bwd", "§3.3.2", slot="right"),),
            (Box("router", "router wgrad", "~"), _chip("dw_router", "dW", "wgrad/router", "backward/router"))),
        Row("chips", (_chip("ids", "ids", "forward/router", "forward/dispatch", slot="right"),
                      _chip("scores", "scores", "forward/router", slot="right", loose=True),
                      _chip("gate", "gate", "forward/router", "forward/combine", "forward/dispatch", slot="right", loose=True)),
            (_chip("dgate", "d gate", "backward/expert_swiglu", "backward/combine", slot="right", loose=True),)),
        Row("ops", (Box("dispatch", "dispatch →", "§3.3.3"),), (Box("dispatch", "← combine of dx", "§3.3.3"),)),
        Row("chips", (_chip("received", "received", "forward/dispatch", "forward/expert_gate_up", names="received payload"),),
            (_chip("dreceived", "d received", "backward/expert_gate_up", names="dreceived dpayload"),),
            (_retile("expert_gate_up"),)),
        *swiglu_rows("expert_", "experts ", "§3.3.3"),
        Row("chips", (_chip("expert_out", "expert out", "forward/expert_down", "forward/combine"),),
            (_chip("dexpert_out", "d out, received", "backward/combine"),), (_retile("expert_down", "_dy"),)),
        Row("ops", (Box("combine", "combine ←", "§3.3.3"),), (Box("combine", "→ dispatch of dY", "§3.3.3"),)),
        Row("chips", (), (_chip("drouted_cast", "dY", "backward/combine.cast", names="drouted",
                             optional=True),)),
        Row("ops", (), (Box("combine.cast", "cast dY", "§3.3.3", when="dgrad", of="expert_down"),)),
        Row("chips", (_chip("routed", "routed sum", "forward/combine", loose=shared),)),
    )  # fmt: skip
    if not shared:
        return (*rows, *_end())
    return (
        *rows,
        Row("chips", (), (_chip("dy_shared", "dy, shared", "backward/shared_gate_up", names="dy_shared dy_ffn"),),
            (_retile("shared_gate_up"),), broken="fb"),
        *swiglu_rows("shared_", "shared ", "§3.3.3"),
        *_cast_row("shared_down", "dshared"),
        Row("chips", (_chip("shared", "shared", "forward/shared_down"),)),
        *_end(),
    )  # fmt: skip


def dense_rows() -> tuple[Row, ...]:
    """The dense half of a block."""
    return (
        _norm("ffn_norm", "FFN norm", "ffn"),
        Row("chips", (_chip("payload", "y", "forward/ffn_norm", "forward/gate_up", names="payload y_ffn"),),
            (_chip("dy_ffn", "dy", "backward/gate_up"),), (_retile("gate_up"),)),
        *swiglu_rows("", "", "§3.3.3"),
        *_cast_row("down", "ddense"),
        Row("chips", (_chip("dense", "ffn output", "forward/down", names="dense ffn_out"),)),
        *_end(),
    )  # fmt: skip


def _cast_row(down: str, name: str) -> tuple[Row, Row]:
    return (
        Row("chips", (), (_chip(f"{down}_dy", "dY", f"backward/{down}.cast", names=name, optional=True),)),
        Row("ops", (), (Box(f"{down}.cast", "cast dY", "§3.3.1", when="dgrad", of=down),)),
    )


def _end() -> tuple[Row, Row]:
    return (
        Row("ops", (Box("residual", "x1 + ffn", "seed"),), (Box("residual", "residual bwd", "seed"),)),
        Row("chips", (_chip("x2", "x2", "forward/residual"),), (_chip("dx2", "dx2", "backward/residual"),)),
    )


def _stash(kind: str, sources: str, target: str, lane: str, *, beside: str = "", enter: int = 0, leave: int = 0) -> Edge:
    return Edge(kind, tuple(sources.split()), target, lane, leave, enter, tuple(beside.split()))


def attention_edges(latent: bool) -> tuple[Edge, ...]:
    """Rails and stashes of the attention half."""
    first_q, last_q = ("q_a", "q_b") if latent else ("q", "q")
    q_edges = (
        _stash("amber", "f:c_q", "b:q_norm", "amber1"),
        _stash("blue", "f:y_q", "w:q_b.requant", "blue1"),
        _stash("orange", "b:dc_q", "w:q_a", "dy"),
        _stash("gradient", "b:q_norm", "w:dg_q_norm", ""),
    )
    return (
        _stash("flow", "f:x0", "f:out", "left1"),
        _stash("flow", "f:y_attn", "f:kv_a", "left2"),
        _stash("flow", "f:q_out", "f:rope", "right2"),
        _stash("flow", "f:k_rope", "f:rope", "left2"),
        _stash("flow", "b:dx1", "b:attention_norm", "bleft1", enter=8),
        _stash("flow", "b:dy_from_kv", "b:attention_norm.junction", "bleft2"),
        _stash("flow", "b:rope", "b:dq", "bright2", enter=-6),
        _stash("flow", "b:rope", "b:dk_rope", "bleft2"),
        _stash("amber", "f:x0", "b:attention_norm", "amber1", enter=-8),
        *(q_edges if latent else ()),
        _stash("amber", "f:c_kv", "b:kv_norm", "amber1"),
        _stash("amber", "f:v", "b:attention", "amber1", beside="f:kr f:qr", enter=-8),
        _stash("amber", "f:attn_cache", "b:attention", "amber1", beside="f:lse", enter=8),
        _stash("blue", "f:y_attn", f"w:{first_q}.requant", "blue1"),
        _stash("blue", "f:y_attn", "w:kv_a.requant", "blue2"),
        _stash("blue", "f:y_kv", "w:kv_b.requant", "blue1"),
        _stash("blue", "f:attn_cache f:attn_operand", "w:out.requant", "blue1"),
        _stash("orange", "b:dq", f"w:{last_q}", "dy", leave=6),
        _stash("orange", "b:dc_kv", "w:kv_a", "dy", beside="b:dk_rope"),
        _stash("orange", "b:dkv", "w:kv_b", "dy"),
        _stash("orange", "b:dx1_cast b:dx1", "w:out", "dy"),
        _stash("gradient", "b:attention_norm", "w:dg_attention_norm", ""),
        _stash("gradient", "b:kv_norm", "w:dg_kv_norm", ""),
    )


def swiglu_edges(prefix: str) -> tuple[Edge, ...]:
    """Stashes of a SwiGLU feed-forward; its junction or dispatch, and so dY of `down`, are the caller's."""
    gate_up, down = f"{prefix}gate_up", f"{prefix}down"
    cached = f"f:{prefix}h_cache f:{prefix}h"
    return (
        _stash("amber", cached, f"b:{prefix}swiglu", "amber1", enter=-7),
        _stash("blue", f"f:{prefix}act {cached}", f"w:{down}.requant", "blue1"),
        _stash("orange", f"b:{prefix}dh", f"w:{gate_up}", "dy"),
    )


def moe_edges(shared: bool) -> tuple[Edge, ...]:
    """Rails and stashes of the MoE half."""
    edges = (
        _stash("flow", "f:x1", "f:residual", "left1"),
        _stash("flow", "b:residual", "b:ffn_norm", "bleft1", enter=8),
        Edge("flow", ("f:gate",), "f:expert_swiglu", "right1", leave=-7, when="reads"),
        Edge("flow", ("f:gate",), "f:combine", "right1", leave=-7, when="reads"),
        Edge("flow", ("b:expert_swiglu",), "b:dgate", "bright1", when="emits"),
        Edge("flow", ("b:combine",), "b:dgate", "bright1", when="emits"),
        _stash("amber", "f:x1", "b:ffn_norm", "amber1", enter=-8),
        _stash("amber", "f:x1", "b:router", "amber2", enter=-8),
        Edge("amber", ("f:scores",), "b:router", "amber1", enter=8, with_source=("f:ids",), below=True),
        Edge("amber", ("f:gate",), "b:expert_swiglu", "amber2", leave=7, enter=8, when="reads"),
        Edge("amber", ("f:gate",), "b:combine", "amber2", leave=7, enter=8, when="reads"),
        Edge("amber", ("f:expert_out",), "b:combine", "amber1", when="kept"),
        _stash("blue", "f:received", "w:expert_gate_up.requant", "blue1"),
        *swiglu_edges("expert_"),
        _stash("orange", "b:dexpert_out", "w:expert_down.requant_dy", "dy"),
        _stash("orange", "b:router", "w:router", ""),
        _stash("gradient", "b:ffn_norm", "w:dg_ffn_norm", ""),
    )
    if not shared:
        return edges
    return (
        *edges,
        _stash("flow", "f:payload", "f:shared_gate_up", "left2"),
        _stash("flow", "f:routed", "f:residual", "right2"),
        _stash("flow", "b:residual", "b:combine.cast", "bright2"),
        _stash("flow", "b:dy_shared", "b:ffn_norm.junction", "bleft2"),
        _stash("blue", "f:payload", "w:shared_gate_up.requant", "blue2"),
        *swiglu_edges("shared_"),
        _stash("orange", "b:shared_down_dy b:dx2", "w:shared_down", "dy"),
    )


def dense_edges() -> tuple[Edge, ...]:
    """Rails and stashes of the dense half."""
    return (
        _stash("flow", "f:x1", "f:residual", "left1"),
        _stash("flow", "b:residual", "b:ffn_norm", "bleft1", enter=8),
        _stash("amber", "f:x1", "b:ffn_norm", "amber1", enter=-8),
        _stash("blue", "f:payload", "w:gate_up.requant", "blue1"),
        *swiglu_edges(""),
        _stash("orange", "b:down_dy b:dx2", "w:down", "dy"),
        _stash("gradient", "b:ffn_norm", "w:dg_ffn_norm", ""),
    )


def block_layout(layer: str, latent: bool, shared: bool) -> tuple[tuple[Row, ...], tuple[Edge, ...]]:
    """Rows and edges of one block. layer: dense or moe."""
    rows, edges = (moe_rows(shared), moe_edges(shared)) if layer == "moe" else (dense_rows(), dense_edges())
    return (*attention_rows(latent), *rows), (*attention_edges(latent), *edges)
