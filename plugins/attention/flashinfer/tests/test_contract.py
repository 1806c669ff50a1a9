"""The backend against flashinfer's own Python code, without a GPU.

Only the compiled module below it is replaced, by dense attention over the very tensors that the kernel would get: what
the kernel would read wrongly gives wrong values here, and what flashinfer's code refuses, it refuses here. Mistakes are
planted to see that they are found.
"""

from __future__ import annotations

import ast
import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lmkit.api import (
    AttnBatch,
    AttnNeed,
    EngineRequest,
    KVConfig,
    NullCollectives,
    NullEvent,
    SamplingParams,
    SchedLimits,
    StepLimits,
    describe_model,
)
from lmkit.config import from_options
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake
from lmkit.plugins.resolve import resolve
from lmkit.scheduling.scheduler import Scheduler
from lmkit_attention_flashinfer import latents as latents_module
from lmkit_attention_flashinfer import pages as pages_module
from lmkit_attention_flashinfer import planner as planner_module
from lmkit_attention_flashinfer.backend import FlashInferAttention
from lmkit_attention_flashinfer.latents import LatentPlan, LatentPlanner
from lmkit_attention_flashinfer.pages import StepIntegers
from lmkit_attention_flashinfer.planner import FlashInferPlanner
from lmkit_gpu import GpuPlatform
from lmkit_testing import AttentionConformance, simgpu
from lmkit_testing.attention import Rows
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.stepper import ArrivalOrder
from lmkit_testing.toy import ToyPlatform
from lmkit_worker.future import StepFuture
from lmkit_worker.loading.load import load_model
from lmkit_worker.runner import Runner
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    flashinfer = pytest.importorskip("flashinfer", reason="flashinfer-python is not installed (nox -s flashinfer)")
    from flashinfer import decode as flashinfer_decode
    from flashinfer import mla as flashinfer_mla
    from flashinfer import prefill as flashinfer_prefill
    from flashinfer import utils as flashinfer_utils

CAUSAL = 1  # flashinfer.utils.MaskMode


class Twin:
    """Host and device memory apart from each other, as on a GPU."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.host, self.device = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def push(self, n: int) -> Tensor:
        self.device[:n].copy_(self.host[:n])
        return self.device[:n]


class TwinPlatform:
    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Twin:
        return Twin(shape, dtype)

    def event(self) -> NullEvent:
        return NullEvent()


class Kernel:
    """The compiled module for one set of dtypes and sizes. What it plans lies in its workspace, as it really does."""

    runs: ClassVar[list[tuple[Any, ...]]] = []  # arguments of all runs

    def __init__(
        self, name: str, dtype_q: torch.dtype, dtype_kv: torch.dtype, dtype_o: torch.dtype, dtype_index: torch.dtype,
        head_qk: int, head_vo: int, positions: int, sliding: bool, softcap: bool, fp16_qk: bool,
    ) -> None:  # fmt: skip
        assert dtype_index == torch.int32
        assert (positions, fp16_qk, dtype_o, head_qk) == (0, False, dtype_q, head_vo)
        assert name in ("fa2", "fa3")
        assert name == "fa2" or dtype_kv == dtype_q, "fa3 reads keys and values of the queries' dtype"
        self.dtype_q, self.dtype_kv, self.sliding, self.softcap = dtype_q, dtype_kv, sliding, softcap

    def plan(
        self, workspace: Tensor, tables: Tensor, pinned: Tensor, query_start: Tensor, indptr: Tensor, lengths: Tensor,
        total_rows: int, batch: int, heads: int, kv_heads: int, page: int, graph: bool, head_qk: int, head_vo: int,
        causal: bool, window: int, *rest: Any,
    ) -> list[int]:  # fmt: skip
        for tensor in (query_start, indptr, lengths):
            assert (tensor.device.type, tensor.dtype) == ("cpu", torch.int32)
        assert len(query_start) == len(indptr) == batch + 1
        assert len(lengths) == batch
        assert total_rows == int(query_start[-1])
        assert heads % kv_heads == 0
        assert self.sliding == (window >= 0)
        assert (lengths > 0).all()
        assert workspace.nbytes >= 16 << 20
        assert tables.nbytes == pinned.nbytes
        planned = torch.cat((query_start, indptr, lengths))
        pinned.view(torch.int32)[: len(planned)] = planned
        tables.view(torch.int32)[: len(planned)].copy_(pinned.view(torch.int32)[: len(planned)], non_blocking=True)
        return [batch, page, int(causal), window]

    def paged_run(
        self, workspace: Tensor, tables: Tensor, info: list[int], q: Tensor, k: Tensor, v: Tensor, query_start: Tensor,
        indptr: Tensor, pages: Tensor, last_page: Tensor, out: Tensor, lse: Tensor | None, mask: int, layout: int,
        window: int, pdl: bool, *rest: Any,
    ) -> None:  # fmt: skip
        self.runs.append(
            (self, workspace, tables, info, q, k, v, query_start, indptr, pages, last_page, out, lse, mask, layout,
             window, pdl, *rest)
        )  # fmt: skip
        batch, page, causal, planned_window = info
        planned = tables.view(torch.int32)[: 3 * batch + 2].split([batch + 1, batch + 1, batch])
        assert torch.equal(query_start, planned[0])
        assert torch.equal(indptr, planned[1])
        counts = indptr.diff()
        assert torch.equal((counts - 1) * page + last_page, planned[2]), "what is planned is what is run"
        assert {t.dtype for t in (query_start, indptr, pages, last_page)} == {torch.int32}
        assert ((last_page >= 1) & (last_page <= page)).all()
        assert (q.dtype, k.dtype, v.dtype, out.dtype) == (self.dtype_q, self.dtype_kv, self.dtype_kv, self.dtype_q)
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        assert k.stride() == v.stride()
        assert k.shape[1] == page
        assert out.is_contiguous()
        assert len(q) == len(out) == int(query_start[-1])
        assert (window, mask == CAUSAL) == (planned_window, bool(causal))
        *_, cap, scale = [x for x in rest if isinstance(x, float)][:2]
        assert self.softcap == (cap > 0)
        for i in range(batch):
            first, end, length = int(query_start[i]), int(query_start[i + 1]), int(planned[2][i])
            ids = pages[int(indptr[i]) : int(indptr[i + 1])].long()
            keys, values = (x[ids].flatten(0, 1)[:length].float() for x in (k, v))
            queries = q[first:end].float().view(end - first, keys.shape[1], -1, q.shape[-1])
            scores = torch.einsum("qhgd,lhd->hgql", queries, keys) * scale
            if cap > 0:
                scores = torch.tanh(scores / cap) * cap
            distance = torch.arange(length - (end - first), length)[:, None] - torch.arange(length)
            hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
            if window >= 0:
                hidden |= distance > window
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            result = torch.einsum("hgql,lhd->qhgd", weights, values)
            out[first:end] = result.reshape(out[first:end].shape).to(out.dtype)


class LatentKernel:
    """The same for latent attention, of which all is planned but the pages."""

    runs: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(
        self, name: str, dtype_q: torch.dtype, dtype_kv: torch.dtype, dtype_o: torch.dtype, dtype_index: torch.dtype,
        latent: int, rotary: int, profiled: bool,
    ) -> None:  # fmt: skip
        assert name in ("fa2", "fa3")
        assert (dtype_index, dtype_o, dtype_kv, profiled) == (torch.int32, dtype_q, dtype_q, False)
        self.dtype, self.sizes = dtype_q, (latent, rotary)

    def plan(
        self, workspace: Tensor, tables: Tensor, pinned: Tensor, query_start: Tensor, indptr: Tensor, lengths: Tensor,
        heads: int, size: int, causal: bool,
    ) -> list[int]:  # fmt: skip
        for tensor in (query_start, indptr, lengths):
            assert (tensor.device.type, tensor.dtype) == ("cpu", torch.int32)
        batch = len(lengths)
        assert len(query_start) == len(indptr) == batch + 1
        assert (lengths > 0).all()
        assert size == self.sizes[0]
        assert workspace.nbytes >= 16 << 20
        planned = torch.cat((query_start, indptr, lengths))
        pinned.view(torch.int32)[: len(planned)] = planned
        tables.view(torch.int32)[: len(planned)].copy_(pinned.view(torch.int32)[: len(planned)], non_blocking=True)
        return [batch, heads, int(causal)]

    def run(
        self, workspace: Tensor, tables: Tensor, info: list[int], q: Tensor, q_rotary: Tensor, latents: Tensor,
        rotary: Tensor, pages: Tensor, out: Tensor, lse: Tensor | None, mask: int, heads: int, page: int, scale: float,
        base_e: bool, *scales: Any,
    ) -> None:  # fmt: skip
        self.runs.append(
            (self, workspace, tables, info, q, q_rotary, latents, rotary, pages, out, lse, mask, heads, page, scale,
             base_e, *scales)
        )  # fmt: skip
        batch, planned_heads, causal = info
        query_start, indptr, lengths = tables.view(torch.int32)[: 3 * batch + 2].split([batch + 1, batch + 1, batch])
        assert (heads, mask == CAUSAL) == (planned_heads, bool(causal))
        assert {t.dtype for t in (q, q_rotary, latents, rotary, out)} == {self.dtype}
        assert (q.shape[-1], q_rotary.shape[-1]) == (latents.shape[-1], rotary.shape[-1]) == self.sizes
        assert {t.stride(-1) for t in (q, q_rotary, latents, rotary, out)} == {1}
        assert pages.dtype == torch.int32
        assert latents.shape[1] == rotary.shape[1] == page
        assert set(scales) <= {1.0, None}
        assert torch.equal(indptr.diff(), -(-lengths // page))
        assert len(q) == len(out) == int(query_start[-1])
        for i in range(batch):
            first, end, length = int(query_start[i]), int(query_start[i + 1]), int(lengths[i])
            ids = pages[int(indptr[i]) : int(indptr[i + 1])].long()
            keys = torch.cat((latents[ids], rotary[ids]), -1).flatten(0, 1)[:length].float()
            queries = torch.cat((q[first:end], q_rotary[first:end]), -1).float()
            scores = torch.einsum("qhd,ld->hql", queries, keys) * scale
            hidden = torch.arange(length) > torch.arange(length - (end - first), length)[:, None]
            weights = scores.masked_fill(hidden & bool(causal), -torch.inf).softmax(-1)
            out[first:end] = torch.einsum("hql,ld->qhd", weights, keys[:, : self.sizes[0]]).to(out.dtype)


def latent_modules() -> list[Any]:
    """Modules of flashinfer that name what its wrapper of latent attention calls: in 0.6 it is one."""
    if not hasattr(flashinfer_mla, "MLAPlanMetadata"):
        return [flashinfer_mla]
    names = ("_backends._fa_common", "_backends.fa2_backend", "_backends.fa3_backend", "_wrapper")
    return [import_module(f"flashinfer.mla._batch_mla.{name}") for name in names]


class Torch:
    """torch as flashinfer finds it, where memory can be pinned by `pin`."""

    def __init__(self, pin: Callable[[Tensor], Tensor] = lambda host: host) -> None:
        self.pin = pin

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @property
    def cuda(self) -> Any:
        return SimpleNamespace(device=lambda device: contextlib.nullcontext())

    def empty(self, *shape: Any, pin_memory: bool = False, **how: Any) -> Tensor:
        made = torch.empty(*shape, **how)
        return self.pin(made) if pin_memory else made


@pytest.fixture(autouse=True, params=["fa2", "fa3"])
def on_no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """flashinfer, which believes to be on a GPU whose best kernels are these."""
    best = request.param

    def other(*arguments: Any) -> None:
        raise AssertionError("flashinfer wants to compile something else")

    for module in (flashinfer_prefill, flashinfer_decode):
        monkeypatch.setattr(module, "torch", Torch())
        monkeypatch.setattr(module, "get_batch_prefill_module", Kernel)
        monkeypatch.setattr(module, "get_compute_capability", lambda device: (9, 0), raising=False)
        monkeypatch.setattr(module, "determine_attention_backend", other, raising=False)
        monkeypatch.setattr(module, "check_trtllm_gen_sm107_only_feature", lambda *a: None, raising=False)
    monkeypatch.setattr(flashinfer_utils, "is_sm90a_supported", lambda device: best == "fa3")
    for module in latent_modules():
        for name, value in {
            "torch": Torch(),
            "get_batch_mla_module": LatentKernel,
            "is_sm90a_supported": lambda device: best == "fa3",
            "get_compute_capability": lambda device: (9, 0),
            "_get_compute_capability": lambda device: (9, 0),
            "get_device_sm_count": lambda device: 132,
            "_get_fa_shared_memory_limits": lambda device: (228 << 10, 227 << 10),
        }.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    for name in ("get_batch_decode_module", "get_trtllm_gen_decode_module"):
        monkeypatch.setattr(flashinfer_decode, name, other, raising=False)
    yield best
    Kernel.runs.clear()
    LatentKernel.runs.clear()


class TestFlashInfer(AttentionConformance):
    plugin = "attention:flashinfer"

    @pytest.fixture
    def backend(self) -> FlashInferAttention:
        return FlashInferAttention(workspace_mb=16)

    def platform(self) -> Any:
        return TwinPlatform()


# ------------------------------------------------------------------------------------------------ captured decode steps

NEED = AttnNeed(64, 4, 2, "bfloat16", "bfloat16", 16)


def rows_of(need: AttnNeed = NEED, seed: int = 0) -> Rows:
    backend = FlashInferAttention(workspace_mb=16)
    return Rows(backend, need, num_rows=5, seed=seed, platform=TwinPlatform())


def close(got: list[Tensor], expected: list[Tensor]) -> None:
    for g, e in zip(got, expected, strict=True):
        if e.numel():
            assert (g.double() - e).abs().max() <= 3e-2 * max(1.0, float(e.abs().max()))


def test_a_replayed_step_reads_what_was_planned_for_it() -> None:
    """As a captured graph does, which holds addresses of tensors and the plan's numbers."""
    rows = rows_of()
    rows.step([(0, 16), (1, 5), (2, 30)])
    rows.step([(0, 1), (1, 1), (2, 1)])
    captured = Kernel.runs[-1]
    for _ in range(20):  # pages begin, and lengths differ from those of the capture
        got, expected = rows.step([(0, 1), (1, 1), (2, 1)])
        close(got, expected)
        kernel, *arguments = captured
        arguments[3] = Kernel.runs[-1][4]  # the queries of this step, which a graph would find in their place
        arguments[10] = torch.full_like(arguments[10], torch.nan)
        kernel.paged_run(*arguments)
        close(list(arguments[10].split(1)), expected)
        assert captured[3] == Kernel.runs[-2][3], "the numbers that a launch carries stay"
        Kernel.runs[:] = [captured, *Kernel.runs[-1:]]


def test_other_steps_between_do_not_disturb_a_captured_one() -> None:
    rows = rows_of()
    rows.step([(0, 16), (1, 5), (2, 30)])
    rows.step([(0, 1), (1, 1), (2, 1)])
    captured = Kernel.runs[-1]
    rows.step([(0, 1), (3, 9)])  # mixed
    rows.step([(0, 1), (1, 1)])  # another number of rows
    got, expected = rows.step([(0, 1), (1, 1), (2, 1)])
    close(got, expected)
    kernel, *arguments = captured
    arguments[3], arguments[10] = Kernel.runs[-1][4], torch.full_like(arguments[10], torch.nan)
    kernel.paged_run(*arguments)
    close(list(arguments[10].split(1)), expected)


def padded(batch: AttnBatch, count: int) -> AttnBatch:
    """The batch of a decode step, filled up with rows that stand for nothing."""
    n = batch.num_rows

    def buffer(content: Tensor, fill: list[int]) -> Twin:
        twin = Twin((n + count + len(content) - n, *content.shape[1:]), content.dtype)
        twin.host[: len(content)] = content
        twin.host[len(content) :] = torch.tensor(fill, dtype=content.dtype).view(-1, *[1] * (content.dim() - 1))
        return twin

    return AttnBatch(
        buffer(batch.query_start.host[: n + 1], list(range(n + 1, n + count + 1))),
        buffer(batch.seq_len.host[:n], [0] * count),
        buffer(batch.table.host[:n], [0] * count),
        buffer(batch.slots.host[:n], [-1] * count),
        n + count, n + count, 1, batch.max_seq, n + count,
    )  # fmt: skip


def test_rows_that_stand_for_nothing() -> None:
    """They change no other row, and are numbers themselves, whatever the null block held."""
    rows = rows_of()
    rows.step([(0, 16), (1, 5)])
    fresh = [rows.tokens(row, 1) for row in (0, 1)]
    nothing = [torch.ones_like(x).expand(3, -1, -1) for x in fresh[0]]
    q, k, v = (torch.cat(parts) for parts in zip(*fresh, nothing, strict=True))
    plan = rows.planner.plan(padded(rows.paged.grow([(0, 1), (1, 1)]), 3))
    out = torch.full_like(q, torch.nan)
    rows.backend.write_kv(k, v, rows.kv, plan.slots)
    rows.backend.forward(q, rows.kv, plan, rows.scale, out)
    assert torch.isfinite(out).all()
    other = rows_of()
    other.step([(0, 16), (1, 5)])
    got, _ = other.step([(0, 1), (1, 1)])
    close(list(out[:2].split(1)), [g.double() for g in got])
    assert torch.equal(out[2:], torch.ones_like(out[2:]))  # each saw one token, the one it wrote


def test_eight_bits_are_never_read_by_fa3() -> None:
    need = AttnNeed(64, 4, 2, "bfloat16", "float8_e4m3fn", 16)
    rows = rows_of(need)
    got, expected = rows.step([(0, 3), (1, 20)])
    for g, e in zip(got, expected, strict=True):
        assert (g.double() - e).abs().max() <= 0.2 * max(1.0, float(e.abs().max()))


# ---------------------------------------------------------------------------------------------------- latent attention

LATENT = AttnNeed(576, 16, 1, "bfloat16", "bfloat16", 16, v_head_dim=512, mla=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("size", [1, 64])
def test_latents(dtype: str, size: int) -> None:
    """Prompts, chunks, mixed steps, decode steps, drafts and rows that rest."""
    rows = rows_of(replace(LATENT, dtype=dtype, kv_dtype=dtype, block_size=size))
    for work in (
        [(0, 1), (1, 33), (2, 5)],
        [(0, 1), (2, 1), (1, 9), (3, 17)],
        [(3, 1), (0, 1), (1, 1), (2, 1)],
        [(1, 1), (0, 3), (4, 2)],
        [(1, 0), (0, 1)],
        [(1, 0)],
    ):
        close(*rows.step(work))


def test_a_replayed_step_of_latents_reads_what_was_planned_for_it() -> None:
    rows = rows_of(LATENT)
    rows.step([(0, 16), (1, 5), (2, 30)])
    rows.step([(0, 1), (1, 1), (2, 1)])
    captured = LatentKernel.runs[-1]
    for work in ([(0, 1), (3, 9)], [(0, 1), (1, 1)], *[[(0, 1), (1, 1), (2, 1)]] * 20):
        close(*rows.step(work))
        LatentKernel.runs[:] = LatentKernel.runs[-1:]
    _, expected = rows.step([(0, 1), (1, 1), (2, 1)])
    kernel, *arguments = captured
    arguments[3:5] = LatentKernel.runs[-1][4:6]  # the queries of this step
    arguments[8] = torch.full_like(arguments[8], torch.nan)
    kernel.run(*arguments)
    close(list(arguments[8].split(1)), expected)
    assert captured[3] == LatentKernel.runs[-2][3], "the numbers that a launch carries stay"


# ------------------------------------------------------------------------------------------------ the simulated device

MAX_LENGTH = 64


class SimKernel(Kernel):
    """The module on the simulated device: one launch, which a graph repeats."""

    def paged_run(self, *arguments: Any) -> None:
        operands = simgpu.raw(arguments)
        super().paged_run(*operands)
        simgpu.gpu.launch("flashinfer", lambda: Kernel.paged_run(self, *operands))


class Steps:
    """An executor of one runner, two steps in flight."""

    depth = 2

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    def forward(self, plan: Any) -> None:
        self.runner.forward(plan)

    def sample(self, step: int, masks: Any) -> StepFuture:
        return StepFuture(self.runner.sample(step, masks).read)

    def on_failure(self, callback: Any) -> None:
        pass


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("sim") / "llama", dtype="bfloat16", **sizes)


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Iterator[simgpu.Gpu]:
    with simgpu.simulated() as gpu:
        for module in (flashinfer_prefill, flashinfer_decode):
            monkeypatch.setattr(module, "torch", Torch(gpu.pin))
            monkeypatch.setattr(module, "get_batch_prefill_module", SimKernel)
        for module in latent_modules():
            for name, value in {"torch": Torch(gpu.pin), "get_batch_mla_module": SimLatentKernel}.items():
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, value)
            if mechanics := getattr(module, "_BatchMLAGeneratedFaMechanics", None):
                # A tensor of the simulated device does not say where it lies.
                where = partial(lambda interval, x: interval(simgpu.raw(x)), mechanics._storage_interval)
                monkeypatch.setattr(mechanics, "_storage_interval", staticmethod(where))
        yield gpu


class SimLatentKernel(LatentKernel):
    def run(self, *arguments: Any) -> None:
        operands = simgpu.raw(arguments)
        super().run(*operands)
        simgpu.gpu.launch("flashinfer", lambda: LatentKernel.run(self, *operands))


@pytest.fixture(scope="module")
def latent_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": None,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 16, "v_head_dim": 16,
    }  # fmt: skip
    return tiny_checkpoint("YoutuForCausalLM", tmp_path_factory.mktemp("sim") / "youtu", dtype="bfloat16", **sizes)


def engine(folder: Path, platform: Any, device: torch.device) -> EngineCore:
    """flashinfer on whatever `device` is, as on a described GPU."""
    options = {"model": str(folder), "max_length": MAX_LENGTH, "device": "cuda:9.0:141GB", "attention": "flashinfer"}
    options["op"] = "linear_reference,rowwise_torch"  # pinned: kernels that are interpreted take most of a minute
    config = from_options({**options, "dtype": "bfloat16", "plugins": {"attention.flashinfer": {"workspace_mb": 16}}})
    plan, checkpoint, _ = resolve(config)
    info = describe_model(plan, checkpoint)
    loaded = load_model(plan, checkpoint, info, platform, device, NullCollectives())
    assert loaded.attention is not None
    limits = SchedLimits(max_tokens=16, max_rows=4, max_length=MAX_LENGTH, eos_token_ids=(1,), depth=2)
    kv = KVConfig(tuple(info.kv_specs(16, "bfloat16")), (40,) * len(info.kv_groups()))
    sizes = StepLimits(limits.max_rows, limits.max_tokens, 8, MAX_LENGTH)
    runner = Runner(loaded, kv, sizes, [loaded.attention], platform, device, debug_kv=True)
    return EngineCore(Scheduler(limits, kv, ArrivalOrder()), Steps(runner), Intake(512, MAX_LENGTH))


def requests(lengths: list[int]) -> list[EngineRequest]:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    return [EngineRequest(f"r{i}", [5 + i, 6, 7, 8, 9 + i], p) for i, p in enumerate(params)]


def tokens(core: EngineCore, waiting: list[EngineRequest]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {r.id: [] for r in waiting}
    while waiting or core.has_work():
        if waiting:  # they come one by one: rows begin and end at different steps
            core.add(waiting.pop(0))
        for event in core.step():
            assert event.error is None, event.error
            found[event.id] += event.tokens
    return found


def test_captured_steps_give_the_tokens_of_the_cpu(sim: simgpu.Gpu, checkpoint: Path) -> None:
    lengths = [5, 30, 11, 38]  # pages begin, and numbers of rows change
    expected = tokens(engine(checkpoint, ToyPlatform(), torch.device("cpu")), requests(lengths))
    platform = GpuPlatform(simgpu.SimRuntime())
    assert tokens(engine(checkpoint, platform, platform.bind(0)), requests(lengths)) == expected
    assert sim.launches["graph"] > 20


def test_a_decode_step_waits_for_nothing_but_an_event(sim: simgpu.Gpu, checkpoint: Path) -> None:
    """Of the device; nor does it copy from pageable memory, or take new memory."""
    platform = GpuPlatform(simgpu.SimRuntime())
    core = engine(checkpoint, platform, platform.bind(0))
    for request in requests([40, 40, 40]):
        core.add(request)
    for _ in range(12):
        core.step()
    sim.clear()
    for _ in range(10):
        core.step()
    assert sim.launches["graph"] == 10
    assert set(sim.waits) <= {"event"}, sim.waits
    assert not sim.pageable
    assert not sim.pool.misses


def test_captured_steps_of_latents_give_the_tokens_of_the_cpu(sim: simgpu.Gpu, latent_checkpoint: Path) -> None:
    lengths = [5, 30, 11, 38]
    expected = tokens(engine(latent_checkpoint, ToyPlatform(), torch.device("cpu")), requests(lengths))
    platform = GpuPlatform(simgpu.SimRuntime())
    assert tokens(engine(latent_checkpoint, platform, platform.bind(0)), requests(lengths)) == expected
    assert sim.launches["graph"] > 20


def test_a_plan_that_does_not_wait_is_found(
    sim: simgpu.Gpu, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """flashinfer writes its tables to the same pinned memory in every plan."""
    init = FlashInferPlanner.__init__

    def careless(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self.uploaded = NullEvent()

    monkeypatch.setattr(FlashInferPlanner, "__init__", careless)
    platform = GpuPlatform(simgpu.SimRuntime())
    core = engine(checkpoint, platform, platform.bind(0))
    monkeypatch.setattr(Steps, "control", lambda self, command: [], raising=False)
    with pytest.raises(AssertionError):
        tokens(core, requests([40, 40]))
    assert "a host buffer was written while its copy to the device was in flight" in caplog.text


# ------------------------------------------------------------------------------------------------------ planted faults


def scenario() -> None:
    """Prompts, chunks, mixed and captured steps, with window, cap and neither; raises when something is wrong."""
    for seed, extra in enumerate(({}, {"window": 5}, {"softcap": 8.0})):
        need = AttnNeed(64, 4, 2, "bfloat16", "bfloat16", 16, **extra)
        rows = rows_of(need, seed)
        for work in (
            [(0, 1), (1, 33), (2, 5)],
            [(0, 1), (2, 1), (1, 9), (3, 17)],
            [(3, 1), (0, 1), (1, 1), (2, 1)],
            [(3, 1), (0, 1), (1, 1), (2, 1)],
            [(1, 1), (0, 3), (4, 2)],
            [(4, 2), (1, 1)],
        ):
            close(*rows.step(work))
    test_a_replayed_step_reads_what_was_planned_for_it()
    test_other_steps_between_do_not_disturb_a_captured_one()
    test_rows_that_stand_for_nothing()


def changed(**fields: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """Other values among what both wrappers are told."""
    common = FlashInferPlanner._common

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(FlashInferPlanner, "_common", lambda self: {**common(self), **fields})

    return plant


def wrong_window(patch: pytest.MonkeyPatch) -> None:
    common = FlashInferPlanner._common

    def plant(self: Any) -> dict[str, Any]:
        told = common(self)
        return {**told, "window_left": told["window_left"] + (self.need.window is not None)}

    patch.setattr(FlashInferPlanner, "_common", plant)


def pages(change: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    arrays = pages_module.page_arrays

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(pages_module, "page_arrays", lambda *a: change(*arrays(*a)))

    return plant


def numbers(change: Callable[[StepIntegers], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """`change` is made to what is to be sent, behind all that is put there."""
    put = StepIntegers.put

    def plant(self: Any, *arguments: Any) -> Any:
        starts = put(self, *arguments)
        change(self)
        return starts

    return lambda patch: patch.setattr(StepIntegers, "put", plant)


def next_row(integers: StepIntegers) -> None:
    integers._cells.array += 1


def wrong_run(**change: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def forward(self: Any, q: Tensor, kv: Tensor, plan: Any, scale: float, out: Tensor) -> None:
        n = plan.num_decode
        how = {"q_scale": scale, **change}
        how = {key: value for key, value in how.items() if value is not None}
        if n:
            plan.decode.run(q[:n], (kv[0], kv[1]), out=out[:n], **how)
        if plan.num_prefill:
            plan.prefill.run(q[n:], (kv[0], kv[1]), out=out[n:], **how)

    return lambda patch: patch.setattr(FlashInferAttention, "forward", forward)


def swapped(patch: pytest.MonkeyPatch) -> None:
    forward = FlashInferAttention.forward
    patch.setattr(FlashInferAttention, "forward", lambda self, q, kv, *rest: forward(self, q, kv.flip(0), *rest))


def next_slot(patch: pytest.MonkeyPatch) -> None:
    write = FlashInferAttention.write_kv
    patch.setattr(FlashInferAttention, "write_kv", lambda self, k, v, kv, slots: write(self, k, v, kv, slots + 1))


def new_buffers(patch: pytest.MonkeyPatch) -> None:
    """Wrappers that are not made for graphs have new tensors in each plan."""
    patch.setattr(FlashInferPlanner, "_decoder", lambda self, n: self.mixed)


def one_wrapper_for_all(patch: pytest.MonkeyPatch) -> None:
    decoder = FlashInferPlanner._decoder
    patch.setattr(FlashInferPlanner, "_decoder", lambda self, n: decoder(self, max(self.decoders, default=n)))


def shared_tables(patch: pytest.MonkeyPatch) -> None:
    """The prefill wrapper plans where the decode wrapper of the same step has."""
    init = FlashInferPlanner.__init__

    def plant(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        self.mixed.reset_workspace_buffer(self.workspace, self.tables)
        self.prefill.reset_workspace_buffer(self.workspace, self.tables)

    patch.setattr(FlashInferPlanner, "__init__", plant)


def stale(patch: pytest.MonkeyPatch) -> None:
    """What flashinfer's quicker planning does not copy is sent in the first steps only."""
    push, seen = StepIntegers.push, []

    def plant(self: Any, batch: Any, count: int, num_pages: int) -> Any:
        seen.append(count)
        host, later = self._host, len(seen) > 3
        if later:
            self._host = self._device.clone()
        found = push(self, batch, count, min(num_pages, int(self._host.abs().sum())) if later else num_pages)
        self._host = host
        return found

    patch.setattr(StepIntegers, "push", plant)


def stale_table(patch: pytest.MonkeyPatch) -> None:
    """Pages are listed from the block table of the step before."""
    push = Twin.push

    def plant(self: Twin, n: int) -> Tensor:
        before = self.device.clone()
        now = push(self, n)
        return before[:n] if self.device.dim() == 2 else now

    patch.setattr(Twin, "push", plant)


def null_rows_dropped(patch: pytest.MonkeyPatch) -> None:
    """Rows without a length are taken for rows without work."""
    plan = FlashInferPlanner.plan

    def plant(self: Any, batch: AttnBatch) -> Any:
        n = int((batch.seq_len.host[: batch.num_rows] > 0).sum())
        batch.num_rows, batch.num_decode_rows = n, min(n, batch.num_decode_rows)
        return plan(self, batch)

    patch.setattr(FlashInferPlanner, "plan", plant)


def all_decode(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planner_module, "decode_rows", lambda rows, queries, n: int((queries == 1).sum()))


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "an unknown keyword": changed(soft_cap=1.0),
    "a window off by one": wrong_window,
    "no soft cap": changed(logits_soft_cap=None),
    "a scale twice": changed(sm_scale=0.125),
    "another dtype of queries": changed(q_data_type=torch.float16),
    "another dtype of keys": changed(kv_data_type=torch.float16),
    "the last page modulo": pages(lambda starts, last: (starts, last % 16)),
    "one page less": pages(lambda starts, last: (starts - (np.arange(len(starts)) == len(starts) - 1), last)),
    "pages further on": numbers(next_row),
    "lengths one too long": pages(lambda starts, last: (starts, np.minimum(last + 1, 16))),
    "no scale": wrong_run(q_scale=None),
    "a scale by another name": wrong_run(q_scale=None, sm_scale=0.125),
    "values for keys": swapped,
    "slots off by one": next_slot,
    "new buffers in each plan": new_buffers,
    "one wrapper for all numbers of rows": one_wrapper_for_all,
    "tables shared within a step": shared_tables,
    "integers of an earlier step": stale,
    "a block table of an earlier step": stale_table,
    "rows that stand for nothing left out": null_rows_dropped,
    "chunks of one token as decode rows": all_decode,
}


def latent_scenario() -> None:
    rows = rows_of(LATENT)
    for work in ([(0, 1), (1, 33), (2, 5)], [(0, 1), (2, 1), (1, 9)], [(0, 1), (1, 1), (2, 1)], [(1, 1), (0, 3)]):
        close(*rows.step(work))
    test_a_replayed_step_of_latents_reads_what_was_planned_for_it()


def latent_run(change: Callable[[Tensor], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    """Other queries."""
    run = LatentPlan.run
    return lambda patch: patch.setattr(LatentPlan, "run", lambda self, q, *rest: run(self, change(q), *rest))


def without_mask(patch: pytest.MonkeyPatch) -> None:
    init = LatentPlanner.__init__

    def plant(self: Any, need: AttnNeed, *arguments: Any) -> None:
        init(self, need, *arguments)
        self.need = replace(need, causal=False)

    patch.setattr(LatentPlanner, "__init__", plant)


def too_long(integers: StepIntegers) -> None:
    integers.lengths.array[integers.lengths.array > 0] += 1


LATENT_FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "the scale of the warm-up": lambda patch: patch.setattr(LatentPlanner, "rescale", lambda self, plan, scale: None),
    "lengths one too long": numbers(too_long),
    "pages further on": numbers(next_row),
    "no mask": without_mask,
    "new buffers in each plan": lambda patch: patch.setattr(LatentPlanner, "_decoder", lambda self, n: self.mixed),
    "the rotary part first": latent_run(lambda q: q.roll(64, -1)),
    "no rotary part": latent_run(lambda q: torch.cat((q[..., :512], 0 * q[..., 512:]), -1)),
    "slots off by one": next_slot,
    "the last row left out": lambda patch: patch.setattr(
        latents_module, "working_rows", lambda batch: tuple(x[:-1] for x in pages_module.working_rows(batch))
    ),
}


def test_nothing_is_wrong() -> None:
    scenario()
    latent_scenario()


@pytest.mark.parametrize("fault", LATENT_FAULTS)
def test_planted_faults_of_latents_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    LATENT_FAULTS[fault](monkeypatch)
    with pytest.raises((AssertionError, ValueError, TypeError, RuntimeError, IndexError)):
        latent_scenario()


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch, on_no_gpu: str) -> None:
    FAULTS[fault](monkeypatch)
    with pytest.raises((AssertionError, ValueError, TypeError, RuntimeError, IndexError)):
        scenario()


# ---------------------------------------------------------------------------------------- what flashinfer does not have

TURNS_THAT_WRITE = {
    "rope_quantize_fp8_append_paged_kv_cache",  # queries come back in float8
    "cake_fused_qk_rmsnorm_rope_quantize_fp8_append_paged_kv_cache",  # they too
    "cake_fused_qk_rmsnorm_rope_append_paged_kv_cache",  # two numbers of heads, and a table of blocks
}


def turns_that_write(package: Path) -> set[str]:
    """Its public functions that are named after a rotary turn and an append to the cache."""
    found = {
        node.name
        for path in package.glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    return {name for name in found if "rope" in name and "append" in name and not name.startswith("_")}


def test_turns_that_write() -> None:
    """A release that has another one is worth a look: the backend could turn and write in one launch."""
    assert turns_that_write(Path(flashinfer.__file__).parent) <= TURNS_THAT_WRITE
