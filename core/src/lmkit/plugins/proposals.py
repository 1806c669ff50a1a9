"""Merging the configuration values that plugins propose. Users win; every value remembers who set it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lmkit.api import ConfigError, ConfigProposal, Derived, EngineConfig, PluginError, ResolvedPlan, UnknownKey

# Configuration keys a plugin may propose -> the derived value each becomes. All default to None: not set by the user.
PROPOSABLE: Mapping[str, str] = {
    "cache.block_size": "block_size",
    "sched.max_tokens": "max_step_tokens",
    "model.max_length": "max_length",
    "sched.max_rows": "max_rows",
    "parallel.threads": "threads",
    "parallel.depth": "depth",
}


def settled(config: EngineConfig, resolved: ResolvedPlan) -> EngineConfig:
    """`config` with what plugins proposed where the user said nothing."""
    for key, name in PROPOSABLE.items():
        if (value := resolved.value(name)) is not None:
            section, field = key.split(".")
            config = replace(config, **{section: replace(getattr(config, section), **{field: value})})
    return config


def merge(
    user: Mapping[str, object], proposals: Sequence[tuple[str, ConfigProposal]], fallback: Sequence[Derived] = ()
) -> dict[str, Derived]:
    """Derived values by configuration key.

    `user` holds what the user set; `proposals` are (module, proposal) in order: the first `prefer` of a key wins, a
    `require` beats every `prefer`; `fallback` supplies values nobody spoke for. Raises ConfigError when a `require`
    contradicts the user or another `require`, UnknownKey for a key that cannot be proposed.
    """
    merged: dict[str, Derived] = {}
    required: dict[str, tuple[str, ConfigProposal]] = {}
    for module, proposal in proposals:
        if proposal.key not in PROPOSABLE:
            raise UnknownKey(proposal.key, PROPOSABLE, f"a proposal of {module}")
        name, number = PROPOSABLE[proposal.key], proposal.value
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise PluginError(f"{module} proposes {proposal.key} = {number!r:.80}, which is no number of at least 1")
        if proposal.strength == "require":
            other = required.setdefault(proposal.key, (module, proposal))
            if other[1].value != proposal.value:
                raise ConfigError(
                    f"{proposal.key}: {other[0]} requires {other[1].value!r} ({other[1].reason}), "
                    f"{module} requires {proposal.value!r} ({proposal.reason})",
                    fix="disable one of the two plugins",
                )
            mine = user.get(proposal.key)
            if mine is not None and mine != proposal.value:
                raise ConfigError(
                    f"{proposal.key}={mine!r}, but {module} requires {proposal.value!r}: {proposal.reason}",
                    fix=f"leave {proposal.key} out, or set it to {proposal.value!r}",
                )
            merged[proposal.key] = Derived(name, proposal.value, f"{module} requires it: {proposal.reason}")
        elif proposal.key not in required:
            merged.setdefault(proposal.key, Derived(name, proposal.value, f"{module}: {proposal.reason}"))
    for key, value in user.items():
        if value is not None and key in PROPOSABLE:
            merged[key] = Derived(PROPOSABLE[key], value, "user")
    keys = {name: key for key, name in PROPOSABLE.items()}
    for derived in fallback:
        merged.setdefault(keys[derived.key], derived)
    return merged
