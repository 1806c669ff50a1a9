"""Registration. Light: the implementation is imported when a GGUF file is named."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from lmkit.api import (
    Checkpoint,
    CheckpointOptions,
    LoaderSpec,
    QuantizationSpec,
    TemplateSpec,
    TokenizerSpec,
    hookimpl,
)


@hookimpl
def lmkit_resolve_checkpoint(ref: str, options: CheckpointOptions) -> Checkpoint | None:
    """A GGUF file, or a folder with one and no config.json."""
    path = Path(ref).expanduser()
    if path.suffix.lower() != ".gguf" and (not path.is_dir() or (path / "config.json").is_file()):
        return None
    found: Checkpoint | None = import_module("lmkit_loader_gguf.config").open_gguf(ref)
    return found


@hookimpl
def lmkit_loaders() -> Iterable[LoaderSpec]:
    yield LoaderSpec(
        name="gguf",
        summary="Tensors of GGUF files, mapped",
        target="lmkit_loader_gguf.loader:GgufLoader",
        formats=("gguf",),
    )


@hookimpl
def lmkit_quantization_methods() -> Iterable[QuantizationSpec]:
    yield QuantizationSpec(
        name="gguf",
        summary="the block types of GGUF: Q4_0 to Q8_0, Q2_K to Q6_K, IQ4_NL, IQ4_XS, MXFP4",
        target="lmkit_loader_gguf.scheme:GgufScheme",
        checkpoint_methods=("gguf",),
        weight_formats=("int4", "w8a8"),
        tensors=("weight",),
    )


@hookimpl
def lmkit_tokenizers() -> Iterable[TokenizerSpec]:
    yield TokenizerSpec(
        name="gguf",
        summary="The vocabulary in the metadata of a GGUF file",
        target="lmkit_loader_gguf.vocabulary:open_tokenizer",
        files=(".gguf",),
    )


@hookimpl
def lmkit_templates() -> Iterable[TemplateSpec]:
    yield TemplateSpec(
        name="gguf",
        summary="The chat template in the metadata of a GGUF file",
        target="lmkit_loader_gguf.template:chat_template",
        stability="stable",
        suffixes=(".gguf",),
    )
