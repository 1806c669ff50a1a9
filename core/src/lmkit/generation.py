"""What generation_config.json recommends. A checkpoint's recommendation never stops a server: what is off is left out.

The values become defaults of requests, so each of them is checked here as a request's would be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lmkit.contracts.errors import InvalidParam
from lmkit.contracts.params import SamplingParams

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MAX_SHOWN = 8  # warnings
# Fields that transformers writes and that say nothing about which tokens are likely, or that requests say themselves.
_HARMLESS = {
    *(
        "transformers_version",
        "trust_remote_code",
        "do_sample",
        "max_length",
        "max_new_tokens",
        "max_time",
        "use_cache",
    ),
    *("bos_token_id", "pad_token_id", "decoder_start_token_id", "num_return_sequences", "chat_format"),
    *("max_window_size", "early_stopping", "length_penalty", "cache_implementation", "cache_config"),
    *("return_legacy_cache", "prefill_chunk_size", "compile_config", "disable_compile", "continuous_batching_config"),
    *("return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("low_memory", "token_healing", "is_assistant", "num_assistant_tokens", "max_matching_ngram_size"),
    *("num_assistant_tokens_schedule", "assistant_confidence_threshold", "prompt_lookup_num_tokens"),
    *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "mtp_num_draft_tokens", "use_mtp"),
}
# Values with which a field of transformers does nothing.
_OFF: Mapping[str, tuple[object, ...]] = {
    "num_beams": (1,), "num_beam_groups": (1,), "diversity_penalty": (0,), "typical_p": (1,), "epsilon_cutoff": (0,),
    "eta_cutoff": (0,), "encoder_repetition_penalty": (1,), "no_repeat_ngram_size": (0,), "min_length": (0,),
    "encoder_no_repeat_ngram_size": (0,), "penalty_alpha": (0,), "guidance_scale": (1,), "top_h": (0,),
    "renormalize_logits": (False,), "remove_invalid_values": (False,), "constraints": (), "min_new_tokens": (0,),
}  # fmt: skip


def recommended(config: Mapping[str, object]) -> tuple[dict[str, Any], list[str]]:
    """Defaults for SamplingParams, and a warning about each field that is left out."""
    params: dict[str, Any] = {}
    warnings = []
    for name in SAMPLING:
        if (value := config.get(name)) is None:
            continue
        try:
            SamplingParams(**{name: _AS_REQUESTS[name](value)})
            params[name] = _AS_REQUESTS[name](value)
        except InvalidParam as e:
            warnings.append(f"generation_config.json: {e.message}; the value is left out")
    _, odd = end_ids(config)
    warnings += odd
    for name, value in config.items():
        if not (name in SAMPLING or name == "eos_token_id" or name.startswith("_") or _does_nothing(name, value)):
            warnings.append(f"generation_config.json: {name:.80} = {value!r:.80} is not used")
    return params, warnings[:_MAX_SHOWN]


def end_ids(config: Mapping[str, object]) -> tuple[list[int], list[str]]:
    """The ids of `eos_token_id`, which is absent, null, an id or a list of them, and warnings about what is no id."""
    value = config.get("eos_token_id")
    ids: list[int] = []
    odd: list[object] = []
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry < 1 << 31:
            ids.append(entry)
        elif entry not in (None, -1):
            odd.append(entry)
    return ids, [f"generation_config.json: eos_token_id {odd!r:.80} is no token id and is left out"] if odd else []


def _does_nothing(name: str, value: object) -> bool:
    return name in _HARMLESS or value in (None, [], {}) or value in _OFF.get(name, ())


def _same(value: Any) -> Any:
    return value


def _top_k(value: Any) -> Any:
    """-1 is another spelling of "off"; numbers may be written with a fraction of zero."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return 0 if type(value) is int and value == -1 else value


_AS_REQUESTS: Mapping[str, Callable[[Any], Any]] = {**dict.fromkeys(SAMPLING, _same), "top_k": _top_k}
