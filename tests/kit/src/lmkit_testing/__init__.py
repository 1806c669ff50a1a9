"""Kits for plugin authors: conformance suites, fakes, tiny checkpoints, fixtures.

    from lmkit_testing import AttentionConformance

    class TestMine(AttentionConformance):
        plugin = "attention:mybackend"

`pytest_plugins = ["lmkit_testing"]` adds the fixtures of `lmkit_testing.host`.
"""

from importlib import import_module

pytest_plugins = ["lmkit_testing.host"]

_LAZY = {
    "PluginConformance": "lmkit_testing.specs",
    "ExtensionConformance": "lmkit_testing.specs",
    "PlatformConformance": "lmkit_testing.platform",
    "ExecutorConformance": "lmkit_testing.executor",
    "AttentionConformance": "lmkit_testing.attention",
    "QuantizationConformance": "lmkit_testing.quantization",
    "LinearConformance": "lmkit_testing.linears",
    "LoaderConformance": "lmkit_testing.loaders",
    "ModelConformance": "lmkit_testing.model",
    "ArchitectureConformance": "lmkit_testing.model",
    "PoolingConformance": "lmkit_testing.pooling",
    "heads": "lmkit_testing.model",
    "llama3": "lmkit_testing.model",
    "ToolParserConformance": "lmkit_testing.parsers",
    "ReasoningParserConformance": "lmkit_testing.parsers",
    "GrammarConformance": "lmkit_testing.grammars",
    "SchedulerConformance": "lmkit_testing.scheduler",
    "DraftConformance": "lmkit_testing.drafts",
    "ProposerConformance": "lmkit_testing.proposers",
    "KVConnectorConformance": "lmkit_testing.kv_connectors",
    "LogitsProcessorConformance": "lmkit_testing.logits_processors",
    "DialectConformance": "lmkit_testing.dialects",
    "Asked": "lmkit_testing.dialects",
    "TokenizerConformance": "lmkit_testing.token_readers",
    "RendererConformance": "lmkit_testing.renderers",
    "TemplateConformance": "lmkit_testing.chat_templates",
    "StructuredOutputConformance": "lmkit_testing.structured_outputs",
}

__all__ = list(_LAZY)


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'lmkit_testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
