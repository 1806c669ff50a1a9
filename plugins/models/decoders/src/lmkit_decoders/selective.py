"""Selective state spaces (Mamba) in plain torch, on the packed tokens of a step. Arithmetic is float32.

Each takes the state of its layer [slots, ...] and changes it in place, for the rows that `batch` (StateBatch) names.
Rows of one token are computed together, prompts one after another, in pieces. How a prompt was cut does not matter.
"""

from __future__ import annotations

import torch
from lmkit.api import StateBatch
from torch import Tensor

CHUNK = 64  # tokens of a prompt computed at once


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor, batch: StateBatch
) -> Tensor:
    """Mamba (https://arxiv.org/abs/2312.00752): state = exp(dt a) state + dt b x; y = state c + skip x.

    x and dt [T, D], a [D, N], b and c [T, N], skip [D], state [slots, D, N], all float32 -> [T, D].
    """
    out = x * skip
    fed = dt * x
    if n := batch.num_decode_rows:
        slots = batch.slots[:n]
        new = state[slots].mul_((dt[:n, :, None] * a).exp_()).add_(fed[:n, :, None] * b[:n, None])
        out[:n] += torch.bmm(new, c[:n, :, None])[..., 0]
        state[slots] = new
    for slot, first, end in batch.prompts:
        for i in range(first, end, CHUNK):
            piece = slice(i, min(i + CHUNK, end))
            decay = (dt[piece, :, None] * a).exp_()
            states = fed[piece, :, None] * b[piece, None]
            before = state[slot]
            for factor, now in zip(decay.unbind(), states.unbind(), strict=True):
                before = now.addcmul_(factor, before)
            out[piece] += torch.bmm(states, c[piece, :, None])[..., 0]
            state[slot] = before
    return out


def ssd(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor, batch: StateBatch
) -> Tensor:
    """Mamba 2 (https://arxiv.org/abs/2405.21060): as `selective_scan`, with one `a` per head: a piece of a prompt is
    a few matrix products.

    x [T, H, P], dt [T, H], a and skip [H], b and c [T, G, N] for H / G heads each, state [slots, H, P, N], all
    float32 -> [T, H, P].
    """
    groups, heads = b.shape[1], x.shape[1] // b.shape[1]
    out = x * skip[:, None]
    if n := batch.num_decode_rows:
        slots = batch.slots[:n]
        b_heads, c_heads = (v[:n].repeat_interleave(heads, dim=1) for v in (b, c))
        new = state[slots].mul_((dt[:n] * a).exp_()[..., None, None])
        new.addcmul_((dt[:n, :, None] * x[:n])[..., None], b_heads[:, :, None])
        out[:n] += (new @ c_heads[..., None])[..., 0]
        state[slots] = new
    for slot, first, end in batch.prompts:
        now = state[slot].unflatten(0, (groups, heads))  # a view: [G, heads, P, N]
        for i in range(first, end, CHUNK):
            piece = slice(i, min(i + CHUNK, end))
            fed = (dt[piece, :, None] * x[piece]).unflatten(1, (groups, heads)).permute(1, 2, 0, 3)
            total = (dt[piece] * a).cumsum(0).T.unflatten(0, (groups, heads))  # [G, heads, L]
            b_piece, c_piece = (v[piece].transpose(0, 1)[:, None] for v in (b, c))  # [G, 1, L, N]
            later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=x.device).triu(1)
            decay = (total[..., None] - total[..., None, :]).masked_fill_(later, -torch.inf).exp_()
            y = (c_piece @ b_piece.transpose(2, 3) * decay) @ fed
            y += (c_piece @ now.transpose(2, 3)) * total.exp()[..., None]
            out[piece] += y.permute(2, 0, 1, 3).flatten(1, 2)
            left = (total[..., -1:] - total).exp_()[..., None]
            now.mul_(total[..., -1, None, None].exp()).add_((fed * left).transpose(2, 3) @ b_piece)
    return out
