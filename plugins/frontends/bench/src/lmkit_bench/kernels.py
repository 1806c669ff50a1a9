"""Every kernel that could run a model, measured on the shapes of that model against the limits of the machine.

The cases follow from the seams: each linear kernel that passes selection, on each distinct linear of the model, with 1,
16 and 512 rows; a layer of experts on the kernel it runs on, likewise; each implementation of the row-wise operators;
each attention backend, in decode and prefill. Plugins add more (`lmkit_benchmarks`).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from typing import Any, TypeVar

import torch
from lmkit.api import (
    AttnNeed,
    AttnPlan,
    BenchmarkCase,
    BenchmarkSpec,
    LinearKernel,
    LinearSpec,
    ModelInfo,
    PackedWeight,
    PluginError,
    QuantFormat,
    RowOps,
    StepLimits,
)
from lmkit.config import EngineConfig
from lmkit.config.environment import adopt_environment
from lmkit.engine.platform import platform_environment
from lmkit.plugins import load_ref, load_target
from lmkit.plugins.host import PluginHost
from lmkit.plugins.resolve import Resolver
from lmkit_layers.build import Builder
from lmkit_layers.experts import Experts
from lmkit_layers.linear import PLAIN
from lmkit_worker.loading.load import make_builder
from torch import Tensor

from lmkit_bench.limits import Limits, limit_cases, measure
from lmkit_bench.pages import PagedRows

Item = TypeVar("Item")
Wanted = Callable[[str], bool]  # of the name of a case
ROWS = (1, 16, 512)
ROTATED_BYTES = 256 << 20  # one-row kernels go round through this much, so that no cache holds what they read
MAX_COPIES = 64
CHOICES = 16  # of experts, by all rows, in turn
DECODE = ((1, 1024), (1, 8192), (16, 1024))  # rows, tokens of each
PREFILL = 2048


@dataclass(frozen=True, slots=True)
class Measured:
    """One case, and the seconds of each run."""

    case: BenchmarkCase
    samples: list[float]

    @property
    def seconds(self) -> float:
        return statistics.median(self.samples)


def run_cases(
    cases: Iterator[BenchmarkCase], limits: Limits, seen: Callable[[str], None] = lambda name: None
) -> list[Measured]:
    """Measures each in turn, and takes in the limits among them. What the cases hold is let go."""
    found = []
    for case in cases:
        seen(case.name)
        samples = measure(case)
        limits.learn(case, min(samples))
        found.append(Measured(replace(case, run=_nothing), samples))
    return found


def _nothing() -> None:
    pass


def all_cases(config: EngineConfig, host: PluginHost, only: str = "*") -> Iterator[BenchmarkCase]:
    """Limits first, then plugins' own cases (theirs may raise a limit), then linear and attention kernels.

    `only`: a glob over the names of the cases that are no limits; "" leaves the limits alone. Raises what prevents a
    resolution.
    """

    def wanted(name: str) -> bool:
        return fnmatch(name, only)

    resolver = Resolver(config, host)
    resolver.run()
    plan, info = resolver.plan(), resolver.known.info
    adopt_environment(platform_environment(config, plan))
    platform = load_target(_choice(plan, "platform"))()
    platform.bind(0)
    if config.parallel.threads:
        torch.set_num_threads(config.parallel.threads)
    builder = make_builder(plan, resolver.known.checkpoint, info, None)
    dtype = str(plan.value("dtype", info.dtype))
    kv_dtype, size = str(plan.value("kv_dtype", dtype)), int(plan.value("block_size", 0))
    needs = [replace(n, dtype=dtype, kv_dtype=kv_dtype, block_size=size) for n, _ in info.kv_groups()[:1]]
    with torch.inference_mode():
        yield from limit_cases()
        yield from (case for case in plugin_cases(host) if case.limit or wanted(case.name))
        dense = [spec for spec in reversed(info.linears) if not spec.experts]
        for spec in {(s.in_features, s.total_out): s for s in dense}.values():
            for kernel, fmt in _kernels_for(builder, spec):
                yield from linear_cases(kernel, fmt, spec, builder.dtype, wanted)
        yield from experts_cases(builder, wanted)
        for target in _survivors(resolver, "op", "rowwise"):
            yield from rowwise_cases(target(), info, needs, builder.dtype, wanted)
        for target in _survivors(resolver, "attention"):
            yield from attention_cases(target(), needs[0], platform, wanted)


def _choice(plan: Any, kind: str) -> Any:
    choice = plan.choice(kind)
    if choice is None:
        raise PluginError(f"no {kind} was chosen", fix=f"lmkit explain {kind}")
    return choice


def _survivors(resolver: Resolver, kind: str, component: str | None = None) -> Iterator[Any]:
    """Implementations that passed selection, best first."""
    for outcome in resolver.outcomes:
        if outcome.request.kind == kind and component in (None, outcome.request.component):
            yield from (load_target(c.spec.target) for c in outcome.survivors if c.spec is not None)


def plugin_cases(host: PluginHost) -> Iterator[BenchmarkCase]:
    """What `lmkit_benchmarks` yields. Raises PluginError naming the plugin."""
    for module, spec in host.gather("lmkit_benchmarks"):
        if not isinstance(spec, BenchmarkSpec):
            raise PluginError(f"lmkit_benchmarks of {module} returned {spec!r}, not a BenchmarkSpec")
        yield from load_ref(spec.target, module)()


# ------------------------------------------------------------------------------------------------------- linear


def _kernels_for(builder: Any, spec: LinearSpec) -> Iterator[tuple[LinearKernel, QuantFormat]]:
    """The kernels that can run a layer in the format the model stores it in."""
    fmt = (builder.scheme.for_layer(spec) if builder.scheme else None) or PLAIN
    for kernel in builder.kernels.get(f"linear:{fmt.name}", ()):
        if kernel.can_run(fmt, spec, builder.device) is None:
            yield kernel, fmt


def linear_cases(
    kernel: LinearKernel, fmt: QuantFormat, spec: LinearSpec, dtype: torch.dtype, wanted: Wanted
) -> Iterator[BenchmarkCase]:
    """One layer with ROWS rows of activations. Bytes are those of the packed weight and of what goes in and out."""
    names = {rows: f"{kernel.name} {fmt.name} {rows}x{spec.in_features}->{spec.total_out}" for rows in ROWS}
    names = {rows: name for rows, name in names.items() if wanted(name)}
    if not names:
        return
    first = kernel.pack(fmt, random_params(fmt, spec, dtype), spec, dtype)
    copies = min(MAX_COPIES, max(1, ROTATED_BYTES // max(1, first.nbytes)))
    weights = [first, *(kernel.pack(fmt, random_params(fmt, spec, dtype), spec, dtype) for _ in range(copies - 1))]
    for rows, name in names.items():
        x = torch.randn(rows, spec.in_features).to(dtype)
        yield BenchmarkCase(
            name=name,
            run=rotating(weights, partial(_apply, kernel, x)),
            bytes=first.nbytes + x.element_size() * rows * (spec.in_features + spec.total_out),
            flops=2 * rows * spec.in_features * spec.total_out,
            dtype=str(dtype).removeprefix("torch."),
        )


def _apply(kernel: LinearKernel, x: Tensor, weight: PackedWeight) -> Tensor:
    return kernel.apply(x, weight, None)


def rotating(items: Sequence[Item], run: Callable[[Item], object]) -> Callable[[], object]:
    """Calls `run` with the next item each time."""
    turn = itertools.cycle(items)
    return lambda: run(next(turn))


def random_params(fmt: QuantFormat, spec: LinearSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """Stored tensors of a format with random contents: small numbers, positive where they are scales."""
    params: dict[str, Tensor] = {}
    for name, p in fmt.params(spec, str(dtype).removeprefix("torch.")).items():
        if p.optional and name.removesuffix("_inv") in params:
            continue  # another name of the same scales
        stored = getattr(torch, p.dtype)
        if stored.is_floating_point:
            value = torch.rand(p.shape) if "scale" in name else torch.randn(p.shape)
            params[name] = (value * 0.02).to(stored)
        else:
            params[name] = torch.randint(0, 127, p.shape).to(stored)
    return params


# ------------------------------------------------------------------------------------------------------ experts


def experts_cases(builder: Builder, wanted: Wanted) -> Iterator[BenchmarkCase]:
    """The model's first layer with experts, ROWS rows choosing at random, on the kernel that it runs on.

    Bytes are those of the packed weights of chosen experts, and of what goes in and out.
    """
    stacked = [replace(spec, bias=False) for spec in builder.info.linears if spec.experts][:2]
    if not stacked:
        return
    up, down = stacked
    config: dict[str, Any] = dict(builder.info.config)
    moe = config.get("moe") or {}
    top_k, act = moe.get("top_k", 2), moe.get("activation") or config.get("activation", "silu")

    def make() -> Experts:
        with torch.device("meta"):
            return builder.experts(up, down, act)

    first = make()
    kind = f"{first.kernel.name} {first.up.format.name}"
    shape = f"{up.in_features}->{down.in_features} {top_k}/{up.experts}"
    names = {rows: name for rows in ROWS if wanted(name := f"{kind} {rows}x{shape}")}
    if not names:
        return
    layers = [_packed(first)]
    size = sum(linear.packed.nbytes for linear in (first.up, first.down) if linear.packed is not None)
    layers += [_packed(make()) for _ in range(min(MAX_COPIES, ROTATED_BYTES // size) - 1)]
    for rows, name in names.items():
        x, weights = torch.randn(rows, up.in_features).to(builder.dtype), torch.rand(rows, top_k).to(builder.dtype)
        choices = [torch.rand(rows, up.experts).topk(top_k).indices for _ in range(CHOICES)]
        chosen = sum(len(ids.unique()) for ids in choices) / CHOICES
        yield BenchmarkCase(
            name=name,
            run=rotating(list(itertools.product(choices, layers)), partial(_mix, x, weights)),
            bytes=int(size * chosen / up.experts) + 2 * x.nbytes,
            flops=2 * rows * top_k * (up.in_features * up.total_out + down.in_features * down.total_out) // up.experts,
            dtype=str(builder.dtype).removeprefix("torch."),
        )


def _packed(experts: Experts) -> Experts:
    """With random weights."""
    for linear in (experts.up, experts.down):
        params = random_params(linear.format, linear.spec, linear.dtype)
        linear.packed = linear.kernel.pack(linear.format, params, linear.spec, linear.dtype)
    return experts


def _mix(x: Tensor, weights: Tensor, case: tuple[Tensor, Experts]) -> Tensor:
    ids, experts = case
    return experts(x, ids, weights)


# ----------------------------------------------------------------------------------------------------- row-wise


def rowwise_cases(
    ops: RowOps, info: ModelInfo, needs: Sequence[AttnNeed], dtype: torch.dtype, wanted: Wanted
) -> Iterator[BenchmarkCase]:
    """Norm with residual, gated activation and rotation, on ROWS rows. Bytes are those of what goes in and out."""
    hidden, middle = info.hidden_size, info.intermediate_size or 4 * info.hidden_size
    for rows in ROWS:
        x, residual = torch.randn(2, rows, hidden).to(dtype)
        weight = torch.ones(hidden, dtype=dtype)
        gated = torch.randn(rows, 2 * middle).to(dtype)
        cases: dict[str, tuple[Callable[[], object], int]] = {
            f"rms_norm {rows}x{hidden}": (partial(ops.rms_norm, x, weight, 1e-6, residual), 4 * x.nbytes),
            f"gate {rows}x{middle}": (partial(ops.gate, gated, "silu"), gated.nbytes * 3 // 2),
        }
        for need in needs:
            heads = torch.randn(rows, need.num_q_heads, need.head_dim).to(dtype)
            cos, sin = torch.randn(2, rows, need.head_dim // 2)
            name = f"rotate {rows}x{need.num_q_heads}x{need.head_dim}"
            cases[name] = partial(ops.rotate, heads, cos, sin), 2 * heads.nbytes + 2 * cos.nbytes
        for name, (run, size) in cases.items():
            if wanted(f"{ops.name} {name}"):
                yield BenchmarkCase(name=f"{ops.name} {name}", run=run, bytes=size)


# ---------------------------------------------------------------------------------------------------- attention


def attention_cases(backend: Any, need: AttnNeed, platform: Any, wanted: Wanted) -> Iterator[BenchmarkCase]:
    """Decode steps over contexts of several lengths, and one prompt. Bytes are those of the KV that is read."""
    heads = f"d{need.head_dim} {need.num_q_heads}/{need.num_kv_heads} {need.kv_dtype}"
    for phase, rows, length, fresh in (*(("decode", *d, 1) for d in DECODE), ("prefill", 1, PREFILL, PREFILL)):
        name = f"attention {backend.name} {phase} {rows}x{length} {heads}"
        if wanted(name):
            yield _attention_case(name, backend, need, platform, rows, length, fresh)


def _attention_case(
    name: str, backend: Any, need: AttnNeed, platform: Any, rows: int, length: int, fresh: int
) -> BenchmarkCase:
    """`rows` rows of `length` tokens, of which the last `fresh` are new."""
    num_blocks = rows * -(-length // need.block_size) + 1
    limits = StepLimits(rows, max(rows * fresh, rows), num_blocks, length)
    paged = PagedRows(rows, num_blocks, need.block_size)
    if length > fresh:
        paged.grow([(row, length - fresh) for row in range(rows)])
    planner = backend.planner(need, limits, platform)
    plan = planner.plan(paged.grow([(row, fresh) for row in range(rows)]))
    dtype = getattr(torch, need.dtype)
    v_dim = need.v_head_dim or need.head_dim
    shape = backend.kv_shape(need, num_blocks)
    size = rows * length * need.kv_bytes(need.kv_dtype)
    copies = min(MAX_COPIES, max(1, ROTATED_BYTES // size))
    memory = torch.empty(shape, dtype=getattr(torch, need.kv_dtype))
    slots = torch.arange(num_blocks * need.block_size)
    k, v = (torch.randn(len(slots), need.num_kv_heads, d).to(dtype) for d in (need.head_dim, v_dim))
    backend.write_kv(k, v, memory, slots)
    memories = [memory, *(memory.clone() for _ in range(copies - 1))]
    q = torch.randn(rows * fresh, need.num_q_heads, need.head_dim).to(dtype)
    out = torch.empty(rows * fresh, need.num_q_heads, v_dim, dtype=dtype)
    pairs = rows * sum(range(length - fresh + 1, length + 1))  # of a query and a position it sees
    return BenchmarkCase(
        name=name,
        run=rotating(memories, partial(_attend, backend, planner, plan, q, out, need.head_dim**-0.5)),
        bytes=size + q.nbytes + out.nbytes,
        flops=2 * pairs * need.num_q_heads * (need.head_dim + v_dim),
        dtype=need.dtype,
    )


def _attend(backend: Any, planner: Any, plan: AttnPlan, q: Tensor, out: Tensor, scale: float, kv: Tensor) -> None:
    """One call. The planner is held because it owns what the plan points to."""
    backend.forward(q, kv, plan, scale, out)
