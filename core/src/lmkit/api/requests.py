"""What is asked of the resolver: one frozen request per component to be chosen."""

from __future__ import annotations

from dataclasses import dataclass

from lmkit.api.device import DeviceInfo
from lmkit.api.model import AttnNeed


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectRequest:
    """Base: choose an implementation of `kind`. `features` lists what must be declared, by name."""

    kind: str
    component: str = ""  # "text", "vision", "draft"; "" where there is only one
    device: DeviceInfo | None = None
    dtype: str | None = None
    features: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequest(SelectRequest):
    """One request per attention component and need."""

    kind: str = "attention"
    component: str = "text"
    need: AttnNeed
    phase: str | None = None  # None = both


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationRequest(SelectRequest):
    kind: str = "quantization"
    method: str  # quantization_config.quant_method; "" = the checkpoint is not quantized
    weight_format: str | None = None
    group_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRequest(SelectRequest):
    """`format` is the weight format to run ("plain" = unquantized)."""

    kind: str = "op"
    op: str
    format: str = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest(SelectRequest):
    kind: str = "model"
    architecture: str
    tp: int = 1
    pp: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserRequest(SelectRequest):
    """kind is "tool_parser" or "reasoning_parser"; `auto` matches globs and template markers."""

    model: str
    architecture: str
    chat_template: str = ""
    readers: tuple[str, ...] | None = None  # parsers that read what the template shows; None: it shows nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRequest(SelectRequest):
    kind: str = "loader"
    format: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorRequest(SelectRequest):
    kind: str = "executor"
    num_ranks: int = 1
