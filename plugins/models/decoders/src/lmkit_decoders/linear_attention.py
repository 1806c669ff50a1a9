"""Linear recurrences of layers that keep a state of fixed size instead of keys and values, in torch.

Each takes the tokens of a step [T, ...], row after row, and a layer's state [slots, ...], which it renews in place for
the rows of the step. Rows of one token are computed at once, prompts in chunks, several together. Sums are float32:
where a prompt was cut changes no more than roundings. The host never waits for the device.
"""

from __future__ import annotations

import torch
from lmkit.api import StateBatch
from torch import Tensor

from lmkit_decoders.pieces import pieces

CHUNK = 64  # tokens of a prompt computed at once
CHANNELS_CHUNK = 16  # where channels decay on their own: memory is this squared, times the size of keys


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, rows: StateBatch
) -> Tensor:
    """q, k [T, Hk, K], v [T, H, V], decay (logarithms) [T, H] or [T, H, K], beta [T, H] -> [T, H, V] in v's dtype.

    Gated delta networks, https://arxiv.org/abs/2412.06464: with q and k of length 1,

        S_t = exp(decay_t) S_(t-1) + k_t u_t^T,  u_t = beta_t (v_t - exp(decay_t) S_(t-1)^T k_t)

    and o_t = S_t^T q_t / sqrt(K). Where each channel of the keys decays on its own, exp(decay_t) is a diagonal matrix:
    Kimi delta attention, https://arxiv.org/abs/2510.26692.

    Head h of v reads head h // (H / Hk) of q and k. `state` is [slots, H, K, V] float32.
    """
    share, scale = v.shape[1] // q.shape[1], q.shape[-1] ** -0.5
    q, k = (unit(x.float()).repeat_interleave(share, 1) for x in (q, k))
    decay = decay.float() if decay.dim() == 3 else decay.float()[..., None]
    return _linear(q * scale, k, v, decay, beta.float(), state, rows)


def lightning_attention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor, rows: StateBatch) -> Tensor:
    """q, k [T, H, K], v [T, H, V] and each head's decay (a logarithm) [H] -> [T, H, V] in v's dtype.

    Lightning attention, https://arxiv.org/abs/2401.04658: S_t = exp(decay) S_(t-1) + k_t v_t^T,  o_t = S_t^T q_t.
    `state` is [slots, H, K, V] float32.
    """
    return _linear(q.float(), k.float(), v, decay.float()[:, None].expand(len(v), -1, -1), None, state, rows)


def rg_lru(x: Tensor, input_gate: Tensor, decay: Tensor, state: Tensor, rows: StateBatch, positions: Tensor) -> Tensor:
    """x, input_gate and decay (logarithms) [T, W] -> [T, W] in x's dtype.

    The real-gated linear recurrent unit, https://arxiv.org/abs/2402.19427, where the gates are made already:

        h_t = a_t h_(t-1) + sqrt(1 - a_t^2) input_gate_t x_t,  a_t = exp(decay_t)

    but h_0 = input_gate_0 x_0 at position 0. `state` is [slots, W] float32.
    """
    decay = decay.float()
    share = torch.where(positions[:, None] == 0, 1.0, (-torch.expm1(2 * decay)).sqrt())
    longest = max((end - start for _, start, end in rows.prompts), default=1)
    begin, end = rows.query_start[:-1], rows.query_start[1:]
    h = scan(decay.exp(), (x * input_gate).float() * share, state[rows.slots], begin, longest)
    state[rows.slots] = h[end - 1]
    return h.to(x.dtype)


def scan(a: Tensor, b: Tensor, first: Tensor, begin: Tensor, longest: int) -> Tensor:
    """h_t = a_t h_(t-1) + b_t of [T, ...] in rows that begin at tokens `begin` [R], after `first` [R, ...].

    The reach of every token is doubled until it is that of the longest row (Hillis and Steele,
    https://doi.org/10.1145/7902.7903).
    """
    a, b = a.clone(), b.clone()
    b[begin] += a[begin] * first
    a[begin] = 0
    reach = 1
    while reach < longest:
        b[reach:] += a[reach:] * b[:-reach].clone()
        a[reach:] = a[reach:] * a[:-reach]
        reach *= 2
    return b


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateBatch) -> Tensor:
    """x [T, C], weight [C, W], bias [C] -> [T, C]: y_t = bias + sum_j weight_j x_(t - W + 1 + j) within each row.

    `state` [slots, W - 1, C] holds a row's last tokens.
    """
    if not rows.prompts:
        return _conv_step(x, weight, bias, state, rows.slots)
    kept, num = weight.shape[1] - 1, len(rows.slots)
    index = torch.arange(num, device=x.device)
    gaps = (index + 1) * kept  # every row follows its last tokens
    at = torch.arange(len(x), device=x.device) + gaps.repeat_interleave(rows.query_start.diff(), output_size=len(x))
    last = torch.arange(-kept, 0, device=x.device)
    padded = x.new_empty(len(x) + num * kept, x.shape[1], dtype=torch.float32)
    padded[at] = x.float()
    padded[(rows.query_start[:-1] + gaps)[:, None] + last] = state[rows.slots].float()
    state[rows.slots] = padded[(rows.query_start[1:] + gaps)[:, None] + last].to(state.dtype)
    y = torch.stack([padded[at - kept + j] * weight[:, j].float() for j in range(kept + 1)]).sum(0)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def _conv_step(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, slots: Tensor) -> Tensor:
    """One token of each row: x [R, C]."""
    window = torch.cat([state[slots].float(), x.float()[:, None]], 1)  # [R, W, C]
    state[slots] = window[:, 1:].to(state.dtype)
    y = (window * weight.float().T).sum(1)
    return (y if bias is None else y + bias.float()).to(x.dtype)


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Vectors of length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def _linear(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor, rows: StateBatch
) -> Tensor:
    """decay [T, H, 1 or K]. Without `beta` there is no delta rule."""
    if not rows.prompts:
        y, state[rows.slots] = _step(q, k, v.float(), decay, beta, state[rows.slots])
        return y.to(v.dtype)
    out, n = v.new_empty(len(v) + 1, *v.shape[1:]), rows.num_decode_rows
    size = CHUNK if decay.shape[-1] == 1 else CHANNELS_CHUNK
    if n:
        at, given = rows.slots[:n], None if beta is None else beta[:n]
        out[:n], state[at] = _step(q[:n], k[:n], v[:n].float(), decay[:n], given, state[at])
    for piece in pieces(rows, size):
        taken = piece.take(q), piece.take(k), piece.ending(v), piece.ending(decay)
        heads = [x.float().transpose(1, 2) for x in taken]
        given = None if beta is None else piece.ending(beta).transpose(1, 2)
        y, s = _chunk(heads[0], heads[1], heads[2], heads[3], given, piece.state(state))
        piece.put(out, y.transpose(1, 2))
        piece.renew(state, s)
    return out[:-1]


def _step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, s: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each row: q, k [R, H, K], v [R, H, V], decay [R, H, 1 or K], beta [R, H], s [R, H, K, V]."""
    s = s * decay.exp()[..., None]
    if beta is not None:
        v = beta[..., None] * (v - (k[..., None, :] @ s)[..., 0, :])
    s = s + k[..., None] * v[..., None, :]
    return (q[..., None, :] @ s)[..., 0, :], s


def _chunk(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, s: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of rows: q, k [P, H, C, K], v [P, H, C, V], decay [P, H, C, 1 or K], beta [P, H, C], s [P, H, K, V].

    A token without decay and beta, or without v and decay where there is no beta, changes no state.

    With c = cumsum(decay) and u_i what token i writes, S_i = exp(c_i) s + sum_(j <= i) exp(c_i - c_j) k_j u_j^T. By the
    delta rule the u of a chunk solve a triangular system.
    """
    c = decay.cumsum(-2)
    later = torch.ones(c.shape[-2], c.shape[-2], dtype=torch.bool, device=c.device).triu(1)
    between = (c[..., None, :] - c[..., None, :, :]).masked_fill(later[..., None], -torch.inf).exp()
    since = c.exp()
    if beta is not None:
        beta = beta[..., None]
        system = beta * _products(k, k, between)
        v = torch.linalg.solve_triangular(system, beta * (v - (since * k) @ s), upper=False, unitriangular=True)
    out = (since * q) @ s + _products(q, k, between) @ v
    left = (c[..., -1:, :] - c).exp()
    return out, s * since[..., -1, :, None] + (k * left).mT @ v


def _products(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Products of x and y [.., C, K], token by token, channels weighted by [.., C, C, 1 or K] -> [.., C, C]."""
    if weight.shape[-1] == 1:
        return (x @ y.mT) * weight[..., 0]
    return (x[..., None, :] * weight * y[..., None, :, :]).sum(-1)
