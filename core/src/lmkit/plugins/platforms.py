"""Choosing the device. A broken accelerator plugin stops the start; it never turns into a slow platform in silence."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec

from lmkit.api import DeviceInfo, PlatformSpec, PluginError, Refusal, SelectionError, SelectRequest, Unavailable
from lmkit.config.environment import measured_file
from lmkit.contracts.errors import ConfigError, is_interrupt, said_by
from lmkit.plugins.host import PluginHost
from lmkit.plugins.refs import ask, load_ref
from lmkit.plugins.select import Candidate, Outcome, Wanted, evaluate, failure, parse_selection

Found = list[DeviceInfo] | Unavailable
Measured = dict[str, dict[str, tuple[str, ...]]]  # "PLATFORM NAME" of a device -> kind -> names
MODEL = re.compile(r"^\w[\w.]*$")
SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Description:
    """A device as the user writes it: "name[:model][:memory]", "cuda:9.0:80GB". What a model is, the platform knows."""

    platform: str
    model: str = ""
    total_memory: int = 0  # bytes

    @classmethod
    def parse(cls, text: str) -> Description:
        name, *parts = text.split(":")
        memory, match = 0, SIZE.match(parts[-1]) if parts else None
        if match:
            base = 1024 if match[3] else 1000
            memory = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
            parts.pop()
        if len(parts) > 1 or not re.fullmatch(r"[a-z0-9][a-z0-9_]*", name) or not all(map(MODEL.match, parts)):
            raise ConfigError(
                f"cannot read device {text!r}: it is the name of a platform, a model and a size of memory",
                fix="write NAME[:MODEL][:MEMORY], for example NAME:9.0:80GB",
            )
        return cls(name, "".join(parts), memory)


@dataclass(frozen=True, slots=True)
class Probed:
    """One platform plugin after its probe."""

    candidate: Candidate
    devices: tuple[DeviceInfo, ...] = ()
    trouble: str = ""  # why `auto` must not pass over it: broken, raised, or present but refused
    fallback: bool = False


def measured(device: DeviceInfo) -> Mapping[str, tuple[str, ...]]:
    """Kind -> names, best first, as `lmkit bench kernels --save` found them on `device`. Raises ConfigError."""
    file = measured_file()
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Measured) if file.is_file() else {}
    except (OSError, msgspec.DecodeError) as e:
        raise ConfigError(f"{file} holds no ranking: {e}", fix="remove it, or write it anew: --save") from e
    return found.get(f"{device.platform} {device.name}", {})


def choose_platform(host: PluginHost, user: str = "auto", described: str | None = None) -> tuple[Outcome, DeviceInfo]:
    """The platform and its device. Raises SelectionError with every platform's reasons."""
    outcome, probed = consider_platforms(host, user, described)
    if outcome.chosen is not None:
        return outcome, next(p.devices[0] for p in probed if p.candidate is outcome.chosen)
    fallbacks = [p.candidate.name for p in probed if p.fallback and p.candidate.ok]
    way_out = f"--platform {fallbacks[0]}" if fallbacks else ""
    if not outcome.wanted and (troubles := [p for p in probed if p.trouble]):
        text = "; ".join(f"{p.candidate.name}: {p.trouble}" for p in troubles)
        hint = "; or ".join(filter(None, [*(r.fix for p in troubles for r in p.candidate.reasons), way_out]))
        raise SelectionError(
            f"a platform plugin is in trouble, and nothing slower is used in its place: {text}",
            outcome.refused,
            fix=hint,
        )
    ready = [p.candidate.name for p in probed if p.candidate.ok and not p.fallback]
    if not outcome.wanted and len(ready) > 1:
        names = ", ".join(ready)
        raise SelectionError(
            f"several accelerators are available: {names}", outcome.refused, fix="choose: --platform NAME"
        )
    raise failure(host, outcome, None if described else lambda: consider_platforms(host)[0])


def consider_platforms(
    host: PluginHost, user: str = "auto", described: str | None = None
) -> tuple[Outcome, tuple[Probed, ...]]:
    """Probe and judge; never raises but for text that cannot be read. Without a choice, `trouble` may say why."""
    request = SelectRequest(kind="platform")
    wanted = parse_selection(user)
    if described is not None:
        description = Description.parse(described)
        if wanted and description.platform not in {w.name for w in wanted}:
            raise ConfigError(f"device {described!r} is not of platform {user!r}")
        wanted = tuple(w for w in wanted if w.name == description.platform) or (Wanted(description.platform),)
        probed = tuple(_judge(host, w, lambda spec: [_describe(spec, description)]) for w in wanted)
    elif wanted:
        probed = tuple(_judge(host, w, _probe) for w in wanted)
    else:
        probed = tuple(_judge(host, Wanted(name), _probe, explicit=False) for name in host.names("platform"))
    if wanted:
        candidates = tuple(p.candidate for p in probed)
        return Outcome(request, wanted, candidates, next((c for c in candidates if c.ok), None)), probed
    ready = [p for p in probed if p.candidate.ok]
    accelerators = [p for p in ready if not p.fallback]
    pool = accelerators or sorted(ready, key=lambda p: (-_tier(p), not p.candidate.official, p.candidate.name))
    chosen = pool[0].candidate if pool else None
    if any(p.trouble for p in probed) or len(accelerators) > 1:
        chosen = None
    candidates = tuple(sorted((p.candidate for p in probed), key=lambda c: (c is not chosen, not c.ok, c.name)))
    if chosen is not None and accelerators:  # a fallback platform is no alternative that auto would take
        beaten = Refusal("platform", "no accelerator", f"{chosen.name} is available", "")
        fallbacks = {id(p.candidate) for p in ready if p.fallback}
        candidates = tuple(replace(c, stage=6, reasons=(beaten,)) if id(c) in fallbacks else c for c in candidates)
    return Outcome(request, (), candidates, chosen), probed


def _judge(host: PluginHost, wanted: Wanted, find: Callable[[PlatformSpec], Found], explicit: bool = True) -> Probed:
    """Take one platform through the stages, with its probe as part of stage 6."""
    request = SelectRequest(kind="platform")
    before = evaluate(host, [request], wanted, explicit=explicit)
    spec = before.spec
    if not isinstance(spec, PlatformSpec):
        trouble = "" if before.stage in (1, 2) and before.version is None else "; ".join(map(str, before.reasons))
        return Probed(before, trouble=trouble)
    if any(reason.code == "experimental" for reason in before.reasons):  # nobody named it: it is not even probed
        return Probed(before)
    try:
        found = find(spec)
        if not isinstance(found, Unavailable) and not (
            found and all(isinstance(device, DeviceInfo) for device in found)
        ):
            raise PluginError(f"the probe answered {found!r}, neither devices nor Unavailable")
    except ConfigError:  # the user's description cannot be read
        raise
    except BaseException as e:
        if is_interrupt(e):
            raise
        cause = e.__cause__ if isinstance(e, PluginError) and e.__cause__ else e
        reason = Refusal("broken", "a probe that answers", said_by(cause), "lmkit plugins doctor")
        return Probed(replace(before, stage=6, reasons=(*before.reasons, reason)), (), str(reason), spec.fallback)
    if isinstance(found, Unavailable):
        reason = Refusal("platform", f"a {spec.name} device", found.reason, found.fix)
        return Probed(replace(before, stage=6, reasons=(*before.reasons, reason)), fallback=spec.fallback)
    after = evaluate(host, [replace(request, device=found[0])], wanted, explicit=True)
    trouble = "" if after.ok or spec.fallback or found[0].described else "; ".join(map(str, after.reasons))
    return Probed(after, tuple(found), trouble, spec.fallback)


def _probe(spec: PlatformSpec) -> Found:
    answer: Found = ask(spec.probe, lambda: load_ref(spec.probe, spec.name)())
    return answer


def _describe(spec: PlatformSpec, wish: Description) -> DeviceInfo:
    """The described device; the platform fills in what it knows of such a device (capability, dtypes)."""
    if spec.describe is not None:
        device: DeviceInfo = load_ref(spec.describe, spec.name)(wish.model, wish.total_memory)
        return device
    return DeviceInfo(
        platform=spec.name,
        device_type=spec.device_type,
        name=wish.model,
        total_memory=wish.total_memory,
        free_memory=wish.total_memory,
        described=True,
    )


def _tier(probed: Probed) -> int:
    return probed.candidate.spec.tier if probed.candidate.spec else 0
