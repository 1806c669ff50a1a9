"""What a plugin that is wrong on purpose is made with: a class of a kit, and a good plugin with one fault."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from lmkit.plugins.refs import load_ref

from lmkit_testing.specs import find_plugin


class Planted:
    """One fault. `fails`: the check of the kit that finds it. The first line of the docstring says what is wrong."""

    plugin: ClassVar[str]
    fails: ClassVar[str] = ""

    @pytest.fixture
    def target(self) -> Any:
        return self.wrong(good(self.plugin))

    @classmethod
    def wrong(cls, base: Any) -> Any:
        """The good target, made wrong."""
        return base


def good(plugin: str) -> Any:
    """The target as it is."""
    return load_ref(find_plugin(plugin)[2].target)
