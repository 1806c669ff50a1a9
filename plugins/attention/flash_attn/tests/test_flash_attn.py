"""The backends over stand-ins of flash-attn, which take, check and read what it would. Mistakes are planted."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from lmkit.api import AttentionRequest, AttentionSpec, AttnBatch, AttnNeed, DeviceInfo, PluginError
from lmkit.plugins.host import PluginHost
from lmkit.plugins.select import consider
from lmkit.plugins.switches import Switches
from lmkit_attention_flash_attn import backend
from lmkit_testing import AttentionConformance
from lmkit_testing.attention import Rows
from lmkit_testing.host import codes, make_device
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import standins

NEED = AttnNeed(64, 4, 2, "bfloat16", "bfloat16", 256)
NAMES = {"flash_attn": "FlashAttention2", "flash_attn_3": "FlashAttention3"}


class Twin:
    """Host and device memory apart from each other, as on a GPU."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.host, self.device = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def push(self, n: int) -> Tensor:
        self.device[:n].copy_(self.host[:n])
        return self.device[:n]


PLATFORM: Any = SimpleNamespace(buffer=Twin)


class OnDevice:
    """A planner whose batches lie in buffers that stay, host and device memory apart."""

    def __init__(self, planner: Any) -> None:
        self.planner = planner
        shapes = {"query_start": (6,), "seq_len": (5,), "table": (5, 16)}
        self.buffers = {name: Twin(shape, torch.int32) for name, shape in shapes.items()}
        self.buffers["slots"] = Twin((1024,), torch.int64)

    def plan(self, batch: AttnBatch) -> Any:
        for name, twin in self.buffers.items():
            given = getattr(batch, name).host
            twin.host[tuple(slice(n) for n in given.shape)] = given
        return self.planner.plan(replace(batch, **self.buffers))


def rows_of(made: Any, need: AttnNeed, num_rows: int, **options: Any) -> Rows:
    rows = Rows(made, need, num_rows=num_rows, platform=PLATFORM, **options)
    rows.planner = OnDevice(rows.planner)
    return rows


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both generations, as far as the backends know."""
    two = SimpleNamespace(flash_attn_with_kvcache=standins.with_kvcache_2)
    three = SimpleNamespace(flash_attn_with_kvcache=standins.with_kvcache_3)
    monkeypatch.setitem(sys.modules, "flash_attn", two)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", three)


class Contract(AttentionConformance):
    @pytest.fixture
    def target(self, spec: AttentionSpec) -> Any:
        return getattr(backend, NAMES[spec.name])

    def rows(self, made: Any, need: AttnNeed, num_rows: int, **options: Any) -> Rows:
        return rows_of(made, need, num_rows, **options)


class TestFlashAttention2(Contract):
    plugin = "attention:flash_attn"


class TestFlashAttention3(Contract):
    plugin = "attention:flash_attn_3"


@pytest.mark.parametrize(("module", "text"), [("flash_attn", standins.FA2), ("flash_attn_interface", standins.FA3)])
def test_the_real_function_has_these_parameters(module: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is installed: newer ones may have more behind them."""
    monkeypatch.delitem(sys.modules, module)
    real = pytest.importorskip(module, reason="not installed", exc_type=ImportError).flash_attn_with_kvcache
    theirs = inspect.signature(real).parameters
    ours = standins.signature(text).parameters
    assert {name: p.default for name, p in ours.items()} == {name: theirs[name].default for name in ours}


# ------------------------------------------------------------------------------------------------------ planted faults


def steps(rows: Rows, *works: list[tuple[int, int]]) -> None:
    for work in works:
        for g, e in zip(*rows.step(work), strict=True):
            if e.numel():
                assert (g.double() - e).abs().max() <= 3e-2 * max(1.0, float(e.abs().max()))


def scenario(module: ModuleType, name: str) -> None:
    """Prompts, chunks, mixed and decode steps over two pages; raises when something is wrong."""
    extras: list[dict[str, Any]] = [{"window": 5}, {"softcap": 8.0, "num_kv_heads": 4}]
    extras.append({"alibi": True} if name == "flash_attn" else {"window": 7, "chunked": True})
    for seed, extra in enumerate(extras):
        made = getattr(module, NAMES[name])()
        rows = rows_of(made, replace(NEED, **extra), 4, length=300, seed=seed)
        steps(rows, [(0, 254), (1, 3)], [(0, 1), (1, 1), (2, 9)], [(2, 1), (0, 3)], [(1, 1), (0, 1), (2, 1)])
        steps(rows, [(0, 1), (1, 0), (2, 2), (3, 8)])
    encoder = replace(NEED, causal=False, window=9)
    steps(rows_of(getattr(module, NAMES[name])(), encoder, 2), [(0, 30), (1, 1)])


FAULTS = {  # of which backends; what becomes what
    "a window off by one": (NAMES, "need.window - 1\n", "need.window\n"),
    "encoders see one side": (NAMES, "right = left if", "right = 0 if"),
    "encoders as decoders": (NAMES, '{"causal": need.causal,', '{"causal": True,'),
    "no soft cap": (NAMES, "need.softcap or 0.0", "0.0"),
    "no scale": (NAMES, '"softmax_scale": scale', '"softmax_scale": 1.0'),
    "a scale by another name": (NAMES, '"softmax_scale": scale', '"scale": scale'),
    "values for keys": (NAMES, "kv[0], kv[1]", "kv[1], kv[0]"),
    "slots off by one": (NAMES, "slots.clamp(min=0)", "slots.clamp(min=0) + 1"),
    "a table that is not pushed": (NAMES, "batch.table.push(n)", "batch.table.device[:n]"),
    "lengths that are not pushed": (NAMES, "batch.seq_len.push(n)", "batch.seq_len.device[:n]"),
    "positions of 8 bytes": (NAMES, "batch.seq_len.push(n)", "batch.seq_len.push(n).long()"),
    "chunks of several as one query": (["flash_attn"], "if (counts[:decode] == 1).all() else 0", "+ 1"),
    "rows without tokens": (["flash_attn"], "if counts[row]]", "]"),
    "pages of the first row": (["flash_attn"], '"block_table": plan.table[row]', '"block_table": plan.table[:1]'),
    "no slopes": (["flash_attn"], '"alibi_slopes": owner.slopes', '"alibi_slopes": None'),
    "the third's table": (["flash_attn"], '"block_table"', '"page_table"'),
    "the second's table": (["flash_attn_3"], "page_table=", "block_table="),
    "chunks as windows": (["flash_attn_3"], "if need.chunked:", "if False:"),
    "narrow launches": (["flash_attn_3"], "max_seqlen_q=plan.max_query", "max_seqlen_q=1"),
    "no starts": (["flash_attn_3"], "cu_seqlens_q=plan.query_start", "cu_seqlens_q=plan.query_start[1:]"),
}


def mutant(old: str, new: str, folder: Path) -> ModuleType:
    source = Path(str(backend.__file__)).read_text(encoding="utf-8")
    assert old in source, f"the backend has no {old!r} any more"
    (folder / "backend.py").write_text(source.replace(old, new), encoding="utf-8")
    spec = spec_from_file_location("flash_attn_mutant", folder / "backend.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["flash_attn_mutant"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def forgotten() -> Iterator[None]:
    yield
    sys.modules.pop("flash_attn_mutant", None)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_wrong(name: str) -> None:
    scenario(backend, name)


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize(("fault", "name"), [(fault, name) for fault in FAULTS for name in FAULTS[fault][0]])
def test_planted_faults_are_found(fault: str, name: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, TypeError, RuntimeError, IndexError, ValueError)):
        scenario(mutant(*FAULTS[fault][1:], tmp_path), name)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_of_a_decode_step_stays_where_it_is(name: str) -> None:
    """So a captured graph reads the next step's."""
    rows = rows_of(getattr(backend, NAMES[name])(), NEED, 3, length=600)
    rows.step([(0, 5), (1, 250), (2, 64)])
    found = set()
    for _ in range(10):
        plan = rows.planner.plan(rows.paged.grow([(0, 1), (1, 1), (2, 1)]))
        tensors = (plan.slots, plan.query_start, plan.seq_len, plan.table)
        found.add((plan.num_single, plan.max_query, len(plan.others), *(x.data_ptr() for x in tensors)))
    assert len(found) == 1


# ------------------------------------------------------------------------------------------------------------- refusals


def request(device: DeviceInfo, **fields: Any) -> AttentionRequest:
    need = AttnNeed(**{"head_dim": 128, "num_q_heads": 32, "num_kv_heads": 8, **fields})
    return AttentionRequest(need=need, device=device, dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "device", "fields", "expected"),
    [
        ("flash_attn", make_device("cpu"), {}, {"requirement-missing", "platform"}),
        ("flash_attn", make_device("cuda", cc=(7, 5)), {}, {"requirement-missing", "capability"}),
        ("flash_attn", make_device("cuda", cc=(9, 0)), {"block_size": 16}, {"requirement-missing", "block-size"}),
        ("flash_attn", make_device("cuda", cc=(9, 0)), {"sinks": True}, {"requirement-missing", "feature"}),
        ("flash_attn_3", make_device("cuda", cc=(10, 0)), {}, {"requirement-missing", "capability"}),
        ("flash_attn_3", make_device("cuda", cc=(9, 0)), {}, {"requirement-missing"}),
    ],
)
def test_refusals(
    name: str, device: DeviceInfo, fields: dict[str, Any], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = PluginHost(switches=Switches())
    monkeypatch.setattr(host, "installed_version", lambda dist: None)
    assert codes(consider(host, request(device, **fields), name)) == {name: expected}


def test_a_build_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(PluginError, match="flash_attn cannot be imported"):
        Rows(backend.FlashAttention2(), NEED, num_rows=1, platform=PLATFORM)


def test_reasons_for_refusal() -> None:
    made, device = backend.FlashAttention2(), make_device("cuda", cc=(9, 0))
    assert made.can_run(NEED, device) is None
    for change, word in (
        ({"sinks": True}, "sinks"),
        ({"v_head_dim": 32}, "v_head_dim"),
        ({"num_q_heads": 5}, "multiple"),
        ({"causal": False, "alibi": True}, "causal"),
    ):
        assert word in (made.can_run(replace(NEED, **change), device) or "")
