"""Random trials of scheduler, step loop and paging against the hash-model; and mutants that they must find.

    python -m lmkit_testing.trials 5000           trials with seeds 0 .. 4999, then every mutant
    python -m lmkit_testing.trials --seed 17      one trial again

A trial draws an engine (block size, pools, windows, depth, budget, drafts, order, ...) and a story (requests, aborts,
gates, faults of rows, lost steps), checks invariants after every step, and every token, logprob and reason at the end.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

import msgspec
from lmkit.api import (
    EngineBusy,
    EngineRequest,
    ErrorInfo,
    KVConfig,
    OrderPolicy,
    RequestError,
    RequestView,
    RowWork,
    SamplingParams,
    SchedLimits,
    StepPlan,
    TokenEvent,
)
from lmkit.api import Scheduler as SchedulerType
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake
from lmkit.scheduling.scheduler import Scheduler

from lmkit_testing.hash_model import RECURRENT, HashExecutor, expected_tokens, hash_kv
from lmkit_testing.mutants import MUTANTS, applied

VOCAB = 97
MAX_STEPS = 5000
ADAPTERS = (None, None, None, "red", "blue")
SALTS = (None, None, None, "tenant")


class InjectedLoss(RuntimeError):
    """What a step of a trial fails with; clients see its name only."""


class Violation(AssertionError):
    """A trial went wrong."""


def require(ok: object, what: str) -> None:
    if not ok:
        raise Violation(what)


class KeyedOrder:
    """Priority, then arrival or a fixed shuffle: any fixed order must do."""

    def __init__(self, shuffle: int) -> None:
        self.shuffle = shuffle

    def admit_key(self, r: RequestView) -> tuple:
        return (r.priority, int(r.id) * self.shuffle % 101 if self.shuffle else r.arrival)

    def victim_key(self, r: RequestView) -> tuple:
        return self.admit_key(r)


class CountdownGate:
    """Opens (or fails) after some polls."""

    name = "countdown"

    def __init__(self, polls: int, fails: bool) -> None:
        self.polls, self.fails = polls, fails

    def ready(self) -> bool:
        self.polls -= 1
        return self.is_open

    @property
    def is_open(self) -> bool:
        return self.polls <= 0 and not self.fails

    def error(self) -> ErrorInfo | None:
        self.polls -= self.fails
        return ErrorInfo("gate", "the gate failed") if self.fails and self.polls <= 0 else None


class WatchedExecutor(HashExecutor):
    """Checks each plan against the limits, and keeps a digest of all plans."""

    def __init__(self, kv, limits: SchedLimits, **options) -> None:
        self.limits = limits
        self.digest = sha256()
        super().__init__(kv, **options)

    def forward(self, plan: StepPlan) -> None:
        limits = self.limits
        require(sum(row.num_tokens for row in plan.rows) <= limits.max_tokens, "step exceeds the token budget")
        require(len(plan.rows) <= limits.max_rows, "step exceeds the rows")
        require(len({row.id for row in plan.rows}) == len(plan.rows), "a row stands twice in a step")
        require(len(set(plan.gone)) == len(plan.gone), "a row is forgotten twice")
        single = [row.num_tokens == 1 + len(row.drafts) for row in plan.rows]
        require(single == sorted(single, reverse=True), "decode rows do not come first")
        self.digest.update(msgspec.msgpack.encode(plan))
        super().forward(plan)


@dataclass
class Story:
    """What is known of one request, and what was heard of it."""

    request: EngineRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list = field(default_factory=list)
    prompt_logprobs: list = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)
    oracle: list[int] = field(default_factory=list)  # prompt and all output, as it must be
    second_act: bool = False
    aborted: bool = False
    gate: CountdownGate | None = None

    @property
    def last(self) -> TokenEvent | None:
        return self.events[-1] if self.events else None

    def hear(self, event: TokenEvent) -> None:
        require(not self.aborted, f"news of aborted request {event.id}")
        require(self.last is None or self.last.finish is None, f"news after the end of {event.id}")
        require((event.num_cached is not None) <= (not self.events), "num_cached belongs to the first event")
        require(event.started is not None or bool(self.events) or not event.tokens, "the first tokens say how it began")
        self.events.append(event)
        self.tokens += event.tokens
        self.logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs


class Trial:
    """One engine and one story, drawn from a seed."""

    depths: Sequence[int] = (1, 2, 3)
    drafts: Sequence[int] = (0, 0, 1, 3)  # guesses for a row and step, where there may be any
    share_recurrent = 0.2
    executor_type: type[WatchedExecutor] = WatchedExecutor

    def __init__(
        self,
        seed: int,
        policy: OrderPolicy | None = None,
        scheduler: Callable[[SchedLimits, KVConfig], SchedulerType] | None = None,
    ) -> None:
        """What is tried: an order for the core's scheduler, or a whole scheduler."""
        self.rng = rng = random.Random(seed)
        self.depth = rng.choice(self.depths)
        recurrent = rng.random() < self.share_recurrent
        apart = self.depth > 1 and seed % 3 == 2
        self.num_drafts = 0 if self.depth > 1 or recurrent else rng.choice(self.drafts)
        if apart and not recurrent:
            self.num_drafts = random.Random(seed).choice(self.drafts)
        self.accept = rng.choice([0.0, 0.5, 0.9, 1.0])
        self.block_size = rng.choice([1, 2, 3, 4, 8])
        window = rng.randint(1, 12)
        self.windows = rng.choice([(None,), (None,), (None,), (None, window), (window,), (window, None, 2 * window)])
        if recurrent:
            self.windows = rng.choice([(RECURRENT,), (None, RECURRENT), (None, window, RECURRENT)])
        max_length = rng.choice([20, 40])
        alone = -(-max_length // self.block_size)  # blocks that the longest request needs
        room = rng.choice([1.0, 1.0, 1.2, 1.5, 3.0])
        num_blocks = [int(alone * room) + rng.randint(-2, 2) + self.num_drafts + 1 for _ in self.windows]
        if recurrent:
            num_blocks[-1] = rng.choice([2, 3, 17])
        self.kv = hash_kv([max(2, n) for n in num_blocks], self.block_size, self.windows)
        self.limits = SchedLimits(
            max_tokens=rng.choice([1, 2, 5, 16, 64]),
            max_rows=rng.choice([1, 2, 4, 16]),
            max_length=max_length,
            eos_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 1, 4]))),
            prefix_cache=rng.random() < 0.75,
            lookahead=self.num_drafts,
            depth=self.depth,
            apart=apart,
            watermark=rng.choice([0.0, 0.01, 0.2]),
            max_waiting=rng.choice([3, 100, 100]),
        )
        masks_stops = rng.random() < 0.5
        self.arrivals = rng.choice([0.2, 0.6, 1.0])  # probability that a step brings a request
        self.longest = rng.choice([8, 24])
        self.num_faults = rng.choice([0, 0, 0, 1, 4])  # still to happen
        self.num_lost = rng.choice([0, 0, 0, 0, 1, 3])
        self.times_lost = 0
        self.poison = rng.choice([None, None, None, "0", "2"])  # the step of this request is lost, as often as it runs
        self.num_aborts = rng.choice([0, 0, 1, 3])  # endless aborts would hide a livelock
        self.stems = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 24))] for _ in range(3)]
        self.executor = self.executor_type(
            self.kv,
            self.limits,
            depth=self.depth,
            vocab_size=VOCAB,
            eos_token_ids=self.limits.eos_token_ids,
            masks_stops=masks_stops,
            num_drafts=self.num_drafts,
            propose=self.propose if self.num_drafts else None,
            fault=self.fault if self.num_faults else None,
            fail=self.fail if self.num_lost or self.poison else None,
        )
        self.model = self.executor.model
        order = policy or KeyedOrder(rng.choice([0, 0, 37]))
        self.scheduler: SchedulerType = (
            scheduler(self.limits, self.kv) if scheduler else Scheduler(self.limits, self.kv, order)
        )
        adapters = {"red": lambda: None, "blue": lambda: None}
        self.engine = EngineCore(
            self.scheduler, self.executor, Intake(VOCAB, self.limits.max_length, adapters=adapters)
        )
        self.stories: dict[str, Story] = {}
        self.steps = 0
        self.quiet = False  # no more accidents

    # ------------------------------------------------------------------------------------------------ accidents

    def propose(self, tokens: list[int], k: int) -> list[int]:
        """Drafts that are right with probability `accept` each: the text is asked from the oracle by its tokens."""
        oracle = next((s for s in self.stories.values() if self._is_of(tokens, s)), None)
        drafts = self.oracle(oracle)[len(tokens) :][:k] if oracle else []
        drafts += [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(0, k - len(drafts)))]
        return [t if self.rng.random() < self.accept else (t + 1) % VOCAB for t in drafts]

    def _is_of(self, tokens: list[int], story: Story) -> bool:
        return self.oracle(story)[: len(tokens)] == tokens

    def oracle(self, story: Story) -> list[int]:
        """Prompt and all output of a request."""
        if not story.oracle:
            r = story.request
            story.oracle = r.token_ids + expected_tokens(self.model, r.token_ids, r.params, r.adapter)
        return story.oracle

    def fault(self, work: RowWork) -> str | None:
        if self.num_faults and not self.quiet and self.rng.random() < 0.1:
            self.num_faults -= 1
            return "injected"
        return None

    def fail(self, plan: StepPlan) -> None:
        if any(row.id == self.poison and row.sample for row in plan.rows):
            raise InjectedLoss("of a row")
        if self.num_lost and not self.quiet and self.rng.random() < 0.1:
            self.num_lost -= 1
            self.times_lost += 1
            raise InjectedLoss("of a step")

    # ----------------------------------------------------------------------------------------------------- story

    def draw_request(self, i: int) -> EngineRequest:
        rng = self.rng
        prompt = rng.choice(self.stems)[: rng.randint(1, 20)] + [
            rng.randrange(4) for _ in range(rng.choice([0, 0, 1, 5]))
        ]
        max_tokens = rng.randint(1, self.longest)
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
            temperature=rng.choice([0.0, 1.0]),
            seed=rng.choice([None, 1, 2]),
            stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 3]))),
            ignore_eos=rng.random() < 0.2,
            logprobs=rng.choice([None, None, 0, 2]),
            prompt_logprobs=rng.choice([None, None, None, 1]),
        )
        return EngineRequest(
            str(i),
            prompt,
            params,
            priority=rng.choice([0, 0, 0, -1, 2]),
            arrival=float(i),
            adapter=rng.choice(ADAPTERS),
            cache_salt=rng.choice(SALTS),
        )

    def add(self, request: EngineRequest) -> None:
        story = Story(request, second_act=self.quiet)
        try:
            self.admitted = self.engine.intake.admit(request)
            self.scheduler.add(self.admitted)
        except EngineBusy:
            waiting = self.scheduler.stats().num_waiting
            require(waiting >= self.limits.max_waiting, "refused as busy without need")
            return
        except RequestError:
            return
        if self.rng.random() < 0.1:
            story.gate = CountdownGate(self.rng.randint(1, 6), fails=self.rng.random() < 0.3)
            self.admitted.gates.append(story.gate)
        self.stories[request.id] = story

    def maybe_abort(self) -> None:
        live = [rid for rid, s in self.stories.items() if not s.aborted and not (s.last and s.last.finish)]
        if not live or not self.num_aborts or self.rng.random() >= 0.05:
            return
        rid = self.rng.choice(live)
        self.engine.abort([rid, "unknown", rid])
        self.stories[rid].aborted = True
        self.num_aborts -= 1

    def run(self) -> Trial:
        """Two acts: accidents may happen in the first; the second shows that nothing of them stayed behind."""
        rng = self.rng
        count = rng.randint(1, 16)
        self.play([self.draw_request(i) for i in range(count)])
        self.check_end()
        self.quiet = True
        self.play([self.draw_request(count + i) for i in range(4)])
        self.check_end()
        return self

    def play(self, requests: list[EngineRequest]) -> None:
        coming = requests[::-1]
        while coming or self.engine.has_work():
            self.steps += 1
            require(self.steps < MAX_STEPS, "livelock: the work does not end")
            if coming and self.rng.random() < self.arrivals:
                self.add(coming.pop())
            if not self.quiet:
                self.maybe_abort()
            for event in self.engine.step():
                self.stories[event.id].hear(event)
            self.check_step()

    # ---------------------------------------------------------------------------------------------------- checks

    def check_step(self) -> None:
        """The invariants; for the core's scheduler also that workers mirror its tables."""
        s, rows = self.scheduler, self.executor.rows
        s.check()
        if self.limits.apart:
            drawing = Counter((row.id, row.epoch) for plan, _ in self.engine.pending for row in plan.rows if row.sample)
            require(max(drawing.values(), default=1) == 1, "a row is drawn for in two steps in flight")
        if not isinstance(s, Scheduler):
            return
        resident = {r.id for r in s.running} | set(s._gone)
        require(set(rows) == resident, f"workers hold {sorted(rows)}, the scheduler thinks {sorted(resident)}")
        owner: dict[tuple[int, int], bytes] = {}
        for r in s.running:
            story = self.stories[r.id]
            require(story.gate is None or story.gate.is_open, f"{r.id} runs behind a closed gate")
            if rows[r.id].epoch != r.epoch:  # its old row is to be forgotten
                continue
            for g, (mine, theirs) in enumerate(zip(r.held.blocks, rows[r.id].blocks, strict=True)):
                require(len(mine) == len(theirs), "mirrored table has another length")
                require(all(a in (0, b) for a, b in zip(mine, theirs, strict=True)), "mirrored table differs")
                for block in filter(None, mine):
                    require(owner.setdefault((g, block), r.root_hash) == r.root_hash, "tenants share a block")

    def check_end(self) -> None:
        require(not self.executor.rows, "rows stay behind in the workers")
        stats = self.scheduler.stats()
        require(stats.num_free_blocks == stats.num_blocks, "blocks leak")
        for story in self.stories.values():
            if not story.aborted:
                self.check_story(story)

    def check_story(self, story: Story) -> None:
        request, last = story.request, story.last
        rid, params = request.id, request.params
        if last is None or last.finish is None:
            raise Violation(f"no end of {rid}")
        if last.finish == "error":
            self.check_error(story)
            return
        want = self.oracle(story)[len(request.token_ids) :]
        require(story.tokens == want, f"text of {rid}: {story.tokens}, expected {want}")
        stops = (*params.stop_token_ids, *(() if params.ignore_eos else self.limits.eos_token_ids))
        stopped = want[-1] in stops and len(want) > params.min_tokens
        require(last.finish == ("stop" if stopped else "length"), f"reason of {rid}: {last.finish}")
        require(last.stop_token == (want[-1] if stopped else None), f"stop token of {rid}")
        start = len(request.token_ids)
        if params.logprobs is not None:
            found = [self.model.logprob(t, start + i, params.logprobs) for i, t in enumerate(want)]
            require(story.logprobs == found, f"logprobs of {rid}")
        else:
            require(not story.logprobs, f"logprobs of {rid} were not asked for")
        if params.prompt_logprobs is not None:
            prompt = list(enumerate(request.token_ids))[1:]
            found = [self.model.logprob(t, i, params.prompt_logprobs) for i, t in prompt]
            require(story.prompt_logprobs == found, f"prompt logprobs of {rid}")
        self.check_cached(story)

    def check_cached(self, story: Story) -> None:
        """A hit needs an earlier request of the same tenant and adapter with the same beginning."""
        request, n = story.request, story.events[0].num_cached
        require(n is not None and 0 <= n < len(request.token_ids), f"num_cached of {request.id} is {n}")
        if not n or set(self.windows) == {1}:  # a model that looks at nothing needs nothing
            return
        require(self.limits.prefix_cache and n % self.block_size == 0, f"num_cached of {request.id} is {n}")
        prefix = request.token_ids[:n]
        require(
            any(
                other is not story
                and other.request.adapter == request.adapter
                and other.request.cache_salt == request.cache_salt
                and self.oracle(other)[:n] == prefix
                for other in self.stories.values()
            ),
            f"{request.id} found {n} cached tokens that nobody of its tenant computed",
        )

    def check_error(self, story: Story) -> None:
        """An error needs a cause: its gate, a fault of its row, or that no step with it can be done."""
        error, rid = story.events[-1].error, story.request.id
        if error is None:
            raise Violation(f"{rid} failed without an error")
        if error.code == "gate":
            require(story.gate is not None and story.gate.fails, f"{rid} failed at a gate it does not have")
            return
        if InjectedLoss.__name__ in error.message:
            # a loss without a cause that strikes a row which is tried alone after another loss, looks like its own
            unlucky = self.times_lost > (1 if self.poison is None else 0)
            require(unlucky or rid == self.poison, f"{rid} failed for others: {error.message}")
            return
        require(any(words in error.message for words in ("injected", "faulty row")), f"{rid} failed: {error.message}")
        require(not story.second_act, f"{rid} failed without an accident: {error.message}")


def trial(seed: int) -> Trial:
    return Trial(seed).run()


@dataclass
class Summary:
    """What a series of trials covered."""

    trials: int = 0
    counts: Counter = field(default_factory=Counter)
    digest: str = ""
    seconds: float = 0.0

    def lines(self) -> Iterable[str]:
        yield f"{self.trials} trials without violation in {self.seconds:.1f} s"
        for name, count in sorted(self.counts.items()):
            yield f"  {name:<28}{count:>9}"


def run_trials(seeds: Iterable[int], trial: Callable[[int], Trial] = trial) -> Summary:
    """Raises Violation, AssertionError or what else a fault leads to; the seed is in its notes."""
    summary, digest = Summary(), sha256()
    start = time.perf_counter()
    for seed in seeds:
        try:
            t = trial(seed)
        except Exception as e:
            e.add_note(f"in trial {seed}: python -m lmkit_testing.trials --seed {seed}")
            raise
        stats = t.scheduler.stats()
        digest.update(t.executor.digest.digest())
        c = summary.counts
        c["steps"] += t.steps
        c["requests"] += len(t.stories)
        c["output tokens"] += stats.num_output_tokens
        c["cached prompt tokens"] += stats.num_cached_tokens
        c["preemptions"] += stats.num_preempted
        c["aborted"] += sum(s.aborted for s in t.stories.values())
        c["failed requests"] += sum(bool(s.last and s.last.finish == "error") for s in t.stories.values())
        c[f"depth {t.depth}"] += 1
        c["of rows apart"] += t.limits.apart
        c["with drafts"] += t.num_drafts > 0
        c["drafts"] += stats.num_drafts
        c["accepted drafts"] += stats.num_accepted
        c["with windows"] += t.windows != (None,)
        c["with recurrent state"] += RECURRENT in t.windows
        c["cached before a state"] += stats.num_cached_tokens * (RECURRENT in t.windows)
        summary.trials += 1
    summary.seconds = time.perf_counter() - start
    summary.digest = digest.hexdigest()
    return summary


def hunt(name: str, seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first trial that finds the mutant, and how; None when none does."""
    with applied(name):
        for seed in seeds:
            try:
                trial(seed)
            except Exception as e:
                return seed, f"{type(e).__name__}: {e}"[:90]
    return None


def command(
    name: str, doc: str, argv: list[str] | None, *, one: Callable[[int], object],
    lines: Callable[[range], Iterable[str]], faults: Iterable[str],
    hunt: Callable[[str, range], tuple[int, str] | None],
) -> int:  # fmt: skip
    """The command line of a module of trials: `lines` tells of many, and then each of `faults` must be found by one."""
    parser = argparse.ArgumentParser(prog=f"python -m lmkit_testing.{name}", description=doc.split("\n")[0])
    parser.add_argument("trials", type=int, nargs="?", default=1000)
    parser.add_argument("--seed", type=int, help="run one trial")
    parser.add_argument("--no-mutants", action="store_true", help="skip the injected faults")
    args = parser.parse_args(argv)
    if args.seed is not None:
        one(args.seed)
        print(f"trial {args.seed}: no violation")
        return 0
    logging.getLogger("lmkit.engine").setLevel(logging.CRITICAL)  # steps fail here on purpose
    for line in lines(range(args.trials)):
        print(line)
    if args.no_mutants:
        return 0
    missed = 0
    for fault in faults:
        found = hunt(fault, range(args.trials))
        missed += found is None
        print(f"  mutant {fault:<28}" + (f"found in trial {found[0]}: {found[1]}" if found else "NOT FOUND"))
    return 1 if missed else 0


def main(argv: list[str] | None = None) -> int:
    def lines(seeds: range) -> Iterable[str]:
        return run_trials(seeds).lines()

    return command("trials", __doc__, argv, one=trial, lines=lines, faults=MUTANTS, hunt=hunt)


if __name__ == "__main__":
    sys.exit(main())
