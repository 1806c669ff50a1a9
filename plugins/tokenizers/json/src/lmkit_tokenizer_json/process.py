"""The process in which templates and tokenizers of checkpoints run: `python -m lmkit_tokenizer_json.process`.

They are data from a stranger, and one call into the template engine or the tokenizer's library may take any time or
memory, so each job runs under limits of the kernel (see lmkit_killable). The parent's end is apart.py.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from lmkit.api import ChatRenderer, LmkitError, RequestError
from lmkit_killable import serve

from lmkit_tokenizer_json.tokenizer import JsonTokenizer

UNKNOWN = b"unknown"  # an answer
_KEPT = 4
_SHOWN = 200  # characters of a library's message


def pack(value: Any) -> bytes:
    """JSON, with whatever Python's texts and numbers may hold. Raises TypeError, ValueError, RecursionError."""
    return json.dumps(value, ensure_ascii=False, default=_plain).encode("utf-8", "surrogatepass")


def unpack(payload: bytes) -> Any:
    return json.loads(payload.decode("utf-8", "surrogatepass"))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"a value of type {type(value).__name__}")


class Opened:
    """One tokenizer, one template, or both, and the jobs by name. What the first two jobs make the others use."""

    tokenizer: JsonTokenizer | None = None
    renderer: ChatRenderer | None = None

    def open_tokenizer(self, reader: str, path: str, **options: Any) -> dict[str, Any]:
        """What JsonTokenizer is made of, but for what can encode. `reader`: see apart.open_apart."""
        module, _, name = reader.partition(":")
        tokenizer: JsonTokenizer = getattr(import_module(module), name)(Path(path), **options)
        self.tokenizer = tokenizer
        return tokenizer.table()

    def open_template(self, **options: Any) -> dict[str, Any]:
        """What is known of the template. The tokenizer that is open says what else spells control tokens."""
        from lmkit_tokenizer_json.render import Renderer  # not before a template is there

        fold = self.tokenizer.fold if self.tokenizer is not None else None
        self.renderer = Renderer(fold=fold, **options)
        assert self.renderer.findings  # found out now, and not in a request
        return {name: value for name, value in vars(self.renderer).items() if not name.startswith("_")}

    def render(self, *args: Any, **options: Any) -> str:
        assert self.renderer is not None
        return self.renderer.render(*args, **options)

    def encode(self, *args: Any, **options: Any) -> Any:
        assert self.tokenizer is not None
        return self.tokenizer.encode(*args, **options)

    def encode_marked(self, *args: Any, **options: Any) -> Any:
        assert self.tokenizer is not None
        return self.tokenizer.encode_marked(*args, **options)

    def encode_pair(self, *args: Any, **options: Any) -> Any:
        assert self.tokenizer is not None
        return self.tokenizer.encode_pair(*args, **options)

    def decode(self, *args: Any, **options: Any) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode(*args, **options)


class Jobs:
    """Those of several parents' objects, of which the least recently used are forgotten."""

    def __init__(self) -> None:
        self._opened: OrderedDict[int, Opened] = OrderedDict()

    def handle(self, payload: bytes) -> bytes:
        """`[whose, name, arguments, options]` to `[error or None, value]`; UNKNOWN: it has to be opened first."""
        whose, name, args, options = unpack(payload)
        if whose not in self._opened:
            if not name.startswith("open_"):
                return UNKNOWN
            while len(self._opened) >= _KEPT:
                self._opened.popitem(last=False)
        opened = self._opened.setdefault(whose, Opened())
        self._opened.move_to_end(whose)
        try:
            return pack([None, getattr(opened, name)(*args, **options)])
        except LmkitError as e:
            error = e.info()
        except (MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:  # a panic of the tokenizer's library is no Exception
            what = "chat template" if name in ("open_template", "render") else "tokenizer"
            error = RequestError(f"the checkpoint's {what} failed: {type(e).__name__}: {str(e)[:_SHOWN]}").info()
        return pack([msgspec.structs.asdict(error), None])


if __name__ == "__main__":
    sys.exit(serve(Jobs().handle, quiet=True))
