"""Options that look harmless and are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import ConfigError, UnknownName
from lmkit.config import from_options
from lmkit.plugins.host import PluginHost
from lmkit.plugins.resolve import resolve
from lmkit.text.side import TextSide
from lmkit_cli.story import explain
from lmkit_http.settings import ServerSettings
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint


@pytest.mark.parametrize("key", ["", " ", "\t", "a b", " secret", "s\u00e9cret", "x\n"])
def test_a_key_that_anyone_could_send_or_nobody_can(key: str) -> None:
    """`--api-key "$UNSET" --host 0.0.0.0` must not open the server to everyone."""
    with pytest.raises(ConfigError, match="API key"):
        ServerSettings(host="0.0.0.0", api_keys=("good", key))


@pytest.mark.parametrize("line", [{"temperature": -3}, {"top_p": 7}, {"top_k": "many"}, {"eos_token_id": ["x", 5]}])
def test_wrong_defaults_of_a_checkpoint_are_named_and_left_out(line: dict[str, Any], tmp_path: Path) -> None:
    """They neither stop the server nor look like fields of each request, which sent none."""
    path = tiny_checkpoint("llama", tmp_path / "model", vocab_size=259)
    byte_tokenizer(path)
    (path / "generation_config.json").write_text(json.dumps({"top_k": 5, **line}))
    config = from_options({"model": str(path)})
    resolved, checkpoint, _ = resolve(config)
    (warning,) = resolved.warnings
    assert warning.startswith(f"generation_config.json: {next(iter(line))}")
    assert TextSide.open(checkpoint, resolved, config).default_params == ({} if "top_k" in line else {"top_k": 5})


def test_why_of_an_unknown_name() -> None:
    host = PluginHost()
    host.scan()
    with pytest.raises(UnknownName) as caught:
        explain(from_options({"model": "demo"}), host, topic="attention", why="flashinfr")
    assert "'flashinfer'" in caught.value.fix
    found = explain(from_options({"model": "demo"}), host, topic="attention", why="flashinfer")
    assert "flashinfer" in {c.name for c in found.topic("attention").candidates}
