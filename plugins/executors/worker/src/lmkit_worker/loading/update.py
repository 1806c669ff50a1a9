"""New weights for a model that runs: read from safetensors files beside those in force, which stay as they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from lmkit.api import Checkpoint, CheckpointError, TensorEntry
from lmkit.checkpoint import stamp_of, weight_files
from lmkit_layers.linear import Linear
from torch import Tensor, nn

from lmkit_worker.loading.safetensors import SafetensorsLoader


@dataclass(frozen=True, slots=True)
class Update:
    """Files with all weights of a model, or with `partial` some of them. `stamp`: of the files, see `stamp_of`."""

    path: Path
    stamp: str
    partial: bool = False

    def check(self) -> None:
        """Raises CheckpointError unless the files are what they were."""
        if stamp_of(self.path) != self.stamp:
            raise CheckpointError(f"{self.path} has changed since", fix="update again, when it is written to the end")

    def checkpoint(self, of: Checkpoint) -> Checkpoint:
        """`of`, with these weights."""
        files = weight_files(self.path) if self.path.is_dir() else [self.path]
        return replace(of, path=self.path, files=tuple(files))


class CopyLoader(SafetensorsLoader):
    """Tensors of their own: whoever wrote the files may write them again."""

    def read(self, entry: TensorEntry) -> Tensor:
        return super().read(entry).clone()


def untie_as(base: nn.Module, model: nn.Module) -> None:
    """Linears that have a weight of their own in `base` get one."""
    of_base = dict(base.named_modules())
    for path, module in model.named_modules():
        if isinstance(module, Linear) and module.tied and not of_base[path].tied:
            module.untie()


def keep(base: nn.Module, model: nn.Module, touched: Iterable[nn.Module]) -> frozenset[nn.Module]:
    """Modules of `model` of which nothing is loaded share what those of `base` have. Returns them.

    A linear that is tied to a touched module is packed anew.
    """
    touched, kept = set(touched), set[nn.Module]()
    of_base = dict(base.named_modules())
    for path, module in model.named_modules():
        old = of_base[path]
        if module in touched or (isinstance(module, Linear) and module.tied and module.owner[0] in touched):
            continue
        if isinstance(module, Linear):
            assert isinstance(old, Linear)
            assert old.packed is not None
            module.restore(old.packed)
            module.bias = old.bias
        else:
            for name, parameter in old.named_parameters(recurse=False):
                setattr(module, name, parameter)
            for name in module._parameters.keys() - dict(old.named_parameters(recurse=False)).keys():
                setattr(module, name, None)
        kept.add(module)
    return frozenset(kept)
