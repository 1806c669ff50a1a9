"""Names of options in other engines' Python APIs, and what they are called here, for errors that say so."""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.api import ConfigError

ELSEWHERE = {  # option of LLM(...) elsewhere -> what to write here; "-: " and why it is left out
    "attention_backend": "attention=NAME",
    "block_size_tokens": "block_size",
    "context_length": "max_length",
    "cpu_offload_gb": "-: weights stay where the model runs; quantization makes them smaller",
    "data_parallel_size": "AsyncLLM(..., dp=N)",
    "disable_log_stats": "log_level='warning'",
    "distributed_executor_backend": "executor='multiproc' or 'ray'; with tp or pp it is chosen by itself",
    "download_dir": "cache_dir",
    "enable_chunked_prefill": "-: prompts are always computed in chunks of max_step_tokens",
    "enable_expert_parallel": "ep=N, the N of tp",
    "enable_prefix_caching": "prefix_cache",
    "enforce_eager": "-: what can be captured is captured, and the rest runs as it is",
    "gpu_memory_utilization": "kv_memory='90%', a share of the memory that is free, or kv_memory='20GiB'",
    "kv_cache_dtype": "kv_dtype",
    "kv_cache_memory_bytes": "kv_memory='20GiB'",
    "kv_transfer_config": "kv_connector=NAME, and its options as **{'kv_connector.NAME.OPTION': VALUE}",
    "limit_mm_per_prompt": "-: prompts are texts and token ids",
    "load_format": "loader=NAME",
    "max_model_len": "max_length",
    "max_num_batched_tokens": "max_step_tokens",
    "max_num_seqs": "max_rows",
    "max_running_requests": "max_rows",
    "mem_fraction_static": "kv_memory='90%', a share of the memory that is free, or kv_memory='20GiB'",
    "model_path": "model",
    "n_ctx": "max_length",
    "num_gpu_blocks_override": "num_blocks",
    "override_generation_config": "params=SamplingParams(...) of each call",
    "pipeline_parallel_size": "pp",
    "scheduling_policy": "scheduler=NAME",
    "served_model_name": "served_name",
    "skip_tokenizer_init": "-: give prompts as token ids, the tokenizer is made anyway",
    "speculative_config": "proposer=NAME, and its options as **{'proposer.NAME.OPTION': VALUE}",
    "speculative_model": "proposer='draft_model', **{'proposer.draft_model.model': FOLDER}",
    "swap_space": "kv_connector='offload', which keeps KV blocks in the host's memory",
    "task_type": "task",
    "tensor_parallel_size": "tp",
    "tokenizer_mode": "-: the tokenizer's files say what reads them",
    "tool_call_parser": "tool_parser",
    "tp_size": "tp",
    "trust_remote_code": "-: code of checkpoints is never run; a model plugin brings new architectures",
}


def check_options(who: str, options: Iterable[str]) -> None:
    """Raises ConfigError for the first option that is called otherwise here, with what to write."""
    for name in options:
        if (here := ELSEWHERE.get(name)) is not None:
            fix = f"leave it out{here[1:]}" if here.startswith("-") else f"write {here}"
            raise ConfigError(f"{who} has no option {name!r}", fix=fix)


__all__ = ["ELSEWHERE", "check_options"]
