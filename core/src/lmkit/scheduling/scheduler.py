"""Scheduler: which request computes which positions in each step. Plain Python, deterministic, one for every depth.

A step is `schedule()` -> StepPlan -> workers -> StepResult -> `update()`; with depth d, up to d plans are out at once:
of the same rows, whose tokens are drawn on the device meanwhile, or `apart`, each of other rows.
Counters are optimistic: `schedule` advances them as if the step had happened, `update` only takes back rejected drafts.
`num_inflight` counts tokens that are sampled on the device and not yet known here.

Why every request ends: `add` refuses what does not fit alone; running requests grow in a fixed order and take blocks
from the last in that order, possibly themselves; so the first always gets what it needs and finishes, then the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from time import monotonic

from lmkit.api import (
    Admitted,
    ConfigError,
    EngineBusy,
    EngineError,
    ErrorInfo,
    InvalidParam,
    KVConfig,
    KVConnector,
    LmkitError,
    NewRow,
    OrderPolicy,
    PluginError,
    RequestError,
    RequestTooLarge,
    RowLogprobs,
    RowWork,
    SchedLimits,
    SchedStats,
    StepPlan,
    StepResult,
    TokenEvent,
)
from lmkit.scheduling.groups import NEVER, hit_length, make_groups
from lmkit.scheduling.hashes import end_hash, extend_hashes
from lmkit.scheduling.invariants import check_books
from lmkit.scheduling.outside import Outside
from lmkit.scheduling.queue import OrderedQueue, Ordering
from lmkit.scheduling.request import Request
from lmkit.scheduling.stops import finish_reason
from lmkit.scheduling.table import BlockTable

log = logging.getLogger("lmkit.engine")

UNDRAWN = "its constraint, logit_bias or penalties leave none"
MAX_LOST = 3  # steps that a request may be in which are lost together, though each of their rows works alone


class Scheduler:
    """Implements lmkit.api.Scheduler. Not thread-safe: it belongs to the engine thread."""

    def __init__(
        self, limits: SchedLimits, kv: KVConfig, policy: OrderPolicy, clock: Callable[[], float] = monotonic,
        connector: KVConnector | None = None, owner: str = "",
    ) -> None:  # fmt: skip
        """Raises ConfigError when the limits contradict each other. `clock`: seconds; it decides nothing. `owner`: how
        errors name the policy's plugin."""
        if limits.lookahead and limits.depth > 1 and not limits.apart:
            raise ConfigError(f"draft tokens need one step in flight, depth is {limits.depth}", fix="--depth 1")
        if min(limits.max_tokens, limits.max_rows, limits.depth) < 1 or limits.lookahead < 0:
            raise ConfigError(f"scheduler limits must be positive: {limits}")
        self.limits, self.clock = limits, clock
        self.ordering = Ordering(policy, owner)
        self.groups = make_groups(kv)
        self.block_size = self.groups[0].block_size
        self.zeroed = [i for i, g in enumerate(self.groups) if not g.grows]
        self.paged = [g for g in self.groups if g.grows]
        self.outside = Outside(connector, self.groups) if connector is not None else None
        if self.zeroed and limits.lookahead:
            raise ConfigError("draft tokens: recurrent state is that of the last token only, it cannot be taken back")
        self.reserve = [int(limits.watermark * g.pool.num_usable) * g.grows for g in self.groups]  # free at admission
        self.eos = frozenset(limits.eos_token_ids)
        self.requests: dict[str, Request] = {}
        self.waiting = OrderedQueue()
        self.running = OrderedQueue()
        self.totals = SchedStats(num_blocks=sum(g.pool.num_usable for g in self.groups))
        self._gone: list[str] = []  # rows the workers must forget with the next plan
        self._events: list[TokenEvent] = []  # of requests that ended outside `update`
        self._alone: dict[str, int] = {}  # rows of a lost step, to run one by one: id -> positions to compute again
        self._no_room: tuple[int, list[int]] | None = None  # who did not fit, and the free blocks then: ask once
        self._num_added = self._num_epochs = 0
        self._known = -1  # the last step whose result was taken in

    # ------------------------------------------------------------------------------------------------ in and out

    def add(self, r: Admitted) -> None:
        """Queue a request. Raises EngineBusy, RequestTooLarge (it cannot fit alone) or InvalidParam (id in use)."""
        assert isinstance(r, Request)  # the engine's intake makes them so
        limits = self.limits
        if r.id in self.requests:
            raise InvalidParam("id", r.id, "an id that no unfinished request has")
        if r.params.max_tokens is None or r.num_prompt_tokens < 1:
            raise InvalidParam("max_tokens", r.params.max_tokens, "a number, and a prompt of at least one token")
        r.max_length = r.num_prompt_tokens + (r.params.max_tokens if r.pooling is None else 0)
        if r.max_length > limits.max_length:
            raise RequestTooLarge("prompt + max_tokens", r.max_length, limits.max_length)
        if limits.whole_prompts and r.num_prompt_tokens > limits.max_tokens:
            raise RequestTooLarge("prompt", r.num_prompt_tokens, limits.max_tokens, fix="raise --max-step-tokens")
        for group in self.groups:
            need = group.blocks_needed(r.max_length, limits.max_tokens)
            if need > group.pool.num_usable:
                fits = group.pool.num_usable * self.block_size
                raise RequestTooLarge(
                    "prompt + max_tokens", r.max_length, fits, fix="lower max_tokens, or raise --memory"
                )
        if len(r.tokens) >= r.max_length and r.pooling is None:
            raise InvalidParam("num_output", r.num_output, "fewer than max_tokens: it has ended")
        if len(self.waiting) >= limits.max_waiting and not r.num_output:  # who has begun was taken already
            raise EngineBusy(f"{len(self.waiting)} requests are waiting, the limit is {limits.max_waiting}")
        self._num_added += 1
        r.order = self._num_added
        r.epoch, r.since = self._new_epoch(), self.clock()
        r.admit_key = self.ordering.key("admit_key", r)
        self.requests[r.id] = r
        self.waiting.add(r.admit_key, r)

    def abort(self, ids: Iterable[str]) -> None:
        """Forget requests, known or not, at any moment. No event follows."""
        for rid in ids:
            r = self.requests.get(rid)
            if r is not None:
                r.finish = "abort"
                self._remove(r)
            elif self._events:  # it ended already, but nobody has heard of it
                self._events = [event for event in self._events if event.id != rid]

    def has_work(self) -> bool:
        """Whether `schedule` may yield something: requests, rows to forget, or events to deliver."""
        return bool(self.requests or self._gone or self._events)

    # -------------------------------------------------------------------------------------------------- schedule

    def schedule(self) -> StepPlan:
        """The next step. Rows of one token come first; `rows` may be empty when everything waits."""
        self.totals.num_steps += 1
        plan = StepPlan(self.totals.num_steps)
        for group in self.groups:
            group.pool.step = plan.step
        preferred = self._go_first()
        self._give_way()
        long: list[RowWork] = []
        budget = self._grow_running(plan, long, preferred)
        self._admit_waiting(plan, long, budget)
        plan.rows += long
        plan.gone, self._gone = self._gone, plan.gone
        if self.outside is not None:
            self.outside.settle(plan)
        return plan

    def _go_first(self) -> Request | None:
        """The request that the policy serves in this step, moved to the front of those that wait."""
        if not self.ordering.promotes or not self.waiting or self._alone:
            return None
        found = self.ordering.first([r for r in self.waiting if not r.gates], self.running.items)
        if found is None:
            return None
        r, key = found
        if key != r.admit_key:
            self.waiting.remove(r.admit_key, r)
            r.admit_key = key
            self.waiting.add(key, r)
        return r

    def _give_way(self) -> None:
        """Where the first that waits has no room, the policy may name a row that goes back to waiting behind it."""
        first = next((r for r in self.waiting if not r.gates), None)
        if first is None or self._alone:
            return
        full = len(self.running) >= self.limits.max_rows or (self._no_room and self._no_room[0] == first.epoch)
        if full and (victim := self.ordering.victim(first, self.running.items)) is not None:
            self._preempt(victim)

    def _grow_running(self, plan: StepPlan, long: list[RowWork], preferred: Request | None = None) -> int:
        """Give every running request its next positions, in order. Returns the budget left; 0 after a preemption.

        A prompt that takes several steps leaves a token for each row behind it, half of what is left where one of
        another tenant is behind it, and half of the budget for `preferred`, which waits.
        """
        budget = self.limits.max_tokens
        kept = min(len(preferred.tokens), budget // 2) if preferred is not None else 0
        rows = self.running.items
        share = self._share(plan) if self.limits.apart else 0  # 0: as many as like, whatever is in flight
        i, preempted = 0, False
        while i < len(rows) and budget:
            r = rows[i]
            i += 1
            num_tokens = len(r.tokens) + r.num_inflight
            n = num_tokens + len(r.drafts) - r.num_computed
            if n <= 0 or (num_tokens >= r.limit and r.pooling is None):
                continue
            if share and (r.num_inflight or (n <= 1 + len(r.drafts) and len(plan.rows) >= share)):
                continue
            if n > 1 + len(r.drafts):
                n = min(n, self._chunk(r, rows[i:], budget, kept))
            n = min(n, budget)
            if r.keep_at:
                n = self._keep_state(plan, r, n)
            while not r.held.reserve(r.num_computed, n):
                preempted = True
                self._preempt(rows[-1])
                if r.table is None:  # it was the last itself
                    return 0
            self._seal(plan, long, r, n)
            budget -= n
        return 0 if preempted else budget

    def _chunk(self, r: Request, behind: list[Request], budget: int, kept: int) -> int:
        """How many positions of its prompt a running request may compute, at least one. `behind`: rows after it."""
        if any(o.tenant != r.tenant and len(o.tokens) + o.num_inflight - o.num_computed > 1 for o in behind):
            budget //= 2
        return max(1, budget - min(len(behind), budget // 2) - kept)

    def _share(self, plan: StepPlan) -> int:
        """How many rows may decode in this step, so that those in flight have as many, and those yet to come, too."""
        rows, depth = self.running.items, self.limits.depth
        ready, free = sum([not r.num_inflight for r in rows]), depth - (plan.step - 1 - self._known)
        return max(1, min(-(-len(rows) // depth), -(-ready // max(1, free))))

    def _admit_waiting(self, plan: StepPlan, long: list[RowWork], budget: int) -> None:
        """Start waiting requests in order; the first that lacks room ends it, closed gates are passed over."""
        i = 0
        only = next(iter(self._alone), None)  # then nothing else runs
        while budget and i < len(self.waiting) and len(self.running) < self.limits.max_rows:
            r = self.waiting.items[i]
            if only is not None and r.id != only:
                i += 1
                continue
            if (r.gates and not self._gates_open(r)) or not self._is_here(plan, r):
                i += r.finish is None
                continue
            if self.limits.whole_prompts and budget < len(r.tokens):
                return
            state = (r.epoch, [len(group.pool.free) for group in self.groups])
            if state == self._no_room:
                return
            try:
                r.victim_key = self.ordering.key("victim_key", r)
            except PluginError as error:
                self._fail(r, error.info())
                continue
            n = self._start(r, budget)
            if not n:
                self._no_room = state
                return
            self.waiting.remove(r.admit_key, r)
            self.running.add(r.victim_key, r)
            self._seal(plan, long, r, n)
            budget -= n

    def _gates_open(self, r: Request) -> bool:
        """Poll the gates. A failed one ends the request with its error."""
        for gate in r.gates:
            error = gate.error()
            if error is not None:
                self._fail(r, error)
                return False
        if not all(gate.ready() for gate in r.gates):
            return False
        r.gates.clear()
        return True

    def _is_here(self, plan: StepPlan, r: Request) -> bool:
        """Whether nothing of `r` that was computed before is still on its way."""
        if self.outside is None or r.fetched or not self._may_hit(r):
            return True
        limit = (len(r.tokens) - 1) // self.block_size
        return self.outside.fetch(plan, r, extend_hashes(r, limit, self.block_size)[:limit])

    def _start(self, r: Request, budget: int) -> int:
        """Give a waiting request its table: cached blocks and room for a first chunk. Returns its size, 0: no room."""
        num_hits, end = self._find(r)
        start = len(r.tokens) - 1 if end else num_hits * self.block_size
        r.keep_at = self._places_to_keep(r, start)
        n = self._up_to_kept(r, start, min(len(r.tokens) - start, budget))
        hits = []
        for group, reserve in zip(self.groups, self.reserve, strict=True):
            found = group.found(r.block_hashes, num_hits)
            held = [block for block in found if block]
            # Enough for this chunk always; for the whole prompt and a little more, unless it has the engine to itself.
            need = -(-(start + n) // group.block_size) - len(found)
            if self.running.items:
                whole = group.blocks_needed(len(r.tokens), self.limits.max_tokens) - len(held)
                need = max(need, whole) + reserve
            if need + group.pool.num_revived(held) > len(group.pool.free):
                return 0
            hits.append(found)
        copied = range(len(self.groups)) if end else self.zeroed if num_hits else ()
        r.restored = [(i, self.groups[i].pool.renew(end or r.block_hashes[num_hits - 1])) for i in copied]
        r.table = BlockTable(self.groups)
        if num_hits:
            r.table.adopt(hits)
        took = r.table.reserve(start, n)
        assert took, "admission counted wrongly"
        r.num_computed = start
        r.num_published = num_hits
        came, r.since = r.since, self.clock()
        if r.started.num_preempted:
            r.started.stalled += r.since - came
        else:
            r.started.queued = r.since - came
        if not r.started.num_preempted and not r.num_output:
            r.num_cached = min(start, r.num_prompt_tokens)
            self.totals.num_cached_tokens += r.num_cached
            self.totals.num_cache_queries += r.num_prompt_tokens if self._may_hit(r) else 0
            self.totals.num_prompt_tokens += r.num_prompt_tokens
        return n

    def _places_to_keep(self, r: Request, start: int) -> list[int]:
        """After how many tokens a copy of its state may be of use: where the whole blocks of its prompt end, and where
        it parts from another prompt, whose attention is found so far, but no state."""
        if not self.zeroed or not self.limits.prefix_cache:
            return []
        whole = (r.num_prompt_tokens - 1) // self.block_size
        shared = hit_length(self.paged, extend_hashes(r, whole, self.block_size), whole)
        return [num * self.block_size for num in sorted({shared, whole}) if num * self.block_size > start]

    def _keep_state(self, plan: StepPlan, r: Request, n: int) -> int:
        """Before `n` more positions: copies the state where it is to be kept, as long as there is a free block.

        Workers copy before they compute. Returns how many positions may follow in this step.
        """
        if r.num_computed in r.keep_at and r.num_published != NEVER:
            digest = r.block_hashes[r.num_computed // self.block_size - 1]
            for i in self.zeroed:
                pool = self.groups[i].pool
                if digest not in pool.cached and pool.free:
                    plan.copies.append((i, r.held.blocks[i][0], pool.keep(digest)))
        return self._up_to_kept(r, r.num_computed, n)

    def _up_to_kept(self, r: Request, start: int, n: int) -> int:
        """`n` positions from `start` on, but none beyond the one where the state is to be kept."""
        return next((place - start for place in r.keep_at if start < place < start + n), n)

    def _may_hit(self, r: Request) -> bool:
        return self.limits.prefix_cache and not r.every_position and r.params.prompt_logprobs is None

    def _find(self, r: Request) -> tuple[int, bytes]:
        """Leading blocks found in the cache, and the digest of all tokens but the last if these are found to the end.

        At least one token is left to compute.
        """
        if not self._may_hit(r):
            return 0, b""
        limit, rest = divmod(len(r.tokens) - 1, self.block_size)
        hashes = extend_hashes(r, limit, self.block_size)
        if rest and r.num_output and hit_length(self.paged, hashes, limit) == limit:
            end = end_hash(r, len(r.tokens) - 1, self.block_size)
            if all(end in group.pool.cached for group in self.groups):
                return limit, end
        return hit_length(self.groups, hashes, limit), b""

    def offer(self, r: Request) -> None:
        """Offer the last blocks of a request that has had its tokens, or rests: who goes on with it copies them."""
        num_tokens = len(r.tokens) - 1
        if not self.limits.prefix_cache or r.num_published == NEVER or r.num_computed != num_tokens or not r.table:
            return
        whole, rest = divmod(num_tokens, self.block_size)
        digest = end_hash(r, num_tokens, self.block_size)
        for group, blocks in zip(self.groups, r.held.blocks, strict=True):
            if rest or not group.grows:
                group.pool.publish_part(blocks[whole if group.grows else 0], digest)

    def _seal(self, plan: StepPlan, long: list[RowWork], r: Request, n: int) -> None:
        """Put `n` positions of `r` into the plan: what workers lack, the row of work, and the counters after it."""
        start = r.num_computed
        num_tokens = len(r.tokens) + r.num_inflight
        end = start + n
        sample = end >= num_tokens and r.pooling is None
        table = r.held
        r.started.num_chunks += start < r.num_prompt_tokens
        if not r.resident:
            r.resident = True
            states = [(i, table.blocks[i][0]) for i in self.zeroed]
            if r.restored:
                plan.copies += [(i, kept, table.blocks[i][-1]) for i, kept in r.restored]
            else:
                plan.zero += states
            plan.new.append(NewRow(
                r.id, r.epoch, r.tokens[:], r.num_prompt_tokens, table.unsent(), start, r.params, r.adapter, r.pooling
            ))  # fmt: skip
        elif table.capacity > table.sent:
            plan.grown.append((r.id, table.unsent()))
        drafts: list[int] = []
        if r.drafts:
            drafts = r.drafts[: max(0, end - num_tokens)]
            r.drafts = []
            r.num_unverified += len(drafts)
        row = RowWork(r.id, r.epoch, start, n, drafts, sample, r.parents[: len(drafts)])
        (plan.rows if n == 1 or drafts else long).append(row)
        r.num_computed = end
        r.num_inflight += sample
        if end >= (r.num_published + 1) * self.block_size:
            self._publish(r)

    def _publish(self, r: Request) -> None:
        """Offer whole blocks of known tokens to the prefix cache, as soon as they are scheduled."""
        if not self.limits.prefix_cache:
            return
        num_whole = min(r.num_computed, len(r.tokens)) // self.block_size
        hashes = extend_hashes(r, num_whole, self.block_size)
        for g, (group, blocks) in enumerate(zip(self.groups, r.held.blocks, strict=True)):
            for i in range(r.num_published, num_whole if group.grows else 0):
                if blocks[i] and group.pool.publish(blocks[i], hashes[i]) and self.outside is not None:
                    self.outside.computed(g, blocks[i], r, i)
        r.num_published = max(r.num_published, num_whole)

    # ---------------------------------------------------------------------------------------------------- update

    def update(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]:
        """Take in the result of a step, in the order of schedule(). Rows of another epoch are dropped."""
        events, self._events, self._known = self._events, [], plan.step
        if result.faults:
            self._distrust()
        if self.outside is not None:
            self.outside.take_in(plan, result)
        if not plan.rows:
            return events
        requests = self.requests
        faults: dict[int, LmkitError] = {i: EngineError(f"the request failed: {why}") for i, why in result.faults}
        faults |= {i: RequestError(f"no token can be drawn: {why}", fix=UNDRAWN) for i, why in result.undrawn}
        logprobs = {lp.row: lp for lp in result.logprobs}
        pooled = dict(result.pooled)
        drafts = result.drafts
        for i, (row, tokens) in enumerate(zip(plan.rows, result.tokens, strict=True)):
            r = requests.get(row.id)
            if r is None or r.epoch != row.epoch:
                continue
            if i in faults:
                events.append(self._end(r, faults[i].info()))
                continue
            event = TokenEvent(r.id)
            if row.sample:
                self._accept(r, row, tokens, event)
            if i in logprobs:
                self._add_logprobs(r, logprobs[i], event)
            if i in pooled:
                event.pooled, event.finish = pooled[i], "stop"
            if event.tokens or event.prompt_logprobs or event.pooled:
                if r.announced != r.epoch:
                    self._announce(r, event)
                events.append(event)
            if event.finish:
                r.finish = event.finish
                if r.finish == "length":
                    self.offer(r)
                self._remove(r)
            elif drafts and row.sample:
                r.drafts = drafts[i][: max(0, min(self.limits.lookahead, r.limit - len(r.tokens) - 1))]
                r.parents = result.parents[i] if result.parents else []
            if self._alone and row.start + row.num_tokens >= self._alone.get(r.id, NEVER):
                del self._alone[r.id]  # it was not the cause
                if self._alone and r.table is not None:
                    self._preempt(r)  # room for the next
        return events

    def _announce(self, r: Request, event: TokenEvent) -> None:
        """What is said of a request once in each of its stays."""
        if not r.announced:
            event.num_cached = r.num_cached
            r.started.prefill = self.clock() - r.since
        r.announced, event.started = r.epoch, r.started

    def _accept(self, r: Request, row: RowWork, tokens: list[int], event: TokenEvent) -> None:
        """Append sampled tokens up to the one that ends the request; take back rejected drafts."""
        num_rejected = len(row.drafts) + 1 - len(tokens)
        assert 0 <= num_rejected <= len(row.drafts), f"{len(tokens)} tokens for {len(row.drafts)} drafts"
        r.num_inflight -= 1
        r.num_unverified -= len(row.drafts)
        r.num_computed -= num_rejected
        if row.drafts:
            event.drafts = (len(row.drafts), len(tokens) - 1)
            self.totals.num_drafts += len(row.drafts)
            self.totals.num_accepted += len(tokens) - 1
        for token in tokens:
            r.tokens.append(token)
            event.tokens.append(token)
            event.finish = finish_reason(r, token, self.eos)
            if event.finish:
                if event.finish == "stop":
                    event.stop_token = token
                break
        self.totals.num_output_tokens += len(event.tokens)
        if len(r.tokens) >= (r.num_published + 1) * self.block_size:
            self._publish(r)

    def _add_logprobs(self, r: Request, found: RowLogprobs, event: TokenEvent) -> None:
        """Logprobs of accepted tokens, and of prompt positions not reported before a preemption."""
        event.logprobs = found.tokens[: len(event.tokens)]
        fresh = found.prompt[max(0, r.num_scored - found.prompt_start) :]
        if fresh:
            assert found.prompt_start <= r.num_scored, "prompt logprobs with a gap"
            r.num_scored += len(fresh)
            event.prompt_logprobs = fresh

    def _distrust(self) -> None:
        """A row wrote rubbish, and others may have read it since: nothing computed so far is found any more.

        Its request may be gone or may have dropped the block, so its table does not tell what to forget.
        """
        self._forget()
        for r in self.running:
            r.num_published = NEVER

    def _forget(self, since: int = 0) -> None:
        """Content published once that step was planned is found no more, and saved nowhere."""
        for group in self.groups:
            group.pool.forget_since(since)
        if self.outside is not None:
            self.outside.forget()

    def _end(self, r: Request, error: ErrorInfo) -> TokenEvent:
        """End one request that went wrong."""
        r.finish = "error"
        self._remove(r)
        return TokenEvent(r.id, finish="error", error=error)

    # ------------------------------------------------------------------------------------------------- leaving

    def fail_running(self, error: ErrorInfo) -> list[TokenEvent]:
        """After a step was lost: end all running requests, forget all cached content. Workers must forget all rows."""
        events, self._events = self._events, []
        for r in list(self.running):
            r.finish = "error"
            self._remove(r)
            events.append(TokenEvent(r.id, finish="error", error=error))
        self._forget()
        self._gone = []
        self._alone.clear()
        return events

    def forget_cache(self, root: Callable[[Request], bytes] | None = None) -> None:
        """Nothing computed so far is found any more. With `root`, which gives what names of a request's blocks begin
        with from now on, it is lost, too: what ran is computed again. Workers must have forgotten all rows then.
        """
        self._forget()
        if root is None:
            return
        for r in list(self.running):
            self._preempt(r)
        self._gone = []
        for r in self.requests.values():
            r.root_hash = root(r)
            r.block_hashes.clear()

    def retry_running(self, plan: StepPlan, error: ErrorInfo) -> list[TokenEvent]:
        """After `plan` was lost: what ran goes back to waiting; the rows of `plan` run one by one until each has done
        its part of it. The request of a row that fails alone ends with `error`, and so does one whose steps were lost
        too often without a cause. Workers must forget all rows.
        """
        events, self._events = self._events, []
        self._forget(self._known + 1)  # steps before `plan` whose results are lost, too, may have had faulty rows
        for r in list(self.running):
            self._preempt(r)
        self._gone = []
        rows = [(self.requests[row.id], row) for row in plan.rows if row.id in self.requests]
        found = [r for r, row in rows if r.id in self._alone]
        for r, row in rows:
            if r.id not in self._alone:
                r.num_lost += 1
                self._alone[r.id] = row.start + row.num_tokens
        if found:
            for r in self.requests.values():
                r.num_lost = 0
        return events + [self._end(r, error) for r, _ in rows if r in found or r.num_lost > MAX_LOST]

    def _fail(self, r: Request, error: ErrorInfo) -> None:
        self._events.append(self._end(r, error))

    def _remove(self, r: Request) -> None:
        """Take a request out of everything. `r.finish` says why."""
        del self.requests[r.id]
        if self.outside is not None:
            self.outside.release(r.id)
        self._alone.pop(r.id, None)
        if r.table is None:
            self.waiting.remove(r.admit_key, r)
        else:
            self.running.remove(r.victim_key, r)
            self._vacate(r)
        self.totals.num_finished += 1

    def _preempt(self, r: Request) -> None:
        """Back to waiting, as if it had never run, but for its tokens. It resumes as a new row."""
        self.running.remove(r.victim_key, r)
        self._vacate(r)
        r.num_computed = r.num_inflight = r.num_unverified = r.num_published = 0
        r.drafts, r.fetched = [], False
        r.epoch = self._new_epoch()
        r.started.num_preempted += 1
        r.since = self.clock()
        self.totals.num_preempted += 1
        self.waiting.add(r.admit_key, r)

    def _vacate(self, r: Request) -> None:
        """Give back blocks and row."""
        r.held.release()
        r.table = None
        if r.resident:
            r.resident = False
            self._gone.append(r.id)

    def _new_epoch(self) -> int:
        self._num_epochs += 1
        return self._num_epochs

    # ------------------------------------------------------------------------------------------------ inspection

    def stats(self) -> SchedStats:
        """A snapshot: gauges of now and the counters since the start."""
        t = self.totals
        t.num_waiting, t.num_running = len(self.waiting), len(self.running)
        t.num_free_blocks = sum(len(g.pool.free) for g in self.groups)
        return SchedStats(**{name: getattr(t, name) for name in t.__struct_fields__})

    def check(self) -> None:
        """All invariants; AssertionError naming the broken one."""
        check_books(self.requests, self.waiting, self.running, self.groups, self._gone, self.limits.max_rows)
