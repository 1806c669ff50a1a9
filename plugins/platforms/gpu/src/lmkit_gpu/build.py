"""Which torch is installed, read as text: importing it takes seconds, and would load the libraries of its device."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What torch/version.py says; None: without."""

    version: str  # "2.13.0+cu130"
    cuda: str | None = None  # "13.0"
    hip: str | None = None  # "6.4.43482"
    xpu: str | None = None
    folder: Path = Path()  # where it lies

    def __str__(self) -> str:
        made_for = [f"{name} {value}" for name in ("cuda", "hip", "xpu") if (value := getattr(self, name))]
        return f"torch {self.version}, built for {made_for[0] if made_for else 'the processor alone'}"


def torch_build(folder: Path | None = None) -> TorchBuild | None:
    """The torch that a worker would import; None where there is none. `folder` stands for its own in tests."""
    if folder is None:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        folder = Path(spec.origin).parent
    values: dict[str, str] = {}
    for node in ast.parse((folder / "version.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                values[target.id] = node.value.value
    made_for = {name: values.get(name) for name in ("cuda", "hip", "xpu")}
    return TorchBuild(values.get("__version__", ""), **made_for, folder=folder)
