"""Whether a plugin can be called as the protocol of its kind says: its target, and the methods of what that makes."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from types import FunctionType
from typing import Any, Protocol, get_type_hints

from lmkit.api import (
    AttentionBackend,
    ChatRenderer,
    DeclaredFormat,
    Executor,
    GrammarBackend,
    KVConnector,
    LinearKernel,
    Loader,
    LogitsProcessor,
    OpSpec,
    OrderPolicy,
    ParserFormat,
    Platform,
    Proposer,
    ProposerSpec,
    QuantScheme,
    Scheduler,
    Spec,
    StructuredOutput,
    Tokenizer,
)
from lmkit.kinds.op import ExpertKernel
from lmkit_http.dialect import Dialect

MADE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # kind -> what its target is given: by place, by name
    "executor": (("config", "resolved", "checkpoint", "progress"), ()),
    "tokenizer": (("path",), ("eos_token_ids",)),
    "renderer": (("source", "special_tokens"), ("tools_source", "control_tokens", "tokenizer", "trying")),
    "template": (("path", "checkpoint"), ()),
    "grammar": (("vocabulary",), ()),
    "structured_output": (("backends", "open_vocabulary", "max_rows"), ()),
    "kv_connector": (("checkpoint", "resolved", "kv"), ()),
    **dict.fromkeys(("platform", "attention", "op", "logits_processor", "proposer", "dialect", "loader"), ((), ())),
}
METHODS: dict[str, type] = {
    "platform": Platform, "attention": AttentionBackend, "quantization": QuantScheme, "executor": Executor,
    "tokenizer": Tokenizer, "renderer": ChatRenderer, "grammar": GrammarBackend, "loader": Loader,
    "structured_output": StructuredOutput, "kv_connector": KVConnector, "logits_processor": LogitsProcessor,
    "proposer": Proposer, "dialect": Dialect,
}  # fmt: skip
OPS: dict[str, type] = {"linear": LinearKernel, "moe": ExpertKernel}


def protocol_of(spec: Spec, kind: str, target: Any) -> type | None:
    """What the target, or what it makes, must be; None where the kind leaves that open."""
    if isinstance(spec, OpSpec):
        return OPS.get(spec.op)
    if isinstance(spec, ProposerSpec) and spec.draft is not None:
        return None  # it runs a model: DraftConformance
    if kind == "scheduler":
        return Scheduler if hasattr(target, "schedule") else OrderPolicy
    if kind in ("tool_parser", "reasoning_parser"):
        declared = isinstance(target, DeclaredFormat) or (
            isinstance(target, type) and issubclass(target, DeclaredFormat)
        )
        return None if declared else ParserFormat
    return METHODS.get(kind)


def wrong_signatures(spec: Spec, kind: str, target: Any, options: Collection[str]) -> list[str]:
    """What cannot be called as it is going to be; `options`: names of those that the target is made with."""
    found = []
    if kind in MADE and not (isinstance(spec, ProposerSpec) and spec.draft is not None):
        places, names = MADE[kind]
        found += unbound(target, spec.target, places, {*names, *options})
    made = made_by(target)
    protocol = protocol_of(spec, kind, target)
    if protocol is not None and made is not None:
        found += wrong_methods(made, protocol, left_out(spec))
    return found


def left_out(spec: Spec) -> set[str]:
    """Arguments that are passed to who declares a feature, and need not be taken by others."""
    features = getattr(spec, "features", None)
    return set() if features is None else {"sinks"} - set(features)


def made_by(target: Any) -> Any:
    """The class whose methods are called: of the target, or of what its annotation says that it makes; else None."""
    if not isinstance(target, FunctionType):
        return target
    try:
        made = get_type_hints(target).get("return")
    except NameError:  # of what only types need
        return None
    return made if isinstance(made, type) else None


def wrong_methods(made: Any, protocol: type, without: Collection[str] = ()) -> list[str]:
    """Methods of `protocol` that a class, or an object, lacks, or that cannot be called as it writes them."""
    found = []
    for name, wanted in methods(protocol):
        given = inspect.getattr_static(made, name, None)
        owner = made.__name__ if isinstance(made, type) else type(made).__name__
        if given is None:
            found.append(f"{owner} has no {name}{inspect.signature(wanted)}")
        elif not callable(getattr(made, name, None)):
            found.append(f"{owner}.{name} is no method")
        elif inspect.iscoroutinefunction(wanted) != inspect.iscoroutinefunction(getattr(made, name)):
            found.append(f"{owner}.{name} must {'' if inspect.iscoroutinefunction(wanted) else 'not '}be `async`")
        else:
            bound = not isinstance(made, type) or isinstance(given, staticmethod | classmethod)
            parameters = [p for p in list(inspect.signature(wanted).parameters.values())[1:] if p.name not in without]
            places = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
            names = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
            short = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
            prefix = () if bound else ("self",)
            method = getattr(made, name)
            for each, known in ((places, names), (short, set())):
                problem = unbound(method, f"{owner}.{name}", (*prefix, *each), known)
                found += [text for text in problem if text not in found]
    return found


def methods(protocol: type) -> Iterator[tuple[str, FunctionType]]:
    """What a protocol or an abstract class asks for: of a protocol all that it writes, of a class what has no default,
    and what may be written anew, where it is."""
    for base in protocol.__mro__:
        if base in (object, Protocol) or base.__module__ in ("typing", "abc"):
            continue
        for name, value in vars(base).items():
            function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if isinstance(function, FunctionType) and not name.startswith("_"):
                yield name, function


def unbound(function: Any, owner: str, places: Collection[str], names: Collection[str]) -> list[str]:
    """Why it cannot be called with so many arguments by place, and those by name."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of compiled code
        return []
    try:
        signature.bind(*places, **dict.fromkeys(names))
    except TypeError as e:
        called = ", ".join([*places, *(f"{name}=" for name in sorted(names))])
        return [f"{owner}{signature} is called with ({called}): {e}"]
    return []
