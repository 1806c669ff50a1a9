"""What reads tokenizer.json, and what renders chat templates."""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.api import RendererSpec, Tier, TokenizerSpec, hookimpl


@hookimpl
def lmkit_tokenizers() -> Iterable[TokenizerSpec]:
    yield TokenizerSpec(
        name="json",
        summary="tokenizer.json, in a process of its own",
        target="lmkit_tokenizer_json.apart:open_tokenizer",
        tier=Tier.PORTABLE,
        stability="stable",
        files=("tokenizer.json",),
    )


@hookimpl
def lmkit_renderers() -> Iterable[RendererSpec]:
    yield RendererSpec(
        name="jinja",
        summary="Jinja templates in a sandbox, in a process of its own",
        target="lmkit_tokenizer_json.apart:open_renderer",
        tier=Tier.PORTABLE,
        stability="stable",
    )
