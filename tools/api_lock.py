"""The public surface as text: names, fields and signatures of lmkit.api, hooks and libraries, in core/api.lock.json.

    python tools/api_lock.py               compare: 0 equal, 1 additions, 2 breaking changes
    python tools/api_lock.py --write       renew; refuses a break unless the interface number of the kind was raised
                                           that it concerns: of a name of lmkit.kinds.KIND that kind's, else any
                                           (breaks of libraries it takes: a plugin states which versions it works with)
    python tools/api_lock.py --since REV   what changed for plugin authors since a revision, as a section of the
                                           notes of a release; reads no more than the files of both

Whoever renews it says in CHANGELOG.md what changed: tests/rules look at the commits.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from collections.abc import Mapping
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import lmkit.api
import msgspec
from lmkit.hookspecs import hooks
from lmkit.kinds import KINDS

LOCK = Path(__file__).resolve().parents[1] / "core" / "api.lock.json"
LIBRARIES = (  # what plugins import beside lmkit.api: parts of the core, libraries, and the kits that prove them
    *("lmkit.checkpoint", "lmkit.files", "lmkit.memory", "lmkit.prompts"),
    *("lmkit_decoders", "lmkit_formats", "lmkit_http.dialect", "lmkit_killable", "lmkit_layers", "lmkit_layouts"),
    *("lmkit_testing", "lmkit_testing.host", "lmkit_testing.dists"),
)
DEFAULT = " = ..."
Surface = dict[str, Any]


def surface() -> Surface:
    """{"interfaces": ..., "names": {name: description}, "hooks": {hook: signature}, "libraries": {module: names}}"""
    interfaces = {kind.name: kind.interface for kind in KINDS}
    signatures = {name: signature(function) for name, function in sorted(hooks().items())}
    return {
        "interfaces": dict(sorted(interfaces.items())),
        "names": names_of(lmkit.api),
        "hooks": signatures,
        "libraries": {name: names_of(import_module(name)) for name in LIBRARIES},
    }


def names_of(module: ModuleType) -> Surface:
    """{name: description} of what a module offers: what `__all__` has, or else what is defined there."""
    own = [name for name, value in vars(module).items()
           if getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")]  # fmt: skip
    values = {name: getattr(module, name) for name in sorted(getattr(module, "__all__", own))}
    return {name: describe(value) for name, value in values.items() if not inspect.ismodule(value)}


def describe(value: Any) -> Surface:
    """One public name as plain data."""
    if not inspect.isclass(value):
        return {"is": "function", "signature": signature(value)} if inspect.isroutine(value) else {"is": "constant"}
    if issubclass(value, Enum):
        return {"is": "enum", "members": {m.name: m.value for m in value}}
    described: Surface = {"is": "class", "bases": [b.__name__ for b in value.__bases__ if b is not object]}
    if dataclasses.is_dataclass(value):
        described["fields"] = {f.name: _field(f.type, _has_default(f)) for f in dataclasses.fields(value)}
    elif issubclass(value, msgspec.Struct):
        required = len(value.__struct_fields__) - len(value.__struct_defaults__)
        types = _annotations(value)
        described["fields"] = {
            name: _field(types.get(name, ""), i >= required) for i, name in enumerate(value.__struct_fields__)
        }
    else:
        own = {k: v for k, v in inspect.get_annotations(value).items() if not k.startswith("_")}
        described["attributes"] = {name: _text(kind) for name, kind in own.items()}
    described["methods"] = {
        name: signature(_function(member))
        for name, member in sorted(vars(value).items())
        if not name.startswith(("_", "test_"))  # which tests a kit has is no promise
        and (inspect.isfunction(member) or isinstance(member, (classmethod, staticmethod, property)))
    }
    if issubclass(value, Exception) and "__init__" in vars(value):
        described["methods"]["__init__"] = signature(value.__init__)
    return described


def signature(function: Any) -> list[str]:
    """["self", "need: AttnNeed", "*extra: int = ...", ..., "-> Result"]"""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return []
    marks = {"keyword_only": "kw ", "var_positional": "*", "var_keyword": "**", "positional_only": "pos "}
    rows = []
    for p in found.parameters.values():
        annotation = f": {_text(p.annotation)}" if p.annotation is not p.empty else ""
        default = "" if p.default is p.empty else DEFAULT
        rows.append(f"{marks.get(p.kind.name.lower(), '')}{p.name}{annotation}{default}")
    return [*rows, f"-> {_text(found.return_annotation)}"]


def compare(old: Surface, new: Surface) -> tuple[list[str], list[str]]:
    """(breaking changes, additions), each as one line."""
    breaking: list[str] = []
    added: list[str] = []
    for section in ("names", "hooks", "libraries"):
        _compare_maps(section, old.get(section, {}), new.get(section, {}), breaking, added)
    for kind, number in old["interfaces"].items():
        if new["interfaces"].get(kind, 0) < number:
            breaking.append(f"interface of {kind}: {number} -> {new['interfaces'].get(kind)}")
    return breaking, added


def owners(line: str) -> set[str]:
    """The kinds that a breaking change concerns; none where it is of the parts that all have in common."""
    section, _, rest = line.partition(".")
    name = rest.split(".")[0].split(" ")[0].split(":")[0]
    if section == "hooks":
        return {kind.name for kind in KINDS if kind.hook == name}
    return {kind.name for kind in KINDS if section == "names" and hasattr(import_module(_file(kind)), name)
            and getattr(import_module(_file(kind)), name).__module__ == _file(kind)}  # fmt: skip


def _file(kind: Any) -> str:
    return f"lmkit.kinds.{kind.name}"


def notes(old: Surface, new: Surface) -> str:
    """A section of the notes of a release."""
    breaking, added = compare(old, new)
    before, after = old["interfaces"], new["interfaces"]
    raised = [f"{kind}: {before[kind]} -> {n}" for kind, n in after.items() if before.get(kind, n) != n]
    parts = (("Interfaces", raised), ("Breaking", breaking), ("Added", added))
    lines = [f"### {title}\n\n" + "\n".join(f"- `{line}`" for line in found) + "\n" for title, found in parts if found]
    return "## For plugin authors\n\n" + ("\n".join(lines) or "Nothing changed.\n")


def _compare_maps(path: str, old: Surface, new: Surface, breaking: list[str], added: list[str]) -> None:
    """Recursively; order counts among fields and parameters, which can be positional."""
    for name, value in old.items():
        if name not in new:
            breaking.append(f"{path}.{name} is gone")
        elif isinstance(value, Mapping) and isinstance(new[name], Mapping):
            _compare_maps(f"{path}.{name}", dict(value), dict(new[name]), breaking, added)
        elif value != new[name]:
            old_rows, new_rows = value, new[name]
            if _only_gained_optional(old_rows, new_rows):
                added.append(f"{path}.{name} has new optional parameters")
            else:
                breaking.append(f"{path}.{name}: {old_rows} -> {new_rows}")
    for name, value in new.items():
        if name not in old:
            required_field = path.endswith(".fields") and not value.endswith(DEFAULT)
            (breaking if required_field else added).append(f"{path}.{name} is new")
    if path.endswith(".fields") and [n for n in new if n in old] != list(old):
        breaking.append(f"{path}: the order changed")


def _only_gained_optional(old: Any, new: Any) -> bool:
    """Signatures: the old rows in their order, and otherwise only parameters with a default."""
    if not isinstance(old, list):
        return False
    kept = [row for row in new if row in old]
    return kept == old and all(row.endswith(DEFAULT) for row in new if row not in old)


def _field(annotation: Any, has_default: bool) -> str:
    return _text(annotation) + (DEFAULT if has_default else "")


def _function(member: Any) -> Any:
    """The function of a method, class method, static method or property."""
    return member.fget if isinstance(member, property) else inspect.unwrap(getattr(member, "__func__", member))


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _annotations(cls: type) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        found.update(inspect.get_annotations(base))
    return found


def _text(annotation: Any) -> str:
    if annotation is inspect.Signature.empty:
        return ""
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def render(found: Any, indent: int = 0) -> str:
    """JSON with one line per field and method, so that a difference reads well."""
    if not isinstance(found, dict) or not found:
        return json.dumps(found)
    pad = " " * (indent + 1)
    lines = [f"{pad}{json.dumps(key)}: {render(value, indent + 1)}" for key, value in found.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * indent + "}"


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--since"]:
        path = LOCK.relative_to(LOCK.parents[1]).as_posix()
        command = ["git", "-C", str(LOCK.parents[1]), "show", f"{arguments[1]}:{path}"]
        before = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        print(notes(json.loads(before), json.loads(LOCK.read_text())))
        return 0
    new = json.loads(render(surface()))
    if not LOCK.exists():
        LOCK.write_text(render(new) + "\n")
        print(f"wrote {LOCK.name}")
        return 0
    old = json.loads(LOCK.read_text())
    breaking, added = compare(old, new)
    for line in breaking:
        print(f"breaking: {line}")
    for line in added:
        print(f"added: {line}")
    raised = {kind for kind, number in new["interfaces"].items() if number > old["interfaces"].get(kind, 0)}
    if "--write" in arguments:
        not_raised = [line for line in breaking if not line.startswith("libraries.")
                      and not (raised & owners(line) if owners(line) else raised)]  # fmt: skip
        if not_raised:
            kinds = ", ".join(sorted(set().union(*map(owners, not_raised)))) or "the kinds concerned"
            print(f"not written: raise the interface number of {kinds}, in lmkit.kinds")
            return 2
        LOCK.write_text(render(new) + "\n")
        return 0
    if breaking:
        return 2
    if old != new:
        print("renew the lock: python tools/api_lock.py --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
