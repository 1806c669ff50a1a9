"""Sampling options shared by `complete`, `generate` and `chat`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer
from lmkit.api import SamplingParams

PANEL = "Sampling"

_OPTIONS: dict[str, Any] = {
    "max_tokens": Annotated[int | None, typer.Option(help="output tokens at most", rich_help_panel=PANEL)],
    "temperature": Annotated[float | None, typer.Option(help="0 = always the likeliest", rich_help_panel=PANEL)],
    "top_p": Annotated[float | None, typer.Option(help="nucleus", rich_help_panel=PANEL)],
    "top_k": Annotated[int | None, typer.Option(help="candidates, 0 = all", rich_help_panel=PANEL)],
    "min_p": Annotated[float | None, typer.Option(help="relative to the likeliest", rich_help_panel=PANEL)],
    "repetition_penalty": Annotated[float | None, typer.Option(help="above 1: less repetition", rich_help_panel=PANEL)],
    "sample_seed": Annotated[
        int | None, typer.Option("--sample-seed", help="same seed, same output", rich_help_panel=PANEL)
    ],
    "stop": Annotated[list[str] | None, typer.Option(help="end at this text; repeatable", rich_help_panel=PANEL)],
}


def with_sampling(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator below `with_config`: collects the sampling options that were given into `sampling: dict`."""
    signature = inspect.signature(function)
    hints = get_type_hints(function, include_extras=True)

    @wraps(function)
    def command(**kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in _OPTIONS}
        sampling = {name: value for name, value in given.items() if value not in (None, [])}
        if "sample_seed" in sampling:
            sampling["seed"] = sampling.pop("sample_seed")
        if "stop" in sampling:
            sampling["stop"] = tuple(sampling["stop"])
        return function(sampling=sampling, **kwargs)

    own = [p.replace(annotation=hints[n]) for n, p in signature.parameters.items() if n != "sampling"]
    more = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=a) for n, a in _OPTIONS.items()
    ]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + more
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    del command.__wrapped__
    return command


def merge(defaults: dict[str, Any] | None, sampling: dict[str, Any]) -> SamplingParams:
    """The checkpoint's own defaults, changed as asked on the command line. Raises InvalidParam."""
    return SamplingParams(**{**(defaults or {}), **sampling})
