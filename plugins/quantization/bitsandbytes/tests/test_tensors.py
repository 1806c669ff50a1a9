"""Tensors of files: what is made of them, and what is refused. Weights are stored by hand as bitsandbytes stores them,
which the files of test_bitsandbytes.py show."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import CheckpointError, LinearSpec, LmkitError, ParamSpec, UnsupportedModel
from lmkit_quantization_bitsandbytes.codes import table
from lmkit_quantization_bitsandbytes.formats import TableFormat, group_of
from lmkit_quantization_bitsandbytes.tensors import BLOCKS, BitsandbytesTensors, QuantState, parse_state
from lmkit_testing import produced
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.model import choice, deviation, load_tiny, prompt, reference
from lmkit_testing.produced import INTEGER, REFERENCE
from lmkit_testing.steps import ModelDriver, Ranks
from lmkit_worker.loaded import LoadedModel
from safetensors.torch import load_file, save_file
from torch import Tensor

SCHEME = "lmkit_quantization_bitsandbytes.scheme:BitsandbytesScheme"
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
LLM_INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
STATE = "quant_state.bitsandbytes__nf4"
OFFSET = 0.25


def store(
    weight: Tensor, kind: str = "nf4", block: int = 64, nested: int = 0, storage: torch.dtype = torch.uint8
) -> tuple[dict[str, Tensor], Tensor]:
    """What a file has of `weight`, by ends of names, and what that is worth. `nested` scales share one of theirs."""
    flat = weight.float().flatten()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % block)).view(-1, block)
    absmax = padded.abs().amax(1).clamp(min=1e-3)
    said: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors = {"weight.absmax": absmax, "weight.quant_map": table(kind).clone()}
    if nested:
        values = torch.linspace(-1, 1, 256)
        less = torch.nn.functional.pad(absmax - OFFSET, (0, -len(absmax) % nested)).view(-1, nested)
        outer = less.abs().amax(1)
        codes = ((less / outer[:, None] + 1) * 127.5).round().clamp(0, 255).flatten()[: len(absmax)].to(torch.uint8)
        absmax = values[codes.int()] * outer.repeat_interleave(nested)[: len(absmax)] + OFFSET
        tensors |= {
            "weight.absmax": codes, "weight.nested_absmax": outer, "weight.nested_quant_map": values,
        }  # fmt: skip
        said |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": OFFSET}
    scales = absmax.repeat_interleave(block)[: len(flat)]
    codes = (flat / scales)[:, None].sub(table(kind)).abs().argmin(1).to(torch.uint8)
    tensors["weight"] = (codes[::2] << 4 | codes[1::2]).view(storage)[:, None]
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = blob(said)
    return tensors, (table(kind)[codes.int()] * scales).view(weight.shape)


def blob(said: Any) -> Tensor:
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


def made(tensors: dict[str, Tensor], kind: str = "nf4", plain: ParamSpec | None = None) -> dict[str, Tensor]:
    """What is made of the tensors of m.up, by their own names; all of it fits what the header said."""
    held = produced.Held({f"m.up.{key}": value for key, value in tensors.items()})
    found = produced.made(BitsandbytesTensors(held, lambda name: plain, kind=kind))
    return {name.removeprefix("m.up."): value for name, value in found.items()}


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 70), half=st.integers(1, 200), kind=st.sampled_from(["nf4", "fp4"]),
    block=st.sampled_from(BLOCKS), nested=st.sampled_from([0, 64, 256]), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_shape_and_block(rows: int, half: int, kind: str, block: int, nested: int, seed: int) -> None:
    """Blocks run along the whole weight, from one row into the next."""
    weight = torch.randn(rows, 2 * half, generator=torch.Generator().manual_seed(seed))
    tensors, worth = store(weight, kind, block, nested)
    found = made(tensors, kind)
    layer = LinearSpec("up", 2 * half, (rows,))
    fmt = TableFormat(kind, 2 * half, group_of(2 * half))
    assert {key: tuple(t.shape) for key, t in found.items()} == {
        key: p.shape for key, p in fmt.params(layer, "float32").items()
    }
    assert torch.equal(fmt.dequantize(found, torch.float32), worth)
    whole = made(tensors, kind, ParamSpec((rows, 2 * half), "bfloat16"))
    assert list(whole) == ["weight"]
    assert torch.equal(whole["weight"], worth)


@pytest.mark.parametrize("storage", [torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_bytes_may_be_called_anything(storage: torch.dtype) -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(made(store(weight)[0])["weight"], made(store(weight, storage=storage)[0])["weight"])


NAN = torch.full((128,), float("nan"))


def changed(**said: Any) -> dict[str, Tensor]:
    """JSON that says otherwise of [64, 128] in blocks of 64; None leaves a key out."""
    base = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 128]}
    return {f"weight.{STATE}": blob({key: value for key, value in (base | said).items() if value is not None})}


NESTED = {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weight.absmax": None}, r"m\.up\.weight\.absmax is missing"),
        ({"weight.quant_map": None}, r"m\.up\.weight\.quant_map is missing"),
        ({f"weight.{STATE}": None}, "no quant_state"),
        ({"weight": None}, "no weight"),
        ({"weight.absmax": NAN}, r"m\.up\.weight\.absmax: scales are not numbers"),
        ({"weight.absmax": NAN[:127]}, r"\[127\], needs float32 \[128\]"),
        ({"weight.absmax": torch.ones(128, dtype=torch.uint8)}, "is uint8"),
        ({"weight.quant_map": table("fp4")}, "not the table of nf4"),
        ({"weight.quant_map": NAN[:16]}, "not the table of nf4"),
        ({"weight.nested_absmax": NAN}, "quant_state does not say so"),
        ({"weight": torch.zeros(4095, 1, dtype=torch.uint8)}, "4095 bytes"),
        ({"weight": torch.zeros(512, 1, dtype=torch.int64)}, "int64"),
        ({"SCB": torch.ones(64)}, "load_in_4bit"),
        ({"weight.quant_state.bitsandbytes__fp4": blob({})}, "another quant_state"),
        ({"weight.quant_state.bitsandbytes__af4": blob({})}, "another quant_state"),
        ({f"weight.{STATE}": torch.zeros(0, dtype=torch.uint8)}, "needs uint8"),
        ({f"weight.{STATE}": torch.zeros(5000, dtype=torch.uint8)}, "at most 4096"),
        ({f"weight.{STATE}": torch.zeros(80)}, "is float32"),
        (changed(quant_type="fp4"), "is fp4"),
        (changed(quant_type="af4"), "quant_type"),
        (changed(blocksize=None), "blocksize"),
        (changed(blocksize=32), "blocksize of"),
        (changed(blocksize=-64), "blocksize of"),
        (changed(blocksize=64.5), "blocksize"),
        (changed(shape=[64, 64]), r"4096 bytes"),
        (changed(shape=[128, 64, 1]), "shape"),
        (changed(shape=[-64, -128]), "shape"),
        (changed(shape=[1 << 62, 1 << 62]), "shape"),
        (changed(shape=[8192]), "shape"),
        (changed(dtype="int8"), "dtype"),
        (changed(code="print()"), "unknown field"),
        (changed(**NESTED), "needs uint8"),
        (changed(**NESTED | {"nested_offset": None}), "or none"),
        (changed(**NESTED | {"nested_offset": "1"}), "nested_offset"),
        (changed(**NESTED | {"nested_offset": float("nan")}), "malformed"),
        (changed(**NESTED | {"nested_blocksize": 7}), "nested_blocksize of"),
        (changed(**NESTED | {"nested_blocksize": 0}), "nested_blocksize of"),
        (changed(**NESTED | {"nested_dtype": "float16"}), "nested_dtype"),
    ],
)
def test_tensors_that_cannot_be_are_refused(change: dict[str, Tensor | None], match: str) -> None:
    tensors = store(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)))[0] | change
    with pytest.raises((CheckpointError, UnsupportedModel), match=match) as failure:
        made({key: value for key, value in tensors.items() if value is not None})
    assert "m.up." in str(failure.value)


def test_nested_scales_that_are_not_numbers_are_refused() -> None:
    tensors = store(torch.randn(64, 128), nested=64)[0]
    for key in ("nested_absmax", "nested_quant_map"):
        value = tensors[f"weight.{key}"]
        with pytest.raises(CheckpointError, match="not numbers"):
            made(tensors | {f"weight.{key}": torch.full_like(value, float("inf"))})


GOOD = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [64, 128], **NESTED}


def test_an_odd_number_of_columns_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"columns in x"):
        parse_state(
            json.dumps({"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [2, 5]}).encode(), "x"
        )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def outcome(data: bytes) -> QuantState | str:
    """The state, or the message of the refusal."""
    try:
        return parse_state(data, "m.up")
    except (CheckpointError, UnsupportedModel) as refusal:
        return str(refusal)


@settings(max_examples=100, deadline=None)
@given(key=st.sampled_from([*GOOD, "other"]), value=json_values)
def test_any_json_is_a_state_or_refused(key: str, value: Any) -> None:
    found = outcome(json.dumps(GOOD | {key: value}).encode())
    if isinstance(found, QuantState):
        assert found.blocksize in BLOCKS
        assert all(0 < n < 1 << 40 for n in found.shape)
    else:
        assert "m.up" in found
        assert len(found) < 1000


DEEP = b'{"shape":'


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80) | st.integers(1, 4096).map(lambda n: b"[" * n) | st.integers(1, 400).map(DEEP.__mul__))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"m\.up"):
        parse_state(data, "m.up")


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, 200), by=st.binary(max_size=3), cut=st.integers(0, 4))
def test_damaged_json_is_never_another_weight(at: int, by: bytes, cut: int) -> None:
    """What is still read fits the other tensors, or is refused."""
    tensors = store(torch.randn(64, 128, generator=torch.Generator().manual_seed(0)), nested=64)[0]
    data = bytes(tensors[f"weight.{STATE}"].tolist())
    data = data[:at] + by + data[at + cut :]
    found = None
    with suppress(CheckpointError, UnsupportedModel):
        found = made(tensors | {f"weight.{STATE}": torch.tensor(list(data), dtype=torch.uint8)})
    assert found is None or found["weight"].numel() == 64 * 128 // 2


# ---------------------------------------------------------------------------------------------------- 8 bits

EIGHT = {
    "weight": torch.ones(4, 8, dtype=torch.int8),
    "SCB": torch.arange(4.0),
    "weight_format": torch.tensor(0).byte(),
}


def test_rows_of_integers_have_a_scale() -> None:
    found = made(EIGHT, "int8")
    assert set(found) == {"weight", "weight_scale"}
    torch.testing.assert_close(found["weight_scale"], torch.arange(4.0)[:, None] / 127)
    whole = made(EIGHT, "int8", ParamSpec((4, 8), "float16"))
    assert list(whole) == ["weight"]
    torch.testing.assert_close(whole["weight"], (torch.arange(4.0)[:, None] / 127).expand(4, 8))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"SCB": None}, r"m\.up\.SCB are missing"),
        ({"SCB": torch.tensor([1.0, float("nan"), 1, 1])}, "not numbers"),
        ({"SCB": torch.ones(4, 1)}, r"needs float32 \[4\]"),
        ({"SCB": torch.ones(3)}, r"needs float32 \[4\]"),
        ({"SCB": torch.ones(4).half()}, r"needs float32 \[4\]"),
        ({"weight": torch.ones(4, 8)}, "no int8 weight"),
        ({"weight": None}, "no int8 weight"),
        ({"weight_format": torch.tensor(1).byte()}, "weight_format"),
        ({"weight_format": torch.zeros(2).byte()}, "weight_format"),
        ({"weight.absmax": torch.ones(4)}, "load_in_8bit"),
    ],
)
def test_integers_that_cannot_be_are_refused(change: dict[str, Tensor | None], match: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModel), match=match) as failure:
        made({key: value for key, value in (EIGHT | change).items() if value is not None}, "int8")
    assert "m.up." in str(failure.value)


# ---------------------------------------------------------------------------------------------------- models

SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16,
    "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
}  # fmt: skip


def stored_model(folder: Path, plain: Path, config: dict[str, Any], which: str, **how: Any) -> Path:
    """The model in `plain` with weights that match `which` stored, into `folder`; `plain` gets what that is worth."""
    stored: dict[str, Tensor] = {}
    worth: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        stored[name] = worth[name] = tensor
        if re.search(which, name):
            weight = stored.pop(name)
            tensors, worth[name] = eight(weight) if config == LLM_INT8 else store(weight, **how)
            stored |= {name.removesuffix("weight") + key: value for key, value in tensors.items()}
    save_file(worth, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    said = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"quantization_config": config}))
    return folder


def eight(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    most = weight.float().abs().amax(1)
    codes = (weight.float() * 127 / most[:, None]).round().to(torch.int8)
    return {"weight": codes, "SCB": most}, codes * most[:, None] / 127


def load(folder: Path, arch: str, kernel: str = REFERENCE, **options: Any) -> LoadedModel:
    chosen = (
        choice("quantization", SCHEME), choice("op", REFERENCE, "linear:nf4"), choice("op", kernel, "linear:int8"),
    )  # fmt: skip
    return load_tiny(folder, arch, "float32", choices=chosen, **options)


LLAMA = "lmkit_model_llama.arch:Llama"
QWEN = "lmkit_model_qwen.arch:Qwen"
PHI = "lmkit_model_phi.arch:Phi"


LINEARS = r"_proj\.weight$"


def checkpoints(
    tmp_path: Path, family: str, config: dict[str, Any], which: str = LINEARS, **sizes: Any
) -> tuple[Path, Tensor]:
    """A stored model, and the logits of what its weights are worth."""
    plain = tiny_checkpoint(family, tmp_path / "plain", **sizes)
    (tmp_path / "stored").mkdir()
    folder = stored_model(tmp_path / "stored", plain, config, which, **({"nested": 64} if config == FOUR else {}))
    with torch.no_grad():
        return folder, reference(plain, "float32")(torch.tensor([prompt(97)])).logits[0]


@pytest.mark.parametrize("config", [FOUR, LLM_INT8], ids=["nf4", "int8"])
@pytest.mark.parametrize("which", [LINEARS, r"(_proj|mlp\.gate)\.weight$", r"self_attn\..*_proj\.weight$"])
def test_experts_and_routers_are_stored_either_way(config: dict[str, Any], which: str, tmp_path: Path) -> None:
    """Producers of one time have them as linears, and stored, those of another stacked, and plain."""
    pytest.importorskip("lmkit_model_qwen")
    folder, expected = checkpoints(tmp_path, "Qwen3MoeForCausalLM", config, which, **SIZES)
    kernels = {REFERENCE: 1e-4} if config == FOUR else {REFERENCE: 2e-3, INTEGER: 2e-3}
    for kernel, tolerance in kernels.items():
        got = ModelDriver(load(folder, QWEN, kernel), "float32").run(0, prompt(97), 7)
        assert deviation(got, expected) < tolerance


@pytest.mark.parametrize("config", [FOUR, LLM_INT8], ids=["nf4", "int8"])
def test_a_plain_weight_that_nobody_announced_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("lmkit_model_llama")
    folder, _ = checkpoints(tmp_path, "llama", config, r"(q|k|v|o|down)_proj\.weight$", hidden_size=64)
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight is plain"):
        load(folder, LLAMA)


def test_files_may_merge_what_the_model_does(tmp_path: Path) -> None:
    """q, k and v in one tensor, with blocks and blocks of blocks that run from one into the next."""
    pytest.importorskip("lmkit_model_phi")
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder, expected = checkpoints(tmp_path, "Phi3ForCausalLM", FOUR, **sizes)
    assert deviation(ModelDriver(load(folder, PHI), "float32").run(0, prompt(97), 7), expected) < 1e-4


@pytest.mark.parametrize("deals", [1, 2])
def test_two_ranks_equal_one(tmp_path: Path, deals: int) -> None:
    pytest.importorskip("lmkit_model_qwen")
    wide = SIZES | {"head_dim": 32, "moe_intermediate_size": 128, "intermediate_size": 128}
    folder, expected = checkpoints(tmp_path, "Qwen3MoeForCausalLM", FOUR, **wide)
    for logits in Ranks(2).logits(partial(load, folder, QWEN, deals=deals), prompt(97)):
        assert deviation(logits, expected) < 1e-4


def test_a_split_block_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("lmkit_model_qwen")
    folder, _ = checkpoints(tmp_path, "Qwen3MoeForCausalLM", FOUR, **SIZES)
    with pytest.raises(LmkitError, match="two ranks"):
        Ranks(2).run(lambda collectives: load(folder, QWEN, collectives=collectives))
