"""`--chat-template FILE.gguf`."""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.api import TemplateSpec, hookimpl


@hookimpl
def lmkit_templates() -> Iterable[TemplateSpec]:
    yield TemplateSpec(
        name="gguf",
        summary="The chat template in the metadata of a GGUF file",
        target="lmkit_template_gguf.metadata:chat_template",
        stability="stable",
        suffixes=(".gguf",),
    )
