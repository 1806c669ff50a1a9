"""What a kind of plugin is, and the parts that all kinds are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lmkit.contracts.refusal import Refusal
from lmkit.contracts.specs import Ref, SelectRequest, Spec

if TYPE_CHECKING:
    from lmkit.contracts.checkpoint import Checkpoint
    from lmkit.contracts.config import EngineConfig
    from lmkit.contracts.device import DeviceInfo
    from lmkit.contracts.model import ModelInfo

Refusals = Iterator[Refusal]


def listed(names: Iterable[object]) -> str:
    """ "{a,b}", for the texts of refusals."""
    return "{" + ",".join(sorted(map(str, names))) + "}"


def none(spec: Spec, request: SelectRequest) -> Refusals:
    """No refusals: whatever is registered serves any request of its kind."""
    return iter(())


def no_claim(spec: Spec, request: SelectRequest) -> Claim | None:
    """Nothing in the request speaks for one candidate more than for another."""
    return None


@dataclass(frozen=True, slots=True)
class Claim:
    """What makes `auto` take a candidate. Claims of the lowest rank come first."""

    rank: int
    why: str
    length: int = 0  # of the glob that fits: a longer one knows the model better


@dataclass(slots=True)
class Known:
    """What the resolver has settled so far. Reading what no step has set yet is an AttributeError: see `Kind.needs`."""

    config: EngineConfig
    device: DeviceInfo | None = None
    checkpoint: Checkpoint = field(init=False)
    files: frozenset[str] = field(init=False)  # names of what lies in the tokenizer's folder
    info: ModelInfo = field(init=False)
    quantization: frozenset[str] | None = None  # what the model runs with; None = any
    dtype: str = field(init=False)
    kv_dtype: str = field(init=False)
    formats: tuple[str, ...] = ("plain",)  # that the weights may be in
    templates: Mapping[str, str] = field(init=False)  # chat templates, by name


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of plugin. Its hook, entry-point group, options, `explain` topic and page of reference follow from this.

    A kind with `ask` is chosen by the resolver, in the order that `needs` gives; where it takes "offered" the plan can
    be without one, and the user may say "none". A kind without `ask` is looked up when it is used, or found by the
    resolver (platform, model). `doc` is the text of the hook, with an example that the tests install and run. A kind
    stands in the tuple `lmkit.kinds.KINDS`, and its public names in `lmkit.api`; nothing else in the core knows of it
    but its consumer.
    """

    name: str  # "attention": the group is "lmkit.attention", and options are attention.NAME.OPTION
    spec: type[Spec]  # what is registered
    hook: str  # the registration hook: () -> Iterable[spec]
    used_by: str  # the module that loads the target of what was chosen: a kind without a consumer is none
    doc: str | None
    interface: int = 1  # raised by changes that break plugins
    adapter: Ref = ""  # (target of the interface before) -> a target of this one; "": plugins of that are refused
    request: type[SelectRequest] = SelectRequest  # what is asked of a candidate
    refusals: Callable[[Any, Any], Refusals] = none  # stage 7: (spec, request)
    auto_refusals: Callable[[Any, Any], Refusals] = none  # stage 7 where the user named none
    claim: Callable[[Any, Any], Claim | None] = no_claim  # (spec, request): why `auto` prefers it
    needs: tuple[str, ...] = ()  # steps of the resolver that come before: other kinds, "checkpoint", "files", "dtype"
    ask: Callable[[Known], Sequence[SelectRequest]] | None = None  # what one choice must serve; () = none is needed
    setting: str = ""  # key of the configuration under which users name one: "sched.policy"; the flag is --KIND
    words: str = "auto or a plugin's name"  # what they may say there, for help
    lacking: Mapping[str, str] = field(default_factory=dict)  # feature -> why a plugin that lacks it cannot serve
    takes: Literal["one", "offered", "all"] = "one"  # one; the best if any can serve; all that can, best first

    @property
    def group(self) -> str:
        """The entry-point group."""
        return f"lmkit.{self.name}"


def in_order(needs: Mapping[str, Sequence[str]]) -> list[str]:
    """The names, each after those that it needs, and otherwise as given."""
    found: dict[str, None] = {}

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle of needs: {' -> '.join((*path, name))}"
        for needed in needs[name]:
            visit(needed, (*path, name))
        found.setdefault(name)

    for name in needs:
        visit(name, ())
    return list(found)
