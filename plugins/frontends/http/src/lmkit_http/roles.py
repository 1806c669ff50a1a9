"""`--role`: engines that compute prompts for others, and engines that get them from those."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lmkit.api import ConfigError

if TYPE_CHECKING:
    from lmkit_cli.settings import Sourced

CONNECTOR = "tcp"  # moves blocks from engine to engine
OPTIONS = {"prefill": "listen", "decode": "peers"}  # role -> what `--peers` is to the connector


def with_role(settings: Sourced, role: str | None, peers: str) -> Sourced:
    """`settings` with the connector of the role. Raises ConfigError where one is given without the other, or the user
    names another connector."""
    if role is None and not peers:
        return settings
    if role is None or not peers:
        raise ConfigError(
            "--role and --peers go together",
            fix="--role prefill --peers HOST:PORT (where it gives), --role decode --peers HOST:PORT (where it asks)",
        )
    config, key = settings.config, f"kv_connector.{CONNECTOR}"
    if config.wants("kv_connector") not in ("auto", CONNECTOR):
        raise ConfigError(
            f"--role moves blocks by the KV connector {CONNECTOR}, and --kv-connector is "
            f"{config.wants('kv_connector')}", fix="leave --kv-connector out",
        )  # fmt: skip
    options = {**config.plugins.get(key, {}), OPTIONS[role]: peers}
    changed = replace(
        config, wanted={**config.wanted, "kv_connector": CONNECTOR}, plugins={**config.plugins, key: options}
    )
    said = f"command line --role {role}"
    sources = {**settings.sources, "cache.connector": said, f"plugins.{key}.{OPTIONS[role]}": said}
    return replace(settings, config=changed, sources=sources)
