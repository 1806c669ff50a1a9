"""Every block type against `gguf`, bit by bit, and as integers for kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmkit.api import CannotSplit, CheckpointError, LinearSpec, UnsupportedModel
from lmkit_loader_gguf.blocks import UNPACK, unpack
from lmkit_loader_gguf.file import TYPES
from lmkit_loader_gguf.scheme import FOUR_BITS, GROUP, GgufFormat, GgufScheme
from lmkit_platform_cpu.experts import NativeExperts
from lmkit_platform_cpu.integer import IntegerLinear
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.model import deviation, drive_default

gguf = pytest.importorskip("gguf", reason="blocks are compared with those of the library gguf")
from lmkit_testing.gguf_files import write  # noqa: E402

KINDS = {kind.name: kind for kind in TYPES.values() if kind.name in UNPACK}
SCALES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip  # bytes at which a block has a float16


def stored(name: str, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Random blocks [rows, bytes], their scales ordinary numbers."""
    noise, kind = np.random.default_rng(seed), KINDS[name]
    data = noise.integers(0, 256, (rows, blocks, kind.nbytes), dtype=np.uint8)
    for at in SCALES[name]:
        scale = noise.uniform(-0.01, 0.02, (rows, blocks, 1)).astype(np.float16)
        data[..., at : at + 2] = scale.view(np.uint8)
    if name == "MXFP4":
        data[..., 0] = noise.integers(118, 124, (rows, blocks))
    return data.reshape(rows, -1)


def test_all_types_are_here() -> None:
    assert set(SCALES) == set(KINDS) == set(UNPACK)
    assert set(GROUP) | set(FOUR_BITS) <= set(KINDS)
    sizes = gguf.GGML_QUANT_SIZES
    for number, kind in TYPES.items():
        assert sizes[gguf.GGMLQuantizationType(number)] == (kind.elements, kind.nbytes), kind
        assert gguf.GGMLQuantizationType(number).name == kind.name


@pytest.mark.parametrize("name", list(KINDS))
@given(seed=st.integers(0, 1 << 30), rows=st.integers(1, 4), blocks=st.integers(1, 3), wild=st.booleans())
def test_bit_by_bit(name: str, seed: int, rows: int, blocks: int, wild: bool) -> None:
    """Also blocks that hold anything, scales that are no numbers among it."""
    data = stored(name, rows, blocks, seed)
    if wild:
        data = np.random.default_rng(seed).integers(0, 256, data.shape, dtype=np.uint8)
    with np.errstate(all="ignore"):
        want = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])
    got = unpack(name, torch.from_numpy(data).flatten(), rows, KINDS[name].nbytes).dequantize().numpy()
    assert want.shape == got.shape
    assert ((want.view(np.uint32) == got.view(np.uint32)) | (np.isnan(want) & np.isnan(got))).all()


MERGED = [
    *(("Q4_K", "Q4_K", "Q6_K"), ("Q4_0", "Q8_0"), ("Q5_0", "IQ4_NL"), ("Q4_0", "Q4_K", "Q3_K")),
    *(("IQ4_NL", "IQ4_XS"), ("MXFP4", "IQ4_XS")),
]


@pytest.mark.parametrize("names", [(name,) for name in KINDS] + MERGED)
def test_integers_are_what_dequantize_gives(names: tuple[str, ...]) -> None:
    """Merged parts of different types too; kernels may round their scales to float16."""
    data = [torch.from_numpy(stored(name, 8, 512 // KINDS[name].elements, i)) for i, name in enumerate(names)]
    layer = LinearSpec("x", 512, (8,) * len(names))
    fmt = GgufFormat(names, layer.out_features, 512)
    weight = torch.cat([part.flatten() for part in data])
    assert fmt.params(layer, "float32")["weight"].shape == tuple(weight.shape)
    want, found = fmt.dequantize({"weight": weight}, torch.float32), fmt.integers({"weight": weight})
    wide = lambda values: values.double().repeat_interleave(fmt.group, 1)  # noqa: E731
    zeros = wide(found.zeros) if isinstance(found.zeros, torch.Tensor) else found.zeros
    codes = found.codes if found.table is None else found.table[found.codes.long()]
    got = (codes.double() - zeros) * wide(found.scales)
    if found.offsets is not None:
        got -= wide(found.offsets)
    assert int(found.codes.max()) < 1 << fmt.bits
    torch.testing.assert_close(got.float(), want, rtol=1e-6, atol=1e-7)
    kernel = IntegerLinear()
    if kernel.native is None:
        return
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(1))
    out = kernel.apply(x, kernel.pack(fmt, {"weight": weight}, layer, torch.float32), None)
    assert deviation(out, x @ want.T) < 0.02, "activations are rounded to 8 bits"


def test_what_does_not_fit_is_refused() -> None:
    fmt = GgufFormat(("Q4_K",), (8,), 384)
    with pytest.raises(UnsupportedModel, match="multiple of 256"):
        fmt.params(LinearSpec("x", 384, (8,)), "float32")
    with pytest.raises(CannotSplit, match="cannot be split"):
        fmt.params(LinearSpec("x", 192, (8,)), "float32")
    data = stored("Q4_0", 2, 2, 0)
    data[0, :2] = np.array([np.nan], np.float16).view(np.uint8)
    with pytest.raises(CheckpointError, match="not numbers"):
        GgufFormat(("Q4_0",), (2,), 64).integers({"weight": torch.from_numpy(data).flatten()})
    scheme = GgufScheme({"a.q": "Q4_0"})
    with pytest.raises(UnsupportedModel, match=r"type of a\.k"):
        scheme.for_layer(LinearSpec("a", 64, (8, 8), sources=("a.q", "a.k")))
    assert scheme.for_layer(LinearSpec("b", 64, (8,), sources=("b",))) is None


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen3moe", "gemma2"])
@pytest.mark.one_in(6)
def test_a_model_of_blocks(family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are those of the same weights dequantized; the head of a tied model stays as it is stored."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    architecture, values = {
        "llama": ("LlamaForCausalLM", {"num_key_value_heads": 2}),
        "qwen3moe": ("Qwen3MoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
        "gemma2": ("Gemma2ForCausalLM", {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    }[family]
    folder = tiny_checkpoint(architecture, tmp_path / "plain", **{**sizes, **values})
    agrees(folder, family, name, tmp_path, monkeypatch)


EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 32}
LATENT = {
    "hidden_size": 64, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 32, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "intermediate_size": 96, "topk_group": 1,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "hidden_size": 64,
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "intermediate_size": 96,
}  # fmt: skip
SHARED = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts_per_tok": 2}
REARRANGED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt-oss": ("MXFP4", "GptOssForCausalLM", {**EXPERTS, "head_dim": 16}),
    "granitemoe": ("Q4_0", "GraniteMoeForCausalLM", EXPERTS),
    "llama4": ("Q8_0", "Llama4ForCausalLM", {**EXPERTS, "num_experts_per_tok": 1, "head_dim": 16}),
    "deepseek2": ("Q8_0", "DeepseekV3ForCausalLM", LATENT),
    "lfm2": ("Q8_0", "Lfm2ForCausalLM", {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}),
    "gpt2": ("Q5_1", "GPT2LMHeadModel", {"hidden_size": 64, "n_inner": 96}),
    "qwen35": ("Q8_0", "Qwen3_5ForCausalLM", {**DELTA, "linear_value_head_dim": 32}),
    "qwen35moe": ("Q4_0", "Qwen3_5MoeForCausalLM", {**DELTA, **SHARED, "linear_value_head_dim": 16, "num_experts": 4}),
    "falcon": ("Q4_1", "FalconForCausalLM", {"hidden_size": 64}),
}


@pytest.mark.parametrize("family", list(REARRANGED))
@pytest.mark.one_in(3)
def test_blocks_that_a_family_stores_otherwise(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that it stacks, latents that it joins, linears that it transposes."""
    name, architecture, values = REARRANGED[family]
    more: dict[str, Any] = {}
    if family == "llama4":
        more = {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 64}
    if family == "lfm2":
        more = {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
    folder = tiny_checkpoint(architecture, tmp_path / "plain", **values, **more)
    agrees(folder, family, name, tmp_path, monkeypatch)


def agrees(folder: Path, family: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(folder, tmp_path / "blocks.gguf", family, name)
    plain = write(folder, tmp_path / "plain.gguf", family, name, dequantized=True)
    tokens = [3, 17, 10, 42, 8, 27, 20, 5]
    want = drive_default(plain, "float32", "native").run(0, tokens, 8)
    got = drive_default(file, "float32", "native").run(0, tokens, 8)
    rows = (got - want).abs().amax(-1) / want.abs().max()
    assert rows.median() < 0.2, "activations are rounded to 8 bits, which may send a token to another expert"
    for kernel in (IntegerLinear, NativeExperts):
        monkeypatch.setattr(kernel, "can_run", lambda *_: "not now")
    got = drive_default(file, "float32", "native").run(0, tokens, 8)
    assert deviation(got, want) < 1e-5
