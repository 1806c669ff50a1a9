"""The constraint of one request: thinking first if there is any, then the grammar.

It reads the request's tokens and keeps no other record of the output, so preemption, resuming and results that come
late need nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from lmkit.api import GrammarError, Matcher

from lmkit_structured_output_masks.channel import Channel, State, bit_mask


class Constraint:
    """Follows `request.tokens`. `masks` says what may come next."""

    def __init__(
        self, request: Any, matcher: Matcher | None, channel: Channel | None, ends: Sequence[int], size: int
    ) -> None:
        """`ends`: ids that end the output, allowed where the grammar is complete. `size`: columns of the logits."""
        self.request = request
        self._matcher, self._channel = matcher, channel
        self._num_seen = request.num_prompt_tokens
        self._forced: list[int] = []
        self._ends = bit_mask(size, ends)
        self._end_ids = frozenset(ends)

    @property
    def anything(self) -> np.ndarray:
        """The mask that forbids nothing."""
        return np.full_like(self._ends, -1)

    def masks(self, drafts: Sequence[int], parents: Sequence[int] = ()) -> list[np.ndarray | None]:
        """What may follow the tokens so far, and each of `drafts`; None: anything. Raises GrammarError.

        `parents`: the draft that each follows, as in RowWork.
        """
        if unseen := self.request.tokens[self._num_seen :]:
            self._follow(unseen)
        if parents:
            return self._tree_masks(drafts, parents)
        if drafts and list(drafts) == self._forced[: len(drafts)]:
            return self._forced_masks(drafts)
        return self._chain_masks(drafts)

    def _tree_masks(self, drafts: Sequence[int], parents: Sequence[int]) -> list[np.ndarray | None]:
        """Each draft is reached by its own path."""
        found = self._chain_masks(())
        paths: list[list[int]] = [[]]
        for draft, parent in zip(drafts, parents, strict=True):
            paths.append([*paths[parent + 1], draft])
            found.append(self._chain_masks(paths[-1])[-1])
        return found

    def _chain_masks(self, drafts: Sequence[int]) -> list[np.ndarray | None]:
        found, undo = [self._mask()], []
        for draft in drafts:
            before = self._channel.state if self._channel is not None else None
            num_matched = self._step(draft) if draft not in self._end_ids else None
            if num_matched is None:
                self._undo(before, 0)
                break
            undo.append((before, num_matched))
            found.append(self._mask())
        for before, num_matched in reversed(undo):
            self._undo(before, num_matched)
        return found + [None] * (len(drafts) + 1 - len(found))  # after a draft that does not fit nothing matters

    def _follow(self, tokens: Sequence[int]) -> None:
        """Moves past the next of the request's tokens. Raises GrammarError."""
        self._forced = []
        for token in tokens:
            if token not in self._end_ids and self._step(token) is None:
                raise GrammarError(f"token {token} does not fit the grammar")
        self._num_seen += len(tokens)

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """What must come after `tokens`, which were just drawn and which the request is about to get.

        Raises GrammarError.
        """
        self._follow(tokens)
        matcher, channel = self._matcher, self._channel
        if (
            matcher is None
            or matcher.exhausted
            or matcher.complete
            or (channel is not None and channel.phase != "body")
        ):
            return []
        self._forced = list(matcher.forced())
        return self._forced

    def _forced_masks(self, drafts: Sequence[int]) -> list[np.ndarray | None]:
        """Masks for drafts that were forced: each but the last has one token, and need not be asked for."""
        assert self._matcher is not None
        found: list[np.ndarray | None] = [bit_mask(32 * len(self._ends), [draft]) for draft in drafts]
        if self._matcher.accept(drafts) < len(drafts):
            raise GrammarError("tokens that were forced do not fit the grammar")
        found.append(self._mask())
        self._matcher.rollback(len(drafts))
        return found

    def _step(self, token: int) -> int | None:
        """Moves past `token`. Returns the number of tokens that the matcher moved by; None: the token does not fit."""
        channel, matcher = self._channel, self._matcher
        if channel is not None and channel.phase != "body":
            if matcher is not None and channel.may_be_body(token) and matcher.accept([token]):
                channel.phase = "body"
                return 1
            if not channel.feed(token):
                return 0
        return 0 if matcher is None else matcher.accept([token]) or None

    def _undo(self, state: State | None, num_matched: int) -> None:
        if self._channel is not None and state is not None:
            self._channel.restore(state)
        if self._matcher is not None and num_matched:
            self._matcher.rollback(num_matched)

    def _mask(self) -> np.ndarray | None:
        channel = self._channel
        if channel is not None and channel.phase != "body":
            if self._matcher is None and not channel.spent:
                return None
            if (mask := channel.mask()) is not None:
                return mask
        if self._matcher is None:
            return None
        row = np.zeros_like(self._ends)
        if not self._matcher.exhausted:
            self._matcher.fill(row)
            row &= ~self._ends
        if self._matcher.complete:
            row |= self._ends
        if channel is not None and (opening := channel.opening()) is not None:
            row |= opening
        if not row.any():
            raise GrammarError(
                "nothing may follow here: the grammar has no way to its end", fix="change the constraint"
            )
        return row
