"""What the kernels may take of a GPU, compiled as `rowops` launches them."""

import triton
from lmkit.api import Routing
from lmkit_op_triton import (
    kernels,
    linear,
    linear_kernels,
    moe,
    moe_kernels,
    recurrent,
    recurrent_kernels,
    row_kernels,
)
from lmkit_op_triton.linear import FLOATS, INTEGERS, WIDE
from lmkit_op_triton.plain import FEW
from lmkit_op_triton.routing import held
from lmkit_op_triton.rowops import BLOCK, HEADS, VOCABULARY, warps
from lmkit_op_triton.tiles import Tile, tiles_of
from lmkit_op_triton.weights import BYTES, FLOAT4, WHOLE, half_of
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
        {"x": "*fp32", "drawn": "*fp64", "ids": "*i64", "largest": "*fp32", **types("rows size stride", "i32")},
        {"N": VOCABULARY},
        8,
        unaligned=("rows",),
    ),
]

# ------------------------------------------------------------------------------------------------------- mixtures

NUMBERS = "top_k experts n k x_stride"


def by_maker(archs: list[str]) -> list[tuple[str, ...]]:
    """NVIDIA's, whose kernels have PTX in them, and AMD's."""
    nvidia = tuple(arch for arch in archs if arch.startswith("sm"))
    return [made for made in (nvidia, tuple(arch for arch in archs if arch not in nvidia)) if made]


def multiplied(tile: Tile, kind: str, first: bool, archs: tuple[str, ...]) -> Case:
    """`moe_kernels.multiply` of 128 experts; "float8": in blocks of 128 x 128."""
    parts, float8 = 2 if first else 1, kind == "float8"
    dtype, kind = ("bf16", "float8 blocks") if float8 else (kind, kind)
    return Case(
        moe_kernels.multiply,
        {
            **types("x bias out", f"*{dtype}"), "weight": "*i8" if float8 else f"*{dtype}", "scales": "*fp32",
            **types("order starts", "*i32"), **types(f"{NUMBERS} groups", "i32"),
        },
        {
            "FIRST": first, "NAME": "silu" if first else "", "PARTS": parts, "BIAS": first,
            "FLOAT8": float8, "ROWS": 128 if float8 else 1, "GROUP": 128 if float8 else 0,
            "M": tile.m, "N": tile.n // parts, "K": tile.k, "E": 128,
        },
        tile.warps,
        tile.stages,
        unaligned=("top_k", "groups"),
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
            **types("order starts", "*i32"), **types(f"{NUMBERS} width groups zero", "i32"),
            **types("low high", "i64"),
        },
        {
            "FIRST": True, "NAME": "silu", "PARTS": 2, "BIAS": False, "ZEROS": how == "ZEROS", "OFFSETS": False,
            "KIND": {"TABLE": BYTES, "FLOAT4": FLOAT4}.get(how, WHOLE), "BITS": bits, "GROUP": group,
            "H": half_of(group), "M": tile.m, "N": tile.n // 2, "E": 128, "PTX": archs[0].startswith("sm"),
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
        for kind, size in (("bf16", "2"), ("fp32", "4"), ("codes", "codes"), ("float8", "float8")):
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
            of_codes(tile, bits, group, how, archs)
            for (tile, kind), on in by_tile.items()
            if kind == "codes"
            for archs in by_maker(on)
            for bits, group, how in ((4, 128, "ZEROS"), (4, 32, "FLOAT4"), (8, 0, ""))
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

# -------------------------------------------------------------------------------------------------------- linears

SIZES = "m n k width x_stride each"
FLOAT32_SPILLS = {"gfx1100": 40}  # products of float32 without tensor cores, of a model that nobody runs so


def codes_of_linear(tile: Tile, dtype: str, bits: int, group: int, how: str, archs: tuple[str, ...]) -> Case:
    return Case(
        linear_kernels.multiply_codes,
        {
            **types("x bias", f"*{dtype}"), "out": "*fp32" if tile.m == 16 else f"*{dtype}", "weight": "*u8",
            "zeros": "*u8", **types("scales offsets", "*fp16"), **types(f"{SIZES} zero", "i32"),
            **types("low high", "i64"),
        },
        {
            "BIAS": False, "ZEROS": how == "ZEROS", "OFFSETS": False,
            "KIND": {"TABLE": BYTES, "FLOAT4": FLOAT4}.get(how, WHOLE), "BITS": bits, "GROUP": group,
            "H": half_of(group), "SPLITS": 4 if tile.m == 16 else 1, "M": tile.m, "N": tile.n,
            "PTX": archs[0].startswith("sm"),
        },
        tile.warps,
        tile.stages,
        unaligned=("m", "zero", "low", "high"),
        blocks=2 if tile.m == 16 and dtype == "bf16" else 1,
        opcodes=("HGMMA" if tile.n >= 64 else "HMMA",) if dtype == "bf16" and tile.m == 16 else (),
        spills=FLOAT32_SPILLS if dtype == "fp32" else {},
        archs=archs,
        note=f"{dtype} {bits} bits {how or 'plain'}, groups of {group} {tile.m} x {tile.n}",
    )  # fmt: skip


def bytes_of_linear(tile: Tile, dtype: str, inputs: int, group: int, archs: tuple[str, ...]) -> Case:
    x = {WIDE: dtype, INTEGERS: "i8", FLOATS: "fp8e4nv"}[inputs]
    arguments = {
        "x": f"*{x}", "weight": "*i8", "scales": "*fp32", "bias": f"*{dtype}",
        "out": "*fp32" if tile.m == 16 else f"*{dtype}", **types("m n k groups x_stride each", "i32"),
    }  # fmt: skip
    constants = {
        "BIAS": False, "ROWS": 128 if group else 1, "GROUP": group, "SPLITS": 4 if tile.m == 16 else 1,
        "M": tile.m, "N": tile.n, "K": min(tile.k, group or tile.k),
    }  # fmt: skip
    if inputs != WIDE:
        arguments |= {"x_scales": "*fp32", "x_sums": "*i32", "zeros": "*i8", "x_groups": "i32"}
        constants |= {"ZEROS": False, "INTEGERS": inputs == INTEGERS}
    return Case(
        linear_kernels.multiply_wide if inputs == WIDE else linear_kernels.multiply_bytes,
        arguments,
        constants,
        tile.warps,
        tile.stages,
        unaligned=("m", "groups", "x_groups"),
        blocks=2 if tile.m == 16 else 1,
        archs=archs,
        note=f"{x} {f'blocks of {group}' if group else 'rows'} {tile.m} x {tile.n} x {tile.k}",
    )


FLOAT8 = ("sm_89", "sm_90", "sm_100", "sm_120", "gfx950")  # that multiply it


def of_rows() -> list[Case]:
    """Linears of one row and of a few."""
    one, few = tiles_of("sm_90", "linear plain")
    pointers, tiles = types("x weight bias out", "*bf16"), {arch: tiles_of(arch, "row of codes")[0] for arch in SHARED}
    codes = [
        (tile, archs)
        for tile in dict.fromkeys(tiles.values())
        for archs in by_maker([arch for arch in SHARED if tiles[arch] == tile])
    ]
    ints = {**types("x bias out", "*bf16"), **types("weight zeros", "*u8"), **types("scales offsets", "*fp16")}
    return [
        Case(
            row_kernels.one_row, {**pointers, **types("n k w_row", "i32")},
            {"BIAS": False, "N": one.n, "K": one.k, "STAGES": one.stages}, one.warps, archs=("sm_90",), blocks=4,
        ),
        Case(
            row_kernels.few_rows, {**pointers, **types("m n k x_row w_row", "i32")},
            {"BIAS": False, "M": FEW, "N": few.n, "K": few.k, "STAGES": few.stages}, few.warps, unaligned=("m",),
            archs=("sm_90",), blocks=3, opcodes=("HMMA",),
        ),
        *(
            Case(
                row_kernels.one_row_of_codes, {**ints, **types("n k width zero", "i32")},
                {
                    "BIAS": False, "ZEROS": zeros, "OFFSETS": False, "BITS": bits, "GROUP": group, "H": half_of(group),
                    "N": tile.n, "C": tile.k // 16, "STAGES": tile.stages, "PTX": archs[0].startswith("sm"),
                },
                tile.warps, unaligned=("zero",), blocks=4, archs=archs, note=f"{bits} bits, groups of {group}",
            )
            for bits, group, zeros in ((4, 128, True), (4, 32, False), (8, 0, False))
            for tile, archs in codes
        ),
    ]  # fmt: skip


def of_linears() -> list[Case]:
    by_tile: dict[tuple[Tile, str], list[str]] = {}
    for arch in SHARED:
        for size in ("codes 2", "codes 4", "bytes 1", "bytes 2", "bytes 4"):
            for tile in tiles_of(arch, f"linear {size}"):
                by_tile.setdefault((tile, size), []).append(arch)
    found = []
    for (tile, size), archs in [(key, archs) for key, on in by_tile.items() for archs in by_maker(on)]:
        if size == "codes 2":
            ways = [(4, 128, "ZEROS"), (4, 32, "FLOAT4"), (8, 0, "")]
            ways += [(4, 64, "TABLE")] if tile.rows == tiles_of(archs[0], "linear codes 2")[0].rows else []
            found += [codes_of_linear(tile, "bf16", bits, group, how, archs) for bits, group, how in ways]
        elif size == "codes 4":
            found.append(codes_of_linear(tile, "fp32", 4, 128, "ZEROS", archs))
        elif size == "bytes 1":
            able = tuple(arch for arch in archs if arch in FLOAT8)
            found.append(bytes_of_linear(tile, "bf16", INTEGERS, 0, archs))
            found += [bytes_of_linear(tile, "bf16", FLOATS, group, able) for group in (0, 128)]
        else:
            dtype = "bf16" if size == "bytes 2" else "fp32"
            found += [bytes_of_linear(tile, dtype, WIDE, group, archs) for group in (0, 128)]
    rounds = {"x": "*bf16", "scales": "*fp32"}
    return [
        *found,
        *of_rows(),
        Case(
            linear_kernels.merge,
            {"parts": "*fp32", **types("bias out", "*bf16"), **types("size n", "i32")},
            {"BIAS": True, "SPLITS": 8, "N": linear.BLOCK},
            4,
            blocks=8,
            opcodes=("LDG.E.128",),
        ),
        Case(
            linear_kernels.round_integers,
            {**rounds, "codes": "*i8", "sums": "*i32", **types("k x_stride", "i32")},
            {"N": linear.ROUNDED},
            linear.warps_of(linear.ROUNDED),
            blocks=2,
        ),
        *(
            Case(
                linear_kernels.round_floats,
                {**rounds, "codes": "*fp8e4nv", "stored": "fp32", **types("k groups x_stride", "i32")},
                {"STORED": False, "GROUP": group, "POWERS": False, "N": group or linear.ROUNDED},
                linear.warps_of(group or linear.ROUNDED),
                unaligned=("groups",),
                blocks=8 if group else 2,
                archs=FLOAT8,
                note=f"of {group}" if group else "of rows",
            )
            for group in (0, 128)
        ),
    ]


CASES += of_linears()

# ------------------------------------------------------------------------------------------------------ recurrent

PLACES = {"slots": "*i64", "query_start": "*i32"}
CASES += [
    Case(
        recurrent_kernels.conv,
        {**types("x weight bias state out", "*bf16"), **PLACES, **types("rows channels x_stride row_state", "i32")},
        {"W": 4, "BIAS": True, "R": 256, "C": recurrent.CONV},
        unaligned=("rows",),
        blocks=8,
        note="over tokens",
    ),
    Case(
        recurrent_kernels.conv_state,
        {**types("x state", "*bf16"), **PLACES, **types("channels x_stride row_state", "i32")},
        {"W": 4, "S": 4, "C": recurrent.CONV},
        blocks=8,
    ),
    Case(
        recurrent_kernels.selective,
        {**types("x dt a b c skip state out", "*fp32"), **PLACES,
         **types("channels size x_stride dt_stride b_stride c_stride row_state", "i32")},
        {"D": recurrent.HELD // 16, "N": 16},
        blocks=5,
    ),
    Case(
        recurrent_kernels.ssd,
        {**types("x dt a b c skip state out", "*fp32"), **PLACES,
         **types("heads share size width x_token x_head dt_token b_token b_group c_token c_group row_state", "i32")},
        {"P": recurrent.HELD // 128, "N": 128},
        unaligned=("share",),
        blocks=6,
        note="64x128",
    ),
    Case(
        recurrent_kernels.delta,
        {**types("q k v out", "*bf16"), **types("decay beta state", "*fp32"), **PLACES, "scale": "fp32",
         **types("heads share keys values", "i32"),
         **types("q_token q_head k_token k_head v_token v_head decay_token beta_token row_state", "i32")},
        {"K": 128, "V": recurrent.HELD // 128},
        unaligned=("share",),
        blocks=6,
        note="128x128",
    ),
]  # fmt: skip
