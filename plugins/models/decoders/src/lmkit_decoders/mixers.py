"""Mamba blocks as data (`lmkit_decoders.mamba`). Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, inf
from typing import TYPE_CHECKING, Any, Literal

from lmkit.api import LinearSpec, NormKind, StateTensor, UnsupportedModel

from lmkit_decoders.describe import ConfigReader, DecoderConfig, MixerConfig
from lmkit_decoders.places import OneTensor, Target

if TYPE_CHECKING:
    from torch import Tensor


def mamba_mixer(
    *, layers: tuple[bool, ...], hidden_size: int, size: int, state_size: int, width: int, rank: int = 0,
    bias: bool = False, conv_bias: bool = True, norm: NormKind | None = None, norm_eps: float = 1e-6,
) -> MixerConfig:  # fmt: skip
    """Mamba (1): `size` of the inner stream, `width` of the convolution, `rank` of time steps (0: hidden size / 16).

    `norm`: of time steps, b and c.
    """
    d, rank = hidden_size, rank or ceil(hidden_size / 16)
    return MixerConfig(
        layers=layers,
        state=(StateTensor("conv", (width - 1, size)), StateTensor("ssm", (size, state_size))),
        linears=(
            LinearSpec("in_proj", d, (size, size), bias, "none", ("x", "gate"), ("mamba_in",)),
            LinearSpec("x_proj", size, (rank + 2 * state_size,), False, "none", (), ("mamba_x",)),
            LinearSpec("dt_proj", rank, (size,), True, "none", (), ("mamba_dt",)),
            LinearSpec("out_proj", size, (d,), bias, "none", (), ("mamba_out",)),
        ),
        num_parameters=size * (width + conv_bias + state_size + 1)
        + (rank + 2 * state_size) * (norm is not None and norm != "rms_plain"),
        options={"size": size, "state_size": state_size, "width": width, "rank": rank, "conv_bias": conv_bias}
        | {"norm": norm, "norm_eps": norm_eps},
    )


def mamba2_mixer(
    *, layers: tuple[bool, ...], hidden_size: int, heads: int, head_dim: int, groups: int, state_size: int, width: int,
    bias: bool = False, out_bias: bool | None = None, conv_bias: bool = True,
    norm: Literal["after", "before", "none"] = "after", norm_groups: int = 1, norm_eps: float | None = None,
    dt_limits: tuple[float, float] = (0.0, inf),
) -> MixerConfig:  # fmt: skip
    """Mamba 2: `groups` of heads that share b and c, `norm_groups` of channels in the norm after or before the gate.

    `out_bias`: of the projection at the end, None: as `bias`. `norm_eps`: None: the decoder's.
    """
    d, size, bc = hidden_size, heads * head_dim, groups * state_size
    ssm = StateTensor("ssm", (heads, head_dim, state_size))
    parts = ("gate", "x", "b", "c", "dt")
    return MixerConfig(
        layers=layers,
        state=(StateTensor("conv", (width - 1, size + 2 * bc)), ssm),
        linears=(
            LinearSpec("in_proj", d, (size, size, bc, bc, heads), bias, "none", parts, ("mamba_in",)),
            LinearSpec("out_proj", size, (d,), bias if out_bias is None else out_bias, "none", (), ("mamba_out",)),
        ),
        num_parameters=(size + 2 * bc) * (width + conv_bias) + 3 * heads + size * (norm != "none"),
        options={"heads": heads, "head_dim": head_dim, "groups": groups, "state_size": state_size, "width": width}
        | {"conv_bias": conv_bias, "norm": norm, "norm_groups": norm_groups, "norm_eps": norm_eps}
        | {"dt_limits": list(dt_limits)},
    )


def hybrid_mamba2(r: ConfigReader, layers: tuple[bool, ...], inner: int = 0, **more: Any) -> MixerConfig:
    """Mamba 2 under the usual keys of models that have it in some layers ("mamba_n_heads").

    `inner` is the size of its inner stream, 0: "mamba_expand" times the hidden size. `more` is for `mamba2_mixer`.
    """
    heads, groups, size = r.integer("mamba_n_heads", 128), r.integer("mamba_n_groups", 1), r.integer("hidden_size")
    inner = inner or r.integer("mamba_expand", 2) * size
    head_dim = inner // heads if r.config.get("mamba_d_head", "auto") == "auto" else r.integer("mamba_d_head")
    if heads * head_dim != inner or heads % groups:
        raise UnsupportedModel("mamba_n_heads", heads, f"{inner} / {head_dim}, in {groups} groups")
    return mamba2_mixer(
        layers=layers,
        hidden_size=size,
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_size=r.integer("mamba_d_state", 256),
        width=r.kernel_width("mamba_d_conv", 4),
        bias=r.flag("mamba_proj_bias", False),
        conv_bias=r.flag("mamba_conv_bias", True),
        norm_groups=groups,
        dt_limits=time_step_limits(r),
        **more,
    )


def time_step_limits(r: ConfigReader) -> tuple[float, float]:
    """The bounds of the time step that the configuration has, or none."""
    limits = r.config.get("time_step_limit", [0.0, inf])
    limits = [inf if n == {"__float__": "Infinity"} else n for n in limits] if isinstance(limits, list) else []
    if [type(limit) for limit in limits] != [float, float]:
        raise UnsupportedModel("time_step_limit", r.config["time_step_limit"], "two numbers")
    return limits[0], limits[1]


def mamba_names(block: str) -> dict[str, str]:
    """Usual tensors of a Mamba block `block` (".mixer"): roles for `tensor_names`."""
    names = {"in": "in_proj", "out": "out_proj", "x": "x_proj", "dt": "dt_proj", "conv": "conv1d", "norm": "norm"}
    norms = {f"mamba_{part}_norm": f"{block}.{part}_layernorm" for part in ("dt", "b", "c")}
    single = {"mamba_A": f"{block}.A_log", "mamba_D": f"{block}.D", "mamba_dt_bias": f"{block}.dt_bias"}
    return {f"mamba_{role}": f"{block}.{name}" for role, name in names.items()} | norms | single


MAMBA: Mapping[str, Target] = {  # targets of its roles
    "mamba_in": ("{mixer}.in_proj", "*"),
    **{f"mamba_{part}": f"{{mixer}}.{part}_proj" for part in ("x", "dt", "out")},
    **{f"mamba_{part}": f"{{mixer}}.{part}" for part in ("conv", "norm", "dt_norm", "b_norm", "c_norm")},
    **{f"mamba_{part}": OneTensor(f"{{mixer}}.{part}") for part in ("A", "D", "dt_bias")},
}


def negative_exp(cfg: DecoderConfig, weight: Tensor) -> Tensor:
    """A_log -> A, for `transforms` of the role mamba_A."""
    return -weight.float().exp()
