"""What the kernels may take of a GPU, compiled as `rowops` launches them."""

from lmkit_op_triton import kernels
from lmkit_op_triton.rowops import BLOCK, HEADS, VOCABULARY, warps
from lmkit_testing.triton_budget import Case


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
