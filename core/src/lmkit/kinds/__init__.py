"""The kinds of plugins, one file each: what is registered, what is asked, what is refused, and by whom it is used.

Hooks, entry-point groups, interface numbers, topics of `explain`, options and pages of reference follow from `KINDS`.
"""

from __future__ import annotations

from collections.abc import Mapping

from lmkit.kinds import (
    attention,
    dialect,
    executor,
    grammar,
    kv_connector,
    loader,
    logits_processor,
    model,
    op,
    platform,
    proposer,
    quantization,
    reasoning_parser,
    renderer,
    scheduler,
    structured_output,
    template,
    tokenizer,
    tool_parser,
)
from lmkit.kinds.base import Claim, Kind, Known, Refusals, in_order, listed

KINDS: tuple[Kind, ...] = (
    platform.KIND,
    attention.KIND,
    quantization.KIND,
    model.KIND,
    tokenizer.KIND,
    renderer.KIND,
    template.KIND,
    tool_parser.KIND,
    reasoning_parser.KIND,
    scheduler.KIND,
    loader.KIND,
    op.KIND,
    executor.KIND,
    grammar.KIND,
    structured_output.KIND,
    logits_processor.KIND,
    proposer.KIND,
    kv_connector.KIND,
    dialect.KIND,
)
BY_NAME: Mapping[str, Kind] = {kind.name: kind for kind in KINDS}
EXTENSION = "extension"  # the group of modules that implement behaviour hooks only, and register nothing
GROUPS: tuple[str, ...] = (*BY_NAME, EXTENSION)

__all__ = ["BY_NAME", "EXTENSION", "GROUPS", "KINDS", "Claim", "Kind", "Known", "Refusals", "in_order", "listed"]
