"""What the kernels may take of a GPU, compiled as `backend` launches them."""

from collections.abc import Mapping

from lmkit.api import AttnNeed
from lmkit_attention_triton import kernels
from lmkit_attention_triton.backend import HEADS, LARGE, NONE, Room, programs_of
from lmkit_testing.triton_budget import SHARED, Case

# RDNA 3 has too few registers for these tiles: what it spills is let through, and no more.
SPILLS = {"gfx1100": 380}
ALIBI_SPILLS = {"gfx1100": 422, "gfx942": 5}
INT8_SPILLS = {"gfx942": 26, "gfx950": 38, "gfx1100": 920}
LATENT_SPILLS = {"gfx942": 134, "gfx950": 66}  # latents of 512 entries
LIMIT_SPILLS = {"sm_90": 168}  # bytes, so that two blocks fit into a multiprocessor
STORED = {"*i8": "int8", "*fp8e4nv": "float8_e4m3fn", "*fp8e5": "float8_e5m2"}
USUAL: Mapping[str, object] = {}
FORMS: tuple[Mapping[str, object], ...] = (
    {"SOFTCAP": True, "WINDOW": 4096},
    {"SINKS": True, "WINDOW": 128},
    {"ALIBI": True},
    {"CHUNKED": True, "WINDOW": 8192},
    {"CAUSAL": False},
)


def types(names: str, kind: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), kind)


def attend(
    kv: str, dim: int, group: int, queries: int, splits: int, v_dim: int = 0, dtype: str = "bf16", room: Room = NONE,
    form: Mapping[str, object] = USUAL, **how: object,
) -> Case:  # fmt: skip
    """`v_dim` > 0: values are the first entries of keys. `room`: of the device.
    `form`: constants that differ from those of attention to all that came before."""
    need = AttnNeed(
        dim,
        group,
        1,
        kv_dtype=STORED.get(kv, "auto"),
        mla=v_dim > 0,
        v_head_dim=v_dim or None,
    )
    sizes, shape, members, groups = programs_of(need, queries, 4 if dtype == "fp32" else 2, room)
    given = {
        "INT8": kv == "*i8",
        "CAUSAL": True,
        "WINDOW": 0,
        "CHUNKED": False,
        "SOFTCAP": False,
        "SINKS": False,
        "ALIBI": False,
        "SPLITS": splits,
        "PAGE": 16,
        "TILE": shape.tile,
        "TOKENS": max(1, shape.rows // members),
        "GROUP": members,
        "GROUPS": groups,
        "K": sizes.keys,
        "REST": sizes.rest,
        "V": sizes.values,
        **form,
    }
    spills = (
        LIMIT_SPILLS
        if shape.registers
        else ALIBI_SPILLS
        if "ALIBI" in form
        else LATENT_SPILLS
        if v_dim
        else INT8_SPILLS
        if kv == "*i8"
        else SPILLS
    )
    said = [*(["hopper" if room.hopper else "large"] if room.shared else []), *(name.lower() for name in form)]
    return Case(
        kernels.attend,
        {
            "q": f"*{dtype}",
            "kv": kv,
            "scales": "*fp32",
            "out": f"*{dtype}",
            **types("partial logs sinks slopes", "*fp32"),
            **types("query_start seq_len page_start pages", "*i32"),
            **types("scale softcap", "fp32"),
            **types("first_row q_heads group k_size v_size q_token q_head q_entry", "i32"),
            **types("kv_block kv_slot kv_head s_block s_rest out_token out_head", "i32"),
        },
        given,
        shape.warps,
        shape.stages,
        unaligned=("first_row", "q_heads", "group", "q_entry"),
        limit=shape.registers,
        spills=spills,
        note=" ".join((f"{'decode' if queries == 1 else 'prefill'} {kv[1:]} {dim} x {group}", *said)),
        **how,
    )


LARGER, BLACKWELL, HOPPER = ("sm_90", "sm_100"), Room(LARGE), Room(LARGE, hopper=True)
FLOAT8 = ("sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950", "gfx1100")
EACH = ("sm_80", "sm_90", "gfx942", "gfx1100")  # of a form of attention
WIDE = tuple(arch for arch in SHARED if arch != "gfx1100")  # which spills 2,000 registers of latents of 512 entries
WRITE = {
    **types("k v kv", "*bf16"),
    "scales": "*fp32",
    "slots": "*i64",
    **types("heads k_size v_size k_token k_head k_entry v_token v_head v_entry", "i32"),
    **types("kv_block kv_slot kv_head s_block s_rest page", "i32"),
}
CASES = [
    Case(
        kernels.write,
        WRITE,
        {"LIMIT": 0.0, "INT8": False, "H": HEADS, "K": 128, "V": 128, "REST": 0},
        2,
        unaligned=("heads", "k_entry", "v_entry"),
        blocks=8,
    ),
    Case(
        kernels.write,
        WRITE,
        {"LIMIT": 0.0, "INT8": False, "H": 1, "K": 1024, "V": 0, "REST": 0},
        2,
        unaligned=("heads", "k_entry", "v_entry"),
        blocks=8,
        note="latents",
    ),
    Case(
        kernels.write,
        WRITE | {"kv": "*i8"},
        {"LIMIT": 0.0, "INT8": True, "H": HEADS, "K": 128, "V": 128, "REST": 0},
        2,
        unaligned=("heads", "k_entry", "v_entry"),
        blocks=8,
        note="int8",
    ),
    Case(
        kernels.write,
        WRITE | {"kv": "*i8"},
        {"LIMIT": 0.0, "INT8": True, "H": 1, "K": 512, "V": 0, "REST": 64},
        2,
        unaligned=("heads", "k_entry", "v_entry"),
        blocks=8,
        note="int8 latents",
    ),
    *(
        Case(
            kernels.rotate_write,
            {
                "q": "*bf16",
                **WRITE,
                "kv": kv,
                **types("cos sin", "*fp32"),
                **types("q_heads pairs q_token q_head q_entry", "i32"),
            },
            {"INTERLEAVED": False, "LIMIT": 0.0, "INT8": kv == "*i8", "H": HEADS, "P": 64, "REST": 0, "V": 128},
            2,
            unaligned=("heads", "q_heads", "q_entry", "k_entry", "v_entry"),
            blocks=8,
            note=kv[1:],
        )
        for kv in ("*bf16", "*i8")
    ),
    attend("*bf16", 128, 4, 1, 8, blocks=2, opcodes=("HMMA",)),
    attend("*bf16", 64, 8, 1, 1, blocks=2, opcodes=("HMMA",)),
    attend("*bf16", 128, 4, 64, 1, everywhere=True),
    attend("*bf16", 256, 1, 64, 1),
    attend("*bf16", 256, 1, 1, 8),
    attend("*bf16", 64, 1, 64, 1),
    attend("*bf16", 128, 4, 1, 8, room=BLACKWELL, blocks=2, opcodes=("HMMA",), archs=LARGER),
    attend("*bf16", 128, 4, 64, 1, room=BLACKWELL, archs=LARGER[1:]),
    attend("*bf16", 64, 1, 64, 1, room=BLACKWELL, archs=LARGER[1:]),
    attend("*bf16", 128, 4, 64, 1, room=HOPPER, blocks=2, opcodes=("HGMMA",), archs=LARGER[:1]),
    attend("*bf16", 64, 1, 64, 1, room=HOPPER, blocks=2, archs=LARGER[:1]),
    attend("*fp8e4nv", 128, 4, 1, 8, archs=FLOAT8),
    *(attend("*bf16", 128, 4, 64, 1, form=form, archs=EACH) for form in FORMS),
    *(attend("*bf16", 128, 4, 64, 1, room=HOPPER, blocks=2, form=form, archs=LARGER[:1]) for form in FORMS),
    *(attend("*bf16", 128, 4, 1, 8, form=form, archs=EACH) for form in FORMS[:4]),
    attend("*fp8e5", 128, 4, 1, 8, archs=FLOAT8),
    attend("*fp8e5", 128, 4, 64, 1, archs=FLOAT8),
    attend("*fp8e4nv", 128, 4, 64, 1, room=HOPPER, blocks=2, archs=LARGER[:1]),
    attend("*i8", 128, 4, 1, 8, blocks=2),
    attend("*i8", 128, 4, 64, 1),
    attend("*bf16", 576, 16, 1, 8, v_dim=512, archs=WIDE, opcodes=("HMMA",)),
    attend("*bf16", 576, 128, 1, 8, v_dim=512, archs=WIDE, opcodes=("HMMA",)),
    attend("*bf16", 576, 128, 64, 1, v_dim=512, archs=WIDE),
    attend("*fp8e4nv", 576, 128, 1, 8, v_dim=512, archs=FLOAT8[:-1]),
    attend("*i8", 576, 128, 1, 8, v_dim=512, archs=WIDE),
    attend("*fp32", 576, 16, 1, 8, v_dim=512, dtype="fp32", archs=WIDE),
    Case(
        kernels.merge,
        {
            "out": "*bf16",
            **types("partial logs", "*fp32"),
            **types("query_start seq_len", "*i32"),
            **types("q_heads v_size out_token out_head", "i32"),
        },
        {"SPLITS": 8, "V": 128},
        2,
        unaligned=("q_heads",),
        blocks=8,
    ),
]
