"""Fields beyond the OpenAI API, named as other servers name the same thing, and fields that change nothing."""

# requests of /v1/completions and /v1/chat/completions
REQUEST = frozenset({
    "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "include_stop_str_in_output",
    "skip_special_tokens", "prompt_logprobs", "priority", "cache_salt", "return_token_ids", "structured_outputs",
    "resume", "vllm_xargs", "truncate_prompt_tokens", "truncation_side", "return_tokens_as_token_ids", "request_id",
    "bad_words", "no_stop_trim", "stop_in", "allowed_token_ids", "use_beam_search", "length_penalty",
    "early_stopping",
})  # fmt: skip

# requests of /v1/chat/completions
CHAT_REQUEST = REQUEST | {
    "chat_template_kwargs", "include_reasoning", "add_generation_prompt", "continue_final_message",
    "thinking_token_budget", "documents", "reasoning", "thinking", "enable_thinking", "thinking_budget",
}  # fmt: skip

# requests of /v1/completions
COMPLETION_REQUEST = REQUEST | {"add_special_tokens", "response_format"}

# responses and chunks, by the OpenAPI schema they extend
RESPONSE = {
    "message": frozenset({"reasoning_content", "reasoning"}),
    "delta": frozenset({"reasoning_content", "reasoning"}),
    "choice": frozenset({"stop_reason", "token_ids", "prompt_logprobs", "prompt_token_ids"}),
    "response": frozenset({"prompt_token_ids", "prompt_logprobs"}),
    "model": frozenset({"max_model_len", "root", "capabilities"}),
}  # fmt: skip
