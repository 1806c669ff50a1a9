"""Mamba blocks as data (`lmkit.layers.mamba`). Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING

from lmkit.api import LinearSpec, NormKind, StateTensor
from lmkit.layers.describe import DecoderConfig, MixerConfig, Target

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
    bias: bool = False, conv_bias: bool = True, norm_groups: int = 1,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
) -> MixerConfig:  # fmt: skip
    """Mamba 2: `groups` of heads that share b and c, `norm_groups` of channels in the gated norm at the end."""
    d, size, bc = hidden_size, heads * head_dim, groups * state_size
    ssm = StateTensor("ssm", (heads, head_dim, state_size))
    parts = ("gate", "x", "b", "c", "dt")
    return MixerConfig(
        layers=layers,
        state=(StateTensor("conv", (width - 1, size + 2 * bc)), ssm),
        linears=(
            LinearSpec("in_proj", d, (size, size, bc, bc, heads), bias, "none", parts, ("mamba_in",)),
            LinearSpec("out_proj", size, (d,), bias, "none", (), ("mamba_out",)),
        ),
        num_parameters=(size + 2 * bc) * (width + conv_bias) + 3 * heads + size,
        options={"heads": heads, "head_dim": head_dim, "groups": groups, "state_size": state_size, "width": width}
        | {"conv_bias": conv_bias, "norm_groups": norm_groups, "dt_limits": list(dt_limits)},
    )


def mamba_names(block: str) -> dict[str, str]:
    """Usual tensors of a Mamba block `block` (".mixer"): roles for `tensor_names`."""
    names = {"in": "in_proj", "out": "out_proj", "x": "x_proj", "dt": "dt_proj", "conv": "conv1d", "norm": "norm"}
    norms = {f"mamba_{part}_norm": f"{block}.{part}_layernorm" for part in ("dt", "b", "c")}
    single = {"mamba_A": f"{block}.A_log", "mamba_D": f"{block}.D", "mamba_dt_bias": f"{block}.dt_bias"}
    return {f"mamba_{role}": f"{block}.{name}" for role, name in names.items()} | norms | single


MAMBA: Mapping[str, Target] = {  # targets of its roles
    "mamba_in": ("layers.{i}.attn.in_proj", "*"),
    **{f"mamba_{part}": f"layers.{{i}}.attn.{part}_proj" for part in ("x", "dt", "out")},
    **{f"mamba_{part}": f"layers.{{i}}.attn.{part}" for part in ("conv", "norm", "dt_norm", "b_norm", "c_norm")},
}


def negative_exp(cfg: DecoderConfig, weight: Tensor) -> Tensor:
    """A_log -> A, for `transforms` of the role mamba_A."""
    return -weight.float().exp()
