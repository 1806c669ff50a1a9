"""What a plugin that is wrong on purpose is made with: a class of a kit, and a good plugin with one fault."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from lmkit.plugins.refs import load_ref

from lmkit_testing.specs import find_plugin


class Planted:
    """One fault. `fails`: the check of the kit that finds it. The first line of the docstring says what is wrong.

    `Fault`: methods that stand before those of the good target, which they reach by `super()`.
    """

    plugin: ClassVar[str]
    fails: ClassVar[str] = ""
    Fault: ClassVar[type | None] = None

    @pytest.fixture
    def target(self) -> Any:
        return self.wrong(good(self.plugin))

    @classmethod
    def wrong(cls, base: Any) -> Any:
        """The good target, made wrong. Overridden where methods alone do not do it."""
        return type("Wrong", (cls.Fault, base), {}) if cls.Fault is not None else base


def good(plugin: str) -> Any:
    """The target as it is."""
    return load_ref(find_plugin(plugin)[2].target)
