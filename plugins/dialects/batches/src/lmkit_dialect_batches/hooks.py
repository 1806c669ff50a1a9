"""Registers the dialect `batches`."""

from lmkit.api import DialectSpec, hookimpl


@hookimpl
def lmkit_dialects():
    yield DialectSpec(
        name="batches",
        summary="files and batches of the OpenAI API, kept in a directory: --dialect.batches.dir",
        target="lmkit_dialect_batches.dialect:Batches",
        options="lmkit_dialect_batches.options:Options",
    )
