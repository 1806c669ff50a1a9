"""A rounded checkpoint, written file by file: each output file holds what its input file held."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from lmkit.api import Checkpoint, CheckpointError, ConfigError, UnsupportedModel
from lmkit.checkpoint import INDEX
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lmkit_quantize.rounding import Scheme

REPORT = "quantize.json"
BESIDE = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")  # what a server reads beside the weights
ROUTERS = ("gate", "router", "shared_expert_gate")  # last parts of names: a choice of experts is not to be rounded
EXPERTS = ".experts."


class Layer(msgspec.Struct):
    """A linear that was rounded. `error`: norm of the difference over the norm of the weight."""

    name: str
    error: float


class File(msgspec.Struct):
    """One input file, and what became of it."""

    name: str
    tensors: list[str]  # of the output
    nbytes: int
    layers: list[Layer]


class Report(msgspec.Struct):
    """REPORT beside the result: what was done, so far. A run that was interrupted goes on after the last file."""

    source: str
    source_bytes: int
    scheme: dict[str, Any]
    ignored: list[str]
    files: list[File]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    @property
    def layers(self) -> list[Layer]:
        return [layer for file in self.files for layer in file.layers]


def linears(checkpoint: Checkpoint) -> dict[str, int]:
    """Names of the linears as transformers and vLLM know them -> their columns. Raises UnsupportedModel."""
    import transformers

    if checkpoint.config.get("quantization_config"):
        raise ConfigError("the checkpoint is quantized already", fix="give the one that it was made from")
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModel("architecture", checkpoint.architecture, "a causal model of transformers") from error
    return {name: m.in_features for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}


def quantize(
    checkpoint: Checkpoint, output: Path, scheme: Scheme, ignore: list[str], advance: Callable[[int], None]
) -> Report:
    """Writes the rounded checkpoint into `output`; calls `advance` with the input bytes that are done.

    The output head and routers stay as they are, and so do linears that `ignore` names and those whose columns the
    scheme does not divide. Raises ConfigError where `output` holds something else, CheckpointError, UnsupportedModel.
    """
    found = linears(checkpoint)
    unknown = [name for name in ignore if name not in found]
    if unknown:
        raise ConfigError(f"--ignore {unknown[0]}: there is no such linear", fix=f"one of {', '.join(found)[:300]}")
    kept = [n for n in found if n == "lm_head" or n in ignore or n.rpartition(".")[2] in ROUTERS]
    kept += [n for n, columns in found.items() if n not in kept and not scheme.fits(columns)]
    rounded = found.keys() - set(kept)
    if not rounded:
        raise ConfigError(f"no linear can be rounded in groups of {scheme.group} columns", fix="a smaller --group-size")
    report = _begin(checkpoint, output, scheme, kept)
    done = {file.name for file in report.files}
    for path in checkpoint.files:
        if path.name not in done:
            report.files.append(_write(path, output, scheme, rounded))
            _save(report, output)
        advance(path.stat().st_size)
    if missing := rounded - {layer.name for layer in report.layers}:
        raise CheckpointError(f"the checkpoint has no {min(missing)}.weight, which its architecture has")
    _finish(checkpoint, output, scheme, report)
    return report


def _begin(checkpoint: Checkpoint, output: Path, scheme: Scheme, kept: list[str]) -> Report:
    """A new report, or that of a run that was interrupted."""
    fresh = Report(checkpoint.ref, checkpoint.nbytes, asdict(scheme), kept, [])
    if (output / REPORT).is_file():
        try:
            before = msgspec.json.decode((output / REPORT).read_bytes(), type=Report)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{output / REPORT} cannot be read: {error}", fix="another directory") from error
        same = (before.source, before.source_bytes, before.scheme, before.ignored)
        if same == (fresh.source, fresh.source_bytes, fresh.scheme, fresh.ignored):
            return before
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty, and holds something else", fix="a new directory")
    output.mkdir(parents=True, exist_ok=True)
    _save(fresh, output)
    return fresh


def _save(report: Report, output: Path) -> None:
    _replace(output / REPORT, lambda part: part.write_bytes(msgspec.json.format(msgspec.json.encode(report))))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """The file is there whole, or not at all."""
    part = path.with_name(f"{path.name}.part")
    write(part)
    os.replace(part, path)


def _write(path: Path, output: Path, scheme: Scheme, rounded: set[str]) -> File:
    tensors: dict[str, Tensor] = {}
    layers: list[Layer] = []
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if EXPERTS in name:
                    raise UnsupportedModel("weights of experts", name, "models without a mixture of experts")
                tensor, layer = file.get_tensor(name), name.removesuffix(".weight")
                if layer not in rounded or layer == name:
                    tensors[name] = tensor
                    continue
                if tensor.dim() != 2 or not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
                    raise CheckpointError(f"{name} in {path} is no matrix of finite numbers")
                stored, meant = scheme.round(tensor)
                tensors |= {f"{layer}.{key}": value for key, value in stored.items()}
                norm = float(tensor.float().norm())
                layers.append(Layer(layer, float((meant - tensor.float()).norm()) / norm if norm else 0.0))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    _replace(output / path.name, lambda part: save_file(tensors, part, {"format": "pt"}))
    shutil.copymode(path, output / path.name)  # the library's files are for their owner only
    return File(path.name, list(tensors), sum(t.nbytes for t in tensors.values()), layers)


def _finish(checkpoint: Checkpoint, output: Path, scheme: Scheme, report: Report) -> None:
    """Configuration, index, and the files of the tokenizer."""
    for pattern in BESIDE:
        for path in checkpoint.path.glob(pattern):
            if path.name not in (INDEX, REPORT, "config.json"):
                shutil.copyfile(path, output / path.name)
    if len(report.files) > 1 or (checkpoint.path / INDEX).is_file():
        placed = {name: file.name for file in report.files for name in file.tensors}
        index = {"metadata": {"total_size": report.nbytes}, "weight_map": placed}
        _replace(output / INDEX, lambda part: part.write_text(json.dumps(index, indent=1), encoding="utf-8"))
    config = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = scheme.config(report.ignored)
    _replace(output / "config.json", lambda part: part.write_text(json.dumps(config, indent=2), encoding="utf-8"))
