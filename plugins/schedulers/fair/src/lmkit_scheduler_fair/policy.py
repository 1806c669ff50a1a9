"""Tokens shared among tenants: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), in which a request costs
its prompt when it comes and its answer as it is drawn, as in the virtual token counters of Sheng et al. (OSDI 2024,
arXiv:2401.00588)."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from lmkit.api import RequestView

REMEMBERED = 1 << 16  # requests whose place is known; more than an engine lets wait
LOOKS = 64  # running requests whose answers are paid for at a time: so it costs the same beside any number
PATIENCE = 3  # times that a request gives way without getting on
PROGRESS = 16  # tokens after which it may give way once more


@dataclass(slots=True)
class _Account:
    """The service that one tenant was given, in tokens of a prompt."""

    next: float = 0.0  # where its next request is placed, if that is not past
    drawn: float = 0.0  # what its answers have cost so far
    begun: float = 0.0  # the place of its latest request that was admitted, without what answers cost
    ended: float = 0.0  # the same with the prompt of that request


@dataclass(frozen=True, slots=True)
class _Place:
    start: float  # what the account said when the request came
    drawn: float  # what the tenant's answers had cost then


class Fair:
    """Each tenant has an account of the tokens it was given; a request's place is what the account says as it comes.

    While a request waits its place moves back with what the tenant's running answers cost. The virtual time is the
    least that a tenant with running requests has been given. A tenant that comes after a pause begins there: what it
    left unused is not saved up.
    """

    def __init__(self, output: float = 4.0) -> None:
        """`output`: what a token of an answer costs, in tokens of a prompt."""
        self._output = output
        self._now = 0.0
        self._accounts: dict[str, _Account] = {}
        self._many = 64  # accounts, at which those that owe nothing are closed
        self._places: OrderedDict[str, _Place] = OrderedDict()
        self._ranks: dict[str, float] = {}  # request -> where it waits, if that is not its place
        self._running: dict[str, int] = {}  # admitted, with the answers' tokens that were paid for
        self._turn: deque[RequestView] = deque()  # the same, whose turn to pay is next in front
        self._gave_way: dict[str, tuple[int, int]] = {}  # request -> how often since it got on, its tokens then

    def admit_key(self, r: RequestView) -> tuple:
        start = self._place(r).start
        return (r.priority, self._ranks.get(r.id, start), r.order)

    def victim_key(self, r: RequestView) -> tuple:
        place, account = self._place(r), self._account(r.tenant)
        account.begun = max(account.begun, place.start - place.drawn)
        account.ended = max(account.ended, place.start - place.drawn + r.num_prompt_tokens)
        if r.id not in self._running:
            self._running[r.id] = r.num_output
            self._turn.append(r)
        self._ranks.pop(r.id, None)
        self._advance()
        return (r.priority, place.start, r.order)

    def goes_first(self, waiting: Sequence[RequestView], running: Sequence[RequestView]) -> RequestView | None:
        """The request of the tenant that was given least, of those with the least priority number; None where it is
        first anyhow and its tenant has a row."""
        self._settle()
        heads: dict[str, RequestView] = {}  # tenant -> its first request
        for r in waiting:
            if r.priority != waiting[0].priority:
                break
            heads.setdefault(r.tenant, r)
        rows = {r.tenant for r in running}
        if not heads or (len(heads) == 1 and rows <= heads.keys()):
            return None

        def due(r: RequestView) -> tuple[float, int]:
            """The service of the request's tenant; one that has a row is charged for what it was admitted with."""
            account = self._account(r.tenant)
            return (max(self._given(r), account.ended + account.drawn if r.tenant in rows else 0.0), r.order)

        first, best = waiting[0], min(heads.values(), key=due)
        if best is not first:
            self._ranks[best.id] = self._ranks.get(first.id, self._place(first).start) - 1
            return best
        return best if best.tenant not in rows else None

    def gives_way(self, first: RequestView, running: Sequence[RequestView]) -> RequestView | None:
        """The last one of less priority. Else the last one of the tenant that has most rows, of those that have at
        least two more than the tenant of `first` and were given no less; then it is next."""
        if running and running[-1].priority > first.priority:
            return running[-1]
        rows, given = Counter([r.tenant for r in running]), self._given(first)
        for tenant, num in rows.most_common():
            account = self._account(tenant)
            if num <= rows[first.tenant] + 1:
                break
            if given > account.ended + account.drawn:
                continue
            for r in reversed(running):
                if r.tenant == tenant and r.priority == first.priority and self._may_give_way(r):
                    rank = self._ranks.get(first.id, self._place(first).start)
                    self._ranks[r.id] = max(self._ranks.get(r.id, self._place(r).start), rank + 1)
                    return r
        return None

    def _may_give_way(self, r: RequestView) -> bool:
        times, tokens = self._gave_way.get(r.id, (0, r.num_output))
        if r.num_output >= tokens + PROGRESS:
            times, tokens = 0, r.num_output
        if times >= PATIENCE:
            return False
        self._gave_way[r.id] = (times + 1, tokens)
        return True

    def _account(self, tenant: str) -> _Account:
        return self._accounts.setdefault(tenant, _Account(begun=self._now, ended=self._now))

    def _given(self, r: RequestView) -> float:
        """The service that the tenant was given before `r`, as far as it is known by now."""
        place = self._place(r)
        return place.start + max(0.0, self._account(r.tenant).drawn - place.drawn)

    def _place(self, r: RequestView) -> _Place:
        """Given once: a request that is preempted comes back to it."""
        if r.id in self._places:
            return self._places[r.id]
        self._settle()
        account = self._account(r.tenant)
        place = self._places[r.id] = _Place(max(self._now, account.next), account.drawn)
        account.next = place.start + r.num_prompt_tokens
        while len(self._places) > REMEMBERED:
            id, _ = self._places.popitem(last=False)
            self._ranks.pop(id, None)
        return place

    def _settle(self) -> None:
        """Answers are paid for as far as they are drawn, some at a time; accounts that owe nothing are closed."""
        for _ in range(min(LOOKS, len(self._turn))):
            r = self._turn.popleft()
            cost = self._output * (r.num_output - self._running[r.id])
            account = self._account(r.tenant)
            account.next = max(account.next, self._now) + cost
            account.drawn += cost
            if r.finish is None:
                self._running[r.id] = r.num_output
                self._turn.append(r)
            else:
                del self._running[r.id]
                self._places.pop(r.id, None)
                self._ranks.pop(r.id, None)
                self._gave_way.pop(r.id, None)
        self._advance()
        if len(self._accounts) > self._many:
            busy = {r.tenant for r in self._turn}
            self._accounts = {t: a for t, a in self._accounts.items() if a.next > self._now or t in busy}
            self._many = 64 + 2 * len(self._accounts)

    def _advance(self) -> None:
        given = [a.begun + a.drawn for a in (self._account(t) for t in {r.tenant for r in self._turn})]
        self._now = max(self._now, min(given, default=self._now))
