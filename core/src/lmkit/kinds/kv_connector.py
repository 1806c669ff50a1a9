"""What keeps KV blocks outside the engine's cache: on the host, on disks, in other engines.

Example, entry point `[project.entry-points."lmkit.kv_connector"] attic = "toy_attic.hooks"`::

    from lmkit.api import KVConnectorSpec, hookimpl


    @hookimpl
    def lmkit_kv_connectors():
        yield KVConnectorSpec(name="attic", summary="All blocks, in a folder", target="toy_attic.connector:Attic")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lmkit.contracts.errors import ConfigError
from lmkit.contracts.specs import SelectRequest, Spec
from lmkit.kinds.base import Kind, Known

KVKey = tuple[int, bytes]  # KV group, digest of a block: of all that its content depends on


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A block that requests can find in the cache from now on."""

    key: KVKey
    parent: bytes | None  # digest of the block before it; None: it holds the first tokens of its prompt
    tokens: Sequence[int]
    adapter: str | None  # name of the LoRA adapter that computed it
    salt: str | None  # cache salt of the request: others with the same salt find the block


class KVConnector(Protocol):
    """Made by target(checkpoint: Checkpoint, resolved: ResolvedPlan, kv: KVConfig, **options). All methods are called
    from the engine's thread; none waits or raises. The content of a block is bytes, in the layout of the attention
    backend; a connector that gives other bytes than were saved under that key gives wrong answers."""

    fingerprint: str  # of the weights' content and of the layout, for engines to share blocks: enters every digest

    def fetch(self, id: str, keys: Sequence[KVKey]) -> Mapping[KVKey, bytes] | None:
        """Content of blocks that the request waits for, in the order of its tokens, as far as there is any. None: not
        yet; it is then asked again, and has to give up by itself."""

    def computed(self, key: KVKey, parent: bytes, tokens: Sequence[int]) -> bool:
        """A block can be found in the cache. Whether to save it, when the step that computes it is done."""

    # Optional: `cached(block: CachedBlock) -> None` is called after each `computed`, for connectors that publish what
    # the cache has.

    def evicted(self, key: KVKey) -> bool:
        """A block's place was taken by another. Whether to save it."""

    def save(self, blocks: Sequence[tuple[KVKey, bytes]]) -> None: ...
    def forget(self) -> None:
        """Nothing is in the cache any more, and nothing that was wanted will be saved."""

    def release(self, id: str) -> None:
        """The request has ended."""

    def close(self) -> None:
        """Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConnectorSpec(Spec):
    """target: makes a KVConnector. features: what it works with beside one rank and full attention: "ranks"
    (`--tp`, `--pp`)."""

    features: frozenset[str] = frozenset()


def ask(known: Known) -> list[SelectRequest]:
    """No connector is needed unless the user names one. Raises ConfigError for several: only one can run, and taking
    the first would leave out what the user expects of the others."""
    wanted = known.config.wants("kv_connector")
    if wanted in ("auto", "none"):
        return []
    if "," in wanted:
        raise ConfigError(f"one KV connector runs at a time, {wanted!r} names several", fix="name one of them")
    parallel, info, cache = known.config.parallel, known.info, known.config.cache
    found = {"recurrent": info.recurrent, "pooling": info.pooler is not None, "ranks": parallel.tp * parallel.pp > 1}
    found["no_prefix_cache"] = cache.prefix_cache is False or not info.causal
    return [SelectRequest(kind="kv_connector", features=frozenset(name for name, holds in found.items() if holds))]


KIND = Kind(
    "kv_connector",
    spec=KVConnectorSpec,
    hook="lmkit_kv_connectors",
    used_by="lmkit.engine.build",
    ask=ask,
    needs=("model",),
    setting="cache.connector",
    lacking={
        "recurrent": "the state of recurrent layers would have to be stored, too",
        "pooling": "pooling models keep no KV blocks for later requests",
        "ranks": "blocks of several ranks would have to be stored together",
        "no_prefix_cache": "blocks are found by the prefix cache, which is off",
    },
    words="keeps KV blocks outside the cache: none (the default), offload, shared, ...",
    doc=__doc__,
)
