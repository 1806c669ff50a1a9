"""`lmkit doctor --security`: what of this machine's servers, keys, files and plugins is open, and how to close it.

Nothing is changed and nobody is asked: processes, their listening sockets and files are read from /proc and from disk.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lmkit.config import read_environment
from lmkit.config.environment import measured_file
from lmkit.plugins.catalog import catalog
from lmkit.plugins.host import PluginHost

from lmkit_cli.findings import Finding

SERVERS = ("serve", "split", "ray-serve")  # commands that listen for clients
MIN_KEY = 20  # characters; `openssl rand -hex 32` has 64
NEW_KEY = 'LMKIT_API_KEY="$(openssl rand -hex 32)"'
_LISTENING = "0A"  # of a line in /proc/net/tcp
_PORTS = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True)
class ServerProcess:
    """A process that listens for clients, as the system shows it."""

    pid: int
    words: tuple[str, ...]  # of its command line, from the command on
    addresses: tuple[str, ...]  # HOST:PORT at which it listens
    environ: Mapping[str, str] = field(default_factory=dict)  # empty where it may not be read

    def values(self, option: str) -> list[str]:
        """The values of an option that may be repeated."""
        found = [word.partition("=")[2] for word in self.words if word.startswith(option + "=")]
        pairs = zip(self.words, self.words[1:], strict=False)
        return found + [value for word, value in pairs if word == option]

    @property
    def has_key(self) -> bool:
        return bool(self.values("--api-key") or self.environ.get("LMKIT_API_KEY"))


def examine(environ: Mapping[str, str] | None = None, proc: Path = Path("/proc")) -> Iterator[Finding]:
    """All checks, in order. `environ`: None = this process's. `proc`: where the system shows its processes."""
    yield from _keys(read_environment(environ).switches)
    servers = list(running(proc))
    if not servers:
        yield Finding("servers", "ok", "no lmkit server runs here, or the system does not show it")
    for server in servers:
        yield from _server(server)
    yield from _plugins(PluginHost())
    yield from _files(os.environ if environ is None else environ)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        fix = "run servers as a user of their own who owns no files (deploy/systemd/lmkit.service does)"
        yield Finding("user", "warn", "this is the superuser: what goes wrong in a server may touch everything", fix)
    yield Finding("code", "ok", "code of checkpoints is never run, and pickled weights are never read: no option does")
    yield Finding(
        "media", "ok", "the server fetches no address that a request names; the hub is asked for checkpoints only"
    )


def _keys(switches: Mapping[str, str]) -> Iterator[Finding]:
    api, admin = switches.get("LMKIT_API_KEY", ""), switches.get("LMKIT_ADMIN_KEY", "")
    if not api:
        text = "LMKIT_API_KEY is not set: a server started here needs --api-key for any address but loopback"
        yield Finding("keys", "ok", text, NEW_KEY)
    for name, key in (("LMKIT_API_KEY", api), ("LMKIT_ADMIN_KEY", admin)):
        if key and (len(key) < MIN_KEY or len(set(key)) < 8):
            yield Finding("keys", "warn", f"{name} can be guessed: it is short or made of few characters", NEW_KEY)
        elif key:
            yield Finding("keys", "ok", f"{name} is set")
    if api and api == admin:
        fix = "choose another LMKIT_ADMIN_KEY"
        yield Finding("keys", "fail", "LMKIT_ADMIN_KEY is LMKIT_API_KEY: every client may change the server", fix)


def _server(server: ServerProcess) -> Iterator[Finding]:
    who = f"lmkit {server.words[0]} (process {server.pid})"
    for option in ("--api-key", "--admin-key"):
        if server.values(option):
            variable = "LMKIT_API_KEY" if option == "--api-key" else "LMKIT_ADMIN_KEY"
            fix = f"put it into {variable}, from a file of mode 600 (EnvironmentFile= of systemd)"
            yield Finding("keys", "warn", f"{who} has {option} among its arguments, which ps shows to everybody", fix)
    public = [address for address in server.addresses if not _is_loopback(address)]
    local = [address for address in server.addresses if _is_loopback(address)]
    if not server.addresses:
        yield Finding("address", "ok", f"{who}: where it listens is not shown, or it does not listen yet")
    if local:
        yield Finding("address", "ok", f"{who} listens at {', '.join(local)}, for this machine only")
    if public and not server.has_key:
        fix = "set LMKIT_API_KEY, or bind to 127.0.0.1 (--host), and leave out --insecure"
        yield Finding("address", "fail", f"{who} listens at {', '.join(public)}, and needs no key", fix)
    elif public:
        encrypted = server.values("--tls-cert")
        yield Finding(
            "address", "ok" if encrypted else "warn",
            f"{who} listens at {', '.join(public)}, with a key, {'with' if encrypted else 'without'} TLS",
            "" if encrypted else "keys and prompts can be read on the way: --tls-cert, or a proxy with TLS",
        )  # fmt: skip
    if "*" in server.values("--cors-origin") and not server.has_key:
        fix = "name the sites: --cors-origin https://app.example, or set a key"
        yield Finding("browsers", "fail", f"{who} answers the pages of all sites that a user of it opens", fix)
    if not server.values("--admin-key") and not server.environ.get("LMKIT_ADMIN_KEY") and server.words[0] == "serve":
        yield Finding("administrators", "ok", f"{who} has no administrator's key: nobody changes its weights")
    opened = server.values("--open-path")
    if opened and public:
        fix = "leave out --open-path, or let only scrapers reach the address"
        yield Finding("routes", "warn", f"{who} shows {', '.join(opened)} without a key", fix)


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.rpartition(":")[0].strip("[]")).is_loopback
    except ValueError:
        return False


def _plugins(host: PluginHost) -> Iterator[Finding]:
    """Plugins are code: those of others are named, and first those that answer requests."""
    known = {dist for dists in catalog().values() for dist in dists.values()}
    routes = [entry for entry in host.entries("dialect") if entry.state == "ok"]
    strange = sorted({f"{entry.name} ({entry.dist})" for entry in routes if entry.dist not in known})
    yield Finding("routes", "ok", f"routes are answered by: {', '.join(sorted({entry.name for entry in routes}))}")
    fix = "LMKIT_PLUGINS_DISABLE=DIST, or --no-plugins for those of lmkit alone; uninstall what you would not run"
    if strange:
        yield Finding("routes", "warn", f"plugins of others answer requests: {', '.join(strange)}", fix)
    dists = sorted({entry.dist for entry in host.entries() if entry.dist not in known and entry.state == "ok"})
    if dists:
        yield Finding(
            "plugins", "warn", f"plugins of others run with all rights of the server: {', '.join(dists)}", fix
        )
    else:
        yield Finding("plugins", "ok", "all plugins are lmkit's own")


def _files(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Files that say what is served, or hold what must stay secret."""
    home = Path(environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    cache = measured_file().parent
    checked = [
        (Path(environ["LMKIT_CONFIG"]), True) if environ.get("LMKIT_CONFIG") else None, (home / "token", True),
        (cache, False), (home / "hub", False),
    ]  # fmt: skip
    worst = "ok"
    for path, secret in filter(None, checked):
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
        except OSError:
            continue
        if mode & 0o022:
            worst = "fail"
            yield Finding("files", "fail", f"others may write to {path} (mode {mode:o})", f"chmod go-w {path}")
        elif secret and mode & 0o077 and _has_secret(path):
            worst = "warn"
            yield Finding("files", "warn", f"others may read the keys in {path} (mode {mode:o})", f"chmod 600 {path}")
    if worst == "ok":
        yield Finding("files", "ok", "configuration, caches and tokens are closed to others")


def _has_secret(path: Path) -> bool:
    if path.name == "token":
        return True
    try:
        return "key" in path.read_text("utf-8", "replace")[: 1 << 20]
    except OSError:
        return False


def running(proc: Path = Path("/proc")) -> Iterator[ServerProcess]:
    """The servers of lmkit on this machine, of all users whose processes the system shows."""
    inodes: dict[str, str] = {}
    for name in ("tcp", "tcp6"):
        inodes |= _listening(proc / "net" / name)
    for folder in sorted((p for p in proc.glob("[0-9]*") if p.name.isdigit()), key=lambda p: int(p.name)):
        words = _words(folder / "cmdline")
        if not words:
            continue
        variables = [pair.partition("=") for pair in _read(folder / "environ").split("\0") if "=" in pair]
        addresses = tuple(sorted({inodes[i] for i in _inodes(folder / "fd") if i in inodes}))
        yield ServerProcess(int(folder.name), words, addresses, {name: value for name, _, value in variables})


def _words(path: Path) -> tuple[str, ...]:
    """From the command on; empty for a process that is no server of ours."""
    words = [word for word in _read(path).split("\0") if word]
    for i, word in enumerate(words[:4]):
        is_lmkit = Path(word).name == "lmkit" or (word == "lmkit" and words[i - 1] == "-m")
        if is_lmkit and len(words) > i + 1 and words[i + 1] in SERVERS:
            return tuple(words[i + 1 :])
    return ()


def _listening(path: Path) -> dict[str, str]:
    """Listening sockets of a family: inode -> HOST:PORT."""
    found = {}
    for line in _read(path).splitlines()[1:]:
        parts = line.split()
        if len(parts) > 9 and parts[3] == _LISTENING:
            host, _, port = parts[1].partition(":")
            found[parts[9]] = f"{_address(host)}:{int(port, 16)}"
    return found


def _address(text: str) -> str:
    """An address of /proc/net/tcp, whose words of four bytes are in the order of the machine (little-endian here)."""
    raw = b"".join(bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8))
    address = ipaddress.ip_address(raw)
    return str(address) if address.version == 4 else f"[{address}]"


def _inodes(folder: Path) -> Iterable[str]:
    try:
        links = [os.readlink(path) for path in folder.iterdir()]
    except OSError:  # of another user, or gone
        return []
    return [found[1] for link in links if (found := _PORTS.fullmatch(link))]


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
