"""Which tensors of a training step are equal to the bit on two devices, and whether every GEMM and cast is, given equal inputs.

    python -m dsv3fp8.observe.bits [DEVICE] [key=value …]

Runs one forward, backward and update of a model (nano unless model= is given) under recipe dsv3 with accumulator=hopper and
gemm=exact on the CPU and on DEVICE (cuda), from the same weights on the same tokens. Two tables in Markdown: the GEMMs and
casts of DEVICE, each computed again on the CPU from the inputs it had there (casts inside a fused kernel, whose input nobody
else sees, are not among them); and what every op emitted in both steps, side by side. The first table has to say 100 %. The
second shows where the devices part: at ops whose order of summation is a library's.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dsv3fp8.config import RunConfig, load_config
from dsv3fp8.kernels.backend import matmul_nt
from dsv3fp8.kernels.quantize.reference import quantize
from dsv3fp8.model.targets import count_targets
from dsv3fp8.precision import ledger
from dsv3fp8.precision.ledger import Ledger, Node, Tensors
from dsv3fp8.precision.recipe import GemmSpec
from dsv3fp8.precision.tiles import Operand, QuantizedTensor, Tile
from dsv3fp8.training.setup import build

SETTINGS = ("model=nano", "recipe=dsv3", "recipe.accumulator=hopper", "recipe.gemm=exact")
ENDS = ("weight gradient", "updated weight")
VOCABULARY, BATCH, LENGTH = 320, 2, 256


@dataclass
class Equality:
    """How many elements were compared and how many were equal to the bit."""

    compared: int = 0
    equal: int = 0

    def add(self, ours: Tensor, theirs: Tensor) -> None:
        same = _bits(ours) == _bits(theirs)
        self.compared += same.numel()
        self.equal += int(same.sum())

    def __str__(self) -> str:
        if self.equal == self.compared:
            return "100 %"
        return f"{100 * self.equal / self.compared:.2f} %"


@dataclass
class BitLedger(Ledger):
    """Keeps every reported tensor, on the CPU, and computes every FP8 GEMM and cast again there from the same inputs."""

    tensors: dict[tuple[str, str, str, str, int], Tensor] = field(default_factory=dict)
    turns: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    again: dict[str, Equality] = field(default_factory=lambda: defaultdict(Equality))

    def look(self, node: Node, column: str, reads: Tensors, emits: Tensors) -> None:
        weights = {name: given for name, given in reads.items() if name.startswith("w_")}
        for name, given in (*weights.items(), *emits.items()):
            several = [given] if isinstance(given, (Tensor, QuantizedTensor)) else given or ()
            for operand in several:
                for part, tensor in _parts(operand):
                    place = ("weights", "", f"weights{part}") if name in weights else (node.name, column, f"{name}{part}")
                    turn = self.turns[node.scope, *place]
                    self.turns[node.scope, *place] += 1
                    self.tensors[node.scope, *place, turn] = tensor.detach().cpu().clone()

    def look_at_gemm(self, spec: GemmSpec, gemm: str, operands: tuple[Operand, Operand], product: Tensor) -> None:
        a, b = operands
        if isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor):
            with ledger.unobserved():
                here = matmul_nt(_on_cpu(a), _on_cpu(b), product.dtype, spec, gemm)
            self.again[f"GEMM, {gemm}"].add(product.cpu(), here)

    def look_at_cast(self, source: Operand, cast: QuantizedTensor, groups: Tensor | None, scale: Tensor | None = None) -> None:
        tile = Tile(None, cast.tile.cols) if cast.one_scale_per_group else cast.tile
        groups, scale = (None if x is None else x.cpu() for x in (groups, scale))
        source = _on_cpu(source)
        values = source.decode() if isinstance(source, QuantizedTensor) else source
        parts = {"row_parts": cast.row_parts, "col_parts": cast.col_parts}
        here = quantize(values, cast.format, tile, cast.scale_kind, **parts, groups=groups, scale=scale)
        verb = "re-tile" if isinstance(source, QuantizedTensor) else "quantize"
        kind = f"{verb} {cast.format.name} {cast.tile} {cast.scale_kind}"
        self.again[f"{kind}, codes"].add(cast.codes.cpu(), here.codes)
        self.again[f"{kind}, scales"].add(cast.scale.cpu(), here.scale)


def _bits(x: Tensor) -> Tensor:
    """Integers of x's bits; every NaN is the same."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    if x.dtype.is_floating_point and x.element_size() > 1:
        x = torch.where(torch.isnan(x), torch.nan, x).to(x.dtype)
    return x.contiguous().view(whole)


def _parts(x: Operand) -> list[tuple[str, Tensor]]:
    if isinstance(x, QuantizedTensor):
        return [(f" {x.format.name} {x.tile}, codes", x.codes), (f" {x.format.name} {x.tile}, scales", x.scale)]
    return [(f" {str(x.dtype).removeprefix('torch.')}", x)]


def _on_cpu(x: Operand) -> Operand:
    if isinstance(x, QuantizedTensor):
        return replace(x, codes=x.codes.cpu(), scale=x.scale.cpu())
    return x.cpu()


def one_step(config: RunConfig, device: torch.device) -> tuple[BitLedger, dict[str, Tensor]]:
    """The ledger of one step on a device, and its gradients and updated weights by name, on the CPU."""
    config = replace(config, model=replace(config.model, vocab_size=VOCABULARY))
    model, optimizer = build(config, device)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    observed = BitLedger()
    with ledger.observe_ops(observed):
        losses = model(tokens.to(device), None)
        model.objective(losses, count_targets(tokens, None, config.model.mtp_depth)).backward()
    ends = {f"weight gradient {name}": p.grad.cpu().clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step(config.optimizer.lr)
    return observed, ends | {f"updated weight {name}": p.detach().cpu().clone() for name, p in model.named_parameters()}


def compare(ours: BitLedger, theirs: BitLedger) -> dict[tuple[str, str, str], dict[str, Equality]]:
    """Equality by node, column and tensor, and in it by layer, in the order of the step."""
    found: dict[tuple[str, str, str], dict[str, Equality]] = defaultdict(lambda: defaultdict(Equality))
    for key, tensor in ours.tensors.items():
        other = theirs.tensors.get(key)
        entry = found[key[1], key[2], key[3]][key[0]]
        if other is None or other.shape != tensor.shape:  # an expert got another number of tokens
            entry.compared += tensor.numel()
        else:
            entry.add(tensor, other)
    return found


def report(config: RunConfig, device: torch.device) -> Iterator[str]:
    """Both tables, line by line."""
    ours, our_ends = one_step(config, device)
    theirs, their_ends = one_step(config, torch.device("cpu"))
    yield f"Given equal inputs, {device.type} against the CPU:"
    yield ""
    yield "| op | elements | equal |"
    yield "|---|--:|--:|"
    for name, entry in sorted(ours.again.items()):
        yield f"| {name} | {entry.compared:,} | {entry} |"
    yield ""
    yield f"The whole step, {device.type} against the CPU:"
    yield ""
    found = compare(ours, theirs)
    layers = list(dict.fromkeys(layer for entries in found.values() for layer in entries))
    yield f"| node | column | tensor | {' | '.join(layer or 'outside of layers' for layer in layers)} |"
    yield "|---|---|---|" + "--:|" * len(layers)
    for (node, column, name), entries in found.items():
        yield f"| {node} | {column} | {name} | {' | '.join(str(entries.get(layer, '')) for layer in layers)} |"
    yield ""
    yield "| at the end of the step | elements | equal |"
    yield "|---|--:|--:|"
    for kind in ENDS:
        entry = Equality()
        for name, tensor in our_ends.items():
            if name.startswith(kind):
                entry.add(tensor, their_ends[name])
        yield f"| all {kind}s | {entry.compared:,} | {entry} |"


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if "=" in word]
    names = [word for word in sys.argv[1:] if "=" not in word]
    for line in report(load_config([*SETTINGS, *words]), torch.device(names[0] if names else "cuda")):
        print(line, flush=True)
