"""Row-wise operators in native kernels. What they do not cover (a dtype, a weight of another one) is torch's."""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64, c_void_p

import numpy as np
import torch
from lmkit.api import DeviceInfo, DrawParams, PluginError, Routing
from lmkit_layers import TorchRowOps
from torch import Tensor

from lmkit_platform_cpu.native import Args, Native, load

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_pytorch_tanh": 2, "gelu_new": 2, "gelu_fast": 2, "relu": 3, "relu2": 4}
GATES = ACTIVATIONS | {"swiglu_clamped": 5}
PIECE = 16384  # values of a row of logits per chunk, as in sample.inc
CHUNK = 8192  # values per chunk: some microseconds
WIDEST = 16  # floats of the widest vector
ROUTED_EXPERTS, ROUTED_TOKENS, MOST_GROUPS = 4, 64, 64  # as in route.inc


class EmbedArgs(Args):
    _fields_ = [
        *((name, c_void_p) for name in ("ids", "weight", "out")),
        *((name, c_int64) for name in ("rows", "num", "size", "step")),
    ]


class NormArgs(Args):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "residual", "out", "weight", "bias")),
        *((name, c_int64) for name in ("rows", "heads", "dim", "step")),
        *((name, c_int64) for name in ("x_row", "x_head", "out_row", "out_head", "residual_row")),
        *((name, c_int32) for name in ("dtype", "weight_dtype", "centered")),
        ("eps", c_float),
    ]


class GateArgs(Args):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "out")),
        *((name, c_int64) for name in ("rows", "dim", "step", "x_row")),
        *((name, c_int32) for name in ("dtype", "activation", "gated")),
    ]


class AddArgs(Args):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "y", "h", "gate")),
        *((name, c_int64) for name in ("rows", "dim", "step", "x_row", "y_row", "h_row")),
        ("dtype", c_int32),
    ]


class AnglesArgs(Args):
    _fields_ = [
        *((name, c_void_p) for name in ("positions", "inv_freq", "cos", "sin")),
        *((name, c_int64) for name in ("rows", "pairs", "step")),
        ("magnitude", c_float),
    ]


class RotateArgs(Args):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "cos", "sin")),
        *((name, c_int64) for name in ("rows", "heads", "pairs", "step", "x_row", "x_head")),
        *((name, c_int32) for name in ("dtype", "interleaved")),
    ]


class RouteArgs(Args):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "weight", "bias", "correction", "scores", "wanted", "ids", "weights")),
        *((name, c_int64) for name in ("tokens", "experts", "size", "x_row", "top_k", "stride")),
        *((name, c_int64) for name in ("num_groups", "top_groups")),
        *((name, c_int32) for name in ("dtype", "wide", "sigmoid", "two_best", "renormalize")),
        *((name, c_float) for name in ("epsilon", "scale")),
    ]


class SampleArgs(Args):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "maxima", "token", "largest")),
        *((name, c_void_p) for name in ("temperature", "min_p", "top_p", "top_k", "share")),
        *((name, c_int64) for name in ("rows", "size", "pieces", "x_row")),
        ("dtype", c_int32),
    ]


class NativeRowOps(TorchRowOps):
    """See `lmkit.api.RowOps`."""

    name = "rowwise_native"

    def __init__(self) -> None:
        native = load()
        assert native is not None, "selection asks whether the library is there"
        self.native: Native = native

    def can_run(self, dtype: str, device: DeviceInfo) -> str | None:
        return None if getattr(torch, dtype) in DTYPES else f"{dtype} is not among {', '.join(map(str, DTYPES))}"

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        _require(ids.dim() == 1 and ids.dtype == torch.int64 and ids.is_contiguous(), "embed", ids)
        _require(weight.dim() == 2 and weight.is_contiguous(), "embed", weight)
        out = torch.empty((ids.shape[0], weight.shape[1]), dtype=weight.dtype)
        size = weight.shape[1] * weight.itemsize
        args = EmbedArgs(
            ids=ids.data_ptr(), weight=weight.data_ptr(), out=out.data_ptr(), rows=ids.shape[0], num=weight.shape[0],
            size=size,
        )  # fmt: skip
        self._run("embed", args, weight.shape[1])
        return out

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        return self._norm("rms_norm", x, weight, None, eps, residual, out)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        return self._norm("layer_norm", x, weight, bias, eps, residual, None)

    def _norm(
        self, what: str, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:  # fmt: skip
        dim = x.shape[-1]
        out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
        _require(x.dtype in DTYPES and weight.dtype in (x.dtype, torch.float32), what, x, weight)
        _require(weight.shape == (dim,) and weight.is_contiguous(), what, weight)
        _require(out.shape == x.shape and out.dtype == x.dtype, what, x, out)
        if bias is not None:
            _require(bias.shape == (dim,) and bias.dtype == weight.dtype and bias.is_contiguous(), what, weight, bias)
        rows, heads, x_row, x_head = _heads(what, x)
        _, _, out_row, out_head = _heads(what, out)
        residual_row = 0
        if residual is not None:
            _require(x.dim() == 2 and residual.shape == x.shape and residual.dtype == x.dtype, what, x, residual)
            residual_row = _heads(what, residual)[2]
        args = NormArgs(
            x=x.data_ptr(), residual=None if residual is None else residual.data_ptr(), out=out.data_ptr(),
            weight=weight.data_ptr(), bias=None if bias is None else bias.data_ptr(), rows=rows, heads=heads, dim=dim,
            x_row=x_row, x_head=x_head, out_row=out_row, out_head=out_head, residual_row=residual_row,
            dtype=DTYPES[x.dtype], weight_dtype=DTYPES[weight.dtype], centered=what == "layer_norm", eps=eps,
        )  # fmt: skip
        self._run("norm", args, heads * dim)
        return out

    def activate(self, x: Tensor, name: str) -> Tensor:
        return self._gate(x, name, gated=False)

    def gate(self, x: Tensor, name: str) -> Tensor:
        return self._gate(x, name, gated=True)

    def _gate(self, x: Tensor, name: str, gated: bool) -> Tensor:
        known = GATES if gated else ACTIVATIONS
        if name not in known:
            return super().gate(x, name) if gated else super().activate(x, name)
        _require(x.dim() == 2 and x.dtype in DTYPES and x.shape[1] % (1 + gated) == 0, "gate", x)
        rows, _, x_row, _ = _heads("gate", x)
        dim = x.shape[1] // (1 + gated)
        out = torch.empty((rows, dim), dtype=x.dtype)
        args = GateArgs(
            x=x.data_ptr(), out=out.data_ptr(), rows=rows, dim=dim, x_row=x_row, dtype=DTYPES[x.dtype],
            activation=known[name], gated=gated,
        )  # fmt: skip
        self._run("gate", args, dim)
        return out

    def add(self, x: Tensor, y: Tensor, h: Tensor, gate: Tensor | None = None) -> Tensor:
        _require(x.dim() == 2 and x.dtype in DTYPES, "add", x)
        for t in (y, h):
            _require(t.shape == x.shape and t.dtype == x.dtype, "add", x, t)
        if gate is not None:
            _require(gate.shape == (1, x.shape[1]) and gate.dtype == x.dtype and gate.is_contiguous(), "add", x, gate)
        (rows, _, x_row, _), (_, _, y_row, _), (_, _, h_row, _) = (_heads("add", t) for t in (x, y, h))
        args = AddArgs(
            x=x.data_ptr(), y=y.data_ptr(), h=h.data_ptr(), gate=None if gate is None else gate.data_ptr(), rows=rows,
            dim=x.shape[1], x_row=x_row, y_row=y_row, h_row=h_row, dtype=DTYPES[x.dtype],
        )  # fmt: skip
        self._run("add_rows", args, x.shape[1])
        return x

    def angles(self, positions: Tensor, inv_freq: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
        _require(
            positions.dim() == 1 and positions.dtype == torch.int64 and positions.is_contiguous(), "angles", positions
        )
        _require(
            inv_freq.dim() == 1 and inv_freq.dtype == torch.float32 and inv_freq.is_contiguous(), "angles", inv_freq
        )
        rows, pairs = positions.shape[0], inv_freq.shape[0]
        cos, sin = torch.empty((rows, pairs)), torch.empty((rows, pairs))
        args = AnglesArgs(
            positions=positions.data_ptr(), inv_freq=inv_freq.data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr(),
            rows=rows, pairs=pairs, magnitude=magnitude,
        )  # fmt: skip
        self._run("angles", args, 32 * pairs)
        return cos, sin

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> None:
        _require(x.dim() == 3 and x.dtype in DTYPES and x.shape[2] >= 2 * cos.shape[1], "rotate", x, cos)
        for t in (cos, sin):
            fits = t.shape == (x.shape[0], cos.shape[1]) and t.dtype == torch.float32 and t.is_contiguous()
            _require(fits, "rotate", x, cos, sin)
        rows, heads, x_row, x_head = _heads("rotate", x)
        args = RotateArgs(
            x=x.data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr(), rows=rows, heads=heads, pairs=cos.shape[1],
            x_row=x_row, x_head=x_head, dtype=DTYPES[x.dtype], interleaved=interleaved,
        )  # fmt: skip
        self._run("rotate", args, heads * 2 * cos.shape[1])

    def route(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        _check_route(x, weight, bias, correction, routing)
        tokens, _, x_row, _ = _heads("route", x)
        experts, stride = len(weight), -(-len(weight) // WIDEST) * WIDEST
        scores, wanted = torch.empty(tokens * stride), torch.empty(tokens * stride)
        ids = torch.empty((tokens, routing.top_k), dtype=torch.int64)
        weights = torch.empty((tokens, routing.top_k), dtype=x.dtype)
        args = RouteArgs(
            x=x.data_ptr(), weight=weight.data_ptr(), bias=None if bias is None else bias.data_ptr(),
            correction=None if correction is None else correction.data_ptr(), scores=scores.data_ptr(),
            wanted=wanted.data_ptr(), ids=ids.data_ptr(), weights=weights.data_ptr(), tokens=tokens, experts=experts,
            size=x.shape[1], x_row=x_row, top_k=routing.top_k, stride=stride, num_groups=routing.num_groups,
            top_groups=routing.top_groups, dtype=DTYPES[x.dtype], wide=routing.float32,
            sigmoid=routing.scoring == "sigmoid", two_best=routing.group_score == "two best",
            renormalize=routing.renormalize, epsilon=routing.epsilon, scale=routing.scale,
        )  # fmt: skip
        args.chunks[:2] = -(-experts // ROUTED_EXPERTS) * -(-tokens // ROUTED_TOKENS), tokens
        self.native.run("route", args)
        return ids, weights

    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._sample("argmax", x)

    def draw(self, x: Tensor, params: DrawParams) -> tuple[Tensor, Tensor]:
        _require(x.dtype == torch.float32, "draw", x)
        arrays: dict[str, np.ndarray] = {
            "temperature": np.ascontiguousarray(params.temperature, np.float32),
            "min_p": np.ascontiguousarray(params.min_p, np.float32),
            "top_p": np.ascontiguousarray(params.top_p, np.float32),
            "top_k": np.ascontiguousarray(params.top_k, np.int64),
            "share": np.ascontiguousarray(params.share, np.float64),
        }
        _require(all(a.shape == x.shape[:1] for a in arrays.values()), "draw", x)
        return self._sample("draw", x, **{name: a.ctypes.data for name, a in arrays.items()})

    def _sample(self, op: str, x: Tensor, **params: int) -> tuple[Tensor, Tensor]:
        _require(x.dim() == 2 and x.dtype in DTYPES and x.shape[1] > 0, op, x)
        rows, _, x_row, _ = _heads(op, x)
        pieces = -(-x.shape[1] // PIECE)
        maxima, largest = torch.empty(rows * pieces), torch.empty(rows)
        token = torch.empty(rows, dtype=torch.int64)
        args = SampleArgs(
            x=x.data_ptr(), maxima=maxima.data_ptr(), token=token.data_ptr(), largest=largest.data_ptr(), rows=rows,
            size=x.shape[1], pieces=pieces, x_row=x_row, dtype=DTYPES[x.dtype], **params,
        )  # fmt: skip
        args.chunks[:3] = (rows * pieces, rows, 0) if op == "argmax" else (rows * pieces, rows * pieces, rows)
        self.native.run(op, args)
        return token, largest

    def _run(self, op: str, args: Args, row_values: int) -> None:
        """In chunks of whole rows of about CHUNK values."""
        args.step = max(1, CHUNK // max(1, row_values))
        args.chunks[0] = -(-args.rows // args.step)
        self.native.run(op, args)


def _heads(what: str, x: Tensor) -> tuple[int, int, int, int]:
    """x [..., D] as [rows, heads, D]: sizes of these axes and their distances in values."""
    if x.dim() < 2 or x.dim() > 3 or (x.stride(-1) != 1 and x.shape[-1] > 1) or x.device.type != "cpu":
        raise PluginError(f"{what}: {list(x.shape)} with strides {x.stride()} on {x.device} is not rows of values")
    if x.dim() == 2:
        return x.shape[0], 1, x.stride(0), 0
    return x.shape[0], x.shape[1], x.stride(0), x.stride(1)


def _check_route(x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, routing: Routing) -> None:
    given = [x, weight, *(t for t in (bias, correction) if t is not None)]
    experts, groups = len(weight), routing.num_groups
    _require(x.dim() == 2 and x.dtype in DTYPES and weight.shape == (experts, x.shape[1]), "route", *given)
    _require(all(t.is_contiguous() and t.shape[:1] == (experts,) for t in given[1:]), "route", *given)
    _require(weight.dtype == x.dtype and (bias is None or bias.dtype == x.dtype), "route", *given)
    _require(correction is None or correction.dtype == torch.float32, "route", *given)
    _require(all(t.dim() == 1 for t in given[2:]) and 0 < routing.top_k <= experts, "route", *given)
    size = experts // max(groups, 1)
    fits = 0 < groups <= MOST_GROUPS and size * groups == experts and 0 < routing.top_groups <= groups
    _require(fits and (groups == 1 or size >= 2 or routing.group_score == "max"), "route", *given)


def _require(ok: bool, what: str, *tensors: Tensor) -> None:
    if not ok:
        shapes = ", ".join(f"{list(t.shape)} {t.dtype}" for t in tensors)
        raise PluginError(f"{what}: operands do not fit each other or the kernel: {shapes}")
