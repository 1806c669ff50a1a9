"""From logits to tokens, in a fixed order.

 1  raw log-probabilities, of rows that asked
 2  logits to float32
 3  grammar mask
 4  min_tokens: eos and stop ids may not come yet
 5  logit bias
 6  processors of stage "logits"
 7  penalties: repetition (prompt and output), then frequency and presence (output)
 8  temperature
 9  min_p, top_k, top_p
10  processors of stage "probs"
11  draw, with noise f(seed, position)
12  log-probabilities of the chosen tokens

Each step works on the rows that need it and is skipped when there are none: rows that need it are counted when they
come and go. When no row needs anything but the most likely token, sampling is one argmax of the model's own logits.
Beside others, a greedy row is drawn at a temperature that leaves the largest logits only, and the first of them.

The host does not wait here: what was drawn is read when the device has done it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from lmkit.api import DrawParams, GrammarMasks, LogitsProcessor, RowOps, SamplingParams, TokenLogprob
from lmkit_layers import truncate, vocabulary
from lmkit_layers.rowwise import TorchRowOps
from torch import Tensor

from lmkit_worker.sampling.counts import TokenCounts
from lmkit_worker.sampling.logprobs import TokenChoice, gather_logprobs
from lmkit_worker.sampling.noise import uniform
from lmkit_worker.sampling.processors import Processors
from lmkit_worker.sampling.upload import uploaded

MIN_TEMPERATURE = 1e-30  # smaller ones are equal to it: only the most likely token is left, and float32 still holds it


@dataclass(slots=True)
class SampleBatch:
    """Rows of logits to sample. A row of the plan with k drafts has k + 1 consecutive rows here."""

    slots: np.ndarray  # [S] int64
    positions: np.ndarray  # [S] int64, position of the token drawn
    plan_rows: np.ndarray  # [S'] row of the plan of each sampling row, S' <= S
    tokens: Callable[[int], Sequence[int]]  # slot -> tokens known, drafts excluded
    num_drafts: np.ndarray | None = None  # [S']; None: no row has drafts
    guessed: Sequence[Sequence[int]] | None = None  # [S] the drafts after which each is drawn; None: no row has drafts

    def text(self, row: int) -> Sequence[int]:
        """All tokens before the one drawn of a row of logits, as if the drafts before it were right."""
        known = self.tokens(int(self.slots[row]))
        return [*known, *self.guessed[row]] if self.guessed is not None and self.guessed[row] else known


@dataclass(slots=True)
class Sampled:
    """One token for each row of logits."""

    tokens: np.ndarray  # [S] int64; 0 where there is a fault
    faults: dict[int, str]  # row of logits -> reason
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)  # row of logits -> of its token; only who asked


@dataclass(slots=True)
class RawLogprobs:
    """Log-probabilities before anything was done to the logits, of the rows that asked."""

    rows: list[int]  # of the logits
    values: Tensor  # [L, V] float32
    num_top: list[int]  # alternatives wanted by each


class Drawn:
    """Tokens that the device has drawn, or will have once an event behind their making has passed."""

    def __init__(self, tokens: Tensor, largest: Tensor, raw: RawLogprobs | None = None) -> None:
        """`tokens` [S] int64 and the largest logit of each row [S], on the device; their copies start at once."""
        self.tokens, self.raw = tokens, raw
        self._tokens, self._largest = (x.to("cpu", non_blocking=True) for x in (tokens, largest))

    def read(self) -> Sampled:
        """Only after the event: until then the copies hold anything."""
        faults, tokens = _faults(self._largest), self._tokens.numpy()
        if faults:
            tokens[list(faults)] = 0
        return Sampled(tokens, faults, {} if self.raw is None else _gather(self.raw, tokens, faults))


class Sampler:
    """Sampling state per slot, added and removed with the row."""

    def __init__(
        self, max_rows: int, vocab_size: int, eos_token_ids: Sequence[int] = (),
        processors: Mapping[str, LogitsProcessor] | None = None, rows: RowOps | None = None,
    ) -> None:  # fmt: skip
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.processors = Processors(processors or {})
        self.rows = rows or TorchRowOps()
        self.params: list[SamplingParams | None] = [None] * max_rows  # None: nobody has the slot
        self.num_prompt = np.zeros(max_rows, np.int64)
        self.seed = np.zeros(max_rows, np.uint64)
        self.greedy = np.zeros(max_rows, bool)
        self.temperature = np.ones(max_rows, np.float32)
        self.min_p = np.zeros(max_rows, np.float32)
        self.top_k = np.zeros(max_rows, np.int64)
        self.top_p = np.ones(max_rows, np.float32)
        # Sparse per-slot state: only slots that need the step are keys.
        self.counts: dict[int, TokenCounts] = {}
        self.bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self.blocked: dict[int, np.ndarray] = {}  # ids that may not come before min_tokens
        self.logprobs: dict[int, int] = {}  # alternatives wanted
        self.num_random = 0
        self._sent: dict[str, tuple[object, list[Tensor]]] = {}  # what steps send, until a row comes or goes

    # ---------------------------------------------------------------------------------------------- rows

    def add(self, slot: int, params: SamplingParams, tokens: np.ndarray, num_prompt: int, seed: int) -> None:
        """A row with `tokens` (prompt, then output of a resumed row) takes `slot`."""
        self.params[slot] = params
        self._sent.clear()
        self.num_prompt[slot] = num_prompt
        self.seed[slot] = np.uint64(seed & 0xFFFF_FFFF_FFFF_FFFF)
        self.greedy[slot] = params.greedy
        self.temperature[slot] = max(params.temperature, MIN_TEMPERATURE)
        self.min_p[slot], self.top_p[slot] = (0.0, 1.0) if params.greedy else (params.min_p, params.top_p)
        self.top_k[slot] = params.top_k if params.top_k < self.vocab_size and not params.greedy else 0
        self.num_random += not params.greedy
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            self.counts[slot] = TokenCounts(tokens[:num_prompt], tokens[num_prompt:].tolist())
        if params.logit_bias:
            pairs = [(token, value) for token, value in params.logit_bias if token < self.vocab_size]
            ids, values = zip(*pairs, strict=True) if pairs else ((), ())
            self.bias[slot] = np.array(ids, np.int64), np.array(values, np.float32)
        if len(tokens) - num_prompt < params.min_tokens:
            stops = set(params.stop_token_ids).union(() if params.ignore_eos else self.eos_token_ids)
            self.blocked[slot] = np.array(sorted(t for t in stops if t < self.vocab_size), np.int64)
        if params.logprobs is not None:
            self.logprobs[slot] = params.logprobs
        if params.extra:
            self.processors.add(slot, params, tokens[:num_prompt].tolist())

    def remove(self, slot: int) -> None:
        self.num_random -= not self.greedy[slot]
        for state in (self.counts, self.bias, self.blocked, self.logprobs):
            state.pop(slot, None)
        self.processors.remove(slot)
        self._sent.clear()
        self.params[slot] = None

    def clear(self) -> None:
        """Forgets all rows."""
        self.processors.clear()
        for slot, params in enumerate(self.params):
            if params is not None:
                self.remove(slot)

    def observe(self, slot: int, tokens: Sequence[int], num_output: int) -> None:
        """Accepted tokens of a row, which now has `num_output` output tokens. Only needed if any is `watched`."""
        counts = self.counts.get(slot)
        if counts is not None:
            for token in tokens:
                counts.add(token)
        params = self.params[slot]
        if slot in self.blocked and params is not None and num_output >= params.min_tokens:
            del self.blocked[slot]

    @property
    def reads_tokens(self) -> bool:
        """Whether drawing needs to know all tokens before it."""
        return bool(self.counts or any(self.processors.active.values()))

    @property
    def watched(self) -> bool:
        """Whether any row must be told of its accepted tokens."""
        return bool(self.counts or self.blocked)

    # -------------------------------------------------------------------------------------------- sample

    @property
    def takes_largest(self) -> bool:
        """Whether without masks every row's token is that of its largest logit, and nothing else is asked for."""
        return not (
            self.num_random or self.counts or self.bias or self.blocked or self.logprobs
            or self.processors.active["logits"]
        )  # fmt: skip

    def sample(self, logits: Tensor, batch: SampleBatch, masks: GrammarMasks | None = None) -> Drawn:
        """One token per row of `logits` [S, V], float32 or the model's dtype; may overwrite them."""
        greedy = self.greedy[batch.slots]
        raw = self._raw_logprobs(logits, batch) if self.logprobs else None  # 1
        x = logits.float()  # 2
        if masks is not None:
            self._grammar(x, batch, masks)  # 3
        if self.blocked:
            self._min_tokens(x, batch)  # 4
        if self.bias:
            self._bias(x, batch)  # 5
        if self.processors.active["logits"]:
            self.processors.apply("logits", x, batch.slots, batch.positions, greedy, batch.text)  # 6
        if self.counts:
            self._penalties(x, batch)  # 7
        tokens, largest = self.rows.argmax(x) if greedy.all() else self._random(x, batch, greedy)  # 8 to 11
        return Drawn(tokens, largest, raw)  # 12

    def _raw_logprobs(self, logits: Tensor, batch: SampleBatch) -> RawLogprobs:
        """Those of the rows that asked, perhaps none of this step."""
        found = [(i, self.logprobs[slot]) for i, slot in enumerate(batch.slots.tolist()) if slot in self.logprobs]
        rows = [i for i, _ in found]
        if len(rows) < len(logits):
            (at,) = self._on_device("logprobs", rows, logits.device, lambda: [np.array(rows, np.int64)])
            logits = logits[at]
        values = torch.log_softmax(logits, -1, dtype=torch.float32)
        return RawLogprobs(rows, values, [n for _, n in found])

    def _grammar(self, x: Tensor, batch: SampleBatch, masks: GrammarMasks) -> None:
        """Bit t of a row's words is 1 when token t is allowed. Bits of a row with drafts are consecutive."""
        first = np.arange(len(batch.plan_rows))
        if batch.num_drafts is not None:
            first = np.cumsum(batch.num_drafts + 1) - batch.num_drafts - 1
        start_of = dict(zip(batch.plan_rows.tolist(), first.tolist(), strict=True))
        rows, seen = [], dict.fromkeys(masks.rows, 0)
        for row in masks.rows:
            rows.append(start_of[row] + seen[row])
            seen[row] += 1
        if not rows:
            return
        arrays: list[np.ndarray] = [
            np.frombuffer(masks.bits, np.uint8).reshape(len(rows), -1),
            np.array(rows, np.int64),
        ]
        bits, *at = uploaded(arrays[: 1 if rows == list(range(len(x))) else 2], x.device)
        self.rows.mask(x, at[0] if at else None, bits)

    def _min_tokens(self, x: Tensor, batch: SampleBatch) -> None:
        output = batch.positions - self.num_prompt[batch.slots]  # number of output tokens before this one
        pairs = [
            (i, self.blocked[slot]) for i, slot in enumerate(batch.slots.tolist())
            if slot in self.blocked and output[i] < self.params[slot].min_tokens
        ]  # fmt: skip
        if pairs:
            rows = [i for i, _ in pairs]
            index = self._on_device("min_tokens", (rows, batch.slots.tolist()), x.device, lambda: _index(pairs))
            x[tuple(index)] = -torch.inf

    def _bias(self, x: Tensor, batch: SampleBatch) -> None:
        found = [(i, self.bias[slot]) for i, slot in enumerate(batch.slots.tolist()) if slot in self.bias]
        if found:
            rows, ids, values = self._on_device("bias", batch.slots.tolist(), x.device, lambda: [
                *_index([(i, ids) for i, (ids, _) in found]), np.concatenate([values for _, (_, values) in found])
            ])  # fmt: skip
            x[rows, ids] += values

    def _penalties(self, x: Tensor, batch: SampleBatch) -> None:
        """Touches only tokens that occur: positive logits are divided by the repetition penalty, others multiplied."""
        found = []
        for i, slot in enumerate(batch.slots.tolist()):
            counts = self.counts.get(slot)
            if counts is not None:
                drafts = batch.guessed[i] if batch.guessed is not None else ()
                found.append((i, slot, *(counts.with_drafts(drafts) if drafts else (counts.ids, counts.output))))
        if not found:
            return
        lengths = [len(ids) for _, _, ids, _ in found]

        def arrays() -> list[np.ndarray]:
            params = [self.params[slot] for _, slot, _, _ in found]
            each = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
            return [*_index([(i, ids) for i, _, ids, _ in found]), *np.repeat(np.array(each, "f4"), lengths, 0).T]

        # Tokens are only ever added to those of a row, but for drafts: as many are the same.
        key = None if batch.guessed is not None else (batch.slots.tolist(), lengths)
        rows, ids, repetition, frequency, presence = self._on_device("penalties", key, x.device, arrays)
        (output,) = uploaded([np.concatenate([output for *_, output in found])], x.device)
        values = x[rows, ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * output
        values -= presence * (output > 0)
        x[rows, ids] = values

    def _on_device(
        self, name: str, key: object, device: torch.device, arrays: Callable[[], Sequence[np.ndarray]]
    ) -> list[Tensor]:
        """The arrays on the device: those that were sent last, where the rows and the key are the same. None is new."""
        known, sent = self._sent.get(name, (None, []))
        if key is None or key != known:
            sent = uploaded(arrays(), device)
            self._sent[name] = key, sent
        return sent

    def _random(self, x: Tensor, batch: SampleBatch, greedy: np.ndarray) -> tuple[Tensor, Tensor]:
        slots, positions = batch.slots, batch.positions
        params = DrawParams(
            self.temperature[slots], self.min_p[slots], self.top_k[slots], self.top_p[slots],
            np.where(greedy, 0.0, uniform(self.seed[slots], positions)),
        )  # fmt: skip
        if not self.processors.active["probs"]:
            return self.rows.draw(x, params)
        weights, largest = truncate.weigh(x, params)  # 8, 9
        weights /= weights.sum(-1, keepdim=True)
        self.processors.apply("probs", weights, slots, positions, greedy, batch.text)  # 10
        return vocabulary.draw(weights, params.share), largest  # 11


def _index(pairs: Sequence[tuple[int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """(row, ids) pairs -> index of all their elements in [S, V]."""
    rows = np.repeat(np.array([row for row, _ in pairs], np.int64), [len(ids) for _, ids in pairs])
    return rows, np.concatenate([ids for _, ids in pairs])


def _gather(raw: RawLogprobs, tokens: np.ndarray, faults: Mapping[int, str]) -> dict[int, TokenLogprob]:
    choices = [TokenChoice(int(tokens[row]), n) for row, n in zip(raw.rows, raw.num_top, strict=True)]
    found = gather_logprobs(raw.values, choices)
    return {row: entry for row, entry in zip(raw.rows, found, strict=True) if row not in faults}


def _faults(largest: Tensor) -> dict[int, str]:
    """Row -> reason, where the largest logit of a row is not a number one can sample from."""
    values = largest.to(torch.float32).numpy()
    finite = np.isfinite(values)
    if finite.all():
        return {}
    return {
        i: "no token is allowed" if values[i] == -np.inf else f"the model gave {values[i]} logits"
        for i in np.flatnonzero(~finite).tolist()
    }
