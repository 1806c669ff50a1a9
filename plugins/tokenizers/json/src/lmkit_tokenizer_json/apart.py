"""A checkpoint's template and tokenizer, kept apart: what runs them is a process that may be killed.

This side holds tables only (tokens, decoder), in which no look-up can take long. Whatever a template renders or a
tokenizer encodes is done in process.py under the limits below. A request that exceeds them is refused, and
the next one finds a fresh process.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from hashlib import sha256
from pathlib import Path
from queue import Empty, LifoQueue
from threading import Lock, Thread
from typing import Any, NamedTuple

from lmkit.api import (
    ChatRenderer,
    CheckpointError,
    ConfigError,
    EngineBusy,
    ErrorInfo,
    InvalidParam,
    RequestError,
    TemplateFailed,
    Tokenizer,
    error_of,
)
from lmkit_killable import Killable, Limits, Unfinished
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from lmkit_tokenizer_json.process import UNKNOWN, pack, unpack
from lmkit_tokenizer_json.tokenizer import JsonTokenizer

log = logging.getLogger("lmkit.tokenizer.json")

_MAX_PROCESSES = min(4, max(2, os.cpu_count() or 1))
_MODULE = "lmkit_tokenizer_json.process"
_MAX_WARNINGS = 8
_PATIENCE = 0.02  # seconds that a request waits before another process is started
_WAIT = 60.0  # seconds that it waits at most
_MIB = 1 << 20
# Compiling a template, and all renderings by which its abilities are found out. The seconds are fewer than those of
# LMKIT_PLUGIN_SECONDS, as are those of a tokenizer: on a busy machine, too, what a checkpoint does is its own fault.
OPEN_TEMPLATE = Limits(3.0, 512 * _MIB, 20.0)
_OPEN_SECONDS, _TRIAL_SECONDS = 27.0, 8.0
_MAX_REFUSED = 8


def _open_limits(file_bytes: int) -> Limits:
    return Limits(10.0 + file_bytes * 2e-7, 1024 * _MIB + 64 * file_bytes, _OPEN_SECONDS)


def _render_limits(nbytes: int) -> Limits:
    """Limits of a prompt from a request of so many bytes. The sandbox's own budget (budget.py) is smaller."""
    return Limits(1.0 + nbytes * 5e-7, 512 * _MIB + 32 * nbytes, 30.0 + nbytes * 2e-6)


def _trial_limits(nbytes: int) -> Limits:
    """Limits of a rendering by which lmkit tries a template when it starts."""
    return replace(_render_limits(nbytes), seconds=_TRIAL_SECONDS)


def _encode_limits(nbytes: int) -> Limits:
    """Several times what published tokenizers take."""
    return Limits(2.0 + nbytes * 5e-6, 512 * _MIB + 256 * nbytes, 30.0 + nbytes * 2e-5)


class Apart:
    """What one tokenizer, one template, or both need of the processes, which all in this process share. Thread-safe."""

    _number = itertools.count()

    def __init__(self) -> None:
        self._name = next(self._number)
        self._opening: list[tuple[bytes, Limits]] = []  # what a process is told before it can do the others

    def open(self, limits: Limits, name: str, **options: Any) -> Any:
        """A job that is done in every process before others. Raises Unfinished, and what the job raises."""
        payload = pack([self._name, name, [], options])
        value = self._ask(payload, limits)
        self._opening.append((payload, limits))
        return value

    def ask(self, limits: Callable[[int], Limits], name: str, *args: Any, **options: Any) -> Any:
        """`limits` of the job's size. Raises Unfinished, EngineBusy, and what the job raises."""
        try:
            payload = pack([self._name, name, args, options])
        except (TypeError, ValueError, RecursionError) as e:
            raise InvalidParam("messages", f"{type(e).__name__}: {e}", "values that JSON can express") from e
        return self._ask(payload, limits(len(payload)))

    def _ask(self, payload: bytes, limits: Limits) -> Any:
        process = _pool.take(self._opening)
        try:
            try:
                answer = self._exchange(process, payload, limits)
            except Unfinished as e:
                if not e.died:
                    raise
                answer = self._exchange(process, payload, limits)  # once more: that may not have been its fault
        finally:
            _pool.give(process, self._opening)
        error, value = unpack(answer)
        if error is not None:
            raise error_of(ErrorInfo(**error))
        return value

    def _exchange(self, process: Killable, payload: bytes, limits: Limits) -> bytes:
        answer = process.ask(payload, limits)
        if answer == UNKNOWN:
            _open(process, self._opening)
            answer = process.ask(payload, limits)
        return answer


def _open(process: Killable, opening: Iterable[tuple[bytes, Limits]]) -> None:
    for payload, limits in opening:
        process.ask(payload, limits)


class _Pool:
    """The processes: one at first, more once requests wait. They end with this process."""

    def __init__(self) -> None:
        self._free: LifoQueue[Killable] = LifoQueue()
        self._num = 0
        self._lock = Lock()  # of the number

    def take(self, opening: list[tuple[bytes, Limits]]) -> Killable:
        """One that nobody else has. Another is told the `opening` when there is none. Raises EngineBusy."""
        try:
            return self._free.get(timeout=_PATIENCE if self._num else 0)
        except Empty:
            pass
        with self._lock:
            added, self._num = self._num, min(self._num + 1, _MAX_PROCESSES)
        # in one thread there is no pool of them, whose stacks would count as memory
        made = Killable(_MODULE, {"TOKENIZERS_PARALLELISM": "false"}) if added < self._num else None
        if made is not None and not added:
            return made
        if made is not None:
            self._start(made, opening)
        try:
            return self._free.get(timeout=_WAIT)
        except Empty:
            raise EngineBusy("too many texts are being prepared", fix="try again in a while") from None

    def give(self, process: Killable, opening: list[tuple[bytes, Limits]]) -> None:
        """One that was killed is replaced before anybody has to wait for that."""
        if process.running or not opening:
            self._free.put(process)
        else:
            self._start(process, opening)

    def _start(self, process: Killable, opening: list[tuple[bytes, Limits]]) -> None:
        def run() -> None:
            try:
                _open(process, list(opening))
            except Unfinished as e:  # whoever takes it tries again
                log.debug("the process for templates and tokenizers was not started: %s", e)
            self._free.put(process)

        try:
            Thread(target=run, name="lmkit-text", daemon=True).start()
        except RuntimeError:  # no more threads
            self._free.put(process)


_pool = _Pool()
_refused: dict[bytes, str] = {}  # digests of templates that took too much when they were opened: why


def _forked() -> None:
    """The pipes of a forked process are its parent's."""
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class ApartTokenizer(JsonTokenizer):
    """Encodes in another process; all else is here."""

    def __init__(self, apart: Apart, table: Mapping[str, Any]) -> None:
        self.apart = apart
        options = dict(table)
        tokens, added, decoder = (options.pop(name) for name in ("tokens", "added", "decoder"))
        remote = None if _is_safe(decoder) else self._decode
        raw = _Table(tokens, added, decoder, remote)
        super().__init__(raw, **options)  # type: ignore[arg-type]

    def encode(self, text: str, **options: Any) -> list[int]:
        return self._ask("encode", text, **options)

    def encode_marked(self, text: str, **options: Any) -> list[int]:
        return self._ask("encode_marked", text, **options)

    def encode_pair(self, first: str, second: str | None, limit: int | None = None) -> tuple[list[int], int]:
        ids, begin = self._ask("encode_pair", first, second, limit)
        return ids, begin

    @property
    def encode_inner(self) -> Callable[[str], list[int]] | None:
        """A text that cannot be encoded has no ids."""
        if super().encode_inner is None:
            return None

        def encode(text: str) -> list[int]:
            try:
                return self.encode(text, add_special=False)
            except (RequestError, EngineBusy):
                return []

        return encode

    @property
    def fold(self) -> Callable[[str], str] | None:
        """None: the template's process asks the tokenizer there."""
        return None

    def _decode(self, ids: Sequence[int]) -> str:
        return self._ask("decode", list(ids), skip_special=False)

    def _ask(self, name: str, *args: Any, **options: Any) -> Any:
        try:
            return self.apart.ask(_encode_limits, name, *args, **options)
        except Unfinished as e:
            raise _busy(e) or RequestError(
                f"the tokenizer used more than it may for this text: {e}",
                fix="send less text; when short texts fail too, the checkpoint's tokenizer.json is at fault",
            ) from e


class ApartRenderer(ChatRenderer):
    """Renders in another process."""

    def __init__(
        self, apart: Apart, source: str, special_tokens: Mapping[str, str], *, trying: bool = False, **options: Any
    ) -> None:
        """As Renderer. `trying`: once something has taken too much, all else fails at once. Raises ConfigError."""
        self.apart, self._trying = apart, trying
        self._spent: TemplateFailed | None = None
        options = {name: list(v) if isinstance(v, Iterable) and not isinstance(v, str) else v
                   for name, v in options.items()}  # fmt: skip
        given = {"source": source, "special_tokens": dict(special_tokens), **options}
        key = sha256(pack([given, *astuple(OPEN_TEMPLATE)])).digest()
        try:
            if key in _refused:  # a start opens a template several times
                raise Unfinished(_refused[key], lasting=True)
            facts = apart.open(OPEN_TEMPLATE, "open_template", **given)
        except Unfinished as e:
            if busy := _busy(e):
                raise busy from e
            _refused[key] = str(e)
            while len(_refused) > _MAX_REFUSED:
                _refused.pop(next(iter(_refused)), None)
            raise ConfigError(
                f"the chat template used more than it may when it was tried: {e}",
                fix="give another one with --chat-template FILE",
            ) from e
        except RequestError as e:
            raise ConfigError(
                f"the chat template does not compile: {e.message}", fix="give another one with --chat-template FILE"
            ) from e
        vars(self).update(facts)
        self.options, self.words = frozenset(facts["options"]), frozenset(facts["words"])
        self.control_tokens = frozenset(facts["control_tokens"])

    def render(self, messages: Sequence[Mapping[str, Any]], *args: Any, **options: Any) -> str:
        if self._spent is not None:
            raise self._spent
        try:
            return self._render(messages, *args, **options)
        except TemplateFailed as e:
            if self._trying and "more than it may" in e.message:
                self._spent = e
            raise

    def _render(self, messages: Sequence[Mapping[str, Any]], *args: Any, **options: Any) -> str:
        try:
            limits = _trial_limits if self._trying else _render_limits
            return self.apart.ask(limits, "render", messages, *args, **options)
        except Unfinished as e:
            raise _busy(e) or TemplateFailed(
                f"the chat template used more than it may for this request: {e}",
                fix="send less; when short messages fail too, the template is at fault: --chat-template FILE",
            ) from e


def open_tokenizer(
    path: Path, *, eos_token_ids: Sequence[int] = (), chat_template: str | None = None
) -> ApartTokenizer:
    """That of lmkit_tokenizer_json.tokenizer.read_tokenizer, in a process apart. Raises CheckpointError."""
    file = path / "tokenizer.json"
    limits = _open_limits(file.stat().st_size if file.is_file() else 0)
    reader = "lmkit_tokenizer_json.tokenizer:read_tokenizer"
    return open_apart(reader, path, limits, name=file, eos_token_ids=list(eos_token_ids), chat_template=chat_template)


def open_apart(reader: str, path: Path, limits: Limits, *, name: Path | None = None, **options: Any) -> ApartTokenizer:
    """A tokenizer that is read in a process apart, as other formats have it, too.

    `reader`: "module:function" of (path, **options) -> JsonTokenizer, imported there. `name`: the file, in messages.
    Raises CheckpointError.
    """
    apart, file = Apart(), name or path
    try:
        table = apart.open(limits, "open_tokenizer", reader=reader, path=str(path), **options)
    except Unfinished as e:
        raise _busy(e) or CheckpointError(
            f"{file} used more than it may when its tokenizer was loaded: {e}",
            fix="download it again, or take another checkpoint",
        ) from e
    except RequestError as e:
        raise CheckpointError(f"{file} cannot be loaded: {e.message}", fix="download it again") from e
    tokenizer = ApartTokenizer(apart, table)
    for warning in tokenizer.warnings[:_MAX_WARNINGS]:
        log.warning("%s: %s", path, warning)
    return tokenizer


def open_renderer(
    source: str, special_tokens: Mapping[str, str], *, tokenizer: Tokenizer | None = None, **options: Any
) -> ApartRenderer:
    """Target of the spec, see lmkit.api.ChatRenderer. A tokenizer of ours is asked what else spells control tokens."""
    apart = tokenizer.apart if isinstance(tokenizer, ApartTokenizer) else Apart()
    return ApartRenderer(apart, source, special_tokens, **options)


def _busy(error: Unfinished) -> EngineBusy | None:
    """When it was not the text's fault."""
    if not error.died:
        return None
    return EngineBusy(f"the process for templates and tokenizers failed: {error}", fix="try again in a while")


class _Model(NamedTuple):
    """The part that knows pieces of text: here only which of the added tokens are such, too."""

    added: Mapping[int, str]

    def id_to_token(self, token: int) -> str | None:
        return self.added.get(token)


class _Table:
    """What JsonTokenizer asks of `tokenizers.Tokenizer`, but for encoding."""

    def __init__(
        self, tokens: Sequence[str | None], added: Sequence[tuple[int, str, bool, bool]],
        decoder: Mapping[str, Any] | None,
        decode: Callable[[Sequence[int]], str] | None,
    ) -> None:  # fmt: skip
        """`added`: id, text, special, of the model too. `decode`: where the decoder itself is not to be run here."""
        self._tokens, self._decode = tokens, decode
        self._added = {i: AddedToken(text, special=special) for i, text, special, _ in added}
        self.model = _Model({i: text for i, text, _, of_model in added if of_model})
        self._ids = {token: i for i, token in enumerate(tokens) if token is not None}
        self._ids |= {token.content: i for i, token in self._added.items()}
        parts = ("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor")
        model = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
        empty: dict[str, Any] = {
            **dict.fromkeys(parts),
            "version": "1.0",
            "added_tokens": [],
            "decoder": decoder,
            "model": model,
        }
        self.decoder = RawTokenizer.from_str(json.dumps(empty)).decoder

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def get_added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        return self._added

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        return len(self._ids)

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token)

    def id_to_token(self, token: int) -> str | None:
        return self._tokens[token] if 0 <= token < len(self._tokens) else None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if skip_special_tokens:
            ids = [i for i in ids if i not in self._added or not self._added[i].special]
        if self._decode is not None:
            return self._decode(ids)
        tokens = [t for t in map(self.id_to_token, ids) if t is not None]
        return self.decoder.decode(tokens) if self.decoder is not None else " ".join(tokens)


def _is_safe(decoder: Mapping[str, Any] | None) -> bool:
    """Whether its time and its output are bounded by a multiple of the input's length."""
    kind = (decoder or {}).get("type")
    if kind == "Sequence":
        return all(map(_is_safe, (decoder or {}).get("decoders", ())))
    if kind == "Replace":
        old, new = (decoder or {})["pattern"].get("String"), (decoder or {})["content"]
        return bool(old) and len(new) <= len(old)
    return kind in (None, "ByteLevel", "ByteFallback", "Fuse", "Strip", "WordPiece", "Metaspace", "BPEDecoder", "CTC")
