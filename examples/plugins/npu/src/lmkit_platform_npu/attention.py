"""Attention over whole pages: KV of a layer is [blocks, 2, block_size, heads, head_dim], so that a block is one piece
of memory, as devices like to fetch it."""

import torch
from torch.nn.functional import scaled_dot_product_attention


class Planner:
    """Host work happens in `plan`, once per step; `forward` runs in each layer."""

    capture = "none"

    def __init__(self, need):
        self._block_size = need.block_size

    def plan(self, batch):
        """Of each row: its queries, how long its KV is, and its blocks."""
        starts = batch.query_start.host[: batch.num_rows + 1].tolist()
        lengths = batch.seq_len.host[: batch.num_rows].tolist()
        rows = []
        for i, length in enumerate(lengths):
            if starts[i] < starts[i + 1]:
                rows.append(
                    (starts[i], starts[i + 1], length, batch.table.host[i, : -(-length // self._block_size)].long())
                )
        return Plan(rows, batch.slots.push(batch.num_tokens))


class Plan:
    def __init__(self, rows, slots):
        self.rows, self.slots = rows, slots


class NpuAttention:
    """Contract: lmkit.api.AttentionBackend."""

    name = "npu"

    def can_run(self, need, device):
        return None

    def block_sizes(self, need):
        return (32, 16)

    def kv_shape(self, need, num_blocks):
        return (num_blocks, 2, need.block_size, need.num_kv_heads, need.head_dim)

    def planner(self, need, limits, platform):
        return Planner(need)

    def write_kv(self, k, v, kv, slots):
        """Slot -1 is written nowhere. A slot is block * block_size + place."""
        kept = slots >= 0
        block, place = slots[kept] // kv.shape[2], slots[kept] % kv.shape[2]
        kv[block, 0, place] = k[kept].to(kv.dtype)
        kv[block, 1, place] = v[kept].to(kv.dtype)

    def forward(self, q, kv, plan, scale, out):
        for first, last, length, blocks in plan.rows:
            k, v = kv[blocks].transpose(0, 1).flatten(1, 2)[:, :length].to(q.dtype)
            position = torch.arange(length - (last - first), length)
            mask = torch.arange(length) <= position[:, None]
            qkv = (x.transpose(0, 1)[None] for x in (q[first:last], k, v))
            row = scaled_dot_product_attention(*qkv, attn_mask=mask, scale=scale, enable_gqa=True)
            out[first:last] = row[0].transpose(0, 1)
