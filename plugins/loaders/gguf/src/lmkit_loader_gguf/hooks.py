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
    """A GGUF file, a folder with one and no config.json, or those of a hub's repository."""
    path, found = Path(ref).expanduser(), None
    if path.suffix.lower() == ".gguf" or (path.is_dir() and not (path / "config.json").is_file()):
        found = import_module("lmkit_loader_gguf.config").open_gguf(ref)
    elif options.loader in ("auto", "gguf") and ref.count("/") == 1 and not path.exists():
        found = import_module("lmkit_loader_gguf.hub").open_hub(ref, options)
    checkpoint: Checkpoint | None = found
    return checkpoint


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
        interface=2,
        stability="stable",
        suffixes=(".gguf",),
    )
