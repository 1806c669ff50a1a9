"""Binds outputs to grammars without any process beside the engine: for hosts that let none be started. What that costs:
a grammar that takes too long holds up the others that wait to be compiled, and nothing ends it."""

from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate

import numpy as np
from lmkit.api import EngineBusy, GrammarError, GrammarMasks, PluginError, info_of, load_target

MAX_WAITING = 64  # grammars


class Inline:
    """Contract: lmkit.api.StructuredOutput. Called from the engine's thread, and by nobody else."""

    def __init__(self, backends, open_vocabulary, max_rows):
        self._choices, self._open, self._max_rows = backends, open_vocabulary, max_rows
        self._backends, self._vocabulary = {}, None  # of the compiling thread, once the first grammar comes
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._waiting, self._live = {}, {}  # by the id of the request: a future; a Follower
        self.broken = []

    def gate(self, request):
        if len(self._waiting) >= MAX_WAITING:
            raise EngineBusy(f"{MAX_WAITING} grammars wait to be compiled", fix="try again in a while")
        self._waiting[request.id] = self._thread.submit(self._compile, request.params.grammar, request.params.thinking)
        return Gate(self, request, self._waiting[request.id])

    def start(self, request, compiled):
        self._waiting.pop(request.id, None)
        vocabulary = self._vocabulary
        ends = vocabulary.special_ids.intersection(request.params.stop_token_ids).union(vocabulary.eos_token_ids)
        self._live[request.id] = Follower(request, compiled.matcher(), sorted(ends), vocabulary.size)

    def _compile(self, grammar, thinking):
        """In the thread. What cannot be enforced to the letter is refused, never ignored."""
        if grammar is None or thinking is not None:
            raise GrammarError("`inline` cannot bound reasoning", fix="enable the structured output `masks`")
        self._vocabulary = self._vocabulary or self._open()
        refused = []
        for choice in self._choices:  # best first
            if grammar.backend not in (None, choice.name):
                continue
            if choice.name not in self._backends:
                self._backends[choice.name] = load_target(choice)(self._vocabulary, **choice.options)
            backend = self._backends[choice.name]
            try:
                if grammar.kind in backend.kinds:
                    return backend.load(backend.compile(grammar))
            except GrammarError as e:
                refused.append(f"{choice.name}: {e.message}")
        raise GrammarError("; ".join(refused) or f"no grammar backend here takes {grammar.kind}")

    def concerns(self, plan):
        return any(work.id in self._live for work in plan.rows)

    def fill(self, plan):
        rows, masks = [], []
        for i, work in enumerate(plan.rows):
            if work.sample and work.id in self._live:
                try:
                    found = self._live[work.id].masks(work.drafts, work.parents)
                except Exception as e:  # it concerns this request alone
                    self._break(work.id, e)
                    continue
                rows += [i] * len(found)
                masks += found
        return GrammarMasks(rows, np.concatenate(masks).tobytes()) if rows else None

    def propose(self, plan, result):
        """What must follow becomes drafts, as far as the step that comes has rows of logits to spare."""
        room = self._max_rows - len(plan.rows)
        for i, (work, tokens) in enumerate(zip(plan.rows, result.tokens, strict=True)):
            follower = self._live.get(work.id)
            if room <= 0 or follower is None or not tokens or follower.request.epoch != work.epoch:
                continue
            if forced := follower.forced(tokens)[:room]:
                result.drafts = result.drafts or [[] for _ in plan.rows]
                result.drafts[i] = forced
                if result.parents:
                    result.parents[i] = []
                room -= len(forced)

    def _break(self, id, error):
        typed = error if isinstance(error, GrammarError) else PluginError(f"the grammar failed: {error!r}")
        self.broken = [*self.broken, (id, typed.info())]
        del self._live[id]

    def release(self, ids):
        for id in ids:
            self._live.pop(id, None)
            if (future := self._waiting.pop(id, None)) is not None:
                future.cancel()

    def compile(self, grammar, seconds):
        try:
            return self._thread.submit(self._compile, grammar, None).result(seconds)
        except TooLate:
            raise GrammarError(f"it was not compiled in {seconds:g} s", fix="make it simpler") from None

    def close(self):
        self._thread.shutdown(wait=False, cancel_futures=True)


class Gate:
    """Contract: lmkit.api.Gate. It opens when the grammar is compiled."""

    name = "grammar"

    def __init__(self, output, request, future):
        self._output, self._request, self._future = output, request, future

    def ready(self):
        if not self._future.done() or self._future.exception() is not None:
            return False
        self._output.start(self._request, self._future.result())
        return True

    def error(self):
        failed = self._future.done() and self._future.exception()
        return info_of(failed) if failed else None


class Follower:
    """One output under a grammar. It reads the request's tokens and keeps no record of its own, so a row that was
    preempted, or whose results come late, needs nothing here."""

    def __init__(self, request, matcher, ends, size):
        self.request, self._matcher, self._ends = request, matcher, ends
        self._bits = 32 * -(-size // 32)
        self._seen = request.num_prompt_tokens

    def masks(self, drafts, parents):
        """What may follow the text so far, and each draft; a draft has its own path from the text."""
        self._follow(self.request.tokens[self._seen :])
        paths = [[]]
        for i, draft in enumerate(drafts):
            paths.append([*paths[(parents[i] if parents else i - 1) + 1], draft])
        return [self._mask(path) for path in paths]

    def forced(self, tokens):
        """What must come behind `tokens`, which the request is about to get."""
        self._follow(tokens)
        return [] if self._matcher.complete else list(self._matcher.forced())

    def _follow(self, tokens):
        body = [token for token in tokens if token not in self._ends]
        if self._matcher.accept(body) < len(body):
            raise GrammarError(f"tokens {body} do not fit the grammar")
        self._seen += len(tokens)

    def _mask(self, path):
        words = np.full(self._bits // 32, -1, np.int32)
        n = self._matcher.accept(path)
        if n == len(path):  # else nobody reads it: the draft before it is refused
            words[:] = 0
            if not self._matcher.exhausted:
                self._matcher.fill(words)
            self._allow_ends(words, self._matcher.complete)
        self._matcher.rollback(n)
        if not words.any():
            raise GrammarError("nothing may follow here: the grammar has no way to its end")
        return words

    def _allow_ends(self, words, complete):
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        bits[self._ends] = complete
        words[:] = np.packbits(bits, bitorder="little").view("<i4")
