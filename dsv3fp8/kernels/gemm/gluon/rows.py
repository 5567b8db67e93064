"""fprop and dgrad kernel: rows in expert order times their expert's weights, 1x128 . 128x128 scales, bf16 out.

Persistent programs of nine warps: one loads operands by TMA into a ring of stages, two warp groups multiply. Each takes 128
of the 256 columns, as two halves of 64 rows one after the other, so that the tensor core works on one warp group's block
while the other promotes its own. A tile has 128 rows and never holds two experts. Per element, in order of K:
acc = fma(p, fp32(s_a * s_b), acc), p one chain of 128 products; then one rounding to bf16. No split along K, no atomics.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from dsv3fp8.kernels.gemm.gluon.pieces import MMA, block_of, block_sum, halves, promote, put

TILE_N = 256
STAGES = 4
BAND = 16
# 168 registers for each of 288 threads, moved to the consumers (240) from the loader (24). At -O3 ptxas starts the next wgmma
# so early that p's registers are needed twice, and spills.
OPTIONS = {"num_warps": 4, "maxnreg": 168, "ptx_options": "-O1"}

_TILE_N = gl.constexpr(TILE_N)
_STAGES = gl.constexpr(STAGES)
_BAND = gl.constexpr(BAND)


@gluon.jit
def _load(a, b, a_ring, b_ring, full, empty, groups, row_blocks, col_blocks, k_blocks, n, GROUPED: gl.constexpr):
    step = 0
    for tile in range(gl.program_id(0), row_blocks * col_blocks, gl.num_programs(0)):
        row_block, col_block = block_of(tile, row_blocks, col_blocks, _BAND)
        steps = k_blocks
        b_row = col_block * _TILE_N
        if GROUPED:
            expert = gl.load(groups + row_block).to(gl.int32)
            steps = gl.where(expert < 0, 0, k_blocks)
            b_row += expert * n
        for k_block in range(steps):
            stage = step % _STAGES
            mbarrier.wait(empty.index(stage), ((step // _STAGES) & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, (128 + _TILE_N) * 128)
            # Beyond the last row or column of a matrix TMA fills in zeros. Rows of the next expert's weights that a last tile
            # reads give columns beyond n, which are not stored.
            tma.async_copy_global_to_shared(a, [row_block * 128, k_block * 128], ready, a_ring.index(stage))
            tma.async_copy_global_to_shared(b, [b_row, k_block * 128], ready, b_ring.index(stage))
            step += 1


@gluon.jit
def _store_half(acc, out, buffers, GROUP: gl.constexpr, row, col):
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    left, right = halves(acc.to(gl.bfloat16), layout)
    put(left, out, buffers.index(2 * GROUP), row, col)
    put(right, out, buffers.index(2 * GROUP + 1), row, col + 64)


@gluon.jit
def _multiply(
    GROUP: gl.constexpr, out, buffers, a_ring, b_ring, full, empty, groups, a_scale, b_scale, m, row_blocks, col_blocks,
    k_blocks, b_grid_rows, a_stride, a_stride_k, GROUPED: gl.constexpr,
):  # fmt: skip
    step = 0
    zeros = gl.full([64, 128], 0.0, gl.float32, MMA)
    rows = gl.arange(0, 64, gl.SliceLayout(1, MMA))
    for tile in range(gl.program_id(0), row_blocks * col_blocks, gl.num_programs(0)):
        row_block, col_block = block_of(tile, row_blocks, col_blocks, _BAND)
        steps = k_blocks
        b_block = col_block * (_TILE_N // 128) + GROUP
        b_at = gl.minimum(b_block, b_grid_rows - 1) * k_blocks
        if GROUPED:
            expert = gl.load(groups + row_block).to(gl.int32)
            steps = gl.where(expert < 0, 0, k_blocks)  # inert blocks get zeros
            b_at += expert * b_grid_rows * k_blocks
        row = row_block * 128
        # Masks, not clamped indices: those would break the vectors of the loads.
        upper_at = (row + rows) * a_stride
        lower_at = upper_at + 64 * a_stride
        upper_inside = row + rows < m
        lower_inside = row + 64 + rows < m
        upper = zeros
        lower = zeros
        for k_block in range(steps):
            stage = step % _STAGES
            phase = (step // _STAGES) & 1
            step += 1
            # Read before the wgmma: what is read after it arrives late, and may be overtaken by the release of the stage.
            s_upper = gl.load(a_scale + (upper_at + k_block * a_stride_k), mask=upper_inside, other=0.0)
            s_lower = gl.load(a_scale + (lower_at + k_block * a_stride_k), mask=lower_inside, other=0.0)
            s_b = gl.load(b_scale + (b_at + k_block))
            mbarrier.wait(full.index(stage), phase)
            a = a_ring.index(stage)
            b = b_ring.index(stage).slice(128 * GROUP, 128)
            p = block_sum(a.slice(0, 64), b, zeros)
            upper = promote(p, gl.expand_dims(s_upper * s_b, 1), upper)
            p = block_sum(a.slice(64, 64), b, zeros)
            mbarrier.arrive(empty.index(stage))
            lower = promote(p, gl.expand_dims(s_lower * s_b, 1), lower)
        _store_half(upper, out, buffers, GROUP, row, b_block * 128)
        _store_half(lower, out, buffers, GROUP, row + 64, b_block * 128)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["m", "row_blocks", "col_blocks", "k_blocks", "n", "b_grid_rows", "a_stride", "a_stride_k"])
def rows_kernel(
    a, b, out, groups, a_scale, b_scale, m, row_blocks, col_blocks, k_blocks, n, b_grid_rows, a_stride, a_stride_k,
    GROUPED: gl.constexpr,
):  # fmt: skip
    """a: TMA descriptor of codes [m, K], box 128 x 128; b: of [E * n, K], box 256 x 128; out: of bf16 [m, n], box 64 x 64.

    groups: expert of each block of 128 rows, -1 for blocks of no expert. a_scale: fp32, strides a_stride (row) and a_stride_k
    (block of K). b_scale: fp32 [E, b_grid_rows, k_blocks], contiguous. Not GROUPED: one weight, groups is not read.
    """
    a_ring = gl.allocate_shared_memory(gl.float8e4nv, [_STAGES, 128, 128], a.layout)
    b_ring = gl.allocate_shared_memory(gl.float8e4nv, [_STAGES, _TILE_N, 128], b.layout)
    buffers = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (0, out, buffers, a_ring, b_ring, full, empty, groups, a_scale, b_scale, m, row_blocks, col_blocks,
                         k_blocks, b_grid_rows, a_stride, a_stride_k, GROUPED)),
            (_multiply, (1, out, buffers, a_ring, b_ring, full, empty, groups, a_scale, b_scale, m, row_blocks, col_blocks,
                         k_blocks, b_grid_rows, a_stride, a_stride_k, GROUPED)),
            (_load, (a, b, a_ring, b_ring, full, empty, groups, row_blocks, col_blocks, k_blocks, n, GROUPED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
