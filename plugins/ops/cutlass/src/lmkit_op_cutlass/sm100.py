"""x @ w.T on NVIDIA's sm_100a: one warp loads tiles by TMA, one multiplies them by tcgen05, four store. Blocks persist.

The operands are those of `sm90.Linear`, float8 with scales by row included; sums are in tensor memory, where those of
float8 are float32. Two tiles lie there, so that one is stored while the next is multiplied. Sources: the PTX ISA
(tcgen05.mma, tcgen05.ld) and the reference of the CuTe DSL.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator, TmemAllocator
from cutlass.utils import blackwell_helpers

from lmkit_op_cutlass.tiles import LINE, Tile, place

K_MAJOR = OperandMajorMode.K
STORERS, MULTIPLIER, LOADER = range(4), 4, 5  # warps
SUMS = 2  # tiles in tensor memory
STEP = 16  # tokens that a thread reads from there at a time


class Linear:
    """weight [n, k], x [t, k] -> out [t, n], as `sm90.Linear`; `scales` is "" or "rows"."""

    def __init__(self, tile: Tile, kind: type[cutlass.Numeric], out: type[cutlass.Numeric], scales: str = "") -> None:
        self.tile, self.kind, self.out, self.scales = tile, kind, out, scales
        self.depth = LINE * 8 // kind.width  # columns of one step
        self.shape = (tile.rows, tile.tokens, self.depth)
        self.stages = tile.stages()

    def instruction(self) -> Any:
        shape, one, source = (*self.shape[:2], self.depth // 4), tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM
        if self.scales:
            return tcgen05.MmaF8F6F4Op(self.kind, self.kind, Float32, shape, one, source, K_MAJOR, K_MAJOR)
        return tcgen05.MmaF16BF16Op(self.kind, Float32, shape, one, source, K_MAJOR, K_MAJOR)

    @cute.jit
    def __call__(
        self,
        weight: cute.Pointer,
        x: cute.Pointer,
        out: cute.Pointer,
        bias: cute.Pointer | None,
        weight_scales: cute.Pointer | None,
        x_scales: cute.Pointer | None,
        n: Int32,
        k: Int32,
        t: Int32,
        band: Int32,
        blocks: Int32,
        stream: CUstream,
    ):
        k = cute.assume(k, divby=128 // self.kind.width)
        tiled = cute.make_tiled_mma(self.instruction())
        w_layout = blackwell_helpers.make_smem_layout_a(tiled, self.shape, self.kind, self.stages)
        x_layout = blackwell_helpers.make_smem_layout_b(tiled, self.shape, self.kind, self.stages)
        copy, one = cpasync.CopyBulkTensorTileG2SOp(tcgen05.CtaGroup.ONE), (1, 1, 1, 1)
        w_stage, x_stage = (cute.slice_(layout, (None, None, None, 0)) for layout in (w_layout, x_layout))
        w_copy, w_coords = cute.nvgpu.make_tiled_tma_atom_A(
            copy, cute.make_tensor(weight, cute.make_layout((n, k), stride=(k, 1))), w_stage, self.shape, tiled, one
        )
        x_copy, x_coords = cute.nvgpu.make_tiled_tma_atom_B(
            copy, cute.make_tensor(x, cute.make_layout((t, k), stride=(k, 1))), x_stage, self.shape, tiled, one
        )
        scaled = None
        if cutlass.const_expr(self.scales):
            scaled = (
                cute.make_tensor(weight_scales, cute.make_layout((n,))),
                cute.make_tensor(x_scales, cute.make_layout((t,))),
            )
        self.kernel(
            w_copy, w_coords, w_layout, x_copy, x_coords, x_layout,
            cute.make_tensor(out, cute.make_layout((n, t), stride=(1, cutlass.Int64(n)))),
            None if bias is None else cute.make_tensor(bias, cute.make_layout((n,))),
            scaled, tiled, band,
        ).launch(grid=(blocks, 1, 1), block=((LOADER + 1) * 32, 1, 1), min_blocks_per_mp=1, stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        w_copy: cute.CopyAtom,
        w: cute.Tensor,
        w_layout: cute.ComposedLayout,
        x_copy: cute.CopyAtom,
        x: cute.Tensor,
        x_layout: cute.ComposedLayout,
        out: cute.Tensor,
        bias: Any,  # a tensor, or None
        scaled: Any,  # tensors of scales, or None
        tiled: cute.TiledMma,
        band: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = SmemAllocator()
        barriers = shared.allocate_array(cutlass.Int64, 2 * (self.stages + SUMS))
        address = shared.allocate_array(Int32, 1)
        w_stages = shared.allocate_tensor(self.kind, w_layout.outer, 1024, w_layout.inner)
        x_stages = shared.allocate_tensor(self.kind, x_layout.outer, 1024, x_layout.inner)
        loaded, to_multiply, summed, to_store = self.pipes(barriers)
        memory = TmemAllocator(
            address, barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=32 * (len(STORERS) + 1))
        )
        rows = cute.ceil_div(cute.size(out, mode=[0]), self.tile.rows)
        tiles = rows * cute.ceil_div(cute.size(out, mode=[1]), self.tile.tokens)
        steps = cute.ceil_div(cute.size(w, mode=[1]), self.depth)
        first, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        mine = tiled.get_slice(0)
        layout = tiled.make_fragment_C(cute.append(tiled.partition_shape_C(self.shape[:2]), SUMS)).layout
        if warp == LOADER:
            w_to, w_from = parts(
                w_copy, w_stages, mine.partition_A(cute.local_tile(w, (self.tile.rows, self.depth), (None, None)))
            )
            x_to, x_from = parts(
                x_copy, x_stages, mine.partition_B(cute.local_tile(x, (self.tile.tokens, self.depth), (None, None)))
            )
            for tile in cutlass.range(first, tiles, stride):
                row, column = place(tile, rows, band)
                for step in cutlass.range(steps, unroll=1):
                    slot = loaded.acquire_and_advance()
                    cute.copy(w_copy, w_from[None, row, step], w_to[None, slot.index], tma_bar_ptr=slot.barrier)
                    cute.copy(x_copy, x_from[None, column, step], x_to[None, slot.index], tma_bar_ptr=slot.barrier)
            loaded.tail()
        elif warp == MULTIPLIER:
            memory.wait_for_alloc()
            sums = cute.make_tensor(memory.retrieve_ptr(Float32), layout)
            w_parts, x_parts = tiled.make_fragment_A(w_stages), tiled.make_fragment_B(x_stages)
            for _ in cutlass.range(first, tiles, stride):
                room = summed.acquire_and_advance()
                tiled.set(tcgen05.Field.ACCUMULATE, False)
                for _ in cutlass.range(steps, unroll=1):
                    slot = to_multiply.wait_and_advance()
                    for part in cutlass.range_constexpr(cute.size(w_parts, mode=[2])):
                        at, ours = (None, None, part, slot.index), sums[None, None, None, room.index]
                        cute.gemm(tiled, ours, w_parts[at], x_parts[at], ours)
                        tiled.set(tcgen05.Field.ACCUMULATE, True)
                    slot.release()
                room.commit()
            summed.tail()
        else:
            memory.allocate(self.columns)
            memory.wait_for_alloc()
            start = memory.retrieve_ptr(Float32)
            sums = cute.make_tensor(start, layout)
            for tile in cutlass.range(first, tiles, stride):
                row, column = place(tile, rows, band)
                slot = to_store.wait_and_advance()
                origin = (row * self.tile.rows, column * self.tile.tokens)
                self.store(out, bias, scaled, sums[(None, None), 0, 0, slot.index], origin)
                slot.release()
            pipeline.NamedBarrier(barrier_id=2, num_threads=len(STORERS) * 32).arrive_and_wait()  # all have read
            memory.relinquish_alloc_permit()
            memory.free(start)

    def pipes(self, barriers: cute.Pointer) -> tuple[Any, ...]:
        """Ends of two: of loaded steps, and of tiles of sums."""
        one, alone = pipeline.CooperativeGroup(pipeline.Agent.Thread), cute.make_layout((1, 1, 1, 1))
        steps = pipeline.PipelineTmaUmma.create(
            barrier_storage=barriers,
            num_stages=self.stages,
            producer_group=one,
            consumer_group=one,
            tx_count=(self.tile.rows + self.tile.tokens) * LINE,
            cta_layout_vmnk=alone,
        )
        sums = pipeline.PipelineUmmaAsync.create(
            barrier_storage=barriers + 2 * self.stages,
            num_stages=SUMS,
            producer_group=one,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, len(STORERS) * 32),
            cta_layout_vmnk=alone,
        )
        return *steps.make_participants(), *sums.make_participants()

    @property
    def columns(self) -> int:
        """How many of tensor memory are asked for: powers of two are given out."""
        return max(32, SUMS * self.tile.tokens)

    def reads(self, sums: cute.Tensor, thread: Any) -> tuple[Any, cute.Tensor, cute.Tensor]:
        """How a thread copies STEP sums from tensor memory, where all of its own are [.., 0, i], and their places."""
        some = (self.tile.rows, STEP)
        load = tcgen05.make_tmem_copy(
            cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x16), Float32),
            cute.flat_divide(sums, some)[None, None, 0, 0],
        ).get_slice(thread)
        there = load.partition_S(cute.flat_divide(sums, some))
        return load, there, load.partition_D(cute.flat_divide(cute.make_identity_tensor(self.shape[:2]), some))

    @cute.jit
    def store(
        self,
        out: cute.Tensor,
        bias: Any,  # a tensor, or None
        scaled: Any,  # tensors of scales, or None
        sums: cute.Tensor,
        origin: tuple[Int32, Int32],
    ):
        """A thread has one feature of all tokens, STEP of them at a time."""
        n, t = cute.size(out, mode=[0]), cute.size(out, mode=[1])
        load, there, places = self.reads(sums, cute.arch.thread_idx()[0])
        feature = origin[0] + places[None, None, None, 0, 0][0][0]
        scale, shift = Float32(1), Float32(0)
        if feature < n:
            if cutlass.const_expr(self.scales == "rows"):
                scale = scaled[0][feature]
            if cutlass.const_expr(bias is not None):
                shift = bias[feature].to(Float32)
        here = cute.make_rmem_tensor(places[None, None, None, 0, 0].shape, Float32)
        for i in cutlass.range(self.tile.tokens // STEP, unroll=1):
            cute.copy(load, there[None, None, None, 0, i], here)
            cute.arch.fence_view_async_tmem_load()  # waits for it
            for j in cutlass.range_constexpr(cute.size(here)):
                token = origin[1] + places[None, None, None, 0, i][j][1]
                if feature < n and token < t:
                    value = here[j]
                    if cutlass.const_expr(self.scales == "rows"):
                        value *= scale * scaled[1][token]
                    out[feature, token] = (value + shift).to(self.out)


def parts(copy: cute.CopyAtom, stages: cute.Tensor, tiles: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """Where a step is copied to [.., stage] and from [.., tile, step]."""
    return cpasync.tma_partition(
        copy, 0, cute.make_layout(1), cute.group_modes(stages, 0, 3), cute.group_modes(tiles, 0, 3)
    )
