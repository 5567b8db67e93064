"""What both Gluon GEMMs are made of. Runs inside kernels; see rows.py for how they work together.

A consumer warp group multiplies 64 x 128 (x 128 along K) at a time: `begin` begins one chain of the tensor core, unscaled, in
64 registers a thread, and `promote*` adds it to the fp32 accumulator, another 64.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]))
MMA_64 = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))

# Barrier of the threads of a warp group; Triton 3.7 renamed it.
group_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def wait_for(full, step, there, SLOTS: gl.constexpr):
    """Waits until the loader has filled the slot of `step`, where `there` is true."""
    mbarrier.wait(full.index(step % SLOTS), (step // SLOTS) & 1, pred=there)


@gluon.jit
def begin(a_ring, b_ring, at, zeros, GROUP: gl.constexpr):
    """Begins 64 rows of a times all of b, of the ring's block `at`: fp32 [64, 128], one chain from zero.

    A block that does not exist is multiplied all the same, whatever lies there: a branch around wgmma that are in flight would
    serialize them. The caller drops the result.
    """
    a = a_ring.index(at).slice(64 * GROUP, 64)
    return warpgroup_mma(a, b_ring.index(at).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def promote(p, scale, acc):
    """fma(p, scale, acc). Inline and not pure, or LLVM moves it past the next wgmma, which needs p's registers."""
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [p, scale, acc], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def promote_columns(p, row_scale, col_scale, acc):
    """fma(fp32(p * row_scale), col_scale, acc), in this order of rounding."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.rn.f32 t, $1, $2; fma.rn.f32 $0, t, $3, $4; }",
        "=f,f,f,f,f",
        [p, row_scale, col_scale, acc],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def scaled(p, scale):
    """fp32(p * scale), which no addition behind it is contracted with."""
    return gl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [p, scale], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def add(p, acc):
    """p + acc, inline for the reason of `promote`."""
    return gl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [p, acc], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def block_of(tile, row_blocks, col_blocks, BAND: gl.constexpr):
    """Row and column block of a tile, in bands of BAND row blocks: tiles that run together share operands in the L2 cache."""
    in_band = BAND * col_blocks
    first = tile // in_band * BAND
    height = gl.minimum(row_blocks - first, BAND)
    within = tile % in_band
    return first + within % height, within // height


@gluon.jit
def halves(x, LAYOUT: gl.constexpr):
    """The left and the right half of a tile's columns; no value leaves its thread."""
    left, right = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()
    return gl.convert_layout(left, LAYOUT, assert_trivial=True), gl.convert_layout(right, LAYOUT, assert_trivial=True)


@gluon.jit
def put(part, out, buffer, row, col):
    """Store part at [row, col] of `out`, through one of two buffers taken in turn."""
    tma.store_wait(1)  # the buffer's store, the last but one, has been read
    group_barrier()
    buffer.store(part)
    fence_async_shared()
    group_barrier()
    tma.async_copy_shared_to_global(out, [row, col], buffer)
