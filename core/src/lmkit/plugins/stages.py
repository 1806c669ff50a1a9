"""The data stages of selection (5 to 8): pure functions from a spec and a request to refusals, cheapest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from packaging.requirements import Requirement

from lmkit.api import (
    AttentionRequest,
    AttentionSpec,
    ExecutorRequest,
    ExecutorSpec,
    LoaderRequest,
    LoaderSpec,
    ModelRequest,
    ModelSpec,
    OpRequest,
    OpSpec,
    ParserRequest,
    QuantizationRequest,
    QuantizationSpec,
    ReasoningParserSpec,
    Refusal,
    SelectRequest,
    Spec,
    Tier,
    ToolParserSpec,
)

Refusals = Iterator[Refusal]


def listed(names: Any) -> str:
    return "{" + ",".join(sorted(map(str, names))) + "}"


def requirements(spec: Spec, installed_version: Callable[[str], str | None]) -> Refusals:
    """Stage 5: `requires`, from the metadata of installed dists."""
    for text in spec.requires:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        version = installed_version(requirement.name)
        fix = f'pip install "{text}"'
        if version is None:
            yield Refusal("requirement-missing", text, "not installed", fix)
        elif not requirement.specifier.contains(version, prereleases=True):
            yield Refusal("requirement-version", text, version, fix)


def platform(spec: Spec, request: SelectRequest) -> Refusals:
    """Stage 6: platform and capability of the device. A request without a device passes."""
    device = request.device
    if device is None:
        return
    if "*" not in spec.platforms and device.platform not in spec.platforms:
        yield Refusal("platform", listed(spec.platforms), device.platform)
    elif spec.capability is not None:
        if device.capability is None:
            yield Refusal("capability", str(spec.capability), "a device without one")
        elif device.capability not in spec.capability:
            major, minor = device.capability
            yield Refusal("capability", str(spec.capability), f"{major}.{minor}")


def attention(spec: AttentionSpec, request: AttentionRequest) -> Refusals:
    """Stage 7 for attention. Values that are not settled yet ("auto", block size 0) pass."""
    need = request.need
    dtype = request.dtype or need.dtype
    if dtype != "auto" and dtype not in spec.dtypes:
        others = [d for d in (request.device.dtypes if request.device else ()) if d in spec.dtypes]
        yield Refusal("dtype", listed(spec.dtypes), dtype, f"--dtype {others[0]}" if others else "")
    kv_dtype = "auto" if need.kv_dtype == dtype and "auto" in spec.kv_dtypes else need.kv_dtype
    if kv_dtype not in spec.kv_dtypes:
        yield Refusal("kv-dtype", listed(spec.kv_dtypes), kv_dtype)
    if need.head_dim not in spec.head_dims:
        yield Refusal("head-dim", str(spec.head_dims), str(need.head_dim))
    v_dim = need.v_head_dim or need.head_dim
    if v_dim != need.head_dim and (spec.v_head_dims is None or v_dim not in spec.v_head_dims):
        needed = "equal to head_dim" if spec.v_head_dims is None else str(spec.v_head_dims)
        yield Refusal("head-dim", f"v_head_dim {needed}", str(v_dim))
    if need.block_size and need.block_size not in spec.block_sizes:
        yield Refusal("block-size", str(spec.block_sizes), str(need.block_size))
    ratio, rest = divmod(need.num_q_heads, need.num_kv_heads)
    if rest or ratio not in spec.gqa_ratios:
        yield Refusal("gqa-ratio", str(spec.gqa_ratios), f"{need.num_q_heads}/{need.num_kv_heads}")
    phases = {"prefill", "decode"} if request.phase is None else {request.phase}
    if not phases <= spec.phases:
        yield Refusal("phase", listed(spec.phases), listed(phases))


def quantization(spec: QuantizationSpec, request: QuantizationRequest) -> Refusals:
    if not request.method and not spec.online:
        yield Refusal("format", "a checkpoint stored that way", "one that is not quantized", "--quantization auto")
    if request.method and request.method not in spec.checkpoint_methods:
        needed = listed(spec.checkpoint_methods) if spec.checkpoint_methods else "an unquantized checkpoint"
        yield Refusal("format", needed, request.method)
    if request.weight_format is not None and request.weight_format not in spec.weight_formats:
        yield Refusal("format", listed(spec.weight_formats), request.weight_format)
    if request.dtype is not None and request.dtype not in spec.activation_dtypes:
        yield Refusal("dtype", listed(spec.activation_dtypes), request.dtype)
    if request.group_size is not None and request.group_size not in spec.group_sizes:
        yield Refusal("format", f"group size {spec.group_sizes}", str(request.group_size))


def op(spec: OpSpec, request: OpRequest) -> Refusals:
    if spec.op != request.op:
        yield Refusal("format", f"op {spec.op}", request.op)
    if spec.formats and request.format not in spec.formats:
        yield Refusal("format", listed(spec.formats), request.format)
    if request.dtype is not None and request.dtype not in spec.dtypes:
        yield Refusal("dtype", listed(spec.dtypes), request.dtype)


def loader(spec: LoaderSpec, request: LoaderRequest) -> Refusals:
    if request.format not in spec.formats:
        yield Refusal("format", listed(spec.formats), request.format)


def model(spec: ModelSpec, request: ModelRequest) -> Refusals:
    if request.tp > 1 and not spec.supports_tp:
        yield Refusal("ranks", "tensor-parallel size 1", str(request.tp), "--tp 1")
    if request.pp > 1 and not spec.supports_pp:
        yield Refusal("ranks", "pipeline-parallel size 1", str(request.pp), "--pp 1")


def executor(spec: ExecutorSpec, request: ExecutorRequest) -> Refusals:
    if request.num_ranks > spec.max_ranks:
        yield Refusal("ranks", f"at most {spec.max_ranks}", str(request.num_ranks), "--tp 1 --pp 1")


@dataclass(frozen=True, slots=True)
class Claim:
    """What makes `auto` take a parser. Claims of the lowest rank come first."""

    rank: int
    why: str
    length: int = 0  # of the glob that fits: a longer one knows the model better


def claim_of(spec: Spec | None, request: SelectRequest) -> Claim | None:
    """A template says what its model writes, so markers in it come before the name of an architecture.

    Rank 0: both; 1: a marker; 2: the architecture or name; 3: a marker of a format that many families share (tier
    REFERENCE); 4: the architecture, although the parser's markers are missing in the template; from 5 on: it reads
    what the template shows of a call or of reasoning. A parser that does not read that has no claim.
    """
    if not isinstance(request, ParserRequest) or not isinstance(spec, ToolParserSpec | ReasoningParserSpec):
        return None
    marker = max((m for m in spec.markers if m in request.chat_template), key=len, default="")
    names = (request.architecture, request.model)
    named = [(s, len(glob)) for s in names for glob in spec.models if fnmatchcase(s, glob)]
    length = max((size for _, size in named), default=0)
    readers = request.readers
    if readers is not None and spec.name not in readers:
        return None
    if marker:
        rank = 0 if named else 3 if spec.tier == Tier.REFERENCE else 1
        return Claim(rank, f"the chat template has {marker!r}", length)
    if named:
        return Claim(4 if spec.markers and request.chat_template else 2, f"the model is {named[0][0]}", length)
    return Claim(5 + readers.index(spec.name), "it reads what the chat template shows") if readers else None


def parser_claims(spec: ToolParserSpec | ReasoningParserSpec, request: ParserRequest) -> Refusals:
    """For `auto` only: a parser named by the user is used for any model."""
    if request.readers is not None and spec.name not in request.readers:
        what = "calls" if request.kind == "tool_parser" else "reasoning"
        needed = f"one that reads the {what} of the chat template, as {request.readers[0]}"
        yield Refusal("template", needed, spec.name, f"name {spec.name} to use it anyway")
    elif claim_of(spec, request) is None:
        claims = listed((*spec.models, *spec.markers))
        yield Refusal(
            "model", claims, f"{request.model} ({request.architecture})", f"name {spec.name} to use it anyway"
        )


def features(spec: Spec, request: SelectRequest) -> Refusals:
    """Stage 8: what the request needs and the spec does not declare. A spec without a features field declares none."""
    needed = request.features
    if isinstance(request, AttentionRequest):
        needed |= request.need.features
    for name in sorted(needed - getattr(spec, "features", frozenset())):
        yield Refusal("feature", name, f"declares {listed(getattr(spec, 'features', ()))}")


SHAPES: dict[type[SelectRequest], Callable[[Any, Any], Refusals]] = {
    AttentionRequest: attention,
    QuantizationRequest: quantization,
    OpRequest: op,
    LoaderRequest: loader,
    ExecutorRequest: executor,
    ModelRequest: model,
}


def data_refusals(
    spec: Spec, request: SelectRequest, installed_version: Callable[[str], str | None], explicit: bool
) -> list[tuple[int, Refusal]]:
    """(stage, refusal) of stages 5 to 8, all of them."""
    found = [(5, r) for r in requirements(spec, installed_version)]
    found += [(6, r) for r in platform(spec, request)]
    if type(request) in SHAPES:
        found += [(7, r) for r in SHAPES[type(request)](spec, request)]
    if not explicit and isinstance(request, ParserRequest):
        found += [(7, r) for r in parser_claims(spec, request)]  # type: ignore[arg-type]
    found += [(8, r) for r in features(spec, request)]
    if not explicit and spec.stability == "experimental":
        found.append((8, Refusal("experimental", "to be named explicitly", "auto", f"name {spec.name} to use it")))
    return found
