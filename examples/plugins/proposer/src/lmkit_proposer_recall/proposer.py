"""What followed the last tokens before, in whichever request: good where answers resemble each other."""

from collections import OrderedDict

LEARNED = 64  # the last tokens of a text, of which a step adds a few at most; of a long prompt no more than its end


class Recall:
    """Contract: lmkit.api.Proposer. The model verifies each guess in its next step, so that a wrong one costs time and
    never changes a token. It runs between the steps of all rows: it has to be quick."""

    def __init__(self, context=3, remembered=1 << 18):
        self._context, self._remembered = context, remembered
        self._next = OrderedDict()  # run of `context` tokens -> the token that followed

    def propose(self, texts, most):
        """`texts`: all tokens of each row, read only; `most`: how many guesses each may have at most."""
        ends = [text[-LEARNED - self._context :].tolist() for text in texts]  # plain integers: they are sent on
        for end in ends:
            self._learn(end)
        return [self._guess(end, limit) for end, limit in zip(ends, most, strict=True)]

    def _learn(self, end):
        size = self._context
        for i in range(len(end) - size):
            run = tuple(end[i : i + size])
            self._next[run] = end[i + size]
            self._next.move_to_end(run)
        while len(self._next) > self._remembered:
            self._next.popitem(last=False)

    def _guess(self, end, limit):
        """Guess by guess, each from those before it; [] where the text is new."""
        run, found = end[-self._context :], []
        while len(found) < limit and (token := self._next.get(tuple(run))) is not None:
            found.append(token)
            run = [*run[1:], token]
        return found
