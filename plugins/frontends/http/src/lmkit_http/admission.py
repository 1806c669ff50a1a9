"""Admission: who may come in, who is told to come back, and when.

Three things refuse a request before anything of it is read. The room for requests is full (503); a key has used up what
`--key-requests`, `--key-tokens` or `--key-concurrent` leave it (429); a key fills the room, and others have keys too
(429). Once its prompts are known, a request counts as often as it has choices in the limit and the share of its key
(429); one that cannot be answered within its deadline is refused (503), and what still runs at its deadline is ended
(504).

`Retry-After` is a prediction. Of a key's own limits it is exact. Of the room it comes from the measured rate at which
requests leave: whoever is told first gets the first place that is expected to be free, the next one the second. It
holds as long as those who come for the first time leave these places alone: a returning client cannot be told apart.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from lmkit.api import EngineBusy, ErrorInfo, LmkitError, RequestError

from lmkit_http.counts import REQUESTS, Counts
from lmkit_http.errors import HttpError

if TYPE_CHECKING:
    from lmkit_python.front.prepare import Turn

    from lmkit_http.settings import ServerSettings

Cells = MutableSequence[float]
DEADLINE_HEADER = "x-request-timeout"  # seconds, from when the request came in until the end of its answer
MAX_SECONDS = 86400.0  # that a client may ask for
MAX_WAIT = 60.0  # seconds: no Retry-After is longer, except of a key's own limits
FIRST_WAIT = 1.0  # seconds, while no speed is measured
_SHARE = 8  # a key may hold so many times what is left free (Choudhury and Hahne, IEEE/ACM Trans. Networking 1998)
_WINDOW = 64  # requests that left last: the speed is theirs
_MINUTE = 60.0
DEADLINE_PASSED = ErrorInfo(
    "deadline", "the answer was not finished at the deadline of the request", "allow more time, or ask for less",
    status=504,
)  # fmt: skip


class Overloaded(EngineBusy):
    """There is no room. `retry_after`: seconds until a place is expected to be free."""

    def __init__(self, message: str, retry_after: float, *, fix: str = "try again in a while") -> None:
        super().__init__(message, fix=fix)
        self.retry_after = retry_after


class RateLimited(LmkitError):
    """A key has had what it may have for now. `retry_after`: seconds."""

    code = "rate_limit_exceeded"
    status = 429
    retryable = True

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message, fix="slow down: Retry-After says when to come back")
        self.retry_after = retry_after


class TooManyChoices(RequestError):
    """One request asks for more choices than its key may ever have at once."""

    code = "too-many-choices"

    def __init__(self, choices: int, limit: int) -> None:
        message = f"the request has {choices} choices (prompts x n), and a key may have {limit} at once"
        super().__init__(message, fix="lower n, or send fewer prompts at once")
        self.field = "n"


class Bucket:
    """A balance that grows to at most `minute`, by so much in a minute, and that may be overdrawn by its last taker."""

    def __init__(
        self, minute: float, now: float, shared: Callable[[], AbstractContextManager[Cells]] | None = None
    ) -> None:
        """`shared`: where the balance and its time are, for as long as nobody else changes them. Zeros are a full one
        a minute after the machine was started."""
        self._minute = float(minute)
        own: Cells = [self._minute, now]
        self._cells = shared or (lambda: nullcontext(own))

    def take(self, amount: float, now: float) -> None:
        self._taken(amount, now)

    def wait(self, need: float, now: float) -> float:
        """Seconds until `need` is there; 0: it is."""
        return max(0.0, need - self._taken(0, now)) * _MINUTE / self._minute

    def _taken(self, amount: float, now: float) -> float:
        """What is left."""
        with self._cells() as cells:
            cells[0] = left = min(self._minute, cells[0] + (now - cells[1]) * self._minute / _MINUTE) - amount
            cells[1] = now
        return left


@dataclass(slots=True)
class _Account:
    """What one key holds and may still have."""

    column: int = 0  # of what processes share, where they do
    num: int = 0  # requests that are in, of this process
    choices: int = 0  # the same, each counted as often as it takes a row: prompts x n
    requests: Bucket | None = None
    tokens: Bucket | None = None


class Speed:
    """How fast requests leave when all rows are taken: the time that the last ones spent in rows, shared by the rows.

    While fewer rows are taken their time counts for less, so that an idle server looks no slower; it may look faster
    than it is with all of them, until as many requests as are remembered have left a full one.
    """

    def __init__(self, rows: int, now: float) -> None:
        self._rows, self._num, self._at, self._busy = rows, 0, now, 0.0
        self._left: deque[float] = deque(maxlen=_WINDOW + 1)  # `busy`, when a request left

    def look(self, num: int, now: float) -> None:
        """`num`: how many requests there are from now on."""
        self._busy += (now - self._at) * min(self._num, self._rows) / self._rows
        self._at, self._num = now, num

    def leave(self, now: float) -> None:
        self.look(self._num, now)
        self._left.append(self._busy)

    def interval(self) -> float | None:
        """Seconds between two that leave; None: unknown. It grows while nobody does."""
        seconds = self._busy - self._left[0] if self._left else 0.0
        return seconds / (len(self._left) - 1) if len(self._left) > 1 and seconds > 0 else None


@dataclass(slots=True, eq=False)
class Place:
    """One request that came in. Whoever took it leaves it, once."""

    admission: Admission
    tenant: str
    came: float
    seconds: float | None  # from `came` to its deadline
    turns: list[Turn] = field(default_factory=list)
    num_paid: int = 0  # turns at the beginning whose prompts were paid for
    choices: int = 1  # rows that it takes: one, until its prompts are known
    left: bool = False

    def begin(self, turns: list[Turn]) -> None:
        """Counts a request with known prompts. Raises Overloaded if it would wait past its deadline, RateLimited and
        TooManyChoices when its choices are more than its key may have at once."""
        self.turns, self.num_paid = turns, len(turns)
        self.admission.begin(self)

    def remaining(self) -> float | None:
        """Seconds until its deadline; None: it has none."""
        return None if self.seconds is None else self.seconds - (self.admission.clock() - self.came)

    def leave(self) -> None:
        """Idempotent."""
        if not self.left:
            self.left = True
            self.admission.leave(self)


class Admission:
    """The places of one server. `limit` requests may be in, of which `rows` are computed together."""

    def __init__(
        self, limit: int, rows: int, settings: ServerSettings, count: Callable[[], int],
        clock: Callable[[], float] = monotonic, counts: Counts | None = None,
    ) -> None:  # fmt: skip
        """`count`: how many are in, those that take no place among them. `clock`: seconds. `counts`: of all processes
        that share the limits; rows and speed are this one's part."""
        self.clock, self._counts = clock, counts
        self._limit, self._rows, self._settings, self._count = limit, rows, settings, count
        self._several = len(settings.api_keys) > 1
        self._accounts: dict[str, _Account] = {}  # by tenant: as many as there are keys
        self._speed = Speed(rows, clock())
        self._promised = 0.0  # when the last of those that were told to come back is expected
        self._limits_keys = any((settings.key_requests, settings.key_tokens, settings.key_concurrent))

    def _free(self, coming: int = 0) -> int:
        """Places that are left. Where several keys share them, a request takes as many as it has choices."""
        num = self.total()
        if self._several:
            num = max(num, sum(map(self._held, self._accounts.values())))
        return self._limit - num - coming

    def total(self, more: int = 0) -> int:
        """How many are in, of all processes. `more`: that come in here at once, and are not counted yet."""
        num = self._count() + more
        if self._counts is None:
            return num
        self._counts.put(REQUESTS, num)
        return self._counts.total(REQUESTS)

    def tight(self, coming: int = 0) -> bool:
        """Whether `check` may refuse somebody now."""
        free = self._free(coming)
        return (
            self.total() + coming >= self._limit
            or self._limits_keys
            or (self._several and self._limit >= _SHARE * free)
        )

    def check(self, tenant: str, coming: int = 0) -> _Account:
        """The account of a key whose next request has room. `coming`: how many are about to enter before it, whosever
        they are. Raises Overloaded, RateLimited."""
        now = self.clock()
        account = self._account(tenant, now)
        self._check_key(account, now)
        total = self.total()
        if total + coming >= self._limit:
            raise Overloaded(f"{total} requests are waiting or running", self._promise(now))
        if self._several and (num := self._held(account)) and num >= _SHARE * self._free(coming):
            raise RateLimited(f"this key has {num} of {self._limit} places", self._interval(now))
        return account

    def _check_choices(self, place: Place, account: _Account, now: float) -> None:
        """`place` takes as many places as it has choices, which are known now."""
        more, limit, held = place.choices - 1, self._settings.key_concurrent, self._held(account)
        if not more:
            return
        if limit and place.choices > limit:
            raise TooManyChoices(place.choices, limit)
        if limit and held + more > limit:
            raise RateLimited(
                f"this key has {held - 1} choices at once, and {place.choices} more are beyond its limit of {limit}",
                self._interval(now),
            )
        if self._several and held > 1 and held - 1 + more >= _SHARE * (self._free() - more + 1):
            raise RateLimited(
                f"this key has {held - 1} of {self._limit} places, and {place.choices} more are beyond its share",
                self._interval(now),
            )

    def enter(self, tenant: str, headers: Mapping[str, str]) -> Place:
        """Raises what `check` does, and HttpError for a deadline that is none."""
        seconds, account, now = self._seconds(headers), self.check(tenant), self.clock()
        if account.requests is not None:
            account.requests.take(1, now)
        account.num += 1
        self._add(account, 1)
        self.total(1)
        self._speed.look(self._count() + 1, now)
        return Place(self, tenant, now, seconds)

    def begin(self, place: Place) -> None:
        """Prompts are paid for. Raises Overloaded when the requests before it take longer than it may wait."""
        now, account = self.clock(), self._accounts[place.tenant]
        remaining = place.remaining()
        if remaining is not None:
            wait = self.wait(place.tenant) if all(turn.request.priority >= 0 for turn in place.turns) else 0.0
            if remaining <= wait:
                left = max(0.0, remaining)
                message = f"the answer would begin in about {wait:.1f} s, its deadline is in {left:.1f} s"
                raise Overloaded(message, min(MAX_WAIT, wait), fix="allow more time, or try again in a while")
        place.choices = num_choices(place.turns)
        try:
            self._check_choices(place, account, now)
        except LmkitError:
            place.choices, place.turns = 1, []  # it has taken nothing
            raise
        self._add(account, place.choices - 1)
        if account.tokens is not None:
            account.tokens.take(sum(len(turn.request.token_ids) for turn in place.turns), now)

    def leave(self, place: Place) -> None:
        """Answers are paid for as far as they were drawn, whoever ended them."""
        now, account = self.clock(), self._accounts[place.tenant]
        account.num -= 1
        self._add(account, -place.choices)
        if account.tokens is not None:
            later = sum(len(turn.request.token_ids) for turn in place.turns[place.num_paid :])
            account.tokens.take(later + sum(turn.stream.usage.completion_tokens for turn in place.turns), now)
        answered = any(turn.stream.token_ids or turn.message.pooled is not None for turn in place.turns)
        if answered:  # else it had no row
            self._speed.leave(now)
        self._speed.look(self._count(), now)
        self.total()

    def wait(self, tenant: str) -> float:
        """Seconds that the key's own requests before a new one take, at least: whatever the order, they go first."""
        interval = self._speed.interval()
        return 0.0 if interval is None else max(0, self._accounts[tenant].num - self._rows) * interval

    def _account(self, tenant: str, now: float) -> _Account:
        if tenant not in self._accounts:
            s, counts = self._settings, self._counts
            shared = [partial(counts.balance, tenant, i) if counts is not None else None for i in range(2)]
            self._accounts[tenant] = _Account(
                counts.column(tenant) if counts is not None else 0,
                requests=Bucket(s.key_requests, now, shared[0]) if s.key_requests else None,
                tokens=Bucket(s.key_tokens, now, shared[1]) if s.key_tokens else None,
            )
        return self._accounts[tenant]

    def _add(self, account: _Account, num: int) -> None:
        account.choices += num
        if self._counts is not None:
            self._counts.put(account.column, account.choices)

    def _held(self, account: _Account) -> int:
        """Choices of a key that are in, of all processes."""
        return account.choices if self._counts is None else self._counts.total(account.column)

    def _check_key(self, account: _Account, now: float) -> None:
        s = self._settings
        if s.key_concurrent and (num := self._held(account)) >= s.key_concurrent:
            raise RateLimited(f"this key has {num} choices at once, its limit", self._interval(now))
        if account.requests is not None and (wait := account.requests.wait(1, now)):
            raise RateLimited(f"this key has sent {s.key_requests} requests within a minute, its limit", wait)
        if account.tokens is not None and (wait := account.tokens.wait(1, now)):
            raise RateLimited(f"this key has used {s.key_tokens} tokens within a minute, its limit", wait)

    def _promise(self, now: float) -> float:
        """Seconds until the next place that was promised to nobody else.

        Requests leave in bursts, so the first one waits for as long as a request is in a row: the queue is full, and no
        row stays empty for that.
        """
        interval = self._interval(now)
        self._promised = min(max(now + self._rows * interval, self._promised) + interval, now + MAX_WAIT)
        return self._promised - now

    def _interval(self, now: float) -> float:
        """Seconds until the next request leaves."""
        self._speed.look(self._count(), now)
        return min(MAX_WAIT, self._speed.interval() or FIRST_WAIT / self._rows)

    def _seconds(self, headers: Mapping[str, str]) -> float | None:
        """The sooner of what the client asks for and what the server allows."""
        asked, most = headers.get(DEADLINE_HEADER), self._settings.max_seconds
        if asked is None:
            return most
        try:
            seconds = float(asked)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MAX_SECONDS:
            raise HttpError(
                400, "deadline", f"{DEADLINE_HEADER} is {asked[:40]!r}", fix=f"seconds, up to {MAX_SECONDS:g}"
            )
        return seconds if most is None else min(seconds, most)


def num_choices(turns: Sequence[Turn]) -> int:
    """The rows that the requests of `turns` take together: a beam search takes one for each of its beams."""
    requests = {id(turn.request): turn.request for turn in turns}.values()
    return max(1, sum(r.beams.width if r.beams is not None else 1 for r in requests))


def retry_after(error: BaseException) -> float | None:
    """Seconds after which a refused request is expected to be taken; None: the error does not know."""
    return getattr(error, "retry_after", None)
