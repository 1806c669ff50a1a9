"""Kernels that are compiled once steps run: each costs the requests of its step what should have been spent before."""

from __future__ import annotations

import sys
from typing import Any


class Compiles:
    """Names of what Triton and torch.compile compiled since they were last asked for, from the first `listen` on.

    What comes from their caches on disk does not count, nor do libraries that compile by means of their own.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._listens: set[str] = set()

    def listen(self) -> None:
        """To those of them that this process has imported. Whoever listened before hears as much as before."""
        if "triton.knobs" in sys.modules and "triton" not in self._listens:
            self._listens.add("triton")
            knobs = sys.modules["triton.knobs"].compilation
            before = knobs.listener

            def hear(*, src: Any, cache_hit: bool, **told: Any) -> None:
                if not cache_hit:
                    self._names.append(str(src.name))
                if before is not None:
                    before(src=src, cache_hit=cache_hit, **told)

            knobs.listener = hear
        if "torch._dynamo.callback" in sys.modules and "torch" not in self._listens:
            self._listens.add("torch")
            handler = sys.modules["torch._dynamo.callback"].callback_handler
            handler.register_start_callback(lambda args: self._names.append(f"torch.compile {args.compile_id}"))

    def take(self) -> list[str]:
        names, self._names = self._names, []
        return names
