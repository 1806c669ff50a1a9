"""Files, environment, flags: precedence and provenance."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmkit.api import ConfigError, UnknownKey
from lmkit.config import Environment, from_options, gather, parse_budget, parse_size, read_environment
from lmkit.config.environment import parse_scalar
from lmkit.config.files import read_file
from lmkit.config.sizes import format_size
from lmkit.config.sources import parse_dotted

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


def test_unknown_variable_names_the_nearest() -> None:
    with pytest.raises(UnknownKey) as caught:
        read_environment({"LMKIT_ATENTION": "torch", "PATH": "/bin"})
    assert "LMKIT_ATTENTION" in caught.value.fix


def test_variables_of_a_kubernetes_service_are_not_ours() -> None:
    environ = {"LMKIT_SERVICE_HOST": "10.0.0.1", "LMKIT_PORT": "tcp://10.0.0.1:80", "LMKIT_PORT_80_TCP_PORT": "80"}
    assert read_environment(environ) == Environment()


def test_bad_variable_names_itself() -> None:
    with pytest.raises(ConfigError, match="LMKIT_CACHE__BLOCK_SIZE"):
        read_environment({"LMKIT_CACHE__BLOCK_SIZE": "many"})


def test_debug_switch() -> None:
    assert read_environment({"LMKIT_DEBUG": "1"}).debug
    assert not read_environment({"LMKIT_DEBUG": "0"}).debug
    assert not Environment().debug


def test_dotted_flags_reach_configuration_and_plugins() -> None:
    values, names = parse_dotted([("cache.block_size", "8"), ("attention.flashinfer.workspace-mb", "256")])
    assert values == {"cache.block_size": 8, "plugins.attention.flashinfer.workspace_mb": 256}
    assert names["cache.block_size"] == "--cache.block_size"


@pytest.mark.parametrize("name", ["cache.blocksize", "atention.flashinfer.x", "a.b.c.d"])
def test_wrong_dotted_flags_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        parse_dotted([(name, "1")])


def test_options_of_llm() -> None:
    config = from_options({"model": "x", "kv_memory": "1GiB", "attention.flashinfer.workspace_mb": 3})
    assert config.model.model == "x"
    assert config.cache.memory == "1GiB"
    assert config.plugins == {"attention.flashinfer": {"workspace_mb": 3}}
    with pytest.raises(UnknownKey) as caught:
        from_options({"kv_memroy": "1GiB"})
    assert "kv_memory" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("2GiB", 2 << 30), ("2GB", 2 * 10**9), ("1.5k", 1536), ("2 mib", 2 << 20), ("3iB", -1)],
)
def test_sizes(text: str, size: int) -> None:
    if size < 0:
        with pytest.raises(ConfigError):
            parse_size(text)
    else:
        assert parse_size(text) == size


def test_budgets() -> None:
    assert parse_budget("auto", 100) is None
    assert parse_budget("60%", 1000) == 600
    assert parse_budget("1k", 10) == 1024
    for bad in ("0%", "101%", "x%", "-1"):
        with pytest.raises(ConfigError):
            parse_budget(bad, 100)


def test_shown_sizes() -> None:
    assert [format_size(n) for n in (12, 1536, 3 << 30, 5 << 40)] == ["12 B", "1.50 KiB", "3.00 GiB", "5.00 TiB"]


def test_scalars() -> None:
    assert [parse_scalar(t) for t in ("1", "0.5", "true", "False", "a")] == [1, 0.5, True, False, "a"]


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
