"""EngineConfig and its parts. Defaults live here and nowhere else; the command line is derived from these fields.

Which plugins users may name, and under which keys, the files of `lmkit.kinds` say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from lmkit.contracts.marks import Between, Flag, MemoryBudget, OneOf, Several

STEP_TOKENS = 512  # token budget of a step when neither user nor plugin says otherwise


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What to run."""

    model: Annotated[str, "checkpoint: 'demo', a local directory, or a Hugging Face id"] = "demo"
    tokenizer: Annotated[str | None, "tokenizer directory or id, when it is not the checkpoint's own"] = None
    impl: Annotated[
        str,
        "code that runs the model: auto, native (lmkit's own families), or a plugin's name that runs any architecture",
        Flag("model-impl"),
    ] = "auto"
    task: Annotated[
        str,
        "what it does: auto (as the checkpoint says), generate, embed, classify, token_embed or token_classify",
        OneOf(("auto", "generate", "embed", "classify", "token_embed", "token_classify")),
    ] = "auto"
    dtype: Annotated[str, "auto, bfloat16, float16 or float32", OneOf(("auto", "bfloat16", "float16", "float32"))] = (
        "auto"
    )
    max_length: Annotated[
        int | None, "longest prompt + output in tokens; default: what model and memory allow", Between(1)
    ] = None
    revision: Annotated[str | None, "branch, tag or commit of a Hugging Face id"] = None
    cache_dir: Annotated[str | None, "where downloaded checkpoints are kept"] = None
    offline: Annotated[bool, "never touch the network"] = False
    served_name: Annotated[
        str | None, "name under which clients see the model; several with commas between, the main one first", Several()
    ] = None
    chat_template: Annotated[str | None, "file with a chat template, instead of the checkpoint's"] = None
    overrides: Annotated[
        str, "JSON object laid over config.json: rope_scaling, sliding_window, ...; null removes", Flag("hf-overrides")
    ] = ""
    packed_cache: Annotated[
        str | None, "folder that keeps weights as kernels packed them: the next start maps them and packs nothing"
    ] = None
    seed: Annotated[int, "noise of requests that give no seed", Between(-(1 << 63), (1 << 63) - 1)] = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Under which clients see the model; empty: under the checkpoint's own."""
        return tuple(dict.fromkeys(name.strip() for name in (self.served_name or "").split(",") if name.strip()))


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """KV cache."""

    memory: Annotated[
        str,
        "bytes for the KV cache: 'auto', a size ('2GiB') or a share of free memory ('60%')",
        MemoryBudget(),
        Flag("kv-memory"),
    ] = "auto"
    block_size: Annotated[
        int | None, "tokens per KV block; default: what the attention backend prefers", Between(1, 4096)
    ] = None
    num_blocks: Annotated[int | None, "exact number of KV blocks, instead of a memory budget", Between(2)] = None
    dtype: Annotated[str, "auto (the model's), or a dtype the attention backend declares", Flag("kv-dtype")] = "auto"
    prefix_cache: Annotated[
        bool | None,
        "reuse KV blocks of equal prompt prefixes; default: where the model allows it and keeps no recurrent state",
    ] = None


@dataclass(frozen=True, slots=True)
class SchedConfig:
    """Scheduling."""

    max_tokens: Annotated[
        int | None,
        "token budget of one step (prefill chunk size); default: the platform's",
        Between(1, 1 << 20),
        Flag("max-step-tokens"),
    ] = None
    max_rows: Annotated[int | None, "requests running at once; default: the platform's, or 64", Between(1, 1 << 16)] = (
        None
    )
    max_waiting: Annotated[
        int | None,
        "requests that may queue; more are refused with 503; default: 4 times max-rows, at least 256",
        Between(1),
    ] = None

    @property
    def rows(self) -> int:
        return self.max_rows or 64

    @property
    def queue(self) -> int:
        """Requests that the scheduler takes: a request of a client may be several."""
        return self.max_waiting or max(1024, 4 * self.rows)


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Processes and devices."""

    tp: Annotated[int, "tensor-parallel ranks", Between(1, 1024)] = 1
    pp: Annotated[int, "pipeline-parallel ranks", Between(1, 1024)] = 1
    ep: Annotated[int, "expert-parallel ranks: so many of `tp` deal out whole experts", Between(1, 1024)] = 1
    dp: Annotated[int, "engines that each hold the whole model, behind one front end", Between(1, 1024)] = 1
    depth: Annotated[
        int | None, "steps in flight: 2 prepares one while another runs; default: the platform's, or --pp", Between(1)
    ] = None
    threads: Annotated[int | None, "compute threads; default: physical cores of the cgroup", Between(1, 4096)] = None

    @property
    def in_flight(self) -> int:
        return self.depth or 1


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Adapters."""

    modules: Annotated[
        str, "adapters to load at start: NAME=PATH, several with commas between", Flag("lora-modules"), Several()
    ] = ""
    enabled: Annotated[
        bool, "let adapters be loaded and unloaded while it runs (POST /v1/load_lora_adapter)", Flag("enable-lora")
    ] = False
    max_adapters: Annotated[int, "adapters loaded at once", Between(1, 4096), Flag("max-loras")] = 16
    max_rank: Annotated[int, "largest rank of an adapter", Between(1, 1024), Flag("max-lora-rank")] = 64

    @property
    def on(self) -> bool:
        return self.enabled or bool(self.modules)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is built from. Identity under dict round trip; unknown keys are errors."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    sched: SchedConfig = field(default_factory=SchedConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    log_level: Annotated[
        str | None,
        "what is worth a line: debug, info, warning or error; default: info of a server, else warning",
        OneOf(("debug", "info", "warning", "error")),
    ] = None
    log_format: Annotated[str, "how a line is written: plain text, or a JSON object", OneOf(("plain", "json"))] = (
        "plain"
    )
    device: Annotated[str | None, "a described device ('cuda:9.0:80GB'), for explain and plan only"] = None
    wanted: Mapping[str, str] = field(default_factory=dict)  # plugins that the user named, by kind
    plugins: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # options, by "kind.name"

    def wants(self, kind: str) -> str:
        """What the user named for a kind of plugins: auto, a name, or what else the kind's file says."""
        return self.wanted.get(kind, "auto")
