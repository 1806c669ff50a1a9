"""Options that look harmless and are not."""

from __future__ import annotations

import pytest
from lmkit.api import ConfigError, UnknownName
from lmkit.config import from_options
from lmkit.plugins.explain import explain
from lmkit.plugins.host import PluginHost
from lmkit.server.settings import ServerSettings


@pytest.mark.parametrize("key", ["", " ", "\t", "a b", " secret", "s\u00e9cret", "x\n"])
def test_a_key_that_anyone_could_send_or_nobody_can(key: str) -> None:
    """`--api-key "$UNSET" --host 0.0.0.0` must not open the server to everyone."""
    with pytest.raises(ConfigError, match="API key"):
        ServerSettings(host="0.0.0.0", api_keys=("good", key))


def test_why_of_an_unknown_name() -> None:
    host = PluginHost()
    host.scan()
    with pytest.raises(UnknownName) as caught:
        explain(from_options({"model": "demo"}), host, topic="attention", why="flashinfr")
    assert "'flashinfer'" in caught.value.fix
    found = explain(from_options({"model": "demo"}), host, topic="attention", why="flashinfer")
    assert "flashinfer" in {c.name for c in found.topic("attention").candidates}
