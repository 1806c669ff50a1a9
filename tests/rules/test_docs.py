"""Pages say what is so: links lead somewhere, the site has every page, and what commands print is what they print."""

from __future__ import annotations

import inspect
import re
import sys
from importlib import import_module
from pathlib import Path

import lmkit_cli
import pytest
import yaml
from lmkit.plugins.codes import CODES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
READMES = [ROOT / "README.md", ROOT / "tests" / "README.md", *sorted(ROOT.glob("plugins/*/*/README.md"))]
FENCED = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
CONSOLE = re.compile(r"^```console\n\$ lmkit (.*?)\n(.*?)^```", re.M | re.S)
BLOCKS = [(page.name, *match.groups()) for page in PAGES for match in CONSOLE.finditer(page.read_text("utf-8"))]

sys.path.insert(0, str(ROOT / "tools"))
import api_lock  # noqa: E402
import sync  # noqa: E402

sys.path.remove(str(ROOT / "tools"))


def anchors(page: Path) -> set[str]:
    """What a link may say behind `#`: the headings, as GitHub and the site write them."""
    heads = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text("utf-8")), re.M)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", head).replace("`", "").strip().lower() for head in heads)
    return {re.sub(r"[^\w\- ]", "", head).replace(" ", "-") for head in plain}


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCED.sub("", page.read_text("utf-8"))):
        path, _, anchor = link.partition("#")
        if re.match("[a-z]+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_site_has_every_page_once() -> None:
    def files(part: object) -> list[str]:
        if isinstance(part, str):
            return [part]
        return [file for inner in (part.values() if isinstance(part, dict) else part) for file in files(inner)]  # type: ignore[attr-defined]

    nav = files(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    assert sorted(nav) == sorted(page.relative_to(DOCS).as_posix() for page in PAGES)


def test_every_refusal_code_has_a_fix() -> None:
    assert set(sync.FIXES) == set(CODES)
    assert all(sync.FIXES.values())


@pytest.mark.parametrize(("page", "command", "shown"), BLOCKS, ids=[f"{name} {command}" for name, command, _ in BLOCKS])
def test_commands_print_what_pages_show(
    page: str,
    command: str,
    shown: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    lmkit_cli.run(command.split())
    printed = "".join(capsys.readouterr()).splitlines()
    for line in shown.splitlines():
        assert line == "..." or line.rstrip() in [said.rstrip() for said in printed], f"{line!r} in {printed}"


def test_pages_with_commands_are_found() -> None:
    assert {name for name, _, _ in BLOCKS} >= {"troubleshooting.md", "tools.md"}


@pytest.mark.parametrize("module", ["lmkit", "lmkit.api", *api_lock.LIBRARIES])
def test_help_of_what_is_public(module: str) -> None:
    """`dir()` has each name, and each class and function says what it is."""
    package = import_module(module)
    names = set(getattr(package, "__all__", api_lock.names_of(package)))
    assert names <= set(dir(package))
    assert package.__doc__
    for name in names:
        value = getattr(package, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            text = value.__doc__ or ""
            assert text.strip(), f"{name} has no docstring"
            assert not text.startswith(f"{name}("), f"{name} has the docstring that dataclasses make"
