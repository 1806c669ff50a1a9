"""What the kernels may take of a GPU, compiled as `rowops` launches them."""

import triton
from lmkit.api import Routing
from lmkit_op_triton import kernels, moe, moe_kernels
from lmkit_op_triton.moe import Tile, tiles_of
from lmkit_op_triton.routing import held
from lmkit_op_triton.rowops import BLOCK, HEADS, VOCABULARY, warps
from lmkit_testing.triton_budget import SHARED, Case


def types(names: str, kind: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


STRIDES = "x_outer x_inner out_outer out_inner residual_stride"
CASES = [
    *(
        Case(
            kernels.norm,
            {**types("x residual weight bias out", "*bf16"), "eps": "fp32", **types(f"inner size {STRIDES}", "i32")},
            {"RMS": True, "RESIDUAL": True, "BIAS": False, "N": size},
            warps(size),
            unaligned=("inner", "x_inner", "out_inner"),
            blocks=2,
            opcodes=("LDG.E.128",),
            note=f"of {size}",
        )
        for size in (4096, 8192)
    ),
    Case(
        kernels.norm,
        {**types("x residual weight bias out", "*bf16"), "eps": "fp32", **types(f"inner size {STRIDES}", "i32")},
        {"RMS": True, "RESIDUAL": False, "BIAS": False, "N": 128},
        warps(128),
        blocks=16,
        unaligned=("inner",),
        note="of heads",
    ),
    Case(
        kernels.embed,
        {"ids": "*i64", **types("weight out", "*bf16"), **types("size weight_stride", "i32")},
        {"N": BLOCK},
        2,
        blocks=8,
    ),
    Case(
        kernels.gate,
        {**types("x out", "*bf16"), **types("size x_stride", "i32")},
        {"NAME": "silu", "N": BLOCK},
        4,
        blocks=8,
        opcodes=("LDG.E.128",),
    ),
    Case(
        kernels.activate,
        {**types("x out", "*bf16"), **types("size x_stride", "i32")},
        {"NAME": "gelu", "N": BLOCK},
        4,
        blocks=8,
    ),
    Case(
        kernels.add,
        {**types("x y h gate", "*bf16"), **types("size h_size x_stride y_stride h_stride", "i32")},
        {"GATE": True, "N": 4096, "H": 4096},
        warps(4096),
        blocks=2,
    ),
    Case(
        kernels.angles,
        {"positions": "*i64", **types("inv_freq cos sin", "*fp32"), "magnitude": "fp32", "pairs": "i32"},
        {"P": 64},
        1,
        blocks=16,
    ),
    Case(
        kernels.rotate,
        {"x": "*bf16", **types("cos sin", "*fp32"), **types("heads pairs x_token x_head", "i32")},
        {"INTERLEAVED": False, "H": HEADS, "P": 64},
        2,
        unaligned=("heads",),
        blocks=8,
    ),
    Case(
        kernels.block_max,
        {"x": "*bf16", "most": "*fp32", "where": "*i32", **types("size stride", "i32")},
        {"N": VOCABULARY},
        8,
        blocks=4,
    ),
    Case(
        kernels.row_max,
        {"most": "*fp32", "where": "*i32", "ids": "*i64", "largest": "*bf16", "blocks": "i32"},
        {"N": 64},
        1,
        unaligned=("blocks",),
        blocks=16,
    ),
    Case(
        kernels.draw,
        {"x": "*fp32", "params": "*fp64", "ids": "*i64", "largest": "*fp32", **types("rows size stride", "i32")},
        {"N": VOCABULARY},
        8,
        unaligned=("rows",),
    ),
]

# ------------------------------------------------------------------------------------------------------- mixtures

INTEGERS = "top_k experts n k x_stride"


def multiplied(tile: Tile, kind: str, first: bool, archs: tuple[str, ...]) -> Case:
    """`moe_kernels.multiply` of 128 experts."""
    parts = 2 if first else 1
    return Case(
        moe_kernels.multiply,
        {**types("x weight bias out", f"*{kind}"), **types("order starts", "*i32"), **types(INTEGERS, "i32")},
        {
            "FIRST": first, "NAME": "silu" if first else "", "PARTS": parts, "BIAS": first,
            "M": tile.m, "N": tile.n // parts, "K": tile.k, "E": 128,
        },
        tile.warps,
        tile.stages,
        unaligned=("top_k",),
        blocks=2 if tile.m == 16 and not {"sm_89", "sm_120"} & set(archs) else 1,
        opcodes=("LDGSTS",) if kind == "bf16" else (),
        archs=archs,
        note=f"{'up' if first else 'down'} {kind} {tile.m} x {tile.n} x {tile.k}",
    )  # fmt: skip


def of_codes(tile: Tile, bits: int, group: int, how: str, archs: tuple[str, ...]) -> Case:
    """Gate and up of 128 experts; `how` codes become integers."""
    return Case(
        moe_kernels.multiply_codes,
        {
            **types("x bias out", "*bf16"), "weight": "*u8", "zeros": "*u8", **types("scales offsets", "*fp16"),
            **types("order starts", "*i32"), **types(f"{INTEGERS} width groups zero", "i32"),
            **types("low high", "i64"),
        },
        {
            "FIRST": True, "NAME": "silu", "PARTS": 2, "BIAS": False, "ZEROS": how == "ZEROS", "OFFSETS": False,
            "TABLE": how == "TABLE", "BITS": bits, "GROUP": group, "H": moe.half_of(group),
            "M": tile.m, "N": tile.n // 2, "E": 128,
        },
        tile.warps,
        tile.stages,
        unaligned=("top_k", "zero", "low", "high", "groups"),
        archs=archs,
        note=f"{bits} bits, groups of {group} {tile.m} x {tile.n}",
    )  # fmt: skip


def chosen(experts: int, how: Routing) -> Case:
    groups, share, warps = held(experts, how)
    return Case(
        moe_kernels.choose,
        {"logits": "*bf16", "correction": "*fp32", "ids": "*i64", "weights": "*bf16", **types("share stride", "i32"),
         **types("epsilon scale", "fp32")},
        {
            "SIGMOID": how.scoring == "sigmoid", "CORRECTED": how.num_groups > 1, "GROUPS": how.num_groups,
            "TOP_GROUPS": how.top_groups, "TWO": how.group_score == "two best", "NORMED": how.renormalize,
            "TOP_K": how.top_k, "G": groups, "S": share, "K": triton.next_power_of_2(how.top_k),
        },
        warps,
        unaligned=("share",),
        blocks=16 if warps == 1 else 4,
        note=f"of {experts}",
    )  # fmt: skip


def of_mixtures() -> list[Case]:
    by_tile: dict[tuple[Tile, str], list[str]] = {}
    for arch in SHARED:
        for kind, size in (("bf16", "2"), ("fp32", "4"), ("codes", "codes")):
            for tile in tiles_of(arch, size):
                by_tile.setdefault((tile, kind), []).append(arch)
    pairs = {"ids": "*i64", **types("order starts", "*i32"), **types("pairs experts", "i32")}
    sums = {"products": "*bf16", "ids": "*i64", **types("weights out", "*bf16"), **types("top_k experts size", "i32")}
    return [
        *(
            multiplied(tile, kind, first, tuple(on))
            for (tile, kind), on in by_tile.items()
            if kind != "codes"
            for first in (True, False)
        ),
        *(
            of_codes(tile, bits, group, how, tuple(on))
            for (tile, kind), on in by_tile.items()
            if kind == "codes"
            for bits, group, how in ((4, 128, "ZEROS"), (4, 32, "TABLE"), (8, 0, ""))
        ),
        chosen(128, Routing(8)),
        chosen(256, Routing(8, "sigmoid", num_groups=8, top_groups=4, group_score="two best")),
        chosen(512, Routing(10)),
        Case(moe_kernels.sort, pairs, {"N": moe.BLOCK}, 4, unaligned=("pairs",), blocks=8),
        Case(moe_kernels.combine, sums, {"N": moe.BLOCK}, 4, unaligned=("top_k",), blocks=8, opcodes=("LDG.E.128",)),
    ]


CASES += of_mixtures()

CASES += [  # grammar masks
    Case(
        kernels.mask,
        {"x": "*fp32", "rows": "*i64", "bits": "*u8", **types("size num_bytes stride", "i32")},
        {"ROWS": True, "N": VOCABULARY},
        8,
        blocks=4,
    ),
]
