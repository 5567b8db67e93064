"""wgrad kernel: per expert dy^T x over its tokens, 1x128 . 1x128 scales along them, fp32 out, written or added to.

The roles and the ring are those of rows.py, with tokens in the place of K. Per element, in order of tokens:
acc = fma(fp32(p * s_dy), s_x, acc), p one chain of 128 products. No split along the tokens, no atomics.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from dsv3fp8.kernels.gemm.gluon.pieces import MMA, block_of, block_sum, halves, promote_columns, put

TILE_K = 256
STAGES = 4
BAND = 16
OPTIONS = {"num_warps": 4, "maxnreg": 168}  # see rows.py

_TILE_K = gl.constexpr(TILE_K)
_STAGES = gl.constexpr(STAGES)
_BAND = gl.constexpr(BAND)


@gluon.jit
def _locate(tile, starts, n_blocks, k_tiles):
    """Expert, row block and column tile of its [N, K], first token block and number of token blocks."""
    per_expert = n_blocks * k_tiles
    expert = tile // per_expert
    n_block, k_tile = block_of(tile % per_expert, n_blocks, k_tiles, _BAND)
    first = gl.load(starts + expert)
    return expert, n_block, k_tile, first, gl.load(starts + expert + 1) - first


@gluon.jit
def _load(dy, x, dy_ring, x_ring, full, empty, starts, experts, n_blocks, k_tiles):
    step = 0
    for tile in range(gl.program_id(0), experts * n_blocks * k_tiles, gl.num_programs(0)):
        _, n_block, k_tile, first, steps = _locate(tile, starts, n_blocks, k_tiles)
        for block in range(first, first + steps):
            stage = step % _STAGES
            mbarrier.wait(empty.index(stage), ((step // _STAGES) & 1) ^ 1)
            ready = full.index(stage)
            mbarrier.expect(ready, (128 + _TILE_K) * 128)
            tma.async_copy_global_to_shared(dy, [n_block * 128, block * 128], ready, dy_ring.index(stage))
            tma.async_copy_global_to_shared(x, [k_tile * _TILE_K, block * 128], ready, x_ring.index(stage))
            step += 1


@gluon.jit
def _store_half(acc, out, out_ptr, buffers, GROUP: gl.constexpr, expert, row, col, n, k, ADD: gl.constexpr):
    """64 rows at [row, col] of the expert's matrix, in four parts of 32 columns. n is a multiple of 64."""
    l64: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    l32: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 32, 16])
    left, right = halves(acc, l64)
    q0, q1 = halves(left, l32)
    q2, q3 = halves(right, l32)
    parts = (q0, q1, q2, q3)
    for i in gl.static_range(4):
        part = parts[i]
        if ADD:
            rows = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, l32)), 1)
            cols = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, l32)), 0)
            corner = out_ptr + (expert * n + row).to(gl.int64) * k + (col + 32 * i)
            inside = (row + rows < n) & (col + 32 * i + cols < k)
            part += gl.load(corner + rows * k + cols, mask=inside, other=0.0)
        put(part, out, buffers.index(2 * GROUP + i % 2), expert * n + row, col + 32 * i)


@gluon.jit
def _multiply(
    GROUP: gl.constexpr, out, out_ptr, buffers, dy_ring, x_ring, full, empty, starts, dy_scale, x_scale, experts, n_blocks,
    k_tiles, n, k16, dy_stride, x_stride16, ADD: gl.constexpr,
):  # fmt: skip
    step = 0
    # Multiplied here, so that the compiler knows that columns start at multiples of 16 and vectorises their scales.
    k = k16 * 16
    x_stride = x_stride16 * 16
    zeros = gl.full([64, 128], 0.0, gl.float32, MMA)
    rows = gl.arange(0, 64, gl.SliceLayout(1, MMA))
    cols = gl.arange(0, 128, gl.SliceLayout(0, MMA))
    for tile in range(gl.program_id(0), experts * n_blocks * k_tiles, gl.num_programs(0)):
        expert, n_block, k_tile, first, steps = _locate(tile, starts, n_blocks, k_tiles)
        row = n_block * 128
        col = k_tile * _TILE_K + 128 * GROUP
        upper_at = gl.minimum(row + rows, n - 1)
        lower_at = gl.minimum(row + 64 + rows, n - 1)
        inside = col + cols < k
        upper = zeros
        lower = zeros
        for block in range(first, first + steps):
            stage = step % _STAGES
            phase = (step // _STAGES) & 1
            step += 1
            # Read before the wgmma, as in rows.py: column scales read after it were seen to give wrong elements.
            s_upper = gl.load(dy_scale + (upper_at + block * dy_stride))
            s_lower = gl.load(dy_scale + (lower_at + block * dy_stride))
            s_cols = gl.expand_dims(gl.load(x_scale + (block * x_stride + col) + cols, mask=inside, other=0.0), 0)
            mbarrier.wait(full.index(stage), phase)
            dy = dy_ring.index(stage)
            x = x_ring.index(stage).slice(128 * GROUP, 128)
            p = block_sum(dy.slice(0, 64), x, zeros)
            upper = promote_columns(p, gl.expand_dims(s_upper, 1), s_cols, upper)
            p = block_sum(dy.slice(64, 64), x, zeros)
            mbarrier.arrive(empty.index(stage))
            lower = promote_columns(p, gl.expand_dims(s_lower, 1), s_cols, lower)
        write = True
        if ADD:
            write = steps > 0  # an expert without tokens adds nothing
        if write:
            _store_half(upper, out, out_ptr, buffers, GROUP, expert, row, col, n, k, ADD)
            if row + 64 < n:  # the rows beyond are the next expert's
                _store_half(lower, out, out_ptr, buffers, GROUP, expert, row + 64, col, n, k, ADD)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["experts", "n_blocks", "k_tiles", "n", "k16", "dy_stride", "x_stride16"])
def wgrad_kernel(
    dy, x, out, out_ptr, starts, dy_scale, x_scale, experts, n_blocks, k_tiles, n, k16, dy_stride, x_stride16,
    ADD: gl.constexpr,
):  # fmt: skip
    """dy: TMA descriptor of codes [N, tokens], box 128 x 128; x: of [K, tokens], box 256 x 128.

    out: descriptor of fp32 [E * N, K], box 64 x 32. out_ptr: the same memory, read where ADD.
    starts: int32 [E + 1], the first block of 128 tokens of each expert, and the end.
    dy_scale [token blocks, N], x_scale [token blocks, K]: fp32, last dimension contiguous. k16, x_stride16: in units of 16.
    """
    dy_ring = gl.allocate_shared_memory(gl.float8e4nv, [_STAGES, 128, 128], dy.layout)
    x_ring = gl.allocate_shared_memory(gl.float8e4nv, [_STAGES, _TILE_K, 128], x.layout)
    buffers = gl.allocate_shared_memory(gl.float32, [4, 64, 32], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(_STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (0, out, out_ptr, buffers, dy_ring, x_ring, full, empty, starts, dy_scale, x_scale, experts, n_blocks,
                         k_tiles, n, k16, dy_stride, x_stride16, ADD)),
            (_multiply, (1, out, out_ptr, buffers, dy_ring, x_ring, full, empty, starts, dy_scale, x_scale, experts, n_blocks,
                         k_tiles, n, k16, dy_stride, x_stride16, ADD)),
            (_load, (dy, x, dy_ring, x_ring, full, empty, starts, experts, n_blocks, k_tiles)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
