"""Seams of operators: formats of weights, and what works on rows; the kernels are those of the kind `op`.

Tensors are named in annotations only; this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from lmkit.contracts.device import DeviceInfo
    from lmkit.contracts.model import LinearSpec, ParamSpec


class QuantFormat(Protocol):
    """How one linear layer is stored."""

    name: str  # weight format: "plain", "fp8_block", ...

    def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        """The stored tensors, by name ("weight", "weight_scale")."""

    def dequantize(self, params: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """[out, in]: the oracle of every kernel, and the last-resort kernel."""


@dataclass(slots=True)
class Integers:
    """A weight as integers: w[i, j] = (codes[i, j] - zeros[i, g]) * scales[i, g] - offsets[i, g].

    g is the group of column j. Kernels may round scales and offsets to float16. With a table, table[codes] are codes.
    """

    codes: Tensor  # [out, in] uint8
    scales: Tensor  # [out, groups]
    zeros: Tensor | int  # [out, groups] uint8, or one for all
    order: Tensor | None = None  # [in] int64: column j of the codes is column order[j] of w; None: they are in order
    offsets: Tensor | None = None  # [out, groups]; None: there are none
    table: Tensor | None = None  # [16] uint8, of 4 bits; None: there is none


@runtime_checkable
class IntegerFormat(QuantFormat, Protocol):
    """A format of integers with a scale per group of columns: kernels that multiply integers run any of these."""

    bits: int  # 4 or 8
    group: int  # columns per scale; 0 = one scale per row
    activations: Literal["float", "int8"]  # int8: kernels may round those of a row to 8 bits, per group

    @property
    def ordered(self) -> bool:
        """Whether `integers` may give an order of columns."""
        return False

    @property
    def rounding(self) -> Literal["", "symmetric", "range"]:
        """How `integers` makes them from params["weight"], for kernels that can do it in one pass; "" = otherwise.

        Scales are float16. symmetric: scale = max |w| / 127 (4 bits: / 7.5), zero = 128 (8), code = w / scale + zero
        within 1 to 255 (0 to 15). range (4 bits): low and high = least and most of w and 0, scale = (high - low) / 15,
        zero = -low / scale. Everything is rounded to nearest even; division is multiplication by 1 / scale, or by 0.
        """

    def integers(self, params: Mapping[str, Tensor]) -> Integers:
        """The stored tensors as codes, scales, zeros and offsets; equal to `dequantize`, element by element, but for
        values of a table, which may be rounded to 8 bits."""


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How each of S rows of logits is sampled: numpy arrays [S]. Set by the sampler, read by `RowOps.draw`."""

    temperature: np.ndarray  # float32, positive
    min_p: np.ndarray  # float32; 0 keeps every token
    top_k: np.ndarray  # int64; 0 keeps every token
    top_p: np.ndarray  # float32; 1 keeps every token
    share: np.ndarray  # float64 in [0, 1)


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router of a mixture turns logits into choices. Set by model descriptions, read by `RowOps.route`."""

    top_k: int  # experts per token
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True  # the weights of the chosen sum to 1
    epsilon: float = 0.0  # added to the sum they are divided by
    scale: float = 1.0  # of the weights
    num_groups: int = 1  # experts come from the best groups
    top_groups: int = 1
    group_score: Literal["max", "two best"] = "max"
    float32: bool = False  # logits are not rounded to the dtype of what they are made from


class RowOps(Protocol):
    """What a model does between its linears and attention: operators that treat each row (token) by itself.

    Arithmetic is float32, rounded once to the dtype of the result. `x` may have gaps between rows and heads, not within
    the last axis. Results are new tensors where no operand is said to change. `TorchRowOps` of lmkit-layers is the
    reference; an implementation may subclass it and replace what it does better.
    """

    name: str

    def can_run(self, dtype: str, device: DeviceInfo) -> str | None: ...

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        """ids [T] int64, weight [V, D] -> [T, D]."""

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """x / rms(x) * weight over the last axis: [..., D] -> [..., D], into `out` (which may be `x`) if given.

        With `residual` [T, D]: first `residual += x` in place, then its norm.
        `weight` [D] has the dtype of x, or is float32.
        """

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        """(x - mean) / std * weight + bias over the last axis; `residual` and dtypes as in `rms_norm`."""

    def activate(self, x: Tensor, name: str) -> Tensor:
        """An activation by its name in configurations ("silu", "gelu", ...): [T, M] -> [T, M]."""

    def gate(self, x: Tensor, name: str) -> Tensor:
        """activation(first half) * second half: [T, 2 M] -> [T, M].

        "swiglu_clamped" is gpt-oss's: g = min(first, 7), g * sigmoid(1.702 g) * (clamp(second, -7, 7) + 1).
        """

    def add(self, x: Tensor, y: Tensor, h: Tensor, gate: Tensor | None = None) -> Tensor:
        """x [T, D] += y [T, D] in place, and x. With `gate` [1, D]: y times the sigmoid of h gate', h [T, D]."""

    def angles(self, positions: Tensor, inv_freq: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
        """positions [T] int64, inv_freq [P] float32 -> cos, sin of their products times magnitude: [T, P] float32."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> None:
        """Turns the first 2 P entries of each head of x [T, H, D] in place.

        The pair of entry i is i + P, or its neighbour when interleaved.
        """

    def route(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        """x [T, D], weight [E, D], bias [E] -> the experts chosen [T, K] int64, and their weights [T, K] like x.

        Scores are those of the logits x W' + bias. `correction` [E] float32 is added to them for the choice only.
        """

    def mask(self, x: Tensor, rows: Tensor | None, bits: Tensor) -> None:
        """Logits x [S, V] float32 of rows[i] (or i, without `rows`) become -inf in place where bits[i] has a 0.

        rows [N] int64, each once; bits [N, W] uint8: that of token t is bit t % 8, the least first, of byte t // 8; 0
        beyond the last.
        """

    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [S, V] -> the first position of the maximum [S] int64, and the maximum [S]; NaN counts as the largest.

        Where the maximum is no finite number the position means nothing.
        """

    def draw(self, x: Tensor, params: DrawParams) -> tuple[Tensor, Tensor]:
        """Logits [S, V] float32, overwritten -> the token drawn [S] int64, and the largest logit [S] as in `argmax`.

        Temperature, then min_p, top_k, top_p, each on what the one before left; equals of the last one kept stay. Of
        what is left, in token order, the token at `share` of the sum of the weights. A row depends on nothing else.
        """
