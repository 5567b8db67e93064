"""wgrad kernel: per expert dy^T x over its tokens, fp32 out, written or added to.

The roles, the ring and the order of work are those of rows.py, with tokens in the place of K; scales come through the ring
too. Per element, in order of tokens: acc = fma(fp32(p * s_dy), s_x, acc), p one chain of 128 products. Scales that are constant
along an expert's tokens (ONCE) multiply its finished sum instead, by fp32(s_dy * s_x). No split along the tokens, no atomics.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from dsv3fp8.kernels.gemm.gluon.pieces import MMA, MMA_64, add, begin, block_of, halves, promote_columns, put, scaled, wait_for

TILE_K = 128
STAGES = 5
BAND = 16
OPTIONS = {"num_warps": 4, "maxnreg": 168}  # see rows.py

_TILE_K = gl.constexpr(TILE_K)
_STAGES = gl.constexpr(STAGES)
_BAND = gl.constexpr(BAND)
_MMA_32 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16]))


@gluon.jit
def _locate(tile, starts, experts, n_blocks, k_tiles):
    """Expert, row block and column tile of its [N, K], first token block, and token blocks: none beyond the last tile."""
    per_expert = n_blocks * k_tiles
    tiles = experts * per_expert
    beyond = tile >= tiles
    tile = gl.minimum(tile, tiles - 1)
    expert = tile // per_expert
    n_block, k_tile = block_of(tile % per_expert, n_blocks, k_tiles, _BAND)
    first = gl.load(starts + expert)
    return expert, n_block, k_tile, first, gl.where(beyond, 0, gl.load(starts + expert + 1) - first)


@gluon.jit
def _load(
    dy, x, dy_scale, x_scale, dy_ring, x_ring, dy_scales, x_scales, full, empty, starts, experts, n_blocks, k_tiles, n, k,
    ONCE: gl.constexpr,
):  # fmt: skip
    step = 0
    for tile in range(gl.program_id(0), experts * n_blocks * k_tiles, gl.num_programs(0)):
        _, n_block, k_tile, first, steps = _locate(tile, starts, experts, n_blocks, k_tiles)
        row = n_block * 128
        col = k_tile * _TILE_K
        for block in range(first, first + steps):
            stage = step % _STAGES
            mbarrier.wait(empty.index(stage), ((step // _STAGES) & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, (128 + _TILE_K) * (128 if ONCE else 128 + 4))  # codes, and fp32 scales
            tma.async_copy_global_to_shared(dy, [row, block * 128], ready, dy_ring.index(stage))
            tma.async_copy_global_to_shared(x, [col, block * 128], ready, x_ring.index(stage))
            if not ONCE:
                # The last tile's boxes run into the scales of the next block: of rows and columns that are not stored.
                tma.async_copy_global_to_shared(dy_scale, [block * n + row], ready, dy_scales.index(stage))
                tma.async_copy_global_to_shared(x_scale, [block * k + col], ready, x_scales.index(stage))
            step += 1


@gluon.jit
def _start(dy_ring, x_ring, full, step, there, zeros, GROUP: gl.constexpr):
    wait_for(full, step, there, _STAGES)
    return begin(dy_ring, x_ring, step % _STAGES, zeros, GROUP)


@gluon.jit
def _add(p, dy_scales, x_scales, step, GROUP: gl.constexpr, left, right, ONCE: gl.constexpr):
    """p times the scales of its stage, added. Before the stage is given back: read later, scales were seen to be the next's."""
    stage = step % _STAGES
    p_left, p_right = halves(p, MMA_64)
    if ONCE:
        left = add(p_left, left)
        right = add(p_right, right)
    else:
        s_rows = gl.expand_dims(dy_scales.index(stage).slice(64 * GROUP, 64).load(gl.SliceLayout(1, MMA_64)), 1)
        # By halves, so that the scales of 128 columns are not in registers at once.
        s_left = gl.expand_dims(x_scales.index(stage).slice(0, 64).load(gl.SliceLayout(0, MMA_64)), 0)
        left = promote_columns(p_left, s_rows, s_left, left)
        s_right = gl.expand_dims(x_scales.index(stage).slice(64, 64).load(gl.SliceLayout(0, MMA_64)), 0)
        right = promote_columns(p_right, s_rows, s_right, right)
    return left, right


@gluon.jit
def _finish(half, dy_scale, x_scale, first, steps, row, col, dy_width, dy_stride, x_width, x_stride):
    """The finished sum of an expert's tokens times fp32(s_dy * s_x), which stand at its first block of them; zeros of none."""
    rows = gl.minimum(row + gl.arange(0, 64, gl.SliceLayout(1, MMA_64)), dy_width - 1)
    cols = gl.minimum(col + gl.arange(0, 64, gl.SliceLayout(0, MMA_64)), x_width - 1)
    there = gl.where(steps > 0, 1, 0)
    s_dy = gl.load(dy_scale + (first * dy_stride + rows), mask=rows < there * dy_width, other=0.0)
    s_x = gl.load(x_scale + (first * x_stride + cols), mask=cols < there * x_width, other=0.0)
    return scaled(half, gl.expand_dims(s_dy, 1) * gl.expand_dims(s_x, 0))


@gluon.jit
def _store_half(acc, out, out_ptr, buffers, GROUP: gl.constexpr, expert, row, col, n, k, ADD: gl.constexpr):
    """64 x 64 at [row, col] of the expert's matrix, in two parts. n is a multiple of 64."""
    parts = halves(acc, _MMA_32)
    for i in gl.static_range(2):
        part = parts[i]
        if ADD:
            rows = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, _MMA_32)), 1)
            cols = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, _MMA_32)), 0)
            corner = out_ptr + (expert * n + row).to(gl.int64) * k + (col + 32 * i)
            inside = (row + rows < n) & (col + 32 * i + cols < k)
            part += gl.load(corner + rows * k + cols, mask=inside, other=0.0)
        put(part, out, buffers.index(2 * GROUP + i), expert * n + row, col + 32 * i)


@gluon.jit
def _store(
    write, left, right, out, out_ptr, buffers, GROUP: gl.constexpr, expert, row, col, n, k, ADD: gl.constexpr,
    dy_scale, x_scale, first, steps, dy_width, dy_stride, x_width, x_stride, ONCE: gl.constexpr,
):  # fmt: skip
    if write:
        if ONCE:
            left = _finish(left, dy_scale, x_scale, first, steps, row, col, dy_width, dy_stride, x_width, x_stride)
            right = _finish(right, dy_scale, x_scale, first, steps, row, col + 64, dy_width, dy_stride, x_width, x_stride)
        _store_half(left, out, out_ptr, buffers, GROUP, expert, row, col, n, k, ADD)
        _store_half(right, out, out_ptr, buffers, GROUP, expert, row, col + 64, n, k, ADD)


@gluon.jit
def _multiply(
    GROUP: gl.constexpr, out, out_ptr, buffers, dy_ring, x_ring, dy_scales, x_scales, full, empty, starts, experts, n_blocks,
    k_tiles, n, k, dy_width, dy_stride, x_width, x_stride, ADD: gl.constexpr, ONCE: gl.constexpr,
):  # fmt: skip
    zeros = gl.full([64, 128], 0.0, gl.float32, MMA)
    left = gl.full([64, 64], 0.0, gl.float32, MMA_64)
    right = gl.full([64, 64], 0.0, gl.float32, MMA_64)
    nothing = left
    step = 0
    expert = 0
    row = 0
    col = 0
    first = 0
    steps = 0
    following = gl.program_id(0)
    own_tiles = gl.cdiv(experts * n_blocks * k_tiles - gl.program_id(0), gl.num_programs(0))
    for turn in range(own_tiles + 1):  # as in rows.py
        if steps > 2:
            p = _start(dy_ring, x_ring, full, step, True, zeros, GROUP)
            for _ in range((steps - 3) // 2):
                for _ in gl.static_range(2):
                    q = _start(dy_ring, x_ring, full, step + 1, True, zeros, GROUP)
                    p = warpgroup_mma_wait(num_outstanding=1, deps=[p])
                    left, right = _add(p, dy_scales, x_scales, step, GROUP, left, right, ONCE)
                    mbarrier.arrive(empty.index(step % _STAGES))
                    p = q
                    step += 1
            if steps % 2 == 0:
                q = _start(dy_ring, x_ring, full, step + 1, True, zeros, GROUP)
                last_but_one = warpgroup_mma_wait(num_outstanding=1, deps=[p])
                left, right = _add(last_but_one, dy_scales, x_scales, step, GROUP, left, right, ONCE)
                mbarrier.arrive(empty.index(step % _STAGES))
                last = warpgroup_mma_wait(num_outstanding=0, deps=[q])
                left, right = _add(last, dy_scales, x_scales, step + 1, GROUP, left, right, ONCE)
                mbarrier.arrive(empty.index((step + 1) % _STAGES))
                step += 2
            else:
                only = warpgroup_mma_wait(num_outstanding=0, deps=[p])
                left, right = _add(only, dy_scales, x_scales, step, GROUP, left, right, ONCE)
                mbarrier.arrive(empty.index(step % _STAGES))
                step += 1
        done_expert = expert
        done_row = row + 64 * GROUP
        done_col = col
        done_first = first
        done_steps = steps
        write = (turn > 0) & (done_row < n)  # the rows beyond are the next expert's
        if ADD:
            write = write & (steps > 0)  # an expert without tokens adds nothing
        expert, n_block, k_tile, first, steps = _locate(following, starts, experts, n_blocks, k_tiles)
        following += gl.num_programs(0)
        row = n_block * 128
        col = k_tile * _TILE_K
        if ADD:  # first, for the registers that old values take
            _store(
                write, left, right, out, out_ptr, buffers, GROUP, done_expert, done_row, done_col, n, k, ADD,
                dy_scales, x_scales, done_first, done_steps, dy_width, dy_stride, x_width, x_stride, ONCE,
            )  # fmt: skip
        p = _start(dy_ring, x_ring, full, step, steps > 0, zeros, GROUP)
        q = _start(dy_ring, x_ring, full, step + 1, steps > 1, zeros, GROUP)
        if not ADD:
            _store(
                write, left, right, out, out_ptr, buffers, GROUP, done_expert, done_row, done_col, n, k, ADD,
                dy_scales, x_scales, done_first, done_steps, dy_width, dy_stride, x_width, x_stride, ONCE,
            )  # fmt: skip
        one = warpgroup_mma_wait(num_outstanding=1, deps=[p])
        left, right = _add(one, dy_scales, x_scales, step, GROUP, nothing, nothing, ONCE)
        mbarrier.arrive(empty.index(step % _STAGES), pred=steps > 0)
        two = warpgroup_mma_wait(num_outstanding=0, deps=[q])
        if steps > 1:
            left, right = _add(two, dy_scales, x_scales, step + 1, GROUP, left, right, ONCE)
        mbarrier.arrive(empty.index((step + 1) % _STAGES), pred=steps > 1)
        if steps == 0:
            left = nothing
            right = nothing
        step += gl.minimum(steps, 2)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["experts", "n_blocks", "k_tiles", "n", "k", "dy_width", "dy_stride", "x_width", "x_stride"])
def wgrad_kernel(
    dy, x, dy_scale, x_scale, out, out_ptr, starts, experts, n_blocks, k_tiles, n, k, dy_width, dy_stride, x_width, x_stride,
    ADD: gl.constexpr, ONCE: gl.constexpr,
):  # fmt: skip
    """dy: TMA descriptor of codes [N, tokens], x of [K, tokens], boxes of 128 x 128.

    dy_scale, x_scale: descriptors of fp32 [token blocks, N] and [token blocks, K], flattened, boxes of 128. ONCE: pointers to
    fp32 [token blocks, width], width 1 or as before, of which an expert's first row is read; a stride of 0: there is one row.
    out: descriptor of fp32 [E * N, K], boxes of 64 x 32; out_ptr: the same memory, read where ADD.
    starts: int32 [E + 1], the first block of 128 tokens of each expert, and the end.
    """
    dy_ring = gl.allocate_shared_memory(dy.dtype, [_STAGES, 128, 128], dy.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [_STAGES, _TILE_K, 128], x.layout)
    if ONCE:
        dy_scales = dy_scale
        x_scales = x_scale
    else:
        dy_scales = gl.allocate_shared_memory(gl.float32, [_STAGES, 128], dy_scale.layout)
        x_scales = gl.allocate_shared_memory(gl.float32, [_STAGES, _TILE_K], x_scale.layout)
    buffers = gl.allocate_shared_memory(gl.float32, [4, 64, 32], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (0, out, out_ptr, buffers, dy_ring, x_ring, dy_scales, x_scales, full, empty, starts, experts, n_blocks,
                         k_tiles, n, k, dy_width, dy_stride, x_width, x_stride, ADD, ONCE)),
            (_multiply, (1, out, out_ptr, buffers, dy_ring, x_ring, dy_scales, x_scales, full, empty, starts, experts, n_blocks,
                         k_tiles, n, k, dy_width, dy_stride, x_width, x_stride, ADD, ONCE)),
            (_load, (dy, x, dy_scale, x_scale, dy_ring, x_ring, dy_scales, x_scales, full, empty, starts, experts, n_blocks,
                     k_tiles, n, k, ONCE)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
