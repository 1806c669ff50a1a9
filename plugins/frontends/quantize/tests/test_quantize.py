"""`lmkit quantize`: what is written means what was rounded, whole or not at all, and others read it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmkit.api import Checkpoint, CheckpointError, ConfigError, LmkitError, UnsupportedModel
from lmkit.checkpoint import read_directory
from lmkit_cli import run
from lmkit_layouts.words import unpack
from lmkit_quantize import writing
from lmkit_quantize.rounding import SCHEMES, Scheme, pack
from lmkit_quantize.writing import REPORT, Report, quantize
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.model import choice, deviation, load_tiny, prompt
from lmkit_testing.produced import REFERENCE
from lmkit_testing.steps import ModelDriver
from safetensors.torch import load_file, save_file

VARIANTS = [
    *SCHEMES.values(),
    replace(SCHEMES["int4"], group=32, symmetric=False),
    replace(SCHEMES["int8"], group=64, symmetric=False),
]


@given(st.integers(1, 5), st.integers(1, 70), st.sampled_from([4, 8]), st.randoms(use_true_random=False))
def test_words_hold_the_codes(rows: int, columns: int, bits: int, random: Any) -> None:
    codes = torch.tensor(
        [[random.randrange(-(1 << bits - 1), 1 << bits - 1) for _ in range(columns)] for _ in range(rows)]
    )
    words = pack(codes, bits)
    assert words.shape == (rows, -(-columns * bits // 32))
    assert torch.equal(unpack(words, bits)[:, :columns].to(torch.int64) - (1 << bits - 1), codes)


@pytest.mark.parametrize("scheme", VARIANTS, ids=lambda s: f"{s.name}-{s.group}-{s.symmetric}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_is_to_the_nearest(scheme: Scheme, dtype: torch.dtype) -> None:
    weight = torch.randn(6, 256, generator=torch.Generator().manual_seed(3)).to(dtype)
    weight[2] = 0
    weight[3] = weight[3].abs()
    stored, meant = scheme.round(weight)
    assert not meant[2].any()
    scale = stored["weight_scale"].float()
    steps = scale.repeat_interleave(256 // scale.shape[1], 1)
    if scheme.format == "float-quantized":  # three bits behind the first
        assert ((meant - weight.float()).abs() <= weight.float().abs() / 16 + steps / 512).all()
    else:  # half a step; a scale of bfloat16 is off by 2^-9 of the largest code
        slack = (1 << scheme.bits - 1) / 256 if dtype == torch.bfloat16 else 1e-4
        assert ((meant - weight.float()).abs() <= steps * (0.501 + slack)).all()
    assert scheme.symmetric or meant[3].min() >= 0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny Llama in two files."""
    folder = tiny_checkpoint("llama", tmp_path / "model", hidden_size=64, intermediate_size=128)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    placed = {name: f"model-0000{1 + (i > len(names) // 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(placed.values()):
        save_file({n: tensors[n] for n in names if placed[n] == file}, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


def written(folder: Path, output: Path, scheme: Scheme, *ignore: str) -> Report:
    return quantize(read_directory(str(folder), folder), output, scheme, list(ignore), lambda *said: None)


INT4 = replace(SCHEMES["int4"], group=32)
MIXTURE = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16,
    "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
}  # fmt: skip


def test_each_file_holds_what_its_source_held(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    seen: list[tuple[str, int, int]] = []
    checkpoint = read_directory(str(model), model)
    report = quantize(checkpoint, output, INT4, ["model.layers.1.mlp.down_proj"], lambda *said: seen.append(said))
    assert {(what, total) for what, total, _ in seen} == {("writing", checkpoint.nbytes)}
    assert sum(more for *_, more in seen) == checkpoint.nbytes
    made = read_directory(str(output), output)
    assert [f.name for f in made.files] == [f.name for f in checkpoint.files]
    before = {k: v for f in checkpoint.files for k, v in load_file(f).items()}
    after = {k: v for f in made.files for k, v in load_file(f).items()}
    index = json.loads((output / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name: output / file for name, file in index.items()} == {k: f for f in made.files for k in load_file(f)}
    rounded = {layer.name for layer in report.layers}
    assert len(rounded) == 7 * 2 - 1
    for name, tensor in before.items():
        if (layer := name.removesuffix(".weight")) in rounded:
            assert {k for k in after if k.startswith(f"{layer}.")} == {
                f"{layer}.{end}" for end in ("weight_packed", "weight_scale", "weight_shape")
            }
            assert after[f"{layer}.weight_shape"].tolist() == list(tensor.shape)
        else:
            assert torch.equal(after[name], tensor)
    assert all(0.02 < layer.error < 0.2 for layer in report.layers)
    config = made.config["quantization_config"]
    assert sorted(config["ignore"]) == ["lm_head", "model.layers.1.mlp.down_proj"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 32


def test_an_interrupted_run_goes_on(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, output = tmp_path / "whole", tmp_path / "out"
    written(model, whole, INT4)
    save, calls = writing.save_file, []

    def full(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        save(*arguments)

    monkeypatch.setattr(writing, "save_file", full)
    with pytest.raises(KeyboardInterrupt):
        written(model, output, INT4)
    first = output / "model-00001-of-00002.safetensors"
    assert not (output / "config.json").exists()
    changed = first.stat().st_mtime_ns
    with pytest.raises(ConfigError, match="something else"):
        written(model, output, SCHEMES["int8"])
    written(model, output, INT4)
    assert first.stat().st_mtime_ns == changed
    assert {f.name: f.read_bytes() for f in output.iterdir()} == {f.name: f.read_bytes() for f in whole.iterdir()}


def _changed(model: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Checkpoint:
    file = model / "model-00001-of-00002.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return read_directory(str(model), model)


def _nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = torch.nan


def _lost(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.0.mlp.down_proj.weight"]


def _experts(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.zeros(4, 4, 4)


@pytest.mark.parametrize(
    ("change", "error"), [(_nan, "finite"), (_lost, "has no model.layers.0.mlp.down_proj"), (_experts, "experts")]
)
def test_weights_that_cannot_be_rounded(
    model: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], error: str
) -> None:
    checkpoint = _changed(model, change)
    with pytest.raises((CheckpointError, UnsupportedModel), match=error):
        quantize(checkpoint, tmp_path / "out", INT4, [], lambda *said: None)
    assert not (tmp_path / "out" / "config.json").exists()


def test_refusals(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"no such linear"):
        written(model, output, INT4, "model.layers.9.mlp.up_proj")
    with pytest.raises(ConfigError, match="groups of 512"):
        written(model, output, replace(INT4, group=512))
    assert not output.exists()
    written(model, output, INT4)
    with pytest.raises(ConfigError, match="quantized already"):
        written(output, tmp_path / "again", INT4)
    (output / REPORT).write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        written(model, output, INT4)
    shutil.copytree(model, tmp_path / "unknown")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "unknown" / "config.json").write_text(json.dumps({**config, "model_type": "nothing"}))
    with pytest.raises(LmkitError, match="architecture"):
        written(tmp_path / "unknown", tmp_path / "other", INT4)


def test_experts_are_linears(tmp_path: Path) -> None:
    """Each by itself, as others write them; the router is not rounded, and named among what is not. lmkit and
    transformers read the same model."""
    import transformers

    for module in ("lmkit_model_qwen", "lmkit_quantization_compressed_tensors", "compressed_tensors"):
        pytest.importorskip(module)
    folder, output = tiny_checkpoint("Qwen3MoeForCausalLM", tmp_path / "model", **MIXTURE), tmp_path / "out"
    report = written(folder, output, INT4)
    assert sum(".experts." in layer.name for layer in report.layers) == 2 * 4 * 3
    assert report.ignored == ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(2))]
    scheme = choice("quantization", "lmkit_quantization_compressed_tensors.scheme:CompressedTensorsScheme")
    kernel = choice("op", REFERENCE, "linear:int4")
    loaded = load_tiny(output, "lmkit_model_qwen.arch:Qwen", "float32", choices=(scheme, kernel))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt(97)])).logits[0]
    assert deviation(ModelDriver(loaded, "float32").run(0, prompt(97), 7), expected) < 1e-2  # it rounds to bfloat16


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    assert run(["quantize", "demo", "-o", str(output), "--scheme", "w8a8", "--group-size", "32"]) == 2
    assert "one scale per row" in capsys.readouterr().err
    assert run(["quantize", "demo", "-o", str(output), "--text", str(tmp_path / "none.txt")]) == 2
    assert not output.exists()
    assert run(["quantize", "demo", "-o", str(output), "--zero-points", "--group-size", "64"]) == 0
    said = capsys.readouterr().out
    assert f"lmkit serve {output}" in said
    assert "mean error of weights" in said
    report = msgspec.json.decode((output / REPORT).read_bytes(), type=Report)
    assert report.scheme == asdict(replace(SCHEMES["int4"], group=64, symmetric=False))
    assert report.nbytes < 0.4 * report.source_bytes
