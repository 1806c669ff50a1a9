"""carry: weights elsewhere and back, whatever holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lmkit_worker.carry import carry
from torch import Tensor, nn


@dataclass(frozen=True)
class Packed:
    """As kernels keep weights."""

    codes: Tensor
    more: tuple[Any, ...]
    bits: int = 4


class Holder(nn.Module):
    """A tensor in every place where modules have some, and views of one memory in several."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6), requires_grad=False)
        self.register_buffer("table", torch.arange(5))
        self.register_parameter("none", None)
        self.packed = Packed(self.weight.data.T[1:], ([torch.randn(3)], {"scale": self.weight.data[2]}, "name", None))
        self.inner = nn.Linear(2, 2)
        self.inner.weight.requires_grad_(False)
        self.tied = self.inner.weight
        self.owner = (self.inner,)


def tensors(model: Holder) -> list[Tensor]:
    (parts, scales, *_) = model.packed.more
    return [
        model.weight,
        model.table,
        model.packed.codes,
        *parts,
        scales["scale"],
        model.inner.weight,
        model.inner.bias,
    ]


def memories(model: Holder) -> list[int]:
    return [tensor.untyped_storage().data_ptr() for tensor in tensors(model)]


@pytest.fixture
def model() -> Holder:
    return Holder()


def test_everything_is_copied_and_shared_as_before(model: Holder) -> None:
    kept = tensors(model)  # the memory is not used again while somebody has it
    before, values = memories(model), [tensor.clone() for tensor in kept]
    strides, module = [tensor.stride() for tensor in kept], model.inner
    kept = [tensor.detach() for tensor in kept]
    carry([model, model.inner], torch.device("cpu"))
    after = memories(model)
    assert not set(before) & set(after)
    assert [[a == b for b in before] for a in before] == [[a == b for b in after] for a in after]
    assert all(torch.equal(a, b) for a, b in zip(tensors(model), values, strict=True))
    assert [tensor.stride() for tensor in tensors(model)] == strides
    assert model.tied is model.inner.weight
    assert model.inner is module is model.owner[0]
    assert (model.packed.bits, model.packed.more[2:], model.none) == (4, ("name", None), None)
    del kept


def test_without_room_nothing_changes(model: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    before, packed, calls = memories(model), model.packed, iter(range(100))

    def to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        if next(calls) == 3:
            raise torch.OutOfMemoryError("no room")
        return real(tensor, *args, **options)

    real = Tensor.to
    monkeypatch.setattr(Tensor, "to", to)
    with pytest.raises(torch.OutOfMemoryError):
        carry([model], torch.device("cpu"))
    assert memories(model) == before
    assert model.packed is packed
