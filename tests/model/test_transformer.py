"""The whole model: gradients that do not depend on the split, documents that do not see each other, memory, sizes."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import build, gradients, nano, recipe, relative, windows
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from dsv3fp8.config import load_config
from dsv3fp8.errors import UserError
from dsv3fp8.model import experts, linear
from dsv3fp8.model.config import ModelConfig, YarnConfig
from dsv3fp8.model.linear import RMSNorm
from dsv3fp8.model.targets import count_targets
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.ops.latent import Latent, latent_norm
from dsv3fp8.ops.residual import residual_sum


def packed_documents(rows: int, length: int) -> Tensor:
    """Documents of different lengths, some padding at the end of the last rows."""
    generator = torch.Generator().manual_seed(5)
    documents = (torch.rand(rows, length + 1, generator=generator) < 0.2).cumsum(1)
    documents[-1, -7:] = -1
    documents[-2, -1:] = -1
    return documents.to(torch.int32)


@pytest.mark.parametrize("with_documents", [False, True])
def test_any_split_into_micro_batches_gives_the_same_gradient(with_documents: bool) -> None:
    """L02, T19, T20: next token, MTP and balance loss, with unequal counts of valid targets: 1 x 8, 2 x 4, 8 x 1."""
    config = nano(balance_loss=0.05, mtp_depth=2)
    model = build(config, recipe("fp32"))
    batch = windows(config, batch=8)
    documents = packed_documents(8, 20) if with_documents else None
    results = []
    for size in (8, 4, 1):
        parts = list(batch.split(size))
        given = None if documents is None else list(documents.split(size))
        results.append(gradients(model, parts, given))  # type: ignore[arg-type]
        model.end_step(False)
    for other in results[1:]:
        errors = {name: relative(other[name], results[0][name]) for name in other}
        assert max(errors.values()) < 2e-5, errors


def test_each_part_of_the_objective_is_a_mean_over_what_is_valid() -> None:
    model = build(nano(mtp_depth=1, balance_loss=0.5, mtp_weight=0.25), recipe("fp32"))
    batch, documents = windows(model.config, batch=3), packed_documents(3, 20)
    losses = model(batch, documents)
    assert losses.totals == count_targets(batch, documents, 1)
    want = losses.loss / losses.totals.targets + 0.25 * losses.mtp[0] / losses.totals.mtp[0] + 0.5 * losses.balance / 3
    assert model.objective(losses, losses.totals).item() == pytest.approx(want.item(), rel=1e-6)


@pytest.mark.parametrize("name", ["fp32", "dsv3"])
def test_a_micro_batch_without_targets_contributes_nothing(name: str) -> None:
    """L01: all padding; the step stays finite, and so does a step that has nothing else."""
    model = build(nano(), recipe(name))
    batch, padding = windows(model.config), torch.full((2, 21), -1, dtype=torch.int32)
    alone = gradients(model, [batch])
    model.end_step(False)
    real = torch.zeros(2, 21, dtype=torch.int32)
    model.config.balance_loss = 0.0  # a mean over sequences, of which there are now four
    with_empty, only = gradients(model, [batch, batch], [real, padding]), gradients(model, [batch], [padding])
    for key, grad in only.items():
        assert torch.count_nonzero(grad) == 0, key
        if name == "fp32" and "router" not in key:
            assert relative(with_empty[key], alone[key]) < 1e-3


def test_packed_documents_are_isolated() -> None:
    """A07: a document's logits do not depend on its neighbours, and equal those of the document alone."""
    model = build(nano(), recipe("fp32"))
    tokens = windows(model.config, batch=1, length=8)
    documents = torch.tensor([[0] * 5 + [1] * 4])
    other = tokens.clone()
    other[0, :5] = (other[0, :5] + 1) % 96
    packed, changed = model.logits(tokens, documents), model.logits(other, documents)
    assert relative(packed[:, 5:], changed[:, 5:]) < 1e-6  # experts see other numbers of rows, so sums may round otherwise
    assert relative(packed[:, :5], changed[:, :5]) > 1e-3
    assert relative(packed[:, 5:], model.logits(tokens[:, 5:])) < 1e-5
    assert relative(packed[:, 5:], model.logits(tokens)[:, 5:]) > 1e-3  # without isolation they do depend


def test_gradients_of_packed_documents_are_the_sum_of_those_alone() -> None:
    """A07, M03: keys, values, targets and MTP inputs too."""
    model = build(nano(balance_loss=0.0), recipe("fp32"))
    tokens = windows(model.config, batch=1, length=8)
    documents = torch.tensor([[0] * 5 + [1] * 4])
    packed = model(tokens, documents)
    parts = [model(tokens[:, :5]), model(tokens[:, 5:])]
    weights = list(model.parameters())

    def total(losses: list) -> Tensor:
        return torch.stack([x.loss + sum(x.mtp) for x in losses]).sum()

    got, want = (torch.autograd.grad(total(losses), weights) for losses in ([packed], parts))
    assert max(relative(a, b) for a, b in zip(got, want, strict=True)) < 1e-5


def kept_bytes(model: Transformer, batch: Tensor) -> tuple[int, int]:
    """(bytes alive because of a forward pass, bytes that autograd was asked to keep), each storage once."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers(), batch]}
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    def alive() -> dict[int, int]:
        gc.collect()
        tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}

    model(batch)  # makes the weight codes
    before = alive()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        losses = model(batch)
    extra = {p: size for p, size in alive().items() if p not in before and p not in saved}
    assert losses.loss.requires_grad
    return sum(extra.values()), sum(size for p, size in saved.items() if p not in own)


@pytest.mark.parametrize("name", ["bf16", "dsv3", "rowwise"])
def test_nothing_large_is_kept_behind_autograds_back(name: str) -> None:
    """What the contract says is kept is what memory holds: no operand outlives its GEMM."""
    config = nano(dim=128, ffn=256, expert_ffn=128, mtp_depth=0, q_latent=64, kv_latent=64)
    extra, saved = kept_bytes(build(config, recipe(name)), windows(config, batch=2, length=64))
    # The exchange plan's indices, edges of a few bytes, and losses.
    assert extra < 0.03 * saved


def test_fp8_keeps_less_than_bf16() -> None:
    config = nano(dim=256, ffn=512, expert_ffn=256, mtp_depth=0, heads=4, head_v=64, head_nope=64, q_latent=128, kv_latent=128)
    batch = windows(config, batch=4, length=64)
    kept = {name: kept_bytes(build(config, recipe(name)), batch)[1] for name in ("bf16", "dsv3")}
    assert kept["dsv3"] < 0.8 * kept["bf16"]


def latent_norm_that_tells(readers: dict[str, tuple[torch.dtype, ...]]) -> Callable[..., Latent]:
    def told(x: Tensor, gamma: Tensor, eps: float, name: str, **rest: Any) -> Latent:
        made = latent_norm(x, gamma, eps, name, **rest)
        readers[name] = (made.edge.dtype,)
        return made

    return told


def test_gradients_meet_in_the_types_and_branches_in_the_order_of_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """The q_a and kv_a dgrads are summed in FP32, the router's joins BF16 ones in FP32; x1 + routed + shared in that order."""
    model = build(nano(mtp_depth=0), recipe("bf16"))
    narrow, full = torch.bfloat16, torch.float32
    readers: dict[str, tuple[torch.dtype, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm):
            name = name.partition(".1.")[2]
            module.register_forward_pre_hook(
                lambda _, args, name=name: readers.update({name: tuple(r.gradient for r in args[1])})
            )
    monkeypatch.setattr(linear, "latent_norm", latent_norm_that_tells(readers))
    sums: list[tuple[Tensor, ...]] = []
    monkeypatch.setattr(experts, "residual_sum", lambda *terms: (sums.append(terms), residual_sum(*terms))[1])
    shared: list[Tensor] = []
    model.layers[1].feed_forward.shared.down.register_forward_hook(lambda _, __, out: shared.append(out))
    model(windows(model.config))
    assert readers["attention.norm"] == (full, full)
    assert readers["q_norm"] == readers["kv_norm"] == (narrow,)
    assert readers["feed_forward.norm"] == (narrow, narrow, full)
    assert sums[0][2] is shared[0]
    assert len(sums[0]) == 3


def test_initialization_is_normal_for_matrices_one_for_norms_and_the_same_everywhere() -> None:
    config = nano(init_std=0.006)
    models = [Transformer(config, recipe("fp32")) for _ in range(2)]
    for model in models:
        model.initialize(3)
    state = models[0].state_dict()
    assert all(torch.equal(state[k], v) for k, v in models[1].state_dict().items())
    for name, parameter in models[0].named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            assert parameter.std().item() == pytest.approx(0.006, rel=0.15), name
    models[1].initialize(4)
    assert not torch.equal(state["embedding"], models[1].state_dict()["embedding"])


def test_matrices_decay_and_norms_do_not() -> None:
    groups = build(nano(), recipe("fp32")).parameter_groups()
    assert all(p.dim() == 1 and name.endswith("norm.weight") for name, p in groups["no_decay"])
    assert all(p.dim() > 1 and "norm" not in name for name, p in groups["decay"])


def preset(name: str, vocabulary: int | None = None) -> Transformer:
    config = load_config([f"model={name}"]).model
    config.vocab_size = vocabulary or config.vocab_size
    with torch.device("meta"):
        return Transformer(config, recipe("dsv3"))


def test_small_has_about_170_million_active_parameters() -> None:
    counts = preset("small", 32768).parameter_counts()
    assert 160e6 < counts["active"] < 180e6


def test_v3_671b_has_as_many_parameters_as_the_oracle() -> None:
    """671 B without the MTP module, which `transformers` does not count; 37 B active, embedding not counted."""
    with torch.device("meta"):
        oracle = DeepseekV3ForCausalLM(DeepseekV3Config(num_nextn_predict_layers=0))
    counts = preset("v3_671b").parameter_counts()
    assert counts["total"] - counts["mtp"] == sum(p.numel() for p in oracle.parameters())
    assert counts["total"] - counts["mtp"] == pytest.approx(671.0e9, rel=1e-3)
    assert counts["active"] == pytest.approx(36.6e9, rel=5e-3)


def test_v2_lite_16b_has_as_many_parameters_as_the_oracle() -> None:
    sizes = {
        "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16,
        "first_k_dense_replace": 1, "q_lora_rank": None, "moe_intermediate_size": 1408, "num_experts_per_tok": 6,
    }  # fmt: skip
    with torch.device("meta"):
        oracle = DeepseekV2ForCausalLM(DeepseekV2Config(**sizes))
    counts = preset("v2_lite_16b").parameter_counts()
    assert counts["total"] == sum(p.numel() for p in oracle.parameters()) == pytest.approx(15.7e9, rel=2e-3)


@pytest.mark.parametrize("name", ["tiny", "medium"])
def test_other_presets_build(name: str) -> None:
    assert preset(name, 1024).parameter_counts()["total"] > 1e6


@pytest.mark.parametrize("tied", [False, True])
def test_flops_per_token_are_six_per_active_matrix_element_and_causal_attention(tied: bool) -> None:
    config = nano(mtp_depth=1, tied_head=tied)
    block = 48 * 24 + 24 * 2 * 24 + 48 * (16 + 8) + 16 * 2 * 32 + 2 * 16 * 48  # q_a, q_b, kv_a, kv_b, out
    dense, moe = 3 * 48 * 72, 4 * 48 + (2 + 1) * 3 * 48 * 40  # router, two routed and one shared expert
    head, projection = 96 * 48, 2 * 48 * 48
    main, mtp = 2 * block + dense + moe + head, projection + block + moe + head
    attention = 3 * 2 * (24 + 16) * 100 / 2 * 2  # blocks, heads, qk + v, half of 100 keys, multiply and add
    want = 6 * (main + mtp) + 3 * attention
    assert build(config, recipe("fp32")).flops_per_token(100) == pytest.approx(want)


REFUSED = {
    "experts not divisible by groups": ({"experts": 8, "groups": 3}, r"model\.experts=8.*model\.groups=3"),
    "more kept than groups": ({"groups": 2, "kept_groups": 3}, r"model\.kept_groups=3 exceeds model\.groups=2"),
    "k above the kept experts": ({"experts": 8, "groups": 4, "kept_groups": 1, "top_k": 3}, r"model\.top_k=3 exceeds the 2"),
    "k above all experts": ({"experts": 4, "top_k": 5}, r"model\.top_k=5 exceeds the 4"),
    "an odd rope size": ({"head_rope": 7}, r"model\.head_rope=7.*even"),
    "more dense layers than layers": ({"layers": 2, "dense_layers": 3}, r"model\.dense_layers=3 exceeds model\.layers=2"),
    "an unknown score": ({"score": "relu"}, r"model\.score=relu"),
    "no heads": ({"heads": 0}, r"model\.heads=0"),
    "half an expert": ({"experts": 7.5}, r"model\.experts=7\.5"),
    "a negative weight": ({"mtp_weight": -0.1}, r"model\.mtp_weight=-0\.1"),
    "a context beyond yarn's table": (
        {"context": 100_000, "yarn": YarnConfig(factor=2.0, original_context=4096)}, r"model\.context=100000 exceeds",
    ),
    "a shrinking yarn": ({"yarn": YarnConfig(factor=0.5)}, r"model\.yarn\.factor=0\.5"),
    "a yarn without borders": (
        {"yarn": YarnConfig(beta_fast=0.0, beta_slow=-1.0)}, r"model\.yarn\.beta_fast=0\.0.*model\.yarn\.beta_slow=-1\.0",
    ),
    "a yarn that turns attention around": ({"yarn": YarnConfig(mscale_all_dim=-9.0)}, r"model\.yarn\.mscale_all_dim=-9\.0"),
    "one frequency for all": ({"rope_theta": 1.0}, r"model\.rope_theta=1\.0"),
    "experts that are subtracted": ({"route_scale": -1.0}, r"model\.route_scale=-1\.0"),
    "several at once": (
        {"experts": 8, "groups": 3, "kept_groups": 4, "top_k": 9, "head_rope": 7},
        r"model\.head_rope=7.*model\.experts=8.*model\.kept_groups=4 exceeds.*model\.top_k=9 exceeds the 6",
    ),
    "several that make no sense": (
        {"dim": 0, "layers": -1, "init_std": -1.0}, r"model\.dim=0.*model\.layers=-1.*model\.init_std=-1\.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_impossible_sizes_are_refused_in_one_line_with_their_keys(case: str) -> None:
    """H11."""
    sizes, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as caught:
        ModelConfig(vocab_size=64, **sizes).validate()  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_sequence_beyond_the_rope_table_is_refused() -> None:
    """H11."""
    model = build(nano(context=16), recipe("fp32"))
    with pytest.raises(UserError, match=r"17 tokens exceeds model\.context=16"):
        model(windows(model.config, length=17))
    with pytest.raises(UserError, match=r"model\.vocab_size=null"):
        Transformer(ModelConfig(), recipe("fp32"))
