"""lmkit: plugin-driven LLM inference and serving.

    from lmkit import LLM, SamplingParams
    print(LLM("demo").generate("What is 2 + 3?", SamplingParams(max_tokens=16))[0].text)

Importing this package loads neither torch nor any plugin; the names below are resolved on first use.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from lmkit_python.beam import BeamSearchOutput, BeamSearchParams
    from lmkit_python.llm import LLM, AsyncLLM
    from lmkit_python.outputs import Completion, PoolingOutput, RequestOutput
    from lmkit_python.stepping import LLMEngine

    from lmkit.api import PoolingParams, SamplingParams

_PLACES = {
    "lmkit.api": ("PoolingParams", "SamplingParams"),
    "lmkit_python.beam": ("BeamSearchOutput", "BeamSearchParams"),
    "lmkit_python.llm": ("LLM", "AsyncLLM"),
    "lmkit_python.outputs": ("Completion", "PoolingOutput", "RequestOutput"),
    "lmkit_python.stepping": ("LLMEngine",),
}
_LAZY = {name: place for place, names in _PLACES.items() for name in names}

__all__ = [
    "LLM", "AsyncLLM", "LLMEngine", "BeamSearchOutput", "BeamSearchParams", "Completion", "PoolingOutput",
    "PoolingParams", "RequestOutput", "SamplingParams", "__version__",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'lmkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
