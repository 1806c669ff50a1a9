"""The figures under vLLM's names: which there are, that they are the same, and what balancers read."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from lmkit_http.aliases import ALIASES
from lmkit_testing.serving import ServedLLM, hashed, scripted
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

# vLLM's metrics of an engine and of its drafts (v1/metrics/loggers.py, v1/spec_decode/metrics.py); counters without
# _total. Those marked - are not here: there is no such thing, or it means something else.
THEIRS = """
    - admission_rejections
    gauge cache_config_info
    - corrupted_requests
    histogram e2e_request_latency_seconds
    - engine_sleep_state
    - external_prefix_cache_hits
    - external_prefix_cache_queries
    counter generation_tokens
    gauge gpu_cache_usage_perc
    histogram inter_token_latency_seconds
    - iteration_tokens_total
    - kv_block_idle_before_evict_seconds
    - kv_block_lifetime_seconds
    - kv_block_reuse_gap_seconds
    gauge kv_cache_usage_perc
    gauge lora_requests_info
    - mm_cache_hits
    - mm_cache_queries
    counter num_preemptions
    - num_requests_kv_fetch_by_stage
    gauge num_requests_running
    gauge num_requests_waiting
    - num_requests_waiting_by_reason
    counter prefix_cache_hits
    counter prefix_cache_queries
    counter prompt_tokens
    - prompt_tokens_by_source
    counter prompt_tokens_cached
    - prompt_tokens_cached_by_source
    histogram request_decode_time_seconds
    - request_generation_tokens
    - request_inference_time_seconds
    - request_max_num_generation_tokens
    - request_num_preemptions
    - request_params_max_tokens
    - request_params_n
    - request_prefill_kv_computed_tokens
    histogram request_prefill_time_seconds
    - request_prompt_tokens
    histogram request_queue_time_seconds
    counter request_success
    - request_time_per_output_token_seconds
    histogram time_to_first_token_seconds
    - watermark_requests
    - diffusion_num_canvas_positions
    - diffusion_num_committed_tokens
    - diffusion_num_denoising_steps
    counter spec_decode_num_accepted_tokens
    - spec_decode_num_accepted_tokens_per_pos
    counter spec_decode_num_draft_tokens
    - spec_decode_num_drafts
"""
BODY = {"prompt": "abcdefgh", "max_tokens": 5, "temperature": 0, "ignore_eos": True}


async def scraped(client: Any) -> dict[str, Metric]:
    text = (await client.get("/metrics")).text
    return {metric.name: metric for metric in text_string_to_metric_families(text)}


def with_adapters(llm: ServedLLM) -> ServedLLM:
    llm.client.facts = msgspec.structs.replace(llm.facts, adapters=("law", "tax"), max_adapters=4)
    return llm


async def test_which_of_their_names_there_are(connect: Any) -> None:
    """A snapshot: a name that comes or goes changes this list."""
    client = connect(with_adapters(scripted("abc")))
    await client.post("/v1/completions", json=BODY)
    here = {f"{m.type} {name.removeprefix('vllm:')}" for name, m in (await scraped(client)).items() if ":" in name}
    assert here == {line.strip() for line in THEIRS.strip().splitlines() if not line.strip().startswith("-")}


async def test_they_carry_the_same_values(connect: Any) -> None:
    async with hashed(block_size=4) as llm:
        client = connect(llm)
        for _ in range(2):
            await client.post("/v1/completions", json=BODY)
        found = await scraped(client)
        size, blocks = llm.facts.block_size, llm.facts.num_kv_tokens // llm.facts.block_size
    for alias, name in ALIASES.items():
        ours = [s.value for s in found[name].samples if not s.name.endswith("_created")]
        assert [s.value for s in found[alias].samples] == ours, alias
    [done] = found["vllm:request_success"].samples
    assert (done.name, done.labels["finished_reason"], done.value) == ("vllm:request_success_total", "length", 2.0)
    for name in ("queue", "prefill", "decode"):
        counts = {s.name: s.value for s in found[f"vllm:request_{name}_time_seconds"].samples}
        assert counts[f"vllm:request_{name}_time_seconds_count"] == 2.0
    [info] = found["vllm:cache_config_info"].samples
    assert (info.labels["block_size"], info.labels["num_gpu_blocks"]) == (str(size), str(blocks))
    assert "vllm:lora_requests_info" not in found, "it has no adapters"


async def test_balancers_see_which_adapters_are_used(connect: Any) -> None:
    llm = with_adapters(scripted("abc" * 100, delay=0.05))
    client = connect(llm)
    [idle] = (await scraped(client))["vllm:lora_requests_info"].samples
    assert idle.labels == {"max_lora": "4", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    task = asyncio.create_task(client.post("/v1/completions", json=BODY | {"model": "law", "max_tokens": 90}))
    used = idle
    while used.labels["running_lora_adapters"] != "law":
        assert not task.done(), task.result().text
        assert used.labels["waiting_lora_adapters"] in ("", "law")
        await asyncio.sleep(0.01)
        [used] = (await scraped(client))["vllm:lora_requests_info"].samples
    assert used.value >= idle.value
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    [idle] = (await scraped(client))["vllm:lora_requests_info"].samples
    assert idle.labels["running_lora_adapters"] == ""
