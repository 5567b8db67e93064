"""What really ran: while a ledger is open, every op reports its operands, outputs and what it keeps, as they are in memory.

Nothing is taken from the recipe: a format is read off the dtype, a tile off the scale grid, a scale kind off the bits of
the scales, the type a GEMM computes in off what the kernel was handed. Saved-tensor hooks hold what autograd keeps
against what the ops reported as kept. Off (the default) an op pays one `is None`; on, it changes no bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from dsv3fp8.precision.formats import E5M6
from dsv3fp8.precision.gathered import GatheredWeight
from dsv3fp8.precision.recipe import GemmSpec
from dsv3fp8.precision.tiles import Operand, QuantizedTensor, ceil_div, grid_size
from dsv3fp8.precision.watcher import Watcher

_FORMATS = {
    torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.bfloat16: "bf16", torch.float32: "fp32",
    torch.float64: "fp64", torch.float16: "fp16",
}  # fmt: skip

_GEMMS = {"forward": "fprop", "backward": "dgrad", "wgrad": "wgrad"}

Tensors = Mapping[str, Operand | Sequence[Operand] | None]
"""Tensors by name; several of one name stand in a sequence (two orientations of a gradient), None is left out."""


@dataclass(frozen=True)
class TensorRecord:
    """One tensor as it was in memory.

    format: e4m3, e5m2, e5m6, bf16, fp32, int64, bool. tile: rows x columns that share a scale, "expert" for all rows of
    an expert; None without scales. scale: fp32 or pow2 (all scales powers of two). bytes: codes and scales as stored; of
    a kept tensor, its whole storage. padding: how many of them belong to inert rows between experts. again: an op before
    this one keeps the same storage, so its bytes are counted there.
    """

    name: str
    format: str
    tile: str | None
    scale: str | None
    shape: tuple[int, ...]
    bytes: int
    padding: int = 0
    again: bool = False


@dataclass(frozen=True)
class OpRecord:
    """One op of one column: forward, backward or wgrad.

    scope: the layer. wire: bytes that would travel. backend: what the kernel was. fused: casts riding on this op, "e4m3",
    or "e4m3+T" where both orientations leave it. held: index tensors the op holds beside autograd.
    """

    scope: str
    node: str
    column: str
    computes_in: str
    operands: tuple[TensorRecord, ...] = ()
    outputs: tuple[TensorRecord, ...] = ()
    kept: tuple[TensorRecord, ...] = ()
    wire: int = 0
    backend: str = "torch"
    fused: tuple[str, ...] = ()
    held: tuple[TensorRecord, ...] = ()


@dataclass(frozen=True)
class Saved:
    """One storage that autograd keeps: where it was saved, what it looked like, and its bytes."""

    scope: str
    format: str
    shape: tuple[int, ...]
    bytes: int


@dataclass
class Ledger:
    """records: every op in order. saved: every storage autograd kept, once, parameters apart.

    unreported: saved storages that no op reported. unsaved: what an op reported as kept and autograd does not keep.
    """

    records: list[OpRecord] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    unreported: list[Saved] = field(default_factory=list)
    unsaved: list[str] = field(default_factory=list)
    scope: str = ""

    def __post_init__(self) -> None:
        self._kernels: dict[tuple[str, str], list[tuple[str, str]]] = {}
        self.keeping = True  # False while no graph is built: nothing is kept then
        self._parameters: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # by address
        self._seen: dict[int, Saved] = {}  # storages of the running forward: autograd's, and the ops'
        self._kept: dict[int, str] = {}

    def note_kernel(self, op: str, gemm: str, backend: str, *operands: Operand) -> None:
        """The fprop, dgrad or wgrad of an op was handed these operands; the op's own report follows."""
        self._kernels.setdefault((op, gemm), []).append((backend, _computes_in(operands)))

    def look(self, node: Node, column: str, reads: Tensors, emits: Tensors) -> None:
        """Called with what an op reported, values and all: for ledgers that look at them. This one does not."""

    def look_at_gemm(self, spec: GemmSpec, gemm: str, operands: tuple[Operand, Operand], product: Tensor) -> None:
        """Likewise with what a GEMM's kernel read and gave."""

    def look_at_cast(self, source: Operand, cast: QuantizedTensor, groups: Tensor | None, scale: Tensor | None = None) -> None:
        """Likewise with what a quantizing kernel read, the experts' groups and a given scale included, and gave."""

    def find(self, node: str, column: str = "forward", scope: str | None = None) -> list[OpRecord]:
        """Records of a node, oldest first; scope None takes every layer."""
        return [r for r in self.records if (r.node, r.column) == (node, column) and scope in (None, r.scope)]

    def kept_bytes(self, scope: str | None = None, padding: bool = False) -> int:
        """Bytes kept for backward, every storage once; padding: inert rows too."""
        kept = [t for r in self.records if scope in (None, r.scope) for t in r.kept if not t.again]
        return sum(t.bytes if padding else t.bytes - t.padding for t in kept)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, ready for JSON."""
        names = ("records", "saved", "unreported", "unsaved")
        return {name: [dataclasses.asdict(x) if name != "unsaved" else x for x in getattr(self, name)] for name in names}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Ledger:
        def tensors(found: Any) -> tuple[TensorRecord, ...]:
            return tuple(TensorRecord(**{**t, "shape": tuple(t["shape"])}) for t in found)

        def op(found: Mapping[str, Any]) -> OpRecord:
            parts = {name: tensors(found[name]) for name in ("operands", "outputs", "kept", "held")}
            return OpRecord(**{**found, **parts, "fused": tuple(found["fused"])})

        def saved(found: Any) -> list[Saved]:
            return [Saved(**{**s, "shape": tuple(s["shape"])}) for s in found]

        return Ledger([op(r) for r in data["records"]], saved(data["saved"]), saved(data["unreported"]), list(data["unsaved"]))

    def settle(self) -> None:
        """Holds what autograd keeps of the forward so far against what its ops reported."""
        self.unreported += [saved for key, saved in self._seen.items() if key not in self._kept]
        self.unsaved += [name for key, name in self._kept.items() if key not in self._seen and not self._of_parameter(key)]
        self._seen, self._kept = {}, {}

    def pack(self, t: Tensor) -> Tensor:
        """The hook autograd calls on everything it saves."""
        if isinstance(t, GatheredWeight):
            return t  # the shell of a parameter: it keeps nothing of what was gathered
        key = t.untyped_storage().data_ptr()
        if isinstance(t, nn.Parameter):
            self._parameters[key] = t
        elif t.untyped_storage().nbytes() and key not in self._seen and not self._of_parameter(key):
            self._seen[key] = Saved(self.scope, _format(t), tuple(t.shape), t.untyped_storage().nbytes())
            self.saved.append(self._seen[key])
        # An op's own output would hold the graph that holds it.
        return t if t.grad_fn is None else t.detach()

    def _of_parameter(self, key: int) -> bool:
        """Whether a parameter lies at this address still: a gathered one is freed, and others take its place."""
        parameter = self._parameters.get(key)
        return parameter is not None and parameter.untyped_storage().data_ptr() == key

    def kept_record(self, where: str, record: TensorRecord, x: Operand, inert: float) -> TensorRecord | None:
        """record as something kept: bytes of its storages, counted once; None for parameters and without a graph."""
        if not self.keeping:
            return None
        parts = [x.codes, x.scale] if isinstance(x, QuantizedTensor) else [x]
        stored = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in parts}
        stored = {key: size for key, size in stored.items() if size and not self._of_parameter(key)}
        if not stored and any(t.nbytes > 0 for t in parts):
            return None
        new = {key: size for key, size in stored.items() if key not in self._kept}
        again = bool(stored) and not new
        self._kept |= dict.fromkeys(new, f"{where}: {record.name}")
        size = sum((new or stored).values())  # codes of its own may share another tensor's scale
        return replace(record, bytes=size, padding=round(size * inert), again=again)

    def take_kernels(self, op: str, gemm: str) -> tuple[str, str] | None:
        """(backends, what they computed in) of this op's kernels since its last report."""
        found = self._kernels.pop((op, gemm), None)
        if not found:
            return None
        backends, types = ("+".join(sorted(set(column))) for column in zip(*found, strict=True))
        return backends, types


_ledger: Watcher[Ledger] = Watcher()


def active() -> Ledger | None:
    return _ledger.current


@contextmanager
def observe_ops(into: Ledger | None = None) -> Iterator[Ledger]:
    """While open, ops of this process report to the ledger it yields, `into` or a new one. Run forward and backward inside."""
    ledger = into if into is not None else Ledger()
    with _ledger.be(ledger):
        with torch.autograd.graph.saved_tensors_hooks(ledger.pack, lambda t: t):
            yield ledger
        ledger.settle()


def unobserved() -> AbstractContextManager[None]:
    """While open, ops report to nobody: for what a ledger computes itself."""
    return _ledger.be(None)


def enter(scope: str) -> None:
    """From here on, forward ops belong to this layer; "" for what stands outside of layers."""
    if (ledger := _ledger.current) is not None:
        ledger.scope, ledger.keeping = scope, torch.is_grad_enabled()


@dataclass(frozen=True)
class Node:
    """An op's place in the model. Taken in forward, so that backward, which autograd calls, knows it too."""

    ledger: Ledger
    scope: str
    name: str

    def at(self, name: str) -> Node:
        """Another box of the same op and layer."""
        return replace(self, name=name)

    def report(
        self,
        column: str,
        computes_in: Operand | None,
        reads: Tensors,
        emits: Tensors,
        keeps: Tensors | None = None,
        *,
        wire: int = 0,
        fused: tuple[str, ...] = (),
        holds: Tensors | None = None,
        inert: float = 0.0,
    ) -> None:
        """Adds one record. computes_in: a tensor of the type computed in; what its kernels were handed goes before.

        inert: the share of kept rows that belong to no token.
        """
        ledger = self.ledger
        if ledger is not _ledger.current:
            return
        if column != "forward":
            ledger.settle()
        plain = _computes_in((computes_in,) if computes_in is not None else ())
        ledger.look(self, column, reads, emits)
        backend, computed = ledger.take_kernels(self.name, _GEMMS[column]) or ("torch", plain)
        record = OpRecord(
            self.scope, self.name, column, computed, _records(reads), _records(emits),
            _kept(self, keeps or {}, inert), wire, backend, fused, _records(holds or {}),
        )  # fmt: skip
        ledger.records.append(record)


def here(name: str) -> Node | None:
    """The running op's place, None while no ledger is open."""
    return None if (ledger := _ledger.current) is None else Node(ledger, ledger.scope, name)


def amend(
    node: Node,
    column: str,
    emits: Tensors,
    keeps: Tensors | None = None,
    *,
    instead_of: str | None = None,
    fused: tuple[str, ...] = (),
) -> None:
    """Adds to the last record of a node: a cast that rides on it runs later here than in a fused kernel.

    instead_of: an output that only the cast read, which a fused kernel would not write.
    """
    ledger = node.ledger
    if ledger is not _ledger.current:
        return
    ledger.look(node, column, {}, emits)
    for i in reversed(range(len(ledger.records))):
        old = ledger.records[i]
        if (old.scope, old.node, old.column) == (node.scope, node.name, column):
            outputs = tuple(t for t in old.outputs if t.name != instead_of or t.format in ("e4m3", "e5m2"))
            kept = _kept(node, keeps or {}, 0.0)
            casts = (*old.fused, *(cast for cast in fused if cast not in old.fused))
            ledger.records[i] = replace(old, outputs=outputs + _records(emits), kept=old.kept + kept, fused=casts)
            return


def _kept(node: Node, tensors: Tensors, inert: float) -> tuple[TensorRecord, ...]:
    where = f"{node.scope} {node.name}".strip()
    found = (node.ledger.kept_record(where, describe(name, x), x, inert) for name, x in _flat(tensors))
    return tuple(record for record in found if record is not None)


def _records(tensors: Tensors) -> tuple[TensorRecord, ...]:
    return tuple(describe(name, x) for name, x in _flat(tensors))


def _flat(tensors: Tensors) -> Iterator[tuple[str, Operand]]:
    for name, given in tensors.items():
        if isinstance(given, (QuantizedTensor, Tensor)):
            yield name, given
        elif given is not None:
            yield from ((name, x) for x in given)


def describe(name: str, x: Operand) -> TensorRecord:
    """A tensor's record, read off its memory."""
    if not isinstance(x, QuantizedTensor):
        return TensorRecord(name, _format(x), None, None, tuple(x.shape), x.numel() * x.element_size())
    return TensorRecord(name, _quantized_format(x), _tile(x), _scale_kind(x.scale), x.shape, x.nbytes)


def _format(x: Tensor) -> str:
    return _FORMATS.get(x.dtype, str(x.dtype).removeprefix("torch."))


def _quantized_format(x: QuantizedTensor) -> str:
    packed = x.codes.dtype == torch.uint8 and x.codes.shape[-1] == ceil_div(x.shape[-1], 2) * 3
    return E5M6.name if packed else _format(x.codes)


def _tile(x: QuantizedTensor) -> str:
    rows, cols = x.shape[-2:]
    want = (grid_size(rows, x.tile.rows, x.row_parts), grid_size(cols, x.tile.cols, x.col_parts))
    if tuple(x.scale.shape[-2:]) != want:
        raise ValueError(f"a {rows}x{cols} matrix with tiles {x.tile} has {want} scales, not {tuple(x.scale.shape[-2:])}")
    return str(x.tile).replace("128x", "expertx", 1) if x.one_scale_per_group else str(x.tile)


def _scale_kind(scale: Tensor) -> str:
    """pow2 if no finite scale has a mantissa bit set, else fp32. All-zero tiles have scale 1 under either kind."""
    bits = scale[torch.isfinite(scale)].view(torch.int32)
    return "fp32" if bool(((bits & 0x7FFFFF) != 0).any()) else "pow2"


def _computes_in(operands: Sequence[Operand]) -> str:
    """The type of an op on these operands: the wider of two FP8 formats; fp32 where only one is FP8, which decodes."""
    formats = {_quantized_format(x) if isinstance(x, QuantizedTensor) else _format(x) for x in operands}
    if len(formats) == 1:
        return formats.pop()
    return "e5m2" if formats == {"e4m3", "e5m2"} else "fp32" if formats else "none"
