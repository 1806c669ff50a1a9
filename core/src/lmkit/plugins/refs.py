"""Calls of plugins' code, and whether what a plan names is there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from lmkit.api import LmkitError, PluginError, ResolvedPlan
from lmkit.contracts.errors import is_interrupt, said_by
from lmkit.contracts.refs import load_ref, load_target
from lmkit.plugins.limits import limited


def call(owner: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a plugin's code. Its own typed errors pass; anything else it raises becomes a chained PluginError."""
    try:
        return function(*args)
    except LmkitError:
        raise
    except BaseException as e:
        if is_interrupt(e):
            raise
        raise PluginError(f"{owner} raised {said_by(e)}", fix="lmkit plugins doctor") from e


def ask(owner: str, function: Callable[..., Any], *args: Any, gives: type = object) -> Any:
    """`call`, within the limit of time, for an answer of type `gives`."""
    found = call(owner, limited, owner, partial(function, *args))
    if not isinstance(found, gives):
        raise PluginError(f"{owner} gave {found!r:.80}, no {gives.__name__}", fix="lmkit plugins doctor")
    return found


def missing_module(ref: str) -> str | None:
    """The reason why the module of `ref` cannot exist, or None. Imports its parent packages only."""
    module_name = ref.partition(":")[0]
    if module_name == "__main__":
        return "the program itself, which the engine's process cannot import: put the class into a module of its own"
    try:
        return None if find_spec(module_name) else f"no module named {module_name!r}"
    except BaseException as e:
        if is_interrupt(e):
            raise
        return f"{type(e).__name__}: {e}"


def verify(plan: ResolvedPlan) -> None:
    """In a worker: the dists that the plan names are installed here in the same versions. Raises PluginError."""
    for choice in plan.choices:
        try:
            version = metadata.version(choice.dist)
        except metadata.PackageNotFoundError:
            version = "not installed"
        if version != choice.version:
            raise PluginError(
                f"{choice.kind} {choice.name!r} was chosen from {choice.dist} {choice.version}, here it is {version}",
                fix="install the same versions for parent and workers",
            )


__all__ = ["ask", "call", "load_ref", "load_target", "missing_module", "verify"]
