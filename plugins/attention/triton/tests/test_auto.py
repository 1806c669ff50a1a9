"""What `auto` picks on GPUs that are described: never the torch reference while another backend can run."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from lmkit.api import AttentionRequest, AttnNeed, DeviceInfo
from lmkit.plugins.host import PluginHost
from lmkit.plugins.select import consider
from lmkit.plugins.switches import Switches
from lmkit_testing.host import make_device

DEVICES = {
    **{f"sm_{major}{minor}": make_device("cuda", cc=(major, minor)) for major, minor in ((8, 0), (8, 9), (9, 0))},
    **{f"sm_{major}{minor}": make_device("cuda", cc=(major, minor)) for major, minor in ((10, 0), (12, 0))},
    **{f"gfx{major}": make_device("rocm", cc=(major, minor)) for major, minor in ((9, 4), (11, 0))},
}
# head_dim, query heads, KV heads of published models, and what else their layers ask for
NEEDS: dict[str, AttnNeed] = {
    "Llama 3": AttnNeed(128, 32, 8),
    "Llama 4, chunks": AttnNeed(128, 40, 8, window=8192, chunked=True),
    "Qwen 2": AttnNeed(64, 14, 2),
    "Mistral": AttnNeed(128, 32, 8, window=4096),
    "Gemma 2": AttnNeed(256, 16, 8, window=4096, softcap=50.0),
    "Gemma 3": AttnNeed(256, 8, 4, window=1024),
    "gpt-oss": AttnNeed(64, 64, 8, window=128, sinks=True),
    "Phi 3": AttnNeed(96, 32, 32),
    "Phi 2": AttnNeed(80, 32, 32),
    "BLOOM": AttnNeed(128, 32, 32, alibi=True),
    "DeepSeek V3": AttnNeed(576, 128, 1, v_head_dim=512, mla=True),
    "DeepSeek V3, eight devices": AttnNeed(576, 16, 1, v_head_dim=512, mla=True),
    "MiMo": AttnNeed(192, 64, 4, v_head_dim=128),
    "BERT": AttnNeed(64, 12, 12, causal=False),
    "ModernBERT": AttnNeed(64, 12, 12, causal=False, window=65),
}


@pytest.fixture(scope="module")
def everything() -> PluginHost:
    """All that is known, as if every library were installed."""
    host: Any = PluginHost(switches=Switches())
    host.installed_version = lambda name: "999"
    return host


def able(host: PluginHost, request: AttentionRequest) -> set[str]:
    """Backends that run, those apart that `auto` never takes."""
    chosen = [consider(host, request, entry.name).chosen for entry in host.entries("attention")]
    return {c.name for c in chosen if c is not None and c.spec is not None and c.spec.stability != "experimental"}


def request_of(need: AttnNeed, device: DeviceInfo, dtype: str, kv_dtype: str) -> AttentionRequest:
    kept = dtype if kv_dtype == "auto" else kv_dtype
    return AttentionRequest(need=replace(need, dtype=dtype, kv_dtype=kept), device=device, dtype=dtype)


@pytest.mark.parametrize("device", DEVICES)
def test_the_reference_is_the_last_resort(device: str, everything: PluginHost) -> None:
    caches = ("auto", "float8_e4m3fn", "float8_e5m2", "int8")
    for (name, need), dtype, kv_dtype in product(NEEDS.items(), ("bfloat16", "float16", "float32"), caches):
        request = request_of(need, DEVICES[device], dtype, kv_dtype)
        chosen = consider(everything, request).chosen
        assert chosen is not None, f"{name} {dtype} {kv_dtype}: nothing runs"
        if chosen.name == "torch":
            assert able(everything, request) == {"torch"}, f"{name} {dtype} {kv_dtype}: others could"


def test_a_reference_that_comes_first_is_found(everything: PluginHost) -> None:
    """So that the test above looks at what `auto` picks."""
    request = request_of(NEEDS["Llama 3"], DEVICES["sm_90"], "bfloat16", "auto")
    outcome = consider(everything, request, prefers=("torch",))
    assert outcome.chosen is not None
    assert outcome.chosen.name == "torch"
    assert able(everything, request) >= {"torch", "triton"}
