"""From "package.module:Attr" to an object, with errors that name the plugin and keep the real cause."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from lmkit.contracts.contained import contained
from lmkit.contracts.errors import PluginError, is_interrupt, said_by
from lmkit.contracts.resolved import Choice


def load_ref(ref: str, owner: str = "") -> Any:
    """Import what `ref` names. Raises PluginError, chained to the real error, whatever the import raised."""
    who = f"{owner}: " if owner else ""
    module_name, _, path = ref.partition(":")
    try:
        with contained():
            found: Any = import_module(module_name)
        for attribute in path.split("."):
            found = getattr(found, attribute)
    except BaseException as e:  # also SystemExit: a plugin must not end the process
        if is_interrupt(e):
            raise
        raise PluginError(f"{who}cannot import {ref!r}: {said_by(e)}", fix="lmkit plugins doctor --imports") from e
    return found


def owner_of(choice: Choice) -> str:
    """How errors name the plugin of a choice: its kind, its name, and the dist that it comes from."""
    return f"{choice.kind} {choice.name!r} ({choice.dist} {choice.version})"


def load_target(choice: Choice | str) -> Any:
    """The implementation a choice names. Raises PluginError."""
    if isinstance(choice, str):
        return load_ref(choice)
    target = load_ref(choice.target, owner_of(choice))
    return load_ref(choice.adapter)(target) if choice.adapter else target
