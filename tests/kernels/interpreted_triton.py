"""The Triton kernels in Triton's interpreter, on the CPU: run by test_triton_interpreted.py in a process of its own.

Three of the interpreter's operations are not the GPU's. Its casts from fp32 truncate and wrap around, so they are replaced
here by clip and ml_dtypes. Its fma rounds twice and its dot sums in fp32 in any order: GEMMs are given numbers whose sums
are exact, which shows that every code meets its scale; what the tensor core adds is left to the GPU tests.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import triton.runtime.interpreter as interpreter
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsv3fp8.kernels.gemm import triton as gemm
from dsv3fp8.kernels.gemm import triton_grouped as grouped
from dsv3fp8.kernels.quantize import reference
from dsv3fp8.kernels.quantize import triton as kernels
from dsv3fp8.precision.formats import E4M3, E5M2, E5M6, Format
from dsv3fp8.precision.tiles import BLOCK_128, COLUMN_128, ROW_128, QuantizedTensor, Tile, ceil_div

NUMPY = {
    "fp8e4nv": ml_dtypes.float8_e4m3fn, "fp8e5": ml_dtypes.float8_e5m2, "bf16": ml_dtypes.bfloat16, "fp16": np.float16,
    "fp32": np.float32,
}  # fmt: skip
LARGEST = {"fp8e4nv": 448.0, "fp8e5": 57344.0}


def convert(data: Any, source: Any, target: Any, _rounding: Any) -> Any:
    """As sm_90 casts: to nearest even, float8 saturating, NaN as 0x7f."""
    values = np.frombuffer(data.tobytes(), dtype=NUMPY[source.name]).reshape(data.shape).astype(np.float32)
    limit = LARGEST.get(target.name)
    with np.errstate(all="ignore"):
        cast = (values if limit is None else np.clip(values, -limit, limit)).astype(NUMPY[target.name])
    bits = cast.view(f"uint{target.primitive_bitwidth}")
    return bits if limit is None else np.where(np.isnan(values), 0x7F, bits).astype(np.uint8)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Right casts, and memory that is not zero by chance: NaN or 0xff wherever a kernel has yet to write."""
    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def check(got: QuantizedTensor, want: QuantizedTensor) -> None:
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(got.scale.view(torch.int32), want.scale.view(torch.int32))
    for name in ("shape", "tile", "format", "scale_kind", "row_parts", "col_parts", "one_scale_per_group"):
        assert getattr(got, name) == getattr(want, name)


def same_values(got: Tensor, want: Tensor) -> None:
    assert torch.equal(torch.isnan(got), torch.isnan(want))
    assert torch.equal(got.nan_to_num(0).float().view(torch.int32), want.nan_to_num(0).float().view(torch.int32))


def draw(rows: int, cols: int, spread: float, seed: int) -> Tensor:
    """Values of very unlike sizes, a row and a column of zeros, -0, NaN and infinities where there is room."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (torch.randn(rows, 1, generator=generator), torch.randn(cols, generator=generator))
    x = torch.randn(rows, cols, generator=generator) * torch.exp(spread * sizes[0]) * torch.exp(spread * sizes[1])
    x[0, 0] = -0.0
    if rows > 3 and cols > 3:
        x[1], x[:, 2] = 0, 0
        x[rows // 2, cols // 3], x[rows - 1, cols - 1], x[rows // 3, 0] = torch.nan, torch.inf, -torch.inf
    return x


CASTS = [(E4M3, ROW_128), (E4M3, COLUMN_128), (E4M3, BLOCK_128), (E5M2, ROW_128), (E5M2, COLUMN_128), (E5M6, ROW_128)]


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 140), cols=st.integers(1, 140), cast=st.sampled_from(CASTS), kind=st.sampled_from(["fp32", "pow2"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]), spread=st.sampled_from([0.5, 9.0]),
    seen=st.sampled_from(["plain", "transposed", "stepped", "repeated"]), parts=st.sampled_from([(1, 1), (2, 1), (1, 2)]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_quantizes_as_the_reference_does(
    rows: int, cols: int, cast: tuple[Format, Tile], kind: str, dtype: torch.dtype, spread: float, seen: str,
    parts: tuple[int, int], seed: int,
) -> None:  # fmt: skip
    fmt, tile = cast
    rows, cols = rows * parts[0], cols * parts[1] * (parts[1] if fmt is E5M6 else 1)
    x = draw(2 * rows, 2 * cols, spread, seed).to(dtype)
    if seen == "transposed":
        x = x[:cols, :rows].contiguous().mT
    else:
        x = {"plain": x[:rows, :cols].contiguous(), "stepped": x[::2, 1::2], "repeated": x[:1, :cols].expand(rows, cols)}[seen]
    both = {"row_parts": parts[0], "col_parts": parts[1]}
    got = kernels.quantize(x, fmt, tile, kind, **both)
    check(got, reference.quantize(x, fmt, tile, kind, **both))
    if tile == ROW_128:
        for to in (ROW_128, COLUMN_128, BLOCK_128):
            check(kernels.retile(got, to, fmt=E4M3), reference.retile(got, to, fmt=E4M3))
        same_values(kernels.decode(got, dtype), got.decode().to(dtype))


@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 200), cols=st.integers(1, 200), fmt=st.sampled_from([E4M3, E5M2]),
    kind=st.sampled_from(["fp32", "pow2"]), dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    parts=st.sampled_from([1, 2]), seed=st.integers(0, 99),
)  # fmt: skip
def test_two_casts_from_one_read_are_the_two_casts(
    rows: int, cols: int, fmt: Format, kind: str, dtype: torch.dtype, parts: int, seed: int
) -> None:
    x = draw(rows * parts, cols * parts, 3.0, seed).to(dtype)
    for got, tile in zip(kernels.quantize_both(x, fmt, kind, col_parts=parts), (ROW_128, COLUMN_128), strict=True):
        check(got, reference.quantize(x, fmt, tile, kind, col_parts=parts))
    stack = torch.stack((x, 2 * x.flip(0)))
    cast, turned = kernels.quantize_mirrored(stack, fmt, kind, row_parts=parts)
    want = reference.quantize(stack, fmt, BLOCK_128, kind, row_parts=parts)
    check(cast, want)
    check(turned, want.transposed())
    assert cast.codes.is_contiguous()
    assert turned.codes.is_contiguous()
    assert turned.scale.is_contiguous()


WIDE = [Tile(1, None), Tile(None, 1), Tile(None, None)]


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 200), cols=st.integers(1, 200), tile=st.sampled_from(WIDE), fmt=st.sampled_from([E4M3, E5M2]),
    kind=st.sampled_from(["fp32", "pow2"]), dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    parts=st.sampled_from([(1, 1), (2, 1), (1, 2)]), poisoned=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_one_scale_for_a_row_a_column_or_a_matrix(
    rows: int, cols: int, tile: Tile, fmt: Format, kind: str, dtype: torch.dtype, parts: tuple[int, int], poisoned: bool,
    seed: int,
) -> None:  # fmt: skip
    x = draw(rows * parts[0], cols * parts[1], 3.0, seed).to(dtype)
    x = x if poisoned else x.nan_to_num(0, 0, 0)
    stack, both = torch.stack((x, 2 * x.flip(0))), {"row_parts": parts[0], "col_parts": parts[1]}
    for values in (x, stack):
        got, want = kernels.quantize(values, fmt, tile, kind, **both), reference.quantize(values, fmt, tile, kind, **both)
        check(got, want)
        assert got.codes.mT.is_contiguous() if tile.cols == 1 else got.codes.is_contiguous()
    if tile.cols is None:
        for to in (COLUMN_128, *WIDE):
            check(kernels.retile(got, to, "fp32"), reference.retile(want, to, "fp32"))
    kept = reference.quantize(x, E4M3, ROW_128, **both)
    check(kernels.retile(kept, tile, kind, fmt=fmt), reference.retile(kept, tile, kind, fmt=fmt))
    if tile == Tile(None, None):
        scale = torch.tensor([[0.5]])
        check(kernels.quantize(stack, fmt, tile, kind, scale=scale), reference.quantize(stack, fmt, tile, kind, scale=scale))


@pytest.mark.parametrize("tile", WIDE[1:], ids=str)
@pytest.mark.parametrize("groups", [[0, 0, 2, 3, -1], [1, 1, 1, 1, 1], [0, 4, 4, -1, -1]])
def test_every_expert_has_a_scale_of_its_own(tile: Tile, groups: list[int]) -> None:
    x = draw(640, 140, 2.0, 0).nan_to_num(0, 0, 0)
    experts = torch.tensor(groups)
    x.view(5, 128, 140)[experts < 0] = 0
    check(kernels.quantize(x, E4M3, tile, groups=experts), reference.quantize(x, E4M3, tile, groups=experts))
    for kept in (reference.quantize(x, E4M3, ROW_128), reference.quantize(x, E4M3, Tile(1, None))):
        got = kernels.retile(kept, tile, groups=experts)
        check(got, reference.retile(kept, tile, groups=experts))
        assert got.codes.mT.is_contiguous()  # wgrad alone reads them
    if tile.cols is None:
        scale = torch.rand(5, 1)
        want = reference.quantize(x, E4M3, tile, groups=experts, scale=scale)
        check(kernels.quantize(x, E4M3, tile, groups=experts, scale=scale), want)


@pytest.mark.parametrize("rows", [128, 144, 132, 130, 7])
def test_columns_are_stored_with_the_rows_contiguous(rows: int) -> None:
    x = draw(rows, 130, 1.0, 0).bfloat16()
    kept = kernels.quantize(x, E4M3, ROW_128)
    for got in (kernels.quantize(x, E4M3, COLUMN_128), kernels.retile(kept, COLUMN_128), kernels.quantize_both(x, E4M3)[1]):
        assert got.codes.mT.is_contiguous()
        assert got.scale.is_contiguous()
    assert kept.scale.mT.is_contiguous()


def test_rows_of_wider_matrices_are_read_where_they_lie() -> None:
    """Packed E5M6 too, from rows that do not start at whole words."""
    x = draw(140, 600, 3.0, 0).bfloat16()
    for fmt in (E4M3, E5M6):
        for start, stop in ((0, 140), (3, 131)):
            part = reference.quantize(x, fmt, ROW_128, "pow2").rows(start, stop)
            for cols, width in ((300, 450), (302, 453), (8, 12)):
                codes = part.codes[:, : width if fmt is E5M6 else cols]
                seen = replace(part, codes=codes, scale=part.scale[:, : ceil_div(cols, 128)], shape=(stop - start, cols))
                check(kernels.retile(seen, COLUMN_128, fmt=E4M3), reference.retile(seen, COLUMN_128, fmt=E4M3))
                same_values(kernels.decode(seen, torch.bfloat16), seen.decode().bfloat16())


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (127, 129), (200, 576), (3, 1408)])
@pytest.mark.parametrize(("fmt", "tile"), CASTS[:3] + CASTS[5:], ids=str)
def test_real_sizes_with_tail_tiles(rows: int, cols: int, fmt: Format, tile: Tile) -> None:
    x = draw(rows, cols, 3.0, 0).bfloat16()
    got = kernels.quantize(x, fmt, tile)
    check(got, reference.quantize(x, fmt, tile))
    if tile == ROW_128:
        check(kernels.retile(got, COLUMN_128, "pow2", fmt=E4M3), reference.retile(got, COLUMN_128, "pow2", fmt=E4M3))


def test_experts_of_a_stack_never_share_a_tile() -> None:
    x = torch.randn(3, 70, 130)
    check(kernels.quantize(x, E4M3, BLOCK_128, row_parts=2), reference.quantize(x, E4M3, BLOCK_128, row_parts=2))
    check(kernels.quantize(x.mT, E4M3, COLUMN_128), reference.quantize(x.mT, E4M3, COLUMN_128))
    check(kernels.quantize(x, E5M6, ROW_128), reference.quantize(x, E5M6, ROW_128))
    check(kernels.quantize(x, E4M3, ROW_128, row_parts=2), reference.quantize(x, E4M3, ROW_128, row_parts=2))


@pytest.mark.parametrize("shape", [(0, 128), (4, 0), (2, 0, 256)])
def test_nothing_gives_nothing(shape: tuple[int, ...]) -> None:
    for tile in (ROW_128, COLUMN_128, BLOCK_128, *WIDE):
        check(kernels.quantize(torch.zeros(shape), E4M3, tile), reference.quantize(torch.zeros(shape), E4M3, tile))


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E5M6], ids=lambda f: f.name)
def test_every_bf16_pattern_and_ties_of_fp32_at_scale_one(fmt: Format) -> None:
    """In tiles that hold the format's maximum, where they are cast as they are; in every way that codes are stored."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    generator = torch.Generator().manual_seed(0)
    ties = torch.randint(0, 2**9, (2**13,), generator=generator) * torch.exp2(
        torch.randint(-26, 7, (2**13,), generator=generator)
    )
    near = torch.cat((ties, torch.nextafter(ties, torch.tensor(torch.inf)), -torch.nextafter(ties, torch.tensor(-1.0))))
    for values in (patterns, near):
        x = values[values.abs() <= fmt.max]
        x = torch.nn.functional.pad(x, (0, -len(x) % 127)).view(-1, 127)
        x = torch.cat((torch.full((len(x), 1), fmt.max), x), 1)
        want = reference.quantize(x, fmt, ROW_128)
        assert (want.scale == 1).all()
        check(kernels.quantize(x, fmt, ROW_128), want)
        if fmt is not E5M6:
            check(kernels.quantize(x.mT, fmt, COLUMN_128), reference.quantize(x.mT, fmt, COLUMN_128))
            check(kernels.quantize_mirrored(x, fmt)[1], reference.quantize(x, fmt, BLOCK_128).transposed())


# ---- GEMM

ROW, TENSOR = Tile(1, None), Tile(None, None)


def exact(
    rows: int, k: int, tile: Tile, seed: int, fmt: Format = E4M3, row_parts: int = 1, col_parts: int = 1
) -> QuantizedTensor:
    """Codes from -2 to 2 and scales of 1, 2, 4 or 8: whatever the order, sums are exact. No two tiles need have one scale."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-2, 3, (rows, k), generator=generator).float().to(fmt.dtype)
    like = reference.quantize(torch.zeros(rows, k), fmt, tile, row_parts=row_parts, col_parts=col_parts)
    scale = 2.0 ** torch.randint(0, 4, like.scale.shape, generator=generator)
    return QuantizedTensor(codes, scale, fmt, tile, (rows, k), "pow2", like.row_parts, like.col_parts)


GEMMS = {
    "fprop": (ROW_128, BLOCK_128, {}, {}, 128),
    "wgrad": (ROW_128, ROW_128, {}, {}, 128),
    "every 32": (ROW_128, BLOCK_128, {}, {}, 32),
    "wgrad every 64": (ROW_128, ROW_128, {}, {}, 64),
    "halves of N": (ROW_128, BLOCK_128, {}, {"row_parts": 2}, 128),
    "halves of K": (ROW_128, BLOCK_128, {"col_parts": 2}, {"col_parts": 2}, 128),
    "halves of M": (BLOCK_128, ROW_128, {"row_parts": 2}, {}, 128),
    "rowwise, never": (ROW, ROW, {}, {}, "never"),
    "rowwise every 64": (ROW, ROW, {}, {}, 64),
    "tensorwise every 256": (TENSOR, TENSOR, {}, {}, 256),
    "row by block": (ROW, BLOCK_128, {}, {}, 128),
}


@pytest.mark.parametrize(("m", "n", "k"), [(1, 2, 1), (130, 200, 144)])
@pytest.mark.parametrize("case", GEMMS)
def test_every_code_meets_its_scale(case: str, m: int, n: int, k: int) -> None:
    left, right, parts_a, parts_b, promote = GEMMS[case]
    m, k = m * parts_a.get("row_parts", 1), k * parts_a.get("col_parts", 1)
    a, b = exact(m, k, left, 1, **parts_a), exact(n, k, right, 2, E5M2 if m % 4 else E4M3, **parts_b)
    want = a.decode().double() @ b.decode().double().mT
    for dtype in (torch.float32, torch.bfloat16) if case == "fprop" else (torch.float32,):
        assert torch.equal(gemm.matmul_nt(a, b, dtype, promote), want.to(dtype))


@pytest.mark.parametrize("shape", [(1, 1), (1, 200), (200, 1), (127, 129), (144, 300), (256, 128)])
def test_codes_are_turned_so_that_k_is_contiguous(shape: tuple[int, int]) -> None:
    given = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    turned = gemm.row_major(given.view(E4M3.dtype).mT)
    assert torch.equal(turned.view(torch.uint8)[:, : shape[0]], given.mT)  # more of a row is padding
    assert turned.dtype == E4M3.dtype
    assert turned.stride(1) == 1
    assert turned.stride(0) % 16 == 0 == turned.data_ptr() % 16


# ---- the experts' GEMMs in one launch

PER_GROUP = Tile(128, None)  # as quantizing with `groups` gives it: an expert's one scale at each of its blocks
LOAD = [0, 2, 0, 1]  # blocks of 128 rows of each expert; one block of none after them
BLOCKS = torch.tensor([0, 0, 2, 2, 3], dtype=torch.int32)
GROUPS = torch.tensor([1, 1, 3, -1])
GROUPED = {  # tiles of the rows and of the weights, parts of K, of N, promotion
    "hybrid": (ROW_128, BLOCK_128, 2, 1, 128),
    "halves of N": (ROW_128, BLOCK_128, 1, 2, 128),
    "tensorwise": (TENSOR, TENSOR, 1, 1, 128),
    "tensorwise, born in the experts": (PER_GROUP, TENSOR, 1, 1, 256),
    "rowwise": (ROW, ROW, 1, 1, 128),
    "rowwise, never": (ROW, ROW, 1, 1, "never"),
    "blocks": (BLOCK_128, BLOCK_128, 1, 1, 128),
    "weights 1x128": (ROW_128, ROW_128, 1, 1, 64),
}


def stacked(experts: int, rows: int, k: int, tile: Tile, **parts: int) -> QuantizedTensor:
    each = [exact(rows, k, tile, seed, E4M3, **parts) for seed in range(experts)]
    codes, scale = (torch.stack([getattr(one, name) for one in each]) for name in ("codes", "scale"))
    return replace(each[0], codes=codes, scale=scale, shape=(experts, rows, k))


def with_inert_rows(t: QuantizedTensor) -> QuantizedTensor:
    """Zeros where an expert's last block is not full, poison in the block that is nobody's."""
    codes = t.codes.clone()
    codes[200:256], codes[300:384] = 0, 0
    codes[384:] = torch.nan
    return replace(t, codes=codes)


def of_groups(t: QuantizedTensor) -> QuantizedTensor:
    """Each expert's blocks with the scales of its first."""
    return replace(t, scale=t.scale[[0, 0, 2, 3]], one_scale_per_group=True)


@pytest.mark.parametrize(("n", "k"), [(24, 144), (136, 80)])
@pytest.mark.parametrize("case", GROUPED)
def test_rows_meet_the_weights_of_their_expert(case: str, n: int, k: int) -> None:
    left, right, parts_k, parts_n, promote = GROUPED[case]
    n, k = n * parts_n, k * parts_k
    a = with_inert_rows(exact(512, k, left, 5, E5M2 if case == "hybrid" else E4M3, col_parts=parts_k))
    a = of_groups(a) if left == PER_GROUP else a
    weights = stacked(4, n, k, right, row_parts=parts_n, col_parts=parts_k)
    want = torch.zeros(512, n, dtype=torch.float64)
    for block, expert in enumerate(GROUPS.tolist()):
        rows = slice(128 * block, 128 * (block + 1))
        if expert >= 0:
            want[rows] = a.decode()[rows].double() @ weights[expert].decode().double().mT
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(grouped.grouped_rows(a, weights, GROUPS, dtype, promote), want.to(dtype))


GROUPED_WGRAD = {  # tiles of dy and of x, whether they were cast expert by expert, parts of N, promotion
    "hybrid": (COLUMN_128, COLUMN_128, False, 1, 128),
    "tensorwise": (TENSOR, TENSOR, False, 1, 128),
    "tensorwise, born in the experts": (PER_GROUP, TENSOR, True, 1, 256),
    "both born in the experts": (PER_GROUP, PER_GROUP, True, 1, "never"),
    "rowwise": (Tile(128, 1), Tile(128, 1), True, 1, 64),
    "rowwise by columns": (Tile(128, 1), COLUMN_128, True, 1, 128),
    "blocks": (BLOCK_128, COLUMN_128, False, 2, 128),
    "blocks of x": (COLUMN_128, BLOCK_128, False, 1, 32),
}


@pytest.mark.parametrize(("n", "k"), [(24, 136), (136, 40)])
@pytest.mark.parametrize("case", GROUPED_WGRAD)
def test_weight_gradients_sum_over_the_rows_of_their_expert(case: str, n: int, k: int) -> None:
    left, right, born, parts, promote = GROUPED_WGRAD[case]
    dy = with_inert_rows(exact(512, n * parts, left, 7, E5M2 if case == "hybrid" else E4M3, col_parts=parts))
    x = with_inert_rows(exact(512, k, right, 8))
    if case == "rowwise by columns":
        dy = of_groups(dy)
    elif born:
        dy, x = (of_groups(t) if t.tile.rows else t for t in (dy, x))
    want, end = torch.zeros(4, n * parts, k, dtype=torch.float64), 0
    for expert, blocks in enumerate(LOAD):
        rows = slice(end, end := end + 128 * blocks)
        want[expert] = dy.decode()[rows].double().mT @ x.decode()[rows].double()
    assert torch.equal(grouped.grouped_wgrad(dy, x, BLOCKS, promote), want.float())
    turned = replace(dy, codes=dy.codes.mT.contiguous().mT)
    assert torch.equal(grouped.grouped_wgrad(turned, x, BLOCKS, promote), want.float())
    before = torch.full((4, n * parts, k), 0.5)
    before[0] = torch.nan  # an expert without rows is left alone
    into = before.clone()
    assert grouped.grouped_wgrad(dy, x, BLOCKS, promote, into) is into
    assert torch.equal(
        into.nan_to_num(7), torch.where(torch.tensor(LOAD)[:, None, None] > 0, before + want, before).nan_to_num(7).float()
    )
