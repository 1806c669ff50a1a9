"""The text part of a model that also sees or hears: how it is configured, and where its tensors are. Torch-free.

Only texts enter such a model here; what it has for other media is not loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from lmkit.api import LinearSpec, UnsupportedModel, WeightRule

ENDING = "ForConditionalGeneration"  # of the names of such architectures
SHARED = ("dtype", "torch_dtype", "eos_token_id", "bos_token_id", "tie_word_embeddings")  # keys of the whole model
OTHER_MEDIA = (
    "vision_tower", "vision_model", "visual", "audio_tower", "multi_modal_projector", "embed_vision", "embed_audio",
)  # fmt: skip


def text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """That of the text part, under the name of the whole. Some files do not keep them apart."""
    text = config.get("text_config")
    if text is None:
        return config
    if not isinstance(text, Mapping):
        raise UnsupportedModel("text_config", text, "an object")
    whole = {key: config[key] for key in SHARED if config.get(key) is not None}
    tied = {key: whole[key] for key in ("tie_word_embeddings",) if key in whole}
    return {**whole, **text, **tied, "architectures": config.get("architectures")}


def text_rules(rules: Iterable[WeightRule]) -> list[WeightRule]:
    """`rules` of the text model, for its names as a part: those of now, those of older files, its own."""
    found = [replace(rule, source=name) for rule in rules for name in _names(rule.source)]
    ignored = [f"{before}{part}.{{any}}" for part in OTHER_MEDIA for before in ("model.", "")]
    return found + [WeightRule(source, "", ignore=True) for source in ignored]


def text_linears(linears: Iterable[LinearSpec]) -> tuple[LinearSpec, ...]:
    """`linears` of the text model as a part."""
    return tuple(replace(spec, sources=tuple(_names(source)[0] for source in spec.sources)) for spec in linears)


def _names(name: str) -> tuple[str, ...]:
    if not name.startswith("model."):
        return name, f"language_model.{name}"
    return f"model.language_model.{name.removeprefix('model.')}", f"language_model.{name}", name
