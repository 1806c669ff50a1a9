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

from lmkit.contracts.refusal import Refusal
from lmkit.contracts.specs import SelectRequest, Spec
from lmkit.kinds.base import Kind, Known, Refusals


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSpec(Spec):
    """target: an Executor class."""

    max_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorRequest(SelectRequest):
    kind: str = "executor"
    num_ranks: int = 1


def refusals(spec: ExecutorSpec, request: ExecutorRequest) -> Refusals:
    if request.num_ranks > spec.max_ranks:
        yield Refusal("ranks", f"at most {spec.max_ranks}", str(request.num_ranks), "--tp 1 --pp 1")


def ask(known: Known) -> list[ExecutorRequest]:
    parallel = known.config.parallel
    return [ExecutorRequest(num_ranks=parallel.tp * parallel.pp, device=known.device)]


KIND = Kind(
    "executor",
    spec=ExecutorSpec,
    hook="lmkit_executors",
    used_by="lmkit.engine.build",
    request=ExecutorRequest,
    refusals=refusals,
    ask=ask,
    setting="parallel.executor",
    words="auto or an executor plugin's name",
    doc=__doc__,
)
