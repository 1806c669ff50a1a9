"""Hooks of MkDocs: links that leave docs/ work on the site as they do in the repository.

What such a link names comes along: a README or another page of Markdown as a page, any other file as a file, both under
`repository/`. A link to a folder means its README; where there is none its text stands without a link, and a file that
does not exist is left to the strict build, which refuses it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FOLDER = "repository"
LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\](?:\([^)]*\))?)*\])\(([^)\s#]*)(#[^)\s]*)?\)")
FENCED = re.compile(r"(^(?:```|~~~).*?^(?:```|~~~)[ ]*$)", re.M | re.S)


def on_files(files: Files, config: Any) -> Files:
    """Adds what pages link to outside docs/, and what those link to."""
    pages = [DOCS / file.src_uri for file in files.documentation_pages()]
    met = set(pages)
    while pages:
        page = pages.pop()
        for target in filter(None, (found(page, link) for link in links(page))):
            if target in met or target.is_relative_to(DOCS):
                continue
            met.add(target)
            path = str(target)
            files.append(File.generated(config, uri(target), abs_src_path=path))
            if target.suffix == ".md":
                pages.append(target)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its links as they are on the site."""
    source = source_of(page.file.src_uri)
    parts = FENCED.split(markdown)
    parts[::2] = [LINK.sub(lambda match: rewritten(match, source, page.file.src_uri), part) for part in parts[::2]]
    return "".join(parts)


def rewritten(match: re.Match[str], source: Path, page: str) -> str:
    """One link of a page, seen from its place on the site."""
    text, link, anchor = match[1], match[2], match[3] or ""
    if not local(link) or (source.is_relative_to(DOCS) and not link.startswith("..")):
        return match[0]
    target = found(source, link)
    if target is not None:
        return f"{text}({os.path.relpath(uri(target), os.path.dirname(page))}{anchor})"
    return text[1:-1] if (source.parent / link).is_dir() else match[0]


def links(page: Path) -> list[str]:
    """Where a page's links lead that name files."""
    outside = "".join(FENCED.split(page.read_text(encoding="utf-8"))[::2])
    return [match[2] for match in LINK.finditer(outside) if local(match[2])]


def local(link: str) -> bool:
    return bool(link) and not re.match(r"[a-z]+:|/", link)


def found(page: Path, link: str) -> Path | None:
    """The file that a link means, or None where it means none."""
    target = (page.parent / link).resolve()
    if target.is_dir():
        target = target / "README.md"
    return target if target.is_file() and target.is_relative_to(ROOT) else None


def uri(target: Path) -> str:
    """Where a file of the repository stands on the site."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    return f"{FOLDER}/{target.relative_to(ROOT).as_posix()}"


def source_of(uri: str) -> Path:
    """The file that stands at a place of the site."""
    inside = uri.removeprefix(f"{FOLDER}/")
    return DOCS / uri if inside == uri else ROOT / inside
