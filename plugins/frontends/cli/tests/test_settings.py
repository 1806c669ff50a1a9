"""Files, environment, flags: precedence and provenance."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmkit.api import ConfigError
from lmkit.config import Environment, read_environment
from lmkit_cli.files import read_file
from lmkit_cli.settings import gather, parse_dotted

TOML = """
attention = "torch"
[cache]
block_size = 32
memory = "1GiB"
[plugins.attention.flashinfer]
workspace_mb = 128
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lmkit.toml"
    path.write_text(TOML)
    return path


def test_command_line_beats_environment_beats_file_beats_default(file: Path) -> None:
    environment = read_environment(
        {
            "LMKIT_CACHE__BLOCK_SIZE": "64",
            "LMKIT_CACHE__MEMORY": "2GiB",
            "LMKIT_ATTENTION__FLASHINFER__WORKSPACE_MB": "7",
        }
    )
    sourced = gather({"cache.memory": "3GiB"}, file, environment)
    assert sourced.config.cache.memory == "3GiB"
    assert sourced.config.cache.block_size == 64
    assert sourced.config.wants("attention") == "torch"
    assert sourced.config.plugins == {"attention.flashinfer": {"workspace_mb": 7}}
    by_key = {setting.key: setting for setting in sourced.settings()}
    assert by_key["cache.memory"].source == "command line --kv-memory"
    assert by_key["cache.block_size"].source == "environment LMKIT_CACHE__BLOCK_SIZE"
    assert by_key["attention"].source == f"file {file}"
    assert by_key["cache.prefix_cache"].source == "default"
    assert by_key["plugins.attention.flashinfer.workspace_mb"].source.startswith("environment")


def test_config_file_from_the_environment(file: Path) -> None:
    environment = read_environment({"LMKIT_CONFIG": str(file)})
    assert gather(environment=environment).config.cache.block_size == 32


def test_yaml_equals_toml(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "lmkit.yaml"
    path.write_text(
        "attention: torch\ncache: {block_size: 32, memory: 1GiB}\n"
        "plugins: {attention.flashinfer: {workspace_mb: 128}}\n"
    )
    assert read_file(path) == read_file(file)


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("a.toml", "x = ", "not valid TOML"),
        ("a.yaml", "a: [1", "not valid YAML"),
        ("a.yaml", "- 1", "top level"),
        ("a.json", "{}", "unknown kind"),
        ("a.toml", "[cache]\nblok_size = 1", "blok_size"),
    ],
)
def test_bad_files_are_errors_that_name_the_file(tmp_path: Path, name: str, text: str, word: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=word) as caught:
        read_file(path)
    assert name in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_file(tmp_path / "none.toml")


def test_dotted_flags_reach_configuration_and_plugins() -> None:
    values, names = parse_dotted([("cache.block_size", "8"), ("attention.flashinfer.workspace-mb", "256")])
    assert values == {"cache.block_size": 8, "plugins.attention.flashinfer.workspace_mb": 256}
    assert names["cache.block_size"] == "--cache.block_size"


@pytest.mark.parametrize("name", ["cache.blocksize", "atention.flashinfer.x", "a.b.c.d"])
def test_wrong_dotted_flags_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        parse_dotted([(name, "1")])


def test_plugin_switches_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lmkit.toml"
    path.write_text('[plugins]\ndisable = ["attention:toy"]\n[plugins.attention.torch]\ntile = 3\n')
    sourced = gather(file=path, environment=Environment(), official_only=True)
    assert sourced.disable == ("attention:toy",)
    assert sourced.only == ()
    assert sourced.official_only
    assert sourced.config.plugins == {"attention.torch": {"tile": 3}}
    path.write_text('[plugins]\nonly = "attention:toy"\n')
    with pytest.raises(ConfigError, match="list of patterns"):
        read_file(path)
