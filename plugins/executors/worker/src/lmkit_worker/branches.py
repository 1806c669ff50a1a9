"""Drafts that branch: a tree of them is verified in one step, and the keys of the path that came true move together.

The drafts of a row stand one behind the other in KV memory, parents before children; what each sees of the others and
its position follow from its path (tree attention: Miao et al. 2023, arXiv:2305.09781, "SpecInfer"). In `parents` each
draft has the number of the one that it follows, -1 for the last known token; no parents at all: each follows the one
before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from lmkit.api import PluginError

if TYPE_CHECKING:
    from lmkit.api import AttentionBackend, AttnNeed, TreeAttention

    from lmkit_worker.blocks import Blocks
    from lmkit_worker.rows import RowTable

ALL = -1  # bits of AttnBatch.tree, of a token that sees all that is before it
MOST = 63  # drafts of a tree: beside the last known token, as many as there are bits


def check(drafts: Sequence[int], parents: Sequence[int]) -> str:
    """What is wrong with a tree of drafts; "" where nothing is."""
    if not parents:
        return ""
    if len(parents) != len(drafts) or len(drafts) > MOST:
        return f"{len(parents)} parents for {len(drafts)} drafts, at most {MOST}"
    wrong = [i for i, parent in enumerate(parents) if not -1 <= parent < i]
    return f"draft {wrong[0]} follows {parents[wrong[0]]}, which does not stand before it" if wrong else ""


def paths(drafts: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """The drafts before the token drawn after none of them, and after each, that one included."""
    found: list[list[int]] = [[]]
    for i, draft in enumerate(drafts):
        found.append([*found[(parents[i] if parents else i - 1) + 1], draft])
    return found


def follow(drawn: Sequence[int], drafts: Sequence[int], parents: Sequence[int]) -> list[int]:
    """The longest path of right drafts: each is the token drawn after the one before it.

    `drawn[0]` is drawn after the last known token, `drawn[1 + i]` after draft i. Of equal siblings the first counts.
    """
    path: list[int] = []
    last = -1
    for i, draft in enumerate(drafts):
        if parents[i] == last and draft == drawn[last + 1]:
            path.append(i)
            last = i
    return path


def seen(parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Depths [K] of drafts, 1 after the last known token, and their bits of AttnBatch.tree [K], as a row's last."""
    k = len(parents)
    depths, bits = np.zeros(k, np.int64), np.full(k, ALL << k, np.int64)
    for i, parent in enumerate(parents):
        if parent >= 0:
            depths[i], bits[i] = depths[parent], bits[parent]
        depths[i] += 1
        bits[i] |= 1 << (k - 1 - i)
    return depths, bits


def branched(
    positions: np.ndarray, query_start: np.ndarray, parents: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Positions [T] and AttnBatch.tree [T] of a step whose tokens stand at the places `positions` [T].

    `parents` [R] of each row's drafts, which are its last tokens.
    """
    positions, tree = positions.copy(), np.full(len(positions), ALL, np.int64)
    for row, each in enumerate(parents):
        if each:
            end = int(query_start[row + 1])
            first = end - len(each)
            depths, tree[first:end] = seen(each)
            positions[first:end] = positions[first - 1] + depths
    return positions, tree


class Mover:
    """Moves keys and values of accepted drafts to where their positions are."""

    def __init__(
        self, rows: RowTable, blocks: Blocks, needs: Sequence[AttnNeed], backends: Sequence[AttentionBackend]
    ) -> None:
        """`needs` and `backends`: one per KV group of attention layers."""
        self._rows, self._blocks, self._needs, self._backends = rows, blocks, needs, backends

    def __call__(self, slots: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> None:
        """From the places `sources` [N] of rows in `slots` [N] to the places `targets`, before all of the sources
        that follow."""
        for group, (need, backend) in enumerate(zip(self._needs, self._backends, strict=True)):
            table, size = self._rows.table[group], need.block_size
            if not need.tree:
                raise PluginError("drafts branch, and attention was not asked for trees")
            tree: TreeAttention = backend  # type: ignore[assignment]
            kv = self._blocks.paged[group]
            ends = [
                torch.from_numpy(table[slots, places // size] * np.int64(size) + places % size).to(kv.device)
                for places in (sources, targets)
            ]
            tree.move_kv(kv, need, *ends)
