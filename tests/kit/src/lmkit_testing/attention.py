"""Conformance of attention backends: what the spec declares, against dense attention in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from lmkit.api import (
    AttentionRequest,
    AttentionSpec,
    AttnNeed,
    AttnPlan,
    DeviceInfo,
    RotatingAttention,
    StepLimits,
    kv_scale_bytes,
)
from lmkit.plugins.refs import load_ref
from lmkit.plugins.stages import data_refusals
from lmkit_bench.pages import PlainBuffer
from lmkit_worker.branches import seen
from torch import Tensor

from lmkit_testing.dense import attend
from lmkit_testing.specs import PluginConformance
from lmkit_testing.steps import PagedRows, kv_memory, plain_platform

# Relative to the largest expected value; the looser of the two dtypes counts.
TOLERANCE: Mapping[str, float] = {
    "float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3, "float8_e4m3fn": 0.2, "float8_e5m2": 0.4, "int8": 3e-2,
}  # fmt: skip
HEAD_DIMS = (16, 64, 80, 96, 128, 192, 256)
V_HEAD_DIMS = (None, 16, 64, 128, 256)  # None: as head_dim
BLOCK_SIZES = (16, 1, 4, 32, 64, 7)
RATIOS = (1, 2, 7)
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "causal": {},
    "sliding_window": {"window": 5},
    "chunked": {"window": 5, "chunked": True},
    "softcap": {"softcap": 8.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True, "alibi_scale": 0.7},
    "bidirectional": {"causal": False},
    "bidirectional_window": {"causal": False, "window": 5},
    "mla": {"mla": True},
    "tree": {"tree": True},
}
# [T, H, D] as models hand it over: a part of something larger.
SHARED = "one head for all"
LAYOUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "some heads of a merged projection": lambda x: torch.cat((x, x[:, :1]), 1)[:, : x.shape[1]],
    "the first part of each head": lambda x: torch.cat((x, -x), -1)[..., : x.shape[-1]],
    "the last part of each head": lambda x: torch.cat((-x, x), -1)[..., x.shape[-1] :],
    "one head after the other": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every other value": lambda x: torch.stack((x, -x), -1)[..., 0],
    "every other token": lambda x: torch.stack((x, -x), 1)[:, 0],
    SHARED: lambda x: x[:, :1].expand(-1, x.shape[1], -1),
}


def without_block_0(backend: Any, need: AttnNeed, kv: Tensor) -> Tensor:
    """The memory of all other blocks, which lie one after the other in one axis."""
    one, two = (backend.kv_shape(need, n) for n in (1, 2))
    axis = next(i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
    return kv.narrow(axis, one[axis], kv.shape[axis] - one[axis])


@dataclass(frozen=True)
class Case:
    """One point of the grid."""

    dtype: str
    kv_dtype: str
    head_dim: int
    block_size: int
    ratio: int  # query heads per KV head
    feature: str
    v_head_dim: int | None = None

    @property
    def need(self) -> AttnNeed:
        kv_dtype = self.dtype if self.kv_dtype == "auto" else self.kv_dtype
        return AttnNeed(
            self.head_dim, 2 * self.ratio, 2, self.dtype, kv_dtype, self.block_size, v_head_dim=self.v_head_dim,
            **FEATURES[self.feature],
        )  # fmt: skip

    def __str__(self) -> str:
        sizes = f"d{self.head_dim}" if self.v_head_dim is None else f"d{self.head_dim}_{self.v_head_dim}"
        return f"{self.dtype}-kv_{self.kv_dtype}-{sizes}-b{self.block_size}-g{self.ratio}-{self.feature}"


def pairwise(axes: Sequence[Sequence[Any]], seed: int = 0) -> list[tuple[Any, ...]]:
    """Points such that every pair of values of two axes occurs together in at least one; greedy and deterministic."""
    numbers = random.Random(seed)
    wanted = {(i, a, j, b) for i, j in itertools.combinations(range(len(axes)), 2) for a in axes[i] for b in axes[j]}
    every = list(itertools.product(*axes))

    def covers(point: tuple[Any, ...]) -> set[tuple[int, Any, int, Any]]:
        return {(i, point[i], j, point[j]) for i, j in itertools.combinations(range(len(axes)), 2)} & wanted

    points = []
    while wanted:
        point = max(numbers.sample(every, min(200, len(every))), key=lambda p: len(covers(p)))
        if gained := covers(point):
            points.append(point)
            wanted -= gained
    return points


def needs(spec: AttentionSpec, count: int = 200) -> list[AttnNeed]:
    """Random needs of the declared dtypes: what is declared, and combinations and sizes that are not."""
    rng = random.Random(0)
    sizes = sorted(spec.head_dims.values) or [*HEAD_DIMS, 320, 512, 576]
    v_sizes = [None, None, *(sorted(spec.v_head_dims.values) if spec.v_head_dims else ()), *V_HEAD_DIMS, 512]
    found = []
    for _ in range(count):
        dtype, kv_dtype, features = (
            rng.choice(sorted(spec.dtypes)),
            rng.choice(sorted(spec.kv_dtypes)),
            rng.randint(1, 3),
        )
        changes: dict[str, Any] = {}
        for feature in rng.sample(sorted(FEATURES), features):
            changes |= FEATURES[feature]
        num_kv_heads = rng.choice((1, 1, 2, 8))
        found.append(
            AttnNeed(
                rng.choice(sizes), rng.choice((1, 3, 7, 8, 16, 24, 128)), num_kv_heads, dtype,
                dtype if kv_dtype == "auto" else kv_dtype, v_head_dim=rng.choice(v_sizes), **changes,
            )
        )  # fmt: skip
    return found


def devices() -> list[DeviceInfo]:
    """Described devices of every platform, old and new."""
    gpus = {"cuda": ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)), "rocm": ((9, 0), (9, 4), (9, 5), (11, 0))}
    every = ("float32", "bfloat16", "float16")
    return [DeviceInfo("cpu", "cpu", dtypes=every, described=True)] + [
        DeviceInfo(platform, "cuda", capability=capability, dtypes=every, described=True)
        for platform, capabilities in gpus.items()
        for capability in capabilities
    ]


def unforeseen(spec: AttentionSpec, backend: Any) -> list[str]:
    """What the backend refuses, and neither its spec nor its check: a plan would name it, and loading end there."""
    found = []
    for need, device in itertools.product(needs(spec), devices()):
        request = AttentionRequest(need=need, device=device, dtype=need.dtype)
        said = [reason for _, reason in data_refusals(spec, request, lambda dist: None, explicit=True)]
        said = [reason for reason in said if not reason.code.startswith("requirement-")]
        if not said and spec.check is not None:
            said = list(load_ref(spec.check)(request))
        refused = backend.can_run(need, device)
        if refused is not None and not said:
            found.append(f"{need} on {device.platform} {device.capability}: {refused}")
    return found


class Rows:
    """Several rows in paged memory, beside their dense originals. The values of a token depend on its row, its
    position and the seed alone."""

    def __init__(
        self, backend: Any, need: AttnNeed, *, num_rows: int, device: str = "cpu", seed: int = 0, length: int = 96,
        platform: Any = None,
    ) -> None:  # fmt: skip
        self.backend, self.need, self.device, self.seed = backend, need, device, seed
        num_blocks = 2 + num_rows * (-(-length // need.block_size) + 1)
        self.paged = PagedRows(num_rows, num_blocks, need.block_size, seed)
        self.kv = kv_memory(backend, need, num_blocks, device)
        limits = StepLimits(max_rows=num_rows, max_tokens=512, max_blocks_per_row=num_blocks, max_length=512)
        self.planner = backend.planner(need, limits, platform or plain_platform(device))
        self.past: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_rows)]
        self.sinks = torch.randn(need.num_q_heads, generator=self.noise(0, 0)) if need.sinks else None
        self.scale = need.head_dim**-0.5

    def noise(self, row: int, position: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1_000_003 + row * 1009 + position)

    def tokens(self, row: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of the next `count` tokens of a row."""
        need, noise = self.need, self.noise(row, self.paged.rows[row].length)
        sizes = (
            (need.num_q_heads, need.head_dim),
            (need.num_kv_heads, need.head_dim),
            (need.num_kv_heads, need.v_head_dim or need.head_dim),
        )
        q, k, v = (torch.randn(count, *size, generator=noise).to(getattr(torch, need.dtype)) for size in sizes)
        return q, k, k[..., : need.v_head_dim] if need.mla else v

    def run(self, work: Sequence[tuple[int, int]], fresh: Sequence[tuple[Tensor, ...]], tree: Any = None) -> Any:
        """What the backend gives for the q, k, v of each row, [tokens, Hq, Dv] of each, and the slots."""
        q, k, v = (torch.cat(parts).to(self.device) for parts in zip(*fresh, strict=True))
        batch = self.paged.grow(work, self.device)
        batch.tree = tree
        plan = self.planner.plan(batch)
        out = torch.full((*q.shape[:2], v.shape[-1]), float("nan"), dtype=q.dtype, device=self.device)
        self.backend.write_kv(k, v, self.kv, plan.slots)
        extra = () if self.sinks is None else (self.sinks.to(self.device),)
        self.backend.forward(q, self.kv, plan, self.scale, out, *extra)
        return list(out.cpu().split([count for _, count in work])), plan.slots.clone()

    def step(self, work: Sequence[tuple[int, int]]) -> tuple[list[Tensor], list[Tensor]]:
        """`work` = (row, new tokens); returns (got, expected) per row, each [tokens, Hq, Dv]."""
        fresh = [self.tokens(row, count) for row, count in work]
        got, _ = self.run(work, fresh)
        expected = []
        for (row, count), (queries, keys, values) in zip(work, fresh, strict=True):
            self.past[row].append((keys, values))
            k, v = (torch.cat(parts) for parts in zip(*self.past[row], strict=True))
            expected.append(attend(queries, k, v, len(k) - count, self.need, self.scale, self.sinks))
        return got, expected

    def branch(self, row: int, parents: Sequence[int], kept: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        """As `step`, of a row's last known token and a tree of drafts behind it, and of another row that decodes.

        Then the drafts `kept` are moved to where they belong; the others are forgotten.
        """
        known, other = self.paged.rows[row].length, (row + 1) % len(self.paged.rows)
        count = 1 + len(parents)
        work = [(other, 1), (row, count)]
        fresh = [self.tokens(*each) for each in work]
        bits = [-1, -1, *seen(parents)[1].tolist()]
        got, slots = self.run(work, fresh, PlainBuffer(torch.tensor(bits), self.device))
        expected = []
        for place, tokens in zip((other, row), fresh, strict=True):
            before = [torch.cat(parts) for parts in zip(*self.past[place], strict=True)]
            paths = [[0]] if place == other else [[0], *([0, *path] for path in self.paths(parents))]
            found = []
            for path in paths:
                k, v = (torch.cat((past, new[path])) for past, new in zip(before, tokens[1:], strict=True))
                found.append(attend(tokens[0][path[-1:]], k, v, len(k) - 1, self.need, self.scale, self.sinks))
            expected.append(torch.cat(found))
        moved = [(slots[2 + i], slots[2 + j]) for j, i in enumerate(kept) if i != j]
        if moved:
            sources, targets = (torch.stack(each) for each in zip(*moved, strict=True))
            self.backend.move_kv(self.kv[None], self.need, sources, targets)
        stay = [0, *(1 + i for i in kept)]
        self.past[other].append((fresh[0][1], fresh[0][2]))
        self.past[row].append((fresh[1][1][stay], fresh[1][2][stay]))
        self.paged.rows[row].length = known + len(stay)
        return got, expected

    @staticmethod
    def paths(parents: Sequence[int]) -> list[list[int]]:
        """The tokens of each draft's path, counted from 1."""
        found: list[list[int]] = []
        for i, parent in enumerate(parents):
            found.append([*(found[parent] if parent >= 0 else []), i + 1])
        return found


class AttentionConformance(PluginConformance):
    """Set `plugin` ("attention:mybackend"); `device` names the torch device to run on, `device_info` describes it.

    A backend that needs more of its platform than buffers overrides `platform`."""

    device: ClassVar[str] = "cpu"
    device_info: ClassVar[DeviceInfo] = DeviceInfo("cpu", "cpu", dtypes=("float32", "bfloat16", "float16"))
    tolerance: ClassVar[Mapping[str, float]] = TOLERANCE

    @pytest.fixture
    def backend(self, target: Any) -> Any:
        return target()

    def platform(self) -> Any:
        return plain_platform(self.device)

    def rows(self, backend: Any, need: AttnNeed, num_rows: int, **options: Any) -> Rows:
        return Rows(backend, need, num_rows=num_rows, device=self.device, platform=self.platform(), **options)

    def grid(self, spec: AttentionSpec, backend: Any) -> list[Case]:
        """Pairwise sample of what is declared."""
        axes = (
            sorted(d for d in spec.dtypes if d in self.device_info.dtypes),
            sorted(spec.kv_dtypes, key=lambda d: (d != "auto", d)),  # the same grid in every process
            [d for d in HEAD_DIMS if d in spec.head_dims] or sorted(spec.head_dims.values)[:2],
            [b for b in BLOCK_SIZES if b in spec.block_sizes] or sorted(spec.block_sizes.values)[:2],
            [r for r in RATIOS if r in spec.gqa_ratios] or sorted(spec.gqa_ratios.values)[:1],
            [f for f in FEATURES if f in spec.features],
            [d for d in V_HEAD_DIMS if d is None or (spec.v_head_dims is not None and d in spec.v_head_dims)],
        )
        cases = [Case(*point) for point in pairwise(axes)]
        return [c for c in cases if backend.can_run(c.need, self.device_info) is None]

    def test_selection_knows_what_cannot_run(self, spec: AttentionSpec, backend: Any) -> None:
        """What the backend refuses when it is loaded, its spec and its check refuse before, on described devices."""
        assert not unforeseen(spec, backend)

    def allowed(self, case: Case) -> float:
        return max(self.tolerance[case.need.dtype], self.tolerance[case.need.kv_dtype])

    def check(self, got: Sequence[Tensor], expected: Sequence[Tensor], case: Case) -> None:
        for row, (g, e) in enumerate(zip(got, expected, strict=True)):
            assert torch.isfinite(g).all(), (
                f"{case}: row {row} has values that are not numbers (unwritten memory read?)"
            )
            if e.numel():
                worst = float((g.double() - e).abs().max())
                limit = self.allowed(case) * max(1.0, float(e.abs().max()))
                assert worst <= limit, f"{case}: row {row} is off by {worst:.2e}, allowed {limit:.2e}"

    def test_declared_grid(self, spec: AttentionSpec, backend: Any) -> None:
        """Prompts whole and in chunks, decode rows and mixed steps of ragged lengths, over scattered blocks."""
        cases = self.grid(spec, backend)
        assert cases, "nothing declared can run on this device"
        for seed, case in enumerate(cases):
            rows = self.rows(backend, case.need, 5, seed=seed)
            steps: list[list[tuple[int, int]]]
            if not case.need.causal:
                steps = [[(0, 1), (1, 7), (2, 33)]]
            else:
                steps = [
                    [(0, 1), (1, 33), (2, 5)],  # new rows
                    [(0, 1), (2, 1), (1, 9), (3, 17)],  # decode rows, a later chunk, a new row
                    [(3, 1), (0, 1), (1, 1), (2, 1)],  # decode only, another order
                    [(1, 1), (0, 3), (4, 2)],  # some rows rest
                ]
            for work in steps:
                self.check(*rows.step(work), case)

    def test_trees(self, spec: AttentionSpec, backend: Any) -> None:
        """Drafts that branch, in rows shorter and longer than their bits; kept ones are read where they were moved."""
        if "tree" not in spec.features:
            pytest.skip("declares no trees")
        cases = [case for case in self.grid(spec, backend) if case.need.causal and not case.need.window]
        numbers = random.Random(0)
        for seed, case in enumerate(case for case in cases if not case.need.alibi):
            rows = self.rows(backend, replace(case.need, tree=True), 2, seed=seed, length=200)
            rows.step([(0, 5), (1, 90 if seed % 2 else 9)])
            for turn in range(3):
                parents = [numbers.randint(-1, i - 1) for i in range(numbers.choice([1, 4, 11]))]
                kept = [path[-1] - 1 for path in rows.paths(parents) if len(path) == 1][-1:]
                while children := [i for i, parent in enumerate(parents) if kept and parent == kept[-1]]:
                    kept.append(children[-1])
                self.check(*rows.branch(turn % 2, parents, kept), case)
                self.check(*rows.step([(0, 1), (1, 2)]), case)

    def test_empty_rows(self, spec: AttentionSpec, backend: Any) -> None:
        """Rows without new tokens are legal, and so is a step that has nothing else."""
        case = self.grid(spec, backend)[0]
        rows = self.rows(backend, case.need, 4)
        self.check(*rows.step([(0, 3), (1, 0), (2, 1)]), case)
        self.check(*rows.step([(1, 0), (0, 1), (3, 0)]), case)
        self.check(*rows.step([(1, 0)]), case)

    def test_slot_minus_one_is_nobodys(self, spec: AttentionSpec, backend: Any) -> None:
        """It is written nowhere, or in block 0, which belongs to no row."""
        for case in self.grid(spec, backend)[:4]:
            need = case.need
            whole = self.rows(backend, need, 1).kv
            v_dim = need.v_head_dim or need.head_dim
            k = torch.ones(3, need.num_kv_heads, need.head_dim, dtype=getattr(torch, case.dtype), device=self.device)
            slots = torch.tensor([-1, need.block_size, -1], device=self.device)
            backend.write_kv(k, k.new_ones(*k.shape[:2], v_dim), whole, slots)
            kv = without_block_0(backend, need, whole)
            written = int((~torch.isnan(kv.float()) if kv.is_floating_point() else kv != -1).sum())
            values = need.num_kv_heads * (need.kv_width + kv_scale_bytes(need.kv_dtype))
            assert written == values, f"{case}: {written} values written, not {values}"

    def arranged(
        self, backend: Any, case: Case, layout: str, whole: bool
    ) -> tuple[Rows, AttnPlan, tuple[Tensor, Tensor, Tensor]]:
        """A step of two new rows: q, k, v as `layout` has them, or copies without gaps."""
        rows = self.rows(backend, case.need, 2)
        fresh = [torch.cat(parts) for parts in zip(rows.tokens(0, 5), rows.tokens(1, 3), strict=True)]
        q, k, v = (LAYOUTS[layout](x.to(self.device)) for x in fresh)
        plan = rows.planner.plan(rows.paged.grow([(0, 5), (1, 3)], self.device))
        return rows, plan, (q.contiguous(), k.contiguous(), v.contiguous()) if whole else (q, k, v)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layouts_do_not_matter(self, spec: AttentionSpec, backend: Any, layout: str) -> None:
        """Queries, keys and values are views of whatever a model computed them in."""
        for case in {(c.dtype, c.v_head_dim is None): c for c in self.grid(spec, backend)}.values():
            results = []
            for whole in (True, False):
                rows, plan, (q, k, v) = self.arranged(backend, case, layout, whole)
                out = torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype, device=self.device)
                backend.write_kv(k, v, rows.kv, plan.slots)
                extra = () if rows.sinks is None else (rows.sinks.to(self.device),)
                backend.forward(q, rows.kv, plan, rows.scale, out, *extra)
                results.append(out)
            assert torch.isfinite(results[0]).all(), case
            if "batch_invariant" in spec.features:
                assert torch.equal(*results), f"{case}: another result where q, k and v are {layout}"
            self.check([results[1]], [results[0].double()], case)

    @pytest.mark.parametrize("layout", sorted(LAYOUTS.keys() - {SHARED}))
    def test_layouts_do_not_matter_to_turning(self, spec: AttentionSpec, backend: Any, layout: str) -> None:
        """The same where the backend turns queries and keys: where they lie, bit for bit."""
        if not isinstance(backend, RotatingAttention):
            pytest.skip("does not turn queries and keys")
        cos, sin = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0)).to(self.device)
        for case in {(c.dtype, c.v_head_dim is None): c for c in self.grid(spec, backend)}.values():
            results = []
            for whole in (True, False):
                rows, plan, (q, k, v) = self.arranged(backend, case, layout, whole)
                rows.kv.view(torch.uint8).zero_()
                backend.rotate_write(q, k, v, rows.kv, plan.slots, cos, sin, False)
                results.append((q, k, rows.kv.view(torch.uint8)))
            for name, first, second in zip(("q", "k", "KV memory"), *results, strict=True):
                assert torch.equal(first, second), f"{case}: another {name} where q, k and v are {layout}"

    def test_order_of_rows_permutes_outputs(self, spec: AttentionSpec, backend: Any) -> None:
        """Bit for bit where the backend claims `batch_invariant`, else within tolerance."""
        exact = "batch_invariant" in spec.features
        case = next(c for c in self.grid(spec, backend) if c.feature == "causal")
        results: list[dict[int, Tensor]] = []
        for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
            rows = self.rows(backend, case.need, 4)
            for row, count in enumerate((9, 1, 30, 17)):
                rows.step([(row, count)])
            got, _ = rows.step([(row, 1) for row in order])
            results.append(dict(zip(order, got, strict=True)))
        for row in range(4):
            first, second = (result[row] for result in results)
            assert torch.equal(first, second) if exact else torch.allclose(first, second, atol=self.allowed(case))

    def test_undeclared_is_refused(self, spec: AttentionSpec) -> None:
        """Selection refuses each feature, dtype and size that the spec does not declare, and accepts what it does."""

        def codes(**change: Any) -> set[str]:
            need = AttnNeed(**{**declared, **change})
            request = AttentionRequest(need=need, features=extra)
            return {r.code for stage, r in data_refusals(spec, request, lambda name: "999", True) if stage >= 7}

        extra: frozenset[str] = frozenset()
        dtype = min(spec.dtypes)
        head_dim = next(d for d in (*HEAD_DIMS, *sorted(spec.head_dims.values)) if d in spec.head_dims)
        ratio = next(r for r in (*RATIOS, *sorted(spec.gqa_ratios.values)) if r in spec.gqa_ratios)
        causal = "causal" in spec.features
        declared = {"head_dim": head_dim, "num_q_heads": ratio, "num_kv_heads": 1, "dtype": dtype, "causal": causal}
        assert not codes(), "a request for what is declared must be accepted"
        assert "dtype" in codes(dtype="float64")
        for feature, change in FEATURES.items():
            assert (feature not in spec.features) == ("feature" in codes(**{"causal": causal, **change}))
        for code, name, dims in (
            ("head-dim", "head_dim", spec.head_dims),
            ("block-size", "block_size", spec.block_sizes),
        ):
            for value in range(1, 300):
                assert (value not in dims) == (code in codes(**{name: value}))
        extra = frozenset({"feature_of_the_future"})
        assert "feature" in codes()
