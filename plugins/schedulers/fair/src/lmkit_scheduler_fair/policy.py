"""Tokens shared among tenants: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), in which a request costs
its prompt when it comes and its answer as it is drawn, as in the virtual token counters of Sheng et al. (OSDI 2024,
arXiv:2401.00588)."""

from __future__ import annotations

from collections import OrderedDict

from lmkit.api import RequestView

REMEMBERED = 1 << 16  # requests whose place is known; more than an engine lets wait


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
        self._places: OrderedDict[str, float] = OrderedDict()  # request -> its place
        self._running: dict[str, tuple[RequestView, int]] = {}  # admitted, with the tokens that were paid for

    def admit_key(self, r: RequestView) -> tuple:
        return (r.priority, self._place(r), r.order)

    def victim_key(self, r: RequestView) -> tuple:
        place = self._place(r)
        self._now = max(self._now, place)
        self._running.setdefault(r.id, (r, r.num_output))
        return (r.priority, place, r.order)

    def _place(self, r: RequestView) -> float:
        """Given once: a request that is preempted comes back to it."""
        if r.id in self._places:
            return self._places[r.id]
        self._settle()
        place = self._places[r.id] = max(self._now, self._accounts.get(r.tenant, 0.0))
        self._accounts[r.tenant] = place + r.num_prompt_tokens
        while len(self._places) > REMEMBERED:
            self._places.popitem(last=False)
        return place

    def _settle(self) -> None:
        """Answers are paid for as far as they are drawn; accounts that owe nothing are closed."""
        for id, (r, paid) in list(self._running.items()):
            self._accounts[r.tenant] = self._accounts.get(r.tenant, self._now) + self._output * (r.num_output - paid)
            self._running[id] = (r, r.num_output)
            if r.finish is not None:
                del self._running[id]
                self._places.pop(id, None)
        self._accounts = {tenant: place for tenant, place in self._accounts.items() if place > self._now}
