"""Finding a checkpoint: a local directory or a hub id. Torch-free; nothing of a checkpoint is ever executed."""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmkit.api import Checkpoint, CheckpointError, CheckpointOptions
from lmkit.contracts.pooling import SETTINGS, WHOLE_MODEL
from lmkit.files import check_own, open_regular

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"  # may lie beside the weights of its base model
# What a download needs: never code, never pickles.
PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
UNNEEDED = ["*/*", "consolidated*"]  # other layouts of the same weights
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.tensors")
CONVERT = "write it as safetensors: pip install lmkit-convert; lmkit convert DIRECTORY -o NEW"
QUANTIZED = "*quant*config.json"  # where producers say how weights are stored that do not say it in config.json
MODULES = "modules.json"
FAMILIES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")  # in the library's order
TOKENIZER = "tokenizer_config.json"  # where the longest text is said that the transformer's own file does not say
MAX_HEADER = 100_000_000  # bytes, as the safetensors library has it
MAX_MODULES = 16
MAX_MODULE_BYTES = 8 << 20  # of modules.json and of each module's configuration


def open_checkpoint(ref: str, options: CheckpointOptions) -> Checkpoint | None:
    """The checkpoint `ref` names, or None when `ref` is neither a directory, a path nor an "org/name" id.

    Raises CheckpointError when it looks like one and cannot be used.
    """
    path = Path(ref).expanduser()
    if ref and path.is_dir():
        return read_directory(ref, path)
    if path.is_file():
        if any(path.match(p) for p in PICKLES):
            raise CheckpointError(f"{ref} is a pickled checkpoint, which can execute code when read", fix=CONVERT)
        return None
    if ref.startswith((".", "/", "~")):
        raise CheckpointError(f"no such directory: {ref}", fix="give a checkpoint directory or a hub id 'org/name'")
    if HUB_ID.match(ref):
        path = download(ref, options)
        if (path / MODULES).is_file() and (folders := module_paths(path)):
            patterns = [f"{folder}/*.{kind}" for folder in folders for kind in ("json", "safetensors")]
            download(ref, options, patterns, ignore=())
        if (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
            revision = f" --revision {options.revision}" if options.revision else ""
            raise CheckpointError(
                f"the hub's {ref} has no *.safetensors files, and pickled weights are not downloaded: reading them can "
                "execute code",
                fix=f"{CONVERT}, after: hf download {ref}{revision} --local-dir DIRECTORY",
            )
        return read_directory(ref, path, options.revision)
    return None


def read_directory(ref: str, path: Path, revision: str | None = None, files: list[Path] | None = None) -> Checkpoint:
    """A directory with config.json and `files`, or safetensors files. Raises CheckpointError."""
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} has no config.json", fix="give the directory that holds the model's files")
    files, generation = weight_files(path) if files is None else files, path / "generation_config.json"
    return Checkpoint(
        ref=ref,
        path=path,
        format="safetensors",
        config=_with_quantization(path, read_json(path / "config.json")),
        generation_config=read_json(generation) if generation.is_file() else {},
        modules=read_modules(path),
        files=tuple(files),
        nbytes=sum(f.stat().st_size for f in files),
        revision=revision,
    )


def _with_quantization(path: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration, with the producer's own file as `quantization_config`; its name is the method, if none is."""
    file = None if config.get("quantization_config") else next(iter(sorted(path.glob(QUANTIZED))), None)
    return config if file is None else {**config, "quantization_config": {"quant_method": file.name, **read_json(file)}}


def read_json(path: Path) -> Mapping[str, Any]:
    """A JSON object. Raises CheckpointError naming the file."""
    try:
        with open_regular(path) as file:
            value = json.loads(file.read(), parse_int=_number)
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} cannot be read: {e}") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


def _number(text: str) -> int | float:
    """One of more than 64 bits as most readers of JSON take it: messages between processes hold no larger integers."""
    value = int(text)
    return value if -(1 << 63) <= value < 1 << 64 else float(text)


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name, from an index of shards. Names that leave the directory are refused."""
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(f, str) for f in names.values()):
        raise CheckpointError(f"{path} has no weight_map of tensor names to files")
    for file in names.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path} names {file!r}, which is not a safetensors file beside it")
    return names


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a directory, in order. Raises CheckpointError naming what is missing or is no file.

    As in transformers a whole file comes before an index: after a merge the index of the shards may be left over.
    """
    if (path / SINGLE).is_file():
        files = [path / SINGLE]
    elif (path / INDEX).is_file():
        files = [path / name for name in sorted(set(read_index(path / INDEX).values()))]
    else:
        files = [file for file in sorted(path.glob("*.safetensors")) if file.name != ADAPTER]
    if not files:
        raise _no_weights(path)
    if len(files) > 1 and not (path / INDEX).is_file():
        raise CheckpointError(f"{path} has {len(files)} safetensors files and no {INDEX}")
    missing = [f.name for f in files if not f.exists()]
    if missing:
        raise CheckpointError(
            f"{path / INDEX} names {missing[0]}, which is missing", fix="download the checkpoint again"
        )
    for file in files:
        check_own(file, path)
    return files


def index_of(path: Path, files: Sequence[Path]) -> Path | None:
    """The index of shards that `files` of a directory are; None where they are a whole file beside another's index."""
    index = path / INDEX
    if not index.is_file() or ([f.name for f in files] == [SINGLE] and {*read_index(index).values()} != {SINGLE}):
        return None
    return index


def _no_weights(path: Path) -> CheckpointError:
    pickles = sorted(p.name for pattern in PICKLES for p in path.glob(pattern))
    if pickles:
        return CheckpointError(
            f"{path} has only pickled weights ({pickles[0]}), which can execute code when read", fix=CONVERT
        )
    if (path / ADAPTER).exists():
        fix = "give the directory of its base model, and the adapter with --lora-modules NAME=DIRECTORY"
        return CheckpointError(f"{path} has only an adapter ({ADAPTER})", fix=fix)
    return CheckpointError(f"{path} has no *.safetensors files")


def check_headers(files: Sequence[Path]) -> None:
    """Raises CheckpointError naming a safetensors file that was cut off or whose header cannot be read."""
    for path in files:
        try:
            if not path.is_file():
                raise ValueError("it is no regular file")
            size = path.stat().st_size
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if not 0 < length <= min(MAX_HEADER, size - 8):
                    raise ValueError(f"its header has {length} bytes, the file {size}")
                header = json.loads(file.read(length))
            ends = [value["data_offsets"][1] for name, value in header.items() if name != "__metadata__"]
            if (missing := max(ends, default=0) + 8 + length - size) > 0:
                raise ValueError(f"its last {missing} bytes are missing")
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, struct.error) as e:
            what = f"{path} is damaged or cannot be read: {e}"
            raise CheckpointError(what, fix="download the checkpoint again") from e


def stamp_of(path: Path, files: Sequence[Path] = ()) -> str:
    """Names what `files`, or the safetensors of a file or folder, hold, without reading it. Raises CheckpointError."""
    try:
        files = files or (weight_files(path) if path.is_dir() else [path])
        found = [(f.name, f.stat()) for f in files]
        if others := [name for name, status in found if not stat.S_ISREG(status.st_mode)]:
            raise CheckpointError(f"{others[0]} is not a regular file", fix="write it to the end first, as a file")
    except OSError as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror}") from e
    return " ".join(f"{name}:{s.st_size}:{s.st_mtime_ns}:{s.st_ino}" for name, s in found)


def download(
    ref: str, options: CheckpointOptions, patterns: Sequence[str] = PATTERNS, ignore: Sequence[str] = UNNEEDED
) -> Path:
    """Directory with those files of a hub checkpoint, from the cache or the network. Raises CheckpointError."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ModuleNotFoundError as e:
        raise CheckpointError(
            f"{ref} is no directory, and looking at the hub needs {e.name}", fix="pip install huggingface_hub"
        ) from e
    try:
        return Path(
            snapshot_download(
                ref,
                revision=options.revision,
                cache_dir=options.cache_dir,
                local_files_only=options.offline,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignore),
            )
        )
    except GatedRepoError as e:
        raise CheckpointError(f"access to {ref} is restricted", fix="accept its terms, then: hf auth login") from e
    except RevisionNotFoundError as e:
        raise CheckpointError(f"{ref} has no revision {options.revision!r}") from e
    except RepositoryNotFoundError as e:
        raise CheckpointError(f"the hub has no checkpoint {ref!r}, or it is private", fix="check the spelling") from e
    except LocalEntryNotFoundError as e:
        where = "offline mode" if options.offline else "the hub cannot be reached"
        raise CheckpointError(f"{ref} is not in the cache ({where})", fix="download it once while online") from e
    except (HfHubHTTPError, OSError, ValueError) as e:
        raise CheckpointError(f"{ref} cannot be downloaded: {e}") from e


def read_modules(directory: Path) -> tuple[Mapping[str, Any], ...]:
    """What sentence-transformers writes beside a checkpoint, in modules.json and a folder for each module.

    {"type": "Pooling", "class": "sentence_transformers.models.Pooling", "path": "1_Pooling", "config": {...}} of each
    module, in order; () without the file. The first one is the whole, of type WHOLE_MODEL, where SETTINGS is a file.

    Raises CheckpointError naming the file.
    """
    file = directory / MODULES
    if not file.is_file():
        return ()
    listed = _read_small(file)
    if not isinstance(listed, list) or len(listed) > MAX_MODULES:
        raise CheckpointError(f"{file} does not hold a list of at most {MAX_MODULES} modules")
    settings = directory / SETTINGS
    whole = (
        {"type": WHOLE_MODEL, "class": "", "path": "", "config": _read_object(settings)} if settings.is_file() else None
    )
    return (*([whole] if whole else []), *(_module(file, entry) for entry in listed))


def module_paths(directory: Path) -> list[str]:
    """The folders of the modules, for a download."""
    return [str(m["path"]) for m in read_modules(directory) if m["path"]]


def _module(file: Path, entry: Any) -> Mapping[str, Any]:
    kind, path = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(path, str) or path.startswith(("/", "~")) or ".." in path:
        raise CheckpointError(f"{file}: a module needs a type and a path within the checkpoint, got {entry!r:.80}")
    owner, folder = kind, file.parent / path
    kind = kind.rsplit(".", 1)[-1]
    names = [f"sentence_{name}_config.json" for name in FAMILIES] if kind == "Transformer" else ["config.json"]
    found = (_read_object(folder / name) for name in names if (folder / name).is_file())
    config = next((config for config in found if config), {})
    if kind == "Transformer" and config.get("max_seq_length") is None and (folder / TOKENIZER).is_file():
        config = {**config, "max_seq_length": _read_object(folder / TOKENIZER).get("model_max_length")}
    return {"type": kind, "class": owner, "path": path, "config": config}


def _read_object(file: Path) -> Mapping[str, Any]:
    config = _read_small(file)
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} does not hold a JSON object")
    return config


def _read_small(file: Path) -> Any:
    try:
        with open_regular(file) as opened:
            if os.fstat(opened.fileno()).st_size > MAX_MODULE_BYTES:
                raise CheckpointError(f"{file} is larger than {MAX_MODULE_BYTES} bytes")
            return json.loads(opened.read(), parse_int=_number)
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{file} cannot be read: {e}") from e
