"""Operators of recurrent layers in native kernels: a row's tokens one after another, parts of states side by side.

What they do not cover (a wide convolution, a large state, another dtype) is the reference's.
"""

from __future__ import annotations

from ctypes import Structure, c_int32, c_int64, c_void_p

import torch
from lmkit.api import DeviceInfo, PluginError, StateBatch
from lmkit_decoders.recurrent import TorchRecurrentOps
from torch import Tensor

from lmkit_platform_cpu.native import Args, Native, load
from lmkit_platform_cpu.rowops import DTYPES

MOST_STATES, MOST_TAPS, CONV_CHANNELS, SCAN_CHANNELS, DELTA_VALUES = 512, 8, 128, 16, 32  # as in recurrent.inc


class Rows(Structure):
    _fields_ = [("slots", c_void_p), ("starts", c_void_p)]


class ConvArgs(Args):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "weight", "bias", "state", "out")),
        ("rows", Rows),
        *((name, c_int64) for name in ("channels", "taps", "blocks", "x_row", "state_row")),
        *((name, c_int32) for name in ("dtype", "state_dtype")),
    ]


class ScanArgs(Args):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "dt", "a", "b", "c", "skip", "state", "out")),
        ("rows", Rows),
        *((name, c_int64) for name in ("channels", "states", "blocks", "x_row", "dt_row")),
        *((name, c_int64) for name in ("b_row", "c_row", "state_row")),
    ]


class SsdArgs(Args):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "dt", "a", "skip", "b", "c", "state", "out")),
        ("rows", Rows),
        *((name, c_int64) for name in ("heads", "share", "width", "states", "x_row", "x_head", "dt_row")),
        *((name, c_int64) for name in ("b_row", "b_group", "c_row", "c_group", "state_row")),
    ]


class DeltaArgs(Args):
    _fields_ = [
        *((name, c_void_p) for name in ("q", "k", "v", "decay", "beta", "state", "out")),
        ("rows", Rows),
        *((name, c_int64) for name in ("heads", "share", "keys", "values", "decays", "blocks", "q_row", "q_head")),
        *((name, c_int64) for name in ("k_row", "k_head", "v_row", "v_head", "decay_row", "beta_row", "state_row")),
        ("dtype", c_int32),
    ]


class NativeRecurrentOps(TorchRecurrentOps):
    """Contract of each operator: TorchRecurrentOps. A prompt gives the same bits wherever it was cut."""

    name = "recurrent_native"

    def __init__(self) -> None:
        native = load()
        assert native is not None, "selection asks whether the library is there"
        self.native: Native = native

    def can_run(self, dtype: str, device: DeviceInfo) -> str | None:
        return None if getattr(torch, dtype) in DTYPES else f"{dtype} is not among {', '.join(map(str, DTYPES))}"

    def causal_conv1d(self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateBatch) -> Tensor:
        given = [x, weight, *(() if bias is None else (bias,))]
        same = x.dtype in DTYPES and all(t.dtype == x.dtype for t in given)
        if weight.shape[1] > MOST_TAPS or not same or state.dtype not in (x.dtype, torch.float32):
            return super().causal_conv1d(x, weight, bias, state, rows)
        x, channels = _lines(x), x.shape[1]
        _shaped("causal_conv1d", (channels, weight.shape[1]), weight)
        _shaped("causal_conv1d", (len(state), weight.shape[1] - 1, channels), state)
        _shaped("causal_conv1d", (channels,), *given[2:])
        _packed("causal_conv1d", weight, state[0], *given[2:])
        out = torch.empty(x.shape, dtype=x.dtype)
        blocks = -(-channels // CONV_CHANNELS)
        args = ConvArgs(
            x=x.data_ptr(), weight=weight.data_ptr(), bias=None if bias is None else bias.data_ptr(),
            state=state.data_ptr(), out=out.data_ptr(), rows=_rows(x, rows), channels=channels, taps=weight.shape[1],
            blocks=blocks, x_row=x.stride(0), state_row=state.stride(0), dtype=DTYPES[x.dtype],
            state_dtype=DTYPES[state.dtype],
        )  # fmt: skip
        self._run("conv", args, rows, blocks)
        return out

    def selective_scan(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor, rows: StateBatch
    ) -> Tensor:
        (channels, size), tokens = a.shape, len(x)
        if size > MOST_STATES or not _floats(x, dt, a, b, c, skip, state):
            return super().selective_scan(x, dt, a, b, c, skip, state, rows)
        x, dt, b, c = map(_lines, (x, dt, b, c))
        _shaped("selective_scan", (tokens, channels), x, dt)
        _shaped("selective_scan", (tokens, size), b, c)
        _shaped("selective_scan", (channels,), skip)
        _shaped("selective_scan", (len(state), channels, size), state)
        _packed("selective_scan", a, skip, state[0])
        out, blocks = torch.empty(x.shape), -(-channels // SCAN_CHANNELS)
        args = ScanArgs(
            x=x.data_ptr(), dt=dt.data_ptr(), a=a.data_ptr(), b=b.data_ptr(), c=c.data_ptr(), skip=skip.data_ptr(),
            state=state.data_ptr(), out=out.data_ptr(), rows=_rows(x, rows), channels=channels, states=size,
            blocks=blocks, x_row=x.stride(0), dt_row=dt.stride(0), b_row=b.stride(0), c_row=c.stride(0),
            state_row=state.stride(0),
        )  # fmt: skip
        self._run("scan", args, rows, blocks)
        return out

    def ssd(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor, rows: StateBatch
    ) -> Tensor:
        (tokens, heads, width), (groups, size) = x.shape, b.shape[1:]
        if not _floats(x, dt, a, b, c, skip, state):
            return super().ssd(x, dt, a, b, c, skip, state, rows)
        x, dt, b, c = map(_lines, (x, dt, b, c))
        _shaped("ssd", (tokens, heads), dt)
        _shaped("ssd", (tokens, groups, size), b, c)
        _shaped("ssd", (heads,), a, skip)
        _shaped("ssd", (len(state), heads, width, size), state)
        _packed("ssd", a, skip, state[0])
        out = torch.empty(x.shape)
        args = SsdArgs(
            x=x.data_ptr(), dt=dt.data_ptr(), a=a.data_ptr(), skip=skip.data_ptr(), b=b.data_ptr(), c=c.data_ptr(),
            state=state.data_ptr(), out=out.data_ptr(), rows=_rows(x, rows), heads=heads, share=heads // groups,
            width=width, states=size, x_row=x.stride(0), x_head=x.stride(1), dt_row=dt.stride(0), b_row=b.stride(0),
            b_group=b.stride(1), c_row=c.stride(0), c_group=c.stride(1), state_row=state.stride(0),
        )  # fmt: skip
        self._run("ssd", args, rows, heads)
        return out

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, rows: StateBatch
    ) -> Tensor:
        (tokens, heads, values), (shared, keys) = v.shape, q.shape[1:]
        same = v.dtype in DTYPES and q.dtype == k.dtype == v.dtype
        if keys > MOST_STATES or not same or not _floats(decay, beta, state):
            return super().gated_delta_rule(q, k, v, decay, beta, state, rows)
        q, k, v, decay, beta = map(_lines, (q, k, v, decay, beta))
        decays = decay.shape[2] if decay.dim() == 3 else 1
        if decay.dim() == 3 and decay.stride(1) != decays:
            decay = decay.contiguous()
        _shaped("gated_delta_rule", (tokens, shared, keys), q, k)
        _shaped("gated_delta_rule", (tokens, heads, keys)[: decay.dim()], decay)
        _shaped("gated_delta_rule", (tokens, heads), beta)
        _shaped("gated_delta_rule", (len(state), heads, keys, values), state)
        _packed("gated_delta_rule", state[0])
        out, blocks = torch.empty(v.shape, dtype=v.dtype), -(-values // DELTA_VALUES)
        args = DeltaArgs(
            q=q.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), decay=decay.data_ptr(), beta=beta.data_ptr(),
            state=state.data_ptr(), out=out.data_ptr(), rows=_rows(v, rows), heads=heads, share=heads // shared,
            keys=keys, values=values, decays=decays, blocks=blocks, q_row=q.stride(0), q_head=q.stride(1),
            k_row=k.stride(0), k_head=k.stride(1), v_row=v.stride(0), v_head=v.stride(1), decay_row=decay.stride(0),
            beta_row=beta.stride(0), state_row=state.stride(0), dtype=DTYPES[v.dtype],
        )  # fmt: skip
        self._run("delta", args, rows, heads * blocks)
        return out

    def _run(self, op: str, args: Args, rows: StateBatch, parts: int) -> None:
        """Each row's state in `parts`."""
        args.chunks[0] = len(rows.slots) * parts
        self.native.run(op, args)


def _rows(x: Tensor, rows: StateBatch) -> Rows:
    """Addresses of slots and starts. What their tensors hold is the step's, and no kernel checks it."""
    slots, starts = rows.slots, rows.query_start
    fits = slots.dtype == torch.int64 and starts.dtype == torch.int32 and len(starts) == len(slots) + 1
    if not fits or not slots.is_contiguous() or not starts.is_contiguous() or x.device.type != "cpu":
        raise PluginError(f"rows of recurrent state: {slots.dtype} slots, {starts.dtype} starts on {x.device}")
    return Rows(slots.data_ptr(), starts.data_ptr())


def _floats(*tensors: Tensor) -> bool:
    return all(t.dtype == torch.float32 for t in tensors)


def _lines(x: Tensor) -> Tensor:
    """Entries of the last axis are neighbours."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _shaped(what: str, shape: tuple[int, ...], *tensors: Tensor) -> None:
    for x in tensors:
        if tuple(x.shape) != tuple(shape):
            raise PluginError(f"{what}: {list(x.shape)} is not {list(shape)}")


def _packed(what: str, *tensors: Tensor) -> None:
    for x in tensors:
        if not x.is_contiguous():
            raise PluginError(f"{what}: {list(x.shape)} with strides {x.stride()} has gaps")
