"""Trees of drafts change no token: the scheduler, the runner and the sampler with trees of every sort, and faults that
are planted. `nox -s drafts` runs many more cases (TREE_CASES)."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lmkit.api import SamplingParams, TokenEvent
from lmkit_testing.toy_engine import Places, ToyEngine, Trees
from lmkit_worker import branches, lengths, proposals
from lmkit_worker.branches import Mover, check, follow, paths, seen
from lmkit_worker.trees import Tree

from tests.drafts.test_sampling import LiftsLast, cases

CASES = int(os.environ.get("TREE_CASES", "40"))
VOCAB = 12
PROCESSORS = {"lifts_last": LiftsLast()}
Follows = dict[tuple[int, ...], list[int]]


@pytest.fixture(autouse=True)
def _large_trees(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows hardly share the tokens of a step."""
    with monkeypatch.context() as patch:
        patch.setattr(lengths, "TOKENS", 64)
        patch.setattr(proposals, "clock", lambda: 0.0)
        yield


def tree_maker(follows: Follows, seed: int, right: float, wide: float) -> Trees:
    """Trees of random shape. Tokens are, with the chance `right`, what follows at their depth, whatever their parents
    are: the child of a wrong one is often the very token that is drawn there."""
    rng = random.Random(seed)

    def tree(text: list[int], most: int) -> tuple[list[int], list[int]]:
        wanted = follows.get(tuple(text), [])
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        for i in range(rng.randint(0, most)):
            parent = rng.randint(-1, i - 1) if rng.random() < wide else i - 1
            depth = depths[parent] + 1 if parent >= 0 else 0
            token = wanted[depth] if depth < len(wanted) and rng.random() < right else rng.randrange(VOCAB)
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
        return tokens, parents

    return tree


def same(one: Sequence[list[TokenEvent]], other: Sequence[list[TokenEvent]]) -> bool:
    def parts(events: list[TokenEvent]) -> Any:
        logprobs = [(e.token, round(e.logprob, 4), e.rank) for event in events for e in event.logprobs]
        return [t for e in events for t in e.tokens], logprobs, events[-1].finish

    return [parts(events) for events in one] == [parts(events) for events in other]


def trial(
    asked: list[tuple[list[int], SamplingParams]], seed: int, right: float, wide: float, **sizes: int
) -> tuple[bool, ToyEngine]:
    """Whether trees leave all tokens as they are, and the engine that had them."""
    prompts, wanted = [prompt for prompt, _ in asked], [params for _, params in asked]
    plain = ToyEngine(VOCAB, processors=PROCESSORS, model=Places).answers(prompts, wanted)
    follows: Follows = {}
    for prompt, events in zip(prompts, plain, strict=True):
        text = [*prompt, *(token for event in events for token in event.tokens)]
        follows |= {tuple(text[:i]): text[i:] for i in range(len(prompt), len(text))}
    trees = tree_maker(follows, seed, right, wide)
    engine = ToyEngine(VOCAB, trees=trees, processors=PROCESSORS, model=Places, **sizes)
    return same(plain, engine.answers(prompts, wanted)), engine


@settings(deadline=None, max_examples=CASES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cases,
    st.integers(0, 1 << 30),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.integers(1, 16),
    st.integers(1, 5),
    st.sampled_from([0, 20, 30]),
    st.sampled_from([8, 64]),
)
def test_no_token_changes(
    asked: list[tuple[list[int], SamplingParams]], seed: int, right: float, wide: float, most: int, rows: int,
    num_blocks: int, max_tokens: int,
) -> None:  # fmt: skip
    """Rows that share prompts (and cached blocks), that are preempted for want of blocks, with prompts in chunks."""
    fields = [{n: getattr(p, n) for n in p.__dataclass_fields__} for _, p in asked]
    params = [SamplingParams(**{**f, "min_tokens": min(7, f["max_tokens"])}) for f in fields]
    asked = [(prompt, p) for (prompt, _), p in zip(asked, params, strict=True)]
    sizes = {"most": most, "max_rows": rows, "num_blocks": num_blocks, "max_tokens": max_tokens}
    assert trial(asked, seed, right, wide, **sizes)[0]


def usual(seed: int, **more: Any) -> list[tuple[list[int], SamplingParams]]:
    params = {"max_tokens": 20, "temperature": 1.0, "seed": seed, "ignore_eos": True, "logprobs": 1, **more}
    return [([2 + seed % 3, 3, 4] * 3 + [row], SamplingParams(**params)) for row in range(2)]


def test_trees_yield_several_tokens_a_step_and_rows_are_preempted() -> None:
    found = [trial(usual(seed), seed, 0.9, 0.5, num_blocks=11) for seed in range(6)]
    assert all(equal for equal, _ in found)
    stats = [engine.stats for _, engine in found]
    assert sum(s.num_accepted for s in stats) > 80
    assert sum(s.num_preempted for s in stats) > 5
    assert sum(s.num_cached_tokens for s in stats) > 20


def sibling_counts(drawn: Sequence[int], drafts: Sequence[int], parents: Sequence[int]) -> list[int]:
    """A child of the accepted draft's sibling counts as its own."""
    path: list[int] = []
    depths = seen(parents)[0].tolist() if parents else []
    for i, draft in enumerate(drafts):
        if depths[i] == len(path) + 1 and draft == drawn[(path[-1] if path else -1) + 1]:
            path.append(i)
    return path


def before_is_parent(parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Each draft sees all that stand before it; depths are right."""
    depths, _ = seen(parents)
    return depths, seen(range(-1, len(parents) - 1))[1]


def child_of_grandparent(parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """A draft does not see its parent, but all else of its path."""
    depths, bits = seen(parents)
    k = len(parents)
    return depths, np.array([b & ~(1 << (k - 1 - p)) if p >= 0 else b for b, p in zip(bits, parents, strict=True)])


def place_is_position(parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """A draft's position is its place."""
    return np.arange(1, len(parents) + 1), seen(parents)[1]


def no_move(self: Mover, slots: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> None:
    """Keys stay where they are."""


def moved_back(self: Mover, slots: np.ndarray, sources: np.ndarray, targets: np.ndarray) -> None:
    """Keys move a place too far."""
    MOVE(self, slots, sources, targets - 1)


def chain_paths(drafts: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """Penalties and processors take all drafts that stand before for the text."""
    return paths(drafts, ())


MOVE = Mover.__call__
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "a sibling's child counts": (branches, "follow", sibling_counts),
    "the one before is the parent": (branches, "seen", before_is_parent),
    "the parent is not seen": (branches, "seen", child_of_grandparent),
    "a place is a position": (branches, "seen", place_is_position),
    "keys are not moved": (Mover, "__call__", no_move),
    "keys are moved too far": (Mover, "__call__", moved_back),
    "penalties follow no path": (branches, "paths", chain_paths),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, name, wrong = FAULTS[fault]
    more = {"frequency_penalty": 2.0} if "penalties" in fault else {}
    assert all(trial(usual(seed, **more), seed, 0.9, 0.7)[0] for seed in range(4))
    monkeypatch.setattr(where, name, wrong)
    assert not all(trial(usual(seed, **more), seed, 0.9, 0.7)[0] for seed in range(8))


trees = st.integers(0, 20).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(0, 3), min_size=n, max_size=n), st.tuples(*(st.integers(-1, i - 1) for i in range(n)))
    )
)


@given(trees)
def test_what_a_draft_sees_is_its_path(tree: tuple[list[int], tuple[int, ...]]) -> None:
    drafts, parents = tree
    assert check(drafts, parents) == ""
    depths, bits = seen(parents)
    for i, path in enumerate(paths(drafts, parents)[1:] if parents else []):
        ancestors = [j for j in range(len(drafts)) if bits[i] >> (len(drafts) - 1 - j) & 1]
        assert [drafts[j] for j in ancestors] == path
        assert depths[i] == len(path)
        assert ancestors[-1] == i
        assert all(parents[b] == a for a, b in zip([-1, *ancestors], ancestors, strict=False))


@given(trees, st.data())
def test_the_longest_right_path_is_followed(tree: tuple[list[int], tuple[int, ...]], data: st.DataObject) -> None:
    """Among all paths whose every draft is what is drawn after the one before it."""
    drafts, parents = tree
    drawn = data.draw(st.lists(st.integers(0, 3), min_size=len(drafts) + 1, max_size=len(drafts) + 1))
    path = follow(drawn, drafts, parents)
    right = [all(drafts[b] == drawn[a + 1] for a, b in zip([-1, *p], p, strict=False)) for p in whole(parents)]
    assert right[whole(parents).index(path)] if path else True
    unique = {(p, t) for p, t in zip(parents, drafts, strict=True)}
    if len(unique) == len(drafts):  # no two siblings are equal
        longest = max([len(p) for p, fits in zip(whole(parents), right, strict=True) if fits], default=0)
        assert len(path) == longest


def whole(parents: Sequence[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for i, parent in enumerate(parents):
        found.append([*(found[parent] if parent >= 0 else []), i])
    return found


@given(st.integers(1, 12), st.integers(0, 30), st.data())
def test_the_likeliest_nodes_are_chosen(limit: int, places: int, data: st.DataObject) -> None:
    """As many as are wanted, parents before children, no likelier one left out of those that were looked at."""
    tree = Tree(limit, places)
    at = [-1]
    for _ in range(data.draw(st.integers(1, 4))):
        for node in at:
            scores = sorted(data.draw(st.lists(st.floats(-5, 0), min_size=1, max_size=3)), reverse=True)
            tree.add(node, list(range(len(scores))), scores)
        at = tree.grow()
    tokens, parents = tree.chosen()
    assert len(tree.ran) <= places
    assert len(tokens) == min(limit, len(tree.tokens))
    assert check(tokens, parents) == ""
    chosen = tree.likeliest()
    assert all(tree.parents[node] in (-1, *chosen) for node in chosen)
    left = [score for node, score in enumerate(tree.scores) if node not in chosen]
    assert max(left, default=-1e9) <= min(tree.scores[node] for node in chosen)


def test_no_tree_is_refused_by_name() -> None:
    assert "2 parents for 1 drafts" in check([5], [-1, 0])
    assert "draft 0 follows 0" in check([5], [0])
    assert "draft 1 follows -2" in check([5, 6], [-1, -2])
    assert "at most 63" in check([5] * 64, range(-1, 63))
