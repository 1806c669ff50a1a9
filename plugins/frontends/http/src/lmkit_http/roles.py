"""`--role`: engines that compute prompts for others, and engines that get them from those."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lmkit.api import ConfigError

if TYPE_CHECKING:
    from lmkit_cli.settings import Sourced

CONNECTOR = "tcp"  # moves blocks from engine to engine where the user names no other that has peers
OPTIONS = {"prefill": "listen", "decode": "peers"}  # role -> what `--peers` is to the connector


def with_role(settings: Sourced, role: str | None, peers: str) -> Sourced:
    """`settings` with the connector of the role, which is the user's if one is named: it is then refused by its options
    if it has no peers. Raises ConfigError where one of `role` and `peers` is given without the other."""
    if role is None and not peers:
        return settings
    if role is None or not peers:
        raise ConfigError(
            "--role and --peers go together",
            fix="--role prefill --peers HOST:PORT (where it gives), --role decode --peers HOST:PORT (where it asks)",
        )
    config, named = settings.config, settings.config.wants("kv_connector")
    connector = CONNECTOR if named == "auto" else named
    key = f"kv_connector.{connector}"
    options = {**config.plugins.get(key, {}), OPTIONS[role]: peers}
    changed = replace(
        config, wanted={**config.wanted, "kv_connector": connector}, plugins={**config.plugins, key: options}
    )
    said = f"command line --role {role}"
    sources = {**settings.sources, "cache.connector": said, f"plugins.{key}.{OPTIONS[role]}": said}
    return replace(settings, config=changed, sources=sources)
