"""Guesses that branch: the likeliest nodes of a tree that a draft model spans over its own guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from lmkit.api import PluginError

from lmkit_worker.along import Along
from lmkit_worker.branches import MOST, seen

if TYPE_CHECKING:
    from lmkit.api import StepResult
    from lmkit_layers.drafts import DraftProposer
    from torch import Tensor

    from lmkit_worker.inputs import InputBuilder, Step
    from lmkit_worker.rows import RowTable


class Tree:
    """What may follow a row: nodes in the order in which they were found, parents before children."""

    def __init__(self, limit: int, places: int) -> None:
        """`limit`: nodes that are wanted. `places`: nodes over which the draft may run."""
        self.limit, self.places = limit, min(places, MOST)
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []  # logarithm of the probability of the whole path
        self.ran: dict[int, int] = {}  # node -> its number among those that the draft ran over
        self._fresh = 0  # nodes from here on have not been looked at

    def add(self, parent: int, tokens: Sequence[int], scores: Sequence[float]) -> None:
        """Children of a node, -1: of the row's last token."""
        before = self.scores[parent] if parent >= 0 else 0.0
        self.tokens += tokens
        self.parents += [parent] * len(tokens)
        self.scores += [before + score for score in scores]

    def likeliest(self) -> list[int]:
        """The `limit` likeliest nodes, in order. A parent is no less likely than its child, so it is among them."""
        ranked = sorted(range(len(self.scores)), key=lambda node: -self.scores[node])  # stable: parents first
        return sorted(ranked[: self.limit])

    def grow(self) -> list[int]:
        """The new nodes whose children may be wanted, as far as there are places; they count as run over."""
        chosen = [node for node in self.likeliest() if node >= self._fresh][: self.places - len(self.ran)]
        self._fresh = len(self.tokens)
        for node in chosen:
            self.ran[node] = len(self.ran)
        return chosen

    def tree_of_run(self) -> tuple[np.ndarray, np.ndarray]:
        """Depths and bits, as `branches.seen`, of the nodes that the draft ran over."""
        return seen([self.ran.get(self.parents[node], -1) for node in self.ran])

    def chosen(self) -> tuple[list[int], list[int]]:
        """Tokens and parents of the likeliest nodes."""
        nodes = self.likeliest()
        number = {node: i for i, node in enumerate(nodes)}
        return [self.tokens[node] for node in nodes], [number.get(self.parents[node], -1) for node in nodes]


class TreeDrafting:
    """A draft whose guesses branch: `DraftProposer.children` at each depth, of which those stay that are likeliest by
    the draft's own probabilities (Li et al. 2024, arXiv:2406.16858, "EAGLE-2").

    As Drafting it runs along what the steps computed, then over the nodes of one depth at a time, whose keys stand one
    behind the other.
    """

    reads_hidden = branches = True
    hopeless = False

    def __init__(self, proposer: DraftProposer, rows: RowTable, inputs: InputBuilder) -> None:
        """Raises PluginError for a draft that reads no hidden states."""
        self.proposer, self.name = proposer, type(proposer).__name__
        if not proposer.reads_hidden:
            raise PluginError(
                f"{self.name}: guesses branch only where a draft reads hidden states", fix="no `children`"
            )
        self._rows, self._inputs = rows, inputs
        self._along = Along(proposer, rows, inputs)
        self._sizes = np.array([spec.block_size for spec in inputs.specs])

    def guess(
        self, step: Step, hidden: Tensor, result: StepResult, asked: Sequence[int], most: Sequence[int]
    ) -> list[list[int]]:
        """Contract: Source. Parents of the guesses stand in `result.parents`."""
        if not asked and self._along.put_off(step, hidden, self.hopeless):
            return []
        slots = step.slots[list(asked)]
        known = self._rows.num_tokens[slots]
        self._along.catch_up()
        state = self._along.follow(step, hidden, result, asked)
        if not asked:
            return []
        begin = known - 1  # the place of the first node over which the draft runs
        room = self._rows.room(slots, self._sizes) - begin
        share = self._inputs.limits.max_tokens // len(asked)
        trees = [Tree(min(limit, share), int(max(places, 0))) for limit, places in zip(most, room, strict=True)]
        at = [(row, -1) for row in range(len(trees))]  # whose child each row of `state` guesses
        for depth, num in enumerate(self.proposer.children, 1):
            ids, scores = self.proposer.branch(state, num)
            sources: list[dict[int, int]] = [{} for _ in trees]  # by tree: node -> the row of `state` it is from
            for i, ((row, parent), tokens, each) in enumerate(zip(at, ids.tolist(), scores.tolist(), strict=True)):
                first = len(trees[row].tokens)
                trees[row].add(parent, tokens, each)
                sources[row] |= dict.fromkeys(range(first, first + len(tokens)), i)
            if depth == len(self.proposer.children):
                break
            fresh = [tree.grow() for tree in trees]
            at = [(row, node) for row, nodes in enumerate(fresh) for node in nodes]
            if not at:
                break
            state = self._level(slots, begin, trees, fresh, state[[sources[row][node] for row, node in at]])
        result.parents = [[] for _ in step.plan.rows]
        guesses = [tree.chosen() for tree in trees]
        for row, (_, parents) in zip(asked, guesses, strict=True):
            result.parents[row] = parents
        return [tokens for tokens, _ in guesses]

    def rest(self) -> None:
        """Contract: Source."""
        self._along.forget()

    def _level(
        self, slots: np.ndarray, begin: np.ndarray, trees: Sequence[Tree], fresh: Sequence[list[int]], state: Tensor
    ) -> Tensor:
        """The states [N, D] after the `fresh` nodes of each tree, of the states [N, D] before them."""
        some = [row for row, nodes in enumerate(fresh) if nodes]
        lengths = np.array([len(fresh[row]) for row in some], np.int64)
        starts = begin[some] + np.array([len(trees[row].ran) for row in some]) - lengths
        positions, bits = [], []
        for row in some:
            depths, tree = trees[row].tree_of_run()
            positions.append((begin[row] - 1 + depths)[-len(fresh[row]) :])
            bits.append(tree[-len(fresh[row]) :])
        x, _ = self._inputs.spans(slots[some], starts, lengths, np.concatenate(positions), np.concatenate(bits))
        ids = [trees[row].tokens[node] for row in some for node in fresh[row]]
        x.token_ids.copy_(torch.tensor(ids))
        x.embeds = self.proposer.enter(x.token_ids, state)
        return self.proposer.state(replace(x, only_logits=False))
