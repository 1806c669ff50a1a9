"""Attention over paged KV, one row at a time: short enough to read in a minute, right enough to serve."""

import torch
from torch.nn.functional import scaled_dot_product_attention


class Plan:
    """One step: per row (first query, last query, KV length, slots of its KV)."""

    def __init__(self, batch, block_size):
        starts = batch.query_start.host[: batch.num_rows + 1].tolist()
        lengths = batch.seq_len.host[: batch.num_rows].tolist()
        offsets = torch.arange(block_size)
        self.slots = batch.slots.push(batch.num_tokens)
        self.rows = []
        for i, length in enumerate(lengths):
            blocks = batch.table.host[i, : -(-length // block_size)].long()
            slots = (blocks[:, None] * block_size + offsets).flatten()[:length]
            self.rows.append((starts[i], starts[i + 1], length, slots.to(self.slots.device)))


class Planner:
    capture = "none"

    def __init__(self, need):
        self.block_size = need.block_size

    def plan(self, batch):
        return Plan(batch, self.block_size)


class SimpleAttention:
    name = "simple"

    def can_run(self, need, device):
        return None

    def block_sizes(self, need):
        return (16, 32)

    def kv_shape(self, need, num_blocks):
        return (2, num_blocks * need.block_size, need.num_kv_heads, need.head_dim)

    def planner(self, need, limits, platform):
        return Planner(need)

    def write_kv(self, k, v, kv, slots):
        kept = slots >= 0
        kv[0, slots[kept]] = k[kept].to(kv.dtype)
        kv[1, slots[kept]] = v[kept].to(kv.dtype)

    def forward(self, q, kv, plan, scale, out):
        for first, last, length, slots in plan.rows:
            position = torch.arange(length - (last - first), length, device=q.device)
            mask = torch.arange(length, device=q.device) <= position[:, None]
            qkv = (x.transpose(0, 1)[None].to(q.dtype) for x in (q[first:last], kv[0, slots], kv[1, slots]))
            row = scaled_dot_product_attention(*qkv, attn_mask=mask, scale=scale, enable_gqa=True)
            out[first:last] = row[0].transpose(0, 1)
