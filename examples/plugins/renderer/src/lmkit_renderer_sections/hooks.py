"""Registers the renderer `sections`."""

from lmkit.api import RendererSpec, Tier, hookimpl


@hookimpl
def lmkit_renderers():
    yield RendererSpec(
        name="sections",
        interface=1,
        summary="Chat templates of sections and variables, as Mustache has them",
        target="lmkit_renderer_sections.renderer:Sections",
        tier=Tier.REFERENCE,  # lmkit's own is asked first where it is installed and not switched off
    )
