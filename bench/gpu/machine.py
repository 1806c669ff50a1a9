"""The device that is measured, clocks for it, and engines on it."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

if TYPE_CHECKING:
    from lmkit.api import DeviceInfo
    from lmkit.config import EngineConfig

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bos_token_id": 1, "eos_token_id": 2}
_QWEN3 = _LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "dtype": "bfloat16", "attention_bias": False}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "8b": {  # Llama 3.1 8B
        **_LLAMA, **_COMMON, "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
    "0.6b": {  # Qwen3 0.6B
        **_QWEN3, **_COMMON, "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    },
    "tiny": {
        **_LLAMA, **_COMMON, "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 4096,
        "rope_theta": 10000.0, "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """`kind` is "gpu" or "cpu"; `small`: every part at the size of a toy, to prove the parts and not the device."""

    kind: str
    small: bool
    scratch: Path  # for checkpoints

    @cached_property
    def platform(self) -> str:
        """lmkit's name of the platform."""
        if self.kind == "cpu":
            return "cpu"
        return "rocm" if torch.version.hip else "cuda"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", 0)

    @cached_property
    def info(self) -> DeviceInfo:
        """The first device as the platform's probe describes it. Raises RuntimeError where there is none."""
        from lmkit.api import Unavailable
        from lmkit.plugins.host import PluginHost
        from lmkit.plugins.refs import load_ref

        found = load_ref(PluginHost().load("platform", self.platform).probe)()
        if isinstance(found, Unavailable):
            raise RuntimeError(f"no device: {found.reason}")
        return found[0]

    def bind(self) -> Any:
        """The platform object, bound to the device."""
        from lmkit.plugins import load_target
        from lmkit.plugins.host import PluginHost

        platform = load_target(PluginHost().load("platform", self.platform).target)()
        platform.bind(0)
        return platform

    def offered(self, kind: str, component: str | None = None) -> list[str]:
        """Plugins of a kind that pass selection for a small model, preferred first."""
        return [c.name for outcome in self._outcomes(kind, component) for c in outcome.survivors]

    def refused(self, kind: str, component: str | None = None) -> dict[str, str]:
        """The others, and why."""
        return {
            c.name: "; ".join(map(str, c.reasons))
            for outcome in self._outcomes(kind, component)
            for c in outcome.candidates
            if not c.ok
        }

    def _outcomes(self, kind: str, component: str | None) -> list[Any]:
        from lmkit.plugins.host import PluginHost
        from lmkit.plugins.resolve import Resolver

        resolver = Resolver(self.config(self.folder("tiny")), PluginHost())
        resolver.run()
        return [o for o in resolver.outcomes if o.request.kind == kind and component in (None, o.request.component)]

    # -------------------------------------------------------------------------------------------------- clocks

    def wait(self) -> None:
        if self.kind != "cpu":
            torch.cuda.synchronize()

    def seconds(self, calls: Sequence[Callable[[], object]], rounds: int = 7) -> tuple[float, bool]:
        """Seconds of one call, the median of `rounds` through all of `calls`; and whether a graph ran them.

        On a GPU all calls are captured as one graph: what the host takes to launch them is not measured. What cannot be
        captured is launched as it is.
        """
        for call in calls[:2]:
            call()
        self.wait()
        if self.kind == "cpu":
            return statistics.median(self._once(calls) for _ in range(rounds)) / len(calls), False
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for call in calls:
                    call()
        except Exception:
            torch.cuda.synchronize()
            return statistics.median(self._between(calls) for _ in range(rounds)) / len(calls), False
        graph.replay()
        return statistics.median(self._between([graph.replay]) for _ in range(rounds)) / len(calls), True

    def _once(self, calls: Sequence[Callable[[], object]]) -> float:
        began = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - began

    def _between(self, calls: Sequence[Callable[[], object]]) -> float:
        """By the device's own clock."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        for call in calls:
            call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    # -------------------------------------------------------------------------------------------------- models

    def folder(self, shape: str, **changes: Any) -> Path:
        """A checkpoint of that shape without weights, which the loader `dummy` makes up."""
        name = "tiny" if self.small else shape
        folder = self.scratch / f"{name}-{crc32(repr(sorted(changes.items())).encode()):08x}"
        folder.mkdir(parents=True, exist_ok=True)
        written = folder / f"{os.getpid()}.new"  # several processes make the same folder
        written.write_text(json.dumps({**SHAPES[name], **changes}))
        written.replace(folder / "config.json")
        return folder

    def config(self, folder: Path, **options: Any) -> EngineConfig:
        from lmkit.config import from_options

        return from_options({"model": str(folder), "platform": self.platform, "loader": "dummy", **options})
