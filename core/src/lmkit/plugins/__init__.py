"""Finding, choosing and explaining plugins. No torch."""

from lmkit.plugins.refs import load_ref, load_target, verify

__all__ = ["load_ref", "load_target", "verify"]
