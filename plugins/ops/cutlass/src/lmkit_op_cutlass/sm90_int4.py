"""x @ w.T on NVIDIA's sm_90a with weights in 4 bits: they become 16 bits in the registers that wgmma reads.

Codes lie as `codes.fragments` has them: what one thread multiplies of a piece of 64 x 64 is one load of 16 bytes.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, cute, pipeline
from cutlass.cute.arch import inline_ptx
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from lmkit_op_cutlass.codes import LOW_BITS, ONE, PIECE, WORDS
from lmkit_op_cutlass.sm90 import GROUP, K_MAJOR, Linear, held
from lmkit_op_cutlass.tiles import LINE, Tile, place

BYTES = 4 * GROUP * WORDS  # of a piece


class Int4Linear(Linear):
    """codes int32 [n / 64, k / 64, 128, 4], x [t, k] -> out [t, n]; `group` columns share a scale, 0 = all.

    factors int32 [groups, n of whole pieces of two]: the scale in float16 below, the zero above, as `codes.factors` has
    them. The tensor cores multiply code less zero, exact in 16 bits; sums of a group are scaled in float32.
    """

    def __init__(self, tile: Tile, kind: type[cutlass.Numeric], group: int) -> None:
        super().__init__(tile, kind, kind)
        self.group = group
        self.stages = tile.stages(BYTES // 64)
        self.span = min(group or PIECE, PIECE)  # columns whose sums are scaled at a time

    def instruction(self) -> Any:
        shape = (64, self.tile.tokens, 16)
        return warpgroup.MmaF16BF16Op(self.kind, Float32, shape, warpgroup.OperandSource.RMEM, K_MAJOR, K_MAJOR)

    @cute.jit
    def __call__(
        self,
        codes: cute.Pointer,
        x: cute.Pointer,
        out: cute.Pointer,
        bias: cute.Pointer | None,
        factors: cute.Pointer,
        n: Int32,
        k: Int32,
        t: Int32,
        band: Int32,
        blocks: Int32,
        stream: CUstream,
    ):
        k = cute.assume(k, divby=8)
        pieces, steps = cute.ceil_div(n, 2 * PIECE) * 2, cute.ceil_div(k, PIECE)
        groups = cute.ceil_div(k, self.group) if self.group else 1
        x_copy, x_coords, x_layout = self.loads(
            cute.make_tensor(x, cute.make_layout((t, k), stride=(k, 1))), self.tile.tokens
        )
        one = WORDS * GROUP
        self.kernel(
            cute.make_tensor(codes, cute.make_layout((one, steps, pieces), stride=(1, one, one * steps))),
            cute.make_tensor(factors, cute.make_layout((pieces * PIECE, groups))),
            x_copy, x_coords, x_layout,
            cute.make_tensor(out, cute.make_layout((n, t), stride=(1, cutlass.Int64(n)))),
            None if bias is None else cute.make_tensor(bias, cute.make_layout((n,))),
            cute.make_tiled_mma(self.instruction(), (self.groups, 1, 1)), band,
        ).launch(grid=(blocks, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=1, stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        codes: cute.Tensor,
        factors: cute.Tensor,
        x_copy: cute.CopyAtom,
        x: cute.Tensor,
        x_layout: cute.ComposedLayout,
        out: cute.Tensor,
        bias: Any,  # a tensor, or None
        tiled: cute.TiledMma,
        band: Int32,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = SmemAllocator()
        barriers = shared.allocate_array(cutlass.Int64, 2 * self.stages)
        layout = cute.make_layout((WORDS * GROUP, self.groups, self.stages))
        w_stages = shared.allocate_tensor(Int32, layout, 128)
        x_stages = shared.allocate_tensor(self.kind, x_layout.outer, 1024, x_layout.inner)
        producer, consumer = pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 4 * self.groups),
            tx_count=self.groups * BYTES + self.tile.tokens * LINE,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        ).make_participants()
        rows = cute.ceil_div(cute.size(out, mode=[0]), self.tile.rows)
        tiles = rows * cute.ceil_div(cute.size(out, mode=[1]), self.tile.tokens)
        steps = cute.size(codes, mode=[1])
        first, stride = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        if warp == 0:
            w_copy = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Int32)
            x_to, x_from = self.parts(x_copy, x_stages, x, self.tile.tokens)
            for tile in cutlass.range(first, tiles, stride):
                row, column = place(tile, rows, band)
                for step in cutlass.range(steps, unroll=1):
                    slot = producer.acquire_and_advance()
                    for i in cutlass.range_constexpr(self.groups):
                        piece = codes[None, step, row * self.groups + i]
                        with cute.arch.elect_one():
                            cute.copy(w_copy, piece, w_stages[None, i, slot.index], mbar_ptr=slot.barrier)
                    cute.copy(x_copy, x_from[None, column, step], x_to[None, slot.index], tma_bar_ptr=slot.barrier)
            producer.tail()
        elif warp >= 4:
            thread = cute.arch.thread_idx()[0] - GROUP
            group = tiled.get_slice(cute.arch.make_warp_uniform(thread // GROUP) * GROUP)
            weights = cute.make_rmem_tensor(group.partition_shape_A((self.tile.rows, PIECE)), self.kind)
            x_parts = tiled.make_fragment_B(group.partition_B(x_stages))
            places = tiled.get_slice(thread).partition_C(cute.make_identity_tensor((self.tile.rows, self.tile.tokens)))
            sums = cute.make_rmem_tensor(places.shape, Float32)
            ours = cute.make_rmem_tensor(places.shape, Float32)
            words = cute.make_rmem_tensor((WORDS,), Int32)
            for tile in cutlass.range(first, tiles, stride):
                row, column = place(tile, rows, band)
                origin = (row * self.tile.rows, column * self.tile.tokens)
                sums.fill(0.0)
                for step in cutlass.range(steps, unroll=1):
                    slot = consumer.wait_and_advance()
                    mine = cute.local_tile(w_stages[None, thread // GROUP, slot.index], (WORDS,), (thread % GROUP,))
                    cute.autovec_copy(mine, words)
                    for i in cutlass.range_constexpr(PIECE // self.span):
                        scales, zeros = self.factors(factors, places, origin[0], step, i)
                        self.widen(weights, words, zeros, i)
                        tiled.set(warpgroup.Field.ACCUMULATE, False)
                        warpgroup.fence()
                        for part in cutlass.range_constexpr(self.span // 16):
                            k = i * (self.span // 16) + part
                            x_part = x_parts[None, None, k, slot.index]
                            cute.gemm(tiled, ours, weights[None, None, k], x_part, ours)
                            tiled.set(warpgroup.Field.ACCUMULATE, True)
                        warpgroup.commit_group()
                        warpgroup.wait_group(0)
                        for eight in cutlass.range_constexpr(self.tile.tokens // 8):
                            for half in cutlass.range_constexpr(2):
                                for one in cutlass.range_constexpr(2):
                                    at = held(half, eight, one)
                                    sums[at] += ours[at] * scales[half]
                    slot.release()
                self.store(out, bias, None, sums, places, origin)

    @cute.jit
    def factors(
        self, factors: cute.Tensor, places: cute.Tensor, row: Int32, step: Int32, i: int
    ) -> tuple[list[Any], list[Any]]:
        """Scales and doubled zeros of a thread's two features for the i-th group of a step."""
        group = step * 0
        if cutlass.const_expr(self.group > PIECE):
            group = step // (self.group // PIECE)
        elif cutlass.const_expr(self.group > 0):
            group = min(step * (PIECE // self.span) + i, cute.size(factors, mode=[1]) - 1)  # a step may end past it
        words = cute.make_rmem_tensor((2,), Int32)
        for half in range(2):
            words[half] = factors[row + places[held(half, 0, 0)][0], group]
        low, high = cute.recast_tensor(words, cutlass.Float16), cute.recast_tensor(words, cutlass.Uint16)
        zeros = [high[2 * half + 1].to(cutlass.Int32) * 0x10001 for half in range(2)]
        return [low[2 * half].to(Float32) for half in range(2)], zeros

    def widen(self, weights: cute.Tensor, words: cute.Tensor, zeros: list[Any], i: int) -> None:
        """Codes of the i-th group, less their zeros: pairs of columns, of a row and of the one 8 below."""
        pairs = cute.recast_tensor(weights, Int32)
        name = "bf16x2" if self.kind is cutlass.BFloat16 else "f16x2"
        for part in range(i * self.span // 16, (i + 1) * self.span // 16):
            for pair in range(4):
                value = ((words[part] >> (4 * pair)) & LOW_BITS) | ONE[name]
                less = inline_ptx(
                    f"sub.rn.{name} {{$w0}}, {{$r0}}, {{$r1}};",
                    write_only_types=[Int32],
                    read_only_args=[value, zeros[pair % 2]],
                )
                pairs[part * 4 + pair] = less
