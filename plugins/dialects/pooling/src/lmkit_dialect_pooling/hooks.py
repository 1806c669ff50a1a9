"""Registers the dialect `pooling`."""

from lmkit.api import DialectSpec, hookimpl


@hookimpl
def lmkit_dialects():
    yield DialectSpec(
        name="pooling",
        summary="vectors and scores: /v1/embeddings, /score, /rerank, /classify, /pooling",
        target="lmkit_dialect_pooling.dialect:PoolingDialect",
        stability="stable",
    )
