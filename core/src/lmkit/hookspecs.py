"""Every hook a plugin can implement, with an example that runs: the tests extract each one, install it and use it.

Registration hooks (one per kind) take no arguments, return specs, and are pure: the host may call them again. Behaviour
hooks belong to the group `lmkit.extension`, and to any plugin that was selected. No hook is called per step or per
token: such work goes through the selected object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pluggy import HookspecMarker

from lmkit.kinds import KINDS, Kind

if TYPE_CHECKING:
    from lmkit.api import (
        BenchmarkSpec,
        Checkpoint,
        CheckpointOptions,
        ConfigProposal,
        DoctorCheck,
        ModelInfo,
        ResolvedPlan,
    )
    from lmkit.config import EngineConfig

hookspec = HookspecMarker("lmkit")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What observers learn of an engine. Set by the engine's builder."""

    model: str
    plan: ResolvedPlan
    num_kv_tokens: int = 0
    max_length: int = 0


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One finished request. Times are seconds of a monotonic clock since arrival."""

    id: str
    finish: str
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    first_token: float | None = None
    total: float = 0.0
    extra: Mapping[str, object] = field(default_factory=dict)


class LmkitSpecs(Protocol):
    """The hooks: those of behaviour as written here, and one of registration for each kind."""

    @hookspec
    def lmkit_configure(
        self, config: EngineConfig, plan: ResolvedPlan, info: ModelInfo
    ) -> Iterable[ConfigProposal] | None:
        """Propose configuration values once device, model and implementations are known; the user's values win.

        `plan` holds the choices made so far. Keys that can be proposed: `lmkit.plugins.proposals.PROPOSABLE`.

        Example, entry point `[project.entry-points."lmkit.extension"] big_steps = "big_steps.hooks"`::

            from lmkit.api import ConfigProposal, hookimpl


            @hookimpl
            def lmkit_configure(config, plan, info):
                if info.num_parameters < 10_000_000:
                    yield ConfigProposal("sched.max_tokens", 1024, "a small model has time for long steps")
        """

    @hookspec(firstresult=True)
    def lmkit_resolve_checkpoint(self, ref: str, options: CheckpointOptions) -> Checkpoint | None:
        """Find a checkpoint by what the user wrote; None = not mine, ask the next. Nothing heavy is read.

        Example, entry point `[project.entry-points."lmkit.extension"] toy_store = "toy_store.hooks"`::

            from pathlib import Path

            from lmkit.api import Checkpoint, hookimpl


            @hookimpl
            def lmkit_resolve_checkpoint(ref, options):
                if not ref.startswith("toy://"):
                    return None
                config = {"architectures": ["ToyForCausalLM"]}
                return Checkpoint(ref=ref, path=Path(), format="toy", config=config)
        """

    @hookspec
    def lmkit_engine_started(self, info: EngineInfo) -> None:
        """An engine is ready. An observer: exceptions are logged, never fatal.

        Example, entry point `[project.entry-points."lmkit.extension"] toy_log = "toy_log.hooks"`::

            import logging

            from lmkit.api import hookimpl


            @hookimpl
            def lmkit_engine_started(info):
                logging.getLogger("toy_log").info("engine for %s is up", info.model)
        """

    @hookspec
    def lmkit_request_finished(self, stats: RequestStats) -> None:
        """A request finished. An observer; called only if somebody implements it.

        Example, entry point `[project.entry-points."lmkit.extension"] toy_stats = "toy_stats.hooks"`::

            import logging

            from lmkit.api import hookimpl


            @hookimpl
            def lmkit_request_finished(stats):
                logging.getLogger("toy_stats").info("%s: %d tokens", stats.id, stats.num_output_tokens)
        """

    @hookspec
    def lmkit_engine_stopping(self, info: EngineInfo) -> None:
        """An engine is about to stop. An observer.

        Example, entry point `[project.entry-points."lmkit.extension"] toy_bye = "toy_bye.hooks"`::

            import logging

            from lmkit.api import hookimpl


            @hookimpl
            def lmkit_engine_stopping(info):
                logging.getLogger("toy_bye").info("engine for %s stops", info.model)
        """

    @hookspec
    def lmkit_benchmarks(self) -> Iterable[BenchmarkSpec]:
        """Kernels that `lmkit bench kernels` measures beside the registered linear and attention kernels.

        Example, entry point `[project.entry-points."lmkit.extension"] toy_speed = "toy_speed.hooks"`::

            from lmkit.api import BenchmarkCase, BenchmarkSpec, hookimpl


            def cases():
                data = bytes(1 << 20)
                yield BenchmarkCase(name="count zeros", run=lambda: data.count(0), bytes=len(data))


            @hookimpl
            def lmkit_benchmarks():
                yield BenchmarkSpec(name="toy", summary="Counting", target=f"{__name__}:cases")
        """

    @hookspec
    def lmkit_doctor_checks(self) -> Iterable[DoctorCheck]:
        """Health checks run by `lmkit plugins doctor`: a function that returns None or the problem as a string.

        Example, entry point `[project.entry-points."lmkit.extension"] toy_health = "toy_health.hooks"`::

            from lmkit.api import DoctorCheck, hookimpl


            def battery():
                return None


            @hookimpl
            def lmkit_doctor_checks():
                yield DoctorCheck(name="battery", summary="The toy has power", target=f"{__name__}:battery")
        """


def _registration(kind: Kind) -> Callable[..., Any]:
    """The hook of a kind: no arguments, an iterable of its specs."""

    def hook(self: Any) -> Any: ...

    hook.__name__, hook.__qualname__, hook.__doc__ = kind.hook, f"LmkitSpecs.{kind.hook}", kind.doc
    hook.__annotations__ = {"return": f"Iterable[{kind.spec.__name__}]"}
    return hookspec(hook)


for _kind in KINDS:
    setattr(LmkitSpecs, _kind.hook, _registration(_kind))


def hooks() -> dict[str, Callable[..., Any]]:
    """All hooks by name: of registration, in the order of kinds, then of behaviour."""
    registration = [kind.hook for kind in KINDS]
    behaviour = [name for name in vars(LmkitSpecs) if name.startswith("lmkit_") and name not in registration]
    return {name: getattr(LmkitSpecs, name) for name in (*registration, *behaviour)}
