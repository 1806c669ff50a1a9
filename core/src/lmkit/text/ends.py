"""The tokens that end an answer: what a checkpoint's files name, and what its chat template itself ends a turn with.

Checkpoints often name too few: a model that was taught turns keeps the end token of the one it was made from. So the
template is asked, by rendering turns and looking at what follows them. What it also writes within a turn, between
thoughts, calls and the answer, ends none. The tokenizer is not loaded for this, only its files are read.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lmkit.api import ChatRenderer, DeclaredFormat, LmkitError
from lmkit.files import chat_templates, content_of, read_object, read_own, tokenizer_settings
from lmkit.plugins.chat_templates import chosen_template
from lmkit.prompts import shown
from lmkit.text.renderer import open_renderer
from lmkit.text.side import format_of, load_tokenizer, tokenizer_directory

if TYPE_CHECKING:
    from lmkit.api import Checkpoint, ModelInfo, ResolvedPlan
    from lmkit.contracts.config import EngineConfig

log = logging.getLogger("lmkit.text")

_ASKED, _SAID, _THEN, _THOUGHT, _ALSO = (f"lmkitprobe{i}" for i in range(5))  # texts of the probes
_IDS = ("123456789", "123456780")  # of nine characters, as some templates demand
_USER = {"role": "user", "content": _ASKED}
_NEXT = {"role": "user", "content": _THEN}
_PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "A tool", "parameters": _PARAMETERS}}]


class EndToken(NamedTuple):
    id: int
    token: str  # "" when no file says
    sources: tuple[str, ...]  # what names it

    def __str__(self) -> str:
        return f"{self.id}{f' {self.token}' if self.token else ''} ({', '.join(self.sources)})"


def find_ends(
    checkpoint: Checkpoint, plan: ResolvedPlan, config: EngineConfig, info: ModelInfo,
    ids: Mapping[str, Iterable[int]],
) -> list[EndToken]:  # fmt: skip
    """All end tokens, in the order of their ids. `ids`: those that are known already, by source; `plan`: as far as the
    parsers. What cannot be read or rendered names none; who needs it says what is wrong with it.
    """
    sources: dict[int, list[str]] = {}
    for source, named in ids.items():
        for token in named:
            sources.setdefault(token, []).append(source)
    folder = tokenizer_directory(checkpoint, config.model)
    if not sources and plan.choice("tokenizer") is not None and not (folder / "tokenizer.json").is_file():
        for token in load_tokenizer(checkpoint, plan, config).eos_token_ids:
            sources.setdefault(token, []).append("tokenizer")
    settings = tokenizer_settings(folder)
    eos = content_of(settings.get("eos_token"))
    names = _tokens(folder, settings, eos)
    found = [("tokenizer", eos)] if eos else []
    texts = {token: name for name, token in names.items()}
    known = [eos, *(texts[token] for token in sources if token in texts)]
    if info.pooler is None:
        try:
            formats = [format_of(plan, kind) for kind in ("tool_parser", "reasoning_parser")]
            renderer = _renderer(checkpoint, plan, config, folder, settings)
            if renderer is not None:
                found += [("chat template", end) for end in turn_ends(renderer, names, formats, known)]
        except LmkitError as e:
            log.debug("the chat template tells no end tokens: %s", e)
    for source, name in found:
        end = names.get(name, info.vocab_size)  # some tokenizers have more tokens than their models
        if 0 <= end < info.vocab_size and source not in sources.setdefault(end, []):
            sources[end].append(source)
    return [EndToken(token, texts.get(token, ""), tuple(named)) for token, named in sorted(sources.items())]


def _tokens(folder: Path, settings: Mapping[str, Any], eos: str) -> dict[str, int]:
    """The added tokens, and `eos`. The rest of tokenizer.json, most of it, is parsed only where `eos` must be in it."""
    entries: list[Any] = []
    file = folder / "tokenizer.json"
    text = read_own(file).decode(errors="replace") if file.is_file() else ""
    if found := re.search(r'"added_tokens"\s*:\s*(?=\[)', text):
        try:
            entries = json.JSONDecoder().raw_decode(text, found.end())[0]
        except (ValueError, RecursionError):
            entries = []
    more = settings.get("added_tokens_decoder")
    if isinstance(more, dict):
        numbered = [(str(key), e) for key, e in more.items()]
        entries += [{"id": int(n), "content": content_of(e)} for n, e in numbered if n.isdecimal() and len(n) < 10]
    else:
        entries += [{"id": n, "content": text} for text, n in read_object(folder / "added_tokens.json").items()]
    names = {
        e["content"]: e["id"] for e in reversed(entries)
        if isinstance(e, dict) and isinstance(e.get("content"), str) and isinstance(e.get("id"), int)
        and e["content"].strip()
    }  # fmt: skip
    if eos and eos not in names and json.dumps(eos, ensure_ascii=False) in text:
        try:
            vocabulary = json.loads(text)["model"]["vocab"]
            pieces = vocabulary if isinstance(vocabulary, dict) else {v[0]: i for i, v in enumerate(vocabulary)}
            names |= {eos: int(pieces[eos])}
        except (ValueError, RecursionError, LookupError, TypeError) as e:
            log.debug("the vocabulary does not have %r: %r", eos, e)
    return names


def _renderer(
    checkpoint: Checkpoint, plan: ResolvedPlan, config: EngineConfig, folder: Path, settings: Mapping[str, Any]
) -> ChatRenderer | None:
    """The renderer of the template that TextSide takes."""
    source = chosen_template(plan.choices, config.model.chat_template, checkpoint)
    source = source or chat_templates(folder).get("default") or chat_templates(checkpoint.path).get("default")
    special = {k: content_of(v) for k, v in settings.items() if k.endswith("_token") and content_of(v)}
    return open_renderer(plan, source, special, trying=True) if source else None


def turn_ends(
    renderer: ChatRenderer, names: Iterable[str], formats: Sequence[Any] = (), known: Collection[str] = ()
) -> list[str]:
    """Which of the tokens `names` stand directly behind what the assistant said, and nowhere within a turn.

    Where one of the `known` ends stands there too, it is the one: what comes before it may close the wrapper of the
    answer, or a section of calls.
    """
    names = sorted((n for n in names if n.strip()), key=len, reverse=True)
    if not names:
        return []
    token = re.compile("|".join(map(re.escape, names)))
    fmt_tokens = [f.within_turn if isinstance(f, DeclaredFormat) else f.keep_special for f in formats if f is not None]
    inside = frozenset[str]().union(*fmt_tokens)  # what a format reads belongs to the turn
    within = list(_within(renderer))
    inside = inside.union(*(token.findall(text) for text in within))
    directly = re.compile(rf"(?:\s*(?:{token.pattern}))*")
    found: list[str] = []
    for tail in answer_tails(renderer):
        behind = token.findall(tail[: directly.match(tail).end()])  # type: ignore[union-attr]  # it matches nothing, too
        found += ([name for name in behind if name in known] or [name for name in behind if name not in inside])[:1]
    ends = {*known, *found}
    if any(f is not None for f in formats) or any(_ALSO in text for text in within):
        for tail in _call_tails(renderer):
            behind = token.findall(tail)
            if ends.isdisjoint(behind):
                words = (name for name in behind if name not in inside)
                found += [name for name in words if not (name[0].isalnum() or name[-1].isalnum())][:1]
    return list(dict.fromkeys(found))


def answer_tails(renderer: ChatRenderer) -> Iterator[str]:
    """What the template writes behind an answer: up to the next message, and at the end of a conversation."""
    answer = {"role": "assistant", "content": _SAID}
    yield from _tails(renderer, [_USER, answer, _NEXT])
    yield from _tails(renderer, [_USER, answer])


def _call_tails(renderer: ChatRenderer) -> Iterator[str]:
    """What it writes behind a call: of a tool of the request, and of one that an option names as the model's own."""
    turns = [_USER, _calls(_SAID), _result(_THEN)]
    yield from _tails(renderer, turns, _TOOLS)
    for option in sorted(renderer.options):
        if "tools" in option:
            yield from _tails(renderer, turns, (), {option: ["f"]})


def _tails(
    renderer: ChatRenderer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping] = (),
    options: Mapping[str, Any] | None = None,
) -> Iterator[str]:  # fmt: skip
    text = _rendered(renderer, messages, tools, options)
    before, said, tail = text.partition(_THEN)[0].rpartition(_SAID)
    if said and _ASKED in before:
        yield tail


def _within(renderer: ChatRenderer) -> Iterator[str]:
    """What the template writes between the parts of one turn."""
    parts: list[dict[str, Any]] = [_calls(_SAID, _ALSO)]
    for field in ("content", "reasoning_content", "reasoning", "thinking"):
        parts.append({**_calls(_SAID), field: _THOUGHT})
        parts.append({"role": "assistant", "content": _SAID, field: _THOUGHT})
    for turn in parts:
        results = [_result(_THEN, i) for i in range(len(turn.get("tool_calls", ())))]
        text = _rendered(renderer, [_USER, turn, *(results or [_NEXT])], _TOOLS if results else ())
        text = text.rpartition(_ASKED)[2].partition(_THEN)[0]
        first, last = (_SAID, _ALSO) if _ALSO in text else (_THOUGHT, _SAID)
        if 0 <= text.find(first) < text.find(last):
            yield text[text.find(first) : text.find(last) + len(last)]


def _calls(*values: str) -> dict[str, Any]:
    calls = [
        {"id": id, "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": value})}}
        for id, value in zip(_IDS, values, strict=False)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(text: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": _IDS[number], "name": "f", "content": text}


def _rendered(
    renderer: ChatRenderer, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping],
    options: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    try:
        return shown(renderer.render(messages, tools, options, add_generation_prompt=False))
    except LmkitError:
        return ""
