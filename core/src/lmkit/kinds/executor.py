"""Where workers run: in this process, in others, on other hosts.

Example, entry point `[project.entry-points."lmkit.executor"] threads = "toy_executor.hooks"`::

    from lmkit.api import ExecutorSpec, hookimpl


    @hookimpl
    def lmkit_executors():
        yield ExecutorSpec(
            name="threads", summary="One worker per thread", target="toy_executor.run:Threads", max_ranks=8,
        )
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Protocol

from lmkit.contracts.errors import ConfigError
from lmkit.contracts.refusal import Refusal
from lmkit.contracts.specs import SelectRequest, Spec
from lmkit.kinds.base import Kind, Known, Refusals, listed

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from lmkit.contracts.execution import Control, Failure, KVConfig, Reply, WorkerFacts
    from lmkit.contracts.scheduling import SchedLimits
    from lmkit.contracts.wire import GrammarMasks, StepPlan, StepResult


class Executor(Protocol):
    """Runs the workers. `depth` steps may be in flight."""

    depth: int

    def start(self) -> WorkerFacts: ...
    def configure_kv(self, kv: KVConfig, limits: SchedLimits) -> None:
        """Reserves the blocks, and what steps within `limits` need. Called once, after `start`."""

    def forward(self, plan: StepPlan) -> None:
        """Returns at once (uniproc on CPU: after the pass). A plan without rows is a diff to apply."""

    def sample(self, step: int, masks: GrammarMasks | None) -> Future[StepResult]:
        """Called once after each `forward`, in order. The future carries what the step raised.

        Then the engine sends ForgetRows and computes the rows again, one by one, to learn which is at fault; or, when
        that is refused, ResetCache, and all running requests end. Who cannot go on after that reports a Failure.
        """

    def control(self, command: Control) -> list[Reply]: ...
    def inspect_adapter(self, path: str) -> str:
        """The digest of what is in the folder of an adapter, in 16 hex digits. From any thread, also during a step.

        Raises CheckpointError, UnsupportedModel or WeightMismatch for one that does not fit the model, which is known
        from its headers: nothing has been loaded.
        """

    def on_failure(self, callback: Callable[[Failure], None]) -> None:
        """`callback` is called once, from any thread, when steps can no longer be run: the engine then ends."""

    def close(self) -> None:
        """Idempotent, also after a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSpec(Spec):
    """target: (EngineConfig, ResolvedPlan, Checkpoint, Progress | None, **options) -> Executor."""

    max_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorRequest(SelectRequest):
    """What executors are asked for."""

    kind: str = "executor"
    num_ranks: int = 1


def refusals(spec: ExecutorSpec, request: ExecutorRequest) -> Refusals:
    if request.num_ranks > spec.max_ranks:
        yield Refusal("ranks", f"at most {spec.max_ranks}", str(request.num_ranks), "--tp 1 --pp 1")


def ask(known: Known) -> list[ExecutorRequest]:
    parallel, experts = known.config.parallel, {linear.experts for linear in known.info.linears if linear.experts}
    tp, ep = parallel.tp, parallel.ep
    most, fits = (gcd(n, *experts) if experts else 1 for n in (tp, ep))
    if most % ep:
        what = f"--ep {ep} must divide the ranks (--tp {tp}) and the experts of a layer ({listed(experts or {'none'})})"
        raise ConfigError(what, fix=f"--tp {fits} --ep {fits}" if fits > most else f"--ep {most}")
    return [ExecutorRequest(num_ranks=parallel.tp * parallel.pp, device=known.device)]


KIND = Kind(
    "executor",
    spec=ExecutorSpec,
    hook="lmkit_executors",
    used_by="lmkit.engine.build",
    request=ExecutorRequest,
    refusals=refusals,
    needs=("model",),
    ask=ask,
    setting="parallel.executor",
    words="auto or an executor plugin's name",
    doc=__doc__,
)
