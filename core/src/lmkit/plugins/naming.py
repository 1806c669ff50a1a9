"""The architecture of a checkpoint whose config.json names none."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lmkit.contracts.pooling import CAUSAL

_CONDITIONAL = "ForConditionalGeneration"
_ENDINGS = (CAUSAL, "LMHeadModel", _CONDITIONAL, "Model")  # in the order in which they are preferred


def architecture_of(config: Mapping[str, object], known: Collection[str]) -> str:
    """The one of the `known` architectures that `model_type` means, as transformers chooses; "" where none is meant.

    Names follow from each other: "qwen2_moe" is Qwen2MoeForCausalLM, "gemma3_text" Gemma3ForCausalLM.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or not _plain(kind):
        return ""
    endings = (_CONDITIONAL, *_ENDINGS) if isinstance(config.get("text_config"), Mapping) else _ENDINGS
    by_name = {_plain(name): name for name in known}
    for stem in (_plain(kind), _plain(kind.removesuffix("_text"))):
        for ending in endings:
            if (name := by_name.get(stem + ending.lower(), "")) and name.endswith(ending):
                return name
    return ""


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()
