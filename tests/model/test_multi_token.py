"""Multi-token prediction: which token each depth sees and predicts, its equations, and what it shares."""

import pytest
import torch
import torch.nn.functional as F
from support import build, gradients, nano, recipe, relative, windows
from torch import Tensor

from dsv3fp8.model.multi_token import MultiTokenModule
from dsv3fp8.model.sequence import Sequences
from dsv3fp8.model.targets import Totals, count_targets, targets_at
from dsv3fp8.model.transformer import Transformer
from dsv3fp8.ops.cross_entropy import IGNORED

TEN = torch.arange(1, 11)[None]  # tokens 1 to 10: nine inputs


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_depth_d_at_position_i_predicts_token_i_plus_d_plus_1(depth: int) -> None:
    """M01: nothing rolls in from the front; the last d positions have no target."""
    targets = targets_at(TEN, None, depth)[0].tolist()
    assert targets == list(range(2 + depth, 11))
    assert count_targets(TEN, None, 2) == Totals(9, (8, 7), 1)


def test_depth_d_at_position_i_sees_token_i_plus_d() -> None:
    """M01: by the embeddings that reach each module."""
    model = build(nano(mtp_depth=2), recipe("fp32"))
    seen: list[Tensor] = []
    for module in model.mtp:
        module.register_forward_pre_hook(lambda _, args: seen.append(args[1]))
    losses = model(TEN)
    for depth, embedded in enumerate(seen, start=1):
        assert torch.equal(embedded, model.embedding[TEN[0, depth:9]])
    assert losses.totals == Totals(9, (8, 7), 1)
    assert len(losses.mtp) == 2


def test_targets_never_cross_a_document_border() -> None:
    """M03: documents of 5, 4 and 3 tokens and padding; the last 1 (main) and 2 (MTP) tokens of each are ignored."""
    documents = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3 + [-1] * 4])
    tokens = torch.arange(16)[None]
    for depth in (0, 1):
        want = []
        for start, size in ((0, 5), (5, 4), (9, 3)):
            want += [start + i + 1 + depth for i in range(size - 1 - depth)] + [IGNORED] * (1 + depth)
        want = (want + [IGNORED] * 16)[: 15 - depth]
        assert targets_at(tokens, documents, depth)[0].tolist() == want
    assert count_targets(tokens, documents, 1) == Totals(4 + 3 + 2, (3 + 2 + 1,), 1)


def written_out(model: Transformer, tokens: Tensor) -> Tensor:
    """Report Eq. 21-25 in plain torch around the model's own blocks."""

    def rms(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + model.config.norm_eps) * weight

    inputs = tokens[:, :-1]
    sequences = Sequences.of(model.config, inputs, None)
    hidden, balances = model._blocks(inputs, sequences)
    head, (batch, length) = model.head_weight, inputs.shape
    total = F.cross_entropy(rms(hidden, model.norm.weight) @ head.mT, tokens[:, 1:].flatten())
    for depth, module in enumerate(model.mtp, start=1):
        left = hidden.view(batch, -1, model.config.dim)[:, : length - depth].flatten(0, 1)
        right = model.embedding[tokens[:, depth:length]].flatten(0, 1)
        joined = torch.cat((rms(left, module.hidden_norm.weight), rms(right, module.embedding_norm.weight)), -1)
        hidden, balance = module.block(joined @ module.projection.weight.mT, sequences.first(length - depth))
        balances.append(balance)
        logits = rms(hidden, module.norm.weight) @ head.mT
        share = model.config.mtp_weight / model.config.mtp_depth
        total = total + share * F.cross_entropy(logits, tokens[:, 1 + depth :].flatten())
    return total + model.config.balance_loss / batch * sum(b for b in balances if b is not None)


@pytest.mark.parametrize(
    "sizes", [{}, {"mtp_depth": 2, "balance_loss": 0.1}, {"tied_head": True}, {"dense_layers": 2}], ids=str
)
def test_loss_and_gradients_are_those_of_the_equations(sizes: dict[str, object]) -> None:
    model = build(nano(**sizes), recipe("fp32"))
    tokens = windows(model.config)
    losses = model(tokens)
    got = model.objective(losses, losses.totals)
    want = written_out(model, tokens)
    assert got.item() == pytest.approx(want.item(), rel=1e-6)
    names, parameters = zip(*model.named_parameters(), strict=True)
    pairs = zip(*(torch.autograd.grad(t, parameters) for t in (got, want)), strict=True)
    errors = {name: relative(a, b) for name, (a, b) in zip(names, pairs, strict=True)}
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("half", ["hidden", "embedding"])
def test_the_projection_reads_hidden_first(half: str) -> None:
    """M04: [I 0] passes the normed hidden state on, [0 I] the normed embedding (the report's order)."""
    config = nano()
    module = MultiTokenModule(config, recipe("fp32"))
    torch.nn.init.zeros_(module.projection.weight)
    start = 0 if half == "hidden" else config.dim
    with torch.no_grad():
        module.projection.weight[:, start : start + config.dim] = torch.eye(config.dim)
    for parameter in module.block.parameters():
        torch.nn.init.zeros_(parameter)  # blocks add nothing to their residual
    hidden, embedded = torch.randn(6, config.dim), torch.randn(6, config.dim)
    out, _ = module(hidden, embedded, Sequences.of(config, torch.zeros(1, 6, dtype=torch.int64), None))
    want = F.rms_norm(hidden if half == "hidden" else embedded, (config.dim,), eps=config.norm_eps)
    assert torch.allclose(out, want, atol=1e-6)


def test_embedding_and_head_are_one_tensor_each() -> None:
    """M06: one entry in the optimizer's groups and the checkpoint, counted once, gradients summed over all uses."""
    untied, tied = build(nano(), recipe("fp32")), build(nano(tied_head=True), recipe("fp32"))
    with torch.no_grad():
        tied.load_state_dict({k: v for k, v in untied.state_dict().items() if k != "head"})
        untied.head.copy_(untied.embedding)
    batch = windows(untied.config)
    apart, together = gradients(untied, [batch]), gradients(tied, [batch])
    assert relative(together["embedding"], apart["embedding"] + apart["head"]) < 1e-5
    names = [name for group in tied.parameter_groups().values() for name, _ in group]
    assert len(names) == len(set(names)) == len(list(tied.parameters()))
    assert sum(name == "embedding" or "head" in name for name in names) == 1
    assert tied.parameter_counts()["total"] == untied.parameter_counts()["total"] - untied.head.numel()
    optimizer = torch.optim.AdamW(tied.parameters(), lr=0.01)
    for step in range(5):
        optimizer.zero_grad()
        tied.objective(losses := tied(windows(tied.config, seed=step)), losses.totals).backward()
        optimizer.step()
        tied.end_step(True)
    assert tied.head_weight is tied.embedding
    assert len(optimizer.state) == len(names)


@pytest.mark.parametrize("name", ["fp32", "dsv3"])
def test_a_block_used_by_two_depths_gets_the_sum_of_their_gradients(name: str) -> None:
    """M07: under FP8 too, where a weight gradient written twice would lose the first."""
    apart = build(nano(mtp_depth=2, balance_loss=0.0), recipe(name))
    apart.mtp[1].load_state_dict(apart.mtp[0].state_dict())
    shared = build(apart.config, recipe(name))
    shared.load_state_dict(apart.state_dict())
    shared.mtp[1] = shared.mtp[0]
    batch = windows(apart.config)
    two, one = gradients(apart, [batch]), gradients(shared, [batch])
    for key in (k for k in one if k.startswith("mtp.0")):
        assert relative(one[key], two[key] + two[key.replace("mtp.0", "mtp.1")]) < 1e-5, key


@pytest.mark.parametrize("length", [1, 2, 3])
def test_windows_shorter_than_the_depth_give_zero_loss_there(length: int) -> None:
    model = build(nano(mtp_depth=2), recipe("dsv3"))
    batch = windows(model.config, length=length)
    losses = model(batch)
    assert losses.totals == Totals(2 * length, (2 * (length - 1), 2 * max(length - 2, 0)), 2)
    got = gradients(model, [batch])
    assert all(torch.isfinite(g).all() for g in got.values())
    assert [bool(loss > 0) for loss in losses.mtp] == [length > 1, length > 2]
