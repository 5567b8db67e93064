"""The Triton kernels on a Hopper GPU: casts against the torch reference, GEMMs against the emulated tensor core, to the bit."""

import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", minversion="3.6")

from dsv3fp8.kernels import backend
from dsv3fp8.kernels.gemm import cublaslt, emulated
from dsv3fp8.kernels.gemm import triton as gemm
from dsv3fp8.kernels.quantize import reference
from dsv3fp8.kernels.quantize import triton as kernels
from dsv3fp8.precision import accumulator, cast_meter
from dsv3fp8.precision.formats import E4M3, E5M2, E5M6, Format
from dsv3fp8.precision.tiles import BLOCK_128, COLUMN_128, ROW_128, QuantizedTensor, Tile

ROW, TENSOR = Tile(1, None), Tile(None, None)
SIZES = [(1, 1), (1, 127), (127, 129), (129, 200), (200, 576), (576, 1408), (130, 10944)]
CASTS = [(f, t) for f in (E4M3, E5M2) for t in (ROW_128, COLUMN_128, BLOCK_128)] + [(E5M6, ROW_128)]


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN or 0xff wherever a kernel has yet to write."""
    empty = torch.empty

    def poisoned(*shape: object, **options: object) -> Tensor:
        out = empty(*shape, **options)  # type: ignore[call-overload]
        return out.fill_(torch.nan if out.is_floating_point() else 255)

    monkeypatch.setattr(torch, "empty", poisoned)


def draw(rows: int, cols: int, seed: int, spread: float = 8.0) -> Tensor:
    """Values of very unlike sizes, a row of zeros, -0, NaN and infinities where there is room."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randn(rows, 1, generator=g), torch.randn(cols, generator=g)
    x = torch.randn(rows, cols, generator=g) * torch.exp(spread * sizes[0]) * torch.exp(spread * sizes[1])
    if rows > 3 and cols > 3:
        x[1], x[0, cols // 2] = 0, -0.0
        x[rows // 2, cols // 3], x[rows - 1, cols - 1], x[2, 0] = torch.nan, torch.inf, -torch.inf
    return x


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()]).cpu()


def check(got: QuantizedTensor, want: QuantizedTensor) -> None:
    assert torch.equal(bits(got.codes), bits(want.codes))
    scale = torch.where(torch.isnan(got.scale), torch.nan, got.scale)
    assert torch.equal(bits(scale), bits(want.scale))
    for name in ("shape", "tile", "scale_kind", "row_parts", "col_parts", "one_scale_per_group"):
        assert getattr(got, name) == getattr(want, name)


def same_values(got: Tensor, want: Tensor) -> None:
    got, want = got.cpu().float(), want.float()
    assert torch.equal(torch.isnan(got), torch.isnan(want))
    assert torch.equal(bits(got.nan_to_num(0)), bits(want.nan_to_num(0)))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp32", "pow2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("fmt", "tile"), CASTS, ids=str)
def test_casts_and_re_tiles_equal_the_reference(fmt: Format, tile: Tile, dtype: torch.dtype, kind: str) -> None:
    for seed, (rows, cols) in enumerate(SIZES):
        x = draw(rows, cols, seed).to(dtype)
        on_gpu = x.cuda()
        views: list[tuple[Tensor, Tensor, dict[str, int]]] = [(x, on_gpu, {}), (x.mT, on_gpu.mT, {})]
        views += [(x[::2, 1:], on_gpu[::2, 1:], {})] if min(rows, cols) > 2 else []
        views += [(x, on_gpu, {"row_parts": 2})] if rows % 2 == 0 else []
        views += [(x, on_gpu, {"col_parts": 2})] if cols % 4 == 0 else []
        for here, there, parts in views:
            got, want = kernels.quantize(there, fmt, tile, kind, **parts), reference.quantize(here, fmt, tile, kind, **parts)
            check(got, want)
            if tile == ROW_128:
                for to in (ROW_128, COLUMN_128, BLOCK_128):
                    check(kernels.retile(got, to, fmt=E4M3), reference.retile(want, to, fmt=E4M3))
                same_values(kernels.decode(got, dtype), want.decode().to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp32", "pow2"])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("tile", [ROW, ROW.transposed(), TENSOR], ids=str)
def test_wide_casts_equal_the_reference(tile: Tile, fmt: Format, kind: str) -> None:
    for seed, (rows, cols) in enumerate([*SIZES, (1280, 640)]):
        for x in (draw(rows, cols, seed), draw(rows, cols, seed, 1.0).nan_to_num(0, 0, 0).bfloat16()):
            stack = torch.stack((x, x.flip(0)))
            check(kernels.quantize(stack.cuda(), fmt, tile, kind), reference.quantize(stack, fmt, tile, kind))
            check(kernels.quantize(x.mT.cuda(), fmt, tile, kind), reference.quantize(x.mT, fmt, tile, kind))
            kept = reference.quantize(x, E4M3, ROW_128)
            on_gpu = dataclasses.replace(kept, codes=kept.codes.cuda(), scale=kept.scale.cuda())
            check(kernels.retile(on_gpu, tile, kind, fmt=fmt), reference.retile(kept, tile, kind, fmt=fmt))
    groups = torch.tensor([0, 0, 2, 2, 2, 5, 6, 6, -1, -1])
    x[groups.repeat_interleave(128) < 0] = 0
    if tile != ROW:
        check(
            kernels.quantize(x.cuda(), fmt, tile, kind, groups=groups.cuda()),
            reference.quantize(x, fmt, tile, kind, groups=groups),
        )
    if tile == TENSOR:
        scale = torch.rand(10, 1)
        want = reference.quantize(x, fmt, tile, kind, groups=groups, scale=scale)
        check(kernels.quantize(x.cuda(), fmt, tile, kind, groups=groups.cuda(), scale=scale.cuda()), want)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp32", "pow2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_two_casts_from_one_read_equal_the_reference(fmt: Format, dtype: torch.dtype, kind: str) -> None:
    for seed, (rows, cols) in enumerate([*SIZES, (256, 512), (144, 640)]):
        for parts in (1, 2) if cols % 2 == 0 else (1,):
            x = draw(rows, cols, seed).to(dtype)
            casts = kernels.quantize_both(x.cuda(), fmt, kind, col_parts=parts)
            for got, tile in zip(casts, (ROW_128, COLUMN_128), strict=True):
                check(got, reference.quantize(x, fmt, tile, kind, col_parts=parts))
            assert casts[1].codes.mT.is_contiguous()
        for parts in (1, 2) if rows % 2 == 0 else (1,):
            x = torch.stack([draw(rows, cols, seed + i) for i in range(3)]).to(dtype)
            cast, turned = kernels.quantize_mirrored(x.cuda(), fmt, kind, row_parts=parts)
            want = reference.quantize(x, fmt, BLOCK_128, kind, row_parts=parts)
            check(cast, want)
            check(turned, want.transposed())
            assert turned.codes.is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [E4M3, E5M2, E5M6], ids=lambda f: f.name)
def test_every_bf16_pattern_and_random_fp32_at_scale_one(fmt: Format) -> None:
    g = torch.Generator().manual_seed(0)
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    random = torch.empty(2**20).uniform_(-1, 1, generator=g)
    ties = torch.randint(0, 2**23, (2**18,), generator=g) * 2.0**-29
    powers = torch.exp2(torch.randint(-26, 7, (2**18,), generator=g))
    near = torch.nextafter(torch.randint(0, 2**9, (2**18,), generator=g) * powers, torch.tensor(torch.inf))
    near = near[near <= fmt.max]
    for values in (patterns[patterns.float().abs() <= fmt.max], random * fmt.max, random * 2.0**-14, ties, near):
        rows = torch.nn.functional.pad(values, (0, -len(values) % 127)).view(-1, 127)
        x = torch.cat((torch.full((len(rows), 1), fmt.max, dtype=rows.dtype), rows), 1)
        want = reference.quantize(x, fmt, ROW_128)
        assert (want.scale == 1).all()
        check(kernels.quantize(x.cuda(), fmt, ROW_128), want)
        same_values(kernels.decode(kernels.quantize(x.cuda(), fmt, ROW_128), torch.float32), want.decode())
        if fmt is not E5M6:
            check(kernels.quantize(x.mT.cuda(), fmt, COLUMN_128), reference.quantize(x.mT, fmt, COLUMN_128))


@pytest.mark.gpu
def test_what_a_meter_counts_does_not_depend_on_the_backend() -> None:
    x = draw(256, 512, 0).nan_to_num(0, 0, 0).bfloat16()
    found = []
    for given in (x, x.cuda()):
        with cast_meter.measure_casts() as meter:
            backend.retile(backend.quantize(given, E4M3, ROW_128), COLUMN_128)
            backend.quantize(given, E4M3, Tile(None, None), scale=torch.full((1, 1), 1 / 448, device=given.device))
        found.append(meter.counts())
    assert found[0] == found[1]
    assert min(found[0]) > 0


# ---- GEMM


def operand(rows: int, k: int, tile: Tile, seed: int, fmt: Format = E4M3, **parts: int) -> QuantizedTensor:
    g = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(rows, k, generator=g, device="cuda") * torch.exp(torch.randn(rows, 1, generator=g, device="cuda"))
    return reference.quantize(x.bfloat16(), fmt, tile, **parts)


def some(count: int, seed: int) -> Tensor:
    """Up to 64 indices, both edges and a border of tiles among them."""
    if count <= 64:
        return torch.arange(count)
    edges = torch.tensor([0, 1, count // 2, count - 2, count - 1, min(127, count - 3)])
    rest = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return torch.cat((edges, rest[~torch.isin(rest, edges)]))[:64]


def expected(a: QuantizedTensor, b: QuantizedTensor, promote: int | str, rows: Tensor, cols: Tensor) -> Tensor:
    """The tensor core's sums by the emulator; their scales and the outer sum written out from the contract."""
    codes = a.codes.cpu()[rows], b.codes.cpu()[cols]
    if a.constant_along_k and b.constant_along_k:
        s_a, s_b = (q.expanded_rows().expand(q.shape[0], 1).cpu()[i] for q, i in ((a, rows), (b, cols)))
        return emulated.products(*codes, promote) * (s_a * s_b.mT)
    blocks = accumulator.k_blocks(a, b)
    scales = [accumulator.scale_per_block(q, len(blocks)).cpu()[i] for q, i in ((a, rows), (b, cols))]
    acc = torch.zeros(len(rows), len(cols))
    for i, (start, stop) in enumerate(blocks):
        p = emulated.products(codes[0][:, start:stop], codes[1][:, start:stop], promote)
        s_a, s_b = scales[0][:, i, None], scales[1][None, :, i]
        acc = accumulator.fma(p * s_a, s_b, acc) if b.tile.rows == 1 else accumulator.fma(p, s_a * s_b, acc)
    return acc


def check_gemm(a: QuantizedTensor, b: QuantizedTensor, promote: int | str = 128, by_cublaslt: bool = True) -> None:
    rows, cols = some(a.shape[0], 1), some(b.shape[0], 2)
    want = expected(a, b, promote, rows, cols)
    for dtype in (torch.float32, torch.bfloat16):
        ours = gemm.matmul_nt(a, b, dtype, promote)
        assert torch.equal(bits(ours[rows][:, cols]), bits(want.to(dtype)))
        if by_cublaslt and promote == 128 and cublaslt.reason_against(a, b) is None:
            assert torch.equal(bits(cublaslt.matmul_nt(a, b, dtype)), bits(ours))  # every element


DENSE = [(2176, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)]
GROUPED = [(8192, 4096, 7168), (8192, 7168, 2048), (1024, 4096, 7168), (256, 2816, 2048), (256, 2048, 1408)]
ODD = [(4096, 576, 7168), (4096, 2112, 7168), (200, 2112, 1408), (127, 2048, 1408), (129, 130, 576), (4096, 2048, 10944)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("shape", [(4096, *nk) for nk in DENSE] + GROUPED + ODD, ids=str)
def test_real_shapes_to_the_bit(kind: str, shape: tuple[int, int, int]) -> None:
    """Ours against the emulator on 64 x 64 outputs, cuBLASLt against ours on all, where it does not split K."""
    m, n, k = {"fprop": shape, "dgrad": (shape[0], shape[2], shape[1]), "wgrad": (shape[1], shape[2], shape[0])}[kind]
    a, b = operand(m, k, ROW_128, 1), operand(n, k, ROW_128 if kind == "wgrad" else BLOCK_128, 2)
    check_gemm(a, b, by_cublaslt=m * n >= 2**20)  # smaller ones it may split; docs/results says which it does


@pytest.mark.gpu
@pytest.mark.parametrize("half", [10944, 1408, 200, 72])
def test_gate_and_up_tiled_on_their_own(half: int) -> None:
    check_gemm(operand(200, 1536, ROW_128, 1), operand(2 * half, 1536, BLOCK_128, 2, row_parts=2), by_cublaslt=False)
    a, b = operand(200, 2 * half, ROW_128, 1, col_parts=2), operand(1536, 2 * half, BLOCK_128, 2, col_parts=2)
    check_gemm(a, b, by_cublaslt=False)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [4096, 1408, 200])
@pytest.mark.parametrize("promote", [32, 64, 128, 256, 512, 4096, "never"])
def test_every_interval(promote: int | str, k: int) -> None:
    check_gemm(operand(200, k, ROW, 1), operand(576, k, ROW, 2), promote, by_cublaslt=False)
    check_gemm(operand(129, k, TENSOR, 1), operand(200, k, TENSOR, 2), promote, by_cublaslt=False)
    if promote in (32, 64):
        for tile in (BLOCK_128, ROW_128):
            check_gemm(operand(200, k, ROW_128, 1), operand(576, k, tile, 2), promote)


@pytest.mark.gpu
@pytest.mark.parametrize("formats", [(E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)], ids=str)
def test_other_formats(formats: tuple[Format, Format]) -> None:
    for tile in (BLOCK_128, ROW_128):
        check_gemm(operand(200, 1408, ROW_128, 1, formats[0]), operand(576, 1408, tile, 2, formats[1]))
    check_gemm(operand(200, 1408, ROW, 1, formats[0]), operand(576, 1408, ROW, 2, formats[1]), "never")


@pytest.mark.gpu
@pytest.mark.parametrize("tiles", [(BLOCK_128, ROW_128), (BLOCK_128, BLOCK_128), (ROW_128, ROW), (ROW, BLOCK_128)], ids=str)
def test_other_tiles(tiles: tuple[Tile, Tile]) -> None:
    check_gemm(operand(256, 1024, tiles[0], 1), operand(576, 1024, tiles[1], 2), by_cublaslt=False)


@pytest.mark.gpu
def test_cublaslt_reads_some_tokens_of_all_where_they_lie() -> None:
    dy, x = (kernels.quantize(torch.randn(512, n, device="cuda").bfloat16(), E4M3, COLUMN_128) for n in (256, 384))
    a, b = (t.rows(128, 384).transposed() for t in (dy, x))
    dense = [dataclasses.replace(t, codes=t.codes.contiguous()) for t in (a, b)]
    assert torch.equal(cublaslt.matmul_nt(a, b, torch.float32), cublaslt.matmul_nt(*dense, torch.float32))


REFUSED = {
    "long chains of tiles": (ROW_128, BLOCK_128, 256, {}, "needs scales that are constant along K"),
    "chains of 96": (ROW, ROW, 96, {}, "ends inside a block"),
    "tiles along rows": (COLUMN_128, ROW_128, 128, {}, "no tensor core sum for tile 128x1"),
    "K cut in one operand": (ROW_128, BLOCK_128, 128, {"col_parts": 2}, "end at different places along K"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_kernel_computes_is_refused_with_the_reason(case: str) -> None:
    left, right, promote, parts, reason = REFUSED[case]
    a = reference.quantize(torch.zeros(8, 400), E4M3, left, **parts)
    b = reference.quantize(torch.zeros(8, 400), E4M3, right)
    assert reason in str(gemm.reason_against(a, b, promote))
    with pytest.raises(ValueError, match=reason):
        gemm.matmul_nt(a, b, torch.float32, promote)


def test_casts_that_stay_with_torch_say_why() -> None:
    given = torch.ones(1, 1)
    assert "given scales of tile 1x128" in str(kernels.reason_against(E4M3, ROW_128, 8, scale=given))
    assert kernels.reason_against(E4M3, TENSOR, 8, scale=given) is None
    assert "e5m6 with tile 128x1" in str(kernels.reason_against(E5M6, COLUMN_128, 8))
    assert "odd width" in str(kernels.reason_against(E5M6, ROW_128, 6, 2))
    assert kernels.reason_against(E5M6, ROW_128, 8, 2) is None
    with cast_meter.measure_casts():
        assert "being counted" in str(kernels.reason_against(E4M3, ROW_128, 8))
    source = reference.quantize(torch.zeros(8, 400), E4M3, COLUMN_128)
    with pytest.raises(ValueError, match="in tiles 128x1"):
        kernels.retile(source, ROW_128)


@pytest.mark.gpu
def test_both_orientations_of_powers_of_two_are_transposes_of_one_another() -> None:
    """Q10: a transposed store of fp8 was seen to corrupt the copy; exact powers of two show every misplaced byte."""
    exponent = torch.randint(-8, 9, (256, 384), generator=torch.Generator().manual_seed(0))
    x = torch.ldexp(torch.ones(256, 384), exponent).cuda()
    x[:, ::128], x[::128] = 448.0, 448.0  # every tile, along rows or columns, has the same largest value
    along_rows, along_columns = kernels.quantize(x, E4M3, ROW_128), kernels.quantize(x, E4M3, COLUMN_128)
    transposed = kernels.quantize(x.mT.contiguous(), E4M3, ROW_128)
    assert torch.equal(bits(along_rows.codes), bits(along_columns.codes))
    assert torch.equal(bits(transposed.codes), bits(along_columns.codes.mT))
    assert torch.equal(bits(kernels.retile(along_rows, COLUMN_128).codes), bits(along_columns.codes))
    for got, want in zip(kernels.quantize_both(x, E4M3), (along_rows, along_columns), strict=True):
        assert torch.equal(bits(got.codes), bits(want.codes))
    blocks, turned = kernels.quantize_mirrored(x, E4M3)
    assert torch.equal(bits(blocks.codes), bits(along_rows.codes))
    assert torch.equal(bits(turned.codes.mT), bits(along_rows.codes))


@pytest.mark.gpu
def test_offsets_beyond_32_bits_reach_the_last_rows() -> None:
    """G02: 300,032 x 7168 has more than 2^31 elements."""
    rows, cols = 300_032, 7168
    x = torch.ones(1, cols, dtype=torch.bfloat16, device="cuda").expand(rows, cols).contiguous()
    x[-128:] = torch.randn(128, cols, generator=torch.Generator().manual_seed(0)).cuda()
    for tile in (ROW_128, COLUMN_128, BLOCK_128):
        got, want = kernels.quantize(x, E4M3, tile), reference.quantize(x[-128:], E4M3, tile)
        assert torch.equal(bits(got.codes[-128:]), bits(want.codes))
        assert torch.equal(bits(got.scale[-want.scale.shape[0] :]), bits(want.scale))
    a = kernels.quantize(x, E4M3, ROW_128)
    weight = kernels.quantize(torch.randn(16, cols, generator=torch.Generator().manual_seed(1)).cuda(), E4M3, BLOCK_128)
    tail = kernels.quantize(x[-128:], E4M3, ROW_128)
    assert torch.equal(gemm.matmul_nt(a, weight, torch.float32, 128)[-128:], gemm.matmul_nt(tail, weight, torch.float32, 128))
