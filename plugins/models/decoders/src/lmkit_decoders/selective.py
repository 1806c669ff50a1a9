"""Selective state spaces (Mamba) in plain torch, on the packed tokens of a step. Arithmetic is float32.

Each takes the state of its layer [slots, ...] and changes it in place, for the rows that `batch` (StateBatch) names.
Rows of one token are computed together, prompts in pieces, several together. How a prompt was cut does not matter. The
host never waits for the device.
"""

from __future__ import annotations

import torch
from lmkit.api import StateBatch
from torch import Tensor

from lmkit_decoders.pieces import pieces

CHUNK = 64  # tokens of a prompt computed at once


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor, batch: StateBatch
) -> Tensor:
    """Mamba (https://arxiv.org/abs/2312.00752): state = exp(dt a) state + dt b x; y = state c + skip x.

    x and dt [T, D], a [D, N], b and c [T, N], skip [D], state [slots, D, N], all float32 -> [T, D].
    """
    fed = dt * x
    if n := batch.num_decode_rows:
        slots = batch.slots[:n]
        new = state[slots].mul_((dt[:n, :, None] * a).exp_()).add_(fed[:n, :, None] * b[:n, None])
        y = torch.bmm(new, c[:n, :, None])[..., 0]
        state[slots] = new
        if not batch.prompts:
            return y.addcmul_(x, skip)
    out = x.new_empty(len(x) + 1, x.shape[1])
    if n:
        out[:n] = y
    for piece in pieces(batch, CHUNK):
        decay = (piece.ending(dt)[..., None] * a).exp_()
        states = piece.ending(fed)[..., None] * piece.take(b)[:, :, None]  # [P, C, D, N]
        before = piece.state(state)
        for factor, now in zip(decay.unbind(1), states.unbind(1), strict=True):
            before = now.addcmul_(factor, before)
        piece.put(out, (states @ piece.take(c)[..., None])[..., 0])
        piece.renew(state, before)
    return out[:-1].addcmul_(x, skip)


def ssd(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor, batch: StateBatch
) -> Tensor:
    """Mamba 2 (https://arxiv.org/abs/2405.21060): as `selective_scan`, with one `a` per head: a piece of a prompt is
    a few matrix products.

    x [T, H, P], dt [T, H], a and skip [H], b and c [T, G, N] for H / G heads each, state [slots, H, P, N], all
    float32 -> [T, H, P].
    """
    groups, heads = b.shape[1], x.shape[1] // b.shape[1]
    if n := batch.num_decode_rows:
        slots = batch.slots[:n]
        b_heads, c_heads = (v[:n].repeat_interleave(heads, dim=1) for v in (b, c))
        new = state[slots].mul_((dt[:n] * a).exp_()[..., None, None])
        new.addcmul_((dt[:n, :, None] * x[:n])[..., None], b_heads[:, :, None])
        y = (new @ c_heads[..., None])[..., 0]
        state[slots] = new
        if not batch.prompts:
            return y.addcmul_(x, skip[:, None])
    out = x.new_empty(len(x) + 1, *x.shape[1:])
    if n:
        out[:n] = y
    for piece in pieces(batch, CHUNK):
        now = piece.state(state).unflatten(1, (groups, heads))  # [rows, G, heads, P, N]
        step = piece.ending(dt)  # [rows, L, H]
        fed = (step[..., None] * piece.take(x)).unflatten(2, (groups, heads)).permute(0, 2, 3, 1, 4)
        total = (step * a).cumsum(1).transpose(1, 2).unflatten(1, (groups, heads))  # [rows, G, heads, L]
        b_piece, c_piece = (piece.take(v).transpose(1, 2)[:, :, None] for v in (b, c))  # [rows, G, 1, L, N]
        later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=x.device).triu(1)
        decay = (total[..., None] - total[..., None, :]).masked_fill_(later, -torch.inf).exp_()
        y = (c_piece @ b_piece.mT * decay) @ fed
        y += (c_piece @ now.mT) * total.exp()[..., None]
        piece.put(out, y.permute(0, 3, 1, 2, 4).flatten(2, 3))
        left = (total[..., -1:] - total).exp_()[..., None]
        now = (now * total[..., -1, None, None].exp()).add_((fed * left).mT @ b_piece)
        piece.renew(state, now.flatten(1, 2))
    return out[:-1].addcmul_(x, skip[:, None])
