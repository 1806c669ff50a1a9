"""`lmkit doctor --security`: processes, keys, files and plugins as a system shows them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from lmkit_cli import doctor, exposure
from lmkit_cli.exposure import examine, running
from typer.testing import CliRunner

LOOPBACK, ANY, ANY6, LOOPBACK6 = "0100007F", "00000000", "0" * 32, "0" * 24 + "01000000"
KEY = "Zk8dQ2vLw0nB5xYc7RtH3uJm9Sf1"
PUBLIC = "lmkit serve demo --host 0.0.0.0"


class System:
    """Processes under a folder, as /proc shows them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "net").mkdir()
        self._lines: dict[str, list[str]] = {"tcp": ["head"], "tcp6": ["head"]}

    def process(self, pid: int, command: str, *sockets: tuple[str, int], **environ: str) -> None:
        home = self.folder / str(pid)
        (home / "fd").mkdir(parents=True)
        (home / "cmdline").write_text("\0".join(command.split()) + "\0")
        (home / "environ").write_text("".join(f"{name}={value}\0" for name, value in environ.items()))
        for number, (address, port) in enumerate(sockets):
            inode = pid * 100 + number
            (home / "fd" / str(number)).symlink_to(f"socket:[{inode}]")
            family = "tcp6" if len(address) == 32 else "tcp"
            self._lines[family].append(f" 0: {address}:{port:04X} {'0' * 8}:0000 0A 0:0 0:0 0 0 0 {inode} 1")
        for family, lines in self._lines.items():
            (self.folder / "net" / family).write_text("\n".join(lines))

    def found(self, **environ: str) -> tuple[set[str], set[str]]:
        """Areas of warnings and of failures, without those that are of whoever runs the test."""
        levels: dict[str, set[str]] = {"warn": set(), "fail": set()}
        for finding in examine(environ, self.folder):
            if finding.level != "ok":
                levels[finding.level].add(finding.area)
                assert finding.fix, finding
        return levels["warn"] - {"user", "files", "plugins"}, levels["fail"] - {"files"}


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


@pytest.mark.parametrize(
    ("command", "address", "key", "warn", "fail"),
    [
        ("/usr/bin/python /usr/bin/lmkit serve demo", LOOPBACK, "", set(), set()),
        ("lmkit serve demo", LOOPBACK6, "", set(), set()),
        (f"python -m {PUBLIC} --insecure", ANY, "", set(), {"address"}),
        ("lmkit serve demo --host :: --insecure", ANY6, "", set(), {"address"}),
        ("lmkit split --host 0.0.0.0 --insecure", ANY, "", set(), {"address"}),
        (PUBLIC, ANY, KEY, {"address"}, set()),
        (f"{PUBLIC} --tls-cert c --tls-key k", ANY, KEY, set(), set()),
        (f"{PUBLIC} --tls-cert c --open-path /metrics", ANY, KEY, {"routes"}, set()),
        ("lmkit serve demo --api-key secret", LOOPBACK, "", {"keys"}, set()),
        ("lmkit serve demo --admin-key=secret", LOOPBACK, "", {"keys"}, set()),
        ("lmkit serve demo --cors-origin *", LOOPBACK, "", set(), {"browsers"}),
        ("lmkit serve demo --cors-origin *", LOOPBACK, KEY, set(), set()),
        ("lmkit plan demo --host 0.0.0.0", ANY, "", set(), set()),
        ("nginx serve", ANY, "", set(), set()),
    ],
)
def test_servers_of_this_machine(
    system: System, command: str, address: str, key: str, warn: set[str], fail: set[str]
) -> None:
    system.process(4242, command, (address, 8000), **({"LMKIT_API_KEY": key} if key else {}))
    assert system.found() == (warn, fail)


def test_addresses_are_read_as_the_system_writes_them(system: System) -> None:
    system.process(7, "lmkit serve", (LOOPBACK, 8000), (ANY, 80), (LOOPBACK6, 9), (ANY6, 9))
    (server,) = running(system.folder)
    assert set(server.addresses) == {"127.0.0.1:8000", "0.0.0.0:80", "[::1]:9", "[::]:9"}


@pytest.mark.parametrize(
    ("environ", "warn", "fail"),
    [
        ({}, set(), set()),
        ({"LMKIT_API_KEY": KEY}, set(), set()),
        ({"LMKIT_API_KEY": "secret"}, {"keys"}, set()),
        ({"LMKIT_API_KEY": "a" * 60}, {"keys"}, set()),
        ({"LMKIT_API_KEY": KEY, "LMKIT_ADMIN_KEY": KEY}, set(), {"keys"}),
        ({"LMKIT_API_KEY": KEY, "LMKIT_ADMIN_KEY": KEY[::-1]}, set(), set()),
    ],
)
def test_keys_of_the_environment(system: System, environ: dict[str, str], warn: set[str], fail: set[str]) -> None:
    assert system.found(**environ) == (warn, fail)


def test_no_key_is_shown(system: System) -> None:
    system.process(7, f"{PUBLIC} --api-key {KEY}", (ANY, 80), LMKIT_ADMIN_KEY=KEY)
    told = [f"{f.text} {f.fix}" for f in examine({"LMKIT_API_KEY": KEY}, system.folder)]
    assert not any(KEY in text for text in told)


@pytest.mark.parametrize(("mode", "level"), [(0o600, None), (0o644, "warn"), (0o666, "fail"), (0o620, "fail")])
def test_modes_of_files(tmp_path: Path, mode: int, level: str | None) -> None:
    token = tmp_path / "token"
    token.write_text("hf_secret")
    os.chmod(token, mode)
    found = [f for f in exposure._files({"HF_HOME": str(tmp_path)}) if str(token) in f.text]
    assert [f.level for f in found] == ([level] if level else [])
    assert all("chmod" in f.fix for f in found)


def test_plugins_of_others_that_answer_requests_are_named() -> None:
    entries = [("openai", "lmkit-dialect-openai"), ("mine", "somebodys-dialect")]
    host: Any = SimpleNamespace(
        entries=lambda kind=None: [SimpleNamespace(name=name, dist=dist, state="ok") for name, dist in entries]
    )
    told = [f for f in exposure._plugins(host) if f.level == "warn"]
    assert [f.area for f in told] == ["routes", "plugins"]
    assert all("somebodys-dialect" in f.text and "openai" not in f.text for f in told)


def test_the_command_fails_where_something_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = exposure.Finding("address", "fail", "open to all", "close it")
    monkeypatch.setattr(exposure, "examine", lambda: iter([finding]))
    app = typer.Typer()
    app.command()(doctor.command)
    result = CliRunner().invoke(app, ["--security", "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)[0]["fix"] == "close it"
