"""After `tokens` tokens of an answer, the tokens of `then` follow, one a step; behind them the model is free again."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Options:
    """What a request says under `budget`. TypeError and ValueError refuse it: over HTTP with a 400 that says why."""

    tokens: int
    then: list

    def __post_init__(self):
        if type(self.tokens) is not int or self.tokens < 0:
            raise ValueError(f"tokens is {self.tokens!r}, needs a number of tokens, 0 or more")
        if not isinstance(self.then, list) or not self.then or not all(type(t) is int and t >= 0 for t in self.then):
            raise ValueError(f"then is {self.then!r}, needs a list of token ids, at least one")


class Budget:
    """Contract: lmkit.api.LogitsProcessor. One object serves all rows of a worker: what belongs to a row is kept by
    its slot, and let go when the row leaves, for the slot is then another's."""

    stage = "logits"  # before penalties and temperature: what is banned here cannot be drawn by any parameter
    keeps_argmax = False  # greedy rows are asked, too
    options = Options

    def __init__(self):
        self._rows = {}  # slot -> (position of the first token of `then`, then)

    def add(self, slot, params, prompt):
        """A row begins, or comes back after it was preempted: so the budget is counted from the end of the prompt, and
        not in steps that were seen. False: nothing is to be done for this row."""
        asked = Options(**params.extra["budget"])
        self._rows[slot] = (len(prompt) + asked.tokens, asked.then)
        return True

    def remove(self, slot):
        del self._rows[slot]

    def apply(self, logits, ctx):
        """Of each line of logits [S, vocabulary] `ctx` tells the row's slot, and the place of what is drawn in its
        text; the text itself is `ctx.tokens(line)`."""
        for line, (slot, position) in enumerate(zip(ctx.slots, ctx.positions, strict=True)):
            first, then = self._rows[slot]
            place = position - first
            if 0 <= place < len(then) and then[place] < logits.shape[1]:
                kept = logits[line, then[place]].clone()
                logits[line] = -float("inf")
                logits[line, then[place]] = kept
