"""The process in which llmcompressor calibrates: `python -m lmkit_quantize.calibrate FOLDER`.

FOLDER holds JOB and SAMPLES, and gets a file of safetensors for each decoder layer that is done: its parameters in
float32, `weight_scale` and `weight_zero_point` of the linears that were calibrated, and ERRORS as metadata. A process
that was ended is started again, and goes on behind them. DONE on stdout for each layer.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from compressed_tensors.quantization import QuantizationScheme
from llmcompressor import oneshot
from llmcompressor.core import Event, State
from llmcompressor.modeling.moe.linearize import linearize_moe
from llmcompressor.modifiers import Modifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from pydantic import PrivateAttr
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader

from lmkit_quantize.calibration import DONE, ERRORS, JOB, SAMPLES, Job
from lmkit_quantize.files import replace

BATCH = 8  # windows that run at once
MEASURED = 1024  # tokens on which errors of outputs are measured


class Keep(Modifier):
    """Last in a recipe: keeps what the others made of each decoder layer, in a file, whole or not at all."""

    _folder: Path = PrivateAttr()
    _job: Job = PrivateAttr()
    _names: dict[Any, str] = PrivateAttr(default_factory=dict)  # of modules
    _seen: dict[Any, tuple[Tensor, Tensor]] = PrivateAttr(default_factory=dict)  # inputs, and the weight before

    @classmethod
    def of(cls, folder: Path, job: Job) -> Keep:
        keep = cls()
        keep._folder, keep._job = folder, job
        return keep

    def on_initialize(self, state: State, **kwargs: object) -> bool:
        return True

    def on_calibration_start(self, state: State, event: Event, **kwargs: object) -> None:
        self._names = {module: name for name, module in state.model.named_modules()}
        for module in self._names:
            if hasattr(module, "quantization_scheme"):
                self.register_hook(module, self._see, "forward")

    def _see(self, module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        """The layer as it was, and some of its input."""
        rows = args[0].flatten(0, -2)[:MEASURED]
        if module not in self._seen and len(rows):
            self._seen[module] = rows, module.weight.detach().clone()

    def on_sequential_epoch_end(
        self, state: State, event: Event, modules: list[torch.nn.Module], **kwargs: object
    ) -> None:
        made = [module for module in modules if hasattr(module, "quantization_scheme")]
        if not made:
            return
        tensors = {
            f"{self._names[module]}.{name}": value.detach().contiguous()
            for module in modules
            if not isinstance(module, torch.nn.Embedding)
            for name, value in module.named_parameters(recurse=False)
        }
        errors = {self._names[module]: self._errors(module) for module in made if module in self._seen}
        self._seen.clear()
        said = {ERRORS: json.dumps(errors)}
        path = self._folder / f"{self._names[made[0]]}.safetensors"
        replace(path, lambda part: save_file(tensors, part, said))
        print(DONE, len(made), flush=True)

    def on_calibration_end(self, state: State, event: Event, **kwargs: object) -> None:
        self.remove_hooks()

    @torch.no_grad()
    def _errors(self, module: Any) -> tuple[float, float]:
        """Errors of the layer's output beside its norm: calibrated, and rounded to the nearest."""
        inputs, before = self._seen[module]
        inputs, exact, now = inputs.float(), before.float(), module.weight.float()
        scheme = self._job.scheme
        _, meant = scheme.store(module.weight, module.weight_scale, module.weight_zero_point)
        if self._job.method == "awq":  # what the scales of its columns and rows did is undone
            meant = torch.where(now == 0, meant, meant / now * exact)
        norm = (inputs @ exact.t()).norm().clamp(min=1e-30)
        calibrated, rounded = (
            float((inputs @ (w - exact).t()).norm() / norm) for w in (meant, scheme.round(before)[1])
        )
        return calibrated, rounded


def recipe(job: Job, ignored: list[str], keep: Keep) -> list[Modifier]:
    """Ignored linears stay as they are."""
    group = job.scheme.config([])["config_groups"]["group_0"]
    group["weights"]["scale_dtype"] = job.dtype  # they are chosen among those that can be stored
    settings: dict[str, Any] = {"config_groups": {"group_0": QuantizationScheme(**group)}, "ignore": ignored}
    if job.method == "gptq":
        return [GPTQModifier(**settings), keep]
    return [AWQModifier(), QuantizationModifier(**settings), keep]


def resume(folder: Path, model: torch.nn.Module) -> list[str]:
    """Puts the layers that are done into the model; names of their linears."""
    parameters, done = dict(model.named_parameters()), []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                if name in parameters:
                    parameters[name].copy_(file.get_tensor(name))
                elif name.endswith(".weight_scale"):
                    done.append(name.removesuffix(".weight_scale"))
    return done


def main(folder: Path) -> None:
    job = msgspec.json.decode((folder / JOB).read_bytes(), type=Job)
    windows = torch.tensor(json.loads((folder / SAMPLES).read_text(encoding="ascii")))
    model = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32, trust_remote_code=False)
    linearize_moe(model)
    if unknown := set(job.linears) - {name for name, _ in model.named_modules()}:
        raise ValueError(f"it has no {min(unknown)}, under this name of the checkpoint")
    if not torch.accelerator.is_available():  # llmcompressor 0.14 pins memory all the same, which is an error then
        IntermediatesCache.pin_memory = lambda *arguments: None
    ignored = job.ignored + resume(folder, model)
    samples: Any = [{"input_ids": window} for window in windows]
    batches: Any = DataLoader(samples, batch_size=BATCH)
    keep = Keep.of(folder, job)
    oneshot(model=model, processor=object(), recipe=recipe(job, ignored, keep), dataset=batches, pipeline="sequential")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
