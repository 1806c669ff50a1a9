"""The data stages of selection (5 to 8): pure functions from a spec and a request to refusals, cheapest first."""

from __future__ import annotations

from collections.abc import Callable

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lmkit.api import Refusal, SelectRequest, Spec
from lmkit.kinds import BY_NAME, Claim, Refusals, listed
from lmkit.plugins.catalog import folders, install


def requirements(spec: Spec, installed_version: Callable[[str], str | None]) -> Refusals:
    """Stage 5: `requires`, from the metadata of installed dists."""
    for text in spec.requires:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        version = installed_version(requirement.name)
        own = canonicalize_name(requirement.name)
        fix = install(own) if own in folders() else f'pip install "{text}"'
        if version is None:
            yield Refusal("requirement-missing", text, "not installed", fix)
        elif not requirement.specifier.contains(version, prereleases=True):
            yield Refusal("requirement-version", text, version, fix)


def platform(spec: Spec, request: SelectRequest) -> Refusals:
    """Stage 6: platform and capability of the device. A request without a device passes."""
    device = request.device
    if device is None:
        return
    if "*" not in spec.platforms and device.platform not in spec.platforms:
        yield Refusal("platform", listed(spec.platforms), device.platform)
    elif spec.capability is not None:
        if device.capability is None:
            yield Refusal("capability", str(spec.capability), "a device without one")
        elif device.capability not in spec.capability:
            major, minor = device.capability
            yield Refusal("capability", str(spec.capability), f"{major}.{minor}")


def features(spec: Spec, request: SelectRequest) -> Refusals:
    """Stage 8: what the request needs and the spec does not declare. A spec without a features field declares none."""
    declared: frozenset[str] = getattr(spec, "features", frozenset())
    lacking = BY_NAME[request.kind].lacking
    for name in sorted(request.needed() - declared):
        offered = f"a plugin with {listed(declared)}" if declared else "a plugin that declares no features"
        yield Refusal("feature", f"{name}: {lacking[name]}" if name in lacking else name, offered)


def data_refusals(
    spec: Spec, request: SelectRequest, installed_version: Callable[[str], str | None], explicit: bool
) -> list[tuple[int, Refusal]]:
    """(stage, refusal) of stages 5 to 8, all of them."""
    kind = BY_NAME[request.kind]
    found = [(5, r) for r in requirements(spec, installed_version)]
    found += [(6, r) for r in platform(spec, request)]
    found += [(7, r) for r in kind.refusals(spec, request)]
    if not explicit:
        found += [(7, r) for r in kind.auto_refusals(spec, request)]
    found += [(8, r) for r in features(spec, request)]
    if not explicit and spec.stability == "experimental":
        found.append((8, Refusal("experimental", "to be named explicitly", "auto", f"name {spec.name} to use it")))
    return found


def claim_of(spec: Spec | None, request: SelectRequest) -> Claim | None:
    """Why `auto` prefers a candidate, as its kind says."""
    return None if spec is None else BY_NAME[request.kind].claim(spec, request)
