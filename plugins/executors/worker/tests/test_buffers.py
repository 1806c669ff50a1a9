"""Buffers that are not sent again: the device has what the host has, whatever was pushed before."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from lmkit_worker.buffers import SteadyBuffer
from torch import Tensor

SIZE = 6


class Twin:
    """A Buffer of two tensors, which counts what is sent."""

    def __init__(self) -> None:
        self.host, self.device = torch.zeros(SIZE, dtype=torch.int64), torch.full((SIZE,), -9)
        self.num_sent = 0

    def push(self, n: int) -> Tensor:
        self.num_sent += 1
        self.device[:n] = self.host[:n]
        return self.device[:n]


values = st.lists(st.integers(0, 1), min_size=0, max_size=SIZE)


@given(st.lists(values, max_size=12))
def test_the_device_has_what_the_host_has(steps: list[list[int]]) -> None:
    twin = Twin()
    buffer = SteadyBuffer(twin)
    for step in steps:
        buffer.host[: len(step)] = torch.tensor(step, dtype=torch.int64)
        assert buffer.push(len(step)).tolist() == step
        sent = twin.num_sent
        assert buffer.push(len(step)).tolist() == step
        assert twin.num_sent == sent
