"""Registers the tokenizer `ranks`, for checkpoints with ranks.json, and the reader of templates `turns`, for files that
end in .turns."""

from lmkit.api import TemplateSpec, TokenizerSpec, hookimpl


@hookimpl
def lmkit_tokenizers():
    yield TokenizerSpec(
        name="ranks",
        interface=1,
        summary="Byte pairs by rank, from ranks.json",
        target="lmkit_tokenizer_ranks.tokenizer:Ranks",
        files=("ranks.json",),  # it is chosen where a checkpoint has them all
        requires=("regex",),  # looked up in metadata: without it this plugin is refused, with the line that installs it
    )


@hookimpl
def lmkit_templates():
    yield TemplateSpec(
        name="turns",
        interface=2,
        summary="What stands around the turn of each role, as a table (TOML)",
        target="lmkit_tokenizer_ranks.template:template",
        suffixes=(".turns",),  # --chat-template FILE.turns
    )
