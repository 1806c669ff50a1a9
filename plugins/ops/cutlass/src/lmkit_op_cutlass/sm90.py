"""x @ w.T on NVIDIA's sm_90a: a warp loads tiles by TMA, one or two warpgroups multiply them by wgmma. Blocks persist.

Weights are the left operand, of which wgmma takes 64 rows; tokens are the right one, of which 8 are enough. Sources:
the PTX ISA (wgmma.mma_async, cp.async.bulk.tensor, mbarrier) and the reference of the CuTe DSL.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, cute, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from lmkit_op_cutlass.tiles import LINE, Tile, place

GROUP = 128  # threads of a warpgroup
K_MAJOR = OperandMajorMode.K


def held(half: int, eight: int, one: int) -> tuple[tuple[int, int, int], int, int]:
    """Where among a thread's sums one is: of its two features, 8 apart, and of its two tokens of every eight."""
    return (one, half, eight), 0, 0


class Linear:
    """weight [n, k], x [t, k] -> out [t, n], all without gaps, rows of whole 16 bytes; sums are float32.

    bias [n] or None. `scales` of float8: "rows" has weight_scales [n] and x_scales [t]; "blocks" has one for each 128
    columns, weight_scales [k / 128, n] and x_scales [k / 128, t]; both float32. Within the tensor cores sums of float8
    keep few bits, so those of each step are added to those of all outside.
    """

    def __init__(self, tile: Tile, kind: type[cutlass.Numeric], out: type[cutlass.Numeric], scales: str = "") -> None:
        self.tile, self.kind, self.out, self.scales = tile, kind, out, scales
        self.depth = LINE * 8 // kind.width  # columns of one step
        self.stages = tile.stages()
        self.groups = tile.rows // 64
        self.threads = (1 + self.groups) * GROUP

    def instruction(self) -> Any:
        """What one warpgroup multiplies at a time."""
        if self.scales:
            shape = (64, self.tile.tokens, 32)
            return warpgroup.MmaF8Op(
                self.kind, self.kind, Float32, shape, warpgroup.OperandSource.SMEM, K_MAJOR, K_MAJOR
            )
        shape = (64, self.tile.tokens, 16)
        return warpgroup.MmaF16BF16Op(self.kind, Float32, shape, warpgroup.OperandSource.SMEM, K_MAJOR, K_MAJOR)

    def loads(self, tensor: cute.Tensor, height: int) -> tuple[cute.CopyAtom, cute.Tensor, cute.ComposedLayout]:
        """How `height` rows of one step are copied, the coordinates for that, and the layout of all stages."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.kind)
        layout = cute.tile_to_shape(atom, (height, self.depth, self.stages), order=(0, 1, 2))
        stage = cute.slice_(layout, (None, None, 0))
        copy, coords = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), tensor, stage, (height, self.depth)
        )
        return copy, coords, layout

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
        w_copy, w_coords, w_layout = self.loads(
            cute.make_tensor(weight, cute.make_layout((n, k), stride=(k, 1))), self.tile.rows
        )
        x_copy, x_coords, x_layout = self.loads(
            cute.make_tensor(x, cute.make_layout((t, k), stride=(k, 1))), self.tile.tokens
        )
        scaled = None
        if cutlass.const_expr(self.scales):
            steps = cute.ceil_div(k, self.depth) if self.scales == "blocks" else 1
            scaled = (
                cute.make_tensor(weight_scales, cute.make_layout((n, steps), stride=(1, n))),
                cute.make_tensor(x_scales, cute.make_layout((t, steps), stride=(1, t))),
            )
        self.kernel(
            w_copy, w_coords, w_layout, x_copy, x_coords, x_layout,
            cute.make_tensor(out, cute.make_layout((n, t), stride=(1, cutlass.Int64(n)))),
            None if bias is None else cute.make_tensor(bias, cute.make_layout((n,))),
            scaled, cute.make_tiled_mma(self.instruction(), (self.groups, 1, 1)), band,
        ).launch(grid=(blocks, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=1, stream=stream)  # fmt: skip

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
        barriers = shared.allocate_array(cutlass.Int64, 2 * self.stages)
        w_stages = shared.allocate_tensor(self.kind, w_layout.outer, 1024, w_layout.inner)
        x_stages = shared.allocate_tensor(self.kind, x_layout.outer, 1024, x_layout.inner)
        producer, consumer = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4 * self.groups),  # a thread of each warp
            tx_count=(self.tile.rows + self.tile.tokens) * LINE,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        ).make_participants()
        rows = cute.ceil_div(cute.size(out, mode=[0]), self.tile.rows)
        tiles = rows * cute.ceil_div(cute.size(out, mode=[1]), self.tile.tokens)
        steps = cute.ceil_div(cute.size(w, mode=[1]), self.depth)
        first, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        if warp == 0:
            w_to, w_from = self.parts(w_copy, w_stages, w, self.tile.rows)
            x_to, x_from = self.parts(x_copy, x_stages, x, self.tile.tokens)
            for tile in cutlass.range(first, tiles, stride):
                row, column = place(tile, rows, band)
                for step in cutlass.range(steps, unroll=1):
                    slot = producer.acquire_and_advance()
                    cute.copy(w_copy, w_from[None, row, step], w_to[None, slot.index], tma_bar_ptr=slot.barrier)
                    cute.copy(x_copy, x_from[None, column, step], x_to[None, slot.index], tma_bar_ptr=slot.barrier)
            producer.tail()
        elif warp >= 4:
            thread = cute.arch.thread_idx()[0] - GROUP
            group = tiled.get_slice(cute.arch.make_warp_uniform(thread // GROUP) * GROUP)
            w_parts = tiled.make_fragment_A(group.partition_A(w_stages))
            x_parts = tiled.make_fragment_B(group.partition_B(x_stages))
            places = tiled.get_slice(thread).partition_C(cute.make_identity_tensor((self.tile.rows, self.tile.tokens)))
            sums = cute.make_rmem_tensor(places.shape, Float32)
            ours = cute.make_rmem_tensor(places.shape, Float32) if self.scales else sums  # of one step
            for tile in cutlass.range(first, tiles, stride):
                row, column = place(tile, rows, band)
                origin = (row * self.tile.rows, column * self.tile.tokens)
                sums.fill(0.0)
                for step in cutlass.range(steps, unroll=1):
                    slot = consumer.wait_and_advance()
                    tiled.set(warpgroup.Field.ACCUMULATE, not self.scales)
                    warpgroup.fence()
                    for part in cutlass.range_constexpr(cute.size(w_parts, mode=[2])):
                        at = (None, None, part, slot.index)
                        cute.gemm(tiled, ours, w_parts[at], x_parts[at], ours)
                        tiled.set(warpgroup.Field.ACCUMULATE, True)
                    warpgroup.commit_group()
                    warpgroup.wait_group(0)
                    slot.release()
                    if cutlass.const_expr(self.scales):
                        self.add(sums, ours, scaled, places, origin, step)
                self.store(out, bias, scaled, sums, places, origin)

    def parts(
        self, copy: cute.CopyAtom, stages: cute.Tensor, coords: cute.Tensor, height: int
    ) -> tuple[cute.Tensor, cute.Tensor]:
        """Where a step is copied to [.., stage] and from [.., tile, step]."""
        tiles = cute.local_tile(coords, (height, self.depth), (None, None))
        one = cute.make_layout(1)
        return cpasync.tma_partition(copy, 0, one, cute.group_modes(stages, 0, 2), cute.group_modes(tiles, 0, 2))

    @cute.jit
    def add(
        self,
        sums: cute.Tensor,
        ours: cute.Tensor,
        scaled: tuple[cute.Tensor, cute.Tensor],
        places: cute.Tensor,
        origin: tuple[Int32, Int32],
        step: Int32,
    ):
        """Adds a step's sums to those of all, times the scales of its columns. Past the edge scales repeat the last."""
        if cutlass.const_expr(self.scales == "rows"):
            sums.store(sums.load() + ours.load())
        else:
            n, t = cute.size(scaled[0], mode=[0]), cute.size(scaled[1], mode=[0])
            features = [min(origin[0] + places[held(half, 0, 0)][0], n - 1) for half in range(2)]
            factors = [scaled[0][feature, step] for feature in features]
            for eight in cutlass.range_constexpr(self.tile.tokens // 8):
                for one in cutlass.range_constexpr(2):
                    token = min(origin[1] + places[held(0, eight, one)][1], t - 1)
                    scale = scaled[1][token, step]
                    for half in cutlass.range_constexpr(2):
                        at = held(half, eight, one)
                        sums[at] += ours[at] * (factors[half] * scale)

    @cute.jit
    def store(
        self,
        out: cute.Tensor,
        bias: Any,  # a tensor, or None
        scaled: Any,  # tensors of scales, or None
        sums: cute.Tensor,
        places: cute.Tensor,
        origin: tuple[Int32, Int32],
    ):
        n, t = cute.size(out, mode=[0]), cute.size(out, mode=[1])
        for half in cutlass.range_constexpr(2):
            feature = origin[0] + places[held(half, 0, 0)][0]
            if feature < n:
                scale, shift = Float32(1), Float32(0)
                if cutlass.const_expr(self.scales == "rows"):
                    scale = scaled[0][feature, 0]
                if cutlass.const_expr(bias is not None):
                    shift = bias[feature].to(Float32)
                for eight in cutlass.range_constexpr(self.tile.tokens // 8):
                    for one in cutlass.range_constexpr(2):
                        at = held(half, eight, one)
                        token = origin[1] + places[at][1]
                        if token < t:
                            value = sums[at]
                            if cutlass.const_expr(self.scales == "rows"):
                                value *= scale * scaled[1][token, 0]
                            out[feature, token] = (value + shift).to(self.out)
