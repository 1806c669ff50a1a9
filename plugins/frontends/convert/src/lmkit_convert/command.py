"""`lmkit convert`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from lmkit.api import CheckpointError, ConfigError
from lmkit.config import format_size
from rich.console import Console
from rich.progress import track

PICKLED = (".bin", ".pt", ".pth", ".tensors")  # the last is tensorizer's, whose types can be objects of Python
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
THEIR_INDEX = "pytorch_model.bin.index.json"
OTHERS = ("training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth")  # of trainers
MAX_FILES = 1000
MAX_ANSWER = 64 << 20  # bytes


def convert(
    source: Annotated[Path, typer.Argument(help="a checkpoint's directory with *.bin, *.pt, *.pth or *.tensors")],
    output: Annotated[Path, typer.Option("--output", "-o", help="directory for the result; it must not exist")],
) -> None:
    """Write the pickled weights of a checkpoint as safetensors; other files are copied.

    A pickle can run code when it is read. Each is read in a process of its own by a reader that knows tensors and
    nothing else; what it does not know is refused.

    Example: lmkit convert ./old-model -o ./new-model && lmkit serve ./new-model
    """
    files = weights_of(source)
    if any(path.suffix == ".tensors" for path in files) and find_spec("tensorizer") is None:
        raise ConfigError(f"{source} was written by tensorizer, which is not installed", fix="pip install tensorizer")
    if output.exists():
        raise ConfigError(f"{output} is there already", fix="give another directory with -o")
    part = output.with_name(f".{output.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        nbytes = write(source, files, part)
        os.replace(part, output)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    Console(highlight=False).print(f"{len(files)} files, {format_size(nbytes)}\nlmkit serve {output}", soft_wrap=True)


def weights_of(folder: Path) -> list[Path]:
    """Those files that the index names, else all. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no directory", fix="give the directory that holds config.json and the weights"
        )
    index = folder / THEIR_INDEX
    if index.is_file():
        try:
            names = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
        except (OSError, ValueError, LookupError, AttributeError, RecursionError) as e:
            raise CheckpointError(f"{index} cannot be read: {e}") from e
        if any(Path(name).name != name for name in names):
            raise CheckpointError(f"{index} names files that are not beside it")
        found = [folder / name for name in names]
    else:
        found = sorted(p for p in folder.iterdir() if p.suffix in PICKLED and p.name not in OTHERS)
    if not 0 < len(found) <= MAX_FILES or not all(path.is_file() for path in found):
        missing = next((path.name for path in found if not path.is_file()), f"{', '.join(PICKLED)} files")
        raise CheckpointError(
            f"{folder} has no {missing}", fix="give a checkpoint with pickled weights, and all of them"
        )
    return found


def write(source: Path, files: list[Path], output: Path) -> int:
    """The files as safetensors, and what lies beside them; bytes of all tensors. Raises CheckpointError."""
    placed: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for i, path in enumerate(track(files, "converting", console=Console(stderr=True), transient=True), 1):
        name = SINGLE if len(files) == 1 else f"model-{i:05}-of-{len(files):05}.safetensors"
        found = unpickled(path, output / name)
        if twice := next((tensor for tensor in found if tensor in placed), None):
            raise CheckpointError(f"{path.name} holds {twice}, which another file holds too")
        placed |= dict.fromkeys(found, name)
        sizes |= found
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": placed}
        (output / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    for path in source.iterdir():
        kept = path.suffix in (".json", ".jinja", ".txt", ".model", ".tiktoken") and path.name != THEIR_INDEX
        if path.is_file() and kept:
            shutil.copyfile(path, output / path.name)
    return sum(sizes.values())


def unpickled(path: Path, target: Path) -> dict[str, int]:
    """Bytes of each tensor, by name, when `target` is written. Raises CheckpointError."""
    command = [sys.executable, "-P", "-m", "lmkit_convert.unpickled", str(path.resolve()), str(target.resolve())]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, cwd=target.parent, check=False)
    try:
        answer: Any = json.loads(done.stdout[-MAX_ANSWER:])
    except ValueError:
        answer = {"error": f"its reader ended with {done.returncode}"}
    if "error" in answer and not isinstance(answer["error"], int):
        raise CheckpointError(f"{path} cannot be read: {answer['error']}", fix="take safetensors from whoever made it")
    return {str(name): int(size) for name, size in answer.items()}
