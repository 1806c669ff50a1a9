"""From "package.module:Attr" to an object, with errors that name the plugin and keep the real cause."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

from lmkit.api import Choice, LmkitError, PluginError, ResolvedPlan


def load_ref(ref: str, owner: str = "") -> Any:
    """Import what `ref` names. Raises PluginError, chained to the real error, whatever the import raised."""
    who = f"{owner}: " if owner else ""
    module_name, _, path = ref.partition(":")
    try:
        found: Any = import_module(module_name)
        for attribute in path.split("."):
            found = getattr(found, attribute)
    except KeyboardInterrupt:
        raise
    except BaseException as e:  # also SystemExit: a plugin must not end the process
        raise PluginError(
            f"{who}cannot import {ref!r}: {type(e).__name__}: {e}", fix="lmkit plugins doctor --imports"
        ) from e
    return found


def call(owner: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a plugin's code. Its own typed errors pass; anything else it raises becomes a chained PluginError."""
    try:
        return function(*args)
    except (KeyboardInterrupt, LmkitError):
        raise
    except BaseException as e:
        raise PluginError(f"{owner} raised {type(e).__name__}: {e}", fix="lmkit plugins doctor") from e


def missing_module(ref: str) -> str | None:
    """The reason why the module of `ref` cannot exist, or None. Imports its parent packages only."""
    module_name = ref.partition(":")[0]
    try:
        return None if find_spec(module_name) else f"no module named {module_name!r}"
    except KeyboardInterrupt:
        raise
    except BaseException as e:
        return f"{type(e).__name__}: {e}"


def load_target(choice: Choice | str) -> Any:
    """The implementation a choice names. Raises PluginError."""
    if isinstance(choice, str):
        return load_ref(choice)
    owner = f"{choice.kind} {choice.name!r} ({choice.dist} {choice.version})"
    return load_ref(choice.target, owner)


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
