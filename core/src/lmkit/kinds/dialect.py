"""What bodies of HTTP requests mean, and the bytes that answer them: every installed one is served, on its own routes.

Example, entry point `[project.entry-points."lmkit.dialect"] toy = "toy_dialect.hooks"`::

    from lmkit.api import DialectSpec, hookimpl


    @hookimpl
    def lmkit_dialects():
        yield DialectSpec(name="toy", summary="Answers plain text", target="toy_dialect.dialect:Toy")
"""

from __future__ import annotations

from dataclasses import dataclass

from lmkit.contracts.specs import Spec
from lmkit.kinds.base import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class DialectSpec(Spec):
    """target: a Dialect class (lmkit_http.dialect)."""


KIND = Kind("dialect", spec=DialectSpec, hook="lmkit_dialects", used_by="lmkit_http.dialects", doc=__doc__)
