"""Registers the loader `npy`, and the folders that it reads. Light: neither numpy nor the loader is imported here. As
the group lmkit.extension names this module, too, its second hook is heard before anything is chosen."""

from dataclasses import replace
from pathlib import Path

from lmkit.api import LoaderSpec, Tier, hookimpl


@hookimpl
def lmkit_loaders():
    yield LoaderSpec(
        name="npy",
        interface=1,
        summary="A folder of NumPy files, one for each tensor",
        target="lmkit_loader_npy.loader:NpyLoader",
        formats=("npy",),  # values of Checkpoint.format: the second hook tells it
        tier=Tier.PORTABLE,
    )


@hookimpl
def lmkit_resolve_checkpoint(ref, options):
    """Folders with config.json and tensors/*.npy. None: the next plugin is asked, and in the end lmkit itself."""
    folder = Path(ref).expanduser()
    files = sorted((folder / "tensors").glob("*.npy"))
    if not files:
        return None
    from lmkit.checkpoint import read_directory

    return replace(read_directory(ref, folder, files=files), format="npy")
