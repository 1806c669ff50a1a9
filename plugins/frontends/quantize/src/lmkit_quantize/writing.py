"""A rounded checkpoint, written file by file: each output file holds what its input file held."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from lmkit.api import Checkpoint, CheckpointError, ConfigError, UnsupportedModel
from lmkit.checkpoint import INDEX
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lmkit_quantize.calibration import Calibrated, Calibration, Job, calibrate
from lmkit_quantize.files import replace
from lmkit_quantize.rounding import Scheme

REPORT = "quantization_report.json"
CALIBRATION = "calibration"  # folder in the output, while it is made
BESIDE = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")  # what a server reads beside the weights
ROUTERS = ("gate", "router", "shared_expert_gate")  # last parts of names: a choice of experts is not to be rounded
EXPERTS = ".experts."
EXPERT = re.compile(r"\.experts\.\d+\..*\.weight$")  # a linear of one expert

Advance = Callable[[str, int, int], None]  # what is done, how much there is of it, how much more is done


class Layer(msgspec.Struct, omit_defaults=True):
    """A linear that was rounded. `error`: norm of the difference over the norm of the weight.

    Where calibration saw its inputs: `output_error` is the same of its outputs, `rtn_output_error` what rounding to
    the nearest makes of them.
    """

    name: str
    error: float
    output_error: float | None = None
    rtn_output_error: float | None = None


class File(msgspec.Struct):
    """One input file, and what became of it."""

    name: str
    tensors: list[str]  # of the output
    nbytes: int
    layers: list[Layer]


class Perplexity(msgspec.Struct):
    """On a text, of the checkpoint before and after."""

    text: str
    before: float
    after: float


class Report(msgspec.Struct):
    """REPORT beside the result: what was done, so far. A run that was interrupted goes on after the last file."""

    source: str
    source_bytes: int
    scheme: dict[str, Any]
    calibration: dict[str, Any] | None
    ignored: list[str]
    files: list[File]
    nbytes: int = 0
    perplexity: Perplexity | None = None

    @property
    def layers(self) -> list[Layer]:
        return [layer for file in self.files for layer in file.layers]


def linears(checkpoint: Checkpoint) -> dict[str, int]:
    """Names of the linears as transformers and vLLM know them -> their columns. Raises UnsupportedModel.

    Experts of mixtures count where the checkpoint has each linear of each expert by itself.
    """
    import transformers

    if checkpoint.config.get("quantization_config"):
        raise ConfigError("the checkpoint is quantized already", fix="give the one that it was made from")
    try:
        config = transformers.AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModel("architecture", checkpoint.architecture, "a causal model of transformers") from error
    found = {name: m.in_features for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    for name, shape in _shapes(checkpoint).items():
        if EXPERT.search(name) and len(shape) == 2:
            found[name.removesuffix(".weight")] = shape[1]
        elif EXPERTS in name:
            raise UnsupportedModel("weights of experts", name, "a tensor for each linear of each expert")
        elif _router(layer := name.removesuffix(".weight")) and len(shape) == 2:
            found[layer] = shape[1]
    return found


def _shapes(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """Names of all tensors -> their shapes, from the headers of the files."""
    shapes: dict[str, list[int]] = {}
    for path in checkpoint.files:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no mapping
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
    return shapes


def _router(name: str) -> bool:
    return name.rpartition(".")[2] in ROUTERS


def quantize(
    checkpoint: Checkpoint,
    output: Path,
    scheme: Scheme,
    ignore: list[str],
    advance: Advance,
    calibration: Calibration | None = None,
) -> Report:
    """Writes the rounded checkpoint into `output`; to the nearest, or as `calibration` says.

    The output head and routers stay as they are, and so do linears that `ignore` names and those whose columns the
    scheme does not divide. Raises ConfigError where `output` holds something else, CheckpointError, UnsupportedModel.
    """
    if calibration is not None:
        calibration.check(scheme)
    found = linears(checkpoint)
    unknown = [name for name in ignore if name not in found]
    if unknown:
        raise ConfigError(f"--ignore {unknown[0]}: there is no such linear", fix=f"one of {', '.join(found)[:300]}")
    kept = [n for n in found if n == "lm_head" or n in ignore or _router(n)]
    kept += [n for n, columns in found.items() if n not in kept and not scheme.fits(columns)]
    rounded = found.keys() - set(kept)
    if not rounded:
        raise ConfigError(f"no linear can be rounded in groups of {scheme.group} columns", fix="a smaller --group-size")
    if missing := rounded - {name.removesuffix(".weight") for name in _shapes(checkpoint)}:
        raise CheckpointError(f"the checkpoint has no {min(missing)}.weight, which its architecture has")
    report = _begin(checkpoint, output, scheme, calibration, kept)
    left = [path for path in checkpoint.files if path.name not in {file.name for file in report.files}]
    made = None
    if calibration is not None and left:
        dtype = _dtype(checkpoint, min(rounded))
        job = Job(str(checkpoint.path), calibration.method, scheme, sorted(rounded), kept, dtype)
        tell = partial(advance, "calibrating", len(rounded))
        made = calibrate(checkpoint, output / CALIBRATION, calibration, job, tell)
    tell = partial(advance, "writing", checkpoint.nbytes)
    for path in checkpoint.files:
        if path in left:
            report.files.append(_write(path, output, scheme, rounded, made))
            report.nbytes = sum(file.nbytes for file in report.files)
            save(report, output)
        tell(path.stat().st_size)
    _finish(checkpoint, output, scheme, report)
    return report


def _dtype(checkpoint: Checkpoint, linear: str) -> str:
    """The type of a weight, as torch names it."""
    for path in checkpoint.files:
        with safe_open(path, framework="pt", device="cpu") as file:
            if f"{linear}.weight" in file.keys():  # noqa: SIM118 - it is no mapping
                return str(file.get_tensor(f"{linear}.weight").dtype)
    raise AssertionError(linear)


def _begin(
    checkpoint: Checkpoint, output: Path, scheme: Scheme, calibration: Calibration | None, kept: list[str]
) -> Report:
    """A new report, or that of a run that was interrupted."""
    how = calibration.described() if calibration is not None else None
    fresh = Report(checkpoint.ref, checkpoint.nbytes, asdict(scheme), how, kept, [])
    if (output / REPORT).is_file():
        try:
            before = msgspec.json.decode((output / REPORT).read_bytes(), type=Report)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{output / REPORT} cannot be read: {error}", fix="another directory") from error
        same = ("source", "source_bytes", "scheme", "calibration", "ignored")
        if all(getattr(before, name) == getattr(fresh, name) for name in same):
            return before
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"{output} is not empty, and holds something else", fix="a new directory")
    output.mkdir(parents=True, exist_ok=True)
    save(fresh, output)
    return fresh


def save(report: Report, output: Path) -> None:
    replace(output / REPORT, lambda part: part.write_bytes(msgspec.json.format(msgspec.json.encode(report))))


def _write(path: Path, output: Path, scheme: Scheme, rounded: set[str], made: Calibrated | None) -> File:
    tensors: dict[str, Tensor] = {}
    layers: list[Layer] = []
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                tensor, layer = file.get_tensor(name), name.removesuffix(".weight")
                if layer not in rounded or layer == name:
                    changed = made.get(name) if made is not None else None
                    tensors[name] = tensor if changed is None else changed.to(tensor.dtype)
                    continue
                if tensor.dim() != 2 or not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
                    raise CheckpointError(f"{name} in {path} is no matrix of finite numbers")
                stored, said = _rounded(layer, tensor, scheme, made)
                tensors |= {f"{layer}.{key}": value for key, value in stored.items()}
                layers.append(said)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    replace(output / path.name, lambda part: save_file(tensors, part, {"format": "pt"}))
    shutil.copymode(path, output / path.name)  # the library's files are for their owner only
    return File(path.name, list(tensors), sum(t.nbytes for t in tensors.values()), layers)


def _rounded(layer: str, weight: Tensor, scheme: Scheme, made: Calibrated | None) -> tuple[dict[str, Tensor], Layer]:
    """The tensors in place of a weight, and what was lost."""
    if made is None:
        (stored, meant), exact = scheme.round(weight), weight.float()
        outputs: tuple[float | None, float | None] = (None, None)
    else:
        chosen, scale, zeros = made.parts(layer)
        stored, meant = scheme.store(chosen, scale.to(weight.dtype), zeros)
        exact = chosen if made.scaled else weight.float()
        outputs = made.errors.get(layer, (None, None))
    norm = float(exact.norm())
    return stored, Layer(layer, float((meant - exact).norm()) / norm if norm else 0.0, *outputs)


def _finish(checkpoint: Checkpoint, output: Path, scheme: Scheme, report: Report) -> None:
    """Configuration, index, and the files of the tokenizer."""
    for pattern in BESIDE:
        for path in checkpoint.path.glob(pattern):
            if path.name not in (INDEX, REPORT, "config.json"):
                shutil.copyfile(path, output / path.name)
    if len(report.files) > 1 or (checkpoint.path / INDEX).is_file():
        placed = {name: file.name for file in report.files for name in file.tensors}
        index = {"metadata": {"total_size": report.nbytes}, "weight_map": placed}
        replace(output / INDEX, lambda part: part.write_text(json.dumps(index, indent=1), encoding="utf-8"))
    config = json.loads((checkpoint.path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = scheme.config(report.ignored)
    replace(output / "config.json", lambda part: part.write_text(json.dumps(config, indent=2), encoding="utf-8"))
    shutil.rmtree(output / CALIBRATION, ignore_errors=True)
