"""Result files: JSON with everything that is needed to judge a number later."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import lmkit
import msgspec
from lmkit.api import ConfigError

FORMAT = 1
Better = Literal["lower", "higher", "neither"]
SHOWN_VERSIONS = ("torch", "numpy", "transformers")


class Metric(msgspec.Struct):
    """Raw samples of one quantity, in the order in which they were taken."""

    unit: str
    better: Better
    samples: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)


class Machine(msgspec.Struct, frozen=True):
    """Where a result was made. Memory in bytes."""

    processor: str
    cores: int  # that this process may use
    features: tuple[str, ...]  # instruction sets that matter to kernels
    memory: int
    system: str
    python: str


class Result(msgspec.Struct):
    """One run of a benchmark."""

    kind: str  # the subcommand that made it
    title: str
    metrics: dict[str, Metric]
    machine: Machine
    versions: dict[str, str]
    commit: str  # of the source tree, "+" behind it when it had changes; "" outside a checkout
    created: str  # UTC, ISO 8601
    command: list[str]
    flags: dict[str, Any]
    details: dict[str, Any] = {}
    format: int = FORMAT


def make_result(
    kind: str,
    title: str,
    metrics: Mapping[str, Metric],
    flags: Mapping[str, Any],
    details: Mapping[str, Any] | None = None,
) -> Result:
    """A result of this process on this machine, now."""
    return Result(
        kind=kind, title=title, metrics=dict(metrics), machine=machine(), versions=versions(), commit=commit(),
        created=datetime.now(UTC).isoformat(timespec="seconds"), command=["lmkit", *sys.argv[1:]], flags=dict(flags),
        details=dict(details or {}),
    )  # fmt: skip


def write(result: Result, path: Path) -> None:
    """Raises ConfigError when the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}", fix="choose another --output") from e


def read(path: Path) -> Result:
    """Raises ConfigError naming the file when it is no result."""
    try:
        result = msgspec.json.decode(path.read_bytes(), type=Result)
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}", fix="give a file that lmkit bench wrote") from e
    except msgspec.DecodeError as e:
        raise ConfigError(f"{path} is no result of lmkit bench: {e}", fix="give a file that lmkit bench wrote") from e
    if result.format != FORMAT:
        raise ConfigError(f"{path} has result format {result.format}, this lmkit reads {FORMAT}", fix="measure again")
    return result


# ------------------------------------------------------------------------------------------------------ machine

FEATURES = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "neon", "asimd", "sve")


def machine() -> Machine:
    """Read from /proc where there is one."""
    info = dict(_cpuinfo())
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return Machine(
        processor=info.get("model name") or platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        features=tuple(name for name in FEATURES if name in flags),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
    )


def _cpuinfo() -> Iterator[tuple[str, str]]:
    """The lines of the first processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return
    for line in text.partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        yield key.strip(), value.strip()


def versions() -> dict[str, str]:
    """Installed versions of what decides speed: lmkit's dists, torch and its like."""
    found = {}
    for dist in metadata.distributions():
        name = dist.name
        if name in SHOWN_VERSIONS or name.startswith("lmkit-"):
            found[name] = dist.version
    return dict(sorted(found.items()))


def commit() -> str:
    """The commit of the checkout lmkit runs from."""
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            cwd=Path(lmkit.__file__).parent, capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()
