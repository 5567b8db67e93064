"""The emulated tensor core against an H200's sums and against exact arithmetic, bit for bit: in torch and compiled."""

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tensor_core
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dsv3fp8.kernels.gemm import emulated
from dsv3fp8.precision import accumulator
from dsv3fp8.precision.formats import E4M3, E5M2, FORMATS
from dsv3fp8.precision.tiles import BLOCK_128, ROW_128, QuantizedTensor, Tile

# Sums of an NVIDIA H200's FP8 tensor core, taken on 2026-11-29: NAME_K with chain (one over all of K) and promote128, E5M2
# times E4M3, and cuBLASLt's block-scaled GEMM (fprop: 1x128 times 128x128, wgrad: 1x128 times 1x128; |sa and |sb per row).
TAKEN = dict(np.load(Path(__file__).parents[1] / "fixtures" / "h200_sums.npz"))
ENTRIES = sorted(key for key in TAKEN if key.split("|")[1] in ("chain", "promote128", "f32"))
BOTH = pytest.mark.parametrize("implementation", [accumulator, emulated], ids=["torch", "compiled"])


@pytest.fixture(scope="module", autouse=True)
def _a_compiler_is_there() -> None:
    """Else "compiled" would be torch again."""
    assert emulated.reason_against_compiled(torch.device("cpu")) is None


def codes(raw: np.ndarray, fmt: str = "e4m3") -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(raw)).view(FORMATS[fmt].dtype)


def same_bits(got: Tensor, want: np.ndarray | Tensor) -> bool:
    want = torch.from_numpy(want) if isinstance(want, np.ndarray) else want
    return got.dtype == want.dtype == torch.float32 and torch.equal(got.view(torch.int32), want.view(torch.int32))


def tiled_by_row(raw: Tensor, scale: Tensor, fmt: str = "e4m3") -> QuantizedTensor:
    return QuantizedTensor(raw, scale, FORMATS[fmt], ROW_128, tuple(raw.shape))


def tiled_by_block(raw: Tensor, scale: Tensor) -> QuantizedTensor:
    """Each row the first of a block of its own: 128 rows apart, so that it has its own scale."""
    rows, k = raw.shape
    spread = torch.zeros(rows * 128, k, dtype=torch.uint8)
    spread[::128] = raw.view(torch.uint8)
    return QuantizedTensor(spread.view(raw.dtype), scale, E4M3, BLOCK_128, (rows * 128, k))


@BOTH
@pytest.mark.parametrize("entry", ENTRIES)
def test_it_gives_what_an_h200_gave(entry: str, implementation: ModuleType) -> None:
    name, kind = entry.split("|")
    raw_a, raw_b = TAKEN[f"{name}|a"], TAKEN[f"{name}|b"]
    if kind != "f32":
        a, b = codes(raw_a, "e5m2" if name.startswith("e5m2") else "e4m3"), codes(raw_b)
        assert same_bits(implementation.products(a, b, "never" if kind == "chain" else 128), TAKEN[entry])
        return
    s_a, s_b = (torch.from_numpy(TAKEN[f"{name}|{which}"]) for which in ("sa", "sb"))
    a = tiled_by_row(codes(raw_a), s_a)
    if name.startswith("fprop"):
        got = implementation.block_scaled(a, tiled_by_block(codes(raw_b), s_b), 128)[:, ::128].contiguous()
    else:
        got = implementation.block_scaled(a, tiled_by_row(codes(raw_b), s_b), 128)
    assert same_bits(got, TAKEN[entry])


def draw(generator: np.random.Generator, rows: int, k: int, fmt: str, kind: str) -> np.ndarray:
    """Finite codes: of all sizes, mostly subnormal, mostly zero, or close to one another in size."""
    largest = 0x7F if fmt == "e4m3" else 0x7C
    low, high = {"any": (0, largest), "small": (0, 12), "sparse": (0, largest), "near": (0x30, 0x40)}[kind]
    size = generator.integers(low, high, (rows, k))
    if kind == "sparse":
        size *= generator.random((rows, k)) < 0.1
    return (size + 128 * generator.integers(0, 2, (rows, k))).astype(np.uint8)


KINDS = st.sampled_from(["any", "small", "sparse", "near"])
FMT = st.sampled_from(["e4m3", "e5m2"])


@BOTH
@given(
    seed=st.integers(0, 2**32 - 1), k=st.sampled_from([1, 31, 32, 33, 96, 127, 129, 200, 300]), kinds=st.tuples(KINDS, KINDS),
    formats=st.tuples(FMT, FMT), every=st.sampled_from([32, 64, 128, 256, 4096, "never"]),
)  # fmt: skip
def test_products_are_those_of_exact_arithmetic(
    implementation: ModuleType, seed: int, k: int, kinds: tuple[str, str], formats: tuple[str, str], every: int | str
) -> None:
    generator = np.random.default_rng(seed)
    a, b = (draw(generator, rows, k, fmt, kind) for rows, fmt, kind in zip((3, 2), formats, kinds, strict=True))
    got = implementation.products(codes(a, formats[0]), codes(b, formats[1]), every)
    assert same_bits(got, tensor_core.products(a, b, every, formats))


@BOTH
@given(
    seed=st.integers(0, 2**32 - 1), half=st.sampled_from([1, 40, 72, 128, 150]), parts=st.sampled_from([1, 2]),
    kinds=st.tuples(KINDS, KINDS), fmt=FMT, every=st.sampled_from([32, 64, 128]), per_row=st.booleans(),
)  # fmt: skip
def test_block_scaled_sums_are_those_of_exact_arithmetic(
    implementation: ModuleType, seed: int, half: int, parts: int, kinds: tuple[str, str], fmt: str, every: int, per_row: bool
) -> None:
    """Also where K is tiled in two halves, as dgrad's is behind a fused gate and up projection."""
    generator = np.random.default_rng(seed)
    k, blocks = half * parts, parts * -(-half // 128)
    a, b = draw(generator, 2, k, fmt, kinds[0]), draw(generator, 3, k, "e4m3", kinds[1])
    s_a, s_b = (np.exp(3 * generator.standard_normal((rows, blocks))).astype(np.float32) for rows in (2, 3 if per_row else 1))
    left = QuantizedTensor(codes(a, fmt), torch.from_numpy(s_a), FORMATS[fmt], ROW_128, (2, k), col_parts=parts)
    tile = ROW_128 if per_row else BLOCK_128
    right = QuantizedTensor(codes(b), torch.from_numpy(s_b), E4M3, tile, (3, k), col_parts=parts)
    want = tensor_core.block_scaled(a, b, s_a, np.broadcast_to(s_b, (3, blocks)), every, per_row, parts, (fmt, "e4m3"))
    assert same_bits(implementation.block_scaled(left, right, every), want)


@BOTH
@pytest.mark.parametrize("every", [32, 128, 512, "never"])
def test_scales_constant_along_k_multiply_the_finished_sum_once(implementation: ModuleType, every: int | str) -> None:
    generator = np.random.default_rng(0)
    a, b = (draw(generator, rows, 700, "e4m3", "any") for rows in (5, 4))
    s_a, s_b = torch.rand(5, 1), torch.rand(1, 1)
    left = QuantizedTensor(codes(a), s_a, E4M3, Tile(1, None), (5, 700))
    right = QuantizedTensor(codes(b), s_b, E4M3, Tile(None, None), (4, 700))
    want = torch.from_numpy(tensor_core.products(a, b, every)) * (s_a * s_b)
    assert same_bits(implementation.block_scaled(left, right, every), want)


@BOTH
def test_a_scale_over_all_of_k_serves_every_block_beside_tiles(implementation: ModuleType) -> None:
    generator = np.random.default_rng(0)
    a, b = (draw(generator, rows, 300, "e4m3", "any") for rows in (4, 3))
    s_a, s_b = np.float32([[0.3], [1.7], [2.0], [0.9]]), generator.random((1, 3)).astype(np.float32)
    left = QuantizedTensor(codes(a), torch.from_numpy(s_a), E4M3, Tile(1, None), (4, 300))
    right = QuantizedTensor(codes(b), torch.from_numpy(s_b), E4M3, BLOCK_128, (3, 300))
    want = tensor_core.block_scaled(a, b, np.repeat(s_a, 3, 1), np.repeat(s_b, 3, 0), 128, one_by_one=False)
    assert same_bits(implementation.block_scaled(left, right, 128), want)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "every other row of a wider matrix": lambda x: x.new_zeros(2 * x.shape[0], x.shape[1] + 5)[::2, 3:-2].copy_(x),
}


@BOTH
@pytest.mark.parametrize("shape", [(1, 1, 1), (127, 129, 70), (40, 200, 300), (129, 33, 65), (300, 64, 257)], ids=str)
def test_results_do_not_depend_on_what_lies_around_or_how(implementation: ModuleType, shape: tuple[int, int, int]) -> None:
    """Row by row the same, contiguous or not, with one thread or many."""
    m, k, n = shape
    generator = np.random.default_rng(0)
    a, b = draw(generator, m, k, "e4m3", "any"), draw(generator, n, k, "e5m2", "any")
    whole = implementation.products(codes(a), codes(b, "e5m2"), 64)
    rows, cols = generator.integers(0, m, 3), generator.integers(0, n, 3)
    assert same_bits(whole[rows][:, cols].contiguous(), tensor_core.products(a[rows], b[cols], 64, ("e4m3", "e5m2")))
    for layout in LAYOUTS.values():
        left, right = (layout(torch.from_numpy(raw)) for raw in (a, b))
        assert same_bits(implementation.products(left.view(E4M3.dtype), right.view(E5M2.dtype), 64), whole)


def test_threads_share_the_work_without_changing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    a, b = (codes(draw(generator, rows, 160, "e4m3", "any")) for rows in (200, 150))
    monkeypatch.setattr(emulated, "_PRODUCTS_OF_A_THREAD", 1)
    results = []
    for threads in (1, 2, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(emulated.products(a, b, 128))
    assert same_bits(results[0], accumulator.products(a, b, 128))
    assert all(same_bits(result, results[0]) for result in results)


@BOTH
@pytest.mark.parametrize("shape", [(0, 128, 3), (3, 128, 0), (2, 0, 3)], ids=str)
def test_empty_sums_are_zero(implementation: ModuleType, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a, b = (torch.zeros(rows, k, dtype=torch.uint8).view(E4M3.dtype) for rows in (m, n))
    blocks = -(-k // 128)
    for got in (
        implementation.products(a, b, "never"),
        implementation.block_scaled(tiled_by_row(a, torch.ones(m, blocks)), tiled_by_row(b, torch.ones(n, blocks)), 128),
    ):
        assert same_bits(got, torch.zeros(m, n))


@BOTH
@given(seed=st.integers(0, 2**32 - 1), every=st.sampled_from([32, 64, "never"]))
def test_nan_and_inf_come_out_as_ieee_has_them(implementation: ModuleType, seed: int, every: int | str) -> None:
    """The rest of the output does not notice."""
    generator = np.random.default_rng(seed)
    a, b = draw(generator, 6, 100, "e5m2", "sparse"), draw(generator, 5, 100, "e4m3", "sparse")
    plain = tensor_core.products(a, b, every, ("e5m2", "e4m3"))
    for row, special in ((0, 0x7C), (0, 0xFC), (1, 0x7C), (2, 0xFC), (3, 0x7E)):  # inf - inf, inf, -inf, NaN
        a[row, generator.integers(100)] = special
    b[1, generator.integers(100)] = 0x7F
    left, right = codes(a, "e5m2"), codes(b)
    with np.errstate(invalid="ignore"):
        ieee = left.double() @ right.double().mT
    want = torch.where(ieee.isnan(), torch.nan, torch.where(ieee.isinf(), ieee.float(), torch.from_numpy(plain)))
    assert same_bits(implementation.products(left, right, every), want)
    assert want[4:].isnan().sum() == 2  # the column with NaN
    scaled = implementation.block_scaled(
        tiled_by_row(left, torch.full((6, 1), 2.0), "e5m2"), tiled_by_row(right, torch.ones(5, 1)), 32
    )
    assert torch.equal(scaled.isnan(), ieee.isnan())
    assert torch.equal(scaled.isinf(), ieee.isinf())


@BOTH
def test_a_poisoned_scale_poisons_what_it_multiplies(implementation: ModuleType) -> None:
    one = torch.ones(3, 256).to(E4M3.dtype)
    scale = torch.ones(3, 2)
    scale[1, 1] = torch.nan
    got = implementation.block_scaled(tiled_by_row(one, scale), tiled_by_row(one, torch.ones(3, 2)), 128)
    assert torch.equal(got.isnan(), torch.tensor([[False], [True], [False]]).expand(3, 3))
    assert (got[[0, 2]] == 256).all()


def test_sums_of_positive_products_come_out_too_small_unless_promoted() -> None:
    """G01: truncation toward zero is a bias, and grows with the chain."""
    a, b = torch.full((1, 8192), 1 / 32).to(E4M3.dtype), torch.full((1, 8192), 3.0).to(E4M3.dtype)
    assert accumulator.products(a, b, 128).item() == 768.0
    assert accumulator.products(a, b, "never").item() < 700  # 3/32 has too few bits left beside a sum of hundreds
    positive = torch.rand(8, 4096, generator=torch.Generator().manual_seed(0)).to(E4M3.dtype)
    exact = positive.double() @ positive.double().mT
    loss = {every: ((exact - accumulator.products(positive, positive, every)) / exact).mean() for every in (128, "never")}
    assert loss["never"] > 0.03
    assert 0 < loss[128] < 1e-3


def fp32_numbers(generator: np.random.Generator, count: int, spread: int) -> np.ndarray:
    significand = generator.integers(2**23, 2**24, count) * generator.choice([-1, 1], count)
    return np.ldexp(significand.astype(np.float64), generator.integers(-spread, spread + 1, count) - 23).astype(np.float32)


@pytest.mark.parametrize("spread", [0, 3, 20, 60])
def test_fma_rounds_once(spread: int) -> None:
    """Against fractions; a third of the sums lie so close to the middle between two fp32 that fp64 does not tell the side."""
    generator, count = np.random.default_rng(spread), 3000
    x, y, z = (fp32_numbers(generator, count, size) for size in (spread, spread, 2 * spread))
    z[::3] = np.float32(-x[::3].astype(np.float64) * y[::3])  # cancels down to the product's last bits
    # Half the last place of z, times (1 + d)(1 - d) = 1 - d^2 with d^2 below 2^-30.
    d = generator.integers(1, 200, count // 3) * 2.0**-23
    half = np.ldexp(generator.choice([-1.0, 1.0], count // 3), np.frexp(z[1::3])[1] - 25)
    x[1::3], y[1::3] = half * (1 + d), 1 - d
    got = accumulator.fma(*(torch.from_numpy(part) for part in (x, y, z))).numpy()
    exact = (Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)) for a, b, c in zip(x, y, z, strict=True))
    assert (got.astype(np.float64) == np.array([float(tensor_core.fp32(value)) for value in exact])).all()


def test_fma_meets_far_bits_subnormals_and_specials() -> None:
    unit, inf = 2.0**-23, float("inf")
    below, above = (1 + unit) * 2.0**-24, -(1 + unit) * 2.0**-24  # times 1 - unit: a hair less than half a last place
    cases = [  # x * y + z, rounded once; rounded to fp64 first, the first two would be ties and go to even
        (below, 1 - unit, 1 + unit, 1 + unit), (above, 1 - unit, 1 + unit, 1 + unit), (2.0**-24, 1.0, 1 + unit, 1 + 2 * unit),
        (2.0**-24, 1.0, 1.0, 1.0), (2.0**-75, 2.0**-75, 0.0, 0.0), (2.0**-75, 2.0**-74, 2.0**-149, 2.0**-148),
        (-1.0, 1.0, 1.0, 0.0), (2.0**100, 2.0**100, 1.0, inf), (inf, 1.0, 1.0, inf),
    ]  # fmt: skip
    x, y, z, want = (torch.tensor(column, dtype=torch.float32) for column in zip(*cases, strict=True))
    assert torch.equal(accumulator.fma(x, y, z), want)
    odd = accumulator.fma(torch.tensor([inf, 0.0]), torch.tensor([1.0, torch.nan]), torch.tensor([-inf, 1.0]))
    assert odd.isnan().all()


REFUSED: dict[str, tuple[Callable[[ModuleType], Tensor], str]] = {
    "an interval that cuts a group": (lambda i: i.products(codes(ONE), codes(ONE), 48), "promote_every=48: a multiple of 32"),
    "chains across scales": (
        lambda i: i.block_scaled(*[tiled_by_row(codes(ONE), torch.ones(2, 2))] * 2, "never"),
        "promote_every='never': chains longer than 128 need scales that are constant along K",
    ),
    "another K": (lambda i: i.products(codes(ONE), codes(ONE[:, :9]), 32), r"got \(2, 256\) and \(2, 9\)"),
    "what is no code": (lambda i: i.products(torch.ones(2, 3), codes(ONE), 32), "float8 codes, not torch.float32"),
    "K cut differently": (
        lambda i: i.block_scaled(
            tiled_by_row(codes(ONE), torch.ones(2, 2)),
            QuantizedTensor(codes(ONE), torch.ones(2, 2), E4M3, ROW_128, (2, 256), col_parts=2),
            128,
        ),
        "K is tiled in 1 parts in a and 2 in b",
    ),
    "other tiles": (
        lambda i: i.block_scaled(*[QuantizedTensor(codes(ONE), torch.ones(2, 4), E4M3, Tile(1, 64), (2, 256))] * 2, 32),
        "no block-scaled sum for tile 1x64",
    ),
}  # fmt: skip
ONE = np.full((2, 256), 0x38, np.uint8)


@BOTH
@pytest.mark.parametrize("case", REFUSED)
def test_it_refuses_what_no_tensor_core_does(case: str, implementation: ModuleType) -> None:
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call(implementation)
