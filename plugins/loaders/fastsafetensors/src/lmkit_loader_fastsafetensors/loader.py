"""Safetensors files, read whole by the threads of `fastsafetensors`. Headers are checked as by default."""

from __future__ import annotations

from typing import Any

from fastsafetensors import SafeTensorsFileLoader
from lmkit.api import TensorEntry
from lmkit_worker.loading.safetensors import SafetensorsLoader, reading
from torch import Tensor


class FastSafetensorsLoader(SafetensorsLoader):
    """One object per load. One file at a time is in memory."""

    def __init__(self) -> None:
        super().__init__()
        self._file, self._content = "", None

    def read(self, entry: TensorEntry) -> Tensor:
        """A copy, so that no tensor in use keeps the memory of a whole file."""
        with reading(entry.file):
            if entry.file != self._file or self._content is None:
                self._open(entry.file)
            content: Any = self._content
            tensor: Tensor = content.get_tensor(entry.name).clone()
            return tensor

    def release(self) -> None:
        """Memory goes with the file, when another one is read or the loader is dropped."""

    def _open(self, file: str) -> None:
        if self._content is not None:
            self._content.close()
        self._file, self._content = file, None
        loader = SafeTensorsFileLoader(None, "cpu", nogds=True, set_numa=False)
        try:
            loader.add_filenames({0: [file]})
            self._content = loader.copy_files_to_device()
        except Exception as e:  # the library has no type of its own
            raise ValueError(str(e)) from e
        finally:
            loader.close()
