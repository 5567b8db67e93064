"""The precision contract as data: what every op of a block reads, writes and keeps, and in which format, per recipe.

Written from the contract's tables (§4 forward, §5 backward, §6 recipes), not from the code: nothing here asks a recipe.
A line: column, node | computes in | reads | writes | keeps. A tensor is NAME:ROLE; the roles are spelled out per recipe:

    a        compute type                       f, i       fp32, int64
    in, inT  GEMM input, re-tiled for wgrad     in2, in2T  the same where the report takes powers of two
    w        weight codes                       out2T      the out projection's input, re-tiled from the cache
    g, gT    gradient along N, along tokens     g2, r2, r2T  the gradient that is dispatched: cast, received, re-tiled
    xin, xinT, xg, xgT   what is born or re-tiled inside the experts
    ac, sc   attention's output and SwiGLU's input as kept
    mm, dg   what fprop, and what dgrad and wgrad compute in
"""

from dsv3fp8.model.config import ModelConfig
from dsv3fp8.precision.ledger import Ledger, TensorRecord

ATTENTION = """
forward attention_norm | a | x0:a g_attention_norm:f | y_attn:in | x0:a
forward kv_a | mm | y_attn:in w_kv_a:w | c_kv:a | y_attn:in
forward kv_norm | a | c_kv:a g_kv_norm:f | y_kv:in | c_kv:a
forward kv_b | mm | y_kv:in w_kv_b:w | kv:a | y_kv:in
forward rope | a | q:a kv:a k_rope:a | q:a k:a v:a | rope_table:f
forward attention | a | q:a k:a v:a | attn_out:a lse:f attn_cache:ac? | q:a k:a v:a lse:f attn_cache:ac
forward requantize? | in | attn_cache:ac | attn_operand:in2 |
forward out | mm | attn_operand:in2 w_out:w x0:a | x1:a | attn_cache:ac
backward out.cast? | g | dx1:a | dx1:g dx1:gT |
backward out | dg | dx1:g w_out:w | dattn_out:a |
wgrad out.requant? | in | attn_operand:ac | attn_operand:out2T |
wgrad out | dg | dx1:gT attn_operand:out2T | dw_out:f |
backward attention | a | q:a k:a v:a lse:f attn_cache:ac dattn_out:a | dq:a dk:a dv:a |
backward rope | a | dq:a dk:a dv:a | dq:g dq:gT dkv:g dkv:gT dk_rope:a |
backward kv_b | dg | dkv:g w_kv_b:w | dy_kv:a |
wgrad kv_b.requant? | in | y_kv:in | y_kv:inT |
wgrad kv_b | dg | dkv:gT y_kv:inT | dw_kv_b:f |
backward kv_norm | a | dy_kv:a c_kv:a | dc_kv:g dc_kv:gT dg_kv_norm:f |
backward kv_a | dg | dc_kv:g w_kv_a:w | dy_attn_kv:f |
wgrad kv_a.requant? | in | y_attn:in | y_attn:inT |
wgrad kv_a | dg | dc_kv:gT y_attn:inT | dw_kv_a:f |
backward attention_norm.junction | f | dy_attn_q:f dy_attn_kv:f | dy_attn:a |
backward attention_norm | a | dy_attn:a x0:a dx1:a | dx0:a dg_attention_norm:f |
"""

QUERY_LATENT = """
forward q_a | mm | y_attn:in w_q_a:w | c_q:a | y_attn:in
forward q_norm | a | c_q:a g_q_norm:f | y_q:in | c_q:a
forward q_b | mm | y_q:in w_q_b:w | q:a | y_q:in
backward q_b | dg | dq:g w_q_b:w | dy_q:a |
wgrad q_b.requant? | in | y_q:in | y_q:inT |
wgrad q_b | dg | dq:gT y_q:inT | dw_q_b:f |
backward q_norm | a | dy_q:a c_q:a | dc_q:g dc_q:gT dg_q_norm:f |
backward q_a | dg | dc_q:g w_q_a:w | dy_attn_q:f |
wgrad q_a.requant? | in | y_attn:in | y_attn:inT |
wgrad q_a | dg | dc_q:gT y_attn:inT | dw_q_a:f |
"""

NO_QUERY_LATENT = """
forward q | mm | y_attn:in w_q:w | q:a | y_attn:in
backward q | dg | dq:g w_q:w | dy_attn_q:f |
wgrad q.requant? | in | y_attn:in | y_attn:inT |
wgrad q | dg | dq:gT y_attn:inT | dw_q:f |
"""

MOE = """
forward ffn_norm | a | x1:a g_ffn_norm:f | payload:in2? y_ffn:a | x1:a
forward router | f | y_ffn:f w_router:f | scores:f ids:i gate:f | x1:a scores:f ids:i chosen:f total:f shares:f frequency:f
forward dispatch | in2 | payload:in2 gate:f | received:in2 | received:in2
forward expert_gate_up | mm | received:in2 w_expert_gate_up:w | h:a |
forward expert_quantize? | sc | h:a | h_cache:sc | h_cache:sc
forward expert_swiglu | a | h:sc gate:f | act:xin | h:sc-
forward expert_down | mm | act:xin w_expert_down:w | expert_out:a | SCALE
forward combine | f | expert_out:a | routed:a | gate:f
forward shared_gate_up | mm | payload:in2 w_shared_gate_up:w | h:a | payload:in2
forward shared_quantize? | sc | h:a | h_cache:sc | h_cache:sc
forward shared_swiglu | a | h:sc | act:in | h:sc-
forward shared_down | mm | act:in w_shared_down:w | shared:a | h:sc SCALE
forward residual | f | x1:a branches:a | x2:a |
backward residual | a | dx2:a | dx2:a |
backward combine.cast? | g2 | drouted:a | drouted:g2 |
backward combine | r2 | drouted:g2 | dexpert_out:r2 |
backward expert_down | dg | dexpert_out:r2 w_expert_down:w | dact:a |
wgrad expert_down.requant_dy? | g2 | dexpert_out:r2 | dexpert_out:r2T |
wgrad expert_down.requant? | in | act:xin | act:xinT |
wgrad expert_down | dg | dexpert_out:r2T act:xinT | dw_expert_down:f |
backward expert_swiglu | a | h:sc dact:a gate:f | dh:xg dh:xgT dgate:f |
backward expert_gate_up | dg | dh:xg w_expert_gate_up:w | dreceived:a |
wgrad expert_gate_up.requant? | in | received:in2 | received:xin2T |
wgrad expert_gate_up | dg | dh:xgT received:xin2T | dw_expert_gate_up:f |
backward dispatch | f | dreceived:a | dpayload:a |
backward shared_down.cast? | g | dshared:a | dshared:g dshared:gT |
backward shared_down | dg | dshared:g w_shared_down:w | dact:a |
wgrad shared_down.requant? | in | act:in | act:inT |
wgrad shared_down | dg | dshared:gT act:inT | dw_shared_down:f |
backward shared_swiglu | a | h:sc dact:a | dh:g dh:gT |
backward shared_gate_up | dg | dh:g w_shared_gate_up:w | dy_shared:a |
wgrad shared_gate_up.requant? | in | payload:in2 | payload:in2T |
wgrad shared_gate_up | dg | dh:gT payload:in2T | dw_shared_gate_up:f |
backward router | f | dlogits:f w_router:f | dy_router:f |
wgrad router | f | dlogits:f y_ffn:f | dw_router:f |
backward ffn_norm.junction | f | dpayload:a dy_shared:a dy_router:f | dy_ffn:a |
backward ffn_norm | a | dy_ffn:a x1:a dx2:a | dx1:a dg_ffn_norm:f |
"""

DENSE = """
forward ffn_norm | a | x1:a g_ffn_norm:f | y_ffn:in2 | x1:a
forward gate_up | mm | y_ffn:in2 w_gate_up:w | h:a | y_ffn:in2
forward quantize? | sc | h:a | h_cache:sc | h_cache:sc
forward swiglu | a | h:sc | act:in | h:sc-
forward down | mm | act:in w_down:w | dense:a | h:sc SCALE
forward residual | f | x1:a branches:a | x2:a |
backward residual | a | dx2:a | dx2:a |
backward down.cast? | g | ddense:a | ddense:g ddense:gT |
backward down | dg | ddense:g w_down:w | dact:a |
wgrad down.requant? | in | act:in | act:inT |
wgrad down | dg | ddense:gT act:inT | dw_down:f |
backward swiglu | a | h:sc dact:a | dh:g dh:gT |
backward gate_up | dg | dh:g w_gate_up:w | dy_ffn:a |
wgrad gate_up.requant? | in | y_ffn:in2 | y_ffn:in2T |
wgrad gate_up | dg | dh:gT y_ffn:in2T | dw_gate_up:f |
backward ffn_norm | a | dy_ffn:a x1:a dx2:a | dx1:a dg_ffn_norm:f |
"""

DSV3 = {
    "a": "bf16", "f": "fp32", "i": "int64", "mm": "e4m3", "dg": "e4m3",
    "in": "e4m3 1x128 fp32", "inT": "e4m3 128x1 fp32", "in2": "e4m3 1x128 pow2", "in2T": "e4m3 128x1 pow2",
    "out2T": "e4m3 128x1 pow2", "w": "e4m3 128x128 fp32", "g": "e4m3 1x128 fp32", "gT": "e4m3 128x1 fp32",
    "g2": "e4m3 1x128 pow2", "r2": "e4m3 1x128 pow2", "r2T": "e4m3 128x1 pow2",
    "xin": "e4m3 1x128 fp32", "xinT": "e4m3 128x1 fp32", "xin2T": "e4m3 128x1 pow2",
    "xg": "e4m3 1x128 fp32", "xgT": "e4m3 128x1 fp32", "ac": "e5m6 1x128 pow2", "sc": "e4m3 1x128 fp32",
}  # fmt: skip
GRADIENTS = ("g", "gT", "g2", "r2", "r2T", "xg", "xgT")
# One scale per row along K, all fp32 but the attention cache's, which its re-tiled copy takes over.
ROWWISE = DSV3 | {
    **dict.fromkeys(("in", "in2", "w", "g", "g2", "r2", "xin", "xg"), "e4m3 1xall fp32"),
    **dict.fromkeys(("inT", "in2T", "gT"), "e4m3 allx1 fp32"),
    **dict.fromkeys(("xinT", "xin2T", "xgT", "r2T"), "e4m3 expertx1 fp32"),
    "out2T": "e4m3 allx1 pow2",
}
# One scale per tensor serves every orientation; what is dispatched has one scale, what is born in the experts one each.
TENSORWISE = DSV3 | {
    **dict.fromkeys(("in", "in2", "w", "g", "g2", "r2", "inT", "in2T", "gT"), "e4m3 allxall fp32"),
    **dict.fromkeys(("xin", "xg", "xinT", "xin2T", "xgT", "r2T"), "e4m3 expertxall fp32"),
    "out2T": "e4m3 allxall pow2",
}
PLAIN = dict.fromkeys(DSV3, "bf16") | {"f": "fp32", "i": "int64"}

ROLES = {
    "fp32": dict.fromkeys(DSV3, "fp32") | {"i": "int64"},
    "bf16": PLAIN,
    "dsv3": DSV3,
    "dsv3_pow2": {role: text.replace(" fp32", " pow2") for role, text in DSV3.items()},
    "hybrid": DSV3 | {role: DSV3[role].replace("e4m3", "e5m2") for role in (*GRADIENTS, "dg")},
    "bf16_cache": DSV3 | {"ac": "bf16", "sc": "bf16"},
    # What is dispatched arrives with a scale in every row.
    "blockwise_grad": DSV3
    | dict.fromkeys(("g", "gT", "xg", "xgT"), "e4m3 128x128 fp32")
    | {"g2": "e4m3 128x128 pow2", "r2T": "e4m3 128x128 pow2"},
    "rowwise": ROWWISE,
    "tensorwise": TENSORWISE,
    "delayed": TENSORWISE,
    "static": TENSORWISE,
}
KEEPS_SCALES = ("delayed", "static")  # forward's scale of what backward makes again

Line = tuple[str, frozenset[str], frozenset[str], frozenset[str]]
"""What a node computes in, and the tensors it reads, writes and keeps, as `name: format tile scale`."""


def expected(recipe: str, dense: bool, latent: bool) -> dict[tuple[str, str], Line]:
    """(column, node) -> its line of the contract."""
    roles = ROLES[recipe]
    lines = (ATTENTION + (QUERY_LATENT if latent else NO_QUERY_LATENT) + (DENSE if dense else MOE)).splitlines()
    table: dict[tuple[str, str], Line] = {}
    for text in filter(None, lines):
        head, computes, reads, writes, keeps = (part.strip() for part in text.split("|"))
        column, node = head.split()
        read, written, kept = (_tensors(part, recipe) for part in (reads, writes, keeps))
        if node.endswith("?") and not _has_box(node, roles, read, written):
            continue
        table[column, node.rstrip("?")] = (roles[computes].split()[0], read, written, kept)
    return table


def _has_box(node: str, roles: dict[str, str], read: frozenset[str], written: frozenset[str]) -> bool:
    """Boxes that only some recipes have: a cast of what stays as it is does not exist."""
    if node.rstrip("?") == "requantize":
        return roles["in"] != roles["a"]
    return {t.split(":")[1] for t in read} != {t.split(":")[1] for t in written}


def _tensors(part: str, recipe: str) -> frozenset[str]:
    roles, found = ROLES[recipe], set()
    for word in part.split():
        if word == "SCALE":
            found |= {"act_scale: fp32"} if recipe in KEEPS_SCALES else set()
            continue
        name, role = word.split(":")
        boxed = roles["sc"] != roles["a"]
        if role.endswith("-"):  # kept by the quantize box where there is one
            if boxed:
                continue
            role = "sc"
        if role.endswith("?"):  # written only where it is a tensor of its own
            role = role[:-1]
            if roles[role] == roles["a"]:
                continue
        if name == "h" and role == "sc" and boxed:
            name = "h_cache"
        found.add(f"{name}: {roles[role]}")
    return frozenset(found)


def violations(ledger: Ledger, scope: str, recipe: str, dense: bool, latent: bool) -> list[str]:
    """Where the observed layer departs from the contract, one line each; and what autograd keeps that nobody reported."""
    want = expected(recipe, dense, latent)
    seen = {(r.column, r.node): r for r in ledger.records if r.scope == scope}
    found = [f"{where} did not run" for where in want.keys() - seen.keys()]
    found += [f"{where} is not in the contract" for where in seen.keys() - want.keys()]
    for where in want.keys() & seen.keys():
        record, line = seen[where], want[where]
        parts = zip((record.operands, record.outputs, record.kept), line[1:], strict=True)
        got = (record.computes_in, *(frozenset(_text(t, part) for t in tensors) for tensors, part in parts))
        for what, contract, observed in zip(("computes in", "reads", "writes", "keeps"), line, got, strict=True):
            if contract != observed:
                apart = sorted(contract ^ observed) if isinstance(contract, frozenset) else (contract, observed)
                found.append(f"{where} {what}: {apart}")
    found += [f"kept but reported by no op: {saved}" for saved in ledger.unreported]
    return found + [f"reported as kept, but is not: {name}" for name in ledger.unsaved]


def _text(t: TensorRecord, contract: frozenset[str]) -> str:
    words = [word for word in (t.format, t.tile, t.scale) if word]
    as_fp32 = f"{t.name}: {' '.join([*words[:-1], 'fp32'])}"
    # One scale alone may be a power of two by chance: an amax of 7 * 2^n over 448.
    if t.tile in ("allxall", "expertxall") and t.scale == "pow2" and as_fp32 in contract:
        return as_fp32
    return f"{t.name}: {' '.join(words)}"


def per_token(config: ModelConfig, fp8: bool, swiglu_output: bool, recompute: str = "none") -> int:
    """The table's column "kept for backward", added up; scores and ids not counted.

    norms: of the norms' outputs only the received copies stay, which another rank would have to send again.
    norms_and_up: q, k, v go too; what they are made of are the BF16 latents and k_rope, here counted on its own.
    """

    def stored(width: int) -> int:  # E4M3 codes and fp32 scales of 1x128 tiles, or BF16
        return width + 4 * (width // 128) if fp8 else 2 * width

    heads, outputs = config.heads, config.heads * config.head_v
    residuals = 2 * 2 * config.dim
    latents = [width for width in (config.q_latent, config.kv_latent) if width]
    rest = 2 * sum(latents)
    if recompute == "none":
        rest += 2 * stored(config.dim) + sum(stored(width) for width in latents)
    attention = 2 * config.head_rope if recompute == "norms_and_up" else 2 * heads * (2 * config.head_qk + config.head_v)
    attention += 4 * heads
    attention += outputs * 3 // 2 + 4 * (outputs // 128) if fp8 else 2 * outputs
    received = config.top_k * stored(config.dim)
    hidden = (config.top_k + config.shared_experts) * stored(config.expert_ffn)
    return residuals + rest + attention + received + hidden * (3 if swiglu_output else 2)
