"""carry: the weights of models to another device, whatever holds them, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

OWN = frozenset({"_parameters", "_buffers", "_modules"})  # of torch, in the `vars` of a module


def carry(models: Iterable[nn.Module], device: torch.device) -> None:
    """Copies every tensor in parameters, buffers, packed weights and other attributes of the models' modules.

    Tensors that share memory share it there, too. All is copied before the first is replaced: where memory does not
    suffice (torch.OutOfMemoryError) nothing has changed.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    changes: list[Callable[[], None]] = []
    seen: set[int] = set()

    def there(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided:
            return tensor.to(device)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            held = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            storages[storage.data_ptr()] = held.to(device, copy=True).untyped_storage()
        moved = torch.empty(0, dtype=tensor.dtype, device=device)
        return moved.set_(storages[storage.data_ptr()], tensor.storage_offset(), tensor.shape, tensor.stride())

    for module in {id(module): module for model in models for module in model.modules()}.values():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                changes.append(partial(setattr, tensor, "data", there(tensor.data)))
        for name, value in vars(module).items():
            if name not in OWN and (found := _changed(value, there)) is not value:
                changes.append(partial(setattr, module, name, found))
    for change in changes:
        change()


def _changed(value: Any, there: Callable[[Tensor], Tensor]) -> Any:
    """The value with its tensors replaced; the value itself where it has none. Modules are looked at by themselves."""
    if isinstance(value, nn.Module):
        return value
    if isinstance(value, Tensor):
        return there(value)
    if isinstance(value, dict):
        found = {key: _changed(part, there) for key, part in value.items()}
        return found if any(found[key] is not part for key, part in value.items()) else value
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        parts = [_changed(part, there) for part in value]
        return type(value)(parts) if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    if is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        new = {name: made for name, part in held.items() if (made := _changed(part, there)) is not part}
        return replace(value, **new) if new else value
    return value
