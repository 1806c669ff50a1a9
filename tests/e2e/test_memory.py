"""What `lmkit plan` says against what an engine's process holds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from lmkit import LLM, AsyncLLM
from lmkit.api import EngineRequest, SamplingParams
from lmkit.config import EngineConfig, from_options
from lmkit.plugins.resolve import resolve
from lmkit_cli.estimate import Estimate
from lmkit_cli.estimate import planned as estimated

MIB = 1 << 20


def planned(config: EngineConfig) -> Estimate:
    return estimated(config, *resolve(config))


async def held_when_full(config: EngineConfig) -> int:
    """Anonymous bytes of the engine's process when its KV cache has been written from end to end.

    How many pages of files (libraries, the mapped embedding) are resident is the system's choice; they are no need.
    """
    llm = await AsyncLLM.start(config)
    try:
        facts = llm.facts
        length = min(facts.max_length, facts.num_kv_tokens // facts.max_rows) - 8

        async def fill(row: int) -> None:
            ids = [(row * 31 + i) % facts.vocab_size for i in range(length)]
            params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
            async for _ in llm.client.submit(EngineRequest(f"row {row}", ids, params)):
                pass

        await asyncio.gather(*(fill(row) for row in range(facts.max_rows)))
        client = llm.client.client
        status = Path(f"/proc/{client.pid}/status").read_text()  # type: ignore[attr-defined]
        return int(status.partition("RssAnon:")[2].split()[0]) << 10
    finally:
        await llm.close()


@pytest.mark.full("lmkit-platform-cpu", "lmkit-cli")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_plan_is_near_what_a_process_takes() -> None:
    config = from_options({"model": "demo", "kv_memory": "64MiB", "max_rows": 16})
    said = planned(config)
    assert said.process_bytes
    took = asyncio.run(held_when_full(config))
    assert said.total_bytes == pytest.approx(took, rel=0.08), f"{took / MIB:.0f} MiB held"


@pytest.mark.parametrize(
    "quantization",
    [
        *("none", "int8", "w8a8", "int4"),
        pytest.param("nf4", marks=pytest.mark.full("lmkit-quantization-bitsandbytes")),
        pytest.param("fp8", marks=pytest.mark.full("lmkit-quantization-fp8")),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_planned_weights_are_those_held(quantization: str, dtype: str) -> None:
    config = from_options({"model": "demo", "kv_memory": "4MiB", "quantization": quantization, "dtype": dtype})
    with LLM(config=config) as llm:
        assert planned(config).weight_bytes == pytest.approx(llm.facts.weight_bytes, rel=0.03)
