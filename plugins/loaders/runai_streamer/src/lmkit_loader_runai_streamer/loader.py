"""Safetensors files, streamed by `runai-model-streamer`. Headers are checked as for the loader `safetensors`."""

from __future__ import annotations

from collections.abc import Iterator

from lmkit.api import TensorEntry
from lmkit_worker.loading.safetensors import SafetensorsLoader, reading
from runai_model_streamer import SafetensorsStreamer
from torch import Tensor


class StreamedLoader(SafetensorsLoader):
    """One object per load. What comes before it is asked for is kept; what is asked for again is streamed again."""

    def __init__(self) -> None:
        super().__init__()
        self._file = ""
        self._kept: dict[str, Tensor] = {}
        self._stream: Iterator[tuple[str, Tensor]] = iter(())

    def read(self, entry: TensorEntry) -> Tensor:
        with reading(entry.file):
            if entry.file != self._file or not self._advance(entry.name):
                self._file, self._kept, self._stream = entry.file, {}, streamed(entry.file)
                if not self._advance(entry.name):
                    raise ValueError(f"the stream of the file ended without {entry.name}")
            return self._kept.pop(entry.name)

    def release(self) -> None:
        """Nothing is mapped."""

    def _advance(self, name: str) -> bool:
        """Up to the tensor of that name; False where the stream ends before."""
        while name not in self._kept:
            item = next(self._stream, None)
            if item is None:
                return False
            self._kept[item[0]] = item[1]
        return True


def streamed(file: str) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors, in the order in which they come."""
    with SafetensorsStreamer() as streamer:
        streamer.stream_file(file)
        yield from streamer.get_tensors()
