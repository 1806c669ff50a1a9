"""Tokens shared among tenants: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), in which a request costs
its prompt when it comes and its answer as it is drawn, as in the virtual token counters of Sheng et al. (OSDI 2024,
arXiv:2401.00588)."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence

from lmkit.api import RequestView

REMEMBERED = 1 << 16  # requests whose place is known; more than an engine lets wait
LOOKS = 16  # running requests whose answers are paid for when a request comes: so it costs the same beside any number
PATIENCE = 3  # times that a request gives way


class Fair:
    """Each tenant has an account of the tokens it was given; a request's place is what the account says as it comes.

    The virtual time is the place of whoever was admitted last. A tenant that comes after a pause begins there: what
    it left unused is not saved up.
    """

    def __init__(self, output: float = 4.0) -> None:
        """`output`: what a token of an answer costs, in tokens of a prompt."""
        self._output = output
        self._now = 0.0
        self._accounts: dict[str, float] = {}  # tenant -> where its next request is placed, if that is not past
        self._many = 64  # accounts, at which those that owe nothing are closed
        self._places: OrderedDict[str, float] = OrderedDict()  # request -> its place
        self._running: dict[str, int] = {}  # admitted, with the answers' tokens that were paid for
        self._turn: deque[RequestView] = deque()  # the same, whose turn to pay is next in front
        self._gave_way: Counter[str] = Counter()
        self._light: set[str] = set()  # requests that wait, of tenants that owed nothing when they came

    def admit_key(self, r: RequestView) -> tuple:
        return (r.priority, self._place(r), r.order)

    def victim_key(self, r: RequestView) -> tuple:
        place = self._place(r)
        self._now = max(self._now, place)
        if r.id not in self._running:
            self._running[r.id] = r.num_output
            self._turn.append(r)
            self._light.discard(r.id)
        return (r.priority, place, r.order)

    def gives_way(self, first: RequestView, running: Sequence[RequestView]) -> RequestView | None:
        """The last one of less priority. Else, for a tenant that owed nothing when `first` came, the last one of a
        tenant that has more than half of the rows; then it is next. Where many share the rows one is free soon."""
        if running and running[-1].priority > first.priority:
            return running[-1]
        if first.id not in self._light:
            return None
        rows = Counter([r.tenant for r in running])
        tenant = next((tenant for tenant, num in rows.items() if 2 * num > len(running)), None)
        if tenant is None or tenant == first.tenant:
            return None
        for r in reversed(running):
            if r.tenant == tenant and r.priority == first.priority and self._gave_way[r.id] < PATIENCE:
                self._gave_way[r.id] += 1
                self._places[r.id] = max(self._place(r), self._place(first) + 1)
                return r
        return None

    def _place(self, r: RequestView) -> float:
        """Given once: a request that is preempted comes back to it."""
        if r.id in self._places:
            return self._places[r.id]
        self._settle()
        account = self._accounts.get(r.tenant, 0.0)
        if account <= self._now:
            self._light.add(r.id)
        place = self._places[r.id] = max(self._now, account)
        self._accounts[r.tenant] = place + r.num_prompt_tokens
        while len(self._places) > REMEMBERED:
            id, _ = self._places.popitem(last=False)
            self._light.discard(id)
        return place

    def _settle(self) -> None:
        """Answers are paid for as far as they are drawn, some at a time; accounts that owe nothing are closed."""
        for _ in range(min(LOOKS, len(self._turn))):
            r = self._turn.popleft()
            paid = self._running[r.id]
            account = self._accounts.get(r.tenant, self._now)
            self._accounts[r.tenant] = account + self._output * (r.num_output - paid)
            if r.finish is None:
                self._running[r.id] = r.num_output
                self._turn.append(r)
            else:
                del self._running[r.id]
                self._places.pop(r.id, None)
                self._gave_way.pop(r.id, None)
        if len(self._accounts) > self._many:
            self._accounts = {tenant: place for tenant, place in self._accounts.items() if place > self._now}
            self._many = 64 + 2 * len(self._accounts)
