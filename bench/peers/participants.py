"""Who takes part: lmkit and its peers, each with the weights it is given, and the files they load."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import environments

HERE = Path(__file__).parent
PLAIN = "bf16 plain"  # as every other engine stores it, in place of lmkit's twelve bits
GGUF_FILE = "as in the file"
OPTIMUM = {"bf16": ["fp16"], "int8": ["int8"], "int4": ["int4", "--group-size", "128", "--ratio", "1.0"]}
GGUF = {"bf16": "bf16", "int8": "q8_0", "int4": "q4_0", "q4_k_m": "q4_k_m"}


@dataclass(frozen=True)
class Participant:
    """One engine with one kind of weights. Those of a group are measured side by side, round by round."""

    name: str  # "llamacpp int8"
    peer: str
    group: str  # bf16, int8, int4
    weights: str
    model: Callable[[Path], Path]  # folder of the shape -> what it loads

    @property
    def is_ours(self) -> bool:
        return self.peer == "lmkit"

    def command(self, root: Path) -> list[str]:
        python = Path(sys.executable) if self.is_ours else environments.python(self.peer, root)
        return [str(python), str(HERE / f"engine_{self.peer}.py")]

    def absent(self, root: Path) -> str:
        """Why it cannot take part; "" when nothing is known against it."""
        if self.is_ours or environments.is_complete(self.peer, root):
            return ""
        return f"no environment: python bench/peers/environments.py --root {root} {self.peer}"


def _checkpoint(shape: Path) -> Path:
    return shape / "hf"


def _gguf(group: str) -> Callable[[Path], Path]:
    return lambda shape: shape / f"{GGUF[group]}.gguf"


def _openvino(group: str) -> Callable[[Path], Path]:
    return lambda shape: shape / f"openvino-{group}"


PARTICIPANTS = (
    Participant("lmkit bf16", "lmkit", "bf16", "bf16", _checkpoint),
    Participant("lmkit bf16 in 16 bits", "lmkit", "bf16", PLAIN, _checkpoint),
    Participant("vllm bf16", "vllm", "bf16", "bf16", _checkpoint),
    Participant("llamacpp bf16", "llamacpp", "bf16", "bf16", _gguf("bf16")),
    Participant("openvino bf16", "openvino", "bf16", "bf16", _openvino("bf16")),
    Participant("transformers bf16", "transformers", "bf16", "bf16", _checkpoint),
    Participant("lmkit int8", "lmkit", "int8", "int8", _checkpoint),
    Participant("lmkit w8a8", "lmkit", "int8", "w8a8", _checkpoint),
    Participant("lmkit Q8_0", "lmkit", "int8", GGUF_FILE, _gguf("int8")),
    Participant("llamacpp Q8_0", "llamacpp", "int8", "int8", _gguf("int8")),
    Participant("openvino int8", "openvino", "int8", "int8", _openvino("int8")),
    Participant("lmkit int4", "lmkit", "int4", "int4", _checkpoint),
    Participant("lmkit Q4_0", "lmkit", "int4", GGUF_FILE, _gguf("int4")),
    Participant("llamacpp Q4_0", "llamacpp", "int4", "int4", _gguf("int4")),
    Participant("lmkit Q4_K_M", "lmkit", "int4", GGUF_FILE, _gguf("q4_k_m")),
    Participant("llamacpp Q4_K_M", "llamacpp", "int4", "int4", _gguf("q4_k_m")),
    Participant("openvino int4", "openvino", "int4", "int4", _openvino("int4")),
)


def prepare(shape: str, root: Path) -> Path:
    """The folder with every form of a random checkpoint of that shape; makes what is missing (minutes, once)."""
    folder = root / "models" / shape
    folder.mkdir(parents=True, exist_ok=True)
    hf = _checkpoint(folder)
    if not (hf / "tokenizer.json").exists():  # written last
        subprocess.run([sys.executable, "-m", "lmkit", "bench", "make-checkpoint", shape, hf], check=True)
    if environments.is_complete("llamacpp", root):
        files = [folder / f"{name}.gguf" for name in GGUF.values()]
        if not all(file.exists() for file in files):
            quantized = [f"{file.stem.upper()}={file}" for file in files[1:]]
            command = [environments.python("llamacpp", root), HERE / "make_gguf.py", hf, files[0], *quantized]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    if environments.is_complete("openvino", root):
        for group, weights in OPTIMUM.items():
            out = _openvino(group)(folder)
            if not (out / "openvino_model.bin").exists():
                command = [root / "openvino" / "bin" / "optimum-cli", "export", "openvino", "--model", hf]
                options = ["--task", "text-generation-with-past", "--disable-convert-tokenizer", "--weight-format"]
                subprocess.run([*command, *options, *weights, out], check=True)
    return folder
