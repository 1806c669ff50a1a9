"""Fields that other servers know: what changes nothing here, what is refused, and what to send instead."""

from __future__ import annotations

from collections.abc import Mapping

from lmkit_http.strict import Hint

_SCHEMA = 'send response_format {"type": "json_schema", ...} or structured_outputs {"json": ...}'
_MEDIA = "leave it out: models here read text alone"

# fields of requests that are accepted and change nothing, with the values that do so elsewhere, too
LABELS: Mapping[str, tuple[str, ...]] = {
    "user": (), "metadata": (), "service_tier": ("auto", "default"), "prompt_cache_key": (), "safety_identifier": (),
    "session_id": (), "prompt_cache_retention": ("in_memory",),
}  # fmt: skip

# fields that are refused when they say something
HINTS: Mapping[str, Hint] = {
    "best_of": Hint("send n, and choose among the answers; /v1/completions has it", (1,)),
    "suffix": Hint("write the model's own tokens for filling in into the prompt"),
    "watermarking": Hint("leave it out"),
    "spaces_between_special_tokens": Hint("leave it out: tokens are joined as the tokenizer says", (True,)),
    "logprob_token_ids": Hint("send logprobs with top_logprobs up to 20"),
    "echo": Hint("send continue_final_message, or use /v1/completions"),
    "add_special_tokens": Hint("a chat template writes its own; use /v1/completions with a prompt"),
    "chat_template": Hint("start the server with --chat-template FILE"),
    "media_io_kwargs": Hint(_MEDIA), "mm_processor_kwargs": Hint(_MEDIA), "return_mm_kwargs": Hint(_MEDIA),
    "mm_payload": Hint(_MEDIA, ("tensors",)), "audio": Hint(_MEDIA), "prompt_embeds": Hint("send token ids"),
    "modalities": Hint(_MEDIA, (["text"],)),
    "routed_experts_prompt_start": Hint("leave it out"), "return_token_offsets": Hint("send echo with logprobs"),
    "return_prompt_text": Hint("send return_token_ids, and decode them with /detokenize"),
    "kv_transfer_params": Hint("leave it out: engines find blocks of each other by what is in them (--kv-connector)"),
    "ec_transfer_params": Hint("leave it out: each server has a cache of its own"),
    "repetition_detection": Hint("send frequency_penalty or repetition_penalty, and max_tokens"),
    "stream_interval": Hint("leave it out: tokens are sent as they come", (1,)),
    "functions": Hint("send tools"), "function_call": Hint("send tool_choice", ("auto", "none")),
    "prediction": Hint("start the server with --proposer to guess tokens"),
    "verbosity": Hint("say it in a message, or in chat_template_kwargs where the template reads it", ("medium",)),
    "web_search_options": Hint("send a tool of type function, and search where it is called"),
    "moderation": Hint("leave it out: nothing is moderated here"),
    "store": Hint("keep the answer where it is received; /v1/responses keeps answers for a while"),
    "thinking_token_budget": Hint("it is a field of /v1/chat/completions"),
    "guided_json": Hint(_SCHEMA), "guided_json_object": Hint('send response_format {"type": "json_object"}'),
    "guided_regex": Hint('send structured_outputs {"regex": ...}'),
    "guided_choice": Hint('send structured_outputs {"choice": [...]}'),
    "guided_grammar": Hint('send structured_outputs {"grammar": ...}'),
    "guided_decoding_backend": Hint('send structured_outputs with "backend"'),
    "guided_whitespace_pattern": Hint("leave it out"),
    "provider": Hint("leave it out: this server is the only one"),
    "reasoning": Hint("send reasoning_effort"), "thinking": Hint("send reasoning_effort or chat_template_kwargs"),
    "enable_thinking": Hint('send chat_template_kwargs {"enable_thinking": ...}'),
}  # fmt: skip
