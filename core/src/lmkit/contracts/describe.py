"""A checkpoint's model as data, as its architecture and the resolver say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from lmkit.contracts.errors import PluginError
from lmkit.contracts.guard import guard, make_target
from lmkit.contracts.model import ModelInfo, PoolerInfo
from lmkit.contracts.params import PoolingTask
from lmkit.contracts.pooling import decoder_name, with_head
from lmkit.contracts.refs import owner_of

if TYPE_CHECKING:
    from lmkit.contracts.checkpoint import Checkpoint
    from lmkit.contracts.execution import Architecture
    from lmkit.contracts.resolved import ResolvedPlan


def described(architecture: Architecture, config: Mapping[str, object], head: PoolingTask | None) -> ModelInfo:
    """What `architecture` says of a checkpoint; with `head`, of the pooling model made of that decoder."""
    if head is None:
        return architecture.describe(config)
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    return with_head(architecture.describe({**config, "architectures": [decoder_name(name)]}), config, name, head)


def joined(info: ModelInfo, draft: ModelInfo) -> ModelInfo:
    """`info` with the layers of its draft behind its own: the cache is that of both. Where these branch, all do."""
    n, tree = len(info.layers), any(x.attn is not None and x.attn.tree for x in draft.layers)
    behind = (replace(x, index=n + x.index, kv_of=x.kv_of if x.kv_of is None else n + x.kv_of) for x in draft.layers)
    layers = (replace(x, attn=x.attn and replace(x.attn, tree=tree)) for x in (*info.layers, *behind))
    return replace(info, layers=tuple(layers))


def describe_model(resolved: ResolvedPlan, checkpoint: Checkpoint) -> ModelInfo:
    """The model as data, with what the resolver decided: attention needs, the pooler, layers of a draft behind it."""
    choice = resolved.choice("model")
    if choice is None:
        raise PluginError("the resolved plan chooses no model")
    architecture = make_target(choice)
    with guard(owner_of(choice), "describe"):
        info = described(architecture, checkpoint.config, resolved.value("head"))
    if resolved.draft is not None:
        info = joined(info, describe_model(resolved.draft.plan, resolved.draft.checkpoint))
    dtype = resolved.value("dtype", info.dtype)
    known = {"dtype": dtype, "kv_dtype": resolved.value("kv_dtype", dtype), "block_size": resolved.value("block_size")}
    layers = tuple(replace(layer, attn=layer.attn and replace(layer.attn, **known)) for layer in info.layers)
    pooler = resolved.value("pooler")
    return replace(info, layers=layers, pooler=pooler and msgspec.convert(pooler, PoolerInfo))
