"""fprop and dgrad kernel: rows in expert order times their expert's weights, bf16 out.

Persistent programs of nine warps: one loads operands by TMA into a ring, two warp groups multiply 64 rows each of tiles of
128 x 128. A tile never holds two experts. Each warp group has the next block of K in flight while it promotes the last one,
and the first two blocks of the next tile while it stores a tile, so that the tensor core always has work. The ring hands over
two blocks of K at a time: every barrier costs the warp groups instructions that the promotion needs.
Per element, in order of K: acc = fma(p, fp32(s_a * s_b), acc), p one chain of 128 products; then one rounding to bf16. Scales
that are constant along K (ONCE) multiply the finished sum instead, by fp32(s_a * s_b). No split along K, no atomics.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from dsv3fp8.kernels.gemm.gluon.pieces import MMA, MMA_64, add, begin, block_of, halves, promote, put, scaled, wait_for

TILE_N = 128
PAIRS = 3
BAND = 16
# 168 registers for each of 384 threads (warp groups are whole), moved to the consumers (240) from the loader (24).
OPTIONS = {"num_warps": 4, "maxnreg": 168}

_TILE_N = gl.constexpr(TILE_N)
_PAIRS = gl.constexpr(PAIRS)
_STAGES = gl.constexpr(2 * PAIRS)
_BAND = gl.constexpr(BAND)


@gluon.jit
def _locate(tile, groups, row_blocks, col_blocks, k_blocks, GROUPED: gl.constexpr):
    """Row block, column block, expert and blocks of K of a tile: none of K for a tile of no expert, or beyond the last."""
    tiles = row_blocks * col_blocks
    row_block, col_block = block_of(gl.minimum(tile, tiles - 1), row_blocks, col_blocks, _BAND)
    expert = 0
    if GROUPED:
        expert = gl.load(groups + row_block).to(gl.int32)
    steps = gl.where((expert < 0) | (tile >= tiles), 0, k_blocks)
    return row_block, col_block, gl.maximum(expert, 0), steps


@gluon.jit
def _load(a, b, a_ring, b_ring, full, empty, groups, row_blocks, col_blocks, k_blocks, n, GROUPED: gl.constexpr):
    step = 0
    for tile in range(gl.program_id(0), row_blocks * col_blocks, gl.num_programs(0)):
        row_block, col_block, expert, steps = _locate(tile, groups, row_blocks, col_blocks, k_blocks, GROUPED)
        b_row = expert * n + col_block * _TILE_N
        for pair in range((steps + 1) // 2):
            slot = step % _PAIRS
            mbarrier.wait(empty.index(slot), ((step // _PAIRS) & 1) ^ 1)
            ready = full.index(slot)
            whole = 2 * pair + 1 < steps
            mbarrier.expect(ready, 2 * (128 + _TILE_N) * 128, pred=whole)
            mbarrier.expect(ready, (128 + _TILE_N) * 128, pred=2 * pair + 1 == steps)
            for i in gl.static_range(2):
                there = 2 * pair + i < steps
                k = (2 * pair + i) * 128
                tma.async_copy_global_to_shared(a, [row_block * 128, k], ready, a_ring.index(2 * slot + i), pred=there)
                tma.async_copy_global_to_shared(b, [b_row, k], ready, b_ring.index(2 * slot + i), pred=there)
            step += 1


@gluon.jit
def _scales(a_scale, b_scale, rows, b_at, k_block, m, a_stride, a_stride_k, ONCE: gl.constexpr):
    """Both scales of a block of K. Masked, not clamped: a clamped index would break up the loads."""
    s_a = 1.0
    s_b = 1.0
    if not ONCE:
        s_a = gl.load(a_scale + (rows * a_stride + k_block * a_stride_k), mask=rows < m, other=0.0)
        s_b = gl.load(b_scale + (b_at + k_block))
    return s_a, s_b


@gluon.jit
def _promote(p, scale, acc, ONCE: gl.constexpr):
    return add(p, acc) if ONCE else promote(p, gl.expand_dims(scale, 1), acc)


@gluon.jit
def _store(acc, out, buffers, GROUP: gl.constexpr, row, col):
    left, right = halves(acc.to(gl.bfloat16), MMA_64)
    put(left, out, buffers.index(2 * GROUP), row, col)
    put(right, out, buffers.index(2 * GROUP + 1), row, col + 64)


@gluon.jit
def _store_scaled(
    acc, out, buffers, GROUP: gl.constexpr, row, col, steps, expert, a_scale, b_scale, m, b_scales, a_stride,
    A_TILE: gl.constexpr,
):  # fmt: skip
    """acc * fp32(s_a * s_b), by halves for the registers that scales of columns take. No steps: zeros of no expert."""
    parts = halves(acc, MMA_64)
    there = gl.where(steps > 0, 1, 0)
    scale_rows = row // A_TILE  # of all 64 rows, or of the first
    if A_TILE == 1:
        scale_rows += gl.arange(0, 64, gl.SliceLayout(1, MMA_64))
    s_a = gl.load(a_scale + scale_rows * a_stride, mask=scale_rows < there * m, other=0.0)
    for i in gl.static_range(2):
        cols = gl.minimum(col + 64 * i + gl.arange(0, 64, gl.SliceLayout(0, MMA_64)), b_scales - 1)
        s_b = gl.load(b_scale + (expert * b_scales + cols), mask=cols < there * b_scales, other=0.0)
        scale = (gl.expand_dims(s_a, 1) if A_TILE == 1 else s_a) * gl.expand_dims(s_b, 0)
        put(scaled(parts[i], scale).to(gl.bfloat16), out, buffers.index(2 * GROUP + i), row, col + 64 * i)


@gluon.jit
def _multiply(
    GROUP: gl.constexpr, out, buffers, a_ring, b_ring, full, empty, groups, a_scale, b_scale, m, row_blocks, col_blocks,
    k_blocks, b_grid_rows, a_stride, a_stride_k, GROUPED: gl.constexpr, A_TILE: gl.constexpr, ONCE: gl.constexpr,
):  # fmt: skip
    zeros = gl.full([64, 128], 0.0, gl.float32, MMA)
    rows = 64 * GROUP + gl.arange(0, 64, gl.SliceLayout(1, MMA))
    acc = zeros
    step = 0
    row_block = 0
    col_block = 0
    b_at = 0
    expert = 0
    steps = 0
    following = gl.program_id(0)
    own_tiles = gl.cdiv(row_blocks * col_blocks - gl.program_id(0), gl.num_programs(0))
    # Each turn finishes and stores a tile and begins the next; the first has nothing to finish. p and q take turns as the
    # block in flight. None is in flight from one turn to the next: ptxas would serialize all.
    for turn in range(own_tiles + 1):
        if steps > 2:
            tile_rows = (row_block * 128 + rows) // A_TILE
            s_a, s_b = _scales(a_scale, b_scale, tile_rows, b_at, 2, m, a_stride, a_stride_k, ONCE)
            scale = s_a * s_b
            wait_for(full, step, True, _PAIRS)
            p = begin(a_ring, b_ring, 2 * (step % _PAIRS), zeros, GROUP)
            for pair in range((steps - 3) // 2):
                s_a, s_b = _scales(a_scale, b_scale, tile_rows, b_at, 2 * pair + 3, m, a_stride, a_stride_k, ONCE)
                q = begin(a_ring, b_ring, 2 * (step % _PAIRS) + 1, zeros, GROUP)
                p = warpgroup_mma_wait(num_outstanding=1, deps=[p])
                acc = _promote(p, scale, acc, ONCE)
                scale = s_a * s_b
                s_a, s_b = _scales(a_scale, b_scale, tile_rows, b_at, 2 * pair + 4, m, a_stride, a_stride_k, ONCE)
                wait_for(full, step + 1, True, _PAIRS)
                p = begin(a_ring, b_ring, 2 * ((step + 1) % _PAIRS), zeros, GROUP)
                q = warpgroup_mma_wait(num_outstanding=1, deps=[q])
                mbarrier.arrive(empty.index(step % _PAIRS))
                acc = _promote(q, scale, acc, ONCE)
                scale = s_a * s_b
                step += 1
            if steps % 2 == 0:
                s_a, s_b = _scales(a_scale, b_scale, tile_rows, b_at, steps - 1, m, a_stride, a_stride_k, ONCE)
                q = begin(a_ring, b_ring, 2 * (step % _PAIRS) + 1, zeros, GROUP)
                last_but_one = warpgroup_mma_wait(num_outstanding=1, deps=[p])
                acc = _promote(last_but_one, scale, acc, ONCE)
                last = warpgroup_mma_wait(num_outstanding=0, deps=[q])
                mbarrier.arrive(empty.index(step % _PAIRS))
                acc = _promote(last, s_a * s_b, acc, ONCE)
            else:
                only = warpgroup_mma_wait(num_outstanding=0, deps=[p])
                mbarrier.arrive(empty.index(step % _PAIRS))
                acc = _promote(only, scale, acc, ONCE)
            step += 1
        row = row_block * 128 + 64 * GROUP
        col = col_block * _TILE_N
        done_expert = expert
        done_steps = steps
        row_block, col_block, expert, steps = _locate(following, groups, row_blocks, col_blocks, k_blocks, GROUPED)
        following += gl.num_programs(0)
        b_at = (expert * b_grid_rows + col_block) * k_blocks
        if ONCE and turn > 0:  # first, for the registers that scales of columns take
            _store_scaled(
                acc, out, buffers, GROUP, row, col, done_steps, done_expert, a_scale, b_scale, m, b_grid_rows, a_stride, A_TILE,
            )  # fmt: skip
        tile_rows = (row_block * 128 + rows) // A_TILE
        s_a, s_b = _scales(a_scale, b_scale, tile_rows, b_at, 0, m, a_stride, a_stride_k, ONCE)
        wait_for(full, step, steps > 0, _PAIRS)
        p = begin(a_ring, b_ring, 2 * (step % _PAIRS), zeros, GROUP)
        q = begin(a_ring, b_ring, 2 * (step % _PAIRS) + 1, zeros, GROUP)
        if not ONCE and turn > 0:
            _store(acc, out, buffers, GROUP, row, col)
        t_a, t_b = _scales(a_scale, b_scale, tile_rows, b_at, gl.minimum(k_blocks - 1, 1), m, a_stride, a_stride_k, ONCE)
        first = warpgroup_mma_wait(num_outstanding=1, deps=[p])
        acc = _promote(first, s_a * s_b, zeros, ONCE)
        second = warpgroup_mma_wait(num_outstanding=0, deps=[q])
        mbarrier.arrive(empty.index(step % _PAIRS), pred=steps > 0)
        if steps > 1:
            acc = _promote(second, t_a * t_b, acc, ONCE)
        if steps == 0:
            acc = zeros  # a tile of no expert
        step += gl.minimum(steps, 1)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["m", "row_blocks", "col_blocks", "k_blocks", "n", "b_grid_rows", "a_stride", "a_stride_k"])
def rows_kernel(
    a, b, out, groups, a_scale, b_scale, m, row_blocks, col_blocks, k_blocks, n, b_grid_rows, a_stride, a_stride_k,
    GROUPED: gl.constexpr, A_TILE: gl.constexpr, ONCE: gl.constexpr,
):  # fmt: skip
    """a: TMA descriptor of codes [m, K], b of [E * n, K], boxes of 128 x 128; out: of bf16 [m, n], boxes of 64 x 64.

    groups: expert of each block of 128 rows, -1 for blocks of no expert. a_scale: fp32, m scales of A_TILE rows, strides
    a_stride (from one to the next) and a_stride_k (block of K). b_scale: fp32 [E, b_grid_rows, k_blocks], contiguous. Not
    GROUPED: one weight, groups is not read. ONCE: one scale along all of K; a_stride is 0 where there is one for all rows;
    b_grid_rows is n or 1.
    """
    a_ring = gl.allocate_shared_memory(a.dtype, [_STAGES, 128, 128], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [_STAGES, _TILE_N, 128], b.layout)
    buffers = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 64], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [_PAIRS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_PAIRS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_PAIRS):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (0, out, buffers, a_ring, b_ring, full, empty, groups, a_scale, b_scale, m, row_blocks, col_blocks,
                         k_blocks, b_grid_rows, a_stride, a_stride_k, GROUPED, A_TILE, ONCE)),
            (_multiply, (1, out, buffers, a_ring, b_ring, full, empty, groups, a_scale, b_scale, m, row_blocks, col_blocks,
                         k_blocks, b_grid_rows, a_stride, a_stride_k, GROUPED, A_TILE, ONCE)),
            (_load, (a, b, a_ring, b_ring, full, empty, groups, row_blocks, col_blocks, k_blocks, n, GROUPED)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
