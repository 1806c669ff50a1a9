"""Loaders that make the tensors that formats have of those that files have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from lmkit.api import CheckpointError, Loader, ParamSpec, TensorEntry, itemsize

if TYPE_CHECKING:
    from torch import Tensor

CODES = ("uint8", "int8", "float8_e4m3fn")  # of weights in formats


@dataclass(slots=True)
class MadeTensors(Loader):
    """The tensors of `loader`, and those that were announced to `make`. Subclasses say in `tensors` which there are."""

    loader: Loader
    wanted: Callable[[str], ParamSpec | None]  # the parameter that a tensor of this name fills
    _made: dict[str, Callable[[], Tensor]] = field(default_factory=dict)

    def read(self, entry: TensorEntry) -> Tensor:
        make = self._made.get(entry.name)
        return self.loader.read(entry) if make is None else make()

    def release(self) -> None:
        self.loader.release()

    def make(self, name: str, shape: tuple[int, ...], dtype: str, file: str, how: Callable[[], Tensor]) -> TensorEntry:
        """A tensor that `how` makes each time it is read."""
        self._made[name] = how
        return TensorEntry(name, shape, dtype, prod(shape) * itemsize(dtype), file)

    def plain(self, name: str) -> bool:
        """Whether the model wants a tensor of the file in floating point."""
        param = self.wanted(name)
        return param is not None and param.dtype not in CODES

    def check_plain(self, entry: TensorEntry, says: str, fix: str) -> None:
        """Raises CheckpointError for a plain weight where the configuration `says` that it is not."""
        param = self.wanted(entry.name)
        if param is not None and param.dtype in CODES and entry.dtype in ("float32", "bfloat16", "float16"):
            raise CheckpointError(
                f"{entry.name} is plain ({entry.dtype}), and quantization_config says {says}", fix=fix
            )


def part_of(found: TensorEntry | None, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> TensorEntry:
    """The same. Raises CheckpointError, naming it, when it is missing or of another form."""
    if found is None:
        raise CheckpointError(f"{name} is missing")
    if found.dtype not in dtypes or found.shape != shape:
        needs = f"{' or '.join(dtypes)} {list(shape)}"
        raise CheckpointError(f"{name} is {found.dtype} {list(found.shape)}, needs {needs}")
    return found
