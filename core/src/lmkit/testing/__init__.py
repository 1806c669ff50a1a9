"""Kits for plugin authors: conformance suites, fakes, tiny checkpoints, fixtures.

    from lmkit.testing import AttentionConformance

    class TestMine(AttentionConformance):
        plugin = "attention:mybackend"

`pytest_plugins = ["lmkit.testing"]` adds the fixtures of `lmkit.testing.host`.
"""

from importlib import import_module

pytest_plugins = ["lmkit.testing.host"]

_LAZY = {
    "PluginConformance": "lmkit.testing.specs",
    "ExtensionConformance": "lmkit.testing.specs",
    "PlatformConformance": "lmkit.testing.platform",
    "ExecutorConformance": "lmkit.testing.executor",
    "AttentionConformance": "lmkit.testing.attention",
    "QuantizationConformance": "lmkit.testing.quantization",
    "ModelConformance": "lmkit.testing.model",
    "ArchitectureConformance": "lmkit.testing.model",
    "PoolingConformance": "lmkit.testing.pooling",
    "heads": "lmkit.testing.model",
    "llama3": "lmkit.testing.model",
    "ToolParserConformance": "lmkit.testing.parsers",
    "ReasoningParserConformance": "lmkit.testing.parsers",
    "GrammarConformance": "lmkit.testing.grammars",
    "SchedulerConformance": "lmkit.testing.scheduler",
}

__all__ = list(_LAZY)


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'lmkit.testing' has no attribute {name!r}")
