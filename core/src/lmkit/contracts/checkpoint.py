"""A checkpoint that has been found, as data: its files and parsed configuration. No tensor is read yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """How to look for a checkpoint."""

    revision: str | None = None
    cache_dir: str | None = None
    offline: bool = False
    loader: str = "auto"  # what the user named; some need no files, or others


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Set by a `lmkit_resolve_checkpoint` hook; read by the resolver, the loader and the text side.

    `config` is config.json, `generation_config` generation_config.json ({} when absent).
    """

    ref: str  # what the user wrote: "demo", "./dir", "org/name"
    path: Path
    format: str  # "safetensors", "gguf", ...; a loader plugin reads it
    config: Mapping[str, object]
    generation_config: Mapping[str, object] = field(default_factory=dict)
    modules: tuple[Mapping[str, object], ...] = ()  # of modules.json (sentence-transformers), see lmkit.checkpoint
    files: tuple[Path, ...] = ()  # weight files, in order
    nbytes: int = 0  # sum of their sizes
    revision: str | None = None

    @property
    def name(self) -> str:
        """Name served by default: the last part of the reference."""
        return self.ref.rstrip("/").rsplit("/", 1)[-1] or self.ref

    @property
    def architecture(self) -> str:
        """The first of `architectures`; "" where the configuration names none."""
        names = self.config.get("architectures")
        return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
