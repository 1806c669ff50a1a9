"""Environment variables, options of LLM(...), sizes."""

from __future__ import annotations

import pytest
from lmkit.api import ConfigError, UnknownKey
from lmkit.config import Environment, from_options, parse_budget, parse_size, read_environment
from lmkit.config.environment import is_on, parse_scalar, plugin_seconds
from lmkit.config.sizes import format_size


def test_unknown_variable_names_the_nearest() -> None:
    with pytest.raises(UnknownKey) as caught:
        read_environment({"LMKIT_ATENTION": "torch", "PATH": "/bin"})
    assert "LMKIT_ATTENTION" in caught.value.fix


def test_variables_of_a_kubernetes_service_are_not_ours() -> None:
    environ = {"LMKIT_SERVICE_HOST": "10.0.0.1", "LMKIT_PORT": "tcp://10.0.0.1:80", "LMKIT_PORT_80_TCP_PORT": "80"}
    assert read_environment(environ) == Environment()


def service(name: str, address: str = "10.0.0.1", port: int = 8000) -> dict[str, str]:
    """What Kubernetes sets beside a Service (documentation of Services, "Environment variables")."""
    upper = name.upper().replace("-", "_")
    bracketed = f"[{address}]" if ":" in address else address
    url = f"tcp://{bracketed}:{port}"
    return {
        f"{upper}_SERVICE_HOST": address, f"{upper}_SERVICE_PORT": str(port), f"{upper}_SERVICE_PORT_HTTP": str(port),
        f"{upper}_PORT": url, f"{upper}_PORT_{port}_TCP": url, f"{upper}_PORT_{port}_TCP_PROTO": "tcp",
        f"{upper}_PORT_{port}_TCP_PORT": str(port), f"{upper}_PORT_{port}_TCP_ADDR": address,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["lmkit", "lmkit-embed", "lmkit-2", "lmkit-decode-a", "lmkit-sched", "lmkit-model"])
@pytest.mark.parametrize("address", ["10.0.0.1", "fd00::1"])
def test_services_of_neighbours_are_not_ours(name: str, address: str) -> None:
    assert read_environment(service(name, address)) == Environment()
    assert read_environment(service(name) | {"LMKIT_LOG_LEVEL": "debug"}).values == {"log_level": "debug"}


def test_links_of_containers_are_not_ours() -> None:
    """Legacy links of Docker: the other's name, its ports, and its own variables."""
    links = {
        "LMKIT_2_NAME": "/web/lmkit_2", "LMKIT_2_PORT": "tcp://172.17.0.5:8000",
        "LMKIT_2_PORT_8000_TCP": "tcp://172.17.0.5:8000", "LMKIT_2_PORT_8000_TCP_ADDR": "172.17.0.5",
        "LMKIT_2_PORT_8000_TCP_PORT": "8000", "LMKIT_2_PORT_8000_TCP_PROTO": "tcp",
        "LMKIT_2_ENV_LANG": "C.UTF-8", "LMKIT_ENV_PATH": "/bin", "LMKIT_NAME": "/web/lmkit",
        "LMKIT_2_PORT_8000_TCP_PORT_START": "8000", "LMKIT_2_PORT_8000_TCP_START": "tcp://172.17.0.5:8000",
    }  # fmt: skip
    assert read_environment(links) == Environment()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LMKIT_SERVER_PORT", "8000"), ("LMKIT_PORT", "8000"), ("LMKIT_SERVED_MODEL_NAME", "mine"),
        ("LMKIT_MODELNAME", "mine"), ("LMKIT_SERVICE_HOST", "example.com"), ("LMKIT_KV_CACHE", "int8"),
        ("LMKIT_SERVED_NAME", "/models/a b"), ("LMKIT_SERVICE_PORT", "http"), ("LMKIT_LOGLEVEL", "debug"),
    ],
)  # fmt: skip
def test_misspelt_variables_of_ours_are_reported(name: str, value: str) -> None:
    with pytest.raises(UnknownKey, match=name):
        read_environment({name: value})


def test_bad_variable_names_itself() -> None:
    with pytest.raises(ConfigError, match="LMKIT_CACHE__BLOCK_SIZE"):
        read_environment({"LMKIT_CACHE__BLOCK_SIZE": "many"})


def test_debug_switch() -> None:
    assert is_on("LMKIT_DEBUG", {"LMKIT_DEBUG": "1"})
    assert not any(is_on("LMKIT_DEBUG", {"LMKIT_DEBUG": text}) for text in ("", "0", "no", "False"))
    assert not is_on("LMKIT_DEBUG", {})


def test_plugins_have_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, seconds in (("0.5", 0.5), ("60", 60.0)):
        monkeypatch.setenv("LMKIT_PLUGIN_SECONDS", text)
        assert plugin_seconds() == seconds
    for text in ("", "0", "-1", "nan", "inf", "soon"):
        monkeypatch.setenv("LMKIT_PLUGIN_SECONDS", text)
        with pytest.raises(ConfigError, match="LMKIT_PLUGIN_SECONDS"):
            plugin_seconds()


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
