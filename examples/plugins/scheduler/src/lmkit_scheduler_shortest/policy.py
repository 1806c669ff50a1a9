"""Short prompts first. The order is two keys over what `lmkit.api.RequestView` shows of a request."""


class Shortest:
    """Contract: lmkit.api.OrderPolicy. Made as Shortest(**options).

    A key is asked for once, when a request enters a queue, so it cannot grow as the request waits. It need not: that
    all who wait get older together changes no order. What counts is when each came, so a request's arrival, in
    seconds, is weighed as tokens: one that came a second later must be `aging` tokens shorter to go first.
    """

    def __init__(self, aging=1000.0):
        self._aging = aging

    def admit_key(self, r):
        """The smallest is admitted first. Priority stays above all; `order` settles what is equal."""
        return (r.priority, r.arrival * self._aging + r.num_prompt_tokens, r.order)

    def victim_key(self, r):
        """The largest is preempted first: who came in last by the same order, so that the first always finishes."""
        return self.admit_key(r)
