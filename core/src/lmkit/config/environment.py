"""The only module that reads the environment. Everything else gets values by argument."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lmkit.api import ConfigError, UnknownKey
from lmkit.config.schema import leaves
from lmkit.kinds import GROUPS

# Kubernetes sets these in every pod beside a service whose name begins with "lmkit", and Docker in a container that is
# linked to such a one: addresses, names, and the other's own variables behind ENV. They are not meant for us.
# Each pattern of a name goes with what such a variable holds, so that a misspelt one of ours is not taken for it.
_URL, _NUMBER, _ADDRESS = r"[a-z]+://\S+", r"\d{1,5}", r"[0-9a-fA-F.:\[\]]+|None"
FOREIGN = [
    (re.compile(rf"^LMKIT_(\w+_)?{name}$"), re.compile(value, re.IGNORECASE))
    for name, value in (
        ("SERVICE_HOST", _ADDRESS),
        (r"SERVICE_PORT(_\w+)?", _NUMBER),
        ("PORT", _URL),
        (r"PORT_\d+_(TCP|UDP|SCTP)", _URL),
        (r"PORT_\d+_(TCP|UDP|SCTP)_PROTO", "tcp|udp|sctp"),
        (r"PORT_\d+_(TCP|UDP|SCTP)_ADDR", _ADDRESS),
        (r"PORT_\d+_(TCP|UDP|SCTP)_PORT", _NUMBER),
        (r"PORT(_\d+_(TCP|UDP|SCTP))?(_PORT)?_(START|END)", rf"{_URL}|{_NUMBER}"),
        ("NAME", r"/\S+/\S+"),
        (r"ENV_\w+", ".*"),
    )
]

# Switches that are not engine configuration.
SWITCHES = {
    "LMKIT_DEBUG": "1: show stack traces",
    "LMKIT_CONFIG": "configuration file, as --config",
    "LMKIT_API_KEY": "key that clients must present, as --api-key",
    "LMKIT_ADMIN_KEY": "key that may also change the server, as --admin-key",
    "LMKIT_PLUGINS_DISABLE": "plugins never to load: kind:name, distribution, or globs, separated by commas",
    "LMKIT_PLUGINS_ONLY": "the only plugins to load",
    "LMKIT_TRACE_PLUGINS": "1: log what each plugin is imported and asked for, ahead of it, and what it answers",
    "LMKIT_STRICT_PLUGINS": "1: a broken plugin is an error, not a state",
    "LMKIT_MEASURED": "file of `lmkit bench kernels --save` (~/.cache/lmkit/measured.json)",
    "LMKIT_PLUGIN_SECONDS": "how long a plugin may take to be imported, asked or probed (30)",
}


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says: switches by name, and configuration values by dotted key with their variable."""

    switches: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)  # dotted key -> checked value
    names: Mapping[str, str] = field(default_factory=dict)  # dotted key -> variable

    def switch(self, name: str) -> str:
        assert name in SWITCHES, name
        return self.switches.get(name, "")


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Reads every LMKIT_* variable. Raises UnknownKey for one that means nothing, ConfigError for a bad value."""
    environ = os.environ if environ is None else environ
    by_env = {leaf.env: leaf for leaf in leaves().values()}
    switches: dict[str, str] = {}
    values: dict[str, object] = {}
    names: dict[str, str] = {}
    for name in sorted(n for n in environ if n.startswith("LMKIT_")):
        text = environ[name]
        if name in SWITCHES:
            switches[name] = text
        elif name in by_env:
            key = by_env[name].key
            values[key], names[key] = by_env[name].parse(text, f"environment variable {name}"), name
        elif (parts := name.removeprefix("LMKIT_").lower().split("__"))[0] in GROUPS and len(parts) == 3:
            key = "plugins." + ".".join(parts)  # LMKIT_ATTENTION__FLASHINFER__WORKSPACE_MB
            values[key], names[key] = parse_scalar(text), name
        elif not _is_foreign(name, text):
            raise UnknownKey(name, [*by_env, *SWITCHES], "the environment")
    return Environment(switches, values, names)


def _is_foreign(name: str, text: str) -> bool:
    """Whether a neighbour's service or container made this variable, which no key of ours is called."""
    return any(form.match(name) and value.fullmatch(text.strip()) for form, value in FOREIGN)


def debug() -> bool:
    """Whether stack traces are wanted; never raises, for use while another error is being shown."""
    return is_on("LMKIT_DEBUG")


def is_on(switch: str, environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get(switch, "").lower() not in ("", "0", "false", "no")


def measured_file() -> Path:
    """LMKIT_MEASURED."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("LMKIT_MEASURED") or folder / "lmkit" / "measured.json")


def plugin_seconds() -> float:
    """LMKIT_PLUGIN_SECONDS. Raises ConfigError for anything but a positive number."""
    text = os.environ.get("LMKIT_PLUGIN_SECONDS", "30")
    try:
        if 0 < (seconds := float(text)) < 1e6:
            return seconds
    except ValueError:
        pass
    raise ConfigError(f"LMKIT_PLUGIN_SECONDS is {text!r}, needs a number of seconds", fix="leave it unset: 30")


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `extra` set: what a worker is spawned with."""
    return {**os.environ, **extra}


def adopt_environment(extra: Mapping[str, str]) -> None:
    """Sets `extra` in this process, where it exists for the engine alone, as a command of ours does."""
    os.environ.update(extra)


def parse_scalar(text: str) -> object:
    """The value of an option whose type only its plugin knows: an integer, a number, true, false, or the text."""
    lowered = text.strip().lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
