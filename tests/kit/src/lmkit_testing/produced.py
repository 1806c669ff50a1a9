"""Checkpoints that real producers have quantized, with the logits of their own dequantized weights beside them.

A folder holds config.json, model.safetensors, and expected.safetensors with `tokens` [1, T] and `logits` [T, V]; also
`rounded` [T, V], the logits with rounded activations and cache, where the producer rounds these.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lmkit.api import Checkpoint, TensorEntry
from lmkit.plugins import load_target
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.model import DENSE, choice, deviation, drift, load_tiny, prompt, reference
from lmkit_testing.steps import ModelDriver

REFERENCE = "lmkit_layers.linear:ReferenceLinear"
INTEGER = "lmkit_platform_cpu.integer:IntegerLinear"
FLOAT8 = "lmkit_quantization_fp8.kernel:Fp8Weights"
ROUNDED8 = "lmkit_quantization_fp8.kernel:Fp8Torch"
FLOAT4 = "lmkit_quantization_mxfp4.kernel:Fp4Torch"
TORCH_ATTENTION = "lmkit_attention_torch.backend:TorchAttention"
EXPERTS = "lmkit_platform_cpu.experts:NativeExperts"
LLAMA = "lmkit_model_llama.arch:Llama"
QWEN = "lmkit_model_qwen.arch:Qwen"
MIXTURE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16,
    "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
}  # fmt: skip


def folders(tests: str, *names: str) -> list[Path]:
    """The checkpoints beside the test file `tests`; made anew where LMKIT_PRODUCED names their folder."""
    found = sorted((Path(tests).parent / "made").iterdir())
    anew = os.environ.get("LMKIT_PRODUCED")
    return [Path(anew, folder.name) if anew else folder for folder in found if not names or folder.name in names]


def in_own_file(folder: Path, target: Path, name: str, config: dict[str, Any]) -> Path:
    """The checkpoint, as programs write it that say `config` in a file of that name and nothing in config.json."""
    plain = json.loads((folder / "config.json").read_text())
    del plain["quantization_config"]
    (target / "config.json").write_text(json.dumps(plain))
    (target / name).write_text(json.dumps(config))
    (target / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return target


def changed(folder: Path, target: Path, tensors: Mapping[str, Tensor | None]) -> Path:
    """The checkpoint with other tensors, or without those that are None."""
    found = load_file(folder / "model.safetensors")
    found |= {name: value for name, value in tensors.items() if value is not None}
    kept = {name: value for name, value in found.items() if tensors.get(name, value) is not None}
    save_file(kept, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


@dataclass
class Held:
    """A loader of tensors in memory."""

    held: Mapping[str, Tensor]

    def tensors(self, checkpoint: Checkpoint) -> list[TensorEntry]:
        return [
            TensorEntry(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), t.nbytes, "file")
            for name, t in self.held.items()
        ]

    def read(self, entry: TensorEntry) -> Tensor:
        return self.held[entry.name]

    def release(self) -> None:
        pass


def made(loader: Any) -> dict[str, Tensor]:
    """What a loader makes of the tensors that it was given, each as its header says."""
    found = {}
    for entry in loader.tensors(Checkpoint("m", Path(), "safetensors", {})):
        value = found[entry.name] = loader.read(entry)
        said = (entry.shape, entry.dtype, entry.nbytes)
        assert said == (tuple(value.shape), str(value.dtype).removeprefix("torch."), value.nbytes)
    return found


def load(folder: Path, scheme: str, kernel: str, dtype: str = "float32", float8: str = "", cache: str = "") -> Any:
    """The checkpoint in `folder`, its quantized linears on `kernel`; float8 on theirs where that runs integers.

    `float8` is another kernel for those, `cache` the dtype of the KV cache.
    """
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    load_target(scheme).parse(config)
    kernels = dict.fromkeys(("int4", "int8", "w8a8", "mxfp4", "nvfp4", "nf4", "fp4"), kernel)
    kernels["fp8"] = float8 or (FLOAT8 if kernel == INTEGER else kernel)
    ops = tuple(choice("op", runs, f"linear:{name}") for name, runs in kernels.items())
    attention = TORCH_ATTENTION if cache else DENSE
    chosen = (choice("quantization", scheme), *ops)
    return load_tiny(folder, LLAMA, dtype, attention=attention, choices=chosen, kv_dtype=cache)


def check_rounded(folder: Path, scheme: str, tolerance: float, cache: str = "") -> None:
    """Logits are those of the producer with rounded activations, and with a cache of dtype `cache` if it has one."""
    expected = load_file(folder / "expected.safetensors")
    loaded = load(folder, scheme, REFERENCE, float8=ROUNDED8, cache=cache)
    tokens: list[int] = expected["tokens"][0].tolist()
    got: Tensor = ModelDriver(loaded, "float32", kv_dtype=cache).run(0, tokens, 7)
    assert deviation(got, expected["rounded"]) < tolerance
    assert deviation(got, expected["logits"]) > 3 * tolerance


def check(folder: Path, scheme: str, kernel: str, tolerance: float) -> None:
    """Logits of the checkpoint are those that its producer's weights give, and its linears stay as integers."""
    expected = load_file(folder / "expected.safetensors")
    loaded = load(folder, scheme, kernel)
    tokens: list[int] = expected["tokens"][0].tolist()
    got: Tensor = ModelDriver(loaded, "float32").run(0, tokens, 7)
    assert deviation(got, expected["logits"]) < tolerance
    if kernel == INTEGER:
        sizes = {
            name: module.packed.nbytes for name, module in loaded.model.named_modules() if hasattr(module, "packed")
        }
        assert sizes["layers.0.mlp.gate_up"] < torch.finfo(torch.float16).bits // 8 * 64 * 256


def fours(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [n, k] and zeros [n, groups] of 4 bits, scales [n, groups] in float16, and what they are worth."""
    groups = weight.float().unflatten(1, (-1, group))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    codes = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, 15)
    worth = (codes - zeros[..., None]) * scales.float()[..., None]
    return codes.flatten(1).long(), zeros.long(), scales, worth.flatten(1)


def words(codes: Tensor) -> Tensor:
    """Codes [n, k] of 4 bits -> int32 [n, k / 8], the first in the lowest bits."""
    return (codes.unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1).to(torch.int32).contiguous()


def check_experts(
    target: Path, scheme: str, config: dict[str, Any], store: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
) -> None:
    """A mixture whose experts `store` gives as a checkpoint has them (and what they are worth) runs on native kernels.

    Each token as by one expert after the other, and the median token near what the weights give: activations are
    rounded to 8 bits, by which a router may choose another expert.
    """
    plain = tiny_checkpoint("Qwen3MoeForCausalLM", target / "plain", **MIXTURE)
    stored: dict[str, Tensor] = {}
    worth: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        stored[name] = worth[name] = tensor
        if name.endswith("_proj.weight"):
            tensors, worth[name] = store(stored.pop(name))
            stored |= {name.removesuffix("weight") + key: value for key, value in tensors.items()}
    save_file(worth, plain / "model.safetensors", {"format": "pt"})
    quantized = target / "quantized"
    quantized.mkdir()
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    said = json.loads((plain / "config.json").read_text()) | {"quantization_config": config}
    (quantized / "config.json").write_text(json.dumps(said))
    chosen = (choice("quantization", scheme), choice("op", INTEGER, "linear:int4"))
    native, linear = (
        load_tiny(quantized, QWEN, "float32", choices=chosen + more)
        for more in ((choice("op", EXPERTS, "moe:int4"),), ())
    )
    got, one = (ModelDriver(loaded, "float32").run(0, prompt(97), 7) for loaded in (native, linear))
    with torch.no_grad():
        expected = reference(plain, "float32")(torch.tensor([prompt(97)])).logits[0]
    assert deviation(got, one) < 1e-4
    assert drift(got, expected) < 8e-2
    model: Any = native.model
    assert model.layers[1].mlp.experts.up.packed.nbytes < 4 * 2 * 64 * 64
