"""GPTQ and AWQ: text for them, and the process in which llmcompressor runs them (`lmkit_quantize.calibrate`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from lmkit.api import Checkpoint, CheckpointError, ConfigError
from safetensors import safe_open
from torch import Tensor

from lmkit_quantize.files import replace
from lmkit_quantize.rounding import Scheme

JOB, SAMPLES, LOG = "job.json", "samples.json", "log.txt"
ERRORS = "errors"  # key of a file's metadata
DONE = "calibrated"  # begins a line that the process prints; a number of linears follows
WINDOW = 512  # tokens that are seen together
TOKENS = {"gptq": 128 * WINDOW, "awq": 32 * WINDOW}  # AWQ runs each of them 20 times
NEEDED = "llmcompressor"
MODULE = "lmkit_quantize.calibrate"
QUIET = {"TQDM_DISABLE": "1", "LLM_COMPRESSOR_LOG_LEVEL": "WARNING", "TOKENIZERS_PARALLELISM": "false"}


class Calibration(msgspec.Struct):
    """How weights are chosen. `text`: what the model sees meanwhile; "" = what it writes itself."""

    method: Literal["gptq", "awq"]
    text: str = ""
    tokens: int = 0  # 0 = TOKENS

    def described(self) -> dict[str, Any]:
        """For the report: the text by its hash."""
        text = f"sha256:{sha256(self.text.encode()).hexdigest()}" if self.text else "written by the model"
        return {"method": self.method, "text": text, "tokens": self.tokens or TOKENS[self.method]}

    def check(self, scheme: Scheme) -> None:
        """Raises ConfigError for what cannot be done, before anything is done."""
        if scheme.format == "float-quantized":
            raise ConfigError(f"--method {self.method} chooses integers", fix="--scheme int4, int8 or w8a8")
        if find_spec(NEEDED) is None:
            raise ConfigError(
                f"--method {self.method} needs {NEEDED}",
                fix='pip install "lmkit-quantize[calibration]", or --method rtn',
            )


class Job(msgspec.Struct):
    """What the process does. `dtype`: of the checkpoint, in which scales are stored."""

    model: str
    method: Literal["gptq", "awq"]
    scheme: Scheme
    linears: list[str]  # those that are calibrated
    ignored: list[str]  # those that stay as they are
    dtype: str


class Calibrated:
    """What the process has made, by names of tensors and of linears."""

    def __init__(self, folder: Path, method: str) -> None:
        self.scaled = method == "awq"  # else weights are those that were chosen
        self.errors: dict[str, tuple[float, float]] = {}  # of outputs: so, and rounded to the nearest
        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                self.errors |= json.loads(file.metadata()[ERRORS])
                self._files |= dict.fromkeys(file.keys(), path)

    @property
    def linears(self) -> set[str]:
        return {name.removesuffix(".weight_scale") for name in self._files if name.endswith(".weight_scale")}

    def parts(self, linear: str) -> tuple[Tensor, Tensor, Tensor]:
        """Weight, scales and zeros, which are integers that are 0 where the scheme is symmetric."""
        weight, scale, zeros = (self.get(f"{linear}.weight{end}") for end in ("", "_scale", "_zero_point"))
        assert weight is not None
        assert scale is not None
        return weight, scale, torch.zeros_like(scale) if zeros is None else zeros

    def get(self, name: str) -> Tensor | None:
        if name not in self._files:
            return None
        with safe_open(self._files[name], framework="pt") as file:
            found: Tensor = file.get_tensor(name)
            return found


def calibrate(
    checkpoint: Checkpoint,
    folder: Path,
    calibration: Calibration,
    job: Job,
    advance: Callable[[int], None],
) -> Calibrated:
    """Runs the process in `folder` unless it is done; calls `advance` with the number of linears that are.

    Raises ConfigError for a text too short, CheckpointError where llmcompressor fails.
    """
    linears = set(job.linears)
    folder.mkdir(exist_ok=True)
    if not (folder / SAMPLES).is_file():
        windows = _windows(checkpoint, calibration)
        replace(folder / SAMPLES, lambda part: part.write_text(json.dumps(windows), encoding="ascii"))
    replace(folder / JOB, lambda part: part.write_bytes(msgspec.json.encode(job)))
    before = Calibrated(folder, calibration.method).linears & linears
    advance(len(before))
    if before != linears:
        _run(folder, advance)
    made = Calibrated(folder, calibration.method)
    if missing := linears - made.linears:
        raise CheckpointError(f"{NEEDED} did not reach {min(missing)}", fix=f"--ignore {min(missing)}, or --method rtn")
    return made


def _run(folder: Path, advance: Callable[[int], None]) -> None:
    command = [sys.executable, "-m", MODULE, str(folder)]
    (folder / LOG).unlink(missing_ok=True)
    with (
        (folder / LOG).open("a", encoding="utf-8", buffering=1) as log,  # what it says on both, in order
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, **QUIET}
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                said, _, number = line.partition(" ")
                if said == DONE:
                    advance(int(number))
                else:
                    log.write(line)
        except BaseException:
            process.kill()
            raise
    code = process.returncode
    if code != 0:
        lines = (folder / LOG).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        said = lines[-1] if lines and code > 0 else f"ended by signal {-code}; was there memory for it in float32?"
        raise CheckpointError(f"{NEEDED} failed: {said}", fix=f"read {folder / LOG}; --method rtn needs no calibration")


def _windows(checkpoint: Checkpoint, calibration: Calibration) -> list[list[int]]:
    """Token ids, all of the same length: pieces of the text, spread evenly, or what the model writes."""
    declared = checkpoint.config.get("max_position_embeddings")
    size = min(WINDOW, declared if isinstance(declared, int) else WINDOW)
    wanted = max((calibration.tokens or TOKENS[calibration.method]) // size, 1)
    if not calibration.text:
        return _written(checkpoint, size, wanted)
    ids = _encoded(checkpoint, calibration.text)
    found = [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
    if not found:
        raise ConfigError(f"--calibration: the text has {len(ids)} tokens, and {size} are needed", fix="a longer one")
    step = max(len(found) / wanted, 1.0)
    return [found[int(i * step)] for i in range(min(wanted, len(found)))]


def _encoded(checkpoint: Checkpoint, text: str) -> list[int]:
    from lmkit.config import from_options
    from lmkit.plugins.resolve import resolve
    from lmkit.text.side import TextSide

    config = from_options({"model": str(checkpoint.path)})
    resolved, found, _ = resolve(config)
    return TextSide.open(found, resolved, config).encode_prompt(text, add_special=False)


def _written(checkpoint: Checkpoint, size: int, wanted: int) -> list[list[int]]:
    """Text by the model from the token that begins or ends its texts on; the same in each run."""
    from lmkit import LLM, SamplingParams

    config = checkpoint.config
    first = next((t for t in (config.get("bos_token_id"), config.get("eos_token_id")) if isinstance(t, int)), 0)
    params = [SamplingParams(max_tokens=size - 1, temperature=1.0, seed=i, ignore_eos=True) for i in range(wanted)]
    with LLM(str(checkpoint.path), max_length=size) as llm:
        outputs = llm.generate([[first]] * wanted, params, progress=True)
    return [[first, *output.token_ids] for output in outputs]
