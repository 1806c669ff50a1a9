"""What measured kernels say of the order in which `auto` should take them, on the device that they were measured on."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec
from lmkit.api import ConfigError, DeviceInfo
from lmkit.config.environment import measured_file
from lmkit.plugins import platforms
from lmkit.plugins.host import PluginHost

from lmkit_bench.kernels import Measured

KINDS = ("attention", "op")


def ranking(measured: Iterable[Measured], names: Mapping[str, Iterable[str]]) -> dict[str, tuple[str, ...]]:
    """By kind the names that ran any case, best first.

    Cases of one kind are the same work where what follows the plugin's name is. A name's place is the geometric mean,
    over its cases, of its time and the best one's; one that ran cases that others did not is no better for that.
    `names`: those of the plugins of each kind.
    """
    times: dict[str, dict[str, dict[str, float]]] = {kind: defaultdict(dict) for kind in KINDS}
    for m in measured:
        kind, _, rest = m.case.name.partition(" ") if m.case.name.startswith("attention ") else ("op", "", m.case.name)
        name, _, work = rest.partition(" ")
        if name in names[kind]:
            times[kind][work][name] = m.seconds
    found = {}
    for kind, by_work in times.items():
        slower: dict[str, list[float]] = defaultdict(list)
        for ran in by_work.values():
            for name, seconds in ran.items() if len(ran) > 1 else ():
                slower[name].append(seconds / min(ran.values()))
        if slower:
            found[kind] = tuple(sorted(slower, key=lambda n: (statistics.geometric_mean(slower[n]), n)))
    return found


def names_of(host: PluginHost) -> dict[str, list[str]]:
    return {kind: host.names(kind) for kind in KINDS}


def save(device: DeviceInfo, found: Mapping[str, tuple[str, ...]]) -> str:
    """Writes the ranking of `device`, in place of the one before; returns the file's name. Raises ConfigError."""
    if not found:
        raise ConfigError("nothing was measured of which two could do the same", fix="leave --only out, or widen it")
    file = measured_file()
    before = platforms.measured(device)  # raises for a file that holds something else
    try:
        known = msgspec.json.decode(file.read_bytes(), type=platforms.Measured) if file.is_file() else {}
        known[f"{device.platform} {device.name}"] = {**before, **found}
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        new.write_bytes(msgspec.json.format(msgspec.json.encode(known), indent=2) + b"\n")
        new.replace(file)
    except OSError as e:
        raise ConfigError(f"cannot write {file}: {e.strerror}", fix="set LMKIT_MEASURED to a file that can be") from e
    return str(file)
