"""Fields that other servers know: what changes nothing here, what is refused, and what to send instead.

A field is refused when its absence would change what the answer means: what is read, which tokens may be drawn, where
the answer ends, what it contains. All that is about speed, storage, accounting or padding is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmkit_http.strict import Refused

_SCHEMA = 'send response_format {"type": "json_schema", ...} or structured_outputs {"json": ...}'
_GRAMMAR = 'send structured_outputs {"grammar": ...}'
_MEDIA = "leave it out: models here read text alone"
_SAMPLER = "leave it out, or send temperature with top_p, top_k or min_p"
_REASONING = "start the server without --reasoning-parser, or send include_reasoning"
_SYSTEM = "send a message of the role system"
_LENGTH = "send max_tokens"
_ADAPTER = "send the name of the adapter as model"
_JSON = 'send response_format {"type": "json_object"}'
_REGEX = 'send structured_outputs {"regex": ...}'
_CHOICE = 'send structured_outputs {"choice": [...]}'
_PROCESSOR = "start the server with --logits-processor, and send vllm_xargs"

# fields that change nothing here, with the values that need not be mentioned
DROPPABLE: Mapping[str, tuple[Any, ...]] = {
    # labels and accounting
    "user": (), "session_id": (), "metadata": (), "safety_identifier": (), "store": (),
    "service_tier": ("auto", "default"),    "moderation": (), "rid": (), "extra_key": (), "usage": (),
    "log_metrics": (True,), "client_metadata": (),
    # caches and routing
    "prompt_cache_key": (), "prompt_cache_retention": ("in_memory",), "prompt_cache_options": (),
    "cache_prompt": (True,), "id_slot": (-1,), "n_cache_reuse": (), "kv_transfer_params": (),
    "ec_transfer_params": (), "session_params": (),
    "bootstrap_host": (), "bootstrap_port": (), "bootstrap_room": (), "data_parallel_rank": (-1,),
    "routed_dp_rank": (-1,), "provider": (), "models": (), "route": (), "transforms": (), "fallbacks": (),
    "keep_alive": (),
    # speed and the form of the stream
    "prediction": (), "stream_interval": (1,), "stream_reasoning": (True,), "n_keep": (), "t_max_predict_ms": (),
    "timings_per_token": (), "return_progress": (), "speculative": (),
    "draft_model": (), "ttl": (), "perf_metrics_in_response": (),
    # how much is said, and tools that a service would run when it likes to
    "verbosity": ("medium",), "web_search_options": (), "plugins": (), "enable_search": (), "search_settings": (),
    "prompt_mode": (),
    # details of the text that no model here has
    "watermark": (), "watermarking": (), "spaces_between_special_tokens": (True,), "media_io_kwargs": (),
    "mm_processor_kwargs": (), "images_config": (), "guided_decoding_backend": (),
    "skip_reading_prefix_cache": (),
}  # fmt: skip

# fields that neither route honours
REFUSED: Mapping[str, Refused] = {
    # what is read
    "suffix": Refused("write the model's own tokens for filling in into the prompt"),
    "chat_template": Refused("start the server with --chat-template FILE"),
    "prompt_embeds": Refused("send token ids"), "input_embeds": Refused("send token ids"),
    "input_ids": Refused("send token ids as prompt of /v1/completions"), "input": Refused("send messages or prompt"),
    "instructions": Refused(_SYSTEM), "system": Refused(_SYSTEM),
    "safe_prompt": Refused(_SYSTEM), "task": Refused("write it into a message"),
    "lora_path": Refused(_ADAPTER), "lora_request": Refused(_ADAPTER), "lora": Refused(_ADAPTER),
    "adapter_id": Refused(_ADAPTER), "images": Refused(_MEDIA), "image_data": Refused(_MEDIA),
    "mm_payload": Refused(_MEDIA, ("tensors",)), "audio": Refused(_MEDIA), "modalities": Refused(_MEDIA, (["text"],)),
    # which tokens may be drawn
    "guided_json": Refused(_SCHEMA), "json_schema": Refused(_SCHEMA), "guided_json_object": Refused(_JSON),
    "guided_regex": Refused(_REGEX), "regex": Refused(_REGEX), "guided_choice": Refused(_CHOICE),
    "guided_grammar": Refused(_GRAMMAR), "ebnf": Refused(_GRAMMAR), "grammar": Refused(_GRAMMAR),
    "guided_whitespace_pattern": Refused("leave it out"), "format": Refused(_SCHEMA),
    "structural_tag": Refused('send structured_outputs {"structural_tag": ...}'),
    "logits_processors": Refused(_PROCESSOR), "custom_logit_processor": Refused(_PROCESSOR),
    "custom_params": Refused(_PROCESSOR), "sampling_seed": Refused("send seed"), "random_seed": Refused("send seed"),
    "mirostat": Refused(_SAMPLER, (0,)), "typical_p": Refused(_SAMPLER, (1, 0)), "tfs_z": Refused(_SAMPLER, (1,)),
    "top_a": Refused(_SAMPLER, (0,)), "top_n_sigma": Refused(_SAMPLER, (-1,)),
    "dynatemp_range": Refused(_SAMPLER, (0,)),    "xtc_probability": Refused(_SAMPLER, (0,)),
    "dry_multiplier": Refused(_SAMPLER, (0,)),
    "samplers": Refused(_SAMPLER), "repeat_penalty": Refused("send repetition_penalty", (1,)),
    "do_sample": Refused("send temperature 0", (True,), unless_empty=False),
    # where the answer ends
    "max_new_tokens": Refused(_LENGTH), "n_predict": Refused(_LENGTH, (-1,)), "num_predict": Refused(_LENGTH, (-1,)),
    "max_output_tokens": Refused(_LENGTH), "min_new_tokens": Refused("send min_tokens", (0,)),
    "stop_sequences": Refused("send stop"), "stop_strings": Refused("send stop"), "stop_regex": Refused("send stop"),
    "repetition_detection": Refused("send frequency_penalty or repetition_penalty, and max_tokens"),
    # what the answer contains
    "functions": Refused("send tools"), "function_call": Refused("send tool_choice", ("auto", "none")),
    "separate_reasoning": Refused(_REASONING, (True,), unless_empty=False),
    "return_hidden_states": Refused("leave it out"), "return_routed_experts": Refused("leave it out"),
    "routed_experts_prompt_start": Refused("leave it out", (0,)), "return_mm_kwargs": Refused(_MEDIA),
    "return_token_offsets": Refused("send echo with logprobs"), "return_meta_info": Refused("leave it out"),
    "return_prompt_text": Refused("send return_token_ids, and decode them with /detokenize"),
    "logprobs_mode": Refused("leave it out: log-probabilities are the model's own", ("raw_logprobs",)),
    "post_sampling_probs": Refused("send logprobs: they are the model's own"),
    "reasoning_format": Refused(_REASONING, ("auto", "deepseek", "parsed"), unless_empty=False),
    "parse_tool_calls": Refused("start the server without --tool-parser", (True,), unless_empty=False),
    "return_tokens": Refused("send return_token_ids"),
    "n_probs": Refused("send logprobs", (0,)),
}  # fmt: skip

CHAT_REFUSED: Mapping[str, Refused] = {
    **REFUSED,
    "prompt": Refused("send messages, or use /v1/completions"),
    "best_of": Refused("send n, and choose among the answers; /v1/completions has it", (1,)),
    "echo": Refused("send continue_final_message, or use /v1/completions"),
    "add_special_tokens": Refused("a chat template writes its own; use /v1/completions with a prompt"),
    "logprob_token_ids": Refused("send logprobs with top_logprobs up to 20"),
}  # fmt: skip

COMPLETIONS_REFUSED: Mapping[str, Refused] = {
    **REFUSED,
    "messages": Refused("send prompt, or use /v1/chat/completions"), "tools": Refused("use /v1/chat/completions"),
    "tool_choice": Refused("use /v1/chat/completions", ("auto", "none")),
    "max_completion_tokens": Refused(_LENGTH), "top_logprobs": Refused("send a number as logprobs", (0,)),
    "logprob_token_ids": Refused("send logprobs up to 20"), "documents": Refused("write them into the prompt"),
}  # fmt: skip

# nothing thinks or calls tools in a completion, and no template is read
COMPLETIONS_DROPPABLE: Mapping[str, tuple[Any, ...]] = {
    **DROPPABLE, "reasoning_effort": (), "thinking_token_budget": (), "thinking_budget": (), "reasoning": (),
    "thinking": (),
    "enable_thinking": (), "include_reasoning": (True,), "separate_reasoning": (True,),
    "parallel_tool_calls": (True,),
    "chat_template_kwargs": (), "add_generation_prompt": (True,),
}  # fmt: skip
