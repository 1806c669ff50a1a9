"""A scheduler and the hash-model, stepped by hand: for tests that look at plans."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lmkit.api import Gate, KVConfig, OrderPolicy, RequestView, SamplingParams, SchedLimits, StepPlan, TokenEvent
from lmkit.scheduling.hashes import root_hash
from lmkit.scheduling.request import Request
from lmkit.scheduling.scheduler import Scheduler

from lmkit_testing.hash_model import HashExecutor, hash_kv


class ArrivalOrder:
    """The policy that tests use: priority, then arrival."""

    def admit_key(self, r: RequestView) -> tuple:
        return (r.priority, r.arrival)

    def victim_key(self, r: RequestView) -> tuple:
        return (r.priority, r.arrival)


def make_request(
    rid: str,
    tokens: Sequence[int],
    max_tokens: int = 8,
    *,
    priority: int = 0,
    arrival: float = 0.0,
    adapter: str | None = None,
    salt: str | None = None,
    gates: Sequence[Gate] = (),
    **params,
) -> Request:
    """As intake makes them. `params` are those of SamplingParams; greedy by default."""
    return Request(
        id=rid,
        params=SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **params}),
        num_prompt_tokens=len(tokens),
        tokens=list(tokens),
        priority=priority,
        arrival=arrival,
        adapter=adapter,
        root_hash=root_hash("model", "float32", adapter, salt),
        gates=list(gates),
    )


class Stepper:
    """Runs plans on the hash-model; `limits` are fields of SchedLimits. Checks the invariants around each step."""

    def __init__(
        self, kv: KVConfig | None = None, *, policy: OrderPolicy | None = None, depth: int = 1, executor=None, **limits
    ) -> None:
        kv = kv or hash_kv(64, 4)
        self.executor = HashExecutor(
            kv, depth=depth, **{"eos_token_ids": limits.get("eos_token_ids", ()), **(executor or {})}
        )
        defaults = {"max_tokens": 64, "max_rows": 8, "max_length": 256, "depth": depth, "watermark": 0.0}
        self.scheduler = Scheduler(SchedLimits(**{**defaults, **limits}), kv, policy or ArrivalOrder())
        self.pools = [group.pool for group in self.scheduler.groups]
        self.events: dict[str, list[TokenEvent]] = {}
        self._pending: deque = deque()

    def add(self, rid: str, tokens: Sequence[int], max_tokens: int = 8, **options) -> Request:
        r = make_request(rid, tokens, max_tokens, **options)
        self.scheduler.add(r)
        return r

    def step(self) -> StepPlan:
        """Schedule a step and run it; take in the result that is `depth` - 1 steps old."""
        plan = self.scheduler.schedule()
        self.scheduler.check()
        if plan.rows or plan.gone:
            self.executor.forward(plan)
            self._pending.append((plan, self.executor.sample(plan.step, None)))
        idle = not plan.rows or not self.scheduler.requests
        if self._pending and (idle or len(self._pending) >= self.executor.depth):
            done, future = self._pending.popleft()
            for event in self.scheduler.update(done, future.result()):
                self.events.setdefault(event.id, []).append(event)
            self.scheduler.check()
        return plan

    def run(self, max_steps: int = 1000) -> int:
        """Step until nothing is left. Returns the number of steps."""
        for n in range(max_steps):
            if not self.scheduler.has_work() and not self._pending:
                return n
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps")

    def tokens(self, rid: str) -> list[int]:
        return [token for event in self.events.get(rid, []) for token in event.tokens]

    def table(self, rid: str, group: int = 0) -> list[int]:
        """Block ids of a running request."""
        table = self.scheduler.requests[rid].table
        return list(table.blocks[group]) if table else []
