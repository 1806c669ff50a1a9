"""GGUF files of a hub's repository: `ORG/REPO` where it holds one, `ORG/REPO:Q4_K_M` where it holds several.

A choice is the end of a file's name, or the whole. A split file is one choice. Torch-free.
"""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from lmkit.api import Checkpoint, CheckpointError, CheckpointOptions
from lmkit.checkpoint import download

from lmkit_loader_gguf.config import open_gguf

log = logging.getLogger("lmkit.checkpoint")
REF = re.compile(r"^([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?::([\w.-]+))?$")
PART = re.compile(r"-\d{5}-of-\d{5}$")
TYPE = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|B?F16|F32|MXFP4\w*))$", re.IGNORECASE)
OTHER = re.compile(r"mmproj|imatrix", re.IGNORECASE)  # of images, and of who quantized: no language models


def open_hub(ref: str, options: CheckpointOptions) -> Checkpoint | None:
    """The checkpoint, downloaded. None: `ref` is no id, or its repository has other weights, or it cannot be looked at.

    Raises CheckpointError: there are several to choose from, none is called so, or it cannot be downloaded.
    """
    found = REF.match(ref)
    if found is None or Path(ref).exists():
        return None
    repository, chosen = found.groups()
    try:
        files = files_of(repository, options)
    except CheckpointError:
        if chosen is None:
            return None  # who looks for other weights says why
        raise
    sets = choices(files)
    if chosen is None and (not sets or any(name.endswith(".safetensors") for name in files)):
        return None
    names = choose(repository, chosen, sets, files)
    path = download(repository, options, [glob.escape(name) for name in names], ignore=())
    checkpoint = open_gguf(str(path / names[0]))
    return None if checkpoint is None else replace(checkpoint, ref=ref, revision=options.revision)


def files_of(repository: str, options: CheckpointOptions) -> dict[str, int]:
    """Path -> bytes, of the hub, or of what is in the cache where it is not asked. Raises CheckpointError."""
    if not options.offline:
        try:
            from huggingface_hub import HfApi

            info = HfApi().model_info(repository, revision=options.revision, files_metadata=True)
            return {file.rfilename: file.size or 0 for file in info.siblings or ()}
        except Exception as e:  # of several libraries; the download says in words of ours what it is
            log.debug("%s cannot be listed: %s: %s", repository, type(e).__name__, e)
    folder = download(repository, options, [""])  # no file matches: the folder as it is
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in found}


def choices(files: Mapping[str, int]) -> dict[str, list[str]]:
    """Path without suffix and number of the part -> the files, in order."""
    found: dict[str, list[str]] = {}
    for name in sorted(files):
        if name.lower().endswith(".gguf") and not OTHER.search(PurePosixPath(name).name):
            found.setdefault(PART.sub("", name[: -len(".gguf")]), []).append(name)
    return found


def choose(repository: str, chosen: str | None, sets: Mapping[str, list[str]], files: Mapping[str, int]) -> list[str]:
    """The files of one choice. Raises CheckpointError with all choices and their sizes."""
    fits = list(sets)
    if chosen is not None:
        wanted = re.escape(re.sub(r"\.gguf$", "", chosen, flags=re.IGNORECASE))
        fits = [stem for stem in sets if re.search(rf"(?:^|[-._/]){wanted}$", PART.sub("", stem), re.IGNORECASE)]
        exact = [stem for stem in fits if short(stem).lower() == chosen.lower()]
        fits = exact if len(exact) == 1 else fits
    if len(fits) == 1:
        return sets[fits[0]]
    sizes = [f"{short(stem)} ({sum(files[name] for name in sets[stem]) / 1e9:.2f} GB)" for stem in fits or sets]
    if chosen is not None and not fits:
        text = f"{repository} has no GGUF file called {chosen}; it has {', '.join(sizes) or 'none'}"
    else:
        text = f"{repository} has several checkpoints: {', '.join(sizes)}"
    example = short(next(iter(fits or sets), "Q4_K_M"))
    raise CheckpointError(text, fix=f"name one: {repository}:{example}")


def short(stem: str) -> str:
    """What a choice is called: the type at the end of its name, else the name."""
    name = PurePosixPath(stem).name
    found = TYPE.search(name)
    return found[1] if found else name
